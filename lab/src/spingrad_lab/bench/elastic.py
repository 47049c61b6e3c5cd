"""One of four workers is killed at a random moment: does the run end as if nothing had happened?"""

import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from spingrad._files import append_record, read_records, write_atomically
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab

WORKERS, STEPS, EVERY, BATCH = 4, 40, 5, 40


def work(folder: Path, fatal_step: int, victim: int, delay: float) -> None:
    """One worker of a group; it dies ``delay`` seconds after the beginning of a step, if it is the victim."""
    import torch.distributed as dist

    from spingrad import QPSBGD, BinaryLinear, binary_parameters
    from spingrad.checkpoint import Checkpoint
    from spingrad_lab.data import mnist

    torch.set_num_threads(1)
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        BinaryLinear(784, 64), nn.Hardtanh(), BinaryLinear(64, 64), nn.Hardtanh(), BinaryLinear(64, 10)
    )
    # Otherwise DDP makes new buckets after the first step of a life, which changes the order of its sums.
    replica = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = QPSBGD(binary_parameters(model), lr=1e-2, momentum=0.9)
    checkpoint = Checkpoint(folder / "checkpoint", model=model, optimizer=optimizer)
    data = mnist("test")
    x, y = data.pixels(), data.labels
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    start = checkpoint.load()
    append_record(folder / "starts", [rank, start])
    for step in range(start, STEPS):
        if step == fatal_step and rank == victim and not (folder / "killed").exists():
            threading.Timer(delay, die, [folder]).start()
        own = order[step * BATCH : (step + 1) * BATCH].tensor_split(workers)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(x[own]), y[own]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            checkpoint.save(step + 1)
    content = io.BytesIO()
    torch.save(model.state_dict(), content)
    write_atomically(folder / f"weights-{rank}.pt", content.getvalue())


def die(folder: Path) -> None:
    write_atomically(folder / "killed", b"")
    os.kill(os.getpid(), signal.SIGKILL)


def launch(folder: Path, *fate: object, workers: int = WORKERS) -> float:
    """A run under torchrun; its seconds."""
    folder.mkdir(parents=True)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["--max-restarts=1", "-m", "spingrad_lab.bench.elastic", str(folder), *map(str, fate)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Without it, restarted workers find the addresses of the dead in the store (torch 2.13, gloo).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"torchrun ended with {ended.returncode}:\n{ended.stderr}")
    return time.perf_counter() - begin


def weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights-*.pt"))]


@cache
def undisturbed() -> dict[str, torch.Tensor]:
    """The weights of a run in which nobody is killed."""
    with tempfile.TemporaryDirectory() as folder:
        launch(Path(folder, "run"), -1, 0, 0.0)
        return weights(Path(folder, "run"))[0]


class Elastic(Experiment):
    """One worker of four is sent SIGKILL at a random step, and torchrun starts all four again."""

    title = "A worker is killed"
    source = "784-64-64-10 on MNIST, with momentum, 40 steps, a checkpoint every 5"

    def plan(self, lab: Lab) -> None:
        lab.run([{"run": number} for number in range(lab.seeds or (1 if lab.quick else 20))])

    def compute(self, job: Job) -> dict[str, Any]:
        chance = random.Random(job["run"])
        step, worker, delay = (
            chance.randrange(1, STEPS - 5),
            chance.randrange(WORKERS),
            chance.uniform(0, 0.02),
        )
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "run")
            seconds = launch(folder, step, worker, delay)
            starts = read_records(folder / "starts")
            ended, expected = weights(folder), undisturbed()
            return {
                "step": step,
                "worker": worker,
                "killed": (folder / "killed").exists(),
                "went on from": max(int(start) for _, start in starts),
                "equal": all(torch.equal(own[name], expected[name]) for own in ended for name in expected),
                "seconds": round(seconds, 1),
            }

    def show(self, runs: pd.DataFrame) -> Section:
        counts = [len(runs), runs["killed"].sum(), runs["equal"].sum()]
        header = ["runs that finished", "lost a worker", "ended with the undisturbed weights"]
        lost = (runs["step"] - runs["went on from"]).max()
        note = (
            f"In each run torchrun starts {WORKERS} workers; one is sent SIGKILL at a random moment of a "
            f"random step, and all are started again from the last checkpoint. At most {lost} steps were "
            "done twice."
        )
        return Section([note], [Table(header, [[f"{count:,}" for count in counts]])])


if __name__ == "__main__":  # one worker, started by torchrun
    torch.distributed.init_process_group("gloo")
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    torch.distributed.destroy_process_group()
