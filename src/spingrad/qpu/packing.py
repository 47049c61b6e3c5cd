"""Many Ising problems in one call: mapped to the qubits of a page, and read back from its samples."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from spingrad.qpu.chip import Chip, Floats, Ints
from spingrad.qpu.embedding import Clique

Spins = npt.NDArray[np.int8]
UNUSED = 3  # in an ``initial_state``
PREFACTOR = 1.414  # of uniform torque compensation, the default of D-Wave's composites


class Ising(NamedTuple):
    """Biases ``h`` (n,) and upper-triangular couplings ``J`` (n, n) of one unit."""

    h: Floats
    J: Floats

    def energies(self, spins: npt.NDArray[np.floating]) -> Floats:  # (reads, n) -> (reads,)
        return np.asarray(spins @ self.h + ((spins @ self.J) * spins).sum(1))

    def in_gauge(self, gauge: Spins) -> "Ising":  # (n,)
        """The same problem over the spins times these signs."""
        return Ising(self.h * gauge, self.J * np.outer(gauge, gauge))


class Programmed(NamedTuple):
    """What is sent to the chip: a bias for each used qubit, and a coupling for each coupler between two."""

    qubits: Ints  # (q,), ascending
    h: Floats  # (q,)
    couplers: Ints  # (c, 2), positions in ``qubits``
    J: Floats  # (c,)

    def energies(self, spins: npt.NDArray[np.integer]) -> Floats:  # (reads, q) -> (reads,)
        a, b = self.couplers.T
        return spins @ self.h + (spins[:, a] * spins[:, b]) @ self.J


@dataclass(frozen=True)
class Page:
    """The cliques that one call programs, and the arrays that map problems to qubits and samples back.

    The spins of all cliques are numbered consecutively: those of clique ``k`` begin at ``starts[k]``.
    """

    chip: Chip
    cliques: Sequence[Clique]
    qubits: Ints  # (q,) the used ones, ascending
    spin_of: Ints  # (q,)
    clique_of: Ints  # (q,)
    couplers: Ints  # (c, 2), positions in ``qubits``, in the chip's order
    entry: Ints  # (c,) the coupling that a coupler carries, as an index into all J, or -1 for none
    ways: Ints  # (c,) number of couplers that share this coupling
    starts: Ints  # (cliques + 1,)

    @classmethod
    def of(cls, chip: Chip, cliques: Sequence[Clique]) -> "Page":
        chains = [chain for clique in cliques for chain in clique]
        sizes = np.array([len(clique) for clique in cliques])
        flat = np.concatenate([np.asarray(chain, dtype=np.int64) for chain in chains])
        order = np.argsort(flat)
        spin_of = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])[order]
        clique_of = np.repeat(np.arange(len(cliques)), sizes)[spin_of]
        position = np.full(int(chip.properties["num_qubits"]), -1)
        position[flat[order]] = np.arange(len(flat))
        couplers = position[chip.couplers]
        couplers = couplers[(couplers >= 0).all(1)]
        starts, squares = np.cumsum([0, *sizes]), np.cumsum([0, *sizes**2])
        a, b = np.sort(spin_of[couplers], axis=1).T
        k = clique_of[couplers[:, 0]]
        joins = (k == clique_of[couplers[:, 1]]) & (a != b)  # two chains of one clique
        entry = np.where(joins, squares[k] + (a - starts[k]) * sizes[k] + b - starts[k], -1)
        used, where, count = np.unique(entry, return_inverse=True, return_counts=True)
        if (used >= 0).sum() < (sizes * (sizes - 1) // 2).sum():
            raise ValueError(
                f"the layout has two chains that no coupler of {chip.name} connects; delete its file"
            )
        return cls(chip, cliques, flat[order], spin_of, clique_of, couplers, entry, count[where], starts)

    @cached_property
    def name(self) -> str:
        """A name of the layout; equal cliques on equal chips have equal names."""
        text = json.dumps([self.chip.key, *self.cliques])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def random_gauge(self, key: str) -> Spins:  # (spins,)
        """A sign for each spin of each clique, drawn from a key."""
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()))
        return rng.choice(np.array([-1, 1], dtype=np.int8), int(self.starts[-1]))

    def by_clique(self, spins: Spins) -> list[Spins]:
        """The spins of each clique."""
        return np.split(spins, self.starts[1:-1])

    def program(self, problems: Sequence[Ising], prefactor: float = PREFACTOR) -> Programmed:
        """Map one problem to each clique, scaled to use the chip's full range.

        The problems are independent, so each is scaled on its own: a layer with small gradients gets the
        same signal as one with large gradients.
        """
        a, b = self.spin_of[self.couplers].T
        h = np.concatenate([problem.h for problem in problems])
        J = np.concatenate([problem.J.ravel() for problem in problems])[self.entry] / self.ways
        chain = np.array([chain_strength(problem, prefactor) for problem in problems])
        J = np.where(self.entry >= 0, J, np.where(a == b, -chain[self.clique_of[self.couplers[:, 0]]], 0.0))
        biases = (h / np.bincount(self.spin_of))[self.spin_of]
        scale = self._scale(biases, J)
        return Programmed(
            self.qubits,
            biases * scale[self.clique_of],
            self.couplers,
            J * scale[self.clique_of[self.couplers[:, 0]]],
        )

    def _scale(self, biases: Floats, J: Floats) -> Floats:  # -> (cliques,)
        """The largest factor that keeps each clique within the chip's ranges."""
        properties = self.chip.properties
        least, most = properties.get("extended_j_range", properties["j_range"])
        load = np.zeros(len(self.cliques))
        np.maximum.at(load, self.clique_of, np.abs(biases) / properties["h_range"][1])
        np.maximum.at(load, self.clique_of[self.couplers[:, 0]], np.maximum(J / most, J / least))
        if "per_qubit_coupling_range" in properties:
            least, most = properties["per_qubit_coupling_range"]
            total = self._total(J)
            np.maximum.at(load, self.clique_of, np.maximum(total / most, total / least))
        if "per_group_coupling_range" in properties:  # a group is a part of a qubit's couplers: a safe bound
            least, most = properties["per_group_coupling_range"]
            up, down = self._total(np.maximum(J, 0)), self._total(np.minimum(J, 0))
            np.maximum.at(load, self.clique_of, np.maximum(up / most, down / least))
        return (1 - 1e-12) / np.where(load > 0, load, 1.0)  # so that rounding does not exceed the range

    def _total(self, J: Floats) -> Floats:  # (c,) -> (q,)
        """Sum over the couplers of each qubit."""
        return np.bincount(self.couplers.ravel(), np.repeat(J, 2), len(self.qubits)).astype(np.float64)

    def state(self, spins: Sequence[Spins]) -> list[int]:  # one value for each qubit of the chip
        """The spins of each clique as D-Wave's ``initial_state``: alike in a chain, 3 if unused."""
        values = np.full(int(self.chip.properties["num_qubits"]), UNUSED)
        values[self.qubits] = np.concatenate(spins)[self.spin_of]
        state: list[int] = values.tolist()
        return state

    def chains(self, samples: Spins) -> tuple[Floats, npt.NDArray[np.bool_]]:  # (samples, spins) each
        """The majority of each chain's qubits, and whether the chain is broken: whether its qubits differ."""
        order, length = np.argsort(self.spin_of, kind="stable"), np.bincount(self.spin_of)
        sums = np.add.reduceat(samples[:, order].astype(np.int32), np.cumsum([0, *length[:-1]]), axis=1)
        return np.where(sums >= 0, 1.0, -1.0), np.abs(sums) < length

    def read(self, samples: Spins, occurrences: Ints, problems: Sequence[Ising]) -> list["Reading"]:
        """The samples of each problem; broken chains are repaired by descent."""
        majority, broken = self.chains(samples)
        readings = []
        for k, problem in enumerate(problems):
            own = slice(self.starts[k], self.starts[k + 1])
            spins = _repaired(problem, majority[:, own], broken[:, own])
            share = float(np.average(broken[:, own].mean(1), weights=occurrences))
            readings.append(Reading(spins, problem.energies(spins), share))
        return readings


