import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spingrad import QPSBGD
from spingrad_lab import provenance
from spingrad_lab.experiments import BENCHMARKS, EXPERIMENTS
from spingrad_lab.methods import METHODS, grid
from spingrad_lab.paper.small import ADULT_SMALL
from spingrad_lab.provenance import REVISIONS, fingerprint, revision
from spingrad_lab.report.sections import Section
from spingrad_lab.runs import Experiment, Lab, append_line, current_lines, read_lines

RESULTS = Path(__file__).parents[1] / "results"


class Sums(Experiment):
    title, source = "Sums", "nowhere"

    def plan(self, lab):
        lab.run([{"method": method, "seed": 0} for method in ("ours", "theirs")])

    def compute(self, job):
        return {"sum": 1}

    def show(self, runs):
        return Section()


def run_sums(folder):
    lab = Lab("sums", Sums(), folder, workers=0)
    lab.experiment.plan(lab)
    return lab.path


def test_a_new_revision_of_a_method_is_computed_again_and_shown_alone(tmp_path, monkeypatch):
    path = run_sums(tmp_path)
    monkeypatch.setitem(REVISIONS, ("ours",), 2)
    assert [line.job["method"] for line in current_lines(path, Sums())[0]] == ["theirs"]
    run_sums(tmp_path)
    assert [(line.job["method"], line.revision) for line in read_lines(path)] == [
        ("ours", 1),
        ("theirs", 1),
        ("ours", 2),
    ]
    lines, outdated = current_lines(path, Sums())
    assert [(line.job["method"], line.revision) for line in lines] == [("theirs", 1), ("ours", 2)]
    assert outdated == 1


def test_a_new_revision_of_an_experiment_outdates_all_of_its_lines(tmp_path, monkeypatch):
    path = run_sums(tmp_path)
    monkeypatch.setattr(Sums, "revision", 2)
    assert current_lines(path, Sums()) == ([], 2)


def test_of_two_lines_of_one_job_the_last_one_counts(tmp_path):
    path = run_sums(tmp_path)
    first = read_lines(path)[0]
    append_line(path, replace(first, metrics={"sum": 5}))
    lines, outdated = current_lines(path, Sums())
    assert [line.metrics["sum"] for line in lines] == [5, 1]
    assert outdated == 0


def test_revisions_belong_to_names_that_jobs_have():
    jobs = [line.job for path in RESULTS.rglob("*.jsonl") for line in read_lines(path)]
    names = [{value for value in job.values() if isinstance(value, str)} for job in jobs]
    assert not [together for together in REVISIONS if not any(own.issuperset(together) for own in names)]


def test_the_default_step_is_the_one_of_its_revision():
    step = inspect.signature(QPSBGD).parameters
    names = ("rows", "target_rms", "momentum", "whitening", "rank", "clamp")
    assert [step[name].default for name in names] == ["uniform", "auto", 0.9, 0.0, 16, 1.0], (
        "QPSBGD has other defaults: raise the revision of every method in REVISIONS that uses them, so that "
        "lines of the old default are not shown as the new one, and then change this test"
    )


def test_settings_decide_the_fingerprint_and_texts_do_not():
    own = fingerprint(ADULT_SMALL)
    assert fingerprint(replace(ADULT_SMALL, title="x", notes=("y",))) == own
    assert fingerprint(replace(ADULT_SMALL, seeds=3)) != own
    assert fingerprint(replace(ADULT_SMALL, trials={"Bop": grid(lr=(1,))})) != own


def test_the_settings_of_methods_and_tasks_are_part_of_the_fingerprint(monkeypatch):
    own = fingerprint(ADULT_SMALL)
    monkeypatch.setitem(METHODS, "Bop", replace(METHODS["Bop"], trials=grid(lr=(1,))))
    changed = fingerprint(ADULT_SMALL)
    assert changed != own
    (task,) = ADULT_SMALL.tasks.values()
    monkeypatch.setattr(task, "epochs", 99)
    assert fingerprint(ADULT_SMALL) not in (own, changed)


def test_a_fingerprint_is_the_same_in_every_process():
    code = "from spingrad_lab.experiments import *; from spingrad_lab.provenance import *;" + (
        "print(*(fingerprint(own) for own in (*EXPERIMENTS.values(), *BENCHMARKS.values())))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.split() == [fingerprint(own) for own in (*EXPERIMENTS.values(), *BENCHMARKS.values())]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small checkout with the files of a library and a lab, which the module takes for its own."""
    root = tmp_path / "checkout"
    for name in ("src/spingrad/__init__.py", "lab/src/spingrad_lab/provenance.py", "README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    monkeypatch.setattr(provenance.spingrad, "__file__", str(root / "src/spingrad/__init__.py"))
    monkeypatch.setattr(provenance, "__file__", str(root / "lab/src/spingrad_lab/provenance.py"))
    yield root
    provenance.commit.cache_clear()


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def found_commit():
    provenance.commit.cache_clear()
    return provenance.commit()


def test_a_commit_is_marked_as_changed_only_by_the_code(checkout):
    git(checkout, "init")
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "All")
    head = git(checkout, "rev-parse", "HEAD")[:10]
    assert found_commit() == head
    (checkout / "README.md").write_text("Other words")
    assert found_commit() == head
    (checkout / "src/spingrad/__init__.py").write_text("import os")
    assert found_commit() == f"{head}+"


def test_a_package_in_the_folder_of_another_project_has_a_version_and_no_commit(checkout):
    version = provenance.versions()["spingrad"]
    assert found_commit() == version  # no project at all
    git(checkout, "init")
    git(checkout, "add", "README.md")
    git(checkout, "commit", "-m", "Theirs")
    assert found_commit() == version


def test_every_committed_line_names_its_commit():
    assert all(line.commit for path in RESULTS.rglob("*.jsonl") for line in read_lines(path))


def test_the_revision_of_a_job_grows_with_all_that_it_names(monkeypatch):
    job = {"method": "ours", "solver": "exact", "settings": {"lr": 1}, "seed": 3}
    assert revision(1, job) == 1
    monkeypatch.setitem(REVISIONS, ("ours",), 2)
    monkeypatch.setitem(REVISIONS, ("exact",), 3)
    assert revision(1, job) == 4
    assert revision(2, job) == 5
    monkeypatch.setitem(REVISIONS, ("exact", "theirs"), 2)
    assert revision(1, job) == 4
    monkeypatch.setitem(REVISIONS, ("exact", "ours"), 2)
    assert revision(1, job) == 5
