"""What the paper says of sizes and QPU time, against plans for chips without defects."""

from typing import Any

import pandas as pd

from spingrad.qpu import Chip, plan
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab

DIGITS, GRAPH = "16-4-2", "10-10-7"
STEPS = 500
"""Of a run on the digits: 20 epochs of 25 batches (ours: the paper gives neither)."""


class Plans(Experiment):
    """The networks that the paper sends to a chip, and the one that it says is too large for it."""

    title = "Sizes and QPU time, planned"
    source = "section 4.3, and appendix, runtime analysis"

    def plan(self, lab: Lab) -> None:
        lab.run([{"widths": widths, "num_reads": 100} for widths in (DIGITS, GRAPH)])

    def compute(self, job: Job) -> dict[str, Any]:
        widths = [int(width) for width in job["widths"].split("-")]
        found = plan(widths, 1, STEPS, chip=Chip.ideal("pegasus"), num_reads=job["num_reads"])
        copies = len(found.calls[0].units) // len(set(found.calls[0].units))
        times = {name: round(getattr(found, f"{name}_seconds"), 5) for name in ("step", "one_by_one")}
        return {"calls": len(found.calls), "qubits": found.qubits, "copies": copies, **times}

    def show(self, runs: pd.DataFrame) -> Section:
        rows = [
            [
                run["widths"],
                *(f"{run[key]:,}" for key in ("calls", "qubits", "copies")),
                f"{STEPS * run['step']:.1f}",
                f"{STEPS * run['one_by_one']:.1f}",
            ]
            for _, run in runs.iterrows()
        ]
        header = ["network", "calls per step", "qubits", "copies of each unit"]
        header += [f"QPU seconds of {STEPS} steps", "… if sent unit by unit"]
        caption = "100 samples of each unit, on a Pegasus chip like Advantage, without defects"
        return Section([_NOTE], [Table(header, rows, caption)])


_NOTE = (
    "QPU time is that of D-Wave's published timing model. The paper sends units one by one. An ideal chip "
    "has all its qubits; a real one lacks some."
)
PLANS = Plans()
