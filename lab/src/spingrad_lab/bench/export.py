"""Networks from training to every export, compared with torch on all test images."""

import itertools
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, Sign, binary_parameters, real_parameters
from spingrad._timing import threads
from spingrad.export import PackedModel, pack, verify
from spingrad.export.c import to_c
from spingrad.export.onnx import to_onnx
from spingrad.export.qonnx import to_qonnx
from spingrad.export.report import example, measure, to_json
from spingrad.export.stages import Rescale
from spingrad_lab.bench.graphs import CASES, SCALE
from spingrad_lab.data import line_features, mnist
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.small import pair_points


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
TIMED: dict[str, Callable[[], PackedModel]] = {
    "784-1024-1024-10, sign": example,
    "convolutional, sign": lambda: pack(convolutional(False)),
    "residual, CIFAR-10, all signs": lambda: pack(
        CASES["residual, CIFAR-10, all signs"].network(), (3, 32, 32)
    ),
    "depthwise, Fashion-MNIST, sign": lambda: pack(
        CASES["depthwise, Fashion-MNIST, sign"].network(), (1, 28, 28)
    ),
    "784-1024-1024-10, hardtanh": lambda: pack(mlp(784, 1024, 1024, 10, activation=nn.Hardtanh)),
}
PAIR = "MNIST pair 1/7, 16-4-2, hardtanh"


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    epochs: int,
    batch: int,
    lr: float = 3e-3,
    defaults: bool = False,
) -> None:
    options: dict[str, Any] = {} if defaults else {"momentum": 0.9, "target_rms": 2.0, "rank": None}
    optimizers: list[torch.optim.Optimizer] = [QPSBGD(binary_parameters(model), lr=lr, **options)]
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
}
if find_spec("qonnx"):
    RUNS["qonnx"] = verify.from_qonnx, lambda model: {"bytes": to_qonnx(model).ByteSize()}


def compare(
    model: nn.Module,
    packed: PackedModel,
    x: Any,
    real: Callable[[Any], Tensor],
    y: Tensor,
    scale: float,
    exact: bool = True,
) -> dict[str, Any]:
    """On how many samples each export has another class than torch, and how many of its sums differ.

    ``real`` makes torch's inputs from bytes. Without ``exact``, the largest difference of a score in place of
    the sums.
    """
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
        inputs = real(x[part])
        theirs, labels = verify.from_torch(model, inputs, scale), y[part].numpy()
        result["torch"]["correct"] += int((theirs.classes == labels).sum())
        if not exact:
            with torch.no_grad():
                scores = model(inputs).numpy()
            gap = np.abs(packed.scores(x[part]) * packed.unit - scores).max()
            result["score_gap"] = max(result.get("score_gap", 0.0), float(gap))
            result["score_range"] = max(result.get("score_range", 0.0), float(np.ptp(scores)))
        for name, (run, _) in RUNS.items():
            count = (100 if start == 0 else 0) if name == "qonnx" else len(labels)
            if not count:
                continue
            ours, own = run(packed, x[part][:count]), result[name]
            own["images"] += count
            own["correct"] += int((ours.classes == labels[:count]).sum())
            own["other_classes"] += int((ours.classes != theirs.classes[:count]).sum())
            if exact:
                for layer, (mine, other) in enumerate(zip(ours.sums, theirs.sums, strict=True)):
                    whole = np.round(_whole(other[:count], mine))
                    own["other_sums"][layer] += int((mine.reshape(whole.shape) != whole).sum())
    if not exact:  # its sums are in units of their own
        for name in RUNS:
            result[name]["other_sums"] = None
    return result


def _whole(theirs: Any, ours: Any) -> Any:
    """Torch's sums in whole numbers: after an average they are multiples of its parts."""
    if (theirs == theirs.round()).all():
        return theirs
    return theirs * round(float(np.abs(ours).sum() / np.abs(theirs).sum()))


def graph_case(name: str, quick: bool) -> dict[str, Any]:
    case = CASES[name]
    (x, y), (held, labels) = case.data()
    if quick:
        x, y, held, labels = x[:1000], y[:1000], held[:200], labels[:200]

    def real(numbers: Any) -> Tensor:
        return torch.as_tensor(numbers).float() * case.scale + case.shift

    model = case.network()
    train(model, real(x[:20_000]), y[:20_000], epochs=1 if quick else 3, batch=100, defaults=True)
    rows = held.numpy()
    calibration = None if case.exact else x[:500].numpy()
    packed = pack(model, tuple(x.shape[1:]), scale=case.scale, shift=case.shift, calibration=calibration)
    if case.exact:
        return compare(model, packed, rows, real, labels, case.scale)
    rounded = verify.with_int8(model)
    result = compare(rounded, packed, rows, real, labels, case.scale, exact=False)
    with torch.no_grad():
        kept = torch.cat([model(real(part)).argmax(1) for part in np.array_split(rows, 10)])
    result["torch"] = {"correct": int((kept == labels).sum())}
    result["changed_by_int8"] = int((torch.from_numpy(packed.classes(rows)) != kept).sum())
    return result


