"""Gather: all ranks have the same problems, and share out their units."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from spingrad.distributed.bits import pack, packed_size, unpack
from spingrad.distributed.reduction import Reduction
from spingrad.optim.checks import solved
from spingrad.problem import BinaryQuadratic
from spingrad.solvers import Solution, derive_seed

UNITS = 64
"""Units solved together, on any number of ranks: a matrix product of another shape may round otherwise."""


class Gather(Reduction):
    """Solve a share of the units; the spins of the others arrive as bits.

    Units are cut into blocks of 64, and rank ``i`` of ``W`` takes blocks ``i``, ``i + W`` and so on, each
    with a seed of its own, so that the answer does not depend on ``W``. Neighbours of one shape and fewer
    units, such as groups of channels, are one block: a solver may take them together.

    Args:
        inner: Solves the blocks.
        wire: Brings spins.
    """

    def solve_all(self, problems: Sequence[BinaryQuadratic], *, seed: int = 0) -> list[Solution]:
        blocks, workers = [*_blocks(problems)], self.wire.size
        counts = [sum(problem.H.numel() for problem in block) for block in blocks]
        sizes = [packed_size(count) for count in counts]
        device = problems[0].H.device
        own = [torch.zeros(0, dtype=torch.uint8, device=device)]
        for i in range(self.wire.rank, len(blocks), workers):
            spins = [
                solution.spins.T.flatten() for solution in solved(self.inner, blocks[i], derive_seed(seed, i))
            ]
            own.append(pack(torch.cat(spins)))
        self.settle(device)
        share = torch.cat(own)
        longest = max(sum(sizes[i::workers]) for i in range(workers))
        shares = self.wire.all_gather(torch.cat([share, share.new_zeros(longest - len(share))]))
        parts = [row[: sum(sizes[i::workers])].split(sizes[i::workers]) for i, row in enumerate(shares)]
        bits = [parts[i % workers][i // workers] for i in range(len(blocks))]
        flat = torch.cat([unpack(part, count, torch.int8) for part, count in zip(bits, counts, strict=True)])
        pairs = zip(problems, flat.split([problem.H.numel() for problem in problems]), strict=True)
        return [Solution(problem, spins.view(problem.H.T.shape).T.to(problem.H)) for problem, spins in pairs]


def _blocks(problems: Sequence[BinaryQuadratic]) -> Iterator[list[BinaryQuadratic]]:
    for (_, units), alike in groupby(problems, lambda problem: problem.H.shape):
        if units < UNITS:
            yield [*alike]
        else:
            yield from ([part] for problem in alike for part in problem.in_parts(UNITS))
