"""The rules of the fold: what each layer or function of torch makes of the integers that it gets.

A rule takes a draft, to which it may append stages, and terms; it returns the term of its result.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from spingrad.export.layers import Layer, window_of
from spingrad.export.stages import (
    EXACT,
    WIDEST,
    Add,
    Concat,
    Convolution,
    Flatten,
    Flow,
    Pad,
    Pair,
    Pool,
    Reads,
    Stage,
    reach,
    whole_weights,
)
from spingrad.export.terms import Norm, Term
from spingrad.nn.bits import Bits
from spingrad.nn.gain import Gain

FINEST = 2**14  # the largest integer that stands for the largest input of a layer: a resolution of 6e-5
STREAM = 2**27  # the largest integer of the first sum of branches; 15 more of that size can be added


@dataclass
class Draft:
    """The stages so far, and which values each of them reads."""

    stages: list[Stage] = field(default_factory=list)
    reads: list[tuple[int, ...]] = field(default_factory=list)

    def append(self, stage: Stage, *terms: Term) -> tuple[int, Flow]:
        """A stage more; the number of its value, and what that is."""
        flow = stage.flow(*(term.flow for term in terms))
        self.stages.append(stage)
        self.reads.append(tuple(term.value for term in terms))
        return len(self.stages), flow

    def counted(self, stage: Stage, *terms: Term, unit: float) -> Term:
        """The result of a stage, as integers that count units; pooling that waited comes next."""
        term = Term.plain(*self.append(stage, *terms), unit)
        for pool in terms[0].pools:
            term = Term.plain(*self.append(pool, term), unit)
        return term

    def needed(self, last: int) -> tuple[tuple[Stage, ...], Reads]:
        """The stages that the last value depends on, with new numbers."""
        needed, waiting = set(), [last]
        while waiting:
            value = waiting.pop()
            if value and value not in needed:
                needed.add(value)
                waiting += self.reads[value - 1]
        order = sorted(needed)
        numbers = {0: 0} | {value: place + 1 for place, value in enumerate(order)}
        kept = tuple(self.stages[value - 1] for value in order)
        return kept, tuple(tuple(numbers[read] for read in self.reads[value - 1]) for value in order)


def as_numbers(draft: Draft, term: Term) -> Term:
    """The same, with spins as integers."""
    if term.flow.kind != "spins":
        return term
    return Term(*draft.append(Add((1,)), term), term.slope, term.offset, term.steps, term.pools)


def to_integers(
    draft: Draft, term: Term, high: int, low: int | None = None, top: float | None = None
) -> Term:
    """Integers of one unit, of which ``high`` stands for ``top``: the largest value, if not given."""
    term = as_numbers(draft, term)
    unit = (top or term.largest or 1.0) / high
    if top is None and term.slope.ndim == 0 and term.unit >= unit:
        unit = term.unit / int(term.unit / unit)  # whole, so that nothing but the offset is rounded
    return draft.counted(term.rounded(unit, -high if low is None else low, high), term, unit=unit)


def pooled(draft: Draft, term: Term) -> Term:
    """The same, with pooling done: of the integers themselves where torch's numbers rise with them."""
    if term.pools and not (term.slope > 0).all():
        return to_integers(draft, term, STREAM)
    for pool in term.pools:
        value, flow = draft.append(pool, term)
        term = Term(value, flow, term.slope, term.offset, term.steps, term.pools[1:])
    return term


