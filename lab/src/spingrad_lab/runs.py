"""Runs of an experiment: each is computed once and kept as a line of a file, so that a stop loses little."""

import json
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeftColumn

from spingrad._files import append_record, read_records
from spingrad_lab.provenance import commit, fingerprint, revision, versions
from spingrad_lab.report.sections import Section
from spingrad_lab.report.statistics import Duel

Job = dict[str, Any]
"""What defines a run: plain values that JSON can hold. Equal jobs are the same run."""


@dataclass(frozen=True)
class Line:
    """A finished run: its job, what it measured, how long it took, and where it comes from."""

    job: Job
    metrics: dict[str, Any]
    seconds: float
    versions: dict[str, str]
    commit: str = ""
    """Of the code that computed it (:func:`~spingrad_lab.provenance.commit`). Lines from before commits were
    noted have the commit that added them to the results."""
    settings: str = ""
    """Hash of the experiment's settings; empty in lines from before it was noted."""
    threads: int = 1
    """Of torch, when the run began."""
    revision: int = 1
    """Of what the job names (:func:`~spingrad_lab.provenance.revision`)."""


@dataclass(frozen=True)
class Origin:
    """What all lines of one command have in common."""

    versions: dict[str, str]
    commit: str
    settings: str


class Experiment(ABC):
    """One table or figure: which runs it takes, how one is computed, and how they are shown.

    ``plan`` asks the lab for runs, in stages if later ones depend on earlier ones; ``compute`` is one run,
    in a process of its own with one thread; ``show`` draws only from the frame of finished runs (see
    :func:`to_frame`).
    """

    title: str
    source: str
    """Where it is in the paper, or "beyond the paper"."""
    revision: int = 1
    """Raised by a change that outdates every line of the experiment."""

    @abstractmethod
    def plan(self, lab: "Lab") -> None: ...

    @abstractmethod
    def compute(self, job: Job) -> dict[str, Any]: ...

    @abstractmethod
    def show(self, runs: pd.DataFrame) -> Section: ...

    def summary(self, runs: pd.DataFrame) -> list[Duel]:
        """The default against the best baseline, for the table at the head of the report."""
        return []


class Lab:
    """Where an experiment's runs are computed and kept.

    Args:
        name: Name of the experiment.
        experiment: The experiment itself.
        folder: Runs are kept in ``folder/name.jsonl``.
        quick: Small sizes, to see that everything works; never a result.
        seeds: Seeds of the final runs, in place of the experiment's own number.
        solver: Name of a solver for QP-SBGD, in place of the experiment's own.
        workers: Processes side by side; 0 computes in this one, "ray" on a Ray cluster.
        address: Of the Ray cluster; by default one that is started on this machine.
        tensorboard: Also write finished runs for TensorBoard.
    """

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        folder: str | Path,
        *,
        quick: bool = False,
        seeds: int | None = None,
        solver: str | None = None,
        workers: int | Literal["ray"] | None = None,
        address: str | None = None,
        tensorboard: bool = False,
    ) -> None:
        self.name, self.experiment, self.folder = name, experiment, Path(folder)
        self.quick, self.seeds, self.solver = quick, seeds, solver
        self.workers = (os.cpu_count() or 1) if workers is None else workers
        self.address, self.tensorboard = address, tensorboard
        self.path = self.folder / f"{name}.jsonl"
        lines, _ = current_lines(self.path, experiment)
        self.finished = {_key(line.job): line for line in lines}
        # Noted now: the checkout may change while long runs go on with the code of now.
        self.origin = Origin(versions(), commit(), fingerprint(experiment))

    def solver_for(self, own: str | None) -> str | None:
        """A method's own solver, or the one asked for in place of the default."""
        return self.solver if own == "block" and self.solver else own

    def run(self, jobs: Sequence[Job], label: str = "runs") -> pd.DataFrame:
        """The runs of these jobs; those that are not on file are computed now, side by side."""
        jobs = [{**job, "quick": self.quick} for job in jobs]
        missing = {_key(job): job for job in jobs if _key(job) not in self.finished}
        self.folder.mkdir(parents=True, exist_ok=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeLeftColumn()) as progress:
            done = len({_key(job) for job in jobs}) - len(missing)
            bar = progress.add_task(f"{self.name} {label}", total=done + len(missing), completed=done)
            for line in self._compute(list(missing.values())):
                self._keep(line)
                progress.advance(bar)
        return to_frame(self.finished[_key(job)] for job in jobs)

    def _compute(self, jobs: list[Job]) -> Iterator[Line]:
        if self.workers == 0 or (len(jobs) <= 1 and self.workers != "ray"):
            with _one_thread():
                yield from (_timed(self.experiment, job, self.origin) for job in jobs)
            return
        if self.workers == "ray":
            from spingrad.distributed.ray import results

            work = [(self.experiment, job, self.origin) for job in jobs]
            yield from results(_timed, work, self.address)
            return
        pool = _pool(self.workers)
        futures: list[Future[Line]] = [pool.submit(_timed, self.experiment, job, self.origin) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:  # Ctrl-C too
            _end(pool)  # what still runs would keep this process alive
            raise

    def _keep(self, line: Line) -> None:
        self.finished[_key(line.job)] = line
        append_line(self.path, line)
        if self.tensorboard:
            write_tensorboard(self.folder / "tensorboard" / self.name, line)


@cache
def _pool(workers: int) -> ProcessPoolExecutor:
    """Processes that live as long as this one, so that what they load is loaded once."""
    # A fork server has imported torch once and forks clean workers; a plain fork may inherit locks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spingrad_lab._quiet", "spingrad_lab.experiments"])
    return ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,))


