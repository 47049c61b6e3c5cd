"""Solutions at a chosen distance from the optimum, reached in one of three ways."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad.kernels.compiled import Array, compiled
from spingrad.solvers import AnnealingSolver, ExactSolver, Solution, Solver, derive_seed
from spingrad.solvers.annealing import logistic

Kept = Literal["redrawn", "kept", "kept, a gauge per step"]
KEPT: tuple[Kept, ...] = ("redrawn", "kept", "kept, a gauge per step")
Way = Literal["temperature", "early stop", "random flips"]
WAYS: tuple[Way, ...] = ("temperature", "early stop", "random flips")
ENUMERABLE = 16  # spins
PROVABLE = 32  # spins
NARROW, SWEEPS = 64, 20
READS = {True: 10, False: 3}  # of the annealing that finds the best known spins of narrow and of wide units
HOT_SWEEPS = 10  # of a sample at a fixed temperature, from the best known spins
CYCLES = 30  # of an annealing that waits for its goal
FIRST_TRIALS = 15  # solves of a layer's first problem, to find the first temperature or threshold
NOISE = 2**12  # random numbers to choose a beginning from


class Posed:
    """A problem in double precision with its best known spins, and distances from their energies.

    The distance of spins is ``(E - E*) / (E_random - E*)``, where ``E*`` is the energy of the best known
    spins and ``E_random`` the mean energy of random ones: 0 for the best spins, 1 for random ones, and more
    for spins that are worse than random ones.
    """

    def __init__(self, problem: BinaryQuadratic, seed: int) -> None:
        Z = problem.Z.double()
        self.problem, self.seed = problem, seed
        self.K, self.H = Z.T @ Z, problem.H.T.double().contiguous()  # (n, n), (m, n)
        self.best = self.best_with(self.H)
        self.lowest, self.random = self.energy(self.best), float(self.K.trace())
        self.scale = self.random - self.lowest
        self.used = ~problem.idle & (self.scale > 1e-12 * self.random)

    def best_with(self, H: Tensor) -> Tensor:  # (m, n) -> (m, n)
        """The best known spins with other fields."""
        if len(self.K) <= ENUMERABLE:
            return enumerated(self.K, H)
        fields = self.problem.H if H is self.H else H.T.to(self.problem.H)
        return annealed(replace(self.problem, H=fields), 1, self.seed)

    def energy(self, G: Tensor) -> Tensor:  # (m, n) -> (m,)
        """Energies without the offset of the problem."""
        return ((G @ self.K - 2 * self.H) * G).sum(1)

    def distances(self, G: Tensor) -> Tensor:
        """Of the units that a step moves."""
        return ((self.energy(G) - self.lowest) / self.scale)[self.used]


def annealed(problem: BinaryQuadratic, times: int, seed: int) -> Tensor:  # (m, n)
    """Spins of an annealing with so many times the usual reads."""
    reads = times * READS[problem.num_spins <= NARROW]
    return AnnealingSolver(reads, SWEEPS).solve(problem, seed=seed).spins.T.double()


def enumerated(K: Tensor, H: Tensor) -> Tensor:  # (n, n), (m, n) -> (m, n)
    """The optimum of each unit among all spins: a table of both halves of the spins, in single precision.

    Units with equal fields, of which the published step has many, are solved once.
    """
    different, where = H.float().unique(dim=0, return_inverse=True)
    return _enumerated(K.float(), different)[where]


def _enumerated(K: Tensor, H: Tensor) -> Tensor:
    k = len(K) // 2
    low, high = _every(k), _every(len(K) - k)
    both = 2 * low @ K[:k, k:] @ high.T  # (2^k, 2^(n - k)), the same for all units
    both += ((low @ K[:k, :k]) * low).sum(1)[:, None] + ((high @ K[k:, k:]) * high).sum(1)
    first, second = (2 * low @ H[:, :k].T).T, (2 * high @ H[:, k:].T).T
    places = [int((both - a[:, None]).sub_(b).argmin()) for a, b in zip(first, second, strict=True)]
    found = torch.tensor(places, dtype=torch.long)
    return torch.cat([low[found // len(high)], high[found % len(high)]], 1).double()


@cache
def _every(n: int) -> Tensor:  # (2^n, n)
    bits = torch.arange(2**n)[:, None] >> torch.arange(n)
    return (bits & 1).mul_(2).sub_(1).float()


def walk(
    K: Array, H: Array, G: Array, order: Array, temperatures: Array, noise: Array, places: Array, goal: Array
) -> Array:
    """Set spin after spin of each unit by a heat bath, until the unit's energy is at its goal or lower.

    Args:
        K: Couplings, shape ``(n, n)``.
        H: Fields, shape ``(m, n)``.
        G: Spins to begin at, shape ``(m, n)``; receives those at the end.
        order: The order in which the spins are visited.
        temperatures: One per sweep; at zero each spin is set to the sign of its field.
        noise: Logistic random numbers.
        places: Where the noise of each unit and sweep begins, shape ``(m, number of sweeps)``.
        goal: Energy of each unit at which it stops.

    Returns:
        The best spins that each unit had at its end or at the end of a sweep, shape ``(m, n)``.
    """
    units, n = H.shape
    best = G.copy()
    field = np.empty(n)
    for j in range(units):
        energy = 0.0
        for i in range(n):
            coupled = 0.0
            for k in range(n):
                coupled += K[i, k] * G[j, k]
            field[i] = H[j, i] - coupled
            energy -= G[j, i] * (H[j, i] + field[i])
        lowest = energy
        for s in range(len(temperatures)):
            if energy <= goal[j]:
                break
            for v in range(n):
                i = order[v]
                old = G[j, i]
                own = field[i] + K[i, i] * old
                new = 1.0 if own + temperatures[s] * noise[places[j, s] + v] >= 0 else -1.0
                if new != old:
                    G[j, i] = new
                    energy -= 2 * (new - old) * own
                    for k in range(n):
                        field[k] -= (new - old) * K[i, k]
                    if energy <= goal[j]:
                        break
            if energy < lowest:
                lowest = energy
                for k in range(n):
                    best[j, k] = G[j, k]
    return best


class ControlledSolver(Solver):
    """Spins that are, in the mean over units and steps, a chosen distance above the best known ones.

    ``temperature``: samples of a heat bath, which begins at the best known spins. ``early stop``: annealing
    that begins with cold descent from random spins, and stops at the first flip that brings the energy below
    a threshold; the threshold is drawn from an exponential distribution. The temperature of each layer and
    the mean threshold of each layer follow the distances of the steps before. ``random flips``: the best
    known spins, each flipped with the same probability, for which the mean energy is known.

    Args:
        distance: The distance asked for (:class:`Posed`); 0 for the best known spins.
        way: How it is reached.

    Attributes:
        reached: The mean distance of each step.
    """

    def __init__(self, distance: float, way: Way = "temperature") -> None:
        self.distance, self.way = distance, way
        self.reached: list[float] = []
        self._dials: dict[int, _Dial] = {}

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return self.solve_all([problem], seed=seed)[0]

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        solutions, distances = [], []
        for place, problem in enumerate(problems):
            own = derive_seed(seed, place)
            posed = Posed(problem, own)
            spins = self._spins(posed, place, np.random.default_rng(own))
            distances.append(posed.distances(spins))
            solutions.append(Solution(problem, spins.T.to(problem.H)))
        self.reached.append(mean(torch.cat(distances)))
        return solutions

    def _spins(self, posed: Posed, place: int, random: np.random.Generator) -> Tensor:  # (m, n)
        if not self.distance:
            return posed.best
        if self.way == "random flips":
            return flipped(posed, self.distance, random)
        find = sampled if self.way == "temperature" else stopped
        return self._dialled(posed, place, lambda value: find(posed, value, random))

    def _dialled(self, posed: Posed, place: int, find: Callable[[float], Tensor]) -> Tensor:
        """Spins at the value of the layer's dial, which follows the distances that they have."""
        first = place not in self._dials
        dial = self._dials.setdefault(place, _Dial(self.distance))
        for _ in range(FIRST_TRIALS if first else 1):
            spins = find(dial.value)
            dial.turn(mean(posed.distances(spins)) / self.distance)
        return spins


