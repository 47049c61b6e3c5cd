"""Real workers for tests: processes on this machine, connected by gloo."""

import multiprocessing
import os
from pathlib import Path

import torch
import torch.distributed as dist


def run_workers(task, size, folder, *args):
    """What ``task(rank, size, *args)`` returns in each of ``size`` processes of one group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "spingrad.distributed"])  # what an optimizer will import
    folder = Path(folder) / f"{task.__name__}-{size}-{len(os.listdir(folder))}"
    folder.mkdir()
    processes = [context.Process(target=_work, args=(task, rank, size, folder, args)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size, f"workers ended with {codes}"
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _work(task, rank, size, folder, args):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.save(task(rank, size, *args), folder / f"{rank}.pt")
    dist.destroy_process_group()
