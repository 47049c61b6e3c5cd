"""Vote: each worker solves its own rows, and every spin goes the way of the majority."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spingrad.distributed.agreement import Trust, agreement
from spingrad.distributed.bits import majority, pack, packed_size, unpack
from spingrad.distributed.reduction import Reduction, Rows
from spingrad.distributed.wire import Wire
from spingrad.problem import BinaryLeastSquares
from spingrad.record import LayerRecord
from spingrad.rows import Patches
from spingrad.solvers import Solver, derive_seed


class Vote(Reduction):
    """Spins by majority. A worker counts a share of the weights: it receives all votes on them as bits, and
    sends the others the outcome as bits, which makes two bits for each weight and worker.

    A worker abstains on units that have no gradient in its rows; a unit on which all abstain rests (its
    spins are zero). Votes of suspects are looked at, but not counted.

    Args:
        inner: Solves a worker's own problem.
        wire: Brings the votes.
    """

    def __init__(self, inner: Solver, wire: Wire) -> None:
        super().__init__(inner, wire)
        self.resting: list[Tensor | None] = []
        self.trust = Trust(wire.size, report=wire.rank == 0)

    def stream(self, problems: Sequence[BinaryLeastSquares], *, seed: int = 0) -> list[Iterable[Tensor]]:
        voting = self._voting(problems)
        own = torch.cat([pack(torch.cat([*spins])) for spins in self.inner.stream(problems, seed=seed)])
        share = -(-len(own) // self.wire.size)
        ballots = torch.cat([own, own.new_zeros(self.wire.size * share - len(own))])
        received = self.wire.all_to_all(ballots.view(self.wire.size, share))
        votes = unpack(received.flatten(), 8 * received.numel(), torch.int8).view(self.wire.size, 8 * share)
        if not voting.all():
            votes = votes * self._weights(problems, voting, share)
        seen = agreement(votes, self.trust.next, seed).view(1).view(torch.uint8)
        suspects = self.trust.suspects()
        votes[suspects], voting[suspects] = 0, False
        outcome = pack(majority(votes, derive_seed(seed, self.wire.rank)))
        outcomes, seen = self.wire.all_gather(torch.cat([outcome, seen])).split([share, 4], 1)
        self.trust.update(seen.contiguous().view(torch.float32)[:, 0])
        return [[part] for part in self._parts(problems, outcomes.flatten(), voting)]

    def _voting(self, problems: Sequence[BinaryLeastSquares]) -> Tensor:  # (workers, units of all problems)
        """Who votes on which units."""
        voting = [torch.ones(p.num_units, device=p.V.device) for p in problems]
        for mask, resting in zip(voting, self.resting or [None] * len(voting), strict=True):
            if resting is not None:
                mask[resting] = -1
        self.resting = []
        own = torch.cat(voting)
        return torch.stack([unpack(row, len(own)) > 0 for row in self.wire.all_gather(pack(own))])

    def _weights(self, problems: Sequence[BinaryLeastSquares], voting: Tensor, share: int) -> Tensor:
        """Zero for who abstains, for the spins that this worker counts, shape ``(workers, spins)``."""
        sizes = [p.num_units for p in problems]
        spread = []
        for problem, units in zip(problems, voting.split(sizes, 1), strict=True):
            size = problem.num_units * problem.num_spins
            weights = units.repeat_interleave(problem.num_spins, 1)
            spread.append(torch.nn.functional.pad(weights, (0, 8 * packed_size(size) - size)))
        weights = torch.cat(spread, 1)
        own = slice(8 * share * self.wire.rank, 8 * share * (self.wire.rank + 1))
        return torch.nn.functional.pad(weights[:, own], (0, 8 * share - weights[:, own].shape[1]))

    def _parts(
        self, problems: Sequence[BinaryLeastSquares], packed: Tensor, voting: Tensor
    ) -> Iterator[Tensor]:  # (units, n) each
        sizes = [packed_size(p.num_units * p.num_spins) for p in problems]
        moving = voting.any(0).split([p.num_units for p in problems])
        for problem, part, moves in zip(problems, packed[: sum(sizes)].split(sizes), moving, strict=True):
            spins = unpack(part, problem.num_units * problem.num_spins, problem.V.dtype)
            spins = spins.view(problem.num_units, problem.num_spins)
            yield spins if moves.all() else spins * moves[:, None]

    def join(self, records: list[list[LayerRecord]], rows: Rows) -> list[list[LayerRecord]]:
        """A worker's own records; one without rows gets a row of zeros, on which it abstains."""
        self.resting = []
        return [[record if len(record.grad) else _zeros(record) for record in layer] for layer in records]


def _zeros(record: LayerRecord) -> LayerRecord:
    if isinstance(record.x, Patches):
        one = replace(record.x, images=[record.x.images[0].new_zeros(1, *record.x.images[0].shape[1:])])
        return LayerRecord(one, record.grad.new_zeros(len(one), record.grad.shape[1]))
    return LayerRecord(
        record.x.new_zeros(1, record.x.shape[1]), record.grad.new_zeros(1, record.grad.shape[1])
    )
