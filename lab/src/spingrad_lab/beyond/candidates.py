"""Steps that were tried beside the default one; `spingrad-lab run step` says what became of them."""

import math
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spingrad import QPSBGD, BinaryQuadratic
from spingrad.nn.sign import spins_of
from spingrad.optim.gradient import Gradient, Scaled
from spingrad.scaling import AUTO


class Remembering(QPSBGD):
    """The quadratic term over the rows of this batch and of earlier ones, whose weight decays."""

    kept, decay = 2, 0.7

    def pose(self, scaled: Scaled) -> list[BinaryQuadratic]:
        problems = super().pose(scaled)
        if scaled.gradient.weight.ndim > 2:
            return problems  # a convolution has rows enough
        (problem,) = problems
        past: deque[Tensor] = self.__dict__.setdefault("past", {}).setdefault(
            scaled.gradient.name, deque(maxlen=self.kept)
        )
        parts = [problem.Z, *(Z * self.decay ** (age + 1) for age, Z in enumerate(past))]
        past.appendleft(problem.Z)
        total = sum(self.decay ** (2 * age) for age in range(len(parts)))
        return [replace(problem, Z=torch.cat(parts) / total**0.5)]  # as strong as the rows of one batch


class AgainstCouplings(QPSBGD):
    """``target_rms`` as the strength of the linear term relative to the field that random spins make."""

    probes = 8

    def pose(self, scaled: Scaled) -> list[BinaryQuadratic]:
        strength = scaled.gradient.group["target_rms"]
        return [self._stronger(problem, strength) for problem in super().pose(scaled)]

    def _stronger(self, problem: BinaryQuadratic, strength: float) -> BinaryQuadratic:
        generator = torch.Generator().manual_seed(self.run["step"])
        spins = torch.randint(2, (problem.num_spins, self.probes), generator=generator).mul_(2).sub_(1)
        coupling = (problem.Z.T @ (problem.Z @ spins.to(problem.Z))).square().mean().sqrt()
        own = problem.H.square().mean(0).sqrt_().clamp_(min=torch.finfo(problem.H.dtype).tiny)
        return replace(problem, H=problem.H * (strength * coupling / own))


class AgainstOverlap(QPSBGD):
    """``target_rms`` for a row that stands alone, and √N of it for rows that share their inputs with N.

    What rows ask for is mostly noise to the inputs, so N rows that resemble each other reach only 1/√N of
    it. N is the sum of squared cosines of a row with all rows: the rows divided by their effective rank.
    The default does so with ``target_rms="auto"``, which is ``AUTO``.
    """

    def scale(self, gradient: Gradient) -> Scaled:
        group: dict[str, Any] = {**gradient.group, "target_rms": "auto"}
        auto = super().scale(gradient._replace(group=group))
        factor = gradient.group["target_rms"] / AUTO * self.factor(gradient)
        return auto._replace(size=auto.size * factor)

    def factor(self, gradient: Gradient) -> float:
        """Another factor of the target."""
        return 1.0


class Flipping(AgainstOverlap):
    """Chooses the next binary weights themselves: their output differs from the present one by the target.

    The latent weights become a memory of what was chosen: they move towards it by ``lr``, so that a weight
    flips when a flip was chosen often enough. ``clamp`` says how often that is.
    """

    def pose(self, scaled: Scaled) -> list[BinaryQuadratic]:
        problems = super().pose(scaled)
        weights = spins_of(scaled.gradient.weight).flatten(1).chunk(len(problems))
        return [
            replace(problem, H=problem.H - problem.Z.T @ (problem.Z @ weight.T))
            for problem, weight in zip(problems, weights, strict=True)
        ]


class Adapting(AgainstOverlap):
    """A target that grows while the last flips would still help on the next batch, and shrinks otherwise.

    The model of Levenberg and Marquardt compares a predicted with an observed decrease, which takes another
    forward pass. The next batch's gradient along the last flips says the same for nothing: at the minimum
    along them it is zero.
    """

    rate, limit = 1.05, 8.0

    def factor(self, gradient: Gradient) -> float:
        every = self.__dict__.setdefault("known", {})
        known = every.setdefault(gradient.name, {"factor": 1.0, "weight": None})
        weight = spins_of(gradient.weight).flatten(1)
        if known["weight"] is not None:
            slope = float((gradient.grad * (weight - known["weight"])).sum())
            factor = known["factor"] * (self.rate if slope < 0 else 1 / self.rate if slope > 0 else 1)
            known["factor"] = min(max(factor, 1 / self.limit), self.limit)
        known["weight"] = weight
        return float(known["factor"])


class Growing(AgainstOverlap):
    """A target that stands for 1 / (curvature · lr), as the quadratic model of the loss has it: it grows
    as the learning rate falls, by its square root and to at most eight times.
    """

    def factor(self, gradient: Gradient) -> float:
        group = gradient.group
        fallen = float(group.get("initial_lr", group["lr"]) / max(group["lr"], 1e-12))
        return min(math.sqrt(fallen), 8.0)
