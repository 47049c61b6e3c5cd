"""Which stages a chip computes together, and where in one block of memory their values are."""

from collections.abc import Sequence
from typing import NamedTuple

from spingrad.export.stages import Flatten, Flow, Linear, Reads, Rescale, Stage, Threshold

ALIGNMENT = 4  # bytes; enough for int32


class Step(NamedTuple):
    """A stage and the activations that are applied to its results before these are stored.

    Args:
        head: Number of the stage.
        tail: Numbers of the activations, in order.
    """

    head: int
    tail: tuple[int, ...]

    @property
    def value(self) -> int:
        """The value that is stored."""
        return (self.head, *self.tail)[-1] + 1


class Buffer(NamedTuple):
    """A buffer and the steps of the computation in which it is needed.

    Args:
        name: What it is called.
        size: Bytes.
        start, end: The first and the last step that writes or reads it.
    """

    name: str
    size: int
    start: int
    end: int

    def meets(self, other: "Buffer") -> bool:
        """Whether both are needed in the same step."""
        return self.start <= other.end and other.start <= self.end


def steps(stages: Sequence[Stage], reads: Reads, flows: Sequence[Flow]) -> tuple[list[Step], dict[int, int]]:
    """The steps in order, and for every value the one whose memory it shares (itself, or what is flattened).

    The channels of each pixel are stored together. A flattened image stays as it is if that is its order
    anyway, or if only linear layers read it, whose weights can be stored in this order.
    """
    readers: dict[int, list[int]] = {value: [] for value in range(len(stages) + 1)}
    for number, read in enumerate(reads):
        for value in read:
            readers[value].append(number)
    found: list[Step] = []
    roots = {0: 0}
    fused: set[int] = set()
    for number, stage in enumerate(stages):
        if number in fused:
            continue
        root = roots.get(reads[number][0], 0)
        if isinstance(stage, Flatten):
            linear = [isinstance(stages[reader], Linear) for reader in readers[number + 1]]
            if is_ordered(root, flows) or (linear and all(linear)):
                roots[number + 1] = root
                continue
        tail: list[int] = []
        while len(readers[(number, *tail)[-1] + 1]) == 1:
            reader = readers[(number, *tail)[-1] + 1][0]
            if not isinstance(stages[reader], Threshold | Rescale):
                break
            tail.append(reader)
        fused.update(tail)
        found.append(Step(number, tuple(tail)))
        roots[found[-1].value] = found[-1].value
    return found, roots


def is_ordered(value: int, flows: Sequence[Flow]) -> bool:
    """Whether a stored value is in the order of its channels; the network's integer inputs always are."""
    flow = flows[value]
    images = len(flow.shape) > 1 and flow.shape[0] > 1 and any(size > 1 for size in flow.shape[1:])
    return not images or (value == 0 and flow.kind != "spins")


def rounded(size: int) -> int:
    """Bytes that a buffer of ``size`` bytes takes, so that the next one is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan(buffers: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """The offset of every buffer, and the size of the whole block.

    The largest buffers are placed first, each at the lowest offset where it does not overlap one that is
    needed at the same time.

    Example:
        >>> plan([Buffer("a", 100, 0, 1), Buffer("b", 40, 1, 2), Buffer("c", 60, 2, 3)])
        ({'a': 0, 'c': 0, 'b': 100}, 140)
    """
    placed: list[tuple[int, Buffer]] = []
    for buffer in sorted(buffers, key=lambda each: -each.size):
        offset = 0
        for start, other in sorted((start, other) for start, other in placed if other.meets(buffer)):
            if offset + buffer.size <= start:
                break
            offset = max(offset, start + rounded(other.size))
        placed.append((offset, buffer))
    size = max((offset + rounded(buffer.size) for offset, buffer in placed), default=0)
    return {buffer.name: offset for offset, buffer in placed}, size
