"""The public set: real projection problems of trained networks, each with the best energy known.

Every file holds a few units of one layer at one step, which share their rows: the problem that the default
optimizer posed while a network trained on MNIST, in single precision. Its ``origin`` has, for each unit, the
best energy known (in double precision), the spins that have it, and whether it is proved that none is lower.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spingrad import BinaryQuadratic
from spingrad.solvers import AnnealingSolver, ExactSolver
from spingrad_lab.bench.captured import NARROW, captured

NETWORKS = {NARROW: (50, 200, 800), (784, 512, 256, 128, 96, 10): (50, 800)}
"""Sizes of layers, and the steps whose problems are taken."""
UNITS = 8
PROVABLE = 64  # inputs
ROUNDING = 1e-9  # of the energy, relative: other processors sum in another order
Best = dict[str, list[Any]]


def write(folder: Path, *, quick: bool = False) -> Iterator[Path]:
    """Capture the problems, solve them and write one file per layer and step."""
    networks = {(784, 16, 10): (2,)} if quick else NETWORKS
    for sizes, steps in networks.items():
        for problem in captured(sizes, steps):
            own = problem.units(0, min(UNITS, problem.num_units))
            network = "-".join(map(str, sizes))
            origin = {"data": "MNIST", "network": network, **problem.origin, **best_known(own, quick)}
            path = (
                folder / f"n{problem.num_spins:03}-of-{network}-step-{problem.origin['step']:03}.safetensors"
            )
            replace(own, origin=origin).save(path)
            yield path


def best_known(problem: BinaryQuadratic, quick: bool = False) -> Best:
    """Energy, spins and proof of each unit: the best of long anneals and, for narrow layers, of a search."""
    effort = (5, 5) if quick else (400, 50)
    answers = [AnnealingSolver(*effort).solve(problem, seed=seed).spins for seed in (0, 1)]
    proved = torch.zeros(problem.num_units, dtype=torch.bool)
    if problem.num_spins <= PROVABLE:
        exact = ExactSolver(max_nodes=20_000_000).solve(problem, initial=answers[0])
        answers.append(exact.spins)
        proved = exact.info["proved"]
    double = problem.double()
    energies = torch.stack([double.energy(spins.double()) for spins in answers])
    choice = energies.argmin(0).tolist()
    spins = [answers[own][:, unit] for unit, own in enumerate(choice)]
    return {
        "energy": energies.amin(0).tolist(),
        "proved": proved.tolist(),
        "spins": [to_hex(own) for own in spins],
    }


def to_hex(spins: Tensor) -> str:
    """Spins as text: bits, the first spin the highest bit of the first byte, +1 as 1.

    Example:
        >>> to_hex(torch.tensor([1.0, -1.0, 1.0, 1.0]))
        'b0'
    """
    return np.packbits(spins.numpy() > 0).tobytes().hex()


def from_hex(text: str, count: int) -> Tensor:
    """The spins of :func:`to_hex`, in double precision."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count)
    return torch.from_numpy(bits.astype(np.float64) * 2 - 1)


def verify(folder: Path, *, prove: bool = False) -> list[dict[str, Any]]:
    """Check every file of a folder; a row for each: its fan-in, units, proofs, and gap to the lower bound.

    Checked are the SHA-256 of the file, that the spins have the energy that it names, and that the lower
    bound is not above it.

    Args:
        folder: The set.
        prove: Also prove the energies again that are said to be proved.

    Raises:
        ValueError: A file is damaged, or says something that is not so; the message names it.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"expected a folder with files of problems, got {folder}, which has none")
    return [_verified(path, prove) for path in paths]


def _verified(path: Path, prove: bool) -> dict[str, Any]:
    problem = BinaryQuadratic.load(path)
    n, m, origin = problem.num_spins, problem.num_units, problem.origin
    if any(len(origin.get(name, ())) != m for name in ("energy", "proved", "spins")):
        raise ValueError(f"{path}: expected energy, proved and spins of {m} units")
    spins = torch.stack([from_hex(text, n) for text in origin["spins"]], 1)
    named = torch.tensor(origin["energy"], dtype=torch.float64)
    found, bound = problem.double().energy(spins), problem.lower_bound()
    limit = ROUNDING * (1 + named.abs())
    if bool(((found - named).abs() > limit).any()):
        raise ValueError(f"{path}: the spins have the energies {found.tolist()}, not {named.tolist()}")
    if bool((bound > named + limit).any()):
        raise ValueError(f"{path}: an energy lies below the lower bound {bound.tolist()}")
    if prove and any(origin["proved"]):
        exact = ExactSolver(max_nodes=20_000_000).solve(problem, initial=spins)
        own = torch.tensor(origin["proved"])
        lower = problem.double().energy(exact.spins.double()) < named - limit
        if not bool(exact.info["proved"][own].all()) or bool(lower[own].any()):
            raise ValueError(f"{path}: an energy that is said to be proved could not be proved")
    gap = 100 * ((named - bound) / named.abs()).mean()
    return {"n": n, "units": m, "proved": sum(origin["proved"]), "gap %": float(gap), "name": path.name}
