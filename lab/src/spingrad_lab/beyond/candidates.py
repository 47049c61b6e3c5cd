"""Steps that were tried beside the default one; `spingrad-lab run step` says what became of them."""

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spingrad import QPSBGD, BinaryQuadratic
from spingrad.nn.sign import spins_of
from spingrad.optim.functional import problem_of
from spingrad.optim.qpsbgd import Layer
from spingrad.rows import DenseRows
from spingrad.scaling import overlap

Posed = tuple[list[BinaryQuadratic], Tensor | None]


class Remembering(QPSBGD):
    """The quadratic term over the rows of this batch and of earlier ones, whose weight decays."""

    kept, decay = 2, 0.7

    def pose(self, layer: Layer) -> Posed:
        problems, average = super().pose(layer)
        if layer.weight.ndim > 2:
            return problems, average  # a convolution has rows enough
        (problem,) = problems
        past: deque[Tensor] = self.__dict__.setdefault("past", {}).setdefault(
            layer.name, deque(maxlen=self.kept)
        )
        own = problem.rows.dense()
        parts = [own, *(z * self.decay ** (age + 1) for age, z in enumerate(past))]
        past.appendleft(own)
        total = sum(self.decay ** (2 * age) for age in range(len(parts)))
        Z = torch.cat(parts) / total**0.5  # as strong as the rows of one batch
        return [replace(problem, rows=DenseRows(Z))], average


class AgainstCouplings(QPSBGD):
    """``target_rms`` as the strength of the linear term relative to the field that random spins make."""

    probes = 8

    def pose(self, layer: Layer) -> Posed:
        problems, average = super().pose(layer)
        return [self._scaled(problem, layer.group["target_rms"]) for problem in problems], average

    def _scaled(self, problem: BinaryQuadratic, strength: float) -> BinaryQuadratic:
        generator = torch.Generator().manual_seed(self.run["step"])
        spins = torch.randint(2, (problem.num_spins, self.probes), generator=generator).mul_(2).sub_(1)
        Z = problem.rows.dense()
        coupling = (Z.T @ (Z @ spins.to(Z))).square().mean().sqrt()
        own = problem.H.square().mean(0).sqrt_().clamp_(min=torch.finfo(problem.H.dtype).tiny)
        return replace(problem, H=problem.H * (strength * coupling / own))


class AgainstOverlap(QPSBGD):
    """``target_rms`` for a row that stands alone, and √N of it for rows that share their inputs with N.

    What rows ask for is mostly noise to the inputs, so N rows that resemble each other reach only 1/√N of
    it. N is the sum of squared cosines of a row with all rows: the rows divided by their effective rank.
    """

    def pose(self, layer: Layer) -> Posed:
        rows = layer.records[0].rows
        common = float(overlap(rows.sketch[1], len(rows)))
        common /= rows.fixed_target_factor**2  # which a given target is raised by already
        return super().pose(_with_target(layer, layer.group["target_rms"] * common**0.5))


class Flipping(AgainstOverlap):
    """Chooses the next binary weights themselves: their output differs from the present one by the target.

    The latent weights become a memory of what was chosen: they move towards it by ``lr``, so that a weight
    flips when a flip was chosen often enough. ``clamp`` says how often that is.
    """

    def pose(self, layer: Layer) -> Posed:
        problems, average = super().pose(layer)
        weights = spins_of(layer.weight).flatten(1).chunk(len(problems))
        posed = []
        for problem, weight in zip(problems, weights, strict=True):
            Z = problem.rows.dense()
            posed.append(replace(problem, H=problem.H - Z.T @ (Z @ weight.T)))
        return posed, average


class Adapting(AgainstOverlap):
    """A target that grows while the last flips would still help on the next batch, and shrinks otherwise.

    The model of Levenberg and Marquardt compares a predicted with an observed decrease, which takes another
    forward pass. The next batch's gradient along the last flips says the same for nothing: at the minimum
    along them it is zero.
    """

    rate, limit = 1.05, 8.0

    def pose(self, layer: Layer) -> Posed:
        known = self.__dict__.setdefault("known", {}).setdefault(layer.name, {"factor": 1.0, "weight": None})
        weight = spins_of(layer.weight).flatten(1)
        if known["weight"] is not None:
            flips = weight - known["weight"]
            plain = [problem_of(record, layer.group["rows"], None).H.T for record in layer.records]
            slope = float((torch.cat(plain) * flips).sum())
            factor = known["factor"] * (self.rate if slope < 0 else 1 / self.rate if slope > 0 else 1)
            known["factor"] = min(max(factor, 1 / self.limit), self.limit)
        known["weight"] = weight
        return super().pose(_with_target(layer, layer.group["target_rms"] * known["factor"]))


class Growing(AgainstOverlap):
    """A target that stands for 1 / (curvature · lr), as the quadratic model of the loss has it: it grows
    as the learning rate falls, by its square root and to at most eight times.
    """

    def pose(self, layer: Layer) -> Posed:
        fallen = layer.group.get("initial_lr", layer.group["lr"]) / max(layer.group["lr"], 1e-12)
        return super().pose(_with_target(layer, layer.group["target_rms"] * min(fallen**0.5, 8.0)))


def _with_target(layer: Layer, target_rms: float) -> Layer:
    group: dict[str, Any] = {**layer.group, "target_rms": target_rms}
    return layer._replace(group=group)
