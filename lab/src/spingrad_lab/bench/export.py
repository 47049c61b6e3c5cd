"""Networks from training to every export, compared with torch on all test images: docs/export.md's numbers.

    pip install ".[export,onnx,qonnx,graph,paper]"
    python benchmarks/export.py --out benchmarks/results/export.json

Trains seven networks (some ten minutes on one quiet core; --quick: one epoch of 10,000 images), exports each,
and counts on how many images a class or a layer's sum differs. Needs gcc for the C, qonnx for the QONNX.
Finished networks are kept in the file: the same command goes on where it stopped.
"""

import argparse
import itertools
import json
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Sign, binary_parameters, real_parameters
from spingrad._files import write_atomically
from spingrad.export import PackedModel, pack, verify
from spingrad.export.c import to_c
from spingrad.export.onnx import to_onnx
from spingrad.export.qonnx import to_qonnx
from spingrad.export.report import example, measure, to_json
from spingrad.export.stages import Rescale
from spingrad_lab.data import line_features, mnist
from spingrad_lab.report.sections import Table
from spingrad_lab.tasks.small import pair_points

SCALE = 1 / 128  # a power of two: torch's sums of pixels are exact, ties included


def mlp(*widths: int, activation: type[nn.Module] = Sign, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for place, (fan_in, units) in enumerate(itertools.pairwise(widths)):
        layers.append(BinaryLinear(fan_in, units))
        if norm:
            layers.append(nn.BatchNorm1d(units))
        if place < len(widths) - 2:
            layers.append(activation())
    return nn.Sequential(*layers)


def convolutional(norm: bool) -> nn.Sequential:
    def normed(channels: int) -> list[nn.Module]:
        return [nn.BatchNorm2d(channels)] if norm else []

    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        BinaryConv2d(1, 16, 3, stride=2, padding=1), *normed(16), Sign(),
        BinaryConv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), *normed(32), Sign(),
        nn.Flatten(), BinaryLinear(32 * 49, 10),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "784-1024-1024-10, sign": lambda: mlp(784, 1024, 1024, 10),
    "784-128-10, sign": lambda: mlp(784, 128, 10),
    "784-1024-1024-10, sign, BatchNorm": lambda: mlp(784, 1024, 1024, 10, norm=True),
    "784-1024-1024-10, hardtanh": lambda: mlp(784, 1024, 1024, 10, activation=nn.Hardtanh),
    "convolutional, sign": lambda: convolutional(False),
    "convolutional, sign, BatchNorm": lambda: convolutional(True),
}
REPORTS: dict[str, Callable[[], PackedModel]] = {
    "report of 784-1024-1024-10, sign": example,
    "report of convolutional, sign": lambda: pack(convolutional(False)),
    "report of 784-1024-1024-10, hardtanh": lambda: pack(mlp(784, 1024, 1024, 10, activation=nn.Hardtanh)),
}
PAIR = "MNIST pair 1/7, 16-4-2, hardtanh"


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, lr: float = 3e-3) -> None:
    optimizers: list[torch.optim.Optimizer] = [
        QPSBGD(binary_parameters(model), lr=lr, momentum=0.9, target_rms=2.0, rank=None)
    ]
    if real := real_parameters(model):
        optimizers.append(torch.optim.Adam([value for _, value in real], lr=1e-2))
    steps = epochs * -(-len(x) // batch)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, steps) for one in optimizers]
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(batch):
            for one in optimizers:
                one.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            for one in optimizers:
                one.step()
            for scheduler in schedulers:
                scheduler.step()
    model.eval()


def c_sizes(model: PackedModel) -> dict[str, int]:
    """Bytes of constants and buffers, and of the code that gcc -Os makes for this processor."""
    source = to_c(model, "network")
    with tempfile.TemporaryDirectory() as folder:
        source.save(folder)
        subprocess.run([*verify.STRICT, "-Os", "-c", "network.c"], cwd=folder, check=True)
        listed = subprocess.run(["size", "network.o"], cwd=folder, check=True, capture_output=True, text=True)
    text = int(listed.stdout.splitlines()[1].split()[0])  # code and constants
    return {"constants": source.constants, "ram": source.ram, "code_gcc_Os": text - source.constants}


RUNS: dict[
    str, tuple[Callable[[PackedModel, Any], verify.Answers], Callable[[PackedModel], dict[str, int]]]
] = {
    "packed": (verify.from_packed, lambda model: {"bytes": len(model.to_bytes())}),
    "c": (verify.from_c, c_sizes),
    "onnx": (verify.from_onnx, lambda model: {"bytes": to_onnx(model).ByteSize()}),
    "qonnx": (verify.from_qonnx, lambda model: {"bytes": to_qonnx(model).ByteSize()}),
}


def compare(
    model: nn.Module, packed: PackedModel, x: Any, real: Tensor, y: Tensor, scale: float
) -> dict[str, Any]:
    """On how many samples each export has another class than torch, and how many of its sums differ."""
    result: dict[str, Any] = {
        "images": len(x),
        "state_dict_bytes": sum(v.numel() * v.element_size() for v in model.state_dict().values()),
        "weights": packed.num_weights,
        "torch": {"correct": 0},
    }
    for name, (_, sizes) in RUNS.items():
        result[name] = {"images": 0, "correct": 0, "other_classes": 0, **sizes(packed)}
        result[name]["other_sums"] = [0] * len(packed.products)
    for start in range(0, len(x), 1000):
        part = slice(start, start + 1000)
        theirs, labels = verify.from_torch(model, real[part], scale), y[part].numpy()
        result["torch"]["correct"] += int((theirs.classes == labels).sum())
        for name, (run, _) in RUNS.items():
            count = (100 if start == 0 else 0) if name == "qonnx" else len(labels)
            if not count:
                continue
            ours, own = run(packed, x[part][:count]), result[name]
            own["images"] += count
            own["correct"] += int((ours.classes == labels[:count]).sum())
            own["other_classes"] += int((ours.classes != theirs.classes[:count]).sum())
            for layer, (mine, other) in enumerate(zip(ours.sums, theirs.sums, strict=True)):
                own["other_sums"][layer] += int((mine != other[:count]).sum())
    if any(isinstance(stage, Rescale) for stage in packed.stages[:-1]):  # its sums have units of their own
        for name in RUNS:
            result[name]["other_sums"] = None
    return result


def images_case(name: str, quick: bool) -> dict[str, Any]:
    data, test = mnist("train"), mnist("test")
    count = 10_000 if quick else 60_000
    model = NETWORKS[name]()
    x = data.images[:count].flatten(1).float() * SCALE
    train(model, x, data.labels[:count], epochs=1 if quick else 3, batch=200)
    packed = pack(model, scale=SCALE)
    rows = test.images.flatten(1)
    return compare(model, packed, rows.numpy(), rows.float() * SCALE, test.labels, SCALE)


def pair_case(quick: bool) -> dict[str, Any]:
    """The paper's task: 500 images to train, 3,000 to test, 16 spins each."""
    points = pair_points(quick)
    own = [line_features(points[digit]) for digit in (1, 7)]
    x, y = torch.cat(own), torch.arange(2).repeat_interleave(len(own[0]))
    order = torch.randperm(len(x))
    fit, held = order[:500], order[500:3_500]
    model = mlp(16, 4, 2, activation=nn.Hardtanh)
    train(model, x[fit], y[fit], epochs=20, batch=20)
    packed = pack(model, kind="spins")
    return compare(model, packed, x[held].numpy().astype(np.int8), x[held], y[held], 1.0)


def _total(other_sums: list[int] | None) -> str:
    return "–" if other_sums is None else f"{sum(other_sums):,}"


def tables(results: dict[str, Any]) -> str:
    """What docs/export.md shows."""
    same, sizes, times = [], [], []
    for name in (*NETWORKS, PAIR):
        if own := results.get(name):
            cells = [f"{own[one]['other_classes']}; {_total(own[one]['other_sums'])}" for one in RUNS]
            accuracy = own["torch"]["correct"] / own["images"]
            same.append([name, f"{own['images']:,}", f"{accuracy:.4f}", *cells])
            ratio = own["state_dict_bytes"] / own["packed"]["bytes"]
            numbers = [own["weights"], own["state_dict_bytes"], own["packed"]["bytes"]]
            c = [own["c"][key] for key in ("constants", "ram", "code_gcc_Os")]
            cells = [f"{number:,}" for number in (*numbers, own["onnx"]["bytes"], *c)]
            sizes.append([name, *cells[:3], f"1/{ratio:.1f}", *cells[3:]])
    for name in REPORTS:
        for rows in zip(*results.get(name, []), strict=True):
            ratios = [
                [row[key] and row[key] / row["packed_ms"] for row in rows] for key in ("float_ms", "int8_ms")
            ]
            cells = ["–" if None in own else f"{min(own):.2f}–{max(own):.2f}" for own in ratios]
            times.append([name.removeprefix("report of "), rows[0]["name"], *cells])
    images = ["network", "images", "torch accuracy", *(f"{one}: classes; sums" for one in RUNS)]
    bytes_ = ["network", "weights", "float32", "packed file", "ratio", "ONNX", "C: constants", "RAM", "code"]
    ratio_ = ["network", "layer", "× float32", "× int8"]
    made = [Table(images, same), Table(bytes_, sizes), Table(ratio_, times)]
    return "\n\n".join(table.to_markdown() for table in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("export.json"))
    parser.add_argument("--quick", action="store_true", help="one epoch of 10,000 images: not a result")
    parser.add_argument("--report-only", action="store_true", help="time the runtime anew, and nothing else")
    parser.add_argument("--tables", action="store_true", help="print the results so far, and nothing else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.tables:
        print(tables(results))
        return
    results["versions"] = {"torch": torch.__version__, "python": platform.python_version()}

    def keep() -> None:
        write_atomically(args.out, json.dumps(results, indent=1).encode())

    for name, make in REPORTS.items():
        if args.report_only or name not in results:
            results[name] = [to_json(measure(make(), repeats=100)) for _ in range(3)]
            for run in results[name]:
                print(name, {row["name"]: round(row["float_ms"] / row["packed_ms"], 2) for row in run})
            keep()
    for name in [] if args.report_only else [PAIR, *NETWORKS]:
        if name in results:
            continue
        torch.manual_seed(0)
        begin = time.perf_counter()
        results[name] = pair_case(args.quick) if name == PAIR else images_case(name, args.quick)
        print(f"{name}: {json.dumps(results[name])}  ({time.perf_counter() - begin:.0f} s)", flush=True)
        keep()


if __name__ == "__main__":
    main()
