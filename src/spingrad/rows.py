"""The rows of a layer's inputs: a dense matrix, or patches of images that are unfolded only in parts."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

__all__ = ["DenseRows", "Patches", "Rows", "to_rows"]

Pair = tuple[int, int]
Sizes = tuple[int, ...]
Windows = tuple[tuple[int, int, int, int], ...]  # kernel size, stride, padding and dilation of each dimension
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}
SAMPLE = 128  # rows in a sketch
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Rows(ABC):
    """A matrix ``Z`` of shape ``(r, n)``, one row per sample, patch or node.

    Everything after a layer asks for a few products with this matrix and never for its kind. A dense matrix
    computes them as they stand; the matrix of a convolution is k² times its images, so its products are
    computed without unfolding it, or in parts.

    Example:
        >>> patches = Patches([torch.rand(2, 3, 8, 8)], (3, 3), (1, 1), (1, 1), (1, 1))
        >>> patches.shape  # 2 · 8 · 8 patches, each of 3 · 3 · 3 numbers
        (128, 27)
        >>> torch.allclose(patches.gram(), DenseRows(patches.dense()).gram(), atol=1e-4)
        True
    """

    drop_below: ClassVar[float] = 1.0
    """Rows without a gradient are dropped if less than this share of the rows has one."""

    @property
    @abstractmethod
    def shape(self) -> Pair: ...

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype: ...

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> "Rows":
        """The same rows, with a function applied to every entry."""

    def to(self, dtype: torch.dtype) -> "Rows":
        """The same rows in another dtype."""
        return self.map(lambda data: data.to(dtype))

    @abstractmethod
    def peak(self) -> Tensor:
        """The largest magnitude of an entry; not finite if any entry is not."""

    @abstractmethod
    def norm(self) -> Tensor:
        """The Frobenius norm."""

    @abstractmethod
    def __truediv__(self, divisor: Tensor) -> "Rows": ...

    @abstractmethod
    def select(self, index: Tensor, grad: Tensor) -> tuple["Rows", Tensor]:
        """Only these rows and their output gradients; all other rows have a gradient of zero."""

    @abstractmethod
    def pull_back(
        self,
        grad: Tensor,
        factor: Tensor | None = None,
        past: Tensor | None = None,
        weight: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:  # -> (m, n)
        """``VᵀZ`` with ``V`` the gradient times a factor per unit, averaged with an earlier one if given.

        Args:
            grad: As in :class:`~spingrad.record.LayerRecord`, shape ``(N, m)`` or ``(N, m, height, width)``.
            factor: Factor of each unit's gradient, shape ``(m,)``.
            past: Earlier average, shape ``(m, n)``; the result is ``(1 - weight) · past + weight · VᵀZ``.
            weight: Weight of the new product.
            out: Memory that a dense matrix may use for the result.
        """

    @abstractmethod
    def sample(self, count: int) -> Tensor:  # (at most count, n)
        """Some of the rows, as they are: spread over all of them, and the same ones in every step."""

    @abstractmethod
    def blocks(self, size: int) -> Iterator[Tensor]:  # (r, b) each
        """All rows, about ``size`` columns at a time."""

    @abstractmethod
    def chunks(self, size: int) -> Iterator[Tensor]:  # (about size, n) each
        """All columns, about ``size`` rows at a time."""

    @abstractmethod
    def dense(self) -> Tensor: ...  # (r, n)

    def joins(self, other: "Rows") -> bool:
        """Whether :meth:`join` takes both: they are rows of one kind."""
        return type(self) is type(other)

    @staticmethod
    @abstractmethod
    def join(rows: Sequence[Any], grads: Sequence[Tensor]) -> tuple["Rows", Tensor]:
        """The rows and output gradients of several backward passes as those of one."""

    @property
    @abstractmethod
    def data(self) -> Tensor:
        """The tensor behind the rows: the matrix itself, or the images."""

    @abstractmethod
    def with_data(self, data: Tensor) -> "Rows":
        """Rows of the same kind over other samples or images."""

    @property
    def fixed_target_factor(self) -> float:
        """By how much a given ``target_rms`` is raised for rows of this kind."""
        return 1.0

    @cached_property
    def sketch(self) -> tuple[Tensor, Tensor]:  # (s, n), (s, s)
        """A sample of the rows, rescaled so that its Gram matrix is near ``ZᵀZ``, and its inner products."""
        rows = self.sample(SAMPLE)
        if len(rows) != len(self):
            rows = rows * (len(self) / len(rows)) ** 0.5
        return rows, rows @ rows.T

    def gram(self) -> Tensor:  # (n, n)
        """``ZᵀZ``."""
        Z = self.dense()
        return Z.T @ Z

    def __len__(self) -> int:
        return self.shape[0]

    def __matmul__(self, G: Tensor) -> Tensor:  # (n, m) -> (r, m)
        return self.dense() @ G


@dataclass(frozen=True, eq=False)
class DenseRows(Rows):
    """A matrix that is held whole.

    Args:
        matrix: Shape ``(r, n)``.

    Example:
        >>> rows = DenseRows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> rows @ torch.tensor([[1.0], [-1.0]])  # a unit with the spins +1 and -1
        tensor([[-1.],
                [-1.]])
    """

    matrix: Tensor

    @property
    def shape(self) -> Pair:
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    def map(self, function: Callable[[Tensor], Tensor]) -> "DenseRows":
        return DenseRows(function(self.matrix))

    def peak(self) -> Tensor:
        return peak_of(self.matrix)

    def norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self.matrix)
        return norm

    def __truediv__(self, divisor: Tensor) -> "DenseRows":
        return DenseRows(self.matrix / divisor)

    def select(self, index: Tensor, grad: Tensor) -> tuple["DenseRows", Tensor]:
        return DenseRows(self.matrix[index]), grad[index]

    def pull_back(
        self,
        grad: Tensor,
        factor: Tensor | None = None,
        past: Tensor | None = None,
        weight: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        V = grad if factor is None else grad * factor
        new = torch.mm(V.T, self.matrix, out=out)
        return new if past is None else new.lerp_(past, 1 - weight)  # faster than one addmm

    def sample(self, count: int) -> Tensor:
        return self.matrix[:: max(1, -(-len(self.matrix) // count))]

    def blocks(self, size: int) -> Iterator[Tensor]:
        yield from self.matrix.split(size, dim=1)

    def chunks(self, size: int) -> Iterator[Tensor]:
        yield from self.matrix.split(size)

    def dense(self) -> Tensor:
        return self.matrix

    @staticmethod
    def join(rows: Sequence["DenseRows"], grads: Sequence[Tensor]) -> tuple["DenseRows", Tensor]:
        if len(rows) == 1:
            return rows[0], grads[0]
        return DenseRows(torch.cat([own.matrix for own in rows])), torch.cat([*grads])

    @property
    def data(self) -> Tensor:
        return self.matrix

    def with_data(self, data: Tensor) -> "DenseRows":
        return DenseRows(data)


@dataclass(frozen=True, eq=False)
class Patches(Rows):
    """The patches of images, one row per patch, one column per channel and place in the patch.

    Args:
        images: Batches of images of one, two or three dimensions, such as ``(N, C, H, W)``. Accumulated
            batches may differ in size.
        kernel_size: As in :class:`torch.nn.Conv2d`, one number per dimension, like the three arguments that
            follow.
        index: The patches that are kept, in rising order; ``None`` keeps all.
        divisor: What every entry is divided by, when it is used.

    Example:
        >>> Patches([torch.arange(9.0).view(1, 1, 3, 3)], (2, 2), (1, 1), (0, 0), (1, 1)).dense()
        tensor([[0., 1., 3., 4.],
                [1., 2., 4., 5.],
                [3., 4., 6., 7.],
                [4., 5., 7., 8.]])
    """

    drop_below: ClassVar[float] = 0.9  # dropping only a few patches costs more time than it saves

    images: Sequence[Tensor]
    kernel_size: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    index: Tensor | None = None
    divisor: Tensor | None = None

    @cached_property
    def shape(self) -> Pair:
        rows = sum(math.prod(size) for size in self._sizes()) if self.index is None else len(self.index)
        return rows, self.images[0].shape[1] * math.prod(self.kernel_size)

    @property
    def dtype(self) -> torch.dtype:
        return self.images[0].dtype

    @property
    def device(self) -> torch.device:
        return self.images[0].device

    def map(self, function: Callable[[Tensor], Tensor]) -> "Patches":
        return replace(self, images=[function(images) for images in self.images])

    def peak(self) -> Tensor:
        return torch.stack([peak_of(images) for images in self.images]).max()

    def norm(self) -> Tensor:
        together = (0, 1) if self.index is None else 1  # patches that need not be told from each other
        maps = [images.square().sum(together, keepdim=True) for images in self.images]
        ones = maps[0].new_ones(1, 1, *self.kernel_size)
        convolve = CONVOLUTIONS[len(self.kernel_size)]
        rows = torch.cat([convolve(map_, ones, None, *self._geometry).flatten() for map_ in maps])
        return self._divided((rows if self.index is None else rows[self.index]).sum().sqrt())

    def __truediv__(self, divisor: Tensor) -> "Patches":
        return replace(self, divisor=divisor if self.divisor is None else self.divisor * divisor)

    def select(self, index: Tensor, grad: Tensor) -> tuple["Patches", Tensor]:
        return replace(self, index=index), grad  # whose other entries are zero

    def pull_back(
        self,
        grad: Tensor,
        factor: Tensor | None = None,
        past: Tensor | None = None,
        weight: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        # The weight gradient of a convolution, for which nothing is unfolded.
        shape = grad.shape[1], self.images[0].shape[1], *self.kernel_size
        product = grad.new_zeros(shape)
        weight_gradient = WEIGHT_GRADIENTS[len(self.kernel_size)]
        for images, part in zip(self.images, self._image_grads(grad), strict=True):
            product += weight_gradient(images, shape, part, *self._geometry)
        product = self._divided(product)
        new = product.flatten(1) if factor is None else product.flatten(1) * factor[:, None]
        return new if past is None else new.lerp_(past, 1 - weight)

    def sample(self, count: int) -> Tensor:
        if self.index is not None or len(self.images) > 1:
            rows = _spread_out(min(len(self), count), max(1.0, len(self) / count), count, self.device)
            return self._picked(rows if self.index is None else self.index[rows])
        [images] = self.images
        size = self._output_size(images)
        places, inside = _sampled_places(images.shape, size, self._windows, count, self.device)
        return self._divided(images.take(places).where(inside, 0.0))

    def blocks(self, size: int) -> Iterator[Tensor]:
        channels = max(1, min(size, 256) // math.prod(self.kernel_size))
        for parts in zip(*(images.split(channels, 1) for images in self.images), strict=True):
            columns = [self._unfold(part) for part in parts]
            joined = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
            yield (joined if self.index is None else joined[:, self.index]).T

    def chunks(self, size: int) -> Iterator[Tensor]:
        if self.index is not None:
            yield from (self._picked(rows) for rows in self.index.split(size))
            return
        for images, (_, *places) in zip(self.images, self._sizes(), strict=True):
            for part in images.split(max(1, size // math.prod(places))):
                yield self._unfold(part).T

    def dense(self) -> Tensor:
        return torch.cat([*self.blocks(self.shape[1])], 1)

    def joins(self, other: Rows) -> bool:
        own = (self.kernel_size, self._geometry)
        return isinstance(other, Patches) and own == (other.kernel_size, other._geometry)

    @staticmethod
    def join(rows: Sequence["Patches"], grads: Sequence[Tensor]) -> tuple["Patches", Tensor]:
        if len(rows) == 1:
            return rows[0], grads[0]
        images = [part for own in rows for part in own.images]
        if len({part.shape[1:] for part in images}) == 1:  # as if they had come together
            return rows[0].with_data(torch.cat(images)), torch.cat([*grads])
        flat = [grad.transpose(0, 1).flatten(1) for grad in grads]  # (m, r) each
        return replace(rows[0], images=images), torch.cat(flat, 1)[None]

    @property
    def data(self) -> Tensor:
        if len({images.shape[1:] for images in self.images}) > 1:
            sizes = sorted({tuple(images.shape[1:]) for images in self.images})
            raise ValueError(f"images of one size are needed here, got the sizes {sizes}")
        return self.images[0] if len(self.images) == 1 else torch.cat([*self.images])

    def with_data(self, data: Tensor) -> "Patches":
        return replace(self, images=[data], index=None)

    @property
    def fixed_target_factor(self) -> float:
        # Only a fraction √(n/r) of a target of r rows lies in the span of their n inputs.
        r, n = self.shape
        return math.sqrt(max(1.0, r / n))

    def _image_grads(self, grad: Tensor) -> Sequence[Tensor]:  # (N, m, h, w) each
        if len(self.images) == 1:
            return [grad]
        counts = [math.prod(size) for size in self._sizes()]  # batches of different sizes: (1, m, r)
        parts = grad[0].split(counts, dim=1)
        return [
            part.unflatten(1, size).transpose(0, 1) for part, size in zip(parts, self._sizes(), strict=True)
        ]

    def _picked(self, rows: Tensor) -> Tensor:  # (count, n)
        """These of all patches, in rising order."""
        parts, start = [], 0
        for images, size in zip(self.images, self._sizes(), strict=True):
            end = start + math.prod(size)
            own = rows if len(self.images) == 1 else rows[(rows >= start) & (rows < end)] - start
            places, inside = _places(own, images.shape, size[1:], self._windows)
            parts.append(images.take(places).where(inside, 0.0))
            start = end
        return self._divided(torch.cat(parts))

    @property
    def _geometry(self) -> tuple[Sizes, Sizes, Sizes]:
        return self.stride, self.padding, self.dilation

    @property
    def _windows(self) -> Windows:
        return tuple(zip(self.kernel_size, *self._geometry, strict=True))

    def _sizes(self) -> list[Sizes]:
        """Images, and patches along each dimension, of every batch."""
        return [(len(images), *self._output_size(images)) for images in self.images]

    def _output_size(self, images: Tensor) -> Sizes:
        return tuple(
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(
                images.shape[2:], self.padding, self.dilation, self.kernel_size, self.stride, strict=True
            )
        )

    def _unfold(self, images: Tensor) -> Tensor:  # (C · kernel size, N · output size)
        """As :func:`torch.nn.functional.unfold`, the patches of all images side by side in one matrix."""
        dims = len(self.kernel_size)
        windows = self._padded(images)
        for i, (k, s, d) in enumerate(zip(self.kernel_size, self.stride, self.dilation, strict=True)):
            windows = windows.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]
        inner, outer = range(2 + dims, 2 + 2 * dims), range(2, 2 + dims)
        return windows.permute(1, *inner, 0, *outer).flatten(1 + dims).flatten(0, dims)

    def _padded(self, images: Tensor) -> Tensor:
        return self._divided(F.pad(images, [p for p in reversed(self.padding) for _ in range(2)]))

    def _divided(self, tensor: Tensor) -> Tensor:
        return tensor if self.divisor is None else tensor / self.divisor


def _places(
    rows: Tensor, images: torch.Size, size: Sizes, windows: Windows
) -> tuple[Tensor, Tensor]:  # (count, n) each
    """Where the entries of patches are in images laid out as one vector, and whether they are in them.

    An entry in the padding has some place in the images; it is not inside.
    """
    count, channels, *lengths = images
    image, *corner = torch.unravel_index(rows, (count, *size))
    places = image[:, None] * channels + torch.arange(channels, device=rows.device)
    inside = torch.ones_like(places, dtype=torch.bool)
    for length, at, (k, s, p, d) in zip(lengths, corner, windows, strict=True):
        along = at[:, None] * s - p + torch.arange(k, device=rows.device) * d  # (count, k)
        along = along.view(len(rows), *(1,) * (places.ndim - 1), k)
        places = places[..., None] * length + along.clamp(0, length - 1)
        inside = inside[..., None] & (along >= 0) & (along < length)
    return places.flatten(1), inside.flatten(1)


@lru_cache(256)
def _sampled_places(
    images: torch.Size, size: Sizes, windows: Windows, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:  # (count, n) each
    """The places of a sample of patches; the same in every step of a run."""
    rows = _spread_out(images[0], math.prod(size), count, device)
    return _places(rows, images, size, windows)


def _spread_out(groups: int, each: float, count: int, device: torch.device) -> Tensor:
    """At most ``count`` of the rows of some groups: as many of every group, in other places of each.

    Equal steps through all rows would meet the same columns of every image. The golden ratio moves the place
    on from row to row so that all places are met equally often.
    """
    if groups * each <= count:
        return torch.arange(round(groups * each), device=device)
    number = torch.arange(count)
    place = (number.double() * GOLDEN_RATIO) % 1
    return ((number * groups // count + place) * each).long().to(device)


def peak_of(tensor: Tensor) -> Tensor:
    """The largest magnitude of an entry, zero if there is none; not finite if any entry is not."""
    if not tensor.numel():
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor)
    return torch.maximum(high, -low)


def to_rows(x: Tensor, grad: Tensor, geometry: tuple[int, ...]) -> list[tuple[Rows, Tensor]]:
    """A layer's input and output gradient as rows, one pair per group of channels.

    Args:
        x: Input, shape ``(..., n)``; of a convolution ``(N, C, H, W)`` or ``(C, H, W)``, or with one or three
            dimensions in the place of height and width.
        grad: Gradient of the loss by the layer's output.
        geometry: Empty for a matrix product. For a convolution: the number of dimensions, the number of
            groups, then one number per dimension each for kernel size, stride, padding and dilation. For a
            transposed convolution, output padding follows.

    Example:
        >>> [(rows, grad)] = to_rows(torch.ones(5, 4), torch.ones(5, 3), ())
        >>> rows.shape, grad.shape
        ((5, 4), torch.Size([5, 3]))
        >>> geometry = 2, 1, 3, 3, 1, 1, 0, 0, 1, 1  # two dimensions, one group, a kernel of 3 by 3
        >>> [(rows, grad)] = to_rows(torch.ones(2, 1, 8, 8), torch.ones(2, 3, 6, 6), geometry)
        >>> rows.shape, grad.shape
        ((72, 9), torch.Size([2, 3, 6, 6]))
    """
    if not geometry:
        return [(DenseRows(x.reshape(-1, x.shape[-1])), grad.reshape(-1, grad.shape[-1]))]
    dims, groups, *sizes = geometry
    if x.ndim != dims + 2:  # a single image, or batches of batches under vmap
        x, grad = (t.reshape(-1, *t.shape[-dims - 1 :]) for t in (x, grad))
    kernel, stride, padding, dilation, *more = (
        tuple(sizes[i : i + dims]) for i in range(0, len(sizes), dims)
    )
    if more:
        x = _spread(x, kernel, stride, padding, dilation, *more)
        grad = grad.flip([*range(2, dims + 2)])
        stride, padding = (1,) * dims, (0,) * dims
    parts = zip(x.chunk(groups, 1), grad.chunk(groups, 1), strict=True)
    return [(Patches([images], kernel, stride, padding, dilation), out) for images, out in parts]


def _spread(
    x: Tensor, kernel_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, output_padding: Sizes
) -> Tensor:
    """The images whose convolution is a transposed convolution of ``x``.

    They have zeros between the pixels of ``x`` and around them. A transposed convolution takes its kernel the
    other way round; here the images are reversed instead, and with them the order of the patches.
    """
    places = tuple(slice(None, None, s) for s in stride)
    lengths = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *lengths)
    spread[:, :, *places] = x
    before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel_size, padding, strict=True)]
    after = [b + extra for b, extra in zip(before, output_padding, strict=True)]
    pairs = zip(reversed(before), reversed(after), strict=True)
    padded = F.pad(spread, [side for pair in pairs for side in pair])  # a negative side is cut off
    return padded.flip([*range(2, x.ndim)])