class Reading(NamedTuple):
    """Distinct samples of one unit, their energies, and the share of broken chains over all reads."""

    spins: Floats  # (samples, n)
    energies: Floats  # (samples,)
    broken: float

    @classmethod
    def joined(cls, copies: Sequence["Reading"]) -> "Reading":
        """The samples of all copies of one unit."""
        if len(copies) == 1:
            return copies[0]
        spins, energies, broken = zip(*copies, strict=True)
        return cls(np.concatenate(spins), np.concatenate(energies), float(np.mean(broken)))

    def best(self) -> Floats:  # (n,)
        return np.asarray(self.spins[self.energies.argmin()])


def chain_strength(problem: Ising, prefactor: float = PREFACTOR) -> float:
    """D-Wave's uniform torque compensation, ``prefactor · √(mean J² · mean degree)``, in closed form.

    Example:
        >>> chain_strength(Ising(np.zeros(3), np.triu(np.ones((3, 3)), 1)), prefactor=1.0)
        1.4142135623730951
    """
    torque = np.sqrt(2 * np.square(problem.J).sum() / len(problem.h))
    return float(prefactor * (torque or 1.0))  # without couplings, any strength will do


def _repaired(problem: Ising, spins: Floats, broken: npt.NDArray[np.bool_]) -> Floats:
    """Flip spins of broken chains, the best flip first, as long as that lowers the energy."""
    damaged = np.flatnonzero(broken.any(1))
    if not len(damaged):
        return spins
    S, open_ = spins[damaged], broken[damaged]
    couplings = problem.J + problem.J.T
    field = problem.h + S @ couplings
    for _ in range(10 * spins.shape[1]):
        gain = np.where(open_, S * field, 0.0)  # half of the energy that a flip would save
        best = gain.argmax(1)
        flip = np.flatnonzero(gain[np.arange(len(S)), best] > 1e-12 * np.abs(field).max())
        if not len(flip):
            break
        columns = best[flip]
        S[flip, columns] *= -1
        field[flip] += 2 * S[flip, columns, None] * couplings[columns]
    repaired = spins.copy()
    repaired[damaged] = S
    return repaired


