"""The sketch: what a backward pass leaves beside ``weight.grad``, and what adds up like a gradient.

A layer's output passes through an identity node that also takes the layer's *companion*: a leaf of zeros,
expanded from one number. Its gradient is the sketch. autograd adds to it where it accumulates into leaves and
nowhere else, so gradient accumulation, a layer that is used twice and several machines are sums, and
``torch.autograd.grad`` leaves none.

There are three kinds, each of shape ``(groups, rows, columns)``; the first entry of the last row is the
number of rows that had a gradient:

* ``"rows"``: at most 128 of a layer's inputs that have a gradient. Each has a sign of its own and they move
  on by some slots, so that the Gram matrix of a sum of sketches is near the sum of their Gram matrices.
* ``"gram"``: ``[XᵀX]``, exact.
* ``"published"``: ``[ZᵀZ | ZᵀV | XᵀV]`` with the paper's rows ``x / ‖x‖²``, and in the last row ``‖V‖²`` of
  each unit and ``‖X‖²``.
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["Companion", "rows_at", "sketch_of"]

Kind = Literal["rows", "gram", "published"]
Geometry = tuple[int, ...]
"""Empty for a matrix product. For a convolution: the number of dimensions, whether it is transposed, then one
number per dimension each for kernel size, stride, padding and dilation."""
SLOTS = 128  # rows of a sketch
CHUNK = 4096  # rows that are unfolded together


class Companion:
    """Ties a weight to its layers, and holds the leaf whose gradient is the sketch while a QPSBGD trains it.

    ``binary_parameters(model)`` gives all layers of one weight the same companion. Without a leaf, layers are
    ordinary layers. It is neither a parameter nor a buffer; a copy has no leaf.

    Example:
        >>> from spingrad import QPSBGD, BinaryLinear, binary_parameters
        >>> layer = BinaryLinear(4, 3)
        >>> optimizer = QPSBGD(binary_parameters(layer))
        >>> layer(torch.ones(5, 4)).sum().backward()
        >>> layer.companion.sketch.shape  # 16 slots and the count
        torch.Size([1, 17, 4])
        >>> layer.companion.sketch[0, -1, 0]
        tensor(5.)
    """

    def __init__(self, groups: int = 1) -> None:
        self.groups = groups
        self.kind: Kind = "rows"
        self.leaf: Tensor | None = None
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()

    def begin(self, kind: Kind, weight: Tensor) -> None:
        """Sketch from now on, beginning with nothing."""
        n, units = weight.shape[1:].numel(), weight.shape[0] // self.groups
        rows = min(SLOTS, 4 * n) if kind == "rows" else n
        shape = (self.groups, rows + 1, n + 2 * units if kind == "published" else n)
        self.kind, self.leaf = kind, _zeros(shape, kind, weight)

    def end(self) -> None:
        self.leaf = None

    def holds(self, weight: Tensor) -> bool:
        """Whether a layer still computes with this weight."""
        return any(layer._parameters.get("weight") is weight for layer in self.layers)

    @property
    def sketch(self) -> Tensor | None:
        return None if self.leaf is None else self.leaf.grad

    def clear(self) -> None:
        if self.leaf is not None:
            self.leaf.grad = None

    def follow(self, weight: Tensor) -> None:
        """Move to the device and dtype of the weight, with the sketch."""
        if (old := self.leaf) is not None:
            new = _zeros(tuple(old.shape), self.kind, weight)
            if (new.device, new.dtype) != (old.device, old.dtype):
                new.grad = None if old.grad is None else old.grad.to(new)
                self.leaf = new

    def __deepcopy__(self, memo: dict[int, Any]) -> "Companion":
        copy = memo[id(self)] = Companion(self.groups)
        return copy

    def __reduce__(self) -> tuple[type["Companion"], tuple[int]]:
        return Companion, (self.groups,)


def _zeros(shape: tuple[int, ...], kind: Kind, weight: Tensor) -> Tensor:
    """A leaf of zeros that takes the memory of one number; exact sums are in double precision."""
    dtype = weight.dtype if kind == "rows" else torch.float64
    return torch.zeros((), dtype=dtype, device=weight.device).expand(shape).requires_grad_()


def sketched(out: Tensor, x: Tensor, companion: Companion, weight: Tensor, geometry: Geometry) -> Tensor:
    """A layer's output, from which a backward pass leaves a sketch if an optimizer wants one."""
    leaf = companion.leaf
    if leaf is None or not weight.requires_grad or not torch.is_grad_enabled() or _is_exporting():
        return out
    node = _NoteInTransform if in_transform() else _Note
    product: Tensor = node.apply(out, x.detach(), leaf, companion.kind, geometry)  # type: ignore[no-untyped-call]
    return product


