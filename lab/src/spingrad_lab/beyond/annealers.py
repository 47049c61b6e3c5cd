"""What an annealer adds: the same steps taken with every solver, an emulated QPU among them."""

import contextlib
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryQuadratic, binary_parameters
from spingrad.solvers import DimodSolver, ExactSolver, Solution, Solver
from spingrad_lab.methods import ONE_BATCH, SOLVER_LABELS, make_solver
from spingrad_lab.posed import target_squares
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, table_of, to_svg
from spingrad_lab.report.statistics import Duel, estimate
from spingrad_lab.runs import Experiment, Job, Lab, seeded, where
from spingrad_lab.tasks.small import AdultTenLayers, Digits12, mlp
from spingrad_lab.tasks.training import Task, endless_batches, take_step
from spingrad_lab.trials import TUNING_SEED, Score, as_settings, best_trial, matched

PAIR, ADULT = "MNIST pair 1/2, 16-4-4-2", "Adult, ten layers"
NOISE = (0.05, 0.02)
LABELS = {
    **{name: SOLVER_LABELS[name] for name in ("exact", "block", "feedback", "annealing")},
    "sqa": "simulated quantum annealing",
    "qpu": "emulated QPU",
    "noisy-qpu": "emulated QPU, control noise",
    "sign": SOLVER_LABELS["sign"],
}
EXACT_UP_TO = 49


class Pair(Digits12):
    """The paper's pair of digits with one more hidden layer, so that three layers share a call."""

    def network(self) -> nn.Module:
        return mlp(16, 4, 4, 2)


class Size(NamedTuple):
    """A task, and how much of it is emulated."""

    task: type[Task]
    steps: int
    seeds: int
    num_reads: int


SIZES = {PAIR: Size(Pair, 500, 5, 100), ADULT: Size(AdultTenLayers, 5, 2, 20)}
QUICK = {PAIR: Size(Pair, 3, 1, 4)}


