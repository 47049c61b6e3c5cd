"""Converts a trained torch network, with its branches, to stages of bits and integers."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.optim.swa_utils import AveragedModel

from spingrad.export import rules
from spingrad.export.layers import LAYERS, Layer, layer_of, window_of
from spingrad.export.packed import PackedModel
from spingrad.export.stages import EXACT, INPUTS, Array, Flow, Kind, Shape, reach
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

IGNORED = nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d
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
        read = _Network(graph, _shape(graph, shape))
        for values in (scales, shifts):
            if values.ndim > 1 or (values.ndim == 1 and len(values) != read.shape[0]):
                raise ValueError(f"scale and shift are one number, or {read.shape[0]}, one for each channel")
        if calibration is not None:
            read.calibrate(np.asarray(calibration), kind, scales, shifts)
        return _folded(read, kind, scales, shifts)


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


class _Network:
    """The traced network: what its nodes call, its layers, and the largest values of a calibration."""

    def __init__(self, graph: fx.GraphModule, shape: Shape) -> None:
        self.graph, self.torch_shape = graph, shape
        self.input = next(node for node in graph.graph.nodes if node.op == "placeholder")
        self.shape = self._packed_shape(shape)
        self.layers = dict(self._layers())
        self.peaks: dict[fx.Node, float] = {}

    def module(self, node: fx.Node) -> nn.Module | None:
        return as_module(node, self.graph)

    def _packed_shape(self, shape: Shape) -> Shape:
        """Images are (channels, height, width), and signals (channels, 1, length)."""
        first = [self.module(user) for user in self.input.users]
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
            if isinstance(module := self.module(node), LAYERS):
                try:
                    yield node, layer_of(module)
                except ValueError as error:
                    raise ValueError(f"{place_of(node)}, {module}: {error}") from None

    def calibrate(self, batch: Array, kind: Kind, scale: Array, shift: Array) -> None:
        """Run the torch network on a batch and keep the largest magnitude of every tensor."""
        size = math.prod(self.shape)
        if not batch.size or batch.size != len(batch) * size:
            raise ValueError(
                f"calibration must hold examples of the shape {self.torch_shape}, got {batch.shape}"
            )
        low, high = {"pixels": (0, 255), "int8": (-128, 127), "spins": (-1, 1)}[kind]
        if (batch != np.round(batch)).any() or batch.min() < low or batch.max() > high:
            raise ValueError(
                f"calibration must hold whole numbers from {low} to {high}, as the deployed network reads "
                f"them, got {batch.dtype} from {batch.min():.4g} to {batch.max():.4g}; pass them unscaled"
            )
        wide = (-1, *[1] * (len(self.shape) - 1))
        x = batch.reshape(-1, *self.shape) * scale.reshape(wide) + shift.reshape(wide)
        self.peaks = peaks(self.graph, torch.from_numpy(x.reshape(-1, *self.torch_shape)).float())

    def finest(self, node: fx.Node) -> int:
        """The largest integer that a node's result may have, so that the sums after it are exact."""
        return min(rules.FINEST, (EXACT - 1) // self._next_reach(node))

    def _next_reach(self, node: fx.Node) -> int:
        """The largest sum that inputs of one can give in the layers that read a node."""
        most = 1
        for user in node.users:
            module = self.module(user)
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


def _folded(network: _Network, kind: Kind, scale: Array, shift: Array) -> PackedModel:
    """The network's stages, node by node."""
    draft, bound = rules.Draft(), INPUTS[kind]
    flow = Flow(kind, (), bound).then(network.shape, bound, kind)
    steps = ((lambda k: (k * torch.from_numpy(scale) + torch.from_numpy(shift)).float()),)
    terms = {network.input: Term(0, flow, scale, shift, steps)}
    for node in network.graph.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target in SHAPES:
            continue
        if node.op == "output":
            break
        try:
            terms[node] = _visited(node, network, draft, terms)
        except (ValueError, TypeError) as error:
            what = f", {network.module(node)}" if node.op == "call_module" else ""
            raise ValueError(f"{place_of(node)}{what}: {error}") from None
    term = terms.get(node.args[0])
    if term is None or term.value == 0:
        raise ValueError("a network must return one tensor, the scores of its classes")
    if not (term.is_plain and term.slope > 0 and term.flow.kind == "integers"):
        term = rules.to_integers(draft, term, EXACT // 2)
    stages, reads = draft.needed(term.value)
    return PackedModel(kind, network.shape, stages, reads, term.unit)


def _visited(node: fx.Node, network: _Network, draft: rules.Draft, terms: dict[fx.Node, Term]) -> Term:
    """What a node makes of its inputs, by the rule for what it calls."""

    def term_of(part: Any) -> Term:
        if part not in terms:
            raise ValueError(f"expected a tensor that the network computes, got {part!r:.50}")
        return terms[part]

    arguments: Any = node.args
    options: Any = node.kwargs
    if node.target in ADDITIONS and not options:
        return rules.added(draft, [term_of(part) for part in arguments])
    if node.target in JOINS:
        parts, *dim = arguments
        return rules.joined(draft, [term_of(part) for part in parts], *dim or [options.get("dim", 0)])
    if node.target == "repeat":
        return rules.repeated(draft, term_of(arguments[0]), arguments[1:])
    if node.target in PADS:
        pad = _zeros_of(*arguments[1:], **options)
        return rules.padded(draft, term_of(arguments[0]), pad, len(network.torch_shape) != 3)
    module = network.module(node)
    if module is None or not arguments:
        raise ValueError(f"cannot be packed. Supported are {SUPPORTED}")
    term = term_of(arguments[0])
    for part in module if isinstance(module, nn.Sequential) else [module]:  # that stand for one function
        term = _by_module(part, term, node, network, draft)
    return term


def _by_module(module: nn.Module, term: Term, node: fx.Node, network: _Network, draft: rules.Draft) -> Term:
    """What a module makes of its only input."""
    finest, peak = network.finest(node), network.peaks.get(node, 0.0)
    match module:
        case _ if node in network.layers:
            return rules.product(draft, network.layers[node], term)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return rules.normalized(draft, module, term)
        case Gain():
            return rules.gained(module, term)
        case Sign():
            return rules.signed(draft, term)
        case nn.ReLU():
            return rules.clipped(draft, term, 0.0, math.inf, finest, peak)
        case nn.Hardtanh():  # also ReLU6
            low, high = float(module.min_val), float(module.max_val)
            return rules.clipped(draft, term, low, high, finest, peak)
        case Bits():
            return rules.doubled(draft, module, term)
        case nn.MaxPool1d() | nn.MaxPool2d():
            return rules.max_pooled(draft, window_of(module), term)
        case _ if isinstance(module, MEANS):
            return rules.averaged(draft, module, term)
        case nn.Flatten(start_dim=1, end_dim=-1):
            return rules.flattened(draft, term)
        case nn.Unflatten() if term.value == 0:
            return term  # the packed network reads its input in this shape
        case _ if isinstance(module, IGNORED):
            return term
    raise ValueError(f"cannot be packed. Supported are {SUPPORTED}")


def _zeros_of(pad: Sequence[int], mode: str = "constant", value: float | None = 0) -> Sequence[int]:
    """The sides of ``F.pad``, which must pad with zeros."""
    if mode != "constant" or value:
        raise ValueError("pads with something other than zeros, which cannot be packed")
    return pad