def product(draft: Draft, layer: Layer, term: Term) -> Term:
    """A linear layer or a convolution, with its factor and bias."""
    (stage, factor, bias), term = layer, pooled(draft, term)
    pads = isinstance(stage, Convolution) and any(stage.padding)
    shifted = term.slope.ndim == 0 and term.offset.ndim == 0 and not pads
    if not (term.is_plain or shifted) or term.flow.bound * reach(stage) >= EXACT:
        term = to_integers(draft, term, min(FINEST, (EXACT - 1) // reach(stage)))
    value, flow = draft.append(stage, term)
    unit, constant = term.unit, float(term.offset) * whole_weights(stage).sum(1, dtype=np.float64)
    factor32, bias32 = (torch.from_numpy(values).float() for values in (factor, bias))
    steps = (
        lambda k: (k * unit + torch.from_numpy(constant)).float(),
        lambda x: x * factor32,
        lambda x: x + bias32,
    )
    start = Term(value, flow, np.array(unit), constant if constant.any() else np.zeros(()), ())
    return start.then(factor, bias if bias.any() else 0.0, *steps)


def normalized(draft: Draft, norm: Norm, term: Term) -> Term:
    """BatchNorm as in evaluation."""
    return pooled(draft, term).normalized(norm)


def gained(gain: Gain, term: Term) -> Term:
    """``Gain``: a factor above zero."""
    factor = float(gain.factor)
    if not 0 < factor < math.inf:
        raise ValueError(f"has a factor of {factor}: run the network in training on a batch first")
    return term.then(factor, 0.0, lambda x: x * factor)


def signed(draft: Draft, term: Term) -> Term:
    """The sign."""
    if term.flow.kind == "spins" and term.is_plain:
        return Term.plain(term.value, term.flow, 1.0)
    term = as_numbers(draft, term)
    return draft.counted(term.sign(), term, unit=1.0)


def clipped(draft: Draft, term: Term, low: float, high: float, finest: int, peak: float) -> Term:
    """Clipped to an interval around zero, in at most ``finest`` steps above it.

    The finer the steps, the larger the sums of the next layers. Where the interval has no upper end, it is
    ``peak``, the largest value of the calibration, or if that is zero the largest value there can be.
    """
    if not low <= 0 < high:
        raise ValueError(f"clips to {low} … {high}; only intervals that hold zero can be packed")
    term = as_numbers(draft, term)
    if term.slope.ndim == 0 and not term.offset.any() and term.slope > 0:
        ends = [min(end / term.unit, float(term.flow.bound)) for end in (-low, high)]
        whole = [round(end) for end in ends]
        if max(whole) <= finest and np.allclose(ends, whole, rtol=1e-9):  # sums are clipped, not rounded
            return draft.counted(term.rounded(term.unit, -whole[0], whole[1]), term, unit=term.unit)
    top = max(-low, high)
    if top == math.inf:
        top = peak or term.largest
    bottom = 0 if low == 0 else -finest if -low >= top else -round(finest * -low / top)
    above = finest if high >= top else round(finest * high / top)
    return to_integers(draft, term, above, bottom, min(top, high))


def max_pooled(draft: Draft, pool: Pool, term: Term) -> Term:
    """Max pooling: of bits at once, of integers behind the next activation."""
    if term.flow.kind == "spins" and term.is_plain:
        return draft.counted(pool, term, unit=term.unit)
    return Term(term.value, term.flow, term.slope, term.offset, term.steps, (*term.pools, pool))


def averaged(draft: Draft, module: nn.Module, term: Term) -> Term:
    """Average pooling: sums of windows, or of the whole image."""
    term = pooled(draft, term)
    if isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
        pool = window_of(module, "sum")
    else:
        sizes: Any = module.output_size
        if any(size != 1 for size in (sizes if isinstance(sizes, tuple) else (sizes,))):
            raise ValueError(f"averages to {sizes}; only to one pixel can be packed")
        if len(term.flow.shape) != 3:
            raise ValueError(f"averages images (channels, height, width), got {term.flow.shape}")
        pool = Pool("sum", (term.flow.shape[1], term.flow.shape[2]), (1, 1))
    value, flow = draft.append(pool, term)
    size = math.prod(pool.size)
    steps = ((lambda k: k / size), *term.steps)
    return Term(value, flow, term.slope / size, term.offset, steps)


def flattened(draft: Draft, term: Term) -> Term:
    """An image as a vector."""
    if len(term.flow.shape) == 1:
        return term
    term = pooled(draft, term)
    if term.slope.ndim or term.offset.ndim:
        term = to_integers(draft, term, STREAM)
    value, flow = draft.append(Flatten(), term)
    return Term(value, flow, term.slope, term.offset, term.steps)


def doubled(draft: Draft, bits: Bits, term: Term) -> Term:
    """``Bits``: the inputs times 2, 4, 8, … one after another."""
    if bits.dim not in (1, 1 - len(term.flow.shape) if len(term.flow.shape) == 3 else -1):
        raise ValueError(f"repeats along dim={bits.dim}; only inputs or channels can be packed")
    if not term.is_plain:
        term = to_integers(draft, term, FINEST)
    top = bits.count - 1
    parts = [Term.plain(*draft.append(Add((2 ** (top - k),)), term), 1.0) for k in range(bits.count)]
    unit = term.unit * bits.scale * 2.0**-top
    if len(parts) == 1:
        return Term.plain(parts[0].value, parts[0].flow, unit)
    return draft.counted(Concat(), *parts, unit=unit)


def added(draft: Draft, terms: Sequence[Term]) -> Term:
    """A sum: exact if one unit counts all terms, otherwise in a unit of 2^-27 of the largest sum."""
    terms = [pooled(draft, term) for term in terms]
    if len({term.flow.shape for term in terms}) > 1:
        shapes = [term.flow.shape for term in terms]
        raise ValueError(f"adds tensors of the shapes {shapes}; equal ones can be packed")
    if all(term.is_plain and term.slope > 0 for term in terms):
        unit = min(term.unit for term in terms)
        if factors := multiples(terms, unit):
            return draft.counted(Add(factors), *terms, unit=unit)
    largest = sum(term.largest for term in terms)
    streams = [term.unit for term in terms if term.is_plain and term.flow.bound > EXACT]
    unit = max(streams, default=0.0)
    if not streams or largest / unit >= WIDEST:
        unit = 2.0 ** math.ceil(math.log2(max(largest, 1e-30) / STREAM))
    parts = [term if is_counted(term, unit) else in_units(draft, term, unit) for term in terms]
    return draft.counted(Add(multiples(parts, unit)), *parts, unit=unit)


def joined(draft: Draft, terms: Sequence[Term], dim: Any) -> Term:
    """``torch.cat`` of inputs or channels."""
    if dim != 1 and not (dim == -1 and len(terms[0].flow.shape) == 1):
        raise ValueError(f"joins along dim={dim}; only inputs or channels, dim=1, can be packed")
    terms = [pooled(draft, term) for term in terms]
    same = all(term.is_plain and math.isclose(term.unit, terms[0].unit, rel_tol=1e-9) for term in terms)
    if not (same and len({term.flow.kind == "spins" for term in terms}) == 1):
        unit = 2.0 ** math.ceil(math.log2(max(max(term.largest for term in terms), 1e-30) / STREAM))
        terms = [in_units(draft, term, unit) for term in terms]
    return draft.counted(Concat(), *terms, unit=terms[0].unit)


def repeated(draft: Draft, term: Term, times: Sequence[Any]) -> Term:
    """``x.repeat(1, 2, 1, 1)``: the channels twice."""
    count, *others = times[1:]
    if times[0] != 1 or any(time != 1 for time in others):
        raise ValueError(f"repeats {tuple(times)}; only inputs or channels, dim=1, can be packed")
    return term if count == 1 else joined(draft, [term] * count, 1)


def padded(draft: Draft, term: Term, pad: Sequence[int], is_signal: bool) -> Term:
    """Zeros around an image, as ``F.pad`` lists them: the last dimension first."""
    sides: list[Pair] = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    if is_signal and len(term.flow.shape) == 3:
        sides.insert(-1, (0, 0))  # a signal has one row
    sides = [(0, 0)] * (3 - len(sides)) + sides
    if len(sides) != 3 or len(term.flow.shape) != 3:
        raise ValueError(f"pads by {tuple(pad)}; only channels, rows and columns can be padded")
    term = pooled(draft, term)
    if not term.is_plain:
        term = to_integers(draft, term, STREAM)
    term = as_numbers(draft, term)
    return draft.counted(Pad(*sides), term, unit=term.unit)


def in_units(draft: Draft, term: Term, unit: float) -> Term:
    """The same as integers that count units of this size."""
    if is_counted(term, unit):
        factors = multiples([term], unit)
        is_same = factors == (1,) and term.flow.kind == "integers"
        return term if is_same else draft.counted(Add(factors), term, unit=unit)
    high = min(WIDEST - 1, math.ceil(term.largest / unit) + 1)
    return to_integers(draft, term, high, top=high * unit)


def is_counted(term: Term, unit: float) -> bool:
    """Whether a term is a whole number of units."""
    return term.is_plain and bool(term.slope > 0) and bool(multiples([term], unit))


def multiples(terms: Iterable[Term], unit: float) -> tuple[int, ...]:
    """How many units each term's own unit is; nothing if these are not all whole numbers."""
    ratios = [term.unit / unit for term in terms]
    whole = tuple(round(ratio) for ratio in ratios)
    fits = all(
        0 < w < WIDEST and math.isclose(w, r, rel_tol=1e-7) for w, r in zip(whole, ratios, strict=True)
    )
    return whole if fits else ()
