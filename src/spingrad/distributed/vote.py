"""Vote: each worker solves its own problem, and every spin goes the way of the majority."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spingrad.distributed.agreement import Agreement, agreement
from spingrad.distributed.bits import majority, pack, packed_size, unpack
from spingrad.distributed.wire import Wire
from spingrad.problem import BinaryQuadratic
from spingrad.solvers import Solution, derive_seed


class Vote:
    """Spins by majority. A worker counts a share of the weights: it receives all votes on them as bits, and
    sends the others the outcome as bits, which makes two bits per weight and worker.

    A worker abstains on the units that are idle in its own problem; a unit on which all abstain is idle.
    Votes of suspects are looked at and not counted.

    Args:
        wire: Brings the votes.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.agreement = Agreement(wire.size, report=wire.rank == 0)

    def decide(self, solutions: Sequence[Solution], seed: int) -> list[Solution]:
        """What the workers have decided, from this worker's solutions of its own problems."""
        problems = [solution.problem for solution in solutions]
        own = torch.cat([pack(solution.spins.T) for solution in solutions])
        voting = self._voting(problems)
        share = -(-len(own) // self.wire.size)
        ballots = torch.cat([own, own.new_zeros(self.wire.size * share - len(own))])
        received = self.wire.all_to_all(ballots.view(self.wire.size, share))
        votes = unpack(received.flatten(), 8 * received.numel(), torch.int8).view(self.wire.size, 8 * share)
        if not voting.all():
            votes = votes * self._weights(problems, voting, share)
        seen = agreement(votes, self.agreement.next, seed).view(1).view(torch.uint8)
        suspects = self.agreement.suspects()
        votes[suspects], voting[suspects] = 0, False
        outcome = pack(majority(votes, derive_seed(seed, self.wire.rank)))
        seen, outcomes = self.wire.all_gather(torch.cat([seen, outcome])).split([4, share], 1)
        self.agreement.update(seen.flatten().view(torch.float32))
        return [*self._outcomes(problems, outcomes.flatten(), ~voting.any(0))]

    def _voting(self, problems: Sequence[BinaryQuadratic]) -> Tensor:  # (workers, units of all problems)
        """Which worker votes on which units."""
        own = torch.where(torch.cat([problem.idle for problem in problems]), -1.0, 1.0)
        return torch.stack([unpack(row, len(own)) > 0 for row in self.wire.all_gather(pack(own))])

    def _weights(self, problems: Sequence[BinaryQuadratic], voting: Tensor, share: int) -> Tensor:
        """Zero for workers that abstain, on the spins that this worker counts, shape ``(workers, spins)``."""
        sizes = [p.num_units for p in problems]
        spread = []
        for problem, units in zip(problems, voting.split(sizes, 1), strict=True):
            size = problem.H.numel()
            weights = units.repeat_interleave(problem.num_spins, 1)
            spread.append(torch.nn.functional.pad(weights, (0, 8 * packed_size(size) - size)))
        weights = torch.cat(spread, 1)
        own = slice(8 * share * self.wire.rank, 8 * share * (self.wire.rank + 1))
        return torch.nn.functional.pad(weights[:, own], (0, 8 * share - weights[:, own].shape[1]))

    def _outcomes(
        self, problems: Sequence[BinaryQuadratic], packed: Tensor, idle: Tensor
    ) -> Iterator[Solution]:
        sizes = [packed_size(p.H.numel()) for p in problems]
        parts = zip(
            packed[: sum(sizes)].split(sizes), idle.split([p.num_units for p in problems]), strict=True
        )
        for problem, (part, abstained) in zip(problems, parts, strict=True):
            spins = unpack(part, problem.H.numel(), problem.H.dtype)
            spins = spins.view(problem.num_units, problem.num_spins)
            yield Solution(replace(problem, idle=abstained), spins.T)
