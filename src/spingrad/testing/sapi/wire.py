"""D-Wave's ``qp`` format: problems and answers as little-endian arrays in base64."""

import base64
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dimod
import numpy as np
from numpy.typing import NDArray

from spingrad.testing.sapi.chip import Chip, Floats, Ints

Bits = NDArray[np.uint8]

VARTYPES = {"ising": dimod.SPIN, "qubo": dimod.BINARY}


@dataclass(frozen=True)
class Problem:
    """An Ising or QUBO problem on some qubits of a chip.

    Args:
        type: ``"ising"`` or ``"qubo"``.
        qubits: Numbers of the used qubits, shape ``(n,)``.
        linear: Bias of each used qubit, shape ``(n,)``.
        couplers: Couplers between used qubits, as indices into the chip's list, shape ``(m,)``.
        pairs: The two qubits of each coupler, as indices into ``qubits``, shape ``(m, 2)``.
        quadratic: Bias of each coupler, shape ``(m,)``.
    """

    type: str
    qubits: Ints
    linear: Floats
    couplers: Ints
    pairs: Ints
    quadratic: Floats

    @property
    def values(self) -> tuple[int, int]:
        """The two values of a variable."""
        return (-1, 1) if self.type == "ising" else (0, 1)

    @cached_property
    def bqm(self) -> dimod.BinaryQuadraticModel:
        """The problem with variables ``0 … n-1``."""
        quadratic = (self.pairs[:, 0], self.pairs[:, 1], self.quadratic)
        return dimod.BinaryQuadraticModel.from_numpy_vectors(
            self.linear, quadratic, 0.0, VARTYPES[self.type], variable_order=range(len(self.linear))
        )

    def energies(self, bits: Bits) -> Floats:  # (r, n) -> (r,)
        values = bits.astype(np.int8)
        if self.type == "ising":
            values = 2 * values - 1
        return np.asarray(self.bqm.energies((values, range(len(self.linear)))), dtype=np.float64)

    def to_ising(self) -> tuple[Floats, Floats]:
        """Biases and couplings of the spins, up to a constant; a bit is ``(1 + spin) / 2``."""
        if self.type == "ising":
            return self.linear, self.quadratic
        h = self.linear / 2
        np.add.at(h, self.pairs, self.quadratic[:, None] / 4)
        return h, self.quadratic / 4


def decode_problem(kind: str, data: dict[str, Any], chip: Chip) -> Problem:
    """Decode a problem: one bias per qubit, NaN for unused ones, and one per coupler between used qubits."""
    if data["format"] != "qp":
        raise ValueError(f"expected the format qp, got {data['format']!r}")
    lin, quad = from_base64(data["lin"], "<f8"), from_base64(data["quad"], "<f8")
    if len(lin) != len(chip.qubits):
        raise ValueError(f"expected {len(chip.qubits)} values in lin, one per qubit, got {len(lin)}")
    active = ~np.isnan(lin)
    couplers = np.flatnonzero(active[chip.endpoints[:, 0]] & active[chip.endpoints[:, 1]])
    if len(quad) != len(couplers):
        raise ValueError(f"expected {len(couplers)} values in quad, one per used coupler, got {len(quad)}")
    if not (np.isfinite(lin[active]).all() and np.isfinite(quad).all()):
        raise ValueError("biases must be finite")
    places = np.cumsum(active) - 1
    return Problem(kind, chip.qubits[active], lin[active], couplers, places[chip.endpoints[couplers]], quad)


def encode_answer(
    problem: Problem, bits: Bits, energies: Floats, occurrences: Ints | None, num_variables: int
) -> dict[str, Any]:
    """Encode samples of a problem, ``bits`` of shape ``(samples, n)``; raw answers have no occurrences."""
    answer = {
        "format": "qp",
        "num_variables": num_variables,
        "active_variables": to_base64(problem.qubits, "<i4"),
        "energies": to_base64(energies, "<f8"),
        "solutions": to_base64(np.packbits(bits, axis=1), "u1"),
    }
    if occurrences is not None:
        answer["num_occurrences"] = to_base64(occurrences, "<i4")
    return answer


def from_base64(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)


def to_base64(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode()
