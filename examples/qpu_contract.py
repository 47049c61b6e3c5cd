"""Checks spingrad's assumptions about D-Wave's service against the service itself.

    pip install ".[qpu]"
    python examples/qpu_contract.py                              # the emulator, which has these assumptions
    python examples/qpu_contract.py --real --out contract.json   # the QPU of your D-Wave configuration

The documentation of the service leaves some questions open, and the emulator answers them by assumption.
This script asks each question with at most one small job. All jobs together take less than a second of QPU
time, which the script's own budget enforces. It shows the plan first, and with --real it sends nothing until
you agree. The last column says whether the service does what spingrad relies on; if not, the exit status
is 1.
"""

import argparse
import base64
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spingrad.qpu import Journal, QPUService, QPUSolver, ServiceError, StepError
from spingrad.qpu.calls import calls_for
from spingrad.qpu.chip import Chip
from spingrad.qpu.journal import MICRO, Attempt
from spingrad.qpu.packing import Programmed
from spingrad.qpu.service import _loaded
from spingrad.solvers import ExactSolver
from spingrad.testing import random_problem
from spingrad.testing.sapi import Sapi

BUDGET = 1.0  # seconds of QPU time
FINAL = ("COMPLETED", "FAILED", "CANCELLED")
PROPERTIES = (
    "h_range",
    "extended_j_range",
    "num_reads_range",
    "problem_run_duration_range",
    "problem_timing_data",
)
STEP = [(16, 4), (4, 4), (4, 2)]  # inputs and units of each layer
READS = 100


@dataclass(frozen=True)
class Finding:
    """An answer of the service; ``holds`` is ``None`` if nothing depends on it."""

    question: str
    assumed: str
    found: str
    holds: bool | None


def star(chip: Chip, total: float) -> Programmed:
    """A qubit and all its neighbours; its couplings add up to ``total``."""
    centre = int(np.bincount(chip.couplers.ravel()).argmax())
    touching = chip.couplers[(chip.couplers == centre).any(1)]
    qubits = np.unique(touching)
    between = chip.couplers[np.isin(chip.couplers, qubits).all(1)]
    J = np.where((between == centre).any(1), total / len(touching), 0.0)
    return Programmed(qubits, np.zeros(len(qubits)), np.searchsorted(qubits, between), J)


