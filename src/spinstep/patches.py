"""The patches of images as the rows of a matrix that need not be held whole: it is k² times the images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

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
        """The Frobenius norm of the matrix: every pixel counts as often as patches hold it."""
        square, start = self.images[0].new_zeros(()), 0
        for images in self.images:
            size = self._output_size(images)
            if self.live is None:
                held = images.new_ones(1, 1, *size)
            else:
                own = slice(start, start := start + len(images) * size[0] * size[1])
                held = self.live[own].view(-1, 1, *size).to(images)
            kernel, shape = images.new_ones(1, 1, *self.kernel_size), (len(held), 1, *images.shape[2:])
            times = conv2d_input(shape, kernel, held, self.stride, self.padding, self.dilation)
            square = square + (images.square().sum(1, keepdim=True) * times).sum()
        return square.sqrt()

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
        start = 0
        for images in self.images:
            height, width = self._output_size(images)
            for part in images.split(max(1, rows // (height * width))):
                chunk = self._unfold(part).T
                own = slice(start, start + len(chunk))
                start += len(chunk)
                yield chunk if self.live is None else chunk[self.live[own]]

    def dense(self) -> Tensor:  # (r, n)
        return next(self.blocks(self.shape[1]))

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
        (h, w), (kh, kw), (sh, sw) = self._output_size(images), self.kernel_size, self.stride
        (ph, pw), (dh, dw) = self.padding, self.dilation
        padded = F.pad(images, (pw, pw, ph, ph)).transpose(0, 1)
        out = images.new_empty(images.shape[1], kh, kw, len(images), h, w)
        for i in range(kh):
            for j in range(kw):
                rows = slice(i * dh, i * dh + (h - 1) * sh + 1, sh)
                out[:, i, j] = padded[..., rows, slice(j * dw, j * dw + (w - 1) * sw + 1, sw)]
        return out.flatten(3).flatten(0, 2)
