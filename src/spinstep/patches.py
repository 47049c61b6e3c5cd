"""The patches of images as the rows of a matrix that need not be held whole: it is k² times the images."""

import itertools
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
        squares = [images.square().sum(1, keepdim=True) for images in self.images]
        rows = torch.cat([torch.stack([*self._places(square)]).sum(0).flatten() for square in squares])
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
        channels, places = images.shape[1], self.kernel_size[0] * self.kernel_size[1]
        out = images.new_empty(channels, places, len(images), *self._output_size(images))
        for i, place in enumerate(self._places(images)):
            out[:, i] = place.transpose(0, 1)
        return out.flatten(2).flatten(0, 1)

    def _places(self, images: Tensor) -> Iterator[Tensor]:  # (N, C, h, w) each
        """What all patches have at the first place of the kernel, at the second, and so on."""
        (h, w), (kh, kw), (sh, sw) = self._output_size(images), self.kernel_size, self.stride
        (ph, pw), (dh, dw) = self.padding, self.dilation
        padded = F.pad(images, (pw, pw, ph, ph))
        for i, j in itertools.product(range(0, kh * dh, dh), range(0, kw * dw, dw)):
            yield padded[..., i : i + (h - 1) * sh + 1 : sh, j : j + (w - 1) * sw + 1 : sw]