def in_transform() -> bool:
    """Whether a transform of torch.func, such as ``grad`` or ``vmap``, or forward mode is at work."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def _is_exporting() -> bool:
    """Whether torch.jit or torch.export writes down the network, which leaves no sketches then."""
    exporting = torch.compiler.is_compiling() and torch.compiler.is_exporting()
    return bool(exporting) or torch._C._get_tracing_state() is not None


class _Note(torch.autograd.Function):
    """The identity on a layer's output; the companion's gradient is the sketch."""

    @staticmethod
    def forward(out: Tensor, x: Tensor, leaf: Tensor, kind: Kind, geometry: Geometry) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, x, leaf, ctx.kind, ctx.geometry = inputs
        ctx.save_for_backward(x)
        ctx.shape, ctx.dtype = leaf.shape, leaf.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [x] = ctx.saved_tensors  # once: checkpointing gives them only once
        if not torch.compiler.is_compiling() and torch._C._functorch.is_legacy_batchedtensor(grad):
            return grad, None, None, None, None  # is_grads_batched of autograd.grad, which has no leaves
        with torch.no_grad():
            own = sketch_of(x, grad.detach(), ctx.shape, ctx.dtype, ctx.kind, ctx.geometry)
        return grad, None, own, None, None


class _NoteInTransform(_Note):
    """:class:`_Note` under the transforms of ``torch.func``, which accumulate into no leaf."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, out: Tensor, *_: Any) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def vmap(info: Any, in_dims: Any, out: Tensor, *_: Any) -> tuple[Tensor, int]:
        return out.view_as(out), in_dims[0]


def sketch_of(
    x: Tensor, grad: Tensor, shape: torch.Size, dtype: torch.dtype, kind: Kind, geometry: Geometry
) -> Tensor:
    """The sketch of one pass. No value is read back to the host, and there is no state and no random number.

    Args:
        x: Input of the linear map, shape ``(..., n)``, or images ``(N, C, ...)`` of a convolution.
        grad: Gradient of its output, shape ``(..., m)``, or ``(N, m, ...)``.
        shape: Of the result, ``(groups, rows, columns)``.
        dtype: Of the result.
        kind: What is kept.
        geometry: How inputs become rows.

    Example:
        >>> x, grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0], [0.0]])
        >>> sketch_of(x, grad, torch.Size([1, 3, 2]), torch.float32, "gram", ())  # the first row alone
        tensor([[[1., 2.],
                 [2., 4.],
                 [1., 0.]]], dtype=torch.float64)
    """
    if kind == "rows":
        own: Tensor = torch.ops.spingrad.sample(x, grad, list(shape), dtype, list(geometry))
        return own
    x, by_group = grouped(x, grad, shape[0], geometry)
    return _exact(x, by_group, shape, kind, geometry, grad.shape[-geometry[0] :] if geometry else ())