class Contract:
    """The questions and the findings; the cost of every job is reserved in the journal before it is sent."""

    def __init__(self, service: QPUService, path: Path) -> None:
        self.service, self.path = service, path
        self.findings: list[Finding] = []
        properties = service.chip.properties
        ranges = properties.get("per_qubit_coupling_range") or properties.get("per_group_coupling_range")
        self.lowest = float((ranges or properties["j_range"])[0])  # limit of the sum of a qubit's couplings
        self.problem = star(service.chip, 0.5 * self.lowest)

    def cost_us(self, num_reads: int) -> float:
        return self.service.chip.access_time(len(self.problem.qubits), num_reads=num_reads)

    def plan(self) -> list[tuple[str, float]]:
        """Every job that may be charged, and its seconds of QPU time."""
        sizes = [inputs for inputs, units in STEP for _ in range(units)]
        step = sum(call.cost_us() for call in calls_for(self.service.chip, sizes, READS))
        jobs = {
            f"a step of 16-4-4-2, {READS} samples per unit": step,
            f"a job with a histogram, {READS} reads": self.cost_us(READS),
            "a job with raw answers, 10 reads": self.cost_us(10),
            "a job that is cancelled": self.cost_us(1),
            "six jobs that should be refused, if they run": 6 * self.cost_us(1),
        }
        return [(name, cost * MICRO) for name, cost in jobs.items()]

    def run(self) -> None:
        self._definition()
        self._try(self._packed_step)
        self.journal = Journal(self.path, BUDGET)
        with closing(self.journal):
            for part in (self._histogram, self._raw, self._cancelled, self._refusals):
                self._try(part)

    def _try(self, part: Callable[[], None]) -> None:
        """Ask one group of questions; a failure is a finding too, and the next group is asked anyway."""
        try:
            part()
        except (ServiceError, StepError) as error:
            self._note(f"{part.__name__.strip('_')}: could it be asked?", "yes", str(error), False)

    def _note(self, question: str, assumed: str, found: str, holds: bool | None) -> None:
        self.findings.append(Finding(question, assumed, found, holds))

    def _expect(self, question: str, holds: bool, assumed: str = "yes", other: str = "no") -> None:
        self._note(question, assumed, assumed if holds else other, holds)

    def _definition(self) -> None:
        properties = self.service.chip.properties
        missing = [name for name in PROPERTIES if not properties.get(name)]
        if not any(f"per_{part}_coupling_range" in properties for part in ("qubit", "group")):
            missing.append("a range for the sum of a qubit's couplings")
        self._expect("are all properties there that plans need?", not missing, other=f"not {missing}")
        self._expect("does the working graph have a name?", bool(self.service.chip.graph_id))

    def _packed_step(self) -> None:
        """A step as in training, which uses the full ranges without auto_scale."""
        problems = [random_problem(30, n, m, seed) for seed, (n, m) in enumerate(STEP)]
        with QPUSolver(self.path, BUDGET, service=self.service, num_reads=READS) as solver:
            solutions = solver.solve_all(problems)
        self._expect("does a step run that uses the full ranges?", True)
        best = [ExactSolver().solve(problem).energy for problem in problems]
        near = [s.energy <= b + 1e-4 * b.abs() for s, b in zip(solutions, best, strict=True)]
        breaks = float(solutions[0].info["chain_breaks"].mean())
        found = f"{sum(int(n.sum()) for n in near)} of {sum(len(n) for n in near)}"
        self._note("how many of its units were solved to the optimum?", "", found, None)
        self._note("how many chains of its 16-spin units broke?", "", f"{100 * breaks:.2f} %", None)

    def _histogram(self) -> None:
        service, problem = self.service, self.problem
        attempt, job = self._submit(READS, answer_mode="histogram")
        begin = time.monotonic()
        while job not in self._listed(attempt.label) and time.monotonic() < begin + 10:
            time.sleep(0.25)
        waited = time.monotonic() - begin
        self._expect("is a job found by its label at once?", waited < 0.25, other=f"after {waited:.2f} s")
        part = job in self._listed(attempt.label[:-2])
        self._note("is it found by part of its label?", "no", "yes" if part else "no", None)
        begin = time.monotonic()
        state = service.status(job, wait=5).state
        waited = time.monotonic() - begin
        self._expect(
            "does a long poll wait for the end of a job?",
            state in FINAL or waited > 4,
            other=f"{state} after {waited:.2f} s",
        )
        self._wait(job)
        self._expect("is a label kept as it was sent?", service.status(job).label == attempt.label)
        answer = service.answer(job, problem, READS)
        self.journal.answered(attempt, answer)
        self._expect("does a histogram pass every check?", True)
        ordered = (np.diff(problem.energies(answer.spins)) > -1e-9).all()
        self._note("does it come in order of energy?", "yes", "yes" if ordered else "no", None)
        again = service.answer(job, problem, READS)
        self._expect("is an answer the same when fetched again?", np.array_equal(again.spins, answer.spins))
        self._expect("do the parts of its time add up to the charge?", answer.charged_us is not None)
        model, charged = self.cost_us(READS), answer.charged_us or float("nan")
        self._note(
            "what is charged, against D-Wave's model?",
            f"{model:,.0f} µs, within 10 %",
            f"{charged:,.0f} µs",
            abs(charged - model) < 0.1 * model,
        )

    def _raw(self) -> None:
        attempt, job = self._submit(10, answer_mode="raw")
        self._settle(attempt, job)
        answer = self._raw_answer(job)
        rows = len(base64.b64decode(answer["energies"])) // 8
        self._note("how many samples are in a raw answer to 10 reads?", "10", str(rows), None)
        counted = answer.get("num_occurrences") is not None
        self._note("does a raw answer count occurrences?", "no", "yes" if counted else "no", None)

    def _cancelled(self) -> None:
        attempt, job = self._submit(1)
        self.service.cancel(job)
        state = self._settle(attempt, job)
        self._note("what becomes of a job cancelled at once?", "CANCELLED", state, None)
        usage = f"see your account: is it {self.cost_us(1):,.0f} µs above the sum below?"
        self._note("is a cancelled job free?", "yes", "it ran first" if state == "COMPLETED" else usage, None)

    def _refusals(self) -> None:
        chip, problem = self.service.chip, self.problem
        loud = problem._replace(h=np.full_like(problem.h, 1.01 * chip.properties["h_range"][1]))
        self._refused("a bias out of range", loud)
        self._refused("couplings far out of a qubit's range", star(chip, 4 * self.lowest))
        if "per_group_coupling_range" in chip.properties:
            self._refused("a qubit at 1.5 times its groups' range", star(chip, 1.5 * self.lowest), "taken")
        self._refused("an unknown parameter", problem, spingrad_contract=1)
        self._refused("no reads", problem, num_reads=0)
        if chip.graph_id:
            self._refused("another working graph", problem, chip=replace(chip, graph_id="another"))

    def _refused(self, what: str, problem: Programmed, assumed: str = "refused", **options: Any) -> None:
        try:
            attempt, job = self._submit(options.pop("num_reads", 1), problem, **options)
            found = "taken" if self._settle(attempt, job) == "COMPLETED" else "failed"
        except ServiceError as error:
            if not error.refused:
                raise
            found = f"refused: {error}"
        holds = found.startswith(assumed) if assumed == "refused" else None
        self._note(f"what becomes of {what}?", assumed, found, holds)

    def _submit(
        self, num_reads: int, problem: Programmed | None = None, chip: Chip | None = None, **params: Any
    ) -> tuple[Attempt, str]:
        key, cost = f"contract-{len(self.journal.attempts)}", self.cost_us(max(num_reads, 1))
        attempt = self.journal.reserve(key, cost, fingerprint=[])
        params = {"num_reads": num_reads, "auto_scale": False} | params
        try:
            job = self.service.submit(
                problem or self.problem, chip or self.service.chip, attempt.label, params
            )
        except ServiceError as error:
            if error.refused:
                self.journal.voided(attempt, str(error))
            raise
        self.journal.accepted(attempt, job)
        return attempt, job

    def _settle(self, attempt: Attempt, job: str) -> str:
        """Wait for a job and record its end in the journal; its state."""
        state = self._wait(job)
        if state != "COMPLETED":
            self.journal.voided(attempt, state)
        return state

    def _wait(self, job: str) -> str:
        until = time.monotonic() + 600
        while time.monotonic() < until:
            state = self.service.status(job, wait=20).state
            if state in FINAL:
                return state
            time.sleep(0.25)
        raise ServiceError(f"job {job} did not end within ten minutes")

    # The public methods of the service hide what these two look at.
    def _listed(self, label: str) -> list[str]:
        jobs = self.service._ask("Problems", lambda api: api.list_problems(label=label), 60.0)
        return [str(job.id) for job in jobs]

    def _raw_answer(self, job: str) -> dict[str, Any]:
        return dict(self.service._ask("Problems", lambda api: _loaded(api, job), 60.0)["answer"])