def _end(pool: ProcessPoolExecutor) -> None:
    _pool.cache_clear()
    pool.shutdown(wait=False, cancel_futures=True)
    for process in multiprocessing.active_children():
        process.terminate()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from this seed on, and afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


def _timed(experiment: Experiment, job: Job, origin: Origin) -> Line:
    begin, threads = time.perf_counter(), torch.get_num_threads()
    metrics = experiment.compute(job)
    seconds = round(time.perf_counter() - begin, 3)
    return Line(
        job, metrics, seconds, **vars(origin), threads=threads, revision=revision(experiment.revision, job)
    )


def read_lines(path: Path) -> list[Line]:
    """Finished runs on file, which is only read; a last line cut short by a crash is left out."""
    lines, names = [], {field.name for field in fields(Line)}
    for number, record in enumerate(read_records(path) if path.exists() else (), 2):
        if not isinstance(record, dict) or record.keys() != names:
            raise ValueError(
                f"{path}, line {number} is not a finished run: expected an object with exactly "
                f"{', '.join(sorted(names))}; delete the line"
            )
        lines.append(Line(**record))
    return lines


def current_lines(path: Path, experiment: Experiment) -> tuple[list[Line], int]:
    """Finished runs whose revision is the present one, each job once, and the number of the others.

    Of several lines of one job, the last one counts.
    """
    lines = read_lines(path)
    present = [line for line in lines if line.revision == revision(experiment.revision, line.job)]
    return list({_key(line.job): line for line in present}.values()), len(lines) - len(present)


def append_line(path: Path, line: Line) -> None:
    """Add a finished run to a file, in which any number of processes may write."""
    append_record(path, vars(line))


def to_frame(lines: Iterable[Line]) -> pd.DataFrame:
    """One row per run: the values of its job, its metrics, and ``run_seconds``.

    Values stay Python objects, as on file; :func:`where` gives the columns of similar runs their types.

    Example:
        >>> runs = to_frame([Line({"seed": 3}, {"accuracy": 0.5}, 0.1, {})])
        >>> runs.accuracy.to_list()
        [0.5]
    """
    rows = [{**line.job, **line.metrics, "run_seconds": line.seconds} for line in lines]
    return pd.DataFrame(rows, dtype=object)


def where(runs: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The runs whose columns have the given values, without the columns that none of these runs has.

    Example:
        >>> runs = to_frame(Line({"n": n}, {"half": n / 2}, 0.1, {}) for n in (1, 2, 2))
        >>> where(runs, n=2).half.to_list()
        [1.0, 1.0]
    """
    for column, value in values.items():
        if column not in runs:
            return runs[:0]
        runs = runs[np.fromiter((own == value for own in runs[column]), bool, len(runs))]
    return runs.dropna(axis=1, how="all").infer_objects() if len(runs) else runs


def groups(runs: pd.DataFrame, by: str | list[str]) -> list[tuple[Any, pd.DataFrame]]:
    """Runs that have the same value in a column (or in each of some columns), in order of appearance."""
    return [] if runs.empty else list(runs.groupby(by, sort=False))


def write_tensorboard(folder: Path, line: Line) -> None:
    """One TensorBoard run: the curves step by step, the other metrics once.

    TensorBoard writes its own files, so these may end in the middle of a record after a crash.
    """
    from torch.utils.tensorboard import SummaryWriter

    name = "-".join(str(v) for k, v in line.job.items() if k != "quick").replace("/", "_").replace(" ", "_")
    with SummaryWriter(str(folder / "".join(c for c in name if c.isalnum() or c in "-_.,=:"))) as writer:
        for metric, value in line.metrics.items():
            if isinstance(value, dict):
                for step, point in zip(value["x"], value["y"], strict=True):
                    writer.add_scalar(metric, point, step)
            elif isinstance(value, (int, float)):
                writer.add_scalar(metric, value)