def grouped(x: Tensor, grad: Tensor, groups: int, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Inputs as rows or a batch of images, and the gradient by groups, ``(groups, units, r)``."""
    if not geometry:
        return x.reshape(-1, x.shape[-1]), grad.reshape(1, -1, grad.shape[-1]).mT
    x, grad = (own.reshape(-1, *own.shape[-geometry[0] - 1 :]) for own in (x, grad))
    return x, grad.unflatten(1, (groups, -1)).movedim(0, 2).flatten(2)


# At most some of a pass's rows that have a gradient, spread over all of them, and how many there are.
torch.library.define(
    "spingrad::sample", "(Tensor x, Tensor grad, int[] shape, ScalarType dtype, int[] geometry) -> Tensor"
)


def _fake(x: Tensor, grad: Tensor, shape: list[int], dtype: torch.dtype, geometry: list[int]) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)


torch.library.register_fake("spingrad::sample", _fake)


def sample(x: Tensor, grad: Tensor, shape: list[int], dtype: torch.dtype, geometry: list[int]) -> Tensor:
    """The meaning of the operator: no value is read back, no state, no random number.

    Args:
        x: Input of the linear map, as for :func:`sketch_of`, like the gradient.
        grad: Gradient of the output.
        shape: Of the sketch, ``(groups, slots + 1, n)``.
        dtype: Of the sketch.
        geometry: How inputs become rows.
    """
    output, slots = grad.shape[-geometry[0] :] if geometry else (), shape[1] - 1
    x, by_group = grouped(x, grad, shape[0], tuple(geometry))
    live = (by_group != 0).any(1)  # (groups, r)
    if not live.shape[1]:
        return x.new_zeros(shape, dtype=dtype)
    k, passed = torch.arange(slots, device=x.device), live.cumsum(1)
    count = passed[:, -1:]
    # Equal steps would meet the same columns of every image; the golden ratio moves the place on.
    spread = (1024 * k + 633 * k % 1024) * count // (1024 * slots)
    place = torch.searchsorted(passed, torch.where(count > slots, spread, k) + 1).clamp(max=live.shape[1] - 1)
    rows = rows_at(x, place, tuple(geometry), output).to(dtype)  # (groups, slots, n)
    usable = (k < count) & rows.abs().amax(2).isfinite()
    rows = rows.where(usable[:, :, None], 0)
    bits = mixed(magnitudes(rows).sum(2) + k)
    factor = (count.to(dtype) / count.clamp(1, slots).to(dtype)).sqrt()
    rows = rows * (((bits >> 7 & 1) * 2 - 1) * factor)[:, :, None]
    moved = (k - mixed(bits.sum(1, keepdim=True))) % slots
    rows = rows.gather(1, moved[:, :, None].expand_as(rows))
    return torch.cat([rows, F.pad(count.to(dtype)[:, :, None], (0, shape[2] - 1))], 1)


torch.library.impl("spingrad::sample", "CompositeExplicitAutograd", sample)


def magnitudes(rows: Tensor) -> Tensor:  # (..., n) -> (..., n)
    """Sign and exponent of numbers, from which a row's hash is made: rounding errors do not change it.

    Example:
        >>> magnitudes(torch.tensor([1.0, 1.9999999, 2.0, 0.0]))
        tensor([127, 127, 128,   0], dtype=torch.int32)
    """
    single = rows.dtype == torch.float32
    words = rows.view(torch.int32)  # the high one of a double comes last
    return words >> 23 if single else words[..., 1::2] >> 20


def mixed(bits: Tensor) -> Tensor:
    """A hash of 32 bits, in integers of 64."""
    bits = (bits & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF
    bits = (bits ^ bits >> 15) * 0x2C1B3C6D & 0xFFFFFFFF
    return bits ^ bits >> 12


def _exact(
    x: Tensor, V: Tensor, shape: torch.Size, kind: Kind, geometry: Geometry, output: Sequence[int]
) -> Tensor:
    """Sums over all rows."""
    n, units = shape[1] - 1, V.shape[1]
    total = torch.zeros(shape, dtype=torch.float64, device=x.device)
    for rows, own in chunks(x, V, geometry, output):
        if kind == "gram":
            live = (own != 0).any(2, keepdim=True)
            rows = rows * live
            total[:, :n] += rows.mT @ rows
            total[:, n, 0] += live.sum((1, 2))
        else:
            Z = rows / rows.square().sum(2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
            total[:, :n] += torch.cat([Z.mT @ Z, Z.mT @ own, rows.mT @ own], 2)
            total[:, n, 0] += rows.shape[1]
            total[:, n, n : n + units] += own.square().sum(1)
            total[:, n, n + units] += rows.square().sum((1, 2))
    return total


def chunks(
    x: Tensor, V: Tensor, geometry: Geometry, output: Sequence[int] = ()
) -> Iterator[tuple[Tensor, Tensor]]:  # (groups, count, n) and (groups, count, units) each
    """All rows in double precision, some thousand at a time: patches take many times the memory of images."""
    for place in torch.arange(V.shape[2], device=x.device).split(CHUNK):
        rows = rows_at(x, place.expand(len(V), -1), geometry, output)
        yield rows.double(), V[:, :, place].mT.double()


def rows_at(
    x: Tensor, place: Tensor, geometry: Geometry, output: Sequence[int] = ()
) -> Tensor:  # (groups, count) -> (groups, count, n)
    """Some rows: of a matrix as they stand, of images the patches at these places, which alone are unfolded.

    Args:
        x: A matrix ``(r, n)``, or images ``(N, C, ...)``.
        place: Numbers of rows; those of a convolution count images first, then places in the output.
        geometry: How inputs become rows.
        output: Height and width of the output, or as many sizes as the convolution has dimensions.

    Example:
        >>> images, geometry = torch.arange(9.0).view(1, 1, 3, 3), (2, 0, 2, 2, 1, 1, 0, 0, 1, 1)
        >>> rows_at(images, torch.tensor([[0, 3]]), geometry, (2, 2))
        tensor([[[0., 1., 3., 4.],
                 [4., 5., 7., 8.]]])
    """
    if not geometry:
        return x[place]
    dims, transposed, *sizes = geometry
    kernel, stride, padding, dilation = (sizes[i * dims : (i + 1) * dims] for i in range(4))
    groups, count = place.shape
    channels = x.shape[1] // groups
    corner = []
    for length in reversed(output):
        corner.append(place % length)
        place = place // length
    first = torch.arange(0, groups * channels, channels, device=x.device)[:, None]
    index = (place * x.shape[1] + first)[:, :, None] + torch.arange(channels, device=x.device)
    inside = torch.ones_like(place, dtype=torch.bool)[:, :, None]
    for i, at in enumerate(reversed(corner)):
        length, tap = x.shape[2 + i], torch.arange(kernel[i], device=x.device) * dilation[i]
        if transposed:  # of zeros between the pixels
            spread = at[:, :, None] + padding[i] - tap
            along, whole = spread // stride[i], spread % stride[i] == 0
        else:
            along = at[:, :, None] * stride[i] - padding[i] + tap
            whole = torch.ones_like(along, dtype=torch.bool)
        shape = groups, count, *(1,) * (i + 1), kernel[i]
        index = index[..., None] * length + along.clamp(0, length - 1).view(shape)
        inside = inside[..., None] & (whole & (along >= 0) & (along < length)).view(shape)
    return x.take(index).where(inside, 0).flatten(2)
