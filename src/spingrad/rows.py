"""The patches of images as the rows of a matrix that need not be held whole: it is k² times the images."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Patches:
    """What a convolution sees: one row for each patch, one column for each channel and place in it.

    Args:
        images: Batches of images, shape ``(N, C, H, W)`` each; accumulated batches need not be of one size.
        kernel_size: As in :class:`torch.nn.Conv2d`, like the three that follow.
        live: A mask of the rows that count, or ``None`` for all.

    Example:
        >>> Patches([torch.arange(9.0).view(1, 1, 3, 3)], (2, 2)).dense()
        tensor([[0., 1., 3., 4.],
                [1., 2., 4., 5.],
                [3., 4., 6., 7.],
                [4., 5., 7., 8.]])
    """

    images: Sequence[Tensor]
    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    live: Tensor | None = None

    @staticmethod
    def cat(parts: Sequence["Patches"]) -> "Patches":
        return replace(parts[0], images=[image for part in parts for image in part.images])

    def __len__(self) -> int:
        if self.live is not None:
            return int(self.live.sum())
        return sum(len(images) * h * w for images in self.images for h, w in [self._output_size(images)])

    @property
    def shape(self) -> Pair:
        return len(self), self.images[0].shape[1] * self.kernel_size[0] * self.kernel_size[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.images[0].dtype

    def float(self) -> "Patches":
        return replace(self, images=[images.float() for images in self.images])

    def sum(self) -> Tensor:
        """The sum over the images: finite if they are."""
        return torch.stack([images.sum() for images in self.images]).sum()

    def where(self, live: Tensor) -> "Patches":
        return replace(self, live=live)

    def norm(self) -> Tensor:
        """The Frobenius norm of the matrix."""
        together = (0, 1) if self.live is None else 1  # patches that need not be told from each other
        maps = [images.square().sum(together, keepdim=True) for images in self.images]
        ones = maps[0].new_ones(1, 1, *self.kernel_size)
        rows = torch.cat([F.conv2d(map_, ones, None, *self._geometry).flatten() for map_ in maps])
        return (rows if self.live is None else rows[self.live]).sum().sqrt()

    def __truediv__(self, divisor: Tensor) -> "Patches":
        return replace(self, images=[images / divisor for images in self.images])

    def blocks(self, size: int) -> Iterator[Tensor]:  # (r, b) each
        """The columns of as many channels as make up about ``size``, block after block."""
        channels = max(1, size // (self.kernel_size[0] * self.kernel_size[1]))
        for parts in zip(*(images.split(channels, 1) for images in self.images), strict=True):
            columns = [self._unfold(part) for part in parts]
            joined = columns[0] if len(columns) == 1 else torch.cat(columns, 1)
            yield (joined if self.live is None else joined[:, self.live]).T

    def chunks(self, rows: int) -> Iterator[Tensor]:  # (about rows, n) each
        """The rows of some images after the other."""
        for images, live in self._parts(rows):
            chunk = self._unfold(images).T
            yield chunk if live is None else chunk[live]

    def dense(self) -> Tensor:  # (r, n)
        return next(self.blocks(self.shape[1]))

    def sample(self, count: int) -> Tensor:  # (at most count, n)
        """Rows of the first images, about one in 16 if there are that many; no other is unfolded."""
        images, live = next(part for part in self._parts(16 * count) if part[1] is None or part[1].any())
        size = len(images), *self._output_size(images)
        rows = torch.arange(math.prod(size), device=images.device) if live is None else live.nonzero()[:, 0]
        n, y, x = torch.unravel_index(rows[:: -(-len(rows) // count)], size)
        padded = self._padded(images)
        _, channels, height, width = padded.shape
        (kh, kw), (sh, sw), (dh, dw) = self.kernel_size, self.stride, self.dilation
        corners = (n * channels * height + y * sh) * width + x * sw
        c, i, j = (torch.arange(k, device=n.device) for k in (channels, kh, kw))
        inner = (c[:, None, None] * height + i[:, None] * dh) * width + j * dw
        return padded.take(corners[:, None] + inner.flatten())

    def pulled_back(self, V: Tensor) -> Tensor:  # (r, m) -> (m, n)
        """``VᵀZ`` of the matrix ``Z``: a convolution's weight gradient, for which nothing is unfolded."""
        if self.live is not None:
            V = V.new_zeros(len(self.live), V.shape[1]).index_put_((self.live,), V)
        images = list(self.images)
        if len({part.shape[1:] for part in images}) == 1 < len(images):  # as if they had come together
            images = [torch.cat(images)]
        sizes = [(len(part), *self._output_size(part)) for part in images]
        weight = V.new_empty(V.shape[1], images[0].shape[1], *self.kernel_size)  # which counts for its shape
        total = torch.zeros_like(weight)
        for part, size, v in zip(images, sizes, V.split([*map(math.prod, sizes)]), strict=True):
            grad = v.unflatten(0, size).permute(0, 3, 1, 2).contiguous()
            total += torch.ops.aten.convolution_backward(
                grad, part, weight, None, *self._geometry, False, (0, 0), 1, (False, True, False)
            )[1]
        return total.flatten(1)

    def _parts(self, rows: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """The images that make up about so many rows, some after the other, and which of their rows count."""
        start = 0
        for images in self.images:
            each = math.prod(self._output_size(images))
            for part in images.split(max(1, rows // each)):
                own = slice(start, start := start + len(part) * each)
                yield part, None if self.live is None else self.live[own]

    @property
    def _geometry(self) -> tuple[Pair, Pair, Pair]:
        return self.stride, self.padding, self.dilation

    def _output_size(self, images: Tensor) -> Pair:
        height, width = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(
                images.shape[2:], self.padding, self.dilation, self.kernel_size, self.stride, strict=True
            )
        )
        return height, width

    def _unfold(self, images: Tensor) -> Tensor:  # (C · kh · kw, N · h · w)
        """As :func:`torch.nn.functional.unfold`, but with all images side by side in one matrix."""
        (kh, kw), (sh, sw), (dh, dw) = self.kernel_size, self.stride, self.dilation
        windows = self._padded(images).unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)
        return windows[..., ::dh, ::dw].permute(1, 4, 5, 0, 2, 3).flatten(3).flatten(0, 2)

    def _padded(self, images: Tensor) -> Tensor:
        height, width = self.padding
        return F.pad(images, (width, width, height, height))