class Annealers(Experiment):
    """Equal steps, equal learning rate, one solver after the other."""

    title = "What an annealer adds"
    source = "beyond the paper"
    rates = (1e-3, 3e-3, 1e-2, 3e-2)
    adult_rate = 3e-3
    moments = 25

    def plan(self, lab: Lab) -> None:
        tuning = range(TUNING_SEED, TUNING_SEED + 5)
        trials = [_job("trial", PAIR, "exact", lr, seed) for lr in self.rates for seed in tuning]
        scored = lab.run(trials[:2] if lab.quick else trials, f"{PAIR}, learning rate")
        finals = []
        for name, size in (QUICK if lab.quick else SIZES).items():
            lr = _best_rate(scored) if name == PAIR else self.adult_rate
            solvers = [solver for solver in LABELS if solver != "exact" or size.task.exact]
            seeds = range(lab.seeds or size.seeds)
            finals += [_job("final", name, solver, lr, seed) for seed in seeds for solver in solvers]
        lab.run(finals, "finals")

    def compute(self, job: Job) -> dict[str, Any]:
        size = (QUICK if job["quick"] else SIZES)[job["task"]]
        steps = size.steps
        with seeded(job["seed"]), _solver(job["solver"], size.num_reads) as solver:
            task = size.task(job["seed"], job["stage"] == "trial", job["quick"])
            network = task.network()
            watching = _Watching(solver, max(steps // self.moments, 1), job["stage"] == "final")
            own = binary_parameters(network)
            stepper = QPSBGD(own, job["lr"], solver=watching, seed=job["seed"], **ONE_BATCH)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(stepper, T_max=steps)
            for _, loss in zip(range(steps), endless_batches(task), strict=False):
                take_step(network, loss, [stepper])
                cosine.step()
            with torch.no_grad():
                scores = task.scores(network.eval())
            qpu = {"qpu_seconds": solver.qpu_seconds} if hasattr(solver, "qpu_seconds") else {}
            broken = {"chain_breaks": _mean(watching.broken)} if watching.broken else {}
            return {
                **scores,
                **qpu,
                **broken,
                "excess": _mean(watching.excess),
                "solver_seconds": watching.seconds / steps,
            }

    def show(self, runs: pd.DataFrame) -> Section:
        finals = where(runs, stage="final")
        sizes = QUICK if finals["quick"].any() else SIZES
        tables = [self._table(name, size, where(finals, task=name)) for name, size in sizes.items()]
        notes = [
            f"At full size {PAIR} takes {SIZES[PAIR].steps} steps of batches of 20 (20 epochs; the paper "
            f"does not say), and {ADULT} as many as emulation allows; what counts there are the energies "
            "of the problems met on the way. The learning rate of the pair was chosen with the exact solver "
            f"on validation data, Adult has {self.adult_rate}; every solver the same.",
            "The emulated QPU is simulated annealing on the embedded problem, chains and all, behind "
            "D-Wave's own client; how its samples compare with a real chip's is not known. Control noise "
            f"adds normal errors of {NOISE[0]} to the biases and {NOISE[1]} to the couplings of the scaled "
            "problem, drawn for each job. QPU seconds "
            "are those that D-Wave's timing model charges.",
        ]
        pair = where(finals, task=PAIR)
        if duels := self._duels(pair):
            tables.append(table_of(duels, "rival", "Emulated QPUs minus the exact solver, in test accuracy."))
        return Section(notes, [table for table in tables if table.rows], self._figures(pair))

    def _table(self, name: str, size: Size, finals: pd.DataFrame) -> Table:
        floor = "optimum" if size.task.exact else "certified bound"
        header = ["solver", f"energy above the {floor}", "test accuracy", "training loss", "ms per step"]
        header += ["chain breaks", "QPU seconds of the run"]
        rows = []
        for solver, label in LABELS.items():
            own = where(finals, solver=solver)
            if len(own):
                row = [label, f"{100 * own['excess'].mean():.3f} %"]
                row += [str(estimate(own[key])) for key in ("test_accuracy", "train_loss")]
                row.append(f"{1e3 * own['solver_seconds'].mean():.1f}")
                row.append(f"{100 * own['chain_breaks'].mean():.2f} %" if "chain_breaks" in own else "–")
                row.append(f"{own['qpu_seconds'].mean():.2f}" if "qpu_seconds" in own else "–")
                rows.append(row)
        seeds = finals["seed"].nunique() if len(finals) else 0
        counts = f"{size.steps} steps, {size.num_reads} samples of each unit, seeds: {seeds}"
        return Table(header, rows, f"{name}: {counts}; energies as a share of ‖V‖²")

    def _duels(self, finals: pd.DataFrame) -> list[Duel]:
        """The emulated QPUs against the exact solver, seed by seed."""
        solved = set(finals["solver"]) if len(finals) else set()
        return [
            Duel(
                PAIR,
                "test accuracy",
                (LABELS[name], LABELS["exact"]),
                matched(finals, name, "exact", "solver"),
            )
            for name in ("qpu", "noisy-qpu")
            if {name, "exact"} <= solved
        ]

    def _figures(self, finals: pd.DataFrame) -> list[Figure]:
        if finals.empty:
            return []
        own = {name: where(finals, solver=name) for name in LABELS if name in set(finals["solver"])}
        canvas, grid = figures.new(7.2, 2.8, columns=2)
        for place, (name, runs) in enumerate(own.items()):
            colour = figures.VERMILION if "qpu" in name else figures.BLUE
            accuracy = estimate(runs["test_accuracy"])
            half = 0.0 if math.isnan(accuracy.half) else accuracy.half
            grid[0, 0].errorbar(accuracy.mean, place, xerr=half, marker="o", capsize=2, color=colour)
            grid[0, 1].plot(100 * runs["excess"].mean(), place, marker="o", color=colour)
        grid[0, 0].set(xlabel="test accuracy")
        grid[0, 1].set(xlabel="energy above the optimum, % of ‖V‖²")
        grid[0, 1].set_xscale("symlog", linthresh=1e-3)
        for panel, labels in zip(grid[0], ([LABELS[name] for name in own], []), strict=True):
            panel.set_yticks(range(len(own)), labels or [""] * len(own))
            panel.invert_yaxis()
        caption = f"{PAIR}: what the network makes of each solver (95 % intervals), and how well it solves."
        return [Figure("accuracy", caption, to_svg(canvas))]


class _Watching(Solver):
    """Another solver, with an eye on how far above the optimum it stays and how long it takes."""

    def __init__(self, inner: Solver, every: int, compare: bool) -> None:
        self.inner, self.every, self.compare = inner, every, compare
        self.excess: list[float] = []
        self.broken: list[float] = []
        self.seconds, self.calls = 0.0, 0

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return self.solve_all([problem], seed=seed)[0]

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        begin = time.perf_counter()
        solutions = self.inner.solve_all(problems, seed=seed)
        self.seconds += time.perf_counter() - begin
        if self.compare and self.calls % self.every == 0:
            size = sum(float(target_squares(problem).sum()) for problem in problems)
            above = sum(
                float((p.double().energy(s.spins.double()) - _floor(p)).sum())
                for p, s in zip(problems, solutions, strict=True)
            )
            self.excess.append(above / size if size else 0.0)
        self.broken += [float(s.info["chain_breaks"].mean()) for s in solutions if "chain_breaks" in s.info]
        self.calls += 1
        return solutions


def _floor(problem: BinaryQuadratic) -> torch.Tensor:
    if problem.num_spins <= EXACT_UP_TO:
        return problem.double().energy(ExactSolver().solve(problem).spins.double())
    return problem.lower_bound()


@contextlib.contextmanager
def _solver(name: str, num_reads: int) -> Iterator[Any]:
    if name == "sqa":
        import openjij

        yield DimodSolver(openjij.SQASampler(), num_reads=10, num_sweeps=200)
    elif name in ("qpu", "noisy-qpu"):
        with _emulated_qpu(num_reads, NOISE if name == "noisy-qpu" else (0.0, 0.0)) as solver:
            yield solver
    else:
        yield make_solver(name)


@contextlib.contextmanager
def _emulated_qpu(num_reads: int, noise: tuple[float, float]) -> Iterator[Solver]:
    from spingrad.qpu import QPUService, QPUSolver
    from spingrad.testing.sapi import Sapi

    with tempfile.TemporaryDirectory() as folder, Sapi(noise=noise) as sapi, sapi.configured():
        service = QPUService(sapi.solver_name)
        solver = QPUSolver(Path(folder, "journal"), 1e6, service=service, num_reads=num_reads)
        yield solver
        solver.close()


def _best_rate(trials: pd.DataFrame) -> float:
    loss = Score("test_loss", "validation loss", higher_is_better=False)
    return float(best_trial(as_settings(trials, "lr"), loss).settings["lr"])


def _job(stage: str, task: str, solver: str, lr: float, seed: int) -> Job:
    return {"stage": stage, "task": task, "solver": solver, "lr": lr, "seed": seed}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


ANNEALERS = Annealers()
