"""The calls of a step: which units share the chip in each call, and how often it is read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spingrad.qpu.chip import Chip
from spingrad.qpu.embedding import Clique, pages
from spingrad.qpu.packing import Page

MOST_COPIES = 16  # with more, programming time dominates the cost anyway
MOST_OF_CHIP = 0.6  # the share of qubits that cliques can cover, roughly


@dataclass(frozen=True)
class Call:
    """One call to the QPU.

    Args:
        page: The cliques on the chip.
        units: The unit on each clique; a unit may be on several cliques.
        num_reads: Number of reads.
    """

    page: Page
    units: list[int]
    num_reads: int

    def cost_us(self, **sample_kwargs: Any) -> float:
        """Microseconds of QPU time that the call is charged."""
        return self.page.chip.access_time(len(self.page.qubits), num_reads=self.num_reads, **sample_kwargs)


def block_sizes(num_spins: int, block_size: int) -> list[int]:
    """Sizes of the blocks of a unit's spins: nearly equal, none larger than ``block_size``.

    Example:
        >>> block_sizes(100, 32)
        [25, 25, 25, 25]
    """
    count = -(-num_spins // block_size)
    return [num_spins // count + (i < num_spins % count) for i in range(count)]


def calls_for(chip: Chip, sizes: Sequence[int], num_reads: int, **sample_kwargs: Any) -> list[Call]:
    """The cheapest calls that give ``num_reads`` samples of every unit.

    If one call has room for several copies of all units, one read gives several samples of each unit, so
    that the call needs fewer reads and costs less.

    Args:
        chip: The working graph.
        sizes: Number of spins of each unit.
        num_reads: Samples per unit.
        **sample_kwargs: Further parameters of the QPU, such as ``annealing_time``.
    """
    copies, found = _cheapest(chip, Counter(sizes), num_reads, sample_kwargs)
    waiting: dict[int, list[int]] = {}
    for unit, size in reversed(list(enumerate(sizes))):
        waiting.setdefault(size, []).extend([unit] * copies)
    return [
        Call(
            Page.of(chip, cliques),
            [waiting[len(clique)].pop() for clique in cliques],
            -(-num_reads // copies),
        )
        for cliques in found
    ]


def _cheapest(
    chip: Chip, counts: Counter[int], num_reads: int, sample_kwargs: dict[str, Any]
) -> tuple[int, list[list[Clique]]]:
    """How many copies of each unit to put on the chip, and the cliques of every call."""
    found = pages(chip, counts)
    price = _price(chip, found, num_reads, sample_kwargs)
    room = int(MOST_OF_CHIP * len(chip.qubits) / max(sum(_qubits(page) for page in found), 1))
    copies = min(room, num_reads, MOST_COPIES)
    while copies > 1:
        more = pages(chip, Counter({size: copies * count for size, count in counts.items()}))
        if len(more) == 1 and _price(chip, more, -(-num_reads // copies), sample_kwargs) < price:
            return copies, more
        copies //= 2
    return 1, found


def _price(chip: Chip, found: list[list[Clique]], num_reads: int, sample_kwargs: dict[str, Any]) -> float:
    return sum(chip.access_time(_qubits(page), num_reads=num_reads, **sample_kwargs) for page in found)


def _qubits(page: list[Clique]) -> int:
    return sum(len(chain) for clique in page for chain in clique)
