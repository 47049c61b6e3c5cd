"""Gather: the rows of all workers are one problem, whose units the workers share out."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spingrad.distributed.bits import pack, packed_size, unpack
from spingrad.distributed.reduction import Counts, Reduction
from spingrad.optim.checks import solved
from spingrad.problem import BinaryQuadratic
from spingrad.record import LayerRecord
from spingrad.solvers import Solution, derive_seed

UNITS = 64
"""Units solved together, on any number of workers: a matrix product of another shape may round otherwise."""


class Gather(Reduction):
    """Solve a share of the units; the spins of the others arrive as bits.

    Units are cut into blocks of 64, and worker ``i`` of ``W`` takes blocks ``i``, ``i + W`` and so on, each
    with a seed of its own, so that the answer does not depend on ``W``.

    Args:
        inner: Solves the blocks.
        wire: Brings rows and spins.
    """

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        blocks = [block for problem in problems for block in problem.in_parts(UNITS)]
        sizes = [packed_size(block.H.numel()) for block in blocks]
        workers = range(self.wire.size)
        own = [
            pack(solved(self.inner, [blocks[i]], derive_seed(seed, i))[0].spins.T)
            for i in range(self.wire.rank, len(blocks), self.wire.size)
        ]
        share = _padded(own, max(sum(sizes[i :: self.wire.size]) for i in workers), blocks[0].H)
        shares = [_split(s, sizes[i :: self.wire.size]) for i, s in enumerate(self.wire.all_gather(share))]
        packed = (shares[i % self.wire.size][i // self.wire.size] for i in range(len(blocks)))
        return [Solution(problem, torch.cat([*_unpacked(problem, packed)]).T) for problem in problems]

    def join(self, records: list[list[LayerRecord]], counts: Counts) -> list[list[LayerRecord]]:
        """The records of all workers as those of one, in the order of the workers.

        The loss of each worker is the mean over its own rows, so its gradients weigh as much as it has rows.

        Args:
            records: Of every layer, one per group of channels.
            counts: Samples, nodes or images, for every worker and layer.
        """
        totals = [sum(worker[i] for worker in counts) for i in range(len(records))]
        own = [
            tensor
            for layer, count, total in zip(records, counts[self.wire.rank], totals, strict=True)
            for record in layer
            for tensor in (record.rows.data, record.grad * (count / total))
        ]
        shapes = [
            [
                (count, *tensor.shape[1:])
                for layer, count in zip(records, worker, strict=True)
                for record in layer
                for tensor in (record.rows.data, record.grad)
            ]
            for worker in counts
        ]
        lengths = [[math.prod(shape) for shape in worker] for worker in shapes]
        buffer = _padded([tensor.flatten() for tensor in own], max(map(sum, lengths)), own[0])
        parts = [
            [part.view(shape) for part, shape in zip(_split(*pair), worker, strict=True)]
            for *pair, worker in zip(self.wire.all_gather(buffer), lengths, shapes, strict=True)
        ]
        joined = iter([torch.cat(part).to(t) for part, t in zip(zip(*parts, strict=True), own, strict=True)])
        return [
            [LayerRecord(record.rows.with_data(next(joined)), next(joined)) for record in layer]
            for layer in records
        ]


def _padded(parts: list[Tensor], length: int, like: Tensor) -> Tensor:
    """The parts one after the other, filled up with zeros: all workers send equally much."""
    joined = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8, device=like.device)
    return torch.cat([joined, joined.new_zeros(length - len(joined))])


def _split(joined: Tensor, lengths: list[int]) -> Sequence[Tensor]:
    parts: tuple[Tensor, ...] = joined[: sum(lengths)].split(lengths)
    return parts


def _unpacked(problem: BinaryQuadratic, packed: Iterator[Tensor]) -> Iterator[Tensor]:
    for start in range(0, problem.num_units, UNITS):
        units = min(UNITS, problem.num_units - start)
        spins = unpack(next(packed), units * problem.num_spins, problem.H.dtype)
        yield spins.view(units, problem.num_spins)