class DisturbedSolver(ControlledSolver):
    """The best known spins of problems whose fields have errors, as large as a chosen distance asks for.

    Errors are normal, in units of the root mean square of a unit's fields. They are drawn for every step
    (``redrawn``), or once for every spin of every layer (``kept``), as the errors of a chip's qubits are. A
    gauge turns the sign of each kept error at random in every step: what spin reversal does on a chip.

    Args:
        distance: The mean distance asked for (:class:`Posed`).
        kept: What happens to the errors from one step to the next.
    """

    def __init__(self, distance: float, kept: Kept) -> None:
        super().__init__(distance)
        self.kept = kept
        self._errors: dict[int, Tensor] = {}

    def _spins(self, posed: Posed, place: int, random: np.random.Generator) -> Tensor:  # (m, n)
        size = posed.H.square().mean(1, keepdim=True).sqrt()

        def disturbed(sigma: float) -> Tensor:
            return posed.best_with(posed.H + sigma * size * self._drawn(posed, place, random))

        return self._dialled(posed, place, disturbed)

    def _drawn(self, posed: Posed, place: int, random: np.random.Generator) -> Tensor:  # (m, n)
        if self.kept == "redrawn" or place not in self._errors:
            self._errors[place] = torch.from_numpy(random.standard_normal(tuple(posed.H.shape)))
        errors = self._errors[place]
        if self.kept != "kept, a gauge per step":
            return errors
        return errors * torch.from_numpy(random.choice([-1.0, 1.0], tuple(posed.H.shape)))


class EnumeratingSolver(Solver):
    """The exact solver, by a table of all spins where there are at most 16: several times as fast there."""

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        if problem.num_spins > ENUMERABLE:
            return ExactSolver().solve(problem, seed=seed)
        best = enumerated(problem.gram().double(), problem.H.T.double())
        return Solution(problem, best.T.to(problem.H))