def packed_gauge(gauge: Spins) -> str:
    """Signs for the journal, eight in a byte."""
    return base64.b64encode(np.packbits(gauge > 0).tobytes()).decode()


def unpacked_gauge(kept: str, count: int) -> Spins:  # (count,)
    """The signs that :func:`packed_gauge` stored."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(kept), np.uint8), count=count)
    return 2 * bits.astype(np.int8) - 1


def packed(problems: Sequence[Ising]) -> dict[str, Any]:
    """Problems for the journal, in single precision; units of one layer share couplings, kept only once."""
    layers = {id(problem.J): problem.J for problem in problems}
    numbers = [J[np.triu_indices(len(J), 1)] for J in layers.values()] + [problem.h for problem in problems]
    return {
        "sizes": [len(J) for J in layers.values()],
        "layer_of": [list(layers).index(id(problem.J)) for problem in problems],
        "numbers": base64.b64encode(np.concatenate(numbers).astype("<f4").tobytes()).decode(),
    }


def unpacked(kept: dict[str, Any]) -> list[Ising]:
    """The problems that :func:`packed` stored."""
    numbers = np.frombuffer(base64.b64decode(kept["numbers"]), "<f4").astype(np.float64)
    sizes, layer_of = kept["sizes"], kept["layer_of"]
    lengths = [n * (n - 1) // 2 for n in sizes] + [sizes[layer] for layer in layer_of]
    parts = np.split(numbers, np.cumsum(lengths)[:-1])
    couplings = [np.zeros((n, n)) for n in sizes]
    for J, part in zip(couplings, parts, strict=False):
        J[np.triu_indices(len(J), 1)] = part
    return [Ising(h, couplings[layer]) for h, layer in zip(parts[len(sizes) :], layer_of, strict=True)]
