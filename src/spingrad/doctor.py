"""The command ``spingrad doctor``: what is installed, what works, and what to do about the rest."""

import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import nn

from spingrad._files import cache_folder
from spingrad._version import __version__
from spingrad.export import pack
from spingrad.kernels.compiled import HAS_NUMBA
from spingrad.kernels.gpu import HAS_TRITON
from spingrad.nn import BinaryLinear, Sign, binary_parameters
from spingrad.optim import QPSBGD
from spingrad.problem import BinaryQuadratic
from spingrad.solvers import BlockDescentSolver, ExactSolver

REQUIRED = ("torch", "numpy", "dimod", "dwave-samplers", "filelock")
SLOWLY = "torch, slowly"
SLACK = 1e-3  # between a bound and an energy, relative to the energy, for rounding


class Extra(NamedTuple):
    """An extra of the package: what must be installed, and what that enables."""

    packages: tuple[str, ...]
    enables: str


EXTRAS = {
    "fast": Extra(("numba",), "fast sweeps of the default solver on a CPU"),
    "export": Extra(("safetensors", "numba"), "packed files and their fast runtime"),
    "qpu": Extra(("dwave-system",), "D-Wave QPUs and their emulator"),
    "gurobi": Extra(("gurobipy",), "GurobiSolver"),
    "openjij": Extra(("openjij",), "OpenJij's samplers"),
    "plot": Extra(("matplotlib",), "the figure of `spingrad qpu inspect`"),
    "graph": Extra(("torch_geometric", "scikit-image"), "graph convolutions"),
    "onnx": Extra(("onnx", "onnxruntime"), "export to ONNX, and running it"),
    "qonnx": Extra(("qonnx", "onnx"), "running QONNX files for FPGA tools"),
    "lightning": Extra(("lightning",), "Lightning, for its users"),
    "ray": Extra(("ray",), "a farm of solvers, grids of runs"),
}


class Report(NamedTuple):
    """What the doctor found. There is one line of advice for each thing that is wrong."""

    versions: dict[str, str]
    extras: dict[str, dict[str, str | None]]
    machine: dict[str, Any]
    folders: dict[str, str | None]
    dwave: dict[str, str | bool | None]
    self_test: dict[str, str]
    advice: list[str]

    def lines(self) -> list[str]:
        """The report as text."""
        extras = [(name, _packages(found), EXTRAS[name].enables) for name, found in self.extras.items()]
        widest = max(len(packages) for _, packages, _ in extras)
        return [
            *_titled("versions", self.versions),
            *_titled(
                'extras, by: pip install "spingrad[NAME]"',
                {name: f"{packages:{widest}}  {what}" for name, packages, what in extras},
            ),
            *_titled("machine", self.machine),
            *_titled("folders", self.folders),
            *_titled("D-Wave", self.dwave),
            *_titled("self-test", self.self_test),
            *([f"advice: {line}" for line in self.advice] or ["nothing is wrong"]),
        ]


def examine() -> Report:
    """Look at everything, which takes a few seconds; nothing is sent and nothing is downloaded."""
    advice: list[str] = []
    return Report(
        versions={
            "spingrad": __version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
            **{name: _version(name) or "not installed" for name in REQUIRED},
        },
        extras=_extras(advice),
        machine=_machine(advice),
        folders=_folders(advice),
        dwave=_dwave(advice),
        self_test=_self_test(advice),
        advice=advice,
    )


def run(*, as_json: bool) -> None:
    """Print the report.

    Raises:
        ValueError: Something is wrong.
    """
    if HAS_NUMBA:
        print(
            "the first time, kernels are compiled for the self-test: up to a minute",
            file=sys.stderr,
            flush=True,
        )
    report = examine()
    print(json.dumps(report._asdict(), indent=2) if as_json else "\n".join(report.lines()))
    if report.advice:
        raise ValueError(f"{len(report.advice)} of the things above need attention; advice is at the end")


def _extras(advice: list[str]) -> dict[str, dict[str, str | None]]:
    found = {
        name: {package: _version(package) for package in extra.packages} for name, extra in EXTRAS.items()
    }
    for name, versions in found.items():
        for package, installed in versions.items():
            least = _oldest(package)
            if installed and _numbers(installed) < _numbers(least):
                advice.append(
                    f'{package} {installed} is older than {least}: pip install -U "spingrad[{name}]"'
                )
    return found


def _oldest(package: str) -> str:
    """The oldest version that spingrad's own requirements allow."""
    try:
        needed = requires("spingrad") or []
    except PackageNotFoundError:  # imported from a folder that was never installed
        needed = []
    found = (re.match(rf"{re.escape(package)}(?:\[.*?\])?>=([\d.]+)", line) for line in needed)
    return next((match[1] for match in found if match), "0")


def _numbers(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release.partition("+")[0])[:3]]


