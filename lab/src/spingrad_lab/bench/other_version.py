"""Another version of this project in a process of its own, which takes training steps on request.

This file is run by path, with the other checkout's ``src`` on ``PYTHONPATH``. It therefore imports nothing of
the lab, and of the other version only public names that have been there since the first commits.
"""

import importlib
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


def build(package: Any, name: str) -> nn.Module:
    """The networks of the step benchmark; their weights come from the one that asks."""
    linear, convolution = package.BinaryLinear, package.BinaryConv2d
    if name == "convolutional, 1-16-32 channels":
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            convolution(1, 16, 3, stride=2, padding=1), nn.Hardtanh(),
            convolution(16, 32, 3, stride=2, padding=1), nn.Hardtanh(),
            nn.Flatten(), linear(32 * 49, 10),
        )  # fmt: skip
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(int(size) for size in name.split("-")):
        layers += [linear(fan_in, fan_out), nn.Hardtanh()]
    return nn.Sequential(*layers[:-1])


def serve(name: str, source: Path, given: Path) -> None:
    """Answer each line ``[method, count]`` with the seconds of ``count`` steps of that method."""
    package = importlib.import_module(name)
    if not Path(str(package.__file__)).resolve().is_relative_to(source.resolve()):
        raise ImportError(f"{name} was imported from {package.__file__} and not from {source}")
    baselines = importlib.import_module(f"{name}.baselines")
    setting = torch.load(given, weights_only=True)
    torch.set_num_threads(setting["threads"])
    device = torch.device(setting["device"])
    batches = [(x.to(device), y.to(device)) for x, y in setting["batches"]]
    training = {}
    for method, optimizer in (("SignSGD", baselines.SignSGD), ("QP-SBGD", package.QPSBGD)):
        model = build(package, setting["network"])
        model.load_state_dict(setting["weights"])
        model.to(device)
        training[method] = model, optimizer(package.binary_parameters(model)), itertools.cycle(batches)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, count = json.loads(line)
        model, stepper, supply = training[method]
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            x, y = next(supply)
            stepper.zero_grad()
            for part, labels in zip(x.chunk(setting["passes"]), y.chunk(setting["passes"]), strict=True):
                nn.functional.cross_entropy(model(part), labels).backward()
            stepper.step()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
