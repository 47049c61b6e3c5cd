"""Trains a network 16-4-4-2 to tell zeros from twos of MNIST on a QPU, with one call per step.

    pip install ".[qpu,fast]" ./lab scikit-image
    python examples/qpu.py                                       # an emulated QPU: no account, no network
    python examples/qpu.py --real --journal run.journal          # the same on a D-Wave QPU
    python examples/qpu.py --replay --journal run.journal        # the same again, from the journal alone

The features are those of the paper's experiment on digit pairs: on which side of sixteen lines most of an
image's key points lie. With --real the plan is shown first, and nothing is sent until you agree to its QPU
time. If a run was stopped, the same command continues it and pays for no step twice.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, BinaryQuadratic, binary_parameters
from spingrad.qpu import BudgetError, Journal, QPUService, QPUSolver, plan
from spingrad.qpu.inspect import summary
from spingrad.solvers import ExactSolver, Solution, Solver
from spingrad.testing.sapi import Sapi
from spingrad_lab.data import key_points, line_features, mnist

WIDTHS = [16, 4, 4, 2]
DIGITS = (0, 2)
TRAIN, TEST = 500, 600


class Watched(Solver):
    """A solver that also counts how many of its units reach the optimum."""

    def __init__(self, solver: Solver) -> None:
        self.solver, self.exact = solver, ExactSolver()
        self.units = self.optimal = 0

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return self.solve_all([problem], seed=seed)[0]

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        solutions = self.solver.solve_all(problems, seed=seed)
        for problem, solution in zip(problems, solutions, strict=True):
            best = self.exact.solve(problem).energy
            self.units += problem.num_units
            self.optimal += int((solution.energy <= best + 1e-4 * best.abs() + 1e-6).sum())
        return solutions


def digit_pair() -> tuple[Tensor, Tensor]:
    data = mnist("train")
    count = (TRAIN + TEST) // 2
    images = torch.cat([data.images[data.labels == digit][:count] for digit in DIGITS])
    x, y = (
        line_features(key_points(images), keep="stroke", centre="points"),
        torch.arange(2).repeat_interleave(count),
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(WIDTHS):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


def steps_of(args: argparse.Namespace) -> int:
    """Steps per epoch."""
    return -(-TRAIN // int(args.batch_size))


def train(
    name: str, solver: Solver, data: tuple[Tensor, Tensor], args: argparse.Namespace, steps: int
) -> tuple[nn.Module, int]:
    """The trained network and the number of steps, which is smaller than asked if the budget runs out."""
    (x, y), model = data, network(args.seed)
    # The paper's problem, from one batch and with all directions: for small layers it is hard enough to need
    # an annealer.
    one_batch: dict[str, Any] = {"target_rms": args.target_rms, "momentum": 0.0, "rank": None}
    optimizer = QPSBGD(binary_parameters(model), args.lr, solver=solver, seed=args.seed, **one_batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * steps_of(args))
    batches = torch.Generator().manual_seed(args.seed)
    bar = TextColumn(f"{name:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*bar, TextColumn("loss {task.fields[loss]:.3f}")) as progress:
        task = progress.add_task(name, total=steps, loss=float("nan"))
        for step in range(steps):
            if step % steps_of(args) == 0:
                order = iter(torch.randperm(len(x), generator=batches).split(args.batch_size))
            batch = next(order)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            try:
                optimizer.step()
            except BudgetError as error:
                progress.console.print(f"stopped: {error}")
                return model, step
            scheduler.step()
            progress.update(task, advance=1, loss=loss.item())
    return model, steps


def show(pairs: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in pairs)
    print(*(f"{name:{width}}  {value}" for name, value in pairs), sep="\n")


def agreed(seconds: float) -> bool:
    try:
        return input(f"At most {seconds:.2f} s of QPU time will be charged. Go on? [y/N] ").lower() == "y"
    except EOFError:
        return False


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the QPU of your D-Wave configuration")
    parser.add_argument("--replay", action="store_true", help="repeat an earlier run from its journal")
    parser.add_argument("--yes", action="store_true", help="do not ask before QPU time is charged")
    parser.add_argument("--journal", type=Path, help="file of the journal; without it, none is kept")
    parser.add_argument("--budget", type=float, help="seconds of QPU time; default: 1.1 times the plan")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--num-reads", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--target-rms", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--topology", choices=["pegasus", "zephyr"], default="pegasus", help="of the emulator"
    )
    parser.add_argument("--size", type=int, help="of the emulated chip; default: full size")
    parser.add_argument("--noise", type=float, default=0.05, help="control errors of the emulator")
    args = parser.parse_args()
    if (args.real or args.replay) and args.journal is None:
        parser.error("--real and --replay need --journal")
    return args


def qpu_solver(journal: Path, args: argparse.Namespace, stack: ExitStack) -> QPUSolver:
    """A QPU, after its plan was shown and agreed to, or the replay of a journal."""
    if args.replay:
        return QPUSolver.replay(journal)
    service = QPUService() if args.real else emulated(args, stack)
    planned = plan(WIDTHS, args.batch_size, TRAIN, args.epochs, chip=service.chip, num_reads=args.num_reads)
    show(planned.summary())
    budget = 1.1 * planned.run_seconds if args.budget is None else args.budget
    if args.real and not args.yes and not agreed(budget):
        sys.exit("nothing was sent")
    return stack.enter_context(QPUSolver(journal, budget, service=service, num_reads=args.num_reads))


def emulated(args: argparse.Namespace, stack: ExitStack) -> QPUService:
    """An emulated QPU in this process."""
    noise = (args.noise, args.noise)
    sapi = stack.enter_context(Sapi(args.topology, args.size, noise=noise, seed=args.seed))
    stack.enter_context(sapi.configured())  # only in this process: your own token is not used
    return QPUService(sapi.solver_name)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        journal = args.journal or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run.journal"
        solver = qpu_solver(journal, args, stack)
        x, y = digit_pair()
        data, test = (x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])
        watched = Watched(solver)
        model, taken = train("QPU", watched, data, args, args.epochs * steps_of(args))
        if not taken:
            sys.exit("not even one step fits the budget; nothing was sent")
        exact, _ = train("exact solver", ExactSolver(), data, args, taken)
        show(
            [
                *summary(Journal(journal, read_only=True)),
                ("steps", str(taken)),
                ("units solved to the optimum", f"{100 * watched.optimal / max(watched.units, 1):.1f} %"),
                ("test accuracy, QPU", f"{accuracy(model, *test):.3f}"),
                ("test accuracy, exact solver", f"{accuracy(exact, *test):.3f}"),
                ("test accuracy, untrained", f"{accuracy(network(args.seed), *test):.3f}"),
            ]
        )


if __name__ == "__main__":
    main()
