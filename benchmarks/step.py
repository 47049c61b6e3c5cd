"""Time of a training step, as a ratio to SignSGD on the same network in the same run.

    python benchmarks/step.py --threads 1

The methods take turns of ten steps, so that a slow moment of the machine meets all of them, and each finds
its caches as training would leave them.
"""

import argparse
import copy
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from spinstep import QPSBGD, BinaryLinear, binary_parameters
from spinstep.baselines import BinaryConnect, SignSGD
from spinstep.data import mnist
from spinstep.solvers import BlockDescentSolver

TURN = 10
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SignSGD": lambda model: SignSGD(binary_parameters(model)),
    "BinaryConnect Adam": lambda model: BinaryConnect(binary_parameters(model), torch.optim.Adam),
    "QP-SBGD": lambda model: QPSBGD(binary_parameters(model)),
    "QP-SBGD, momentum 0.9": lambda model: QPSBGD(binary_parameters(model), momentum=0.9, target_rms=2.0),
    "QP-SBGD, 2 sweeps": lambda model: QPSBGD(
        binary_parameters(model), solver=BlockDescentSolver(num_sweeps=2)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[784, 1024, 1024, 10])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100, help="timed steps, in turns of ten")
    parser.add_argument("--out", help="also write the numbers here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(args.sizes):
        layers += [BinaryLinear(fan_in, fan_out), nn.Hardtanh()]
    model = nn.Sequential(*layers[:-1])
    data = mnist("train")
    x, y = data.pixels() / data.pixels().square().mean().sqrt(), data.labels

    runs = {}
    for name, method in METHODS.items():
        own = copy.deepcopy(model)
        runs[name] = (own, method(own))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + args.steps // TURN):
        for name, (own, optimizer) in runs.items():
            for step in range(TURN * turn, TURN * (turn + 1)):
                rows = torch.randint(len(x), (args.batch,), generator=torch.Generator().manual_seed(step))
                inputs, labels = x[rows], y[rows]
                begin = time.perf_counter()
                optimizer.zero_grad()
                nn.functional.cross_entropy(own(inputs), labels).backward()
                optimizer.step()
                if turn:  # compiled and warm
                    seconds[name].append(time.perf_counter() - begin)

    shape = "-".join(map(str, args.sizes))
    print(f"training step of {shape}, B = {args.batch}, {args.threads} thread(s), {args.steps} steps each")
    print(f"{'method':22} {'ms':>8} {'ratio':>7} {'quartiles of the ratio':>24}")
    base = seconds["SignSGD"]
    result = {}
    for name, times in seconds.items():
        ratios = [t / b for t, b in zip(times, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = statistics.median(times) / statistics.median(base)
        result[name] = {"ms": 1e3 * statistics.median(times), "ratio": ratio, "quartiles": [low, high]}
        print(f"{name:22} {result[name]['ms']:8.2f} {ratio:7.2f} {low:17.2f} – {high:.2f}")
    if args.out:
        settings = {k: v for k, v in vars(args).items() if k != "out"}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        with open(args.out, "w") as file:
            json.dump({"settings": settings, "versions": versions, "result": result}, file, indent=1)


if __name__ == "__main__":
    main()