def show(findings: list[Finding]) -> None:
    marks = {True: "holds", False: "DIFFERS", None: ""}
    table = [("question", "assumed", "found", "")]
    table += [(f.question, f.assumed, f.found, marks[f.holds]) for f in findings]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def agreed() -> bool:
    try:
        return input("Go on? [y/N] ").lower() == "y"
    except EOFError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the QPU of your D-Wave configuration")
    parser.add_argument("--yes", action="store_true", help="do not ask before QPU time is charged")
    parser.add_argument("--out", type=Path, help="write the findings to this JSON file")
    parser.add_argument("--topology", choices=["pegasus", "zephyr"], default="zephyr", help="of the emulator")
    parser.add_argument("--size", type=int, help="of the emulated chip; default: full size")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.real:
            service = QPUService()
        else:
            sapi = stack.enter_context(Sapi(args.topology, args.size, queue_seconds=0.2))
            stack.enter_context(sapi.configured())  # only in this process
            service = QPUService(sapi.solver_name)
        contract = Contract(service, folder / "contract.journal")
        jobs = contract.plan()
        total = sum(seconds for _, seconds in jobs)
        for name, seconds in [*jobs, ("in total, at most", total)]:
            print(f"{name:45} {seconds:.4f} s of QPU time")
        if total > BUDGET:
            sys.exit(f"more than {BUDGET:g} s: nothing was sent")
        if args.real and not args.yes and not agreed():
            sys.exit("nothing was sent")
        contract.run()
        spent = Journal(contract.path, read_only=True).spent_us * MICRO
    show(contract.findings)
    differs = sum(finding.holds is False for finding in contract.findings)
    print(f"{spent:.4f} s of QPU time; {differs} answers differ from the assumptions")
    if args.out:
        report = {
            "solver": service.solver,
            "qpu_seconds": spent,
            "findings": [asdict(f) for f in contract.findings],
        }
        args.out.write_text(json.dumps(report, indent=1))
    if differs:
        sys.exit(1)


if __name__ == "__main__":
    main()
