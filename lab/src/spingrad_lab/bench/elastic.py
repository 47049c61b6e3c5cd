"""Kill one of four workers at a random moment, again and again: does the run end as if nothing had happened?

    python benchmarks/elastic.py --runs 20 --out benchmarks/results/elastic.jsonl

784-64-64-10 on MNIST, ``gather`` with momentum, 40 steps, a checkpoint every 5. In each run torchrun starts
four workers; one of them is sent SIGKILL at a random step, at a random moment of it, and torchrun starts all
four again. Every finished run is a line of the output file; a stopped benchmark goes on where it was.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

WORKERS, STEPS, EVERY, BATCH = 4, 40, 5, 40


def work(folder: Path, fatal_step: int, victim: int, delay: float) -> None:
    """One worker of a group; it dies ``delay`` seconds after the beginning of a step, if it is the victim."""
    import torch.distributed as dist

    from spingrad import BinaryLinear, binary_parameters
    from spingrad.distributed import Checkpoint, DistributedQPSBGD
    from spingrad_lab.data import mnist

    torch.set_num_threads(1)
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        BinaryLinear(784, 64), nn.Hardtanh(), BinaryLinear(64, 64), nn.Hardtanh(), BinaryLinear(64, 10)
    )
    optimizer = DistributedQPSBGD(binary_parameters(model), lr=1e-2, momentum=0.9)
    checkpoint = Checkpoint(folder / "checkpoint", model=model, optimizer=optimizer)
    data = mnist("test")
    x, y = data.pixels(), data.labels
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    start = checkpoint.load()
    with open(folder / "starts.txt", "a") as file:
        file.write(f"{rank} {start}\n")
    for step in range(start, STEPS):
        if step == fatal_step and rank == victim and not (folder / "killed").exists():
            threading.Timer(delay, die, [folder]).start()
        own = order[step * BATCH : (step + 1) * BATCH].tensor_split(workers)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            checkpoint.save(step + 1)
    torch.save(model.state_dict(), folder / f"weights-{rank}.pt")


def die(folder: Path) -> None:
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def launch(folder: Path, *fate: object, workers: int = WORKERS) -> float:
    """A run under torchrun; its seconds."""
    folder.mkdir(parents=True)
    begin = time.perf_counter()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command += ["--max-restarts=1", __file__, "--worker", str(folder), *map(str, fate)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Or workers that are started again find the addresses of the dead in the store (torch 2.13, gloo).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"torchrun ended with {ended.returncode}:\n{ended.stderr}")
    return time.perf_counter() - begin


def weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("weights-*.pt"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("elastic.jsonl"))
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, step, victim, delay = args.worker
        torch.distributed.init_process_group("gloo")
        work(Path(folder), int(step), int(victim), float(delay))
        torch.distributed.destroy_process_group()
        return

    lines = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        undisturbed = Path(temporary) / "undisturbed"
        launch(undisturbed, -1, 0, 0.0)
        (expected, *_) = weights(undisturbed)
        while len(lines) < args.runs:
            seed = len(lines)
            chance = random.Random(seed)
            fate = chance.randrange(1, STEPS - 5), chance.randrange(WORKERS), chance.uniform(0, 0.02)
            folder = Path(temporary) / str(seed)
            seconds = launch(folder, *fate)
            starts = [line.split() for line in (folder / "starts.txt").read_text().splitlines()]
            ended = weights(folder)
            equal = all(torch.equal(own[name], expected[name]) for own in ended for name in expected)
            line = {
                "run": seed,
                "step": fate[0],
                "worker": fate[1],
                "killed": (folder / "killed").exists(),
                "went on from": max(int(step) for _, step in starts),
                "equal": equal,
                "seconds": round(seconds, 1),
                "torch": torch.__version__,
            }
            lines.append(line)
            with open(args.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    killed, equal = (sum(line[key] for line in lines) for key in ("killed", "equal"))
    print(f"{len(lines)} runs finished, {killed} lost a worker, {equal} ended with the undisturbed weights")


if __name__ == "__main__":
    main()
