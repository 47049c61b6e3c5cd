"""The wire: the collectives of a process group, and how many bytes a worker sent through them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = 5.0  # seconds that ranks have to report a failure that one of them has seen


class Wire:
    """A process group of torch, gloo on CPUs or NCCL on GPUs.

    Args:
        group: A process group; ``None`` is the whole world, which ``torchrun`` starts and
            ``torch.distributed.init_process_group()`` makes.

    Attributes:
        sent: Bytes that this worker has sent. Whether they go to the others directly or around a ring, a
            worker sends its part of an all-gather to, or on behalf of, each of the others once. An all-reduce
            is counted as a ring, which sends each number not quite twice.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a group of one
        >>> wire = Wire()
        >>> wire.all_gather(torch.ones(3)).shape, wire.sent
        (torch.Size([1, 3]), 0)
        >>> dist.destroy_process_group()
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
        with self._together():
            dist.all_gather(list(parts), part.contiguous(), group=self.group)
        self.sent += (self.size - 1) * part.nbytes
        return parts

    def all_to_all(self, parts: Tensor) -> Tensor:  # (workers, ...) -> (workers, ...)
        received = parts.new_empty(parts.shape)
        with self._together():
            dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        self.sent += parts.nbytes - parts[self.rank].nbytes
        return received

    def all_reduce_(self, tensor: Tensor) -> None:
        """Make ``tensor`` the sum over all workers, with the same bits everywhere."""
        with self._together():
            dist.all_reduce(tensor, group=self.group)
        self.sent += 2 * (self.size - 1) * tensor.nbytes // self.size

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sum over all workers of each tensor, by one flat all-reduce for each dtype."""
        totals = [*tensors]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[i].flatten() for i in places])
            self.all_reduce_(flat)
            for i, part in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
                totals[i] = part.view(tensors[i].shape)
        return totals

    def broadcast_(self, tensor: Tensor) -> None:
        """Make ``tensor`` what it is on the first worker; not counted, it happens once."""
        with self._together():
            dist.broadcast(tensor, group=self.group, group_src=0)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Name the rank that is lost or late, as far as that can be known, if a collective fails."""
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            lost = self._who_is_lost(time.monotonic() - began)
            raise RuntimeError(f"{lost} What torch says: {error}") from error

    def _who_is_lost(self, waited: float) -> str:
        told = _in_time(lambda: self._waits(waited), 2 * PATIENCE)
        if told is None:
            return "a rank did not answer; which one is unknown, since the process group's store is lost too."
        missing = [rank for rank in range(self.size) if rank not in told]
        if not missing:
            late = min(told, key=lambda rank: told[rank])
            longest = max(told.values())
            if told[late] < longest / 2:
                return (
                    f"rank {late} came too late: it has waited {told[late]:.1f} s for the others, and they "
                    f"up to {longest:.1f} s for it. Give the process group a longer timeout."
                )
            return "the ranks could not exchange data, although all of them are there and report it."
        if len(missing) == 1:
            start = f"rank {missing[0]} did not answer within the process group's timeout, or it has ended."
        else:
            start = (
                f"a rank among {missing} did not answer within the process group's timeout, or it has ended."
            )
        return f"{start} Look at its output first: an error there comes before this one."

    def _waits(self, waited: float) -> dict[int, float]:
        """How long the ranks that report the failure had waited; connections are broken, the store is not."""
        store = dist.distributed_c10d._get_default_store()
        members = dist.get_process_group_ranks(self.group)
        keys = {rank: f"spingrad/failed/{members}/{rank}" for rank in range(self.size)}
        store.set(keys[self.rank], repr(waited))
        end = time.monotonic() + PATIENCE
        told: dict[int, float] = {}
        while len(told) < self.size and time.monotonic() < end:
            there = [rank for rank in keys if rank not in told and store.check([keys[rank]])]
            told |= {rank: float(store.get(keys[rank])) for rank in there}
            time.sleep(0.05)
        return told


def _in_time(work: Callable[[], dict[int, float]], seconds: float) -> dict[int, float] | None:
    """What ``work`` returns, or ``None`` if it fails or takes longer: a store may block for ever."""
    results: list[dict[int, float]] = []

    def guarded() -> None:
        with suppress(RuntimeError):
            results.append(work())

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
