"""Steps per second by vote and under DDP between two workers on a link of 10 Mbit/s, and its bytes."""

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, groups, where

RATE = "10mbit"
ROWS = 100
METHODS = {"vote": 20, "DDP QP-SBGD": 5, "DDP signSGD": 5}
"""Timed steps of each."""
NAMES = ("spingrad-a", "spingrad-b")
CABLE = ("spingrad0", "spingrad1")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def lay_cable() -> None:
    ip("link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1])
    for i, (name, end) in enumerate(zip(NAMES, CABLE, strict=True)):
        ip("netns", "add", name)
        ip("link", "set", end, "netns", name)
        ip("-n", name, "addr", "add", f"10.213.0.{i + 1}/30", "dev", end)
        ip("-n", name, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")
        shape = f"qdisc add dev {end} root tbf rate {RATE} burst 32kbit latency 400ms".split()
        subprocess.run(["tc", "-n", name, *shape], check=True)


def remove_cable() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def work(rank: int) -> None:
    """One worker, in its namespace: one method after the other."""
    import torch.distributed as dist

    from spingrad import QPSBGD, BinaryLinear, binary_parameters
    from spingrad.baselines import SignSGD
    from spingrad.distributed import Wire
    from spingrad_lab.data import mnist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://10.213.0.1:29500", rank=rank, world_size=2)
    data = mnist("test")
    x, y = data.pixels(), data.labels
    for method, steps in METHODS.items():
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise((784, 512, 512, 10)):
            layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
        model: nn.Module = nn.Sequential(*layers[:-1])
        params, wire = binary_parameters(model), Wire()
        optimizer: torch.optim.Optimizer
        if method == "vote":
            optimizer = QPSBGD(params, ranks="vote", group=wire)
        else:
            model = nn.parallel.DistributedDataParallel(model)
            sign = method == "DDP signSGD"
            optimizer = SignSGD(params, lr=1e-3, momentum=0.9) if sign else QPSBGD(params, group=wire)
        seconds, sent = [], []
        for step in range(steps + 2):  # two to warm up
            rows = torch.arange(ROWS) + (2 * step + rank) * ROWS
            dist.barrier()
            begin, before = time.perf_counter(), _transmitted(rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            dist.barrier()  # bits are on the wire until all have them
            seconds.append(time.perf_counter() - begin)
            sent.append(_transmitted(rank) - before)
        if rank == 0:
            line = {
                "method": method,
                "seconds": statistics.median(seconds[2:]),
                "bytes": statistics.median(sent[2:]),
                "payload": wire.sent / (steps + 2),  # of the optimizer, without DDP's gradients
                "steps": steps,
            }
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def _transmitted(rank: int) -> int:
    return int(Path(f"/sys/class/net/{CABLE[rank]}/statistics/tx_bytes").read_text())


def run_both() -> list[dict[str, Any]]:
    """Both workers, once; what the first one measured."""
    remove_cable()
    lay_cable()
    try:
        workers = []
        for rank, (name, end) in enumerate(zip(NAMES, CABLE, strict=True)):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": end, "OMP_NUM_THREADS": "1"}
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "spingrad_lab.bench.slow_link",
                str(rank),
            ]
            workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [worker.communicate()[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise RuntimeError("a worker failed; its error is above")
    finally:
        remove_cable()
    return [json.loads(text) for text in outputs[0].splitlines()]


class SlowLink(Experiment):
    """Two network namespaces, joined by a virtual cable whose ends are shaped; each holds one worker."""

    title = "A slow link"
    source = f"784-512-512-10 on MNIST, {ROWS} rows per worker, two workers at 10 Mbit/s"
    repeats = 3

    def plan(self, lab: Lab) -> None:
        if os.name != "posix" or os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
            raise ValueError("slow-link lays a virtual cable: it needs Linux, iproute2 (ip, tc) and root")
        lab.run([{"repeat": repeat} for repeat in range(lab.seeds or (1 if lab.quick else self.repeats))])

    def compute(self, job: Job) -> dict[str, Any]:
        return {"rate": RATE, "rows": ROWS, "methods": run_both()}

    def show(self, runs: pd.DataFrame) -> Section:
        lines = pd.DataFrame([line for methods in runs["methods"] for line in methods])
        lines = lines.assign(rate=1 / lines["seconds"])
        ddp = where(lines, method="DDP signSGD")["bytes"].median()
        rows = []
        for method, own in groups(lines, "method"):
            rate, sent = own["rate"], own["bytes"].median()
            spread = f"{rate.min():.2f}–{rate.max():.2f}"
            rows.append([method, f"{rate.median():.2f}", spread, f"{sent:,.0f}", f"{sent / ddp:.4f}"])
        header = ["method", "steps per second", "of all runs", "bytes per step", "of DDP"]
        note = (
            "Bytes are those of the interface's own counter, with the headers of TCP and IP and the answers. "
            "Times are medians of a run's steps, two warm-up steps left out."
        )
        return Section([note], [Table(header, rows)])


if __name__ == "__main__":  # one worker, in its namespace
    work(int(sys.argv[1]))
