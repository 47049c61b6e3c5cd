"""Converts a trained torch network, with its branches, to stages of bits and integers."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel

from spingrad.export.layers import LAYERS, Layer, layer_of, window_of
from spingrad.export.packed import PackedModel
from spingrad.export.stages import (
    EXACT,
    INPUTS,
    WIDEST,
    Add,
    Array,
    Concat,
    Convolution,
    Flatten,
    Flow,
    Kind,
    Pad,
    Pool,
    Shape,
    Stage,
    reach,
    whole_weights,
)
from spingrad.export.terms import Term
from spingrad.export.trace import (
    ADDITIONS,
    JOINS,
    PADS,
    SHAPES,
    as_module,
    check_hooks,
    check_network,
    peaks,
    place_of,
    traced,
)
from spingrad.nn.bits import Bits
from spingrad.nn.gain import Gain
from spingrad.nn.linear import BinaryLinear
from spingrad.nn.sign import Sign

FINEST = 2**14  # the largest integer that stands for the largest input of a layer: a resolution of 6e-5
STREAM = 2**27  # the largest integer of the first sum of branches; 15 more of that size can be added
IGNORED = nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d
MAX_POOLS = nn.MaxPool1d, nn.MaxPool2d
MEANS = nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d
SUPPORTED = (
    "BinaryLinear, BinaryConv1d, BinaryConv2d, Linear, Conv1d, Conv2d, Sign, ReLU, Hardtanh, BatchNorm1d, "
    "BatchNorm2d, Gain, Bits, max and average pooling, Flatten, Dropout, additions, torch.cat, zero padding"
)


def pack(
    model: nn.Module,
    shape: Shape | None = None,
    *,
    kind: Kind = "pixels",
    scale: float | Sequence[float] = 1 / 255,
    shift: float | Sequence[float] = 0.0,
    calibration: Array | None = None,
) -> PackedModel:
    """Convert a trained network to bits and integers.

    The network may have branches, additions and ``torch.cat``. Supported are ``BinaryLinear``,
    ``BinaryConv1d``, ``BinaryConv2d``, ``Sign``, ``ReLU``, ``Hardtanh``, ``BatchNorm``, ``Gain``, ``Bits``,
    max and average pooling, ``Flatten``, ``Unflatten`` of the input, zero padding, ``Dropout`` and
    ``Identity``. The weights of ``Linear``, ``Conv1d`` and ``Conv2d`` are rounded to int8, with a scale for
    each unit.

    Where all activations are signs, the sums of every layer and all classes are torch's. Other activations
    and real layers are rounded, so that scores are close to torch's and a class can differ in rare cases.

    Args:
        model: The network, on any device. It is packed as it behaves in evaluation, and is not changed.
        shape: Shape of one example, such as ``(1, 28, 28)``, or ``(1, 8000)`` for a signal; not needed if
            the network begins with a linear layer or ``Unflatten``.
        kind: ``"pixels"`` if the deployed network reads bytes, 0 to 255, and the torch network was trained on
            ``scale * pixel + shift``; ``"int8"`` if it reads numbers from -128 to 127 in the same way;
            ``"spins"`` if inputs are -1 and +1.
        scale: Factor on the inputs in training, positive; one number, or one for each channel. With a power
            of two, torch's own sums are exact.
        shift: What was added to the inputs in training, such as ``-mean / std``; one number, or one for each
            channel.
        calibration: Some hundred examples as the deployed network reads them. Values that have no limit,
            such as those of ``ReLU``, are clipped at the largest that occurs in them.

    Raises:
        ValueError: The network holds something that cannot be packed; the message says where.

    Example:
        >>> model = nn.Sequential(BinaryLinear(784, 128), Sign(), BinaryLinear(128, 10))
        >>> packed = pack(model)
        >>> packed.num_weights, packed.classes(np.zeros((1, 784), np.uint8)).shape
        (101632, (1,))
    """
    if kind not in INPUTS:
        raise ValueError(f"kind must be one of {', '.join(INPUTS)}, got {kind!r}")
    if kind == "spins":
        scale, shift = 1.0, 0.0
    scales, shifts = np.asarray(scale, np.float64), np.asarray(shift, np.float64)
    if not ((scales > 0).all() and np.isfinite(scales).all() and np.isfinite(shifts).all()):
        raise ValueError(f"scale must be positive and shift finite, got {scale} and {shift}")
    network = _unwrapped(model)
    check_network(network)
    graph = traced(copy.deepcopy(network).cpu().eval())
    with torch.no_grad():
        folding = _Folding(graph, kind, _shape(graph, shape), scales, shifts)
        if calibration is not None:
            folding.calibrate(np.asarray(calibration))
        return folding.run()


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network itself, without what an average, DataParallel or ``torch.compile`` puts around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    wrappers = AveragedModel, nn.DataParallel, nn.parallel.DistributedDataParallel
    while isinstance(model, wrappers) or hasattr(model, "_orig_mod"):
        check_hooks(model, type(model).__name__)
        model = model.get_submodule("module" if isinstance(model, wrappers) else "_orig_mod")
    return model


def _shape(graph: fx.GraphModule, shape: Shape | None) -> Shape:
    """The shape of one example in torch: as given, or as the first layer tells."""
    if shape is not None:
        return tuple(shape)
    for node in graph.graph.nodes:
        match as_module(node, graph):
            case nn.Unflatten(dim=1) as first if -1 not in first.unflattened_size:
                return (math.prod(first.unflattened_size),)
            case BinaryLinear() | nn.Linear() as first:
                return (first.in_features,)
            case module if node.op != "placeholder" and not isinstance(module, (*IGNORED, nn.Flatten, Sign)):
                break
    raise ValueError("pass the shape of one example: pack(model, (channels, height, width), …)")


class _Folding:
    """Translates the traced network node by node."""

    def __init__(self, graph: fx.GraphModule, kind: Kind, shape: Shape, scale: Array, shift: Array) -> None:
        self.graph, self.torch_shape = graph, shape
        self.input = next(node for node in graph.graph.nodes if node.op == "placeholder")
        self.shape = self._packed_shape(shape)
        for values in (scale, shift):
            if values.ndim > 1 or (values.ndim == 1 and len(values) != self.shape[0]):
                raise ValueError(f"scale and shift are one number, or {self.shape[0]}, one for each channel")
        self.scale, self.shift, self.kind = scale, shift, kind
        self.stages: list[Stage] = []
        self.reads: list[tuple[int, ...]] = []
        self.layers = dict(self._layers())
        self.peaks: dict[fx.Node, float] = {}
        bound = INPUTS[kind]
        flow = Flow(kind, (), bound).then(self.shape, bound, kind)
        steps = ((lambda k: (k * torch.from_numpy(scale) + torch.from_numpy(shift)).float()),)
        self.terms = {self.input: Term(0, flow, scale, shift, steps)}

    def _packed_shape(self, shape: Shape) -> Shape:
        """Images are (channels, height, width), and signals (channels, 1, length)."""
        first = [self._module(user) for user in self.input.users]
        if len(first) == 1 and isinstance(first[0], nn.Unflatten):
            sizes = tuple(first[0].unflattened_size)
            if first[0].dim != 1 or (-1 in sizes and sizes != (1, -1)):
                raise ValueError(f"{first[0]}: expected dim=1 and the size of every dimension")
            shape = (1, *shape) if sizes == (1, -1) else sizes
        if not 1 <= len(shape) <= 3 or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"the shape of one example must be one to three positive integers, got {shape}")
        return (shape[0], 1, shape[1]) if len(shape) == 2 else shape

    def _layers(self) -> Iterator[tuple[fx.Node, Layer]]:
        for node in self.graph.graph.nodes:
            if isinstance(module := self._module(node), LAYERS):
                try:
                    yield node, layer_of(module)
                except ValueError as error:
                    raise ValueError(f"{place_of(node)}, {module}: {error}") from None

    def calibrate(self, batch: Array) -> None:
        """Run the torch network on a batch and keep the largest magnitude of every tensor."""
        size = math.prod(self.shape)
        if not batch.size or batch.size != len(batch) * size:
            raise ValueError(
                f"calibration must hold examples of the shape {self.torch_shape}, got {batch.shape}"
            )
        low, high = {"pixels": (0, 255), "int8": (-128, 127), "spins": (-1, 1)}[self.kind]
        if (batch != np.round(batch)).any() or batch.min() < low or batch.max() > high:
            raise ValueError(
                f"calibration must hold whole numbers from {low} to {high}, as the deployed network reads "
                f"them, got {batch.dtype} from {batch.min():.4g} to {batch.max():.4g}; pass them unscaled"
            )
        wide = (-1, *[1] * (len(self.shape) - 1))
        x = batch.reshape(-1, *self.shape) * self.scale.reshape(wide) + self.shift.reshape(wide)
        self.peaks = peaks(self.graph, torch.from_numpy(x.reshape(-1, *self.torch_shape)).float())

    def run(self) -> PackedModel:
        for node in self.graph.graph.nodes:
            if node.op in ("placeholder", "get_attr") or node.target in SHAPES:
                continue
            if node.op == "output":
                break
            try:
                self.terms[node] = self._visit(node)
            except (ValueError, TypeError) as error:
                what = f", {self._module(node)}" if node.op == "call_module" else ""
                raise ValueError(f"{place_of(node)}{what}: {error}") from None
        return self._finished(node.args[0])

    def _finished(self, last: Any) -> PackedModel:
        term = self.terms.get(last)
        if term is None or term.value == 0:
            raise ValueError("a network must return one tensor, the scores of its classes")
        if not (term.is_plain and term.slope > 0 and term.flow.kind == "integers"):
            term = self._to_integers(term, EXACT // 2)
        stages, reads = _used(self.stages, self.reads, term.value)
        return PackedModel(self.kind, self.shape, stages, reads, term.unit)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return as_module(node, self.graph)

    def _visit(self, node: fx.Node) -> Term:
        if node.target in ADDITIONS and not node.kwargs:
            return self._sum([self._term(part) for part in node.args])
        if node.target in JOINS:
            return self._join(node)
        if node.target == "repeat":
            return self._repeated(self._term(node.args[0]), node.args[1:])
        if node.target in PADS:
            arguments: Any = node.args[1:]
            options: Any = node.kwargs
            return self._padded(self._term(node.args[0]), *arguments, **options)
        module = self._module(node)
        inputs = [self._term(part) for part in node.args[:1]]
        if module is None or len(inputs) != 1:
            raise ValueError(f"cannot be packed. Supported are {SUPPORTED}")
        return self._one(module, inputs[0], node)

    def _term(self, part: Any) -> Term:
        if part not in self.terms:
            raise ValueError(f"expected a tensor that the network computes, got {part!r:.50}")
        return self.terms[part]

    def _one(self, module: nn.Module, term: Term, node: fx.Node) -> Term:
        """What a module makes of its only input."""
        match module:
            case nn.Sequential():  # of modules that stand for one function
                for part in module:
                    term = self._one(part, term, node)
                return term
            case module if isinstance(module, LAYERS):
                return self._product(self.layers[node], term)
            case nn.BatchNorm1d() | nn.BatchNorm2d():
                return self._settled(term).normalized(module)
            case Gain():
                factor = float(module.factor)
                if not 0 < factor < math.inf:
                    raise ValueError(
                        f"has a factor of {factor}: run the network in training on a batch first"
                    )
                return term.then(factor, 0.0, lambda x: x * factor)
            case Sign():
                return self._sign(term)
            case nn.ReLU():
                return self._clipped(term, 0.0, math.inf, node)
            case nn.Hardtanh():  # also ReLU6
                return self._clipped(term, float(module.min_val), float(module.max_val), node)
            case Bits():
                return self._bits(module, term)
            case module if isinstance(module, MAX_POOLS):
                return self._max_pool(term, window_of(module))
            case module if isinstance(module, MEANS):
                return self._mean(term, module)
            case nn.Flatten(start_dim=1, end_dim=-1):
                return self._flat(term)
            case nn.Unflatten() if term is self.terms[self.input]:
                return term  # the packed network reads its input in this shape
            case module if isinstance(module, IGNORED):
                return term
        raise ValueError(f"cannot be packed. Supported are {SUPPORTED}")

    def _append(self, stage: Stage, *terms: Term) -> tuple[int, Flow]:
        flow = stage.flow(*(term.flow for term in terms))
        self.stages.append(stage)
        self.reads.append(tuple(term.value for term in terms))
        return len(self.stages), flow

    def _plain(self, stage: Stage, *terms: Term, unit: float) -> Term:
        """The result of a stage, as integers that count units; pooling that waited comes next."""
        term = Term.plain(*self._append(stage, *terms), unit)
        for pool in terms[0].pools:
            term = Term.plain(*self._append(pool, term), unit)
        return term

    def _product(self, layer: Layer, term: Term) -> Term:
        (stage, factor, bias), term = layer, self._settled(term)
        pads = isinstance(stage, Convolution) and any(stage.padding)
        shifted = term.slope.ndim == 0 and term.offset.ndim == 0 and not pads
        if not (term.is_plain or shifted) or term.flow.bound * reach(stage) >= EXACT:
            term = self._to_integers(term, min(FINEST, (EXACT - 1) // reach(stage)))
        value, flow = self._append(stage, term)
        unit, constant = term.unit, float(term.offset) * whole_weights(stage).sum(1, dtype=np.float64)
        factor32, bias32 = (torch.from_numpy(values).float() for values in (factor, bias))
        steps = (
            lambda k: (k * unit + torch.from_numpy(constant)).float(),
            lambda x: x * factor32,
            lambda x: x + bias32,
        )
        start = Term(value, flow, np.array(unit), constant if constant.any() else np.zeros(()), ())
        return start.then(factor, bias if bias.any() else 0.0, *steps)

    def _to_integers(self, term: Term, high: int, low: int | None = None, top: float | None = None) -> Term:
        """Integers of one unit, of which ``high`` stands for ``top``: the largest value, if not given."""
        term = self._as_numbers(term)
        unit = (top or term.largest or 1.0) / high
        if top is None and term.slope.ndim == 0 and term.unit >= unit:
            unit = term.unit / int(term.unit / unit)  # whole, so that nothing but the offset is rounded
        return self._plain(term.rounded(unit, -high if low is None else low, high), term, unit=unit)

    def _settled(self, term: Term) -> Term:
        """The same, with pooling done: of the integers themselves where torch's numbers rise with them."""
        if term.pools and not (term.slope > 0).all():
            return self._to_integers(term, STREAM)
        for pool in term.pools:
            value, flow = self._append(pool, term)
            term = Term(value, flow, term.slope, term.offset, term.steps, term.pools[1:])
        return term

    def _sign(self, term: Term) -> Term:
        if term.flow.kind == "spins" and term.is_plain:
            return Term.plain(term.value, term.flow, 1.0)
        term = self._as_numbers(term)
        return self._plain(term.sign(), term, unit=1.0)

    def _as_numbers(self, term: Term) -> Term:
        """The same, with spins as integers."""
        if term.flow.kind != "spins":
            return term
        return Term(*self._append(Add((1,)), term), term.slope, term.offset, term.steps, term.pools)

    def _clipped(self, term: Term, low: float, high: float, node: fx.Node) -> Term:
        """Clip to an interval around zero and round, as finely as the sums of the next layers allow."""
        if not low <= 0 < high:
            raise ValueError(f"clips to {low} … {high}; only intervals that hold zero can be packed")
        finest = min(FINEST, (EXACT - 1) // self._next_reach(node))
        term = self._as_numbers(term)
        if term.slope.ndim == 0 and not term.offset.any() and term.slope > 0:
            ends = [min(end / term.unit, float(term.flow.bound)) for end in (-low, high)]
            whole = [round(end) for end in ends]
            if max(whole) <= finest and np.allclose(ends, whole, rtol=1e-9):  # sums are clipped, not rounded
                return self._plain(term.rounded(term.unit, -whole[0], whole[1]), term, unit=term.unit)
        top = max(-low, high)
        if top == math.inf:
            top = self.peaks.get(node, 0.0) or term.largest
        bottom = 0 if low == 0 else -finest if -low >= top else -round(finest * -low / top)
        return self._to_integers(
            term, finest if high >= top else round(finest * high / top), bottom, min(top, high)
        )

    def _next_reach(self, node: fx.Node) -> int:
        """The largest sum that inputs of one can give in the layers that read a node."""
        most = 1
        for user in node.users:
            module = self._module(user)
            if user in self.layers:
                most = max(most, reach(self.layers[user].stage))
            elif isinstance(module, MEANS):
                window = window_of(module) if isinstance(module, nn.AvgPool1d | nn.AvgPool2d) else None
                size = math.prod(window.size) if window else 1
                most = max(most, size * self._next_reach(user))
            elif isinstance(module, Bits):
                most = max(most, 2**module.count * self._next_reach(user))
            elif not isinstance(module, Sign | nn.ReLU | nn.Hardtanh) and user.target not in ADDITIONS:
                most = max(most, self._next_reach(user))
        return most

    def _max_pool(self, term: Term, pool: Pool) -> Term:
        if term.flow.kind == "spins" and term.is_plain:
            return self._plain(pool, term, unit=term.unit)
        return Term(term.value, term.flow, term.slope, term.offset, term.steps, (*term.pools, pool))

    def _mean(self, term: Term, module: nn.Module) -> Term:
        term = self._settled(term)
        if isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
            pool = window_of(module, "sum")
        else:
            sizes = module.output_size
            if any(size != 1 for size in (sizes if isinstance(sizes, tuple) else (sizes,))):
                raise ValueError(f"averages to {sizes}; only to one pixel can be packed")
            pool = Pool("sum", term.flow.shape[1:], (1, 1))  # type: ignore[arg-type]
        value, flow = self._append(pool, term)
        size = math.prod(pool.size)
        steps = ((lambda k: k / size), *term.steps)
        return Term(value, flow, term.slope / size, term.offset, steps)

    def _flat(self, term: Term) -> Term:
        if len(term.flow.shape) == 1:
            return term
        term = self._settled(term)
        if term.slope.ndim or term.offset.ndim:
            term = self._to_integers(term, STREAM)
        value, flow = self._append(Flatten(), term)
        return Term(value, flow, term.slope, term.offset, term.steps)

    def _bits(self, bits: Bits, term: Term) -> Term:
        if bits.dim not in (1, 1 - len(term.flow.shape) if len(term.flow.shape) == 3 else -1):
            raise ValueError(f"repeats along dim={bits.dim}; only inputs or channels can be packed")
        if not term.is_plain:
            term = self._to_integers(term, FINEST)
        top = bits.count - 1
        parts = [Term.plain(*self._append(Add((2 ** (top - k),)), term), 1.0) for k in range(bits.count)]
        unit = term.unit * bits.scale * 2.0**-top
        if len(parts) == 1:
            return Term.plain(parts[0].value, parts[0].flow, unit)
        return self._plain(Concat(), *parts, unit=unit)

    def _sum(self, terms: Sequence[Term]) -> Term:
        """Exact if one unit counts all terms, otherwise in a unit of 2^-27 of the largest sum."""
        terms = [self._settled(term) for term in terms]
        if len({term.flow.shape for term in terms}) > 1:
            raise ValueError(
                f"adds tensors of the shapes {[term.flow.shape for term in terms]}; equal ones can be packed"
            )
        if all(term.is_plain and term.slope > 0 for term in terms):
            unit = min(term.unit for term in terms)
            if factors := _multiples(terms, unit):
                return self._plain(Add(factors), *terms, unit=unit)
        largest = sum(term.largest for term in terms)
        streams = [term.unit for term in terms if term.is_plain and term.flow.bound > EXACT]
        unit = max(streams, default=0.0)
        if not streams or largest / unit >= WIDEST:
            unit = 2.0 ** math.ceil(math.log2(max(largest, 1e-30) / STREAM))
        parts = [term if _is_counted(term, unit) else self._in_units(term, unit) for term in terms]
        return self._plain(Add(_multiples(parts, unit)), *parts, unit=unit)

    def _in_units(self, term: Term, unit: float) -> Term:
        """The same as integers that count units of this size."""
        if _is_counted(term, unit):
            factors = _multiples([term], unit)
            is_same = factors == (1,) and term.flow.kind == "integers"
            return term if is_same else self._plain(Add(factors), term, unit=unit)
        high = min(WIDEST - 1, math.ceil(term.largest / unit) + 1)
        return self._to_integers(term, high, top=high * unit)

    def _join(self, node: fx.Node) -> Term:
        parts, *rest = node.args
        dim = rest[0] if rest else node.kwargs.get("dim", 0)
        terms = [self._term(part) for part in parts]  # type: ignore[union-attr]
        return self._joined(terms, dim)

    def _repeated(self, term: Term, times: Any) -> Term:
        """``x.repeat(1, 2, 1, 1)``: the channels twice."""
        count, *others = times[1:]
        if times[0] != 1 or any(time != 1 for time in others):
            raise ValueError(f"repeats {times}; only inputs or channels, dim=1, can be packed")
        return term if count == 1 else self._joined([term] * count, 1)

    def _joined(self, terms: Sequence[Term], dim: Any) -> Term:
        if dim != 1 and not (dim == -1 and len(terms[0].flow.shape) == 1):
            raise ValueError(f"joins along dim={dim}; only inputs or channels, dim=1, can be packed")
        terms = [self._settled(term) for term in terms]
        same = all(term.is_plain and math.isclose(term.unit, terms[0].unit, rel_tol=1e-9) for term in terms)
        if not (same and len({term.flow.kind == "spins" for term in terms}) == 1):
            unit = 2.0 ** math.ceil(math.log2(max(max(term.largest for term in terms), 1e-30) / STREAM))
            terms = [self._in_units(term, unit) for term in terms]
        return self._plain(Concat(), *terms, unit=terms[0].unit)

    def _padded(
        self, term: Term, pad: Sequence[int], mode: str = "constant", value: float | None = 0
    ) -> Term:
        if mode != "constant" or value:
            raise ValueError("pads with something other than zeros, which cannot be packed")
        sides = [tuple(pad[i : i + 2]) for i in range(0, len(pad), 2)][::-1]
        if len(term.flow.shape) == 3 and term.flow.shape[1] == 1 and len(self.torch_shape) != 3:
            sides.insert(-1, (0, 0))  # a signal has one row
        sides = [(0, 0)] * (3 - len(sides)) + sides
        if len(sides) != 3 or len(term.flow.shape) != 3:
            raise ValueError(f"pads by {tuple(pad)}; only channels, rows and columns can be padded")
        term = self._settled(term)
        if not term.is_plain:
            term = self._to_integers(term, STREAM)
        term = self._as_numbers(term)
        return self._plain(Pad(*sides), term, unit=term.unit)  # type: ignore[arg-type]


def _is_counted(term: Term, unit: float) -> bool:
    """Whether a term is a whole number of units."""
    return term.is_plain and bool(term.slope > 0) and bool(_multiples([term], unit))


def _multiples(terms: Iterable[Term], unit: float) -> tuple[int, ...]:
    """How many units each term's own unit is; nothing if these are not all whole numbers."""
    ratios = [term.unit / unit for term in terms]
    whole = tuple(round(ratio) for ratio in ratios)
    fits = all(
        0 < w < WIDEST and math.isclose(w, r, rel_tol=1e-7) for w, r in zip(whole, ratios, strict=True)
    )
    return whole if fits else ()


def _used(
    stages: Sequence[Stage], reads: Sequence[tuple[int, ...]], last: int
) -> tuple[tuple[Stage, ...], tuple[tuple[int, ...], ...]]:
    """The stages that the last value depends on, with new numbers."""
    needed, waiting = set(), [last]
    while waiting:
        value = waiting.pop()
        if value and value not in needed:
            needed.add(value)
            waiting += reads[value - 1]
    order = sorted(needed)
    numbers = {0: 0} | {value: place + 1 for place, value in enumerate(order)}
    kept = tuple(stages[value - 1] for value in order)
    return kept, tuple(tuple(numbers[read] for read in reads[value - 1]) for value in order)
