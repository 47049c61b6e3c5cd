"""Real workers for tests: processes on this machine, connected by gloo."""

import multiprocessing
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_workers(task, size, folder, *args, lost=(), timeout=1800):
    """What ``task(rank, size, *args)`` returns in each of ``size`` processes of one group.

    Processes of ranks in ``lost`` are not expected to end well, or at all; nothing is returned for them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "spingrad.distributed"])  # what an optimizer will import
    folder = Path(folder) / f"{task.__name__}-{size}-{len(os.listdir(folder))}"
    folder.mkdir()
    processes = [
        context.Process(target=_work, args=(task, rank, size, folder, args, timeout)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    kept = [rank for rank in range(size) if rank not in lost]
    for rank in kept:
        processes[rank].join(120)
    codes = [processes[rank].exitcode for rank in kept]
    for process in processes:
        process.kill()
    assert codes == [0] * len(kept), f"workers ended with {codes}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in kept]


def _work(task, rank, size, folder, args, timeout):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    torch.save(task(rank, size, *args), folder / f"{rank}.pt")
    dist.destroy_process_group()
