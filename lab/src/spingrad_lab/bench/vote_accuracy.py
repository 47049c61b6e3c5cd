"""What a vote loses against gathered gradients, against signSGD by majority vote, and to a liar."""

import itertools
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.distributed import Wire
from spingrad.solvers import SignSolver, Solution, Solver
from spingrad_lab.methods import OneSweep, Settings, grid
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, where
from spingrad_lab.tasks.images import pixels
from spingrad_lab.trials import ahead, best_trial, current_finals

SIZES, EPOCHS, HELD_OUT = (784, 512, 512, 10), 2, 10_000
TUNING_SEED, TEST_SEEDS, BATCH = 0, (1, 2, 3, 4, 5), 400


class Room:
    """Where threads meet to exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.table: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.table[rank] = tensor.clone()
        self.barrier.wait()
        seen = list(self.table)
        self.barrier.wait()
        return seen


class ThreadWire(Wire):
    """The wire between threads of one process."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size, self.sent = room, rank, len(room.table), 0

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.stack(self.room.exchange(self.rank, part))

    def all_reduce_(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self.room.exchange(self.rank, tensor)).sum(0))

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self.room.exchange(self.rank, parts)])

    def broadcast_(self, tensor: Tensor) -> None:
        tensor.copy_(self.room.exchange(self.rank, tensor)[0])


class Inverted(OneSweep):
    """An adversary: the opposite of what its rows ask for, by a worker that claims to be like the others."""

    def __repr__(self) -> str:
        return repr(OneSweep())

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return Solution(problem, -super().solve(problem, initial=initial, seed=seed).spins)


PROJECTION = grid(lr=(3e-4, 1e-3, 3e-3), target_rms=("auto", 2))
SIGN = grid(lr=(1e-4, 3e-4, 1e-3), momentum=(0, 0.9))

SIGN_VOTE, LIAR = "signSGD by majority vote", "vote, 1 of 5 inverted"
METHODS: dict[str, tuple[Literal["together", "vote"], int, list[Settings]]] = {  # ranks, workers, trials
    "gather": ("together", 4, PROJECTION),
    "vote": ("vote", 4, PROJECTION),
    LIAR: ("vote", 5, []),  # with the settings of "vote"
    SIGN_VOTE: ("vote", 4, SIGN),
}


def solver_of(method: str, rank: int) -> Solver:
    if method.startswith("signSGD"):
        return SignSolver()  # of the averaged gradient: Signum
    return Inverted() if "inverted" in method and rank == 1 else OneSweep()


def network(seed: int, sizes: Sequence[int] = SIZES) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
        nn.init.uniform_(layers[-2].weight, -0.01, 0.01, generator=generator)  # type: ignore[arg-type]
    return nn.Sequential(*layers[:-1])


def train(
    model: nn.Module,
    wire: Wire,
    method: str,
    settings: Settings,
    data: tuple[Tensor, Tensor],
    batch: int,
    epochs: int,
    seed: int,
) -> QPSBGD:
    """One worker's run: its share of every batch."""
    x, y = data
    ranks, _, _ = METHODS[method]
    if method.startswith("signSGD"):
        settings = {"target_rms": None, "rank": 1, **settings}  # signs have no quadratic term
    else:
        settings = {"rank": 8, **settings}  # with one sweep: the default of version 0.1.0
    optimizer = QPSBGD(
        binary_parameters(model),
        solver=solver_of(method, wire.rank),
        seed=seed,
        ranks=ranks,
        group=wire,
        **settings,
    )
    steps = epochs * (len(x) // batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator)[: len(x) // batch * batch].split(batch):
            own = rows.tensor_split(wire.size)[wire.rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[own]), y[own]).backward()
            if ranks == "together":
                average_gradients_(model, wire)
            optimizer.step()
            scheduler.step()
    return optimizer


def average_gradients_(model: nn.Module, wire: Wire) -> None:
    """What DistributedDataParallel does between processes; it does not take threads."""
    for weight in model.parameters():
        assert weight.grad is not None
        wire.all_reduce_(weight.grad)
        weight.grad /= wire.size


