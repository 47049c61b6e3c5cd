"""The same code with the same number of threads gives the same numbers, bit for bit."""

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest

from spingrad_lab.experiments import EXPERIMENTS
from spingrad_lab.provenance import versions
from spingrad_lab.runs import Lab, current_lines

# torch_geometric compiles a few functions with the deprecated torch.jit when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

ROOT = Path(__file__).parents[2]
TIMED = {"runtime"}
"""Experiments that measure nothing but time."""
COSTLY = {"cifar", "fashion", "mnist", "pubmed-raw", "regimes", "rounding", "solve-quality", "step"}
COSTLY |= {"equal-terms", "horizons", "qpu-time", "twenty-epochs"}
"""Experiments whose quick runs take longest, and whose tasks and methods are those of others."""
NAMES = [
    pytest.param(name, marks=pytest.mark.long if name in COSTLY else pytest.mark.slow)
    for name in EXPERIMENTS
    if name not in TIMED
]


def measured(line):
    """What a run measured, as text, without times."""
    kept = {name: value for name, value in line.metrics.items() if "seconds" not in name}
    return json.dumps(kept, sort_keys=True)


class FirstJobs(Lab):
    """Notes the first jobs that an experiment asks for."""

    def run(self, jobs, label="runs"):
        self.jobs = [{**job, "quick": self.quick} for job in jobs]
        raise StopIteration


def some_jobs(name, folder):
    """The first quick job of an experiment, and the last of its first stage, as a rule of another method."""
    lab = FirstJobs(name, EXPERIMENTS[name], folder, quick=True, seeds=1)
    with pytest.raises(StopIteration):
        lab.experiment.plan(lab)
    return [lab.jobs[0], lab.jobs[-1]] if len(lab.jobs) > 1 else lab.jobs


def computed(name, jobs, folder, workers):
    lines = Lab(name, EXPERIMENTS[name], folder, quick=True, workers=workers)._compute(jobs)
    return {json.dumps(line.job): measured(line) for line in lines}


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_repeats_in_another_process(name, data_folder, tmp_path):
    jobs = some_jobs(name, tmp_path)
    here = computed(name, jobs, tmp_path, workers=0)
    jobs *= 2 if len(jobs) == 1 else 1  # a single job would be computed here again
    assert computed(name, jobs, tmp_path, workers=2) == here


@cache
def same_code(commit):
    """Whether the code of a commit is that of this checkout."""
    command = ["git", "-C", str(ROOT), "diff", "--quiet", commit, "--", "src", "lab/src"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in TIMED])
def test_committed_lines_of_this_code_repeat(name, data_folder, tmp_path):
    lines, _ = current_lines(ROOT / "lab" / "results" / f"{name}.jsonl", EXPERIMENTS[name])
    lines = [line for line in lines if line.versions == versions() and same_code(line.commit)]
    cheapest = sorted(lines, key=lambda line: line.seconds)[:3]
    if not cheapest:
        pytest.skip(f"no line of {name} was computed by the code of this checkout with these packages")
    expected = {json.dumps(line.job): measured(line) for line in cheapest}
    assert computed(name, [line.job for line in cheapest], tmp_path, workers=2) == expected