def images_case(name: str, quick: bool) -> dict[str, Any]:
    data, test = mnist("train"), mnist("test")
    count = 10_000 if quick else 60_000
    model = NETWORKS[name]()
    x = data.images[:count].flatten(1).float() * SCALE
    train(model, x, data.labels[:count], epochs=1 if quick else 3, batch=200)
    packed = pack(model, scale=SCALE)
    rows = test.images.flatten(1).numpy()
    exact = not any(isinstance(stage, Rescale) for stage in packed.stages[:-1])
    return compare(
        model, packed, rows, lambda x: torch.from_numpy(x).float() * SCALE, test.labels, SCALE, exact
    )


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
    spins = x[held].numpy().astype(np.int8)
    return compare(model, packed, spins, lambda x: torch.from_numpy(x).float(), y[held], 1.0, exact=False)


class Export(Experiment):
    """Networks trained and exported, of which some are timed layer by layer beside float32 and int8."""

    title = "Export"
    source = "networks on MNIST, Fashion-MNIST, CIFAR-10 and spoken digits; the C needs gcc, the QONNX qonnx"
    repeats = 3
    revision = 2  # since networks are graphs and convolutions read their patches where they are

    def plan(self, lab: Lab) -> None:
        repeats = range(lab.seeds or (1 if lab.quick else self.repeats))
        timed = list(TIMED)[:1] if lab.quick else list(TIMED)
        quick = [PAIR, "784-128-10, sign", "residual, Fashion-MNIST, real ends"]
        networks = quick if lab.quick else [PAIR, *NETWORKS, *CASES]
        lab.run([{"stage": "time", "network": name, "repeat": k} for name in timed for k in repeats], "times")
        lab.run([{"stage": "compare", "network": name} for name in networks], "networks")

    def compute(self, job: Job) -> dict[str, Any]:
        name, quick = job["network"], job["quick"]
        with threads(1):
            if job["stage"] == "time":
                return {"layers": to_json(measure(TIMED[name](), repeats=10 if quick else 30))}
            with seeded(0):
                if name in CASES:
                    return graph_case(name, quick)
                return pair_case(quick) if name == PAIR else images_case(name, quick)

    def show(self, runs: pd.DataFrame) -> Section:
        compared, timed = where(runs, stage="compare"), where(runs, stage="time")
        same, sizes, times = [], [], []
        for name in (name for name in (*NETWORKS, *CASES, PAIR) if name in set(compared.get("network", ()))):
            own = where(compared, network=name).iloc[0]
            found = [
                f"{own[to]['other_classes']}; {_total(own[to]['other_sums'])}" if to in own else "–"
                for to in RUNS
            ]
            gap = f"{own['score_gap']:.4f} of {own['score_range']:.1f}" if _has(own, "score_gap") else "–"
            if _has(own, "changed_by_int8"):
                gap += f"; int8 changes {own['changed_by_int8']:.0f} classes"
            accuracy = f"{own['torch']['correct'] / own['images']:.4f}"
            same.append([name, f"{own['images']:,}", accuracy, *found, gap])
            ratio = own["state_dict_bytes"] / own["packed"]["bytes"]
            numbers = [own["weights"], own["state_dict_bytes"], own["packed"]["bytes"], own["onnx"]["bytes"]]
            numbers += [own["c"][key] for key in ("constants", "ram", "code_gcc_Os")]
            cells = [f"{number:,}" for number in numbers]
            sizes.append([name, *cells[:3], f"1/{ratio:.1f}", *cells[3:]])
        for name, repeats in groups(timed, "network"):
            layers = pd.DataFrame([layer for run in repeats["layers"] for layer in run])
            for layer, measured in groups(layers, "name"):
                ratios = [measured[kind] / measured["packed_ms"] for kind in ("float_ms", "int8_ms")]
                cells = ["–" if r.isna().any() else f"{r.min():.2f}–{r.max():.2f}" for r in ratios]
                times.append([name, layer, *cells])
        tables = [
            Table(
                ["network", "images", "torch accuracy", *(f"{to}: classes; sums" for to in RUNS), "scores"],
                same,
            ),
            Table(
                [
                    "network",
                    "weights",
                    "float32",
                    "packed file",
                    "ratio",
                    "ONNX",
                    "C: constants",
                    "RAM",
                    "code",
                ],
                sizes,
            ),
            Table(["network", "layer", "× float32", "× int8"], times),
        ]
        return Section(list(_NOTES), [table for table in tables if table.rows])


def _has(run: pd.Series, name: str) -> bool:
    return name in run and not pd.isna(run[name])


def _total(other_sums: list[int] | None) -> str:
    return "–" if other_sums is None else f"{sum(other_sums):,}"


_NOTES = (
    "First table: on how many images an export has another class than torch, and in how many places one of "
    "its sums differs; where sums are rounded, the largest difference of a score beside their range. "
    "Networks with real ends are compared with torch on the int8 weights of the packed network. Second: "
    "bytes. Third: time of float32 and of int8 as a multiple of the packed "
    "runtime's, from the lowest to the highest of the repeats, one thread.",
)
