"""The wire: the collectives of a process group, and how many bytes a worker sent through them."""

import torch.distributed as dist
from torch import Tensor


class Wire:
    """A process group of torch, gloo on CPUs or NCCL on GPUs.

    Args:
        group: A process group; ``None`` is the whole world, which ``torchrun`` starts and
            ``torch.distributed.init_process_group()`` makes.

    Attributes:
        sent: Bytes that this worker has sent. Whether they go to the others directly or around a ring, a
            worker sends its part of an all-gather to, or on behalf of, each of the others once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "there is no process group: start the script with torchrun --nproc-per-node=N script.py and "
                'call torch.distributed.init_process_group("gloo") (or "nccl") first'
            )
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent = 0

    def all_gather(self, part: Tensor) -> Tensor:  # (...) -> (workers, ...)
        parts = part.new_empty(self.size, *part.shape)
        dist.all_gather(list(parts), part.contiguous(), group=self.group)
        self.sent += (self.size - 1) * part.nbytes
        return parts

    def all_to_all(self, parts: Tensor) -> Tensor:  # (workers, ...) -> (workers, ...)
        received = parts.new_empty(parts.shape)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        self.sent += parts.nbytes - parts[self.rank].nbytes
        return received

    def broadcast_(self, tensor: Tensor) -> None:
        """Make ``tensor`` what it is on the first worker; not counted, it happens once."""
        dist.broadcast(tensor, group=self.group, group_src=0)

    def barrier(self) -> None:
        dist.barrier(self.group)
