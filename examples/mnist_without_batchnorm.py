"""Trains on all of MNIST with one-bit weights and without BatchNorm.

    pip install ".[fast]" ./lab
    python examples/mnist_without_batchnorm.py --out result.json

Shows a progress bar with the time left, prints the test accuracy of every epoch, and writes settings and
results as JSON. Ctrl-C stops it and keeps the results so far.
"""

import argparse
import itertools
import json
import platform
import time
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, Sign, binary_parameters
from spingrad_lab.data import fashion_mnist, mnist


def network(sizes: list[int], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [BinaryLinear(fan_in, fan_out), Sign() if activation == "sign" else nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    correct = sum(
        int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(1000), y.split(1000), strict=True)
    )
    model.train()
    return correct / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", choices=["mnist", "fashion"], default="mnist")
    parser.add_argument("--sizes", type=int, nargs="+", default=[784, 512, 512, 10])
    parser.add_argument("--activation", choices=["hardtanh", "sign"], default="hardtanh")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--images", type=int, default=60_000, help="use only the first N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write settings and results here, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    load = mnist if args.data == "mnist" else fashion_mnist
    train, test = load("train"), load("test")
    scale = train.pixels().square().mean().sqrt()  # unit root mean square; zero stays zero
    x, y = (train.pixels() / scale)[: args.images], train.labels[: args.images]
    x_test, y_test = test.pixels() / scale, test.labels

    model = network(args.sizes, args.activation)
    optimizer = QPSBGD(binary_parameters(model), args.lr, seed=args.seed)
    steps = args.epochs * -(-len(x) // args.batch)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    history: list[dict[str, Any]] = []
    begin = time.perf_counter()
    columns = TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps)
        try:
            for epoch in range(1, args.epochs + 1):
                total = 0.0
                for rows in torch.randperm(len(x)).split(args.batch):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                    loss.backward()
                    optimizer.step()
                    if args.schedule == "cosine":
                        scheduler.step()
                    total += loss.item() * len(rows)
                    progress.advance(task)
                test_accuracy = accuracy(model, x_test, y_test)
                history.append({"epoch": epoch, "loss": total / len(x), "test_accuracy": test_accuracy})
                progress.console.print(
                    f"epoch {epoch:3}  loss {total / len(x):.4f}  test accuracy {test_accuracy:.4f}"
                )
        except KeyboardInterrupt:
            progress.console.print("stopped")
    if not history:
        return
    weights = sum(weight.numel() for _, weight in binary_parameters(model))
    result = {
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "test_accuracy": history[-1]["test_accuracy"],
        "train_accuracy": accuracy(model, x, y),
        "bits": weights,
        "seconds": round(time.perf_counter() - begin, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "history": history,
    }
    print(
        f"test {result['test_accuracy']:.4f}, train {result['train_accuracy']:.4f}, "
        f"{weights:,} weights in {weights / 8192:.0f} kB, {result['seconds']:.0f} s"
    )
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
