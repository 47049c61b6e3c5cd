"""The binary convolution: a linear layer over patches."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spingrad.nn.linear import BinaryLayer, Device, Scale


class BinaryConv2d(BinaryLayer):
    """A 2-D convolution whose weights are -1 or +1; every patch is a row of the record.

    Arguments as in :class:`torch.nn.Conv2d`, with ``scale`` as in :class:`BinaryLinear`
    and without a bias by default. The input is padded with zeros.

    Example:
        >>> import torch
        >>> layer = BinaryConv2d(3, 8, kernel_size=3, padding=1)
        >>> layer(torch.zeros(2, 3, 28, 28)).shape
        torch.Size([2, 8, 28, 28])
    """

    trailing = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: Literal["zeros"] = "zeros",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        scale: Scale = True,
    ) -> None:
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups must divide in_channels and out_channels, "
                f"got groups={groups}, in_channels={in_channels}, out_channels={out_channels}"
            )
        shape = out_channels, in_channels // groups, *_pair(kernel_size)
        super().__init__(shape, bias, device, dtype, scale=scale)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride = _pair(kernel_size), _pair(stride)
        self.padding, self.dilation = _pair(padding), _pair(dilation)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, None, self.stride, self.padding, self.dilation, self.groups)

    @property
    def geometry(self) -> tuple[int, ...]:
        return self.groups, *self.kernel_size, *self.stride, *self.padding, *self.dilation

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, {self._options()}"
        )


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, tuple) and len(size) == 2 and all(isinstance(s, int) for s in size):
        return size
    raise TypeError(f"sizes are an int or a pair of ints, got {size!r}")
