"""Steps that were tried beside the default one; `spingrad-lab run step` says what became of them."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from spingrad import QPSBGD, BinaryLeastSquares
from spingrad.nn.sign import spins_of
from spingrad.rows import Patches
from spingrad.scaling import overlap, sampled


class Remembering(QPSBGD):
    """The quadratic term over the rows of this batch and of earlier ones, whose weight decays."""

    kept, decay = 2, 0.7

    def _pose(self, layer: Any) -> Any:
        problems, idle, average = super()._pose(layer)
        if len(problems) > 1 or type(problems[0]) is not BinaryLeastSquares:
            return problems, idle, average  # a convolution has rows enough
        (problem,) = problems
        past: deque[Tensor] = self.__dict__.setdefault("past", {}).setdefault(
            layer.name, deque(maxlen=self.kept)
        )
        parts = [problem.Z, *(z * self.decay ** (age + 1) for age, z in enumerate(past))]
        past.appendleft(problem.Z)
        total = sum(self.decay ** (2 * age) for age in range(len(parts)))
        Z = torch.cat(parts) / total**0.5  # as strong as the rows of one batch
        H = problem.fields()
        return [BinaryLeastSquares(Z, Z.new_zeros(()).expand(len(Z), H.shape[1]), H=H)], idle, average


class AgainstCouplings(QPSBGD):
    """``target_rms`` as the strength of the linear term beside the field that random spins make."""

    probes = 8

    def _pose(self, layer: Any) -> Any:
        problems, idle, average = super()._pose(layer)
        return [self._scaled(problem, layer.group["target_rms"]) for problem in problems], idle, average

    def _scaled(self, problem: BinaryLeastSquares, strength: float) -> BinaryLeastSquares:
        generator = torch.Generator().manual_seed(self.param_groups[0]["step"])
        spins = torch.randint(2, (problem.num_spins, self.probes), generator=generator).mul_(2).sub_(1)
        blocks = [(own, z) for own, z, _ in problem.blocks(problem.num_spins)]
        reached = torch.stack([z @ spins[own].to(z) for own, z in blocks]).sum(0)
        coupling = torch.cat([z.T @ reached for _, z in blocks]).square().mean().sqrt()
        fields = problem.fields()
        own = fields.square().mean(0).sqrt_().clamp_(min=torch.finfo(fields.dtype).tiny)
        return problem.driven_by(fields * (strength * coupling / own))


class AgainstOverlap(QPSBGD):
    """``target_rms`` for a row that stands alone, and √N of it for rows that share their inputs with N.

    What rows ask for is mostly noise to the inputs, so N rows that resemble each other reach but 1/√N of
    it. N is the sum of squared cosines of a row with all rows: the rows divided by their effective rank.
    """

    def _pose(self, layer: Any) -> Any:
        rows, inputs = layer.records[0].x.shape
        common = overlap(sampled(layer.records[0].x)[1], rows)
        if isinstance(layer.records[0].x, Patches):
            common /= max(1.0, rows / inputs)  # which the target of a convolution has already
        target = layer.group["target_rms"] * common**0.5
        return super()._pose(layer._replace(group={**layer.group, "target_rms": target}))


class Flipping(AgainstOverlap):
    """Chooses the next binary weights themselves: their output differs from the present one by the target.

    The latent weights become a memory of what was chosen: they move towards it by ``lr``, so that a weight
    flips when a flip was chosen often enough. ``clamp`` says how often that is.
    """

    def _pose(self, layer: Any) -> Any:
        problems, idle, average = super()._pose(layer)
        weights = spins_of(layer.weight).flatten(1).chunk(len(problems))
        posed = []
        for problem, weight in zip(problems, weights, strict=True):
            blocks = problem.blocks(problem.num_spins)
            present = torch.stack([z @ weight[:, own].T for own, z, _ in blocks]).sum(0)
            posed.append(problem._with(V=problem.V - present))
        return posed, idle, average


class Adapting(AgainstOverlap):
    """A target that grows while the last flips would still help on the next batch, and shrinks otherwise.

    The model of Levenberg and Marquardt compares a predicted with an observed decrease, which takes another
    forward pass. The next batch's gradient along the last flips says the same for nothing: at the minimum
    along them it is zero.
    """

    rate, limit = 1.05, 8.0

    def _pose(self, layer: Any) -> Any:
        known = self.__dict__.setdefault("known", {}).setdefault(layer.name, {"factor": 1.0, "weight": None})
        weight = spins_of(layer.weight).flatten(1)
        if known["weight"] is not None:
            flips = weight - known["weight"]
            rows = layer.group["rows"]
            plain = [
                BinaryLeastSquares.from_record(record, rows, None).fields().T for record in layer.records
            ]
            slope = float((torch.cat(plain) * flips).sum())
            factor = known["factor"] * (self.rate if slope < 0 else 1 / self.rate if slope > 0 else 1)
            known["factor"] = min(max(factor, 1 / self.limit), self.limit)
        known["weight"] = weight
        target = layer.group["target_rms"] * known["factor"]
        return super()._pose(layer._replace(group={**layer.group, "target_rms": target}))


class Growing(AgainstOverlap):
    """A target that stands for 1 / (curvature · lr), as the quadratic model of the loss has it: it grows
    as the learning rate falls, by its square root and to at most eight times.
    """

    def _pose(self, layer: Any) -> Any:
        fallen = layer.group.get("initial_lr", layer.group["lr"]) / max(layer.group["lr"], 1e-12)
        target = layer.group["target_rms"] * min(fallen**0.5, 8.0)
        return super()._pose(layer._replace(group={**layer.group, "target_rms": target}))
