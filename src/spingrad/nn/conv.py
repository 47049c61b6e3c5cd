"""Binary convolutions: linear layers over patches."""

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from spingrad._numbers import is_whole
from spingrad.nn.linear import BinaryLayer, Device, Scale
from spingrad.sketch import Geometry

Size = int | Iterable[int]
Mode = Literal["zeros", "reflect", "replicate", "circular"]


class BinaryConv(BinaryLayer):
    """What :class:`BinaryConv1d`, :class:`BinaryConv2d` and :class:`BinaryConv3d` share."""

    convolve: ClassVar[Callable[..., Tensor]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | Literal["same", "valid"] = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: Mode = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Scale = True,
    ) -> None:
        if padding_mode not in get_args(Mode):
            raise ValueError(f"padding_mode is one of {get_args(Mode)}, got {padding_mode!r}")
        _check_groups(groups, in_channels, out_channels)
        kernel = self._sizes(kernel_size=kernel_size)
        super().__init__((out_channels, in_channels // groups, *kernel), bias, device, dtype, scale=scale)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.padding_mode = kernel, padding_mode
        self.stride, self.dilation = self._sizes(stride=stride), self._sizes(dilation=dilation)
        self.padding = padding if isinstance(padding, str) else self._sizes(padding=padding)
        before, after = self._borders()
        in_product = padding_mode == "zeros" and before == after
        self.border = before if in_product else (0,) * self.trailing
        """Zeros on both sides of each dimension, which the convolution itself adds."""
        pairs = zip(reversed(before), reversed(after), strict=True)
        self.sides = () if in_product else tuple(side for pair in pairs for side in pair)
        """Other padding, as :func:`torch.nn.functional.pad` takes it; done before the convolution."""

    def _borders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Padding before and after the image in each dimension."""
        if not isinstance(self.padding, str):
            return self.padding, self.padding
        if self.padding == "valid":
            return (0,) * self.trailing, (0,) * self.trailing
        if self.padding != "same":
            raise ValueError(f'padding is sizes, "same" or "valid", got {self.padding!r}')
        if any(s != 1 for s in self.stride):
            raise ValueError(f'padding="same" needs stride=1, got stride={self.stride}')
        total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        return tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)

    @classmethod
    def _sizes(cls, **named: Size) -> tuple[int, ...]:
        ((name, size),) = named.items()
        sizes = tuple(size) if isinstance(size, Iterable) else (size,) * cls.trailing
        least = 0 if "padding" in name else 1
        if len(sizes) != cls.trailing or not all(is_whole(s, least) for s in sizes):
            raise ValueError(f"{name} is an int of at least {least} or {cls.trailing} of them, got {size!r}")
        return sizes

    def inputs(self, x: Tensor) -> Tensor:
        _check_dimensions(x, self.trailing, self.in_channels)
        if not self.sides:
            return x
        return F.pad(x, self.sides, "constant" if self.padding_mode == "zeros" else self.padding_mode)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return type(self).convolve(x, weight, None, self.stride, self.border, self.dilation, self.groups)

    @property
    def geometry(self) -> Geometry:
        return self.trailing, False, *self.kernel_size, *self.stride, *self.border, *self.dilation

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding!r}, dilation={self.dilation}, "
            f"groups={self.groups}, padding_mode={self.padding_mode!r}, {self._options()}"
        )


class BinaryConv1d(BinaryConv):
    """A 1-D convolution whose weights are -1 or +1; every patch of the input is a row of ``X``.

    Arguments as in :class:`torch.nn.Conv1d`, but without a bias by default; ``scale`` as in
    :class:`~spingrad.BinaryLinear`.

    Example:
        >>> layer = BinaryConv1d(3, 8, kernel_size=5, padding="same")
        >>> layer(torch.zeros(2, 3, 100)).shape
        torch.Size([2, 8, 100])
    """

    trailing = 1
    convolve = F.conv1d


class BinaryConv2d(BinaryConv):
    """A 2-D convolution whose weights are -1 or +1; every patch of the input is a row of ``X``.

    Arguments as in :class:`torch.nn.Conv2d`, but without a bias by default; ``scale`` as in
    :class:`~spingrad.BinaryLinear`.

    Example:
        >>> layer = BinaryConv2d(3, 8, kernel_size=3, padding=1)
        >>> layer(torch.zeros(2, 3, 28, 28)).shape
        torch.Size([2, 8, 28, 28])
    """

    trailing = 2
    convolve = F.conv2d


class BinaryConv3d(BinaryConv):
    """A 3-D convolution whose weights are -1 or +1; every patch of the input is a row of ``X``.

    Arguments as in :class:`torch.nn.Conv3d`, but without a bias by default; ``scale`` as in
    :class:`~spingrad.BinaryLinear`.

    Example:
        >>> layer = BinaryConv3d(1, 4, kernel_size=3, stride=2, padding_mode="replicate", padding=1)
        >>> layer(torch.zeros(2, 1, 8, 8, 8)).shape
        torch.Size([2, 4, 4, 4, 4])
    """

    trailing = 3
    convolve = F.conv3d


class BinaryConvTranspose2d(BinaryLayer):
    """A transposed 2-D convolution whose weights are -1 or +1.

    Arguments as in :class:`torch.nn.ConvTranspose2d`, but without a bias by default. It is a convolution of
    the input with zeros put between its pixels, whose patches are the rows of ``X``.

    The weight has the units first, as in every binary layer: its shape is
    ``(out_channels, in_channels // groups, height, width)``, which is torch's shape with the first two
    dimensions exchanged in each group. With ``scale=True``, the output is divided by the root of the number
    of weights that meet a pixel and not a zero, ``fan_in / (stride · stride)`` on average.

    Example:
        >>> layer = BinaryConvTranspose2d(8, 4, kernel_size=4, stride=2, padding=1)
        >>> layer(torch.zeros(2, 8, 14, 14)).shape
        torch.Size([2, 4, 28, 28])
    """

    trailing = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: Size = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Scale = True,
    ) -> None:
        if padding_mode != "zeros":
            raise ValueError(f'a transposed convolution has padding_mode="zeros" only, got {padding_mode!r}')
        _check_groups(groups, in_channels, out_channels)
        sizes = BinaryConv2d._sizes
        kernel, steps = sizes(kernel_size=kernel_size), sizes(stride=stride)
        shape = out_channels, in_channels // groups, *kernel
        super().__init__(shape, bias, device, dtype, scale=scale)
        if scale is True:
            self.scale = float((self.fan_in / math.prod(steps)) ** -0.5)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.padding_mode = kernel, steps, padding_mode
        self.padding, self.dilation = sizes(padding=padding), sizes(dilation=dilation)
        self.output_padding = sizes(output_padding=output_padding)

    def inputs(self, x: Tensor) -> Tensor:
        _check_dimensions(x, self.trailing, self.in_channels)
        return x

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv_transpose2d(
            x, exchanged(weight, self.groups), None,
            self.stride, self.padding, self.output_padding, self.groups, self.dilation,
        )  # fmt: skip

    @property
    def geometry(self) -> Geometry:
        return self.trailing, True, *self.kernel_size, *self.stride, *self.padding, *self.dilation

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, output_padding={self.output_padding}, "
            f"dilation={self.dilation}, groups={self.groups}, {self._options()}"
        )


def exchanged(weight: Tensor, groups: int) -> Tensor:
    """A weight of a transposed convolution with in- and output channels exchanged, in each group."""
    parts: Tensor = weight.unflatten(0, (groups, -1))
    return parts.transpose(1, 2).flatten(0, 1)


def _check_groups(groups: int, in_channels: int, out_channels: int) -> None:
    if not is_whole(groups, 1) or in_channels % groups or out_channels % groups:
        raise ValueError(
            f"groups must divide in_channels and out_channels, "
            f"got groups={groups}, in_channels={in_channels}, out_channels={out_channels}"
        )


def _check_dimensions(x: Tensor, trailing: int, channels: int) -> None:
    if x.ndim not in (trailing + 1, trailing + 2):
        raise ValueError(
            f"expected an input of {trailing + 2} dimensions (batch, {channels} channels, {trailing} more), "
            f"or {trailing + 1} without a batch, got the shape {tuple(x.shape)}"
        )
