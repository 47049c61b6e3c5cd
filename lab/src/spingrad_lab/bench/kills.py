"""A run is killed at a random moment and started again: does it end as if it had never been killed?"""

import hashlib
import json
import multiprocessing
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spingrad._files import write_atomically
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab

STEPS, EVERY, BATCH = 60, 3, 48
PLACES = [("784-128-128-10", 1), ("784-128-128-10", 2), ("convolutional", 1), ("convolutional", 2)]


class Order:
    """A digest of all images that were trained on, in their order."""

    digest = ""

    def add(self, rows: Tensor) -> None:
        self.digest = hashlib.sha256(self.digest.encode() + rows.numpy().tobytes()).hexdigest()

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.digest = state["digest"]


def make(network: str) -> nn.Module:
    from spingrad import BinaryConv2d, BinaryLinear

    if network == "convolutional":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            BinaryConv2d(1, 16, 3, stride=2),
            nn.Hardtanh(),
            nn.Dropout(0.1),
            BinaryConv2d(16, 32, 3, stride=2),
            nn.Hardtanh(),
            nn.Flatten(),
            BinaryLinear(32 * 36, 10),
            nn.BatchNorm1d(10),
        )
    return nn.Sequential(
        BinaryLinear(784, 128),
        nn.Hardtanh(),
        nn.Dropout(0.1),
        BinaryLinear(128, 128),
        nn.Hardtanh(),
        BinaryLinear(128, 10),
        nn.BatchNorm1d(10),
    )


def work(network: str, rank: int, size: int, folder: Path, life: Path) -> None:
    """One process of one life of a run, from its last checkpoint to the end."""
    from spingrad import QPSBGD, binary_parameters, real_parameters
    from spingrad.checkpoint import Checkpoint
    from spingrad_lab.data import mnist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = trained = make(network)
    if size > 1:
        store = dist.FileStore(str(life), size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=2))
        trained = nn.parallel.DistributedDataParallel(model)
    binary = QPSBGD(binary_parameters(model), lr=1e-2, momentum=0.9)
    adam = torch.optim.Adam([weight for _, weight in real_parameters(model)], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(binary, STEPS)
    order = Order()
    parts: dict[str, Any] = {"model": model, "binary": binary, "adam": adam}
    parts |= {"schedule": schedule, "order": order}
    checkpoint = Checkpoint(folder / "checkpoint", **parts)
    images = mnist("train")
    x, y = images.pixels(), images.labels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a generation that was being written is expected here
        start = checkpoint.load()
    for step in range(start, STEPS):
        rows = torch.randint(len(x), (BATCH,))  # from the random state, which the checkpoint restores
        order.add(rows)
        own = rows.tensor_split(size)[rank]
        for optimizer in (binary, adam):
            optimizer.zero_grad()
        nn.functional.cross_entropy(trained(x[own]), y[own]).backward()
        for optimizer in (binary, adam):
            optimizer.step()
        schedule.step()
        if (step + 1) % EVERY == 0:
            checkpoint.save(step + 1)
    ended = {name: digest(part.state_dict()) for name, part in parts.items()}
    ended["random"] = digest(torch.get_rng_state())
    write_atomically(folder / f"ended-{rank}.json", json.dumps([start, ended]).encode())
    if size > 1:
        dist.destroy_process_group()


def digest(value: Any) -> str:
    """A digest of every bit of a nested state."""
    sum_ = hashlib.sha256()
    for part in _flat(value):
        sum_.update(part)
    return sum_.hexdigest()


def _flat(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield repr(name).encode()
            yield from _flat(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _flat(inner)
    else:
        yield repr(value).encode()


def live(network: str, size: int, folder: Path, life: int) -> list[BaseProcess]:
    """Start the processes of one life."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "spingrad.distributed"])
    folder.mkdir(exist_ok=True)
    ranks = [(network, rank, size, folder, folder / f"store-{life}") for rank in range(size)]
    processes: list[BaseProcess] = [context.Process(target=work, args=own) for own in ranks]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess], folder: Path) -> tuple[list[int], list[dict[str, str]]]:
    """The first step of this life and the digests at its end, for each rank."""
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"the run ended with {[process.exitcode for process in processes]}")
    ended = [json.loads(path.read_text()) for path in sorted(folder.glob("ended-*.json"))]
    return [start for start, _ in ended], [digests for _, digests in ended]


@cache
def undisturbed(network: str, size: int) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return finish(live(network, size, Path(folder), 0), Path(folder))[1]


def reached(folder: Path) -> int:
    """The newest generation, complete or not."""
    return max([0, *(int(path.name[5:14]) for path in folder.glob("checkpoint/step-*"))])


class Kills(Experiment):
    """All processes of a run are sent SIGKILL at a random moment; a second life goes on."""

    title = "A run is killed"
    source = (
        "MNIST, fully connected and convolutional, one and two processes, a checkpoint every 3 of 60 steps"
    )

    def plan(self, lab: Lab) -> None:
        runs = lab.seeds or (1 if lab.quick else 50)
        lab.run([{"network": n, "processes": p, "run": r} for r in range(runs) for n, p in [PLACES[r % 4]]])

    def compute(self, job: Job) -> dict[str, Any]:
        chance = random.Random(job["run"])
        expected = undisturbed(job["network"], job["processes"])
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            processes = live(job["network"], job["processes"], folder, 0)
            goal = chance.randrange(1, STEPS - 2 * EVERY)
            while reached(folder) < goal and all(process.is_alive() for process in processes):
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.2))
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            killed = all(process.exitcode == -signal.SIGKILL for process in processes)
            newest = reached(folder)
            complete = any(folder.glob(f"checkpoint/step-{newest:09d}.*/manifest.jsonl"))
            starts, ended = finish(live(job["network"], job["processes"], folder, 1), folder)
        return {
            "killed": killed,
            "while saving": not complete,
            "went on from": min(starts),
            "equal": ended == expected,
        }

    def show(self, runs: pd.DataFrame) -> Section:
        rows = []
        for network, size in PLACES:
            own = runs[(runs["network"] == network) & (runs["processes"] == size)]
            rows.append([network, str(size), *_counts(own)])
        rows.append(["all", "", *_counts(runs)])
        note = (
            "Every process of a run is sent SIGKILL at a random moment, and the run is started again. Equal: "
            "weights, both optimizers, schedule, random state and the order of all images are bit for bit "
            "those of a run that was not killed, on every rank."
        )
        header = ["network", "processes", "killed", "of these while saving", "equal"]
        return Section([note], [Table(header, rows)])


def _counts(runs: pd.DataFrame) -> list[str]:
    return [f"{runs[name].sum():,}" for name in ("killed", "while saving", "equal")]
