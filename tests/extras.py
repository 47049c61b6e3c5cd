"""One small use of each extra: ``python tests/extras.py fast``. ``nox -s extra`` runs them.

Without its extra, a use ends in an error that says what to install.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from spingrad import QPSBGD, BinaryLinear, Sign, binary_parameters
from spingrad.cli import main
from spingrad.export import PackedModel, pack, verify
from spingrad.qpu import QPUSolver
from spingrad.solvers import BlockDescentSolver, DimodSolver, ExactSolver, GurobiSolver
from spingrad.testing import check_solver, random_problem


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3))


PIXELS = np.arange(80, dtype=np.uint8).reshape(5, 16)


def fast(folder: Path) -> None:
    from spingrad.kernels.compiled import HAS_NUMBA

    assert HAS_NUMBA
    check_solver(BlockDescentSolver())


def export(folder: Path) -> None:
    pack(network()).save(folder / "net.safetensors")
    packed = PackedModel.load(folder / "net.safetensors")
    assert np.array_equal(
        packed.classes(PIXELS), verify.from_torch(network(), torch.tensor(PIXELS).float()).classes
    )
    main(["export", f"{folder}/net.safetensors", "--to", "c", "--out", f"{folder}/net"])


def qpu(folder: Path) -> None:
    main(["qpu", "plan", "16-4-2", "--batch-size", "50", "--num-examples", "500"])
    one_step_on_the_emulator(folder)


def plot(folder: Path) -> None:
    one_step_on_the_emulator(folder)
    main(["qpu", "inspect", f"{folder}/run.journal", "--call", "1", "--out", f"{folder}/call.svg"])


def one_step_on_the_emulator(folder: Path) -> None:
    from spingrad.testing.sapi import Sapi

    with Sapi(size=6) as sapi, sapi.configured(), QPUSolver(folder / "run.journal", budget=1.0) as solver:
        solver.solve(random_problem(r=8, n=6, m=4, seed=0))


def gurobi(folder: Path) -> None:
    check_solver(GurobiSolver())


def openjij(folder: Path) -> None:
    from openjij import SASampler

    check_solver(DimodSolver(SASampler(), num_reads=4, num_sweeps=50))


def graph(folder: Path) -> None:
    from spingrad.nn import BinaryGCNConv

    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    assert BinaryGCNConv(4, 2)(torch.ones(3, 4), edges).shape == (3, 2)


def onnx(folder: Path) -> None:
    packed = pack(network())
    assert np.array_equal(verify.from_onnx(packed, PIXELS).classes, packed.classes(PIXELS))


def qonnx(folder: Path) -> None:
    packed = pack(network())
    assert np.array_equal(verify.from_qonnx(packed, PIXELS).classes, packed.classes(PIXELS))


def lightning(folder: Path) -> None:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x).square().mean()

        def configure_optimizers(self) -> Any:
            return QPSBGD(binary_parameters(self), lr=0.1)

    module = Module()
    before = module.network[0].weight.detach().clone()
    Trainer(accelerator="cpu", max_steps=2, default_root_dir=folder).fit(module, torch.randn(4, 8, 16))
    assert not torch.equal(module.network[0].weight, before)


def ray(folder: Path) -> None:
    from spingrad.distributed import RaySolver

    os.environ.update(
        RAY_worker_niceness="0"
    )  # 15 unless told: on a busy machine an actor would wait for ever
    solver = RaySolver(ExactSolver, num_workers=1)
    assert solver.solve(random_problem(r=8, n=6, m=2, seed=0)).info["proved"].all()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        globals()[sys.argv[1]](Path(own))