def in_threads(size: int, work: Callable[[Wire], Any]) -> list[Any]:
    """What ``work`` returns in each of ``size`` threads that share a wire."""
    room = Room(size)

    def guarded(rank: int) -> Any:
        try:
            return work(ThreadWire(room, rank))
        except BaseException:
            room.barrier.abort()  # otherwise the others would wait for ever
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


class VoteAccuracy(Experiment):
    """Trials of each method on one epoch of 50,000 images; the best then trains two epochs on all.

    Workers are threads with a model each, which take the steps of real processes; what would go over
    the wire goes through memory. A test shows that real processes end with the same bits.
    """

    title = "What a vote costs in accuracy"
    source = "784-512-512-10 on MNIST without BatchNorm, a batch of 400 over all workers"

    def plan(self, lab: Lab) -> None:
        place = {"batch": BATCH}
        trials = lab.run(
            [
                {**place, "stage": "trial", "method": method, "settings": settings, "seed": TUNING_SEED}
                for method, (_, _, tried) in METHODS.items()
                for settings in (tried[:1] if lab.quick else tried)
            ],
            "trials",
        )
        best = {method: best_trial(where(trials, method=_tuned(method))).settings for method in METHODS}
        seeds = TEST_SEEDS[: lab.seeds or (1 if lab.quick else None)]
        lab.run(
            [
                {**place, "stage": "final", "method": method, "settings": best[method], "seed": seed}
                for seed, method in itertools.product(seeds, METHODS)
            ],
            "finals",
        )

    def compute(self, job: Job) -> dict[str, Any]:
        tuning, method = job["stage"] == "trial", job["method"]
        x, y = pixels("mnist", "train")
        count = len(x) - HELD_OUT if tuning else len(x)
        scored = (x[count:], y[count:]) if tuning else pixels("mnist", "test")
        shown = 4_000 if job["quick"] else count
        data, epochs = (x[:shown], y[:shown]), 1 if tuning or job["quick"] else EPOCHS
        workers = METHODS[method][1]
        models = [network(job["seed"]) for _ in range(workers)]

        def work(wire: Wire) -> list[int]:
            settings = job["settings"], data, job["batch"], epochs, job["seed"]
            return train(models[wire.rank], wire, method, *settings).suspects

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # about suspects, which are in the metrics
            suspects = in_threads(workers, work)[0]
        with torch.no_grad():
            accuracy = float((models[0](scored[0]).argmax(1) == scored[1]).float().mean())
        return {"epochs": epochs, "test_accuracy": accuracy, "suspects": suspects}

    def show(self, runs: pd.DataFrame) -> Section:
        runs = runs.assign(tuned=runs["method"].map(_tuned))
        tables = []
        for batch, own in groups(runs, "batch"):
            finals = current_finals(own, ["tuned"])
            rows = []
            for method in (method for method in METHODS if method in set(finals["method"])):
                mine = where(finals, method=method)
                less = [
                    "–" if method == other else str(ahead(finals, method, other).difference)
                    for other in ("gather", SIGN_VOTE)
                ]
                suspects = sorted({rank for ranks in mine["suspects"] for rank in ranks})
                chosen = str(best_trial(where(own, stage="trial", tuned=_tuned(method))))
                row = [method, str(estimate(mine["test_accuracy"])), *less]
                rows.append([*row, ", ".join(map(str, suspects)) or "–", chosen])
            header = ["method", "test accuracy", "minus gather", "minus signSGD", "suspects", "chosen of 6"]
            tables.append(Table(header, rows, f"A batch of {batch} over all workers, {EPOCHS} epochs"))
        notes = [
            "Every method gets six trials of its settings, one epoch on 50,000 images judged on the other "
            "10,000; the best then trains two epochs on all 60,000 with five fresh seeds, under a cosine. "
            "The liar sends the opposite of what its rows ask for, and has the settings of *vote*. QP-SBGD "
            "is that of version 0.1.0: 8 directions, one sweep.",
        ]
        return Section(notes, tables)


def _tuned(method: str) -> str:
    """The method whose trials choose this one's settings."""
    return "vote" if method == LIAR else method
