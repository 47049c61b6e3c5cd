"""D-Wave's ``qp`` format: problems and answers as base64 of little-endian arrays."""

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
    """An Ising or QUBO problem on the qubits that it uses.

    Args:
        type: ``"ising"`` or ``"qubo"``.
        qubits: Names of the active qubits, shape ``(n,)``.
        linear: Bias of each, shape ``(n,)``.
        couplers: Couplers between active qubits, as places in the chip's list, shape ``(m,)``.
        pairs: Their two ends, as places in ``qubits``, shape ``(m, 2)``.
        quadratic: Bias of each coupler, shape ``(m,)``.
    """

    type: str
    qubits: Ints
    linear: Floats
    couplers: Ints
    pairs: Ints
    quadratic: Floats

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
        """Biases and couplings in terms of spins, up to a constant: a bit is ``(1 + spin) / 2``."""
        if self.type == "ising":
            return self.linear, self.quadratic
        h = self.linear / 2
        np.add.at(h, self.pairs, self.quadratic[:, None] / 4)
        return h, self.quadratic / 4


def decode_problem(kind: str, data: dict[str, Any], chip: Chip) -> Problem:
    """Read a problem: a bias per qubit, NaN where unused, and one per coupler between used qubits."""
    if data["format"] != "qp":
        raise ValueError(f"a QPU reads the format qp, got {data['format']!r}")
    lin, quad = from_base64(data["lin"], "<f8"), from_base64(data["quad"], "<f8")
    if len(lin) != len(chip.qubits):
        raise ValueError(f"lin holds {len(lin)} values, the chip has {len(chip.qubits)} qubits")
    active = ~np.isnan(lin)
    couplers = np.flatnonzero(active[chip.endpoints[:, 0]] & active[chip.endpoints[:, 1]])
    if len(quad) != len(couplers):
        raise ValueError(f"quad holds {len(quad)} values, {len(couplers)} couplers are between used qubits")
    if not (np.isfinite(lin[active]).all() and np.isfinite(quad).all()):
        raise ValueError("biases must be finite")
    places = np.cumsum(active) - 1
    return Problem(kind, chip.qubits[active], lin[active], couplers, places[chip.endpoints[couplers]], quad)


def encode_answer(
    problem: Problem, bits: Bits, energies: Floats, occurrences: Ints | None, num_variables: int
) -> dict[str, Any]:
    """Write samples of a problem, one row of ``bits`` each; raw answers carry no occurrences."""
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