def _machine(advice: list[str]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    if threads > cores:
        advice.append(f"torch uses {threads} threads on {cores} cores: set OMP_NUM_THREADS={cores}")
    devices = _devices()
    return {
        "cores": cores,
        "threads of torch": threads,
        "torch built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA",
        "GPUs": ", ".join(devices) or "none, which is fine: everything runs on a CPU",
        "single spins on a CPU": f"by {'numba' if HAS_NUMBA else SLOWLY}",
        **({"single spins on GPUs": f"by {_on_gpus()}"} if devices else {}),
    }


def _on_gpus() -> str:
    """What computes the operators of descent there; all set the same spins."""
    return "Triton" if HAS_TRITON and "MPS" not in _devices() else SLOWLY


def _devices() -> list[str]:
    names = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    names += [torch.xpu.get_device_name(place) for place in range(torch.xpu.device_count())]
    return [*names, "MPS"] if torch.backends.mps.is_available() else names


def _folders(advice: list[str]) -> dict[str, str | None]:
    data = os.environ.get("SPINGRAD_DATA")
    if data and not Path(data).is_dir():
        advice.append("SPINGRAD_DATA is not a folder: create it, or unset it and data go to the cache")
    if not _writable(cache_folder()):
        advice.append("the cache cannot be written: point XDG_CACHE_HOME at a folder that can")
    return {
        "cache": _short(cache_folder()),
        "data (SPINGRAD_DATA)": _short(Path(data)) if data else None,
        "compiled kernels": _kernels(advice),
    }


def _kernels(advice: list[str]) -> str | None:
    """Where numba keeps what it has compiled."""
    if not HAS_NUMBA:
        return None
    try:
        from spingrad.kernels.popcount import xnor_sums

        return _short(Path(str(xnor_sums.stats.cache_path)))
    except Exception as error:  # of numba, llvmlite or numpy: their versions may not fit together
        advice.append(f"numba does not work ({_first_line(error)}): pip install -U numba, or uninstall it")
        return None


def _dwave(advice: list[str]) -> dict[str, str | bool | None]:
    """The settings of D-Wave's client; of the token only whether there is one."""
    if not (_version("dwave-system") and _version("dwave-cloud-client")):
        return {"client": None}
    from spingrad.qpu import service

    with warnings.catch_warnings(record=True) as ignored:
        warnings.simplefilter("always")
        try:
            settings = service.client_settings(None, os.environ.get("DWAVE_PROFILE"))
        except Exception as error:  # whatever the client makes of a damaged file
            advice.append(f"D-Wave's settings cannot be read ({type(error).__name__}): dwave config create")
            return {"client": _version("dwave-cloud-client")}
    advice += [str(warning.message) for warning in ignored if "dwave.conf" in str(warning.message)]
    endpoint = urlsplit(str(settings.get("endpoint") or ""))
    return {
        "client": _version("dwave-cloud-client"),
        "token is set": bool(settings["token"]),
        "endpoint": f"{endpoint.scheme}://{endpoint.hostname}" if endpoint.hostname else None,
        "region": settings.get("region"),
        "solver": service.named_solver(settings.get("solver")),
    }


def _self_test(advice: list[str]) -> dict[str, str]:
    results = {}
    for name, test in (("a step", _step), ("a certificate", _certificate), ("a packed network", _packed)):
        begin = time.perf_counter()
        try:
            with _own_seed():
                test()
        except Exception as error:  # any: this is what the command is for
            results[name] = f"failed: {type(error).__name__}: {_first_line(error)}"
            advice.append(f"{name} failed; please report it with the output of `spingrad doctor --json`")
        else:
            results[name] = f"works ({time.perf_counter() - begin:.1f} s)"
    return results


def _step() -> None:
    """Steps of the optimizer lower the loss, and every weight is a spin."""
    first = BinaryLinear(64, 32)
    model = nn.Sequential(first, nn.Hardtanh(), BinaryLinear(32, 4))
    optimizer = QPSBGD(binary_parameters(model), lr=3e-3)
    x, y = torch.randn(128, 64), torch.randint(4, (128,))
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    _expect(losses[-1] < losses[0], f"a loss below {losses[0]:.3f} after ten steps, got {losses[-1]:.3f}")
    _expect(bool((first.binary_weight.abs() == 1).all()), "weights of -1 and +1")


def _certificate() -> None:
    """The exact solver proves its optimum; descent is not below it, and the bound not above it."""
    problem = BinaryQuadratic.least_squares(torch.randn(40, 12), torch.randn(40, 3))
    best = ExactSolver().solve(problem)
    slack = SLACK * best.energy.abs()
    _expect(bool(best.info["proved"].all()), "a proof for 12 spins")
    _expect(bool((problem.lower_bound() <= best.energy + slack).all()), "a bound below the optimum")
    found = BlockDescentSolver().solve(problem).energy
    _expect(bool((found >= best.energy - slack).all()), "no energy below the optimum")


def _packed() -> None:
    """A packed network finds the classes that torch finds."""
    model = nn.Sequential(BinaryLinear(70, 40), Sign(), BinaryLinear(40, 5))
    spins = torch.randn(50, 70).sign()
    found = pack(model, kind="spins").classes(spins.to(torch.int8).numpy())
    _expect(bool((found == model(spins).argmax(1).numpy()).all()), "the classes that torch finds")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"expected {what}")


@contextmanager
def _own_seed() -> Iterator[None]:
    """Random numbers from a fixed seed; those of the caller stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _packages(versions: dict[str, str | None]) -> str:
    if not any(versions.values()):
        return "not installed"
    return ", ".join(f"{name} {found}" if found else f"no {name}" for name, found in versions.items())


def _titled(title: str, values: Mapping[str, object]) -> list[str]:
    width = max(map(len, values))
    shown = {name: "none" if value is None else value for name, value in values.items()}
    return [title, *(f"  {name:{width}}  {value}" for name, value in shown.items()), ""]


def _short(path: Path) -> str:
    """With ``~`` for the home folder, so that a bug report does not name its author."""
    home = Path.home()
    return f"~/{path.relative_to(home).as_posix()}" if path.is_relative_to(home) else str(path)


def _writable(folder: Path) -> bool:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
