"""What a vote loses against gathered rows, against signSGD by majority vote, and to a liar.

    python benchmarks/vote_accuracy.py --out benchmarks/results/vote_accuracy.jsonl

MNIST, 784-512-512-10 without BatchNorm, hardtanh, cosine schedule. Every method gets six trials of its
settings, one epoch on 50,000 images judged on the other 10,000; the best then trains two epochs on all
60,000 with five fresh seeds. Workers are threads with a model each, which take the steps of
``DistributedQPSBGD``; what would go over the wire goes through memory (tests/test_distributed.py shows that
real processes end with the same bits). Every finished run is a line of the output file; a stopped benchmark
goes on where it was.
"""

import argparse
import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spingrad import BinaryLeastSquares, BinaryLinear, binary_parameters
from spingrad.distributed import DistributedQPSBGD, Wire
from spingrad.solvers import BlockDescentSolver, SignSolver, Solver
from spingrad_lab.data import mnist
from spingrad_lab.methods import Settings, grid
from spingrad_lab.report.statistics import estimate

SIZES, EPOCHS, HELD_OUT = (784, 512, 512, 10), 2, 10_000
TUNING_SEED, TEST_SEEDS = 0, (1, 2, 3, 4, 5)


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

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([sent[self.rank] for sent in self.room.exchange(self.rank, parts)])

    def broadcast_(self, tensor: Tensor) -> None:
        tensor.copy_(self.room.exchange(self.rank, tensor)[0])


class Inverted(BlockDescentSolver):
    """An adversary: the opposite of what its rows ask for."""

    def stream(self, problems: Sequence[BinaryLeastSquares], *, seed: int = 0) -> list[Iterable[Tensor]]:
        return [[-part for part in parts] for parts in super().stream(problems, seed=seed)]


PROJECTION = grid(lr=(3e-4, 1e-3, 3e-3), target_rms=("auto", 2))
SIGN = grid(lr=(1e-4, 3e-4, 1e-3), momentum=(0, 0.9))

METHODS: dict[str, tuple[str, int, list[Settings]]] = {  # reduction, workers, trials
    "gather": ("gather", 4, PROJECTION),
    "vote": ("vote", 4, PROJECTION),
    "vote, 1 of 5 inverted": ("vote", 5, []),  # with the settings of "vote"
    "signSGD by majority vote": ("vote", 4, SIGN),
}


def solver_of(method: str, rank: int) -> Solver:
    if method.startswith("signSGD"):
        return SignSolver()  # of the averaged gradient: Signum
    return Inverted() if "inverted" in method and rank == 1 else BlockDescentSolver()


@cache
def images(split: str) -> tuple[Tensor, Tensor]:
    data = mnist(split)  # type: ignore[arg-type]
    return data.pixels() / mnist("train").pixels().square().mean().sqrt(), data.labels


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
) -> DistributedQPSBGD:
    """One worker's run: its share of every batch."""
    x, y = data
    reduction, _, _ = METHODS[method]
    if method.startswith("signSGD"):
        settings = {"target_rms": None, "rank": None, **settings}
    optimizer = DistributedQPSBGD(
        binary_parameters(model),
        reduction=reduction,  # type: ignore[arg-type]
        group=wire,
        solver=solver_of(method, wire.rank),
        seed=seed,
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
            optimizer.step()
            scheduler.step()
    return optimizer


def in_threads(size: int, work: Callable[[Wire], Any]) -> list[Any]:
    """What ``work`` returns in each of ``size`` threads that share a wire."""
    room = Room(size)

    def guarded(rank: int) -> Any:
        try:
            return work(ThreadWire(room, rank))
        except BaseException:
            room.barrier.abort()  # or the others would wait for ever
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))


def run(method: str, settings: Settings, batch: int, seed: int, tuning: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    x, y = images("train")
    count = len(x) - HELD_OUT if tuning else len(x)
    scored = (x[count:], y[count:]) if tuning else images("test")
    workers = METHODS[method][1]
    models = [network(seed) for _ in range(workers)]

    def work(wire: Wire) -> list[int]:
        data, epochs = (x[:count], y[:count]), 1 if tuning else EPOCHS
        return train(models[wire.rank], wire, method, settings, data, batch, epochs, seed).suspects

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of suspects, which the line has
        suspects = in_threads(workers, work)[0]
    with torch.no_grad():
        accuracy = float((models[0](scored[0]).argmax(1) == scored[1]).float().mean())
    return {
        "method": method,
        "settings": settings,
        "batch": batch,
        "seed": seed,
        "tuning": tuning,
        "epochs": 1 if tuning else EPOCHS,
        "accuracy": accuracy,
        "suspects": suspects,
        "seconds": round(time.perf_counter() - begin, 1),
        "torch": torch.__version__,
    }


class Results:
    """Finished runs, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def get(self, *job: Any) -> dict[str, Any]:
        names = ("method", "settings", "batch", "seed", "tuning")
        for line in self.lines:
            if [line[name] for name in names] == list(job):
                return line  # type: ignore[no-any-return]
        line = run(*job)
        self.lines.append(line)
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("vote_accuracy.jsonl"))
    parser.add_argument("--batch", type=int, nargs="+", default=[400], help="of all workers together")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.out)
    for batch in args.batch:
        best: dict[str, Settings] = {}
        for method, (_, _, trials) in METHODS.items():
            tried = [results.get(method, settings, batch, TUNING_SEED, True) for settings in trials]
            best[method] = max(tried, key=lambda t: t["accuracy"])["settings"] if tried else best["vote"]
        found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
        for seed, method in itertools.product(TEST_SEEDS, METHODS):
            found[method].append(results.get(method, best[method], batch, seed, False))
        accuracy = {method: [line["accuracy"] for line in lines] for method, lines in found.items()}
        print(f"\nMNIST, 784-512-512-10, batch of {batch}, {EPOCHS} epochs, {len(TEST_SEEDS)} seeds")
        print(f"{'method':26} {'test':>16} {'less gather':>17} {'less signSGD':>17}  suspects  chosen of 6")
        for method, lines in found.items():
            apart = [
                str(estimate([a - b for a, b in zip(accuracy[method], accuracy[other], strict=True)]))
                for other in ("gather", "signSGD by majority vote")
            ]
            suspects = sorted({rank for line in lines for rank in line["suspects"]})
            chosen = ", ".join(f"{k}={v}" for k, v in best[method].items())
            cells = f"{estimate(accuracy[method])!s:>16} {apart[0]:>17} {apart[1]:>17}"
            print(f"{method:26} {cells}  {suspects!s:8}  {chosen}")


if __name__ == "__main__":
    main()
