"""DistributedDataParallel around a model whose binary weights vote."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spingrad.nn import binary_parameters


def data_parallel(model: nn.Module, **settings: Any) -> DistributedDataParallel:
    """``DistributedDataParallel`` for the real-valued parameters of a model, not for its binary weights.

    For ``QPSBGD(…, ranks="vote")``, which needs no average of their gradients.

    Args:
        model: A model with binary layers and others.
        **settings: Those of :class:`torch.nn.parallel.DistributedDataParallel`.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from spingrad import BinaryLinear
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
        >>> model = nn.Sequential(BinaryLinear(8, 4), nn.BatchNorm1d(4))
        >>> parallel = data_parallel(model)
        >>> parallel(torch.randn(16, 8)).shape
        torch.Size([16, 4])
        >>> dist.destroy_process_group()
    """
    # The name begins with an underscore, but it is the way that DDP itself documents in its source.
    binary = [name for name, _ in binary_parameters(model)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, binary)
    return DistributedDataParallel(model, **settings)
