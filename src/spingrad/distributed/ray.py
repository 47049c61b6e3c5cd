"""A farm: solvers, or whole runs, on the machines of a Ray cluster."""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from spingrad.problem import BinaryQuadratic
from spingrad.solvers import Info, Solution, Solver, derive_seed
from spingrad.solvers.base import check_spins

Answer = TypeVar("Answer")


class RaySolver(Solver):
    """Farm the units of all layers out to Ray actors (extra ``ray``).

    For solvers that take long on a unit: Gurobi, the exact decoder, an annealer elsewhere. Each actor makes a
    solver of its own, since a D-Wave client, say, does not pickle. A task is some units of a layer; its seed
    follows from the seed of the step, the layer and the units, so the answer is the same whichever actor
    gives it. An actor holds one task at a time: if it dies, another takes its place and that task is done
    once more. A task that ends two actors is an error.

    Args:
        make: Called in each actor, without arguments: returns the solver.
        num_workers: Number of actors. Default: one for each CPU of the cluster.
        units: Units in a task.
        address: Of a Ray cluster; ``None`` is the one already connected to, or one on this machine.
        **options: Of the actors, as in ``ray.remote``. With ``num_cpus=1`` an actor keeps a CPU to itself,
            and those beyond the CPUs there are never start; by default they share.

    Attributes:
        repeated: Tasks done once more because their actor died.

    Example:
        >>> from spingrad.solvers import ExactSolver
        >>> from spingrad.testing import random_problem
        >>> solver = RaySolver(ExactSolver, num_workers=2)
        >>> solver.solve(random_problem(r=8, n=6, m=4, seed=0)).info["proved"]
        tensor([True, True, True, True])
    """

    def __init__(
        self,
        make: Callable[[], Solver],
        num_workers: int | None = None,
        *,
        units: int = 1,
        address: str | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("num_workers", num_workers), ("units", units)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, got {value}")
        ray = connect(address)
        self.make, self.units, self.repeated = make, units, 0
        self.num_workers = num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._actor = ray.remote(**{"max_restarts": 0, **options})(_Worker)
        self._actors = [self._actor.remote(make) for _ in range(self.num_workers)]

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return self._farm([problem], [seed])[0]

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        return self._farm(problems, [derive_seed(seed, i) for i in range(len(problems))])

    def _farm(self, problems: Sequence[BinaryQuadratic], seeds: list[int]) -> list[Solution]:
        ray = connect()
        stored = [ray.put(problem) for problem in problems]
        tasks = [
            _Task(layer, first, derive_seed(seed, first))
            for layer, (problem, seed) in enumerate(zip(problems, seeds, strict=True))
            for first in range(0, problem.num_units, self.units)
        ]
        answers = self._answers(ray, tasks, stored)
        own = [[answers[task] for task in tasks if task.layer == i] for i in range(len(problems))]
        return [_joined(parts, problem) for parts, problem in zip(own, problems, strict=True)]

    def _answers(self, ray: ModuleType, tasks: list["_Task"], stored: list[Any]) -> dict["_Task", "_Found"]:
        answers: dict[_Task, _Found] = {}
        waiting, again = tasks[::-1], set()
        free, working = list(range(self.num_workers)), {}
        while len(answers) < len(tasks):
            while free and waiting:
                actor, task = free.pop(), waiting.pop()
                layer, first, seed = task
                future = self._actors[actor].solve.remote(stored[layer], first, self.units, seed)
                working[future] = actor, task
            (future,), _ = ray.wait(list(working), num_returns=1)
            actor, task = working.pop(future)
            try:
                answers[task] = ray.get(future)
            except ray.exceptions.RayActorError:
                if task in again:
                    raise
                again.add(task)
                self.repeated += 1
                self._actors[actor] = self._actor.remote(self.make)
                waiting.append(task)
            free.append(actor)
        return answers


class _Task(NamedTuple):
    """Some units of a layer. The seed is that of the step, so a task means the same wherever it is done."""

    layer: int
    first: int
    seed: int


class _Worker:
    """An actor: a solver made where it is used."""

    def __init__(self, make: Callable[[], Solver]) -> None:
        torch.set_num_threads(1)
        self.solver = make()

    def solve(self, problem: BinaryQuadratic, first: int, units: int, seed: int) -> "_Found":
        part = problem.units(first, first + units)
        solution = self.solver.solve(part, seed=seed)
        check_spins(type(self.solver).__name__, part, solution.spins)
        return solution.spins, solution.info


_Found = tuple[Tensor, Info]
"""Spins and what the solver had to say; the problem stays where it is."""


def _joined(parts: list[_Found], problem: BinaryQuadratic) -> Solution:
    spins = torch.cat([spins for spins, _ in parts], 1).to(problem.H)
    infos: list[dict[str, Any]] = [dict(own) for _, own in parts]
    info = {key: _concatenated([own[key] for own in infos]) for key in infos[0]}
    return Solution(problem, spins, cast(Info, info))


def _concatenated(values: list[Any]) -> Any:
    """What several groups of units know, one after the other: tensors or lists with an entry per unit."""
    return torch.cat(values) if isinstance(values[0], Tensor) else [entry for own in values for entry in own]


def results(
    function: Callable[..., Answer], jobs: Sequence[tuple[Any, ...]], address: str | None = None
) -> Iterator[Answer]:
    """``function(*job)`` of every job as a Ray task with one CPU, in the order in which they finish.

    A task whose machine is lost is done again elsewhere. Those not finished when the caller stops are
    cancelled.
    """
    ray = connect(address)
    remote = ray.remote(num_cpus=1, max_retries=3)(_in_one_thread)
    left = [remote.remote(function, job) for job in jobs]
    try:
        while left:
            (done,), left = ray.wait(left, num_returns=1)
            yield ray.get(done)
    finally:
        for task in left:
            ray.cancel(task, force=True)


def _in_one_thread(function: Callable[..., Answer], job: tuple[Any, ...]) -> Answer:
    torch.set_num_threads(1)
    return function(*job)


def connect(address: str | None = None) -> ModuleType:
    """Ray, connected to the cluster at ``address``, or as ``ray.init`` finds or starts one here."""
    try:
        import ray
    except ImportError:
        raise ImportError('a farm of solvers needs ray: pip install "spingrad[ray]"') from None
    if not ray.is_initialized():
        ray.init(address, include_dashboard=False, log_to_driver=False)
    return ray
