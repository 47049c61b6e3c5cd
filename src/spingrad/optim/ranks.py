"""A guard: on several ranks, an optimizer that does not communicate trains a different model on each."""

import torch.distributed as dist


def check_ranks(per_rank: bool) -> None:
    """Raise in a process group of more than one rank, unless one model per rank is what the user wants."""
    if per_rank or not (dist.is_available() and dist.is_initialized()):
        return
    if (size := dist.get_world_size()) > 1:
        raise RuntimeError(
            f"QPSBGD steps on this rank alone, but the process group has {size} ranks: each rank would train "
            "a different model. Use spingrad.distributed.DistributedQPSBGD, which steps on all ranks "
            "together; to train one model per rank on purpose, pass per_rank=True to QPSBGD"
        )