class _Dial:
    """A positive value that is turned until what it causes has the mean asked for (Robbins and Monro)."""

    def __init__(self, value: float) -> None:
        self.value, self.turns = value, 0

    def turn(self, share: float) -> None:
        """Turn it after a result that was this share of what is asked."""
        self.turns += 1
        change = max(1 / (1 + self.turns), 0.03) * (1 - share)
        self.value = min(self.value * math.exp(min(max(change, -2.0), 1.0)), 1e3)


def flipped(posed: Posed, distance: float, random: np.random.Generator) -> Tensor:  # (m, n)
    """The best spins, each flipped with the probability at which the mean energy has this distance.

    Spins that keep a share ``q`` of their mean have the mean energy ``q² gᵀKg + (1 - q²) tr K - 2 q⟨h, g⟩``.
    """
    fields = (posed.H * posed.best).sum(1)
    square = posed.lowest + 2 * fields - posed.random  # gᵀKg - tr K
    constant = (1 - distance) * posed.scale
    root = (fields.square() - square * constant).clamp(min=0).sqrt()
    share = (constant / (fields + root).clamp(min=1e-300)).clamp(0, 1)
    chance = torch.from_numpy(random.random(tuple(posed.H.shape)))
    return torch.where(chance < (1 - share)[:, None] / 2, -posed.best, posed.best)


def sampled(posed: Posed, temperature: float, random: np.random.Generator) -> Tensor:  # (m, n)
    """Spins of a heat bath at one temperature, in units of the mean coupling of a spin with itself."""
    return _walked(posed, posed.best.clone(), np.full(HOT_SWEEPS, temperature), None, random)


def stopped(posed: Posed, threshold: float, random: np.random.Generator) -> Tensor:  # (m, n)
    """Spins of an annealing from random spins, stopped below an energy whose mean distance is given."""
    start = torch.from_numpy(random.choice([-1.0, 1.0], tuple(posed.H.shape)))
    cycle = [*np.geomspace(0.5, 0.1, 8), 0.0, 0.0]
    goal = posed.lowest + posed.scale * torch.from_numpy(random.exponential(threshold, len(posed.H)))
    return _walked(posed, start, np.array([0.0, 0.0, *cycle * CYCLES]), goal, random)


def _walked(
    posed: Posed, G: Tensor, temperatures: Array, goal: Tensor | None, random: np.random.Generator
) -> Tensor:
    """Spins at the end of a walk; with a goal, the best ones of the units that have not reached it."""
    m, n = G.shape
    noise = logistic(random, NOISE + n).astype(float)
    places = random.integers(0, NOISE, (m, len(temperatures)))
    goals = np.full(m, -np.inf) if goal is None else (goal + 1e-9 * posed.scale).numpy()
    hot = temperatures * (posed.random / n)
    best = compiled(walk)(
        posed.K.numpy(), posed.H.numpy(), G.numpy(), random.permutation(n), hot, noise, places, goals
    )
    if goal is None:
        return G
    return torch.from_numpy(best)


class Measured(Solver):
    """Another solver, and the distances of its solutions at some of the steps.

    Args:
        inner: The solver.
        every: Steps from one that is measured to the next.
    """

    def __init__(self, inner: Solver, every: int) -> None:
        self.inner, self.every = inner, every
        self.reached: list[float] = []
        self._calls = 0

    def solve(self, problem: BinaryQuadratic, *, initial: Tensor | None = None, seed: int = 0) -> Solution:
        return self.solve_all([problem], seed=seed)[0]

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        solutions = self.inner.solve_all(problems, seed=seed)
        if self._calls % self.every == 0:
            pairs = zip(problems, solutions, strict=True)
            found = [Posed(p, seed).distances(s.spins.T.double()) for p, s in pairs]
            self.reached.append(mean(torch.cat(found)))
        self._calls += 1
        return solutions


class Checked(ControlledSolver):
    """The best known spins, compared at some of the steps with proven optima or with longer annealing.

    Args:
        every: Steps from one that is checked to the next.

    Attributes:
        above: By fan-in, distances of the best known spins from better ones that a check has found.
    """

    def __init__(self, every: int) -> None:
        super().__init__(0.0)
        self.every = every
        self.above: dict[int, list[float]] = {}

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        if len(self.reached) % self.every == self.every // 2:
            for problem in problems:
                if problem.num_spins > ENUMERABLE:
                    self._check(problem, seed)
        return super().solve_all(problems, seed=seed)

    def _check(self, problem: BinaryQuadratic, seed: int) -> None:
        posed = Posed(problem, seed)
        if problem.num_spins <= PROVABLE:
            solution = ExactSolver(max_nodes=200_000).solve(problem)
            better, counted = solution.spins.T.double(), solution.info["proved"]
        else:
            better, counted = annealed(problem, 10, seed + 1), torch.ones(problem.num_units, dtype=torch.bool)
        above = (-posed.distances(better)).clamp(min=0)[counted[posed.used]]
        self.above.setdefault(problem.num_spins, []).extend(above.tolist())


def mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
