"""The chip of the emulator: a Pegasus or Zephyr lattice with some broken qubits."""

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    import networkx as nx
    from dwave.cloud.solver import StructuredSolver
    from dwave.cloud.testing import mocks
except ImportError as error:
    raise ImportError('the emulator needs D-Wave\'s client: pip install "spingrad[qpu]"') from error

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Range = tuple[float, float]

LATTICES = {"pegasus": mocks.qpu_pegasus_solver_data, "zephyr": mocks.qpu_zephyr_solver_data}
NAMES = {"pegasus": "Advantage_emulated", "zephyr": "Advantage2_emulated"}
FULL_SIZE = {"pegasus": 16, "zephyr": 12}

IGNORED = ("anneal_offsets", "annealing_time", "fast_anneal", "flux_biases", "h_gain_schedule")
"""Parameters that change the samples of a real chip and not those of the emulator."""

# The annealer uses num_reads, answer_mode, auto_scale, anneal_schedule, initial_state and reinitialize_state.
# The others do not change the samples; those that cost time are charged.
PARAMETERS = (
    "anneal_offsets",
    "anneal_schedule",
    "annealing_time",
    "answer_mode",
    "auto_scale",
    "fast_anneal",
    "flux_biases",
    "flux_drift_compensation",
    "h_gain_schedule",
    "initial_state",
    "label",
    "num_reads",
    "programming_thermalization",
    "readout_thermalization",
    "reduce_intersample_correlation",
    "reinitialize_state",
)


@dataclass(frozen=True, eq=False)
class Chip:
    """A solver definition as the service publishes it, and values derived from it.

    Args:
        definition: Identity, status, properties and load of one QPU.
    """

    definition: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        return self.definition["identity"]  # type: ignore[no-any-return]

    @property
    def properties(self) -> dict[str, Any]:
        return self.definition["properties"]  # type: ignore[no-any-return]

    @cached_property
    def qubits(self) -> Ints:  # (q,)
        return np.array(self.properties["qubits"], dtype=np.int64)

    @cached_property
    def endpoints(self) -> Ints:  # (c, 2)
        """The two qubits of every coupler, as indices into ``qubits``."""
        couplers = np.array(self.properties["couplers"], dtype=np.int64).reshape(-1, 2)
        return np.searchsorted(self.qubits, couplers)

    @cached_property
    def groups(self) -> tuple[Ints, Range]:  # (c, 2)
        """The two groups of every coupler, and the range of each group's total coupling.

        On Pegasus a group holds all couplers of a qubit, on Zephyr about half of them.
        """
        if "per_qubit_coupling_range" in self.properties:
            return self.endpoints, self.properties["per_qubit_coupling_range"]
        from dwave.system.coupling_groups import coupling_groups  # imports for seconds

        couplers = self.properties["couplers"]
        graph = nx.Graph(couplers, family="zephyr", rows=self.properties["topology"]["shape"][0])
        memberships: dict[frozenset[int], list[int]] = {frozenset(coupler): [] for coupler in couplers}
        for index, group in enumerate(coupling_groups(graph)):
            for coupler in group:
                memberships[frozenset(coupler)].append(index)
        groups = np.array([memberships[frozenset(coupler)] for coupler in couplers], dtype=np.int64)
        return groups.reshape(-1, 2), self.properties["per_group_coupling_range"]

    def view(self, fields: str) -> bytes:
        """The definition as JSON, with some of its fields; see :func:`shown`."""
        return _view(self, fields)

    def access_time(self, num_qubits: int, params: dict[str, Any]) -> float:
        """Microseconds of QPU time, by D-Wave's timing model."""
        params = {"reinitialize_state": True, **params}  # the service's default; the model's is False
        return float(self._timing_model.estimate_qpu_access_time(max(num_qubits, 1), **params))

    @cached_property
    def _timing_model(self) -> Any:
        few = {**self.properties, "qubits": [0], "couplers": []}  # the model does not need the graph
        return StructuredSolver(None, {**self.definition, "properties": few})


@lru_cache(8)
def _view(chip: Chip, fields: str) -> bytes:
    return shown(chip.definition, fields)


def shown(definition: dict[str, Any], fields: str) -> bytes:
    """A definition as JSON, with the fields of the client's filter, such as ``none,+status``."""
    terms = fields.split(",")
    keep = {k for k in definition if ("all" in terms and f"-{k}" not in terms) or f"+{k}" in terms}
    return json.dumps({k: v for k, v in definition.items() if k in keep}).encode()


def working_chip(topology: str, size: int | None, broken: float, seed: int) -> Chip:
    """A chip of the given family in which a random fraction ``broken`` of the qubits is missing."""
    if topology not in LATTICES:
        raise ValueError(f"topology must be one of {', '.join(LATTICES)}, got {topology!r}")
    lattice, shape, num_qubits = _lattice(topology, FULL_SIZE[topology] if size is None else size)
    nodes = sorted({qubit for coupler in lattice for qubit in coupler})
    dead = set(random.Random(seed).sample(nodes, round(broken * len(nodes))))
    qubits = [qubit for qubit in nodes if qubit not in dead]
    couplers = [list(coupler) for coupler in lattice if dead.isdisjoint(coupler)]
    graph_id = hashlib.sha256(json.dumps([qubits, couplers]).encode()).hexdigest()[:10]
    properties = {
        "topology": {"type": topology, "shape": list(shape)},
        "qubits": qubits,
        "couplers": couplers,
        "num_qubits": num_qubits,
        "chip_id": NAMES[topology],
        **_common_properties(),
        **_total_coupling_range(topology),
    }
    return Chip(
        {
            "identity": {"name": NAMES[topology], "version": {"graph_id": graph_id}},
            "status": "ONLINE",
            "description": "An emulated QPU on this machine",
            "avg_load": 0.0,
            "properties": properties,
        }
    )


@cache
def _lattice(topology: str, size: int) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], int]:
    """Couplers, shape and number of qubits of a chip without defects."""
    properties = LATTICES[topology](size)["properties"]
    couplers = tuple((u, v) for u, v in properties["couplers"])
    return couplers, tuple(properties["topology"]["shape"]), properties["num_qubits"]


def _common_properties() -> dict[str, Any]:
    timing = mocks.qpu_problem_timing_data()
    return {
        "category": "qpu",
        "tags": [],
        "supported_problem_types": ["ising", "qubo"],
        "parameters": dict.fromkeys(PARAMETERS, "as in D-Wave's documentation"),
        "h_range": [-4.0, 4.0],
        "j_range": [-1.0, 1.0],
        "extended_j_range": [-2.0, 1.0],
        "num_reads_range": [1, 10000],
        "annealing_time_range": [0.5, 2000.0],
        "fast_anneal_time_range": [0.005, 2000.0],
        "default_annealing_time": timing["default_annealing_time"],
        "default_programming_thermalization": timing["default_programming_thermalization"],
        "default_readout_thermalization": timing["default_readout_thermalization"],
        "programming_thermalization_range": [0.0, 10000.0],
        "readout_thermalization_range": [0.0, 10000.0],
        "max_anneal_schedule_points": 12,
        "problem_run_duration_range": [0.0, 1e6],
        "problem_timing_data": timing,
        "quota_conversion_rate": 1,
    }


def _total_coupling_range(topology: str) -> dict[str, Any]:
    if topology == "pegasus":
        return {"per_qubit_coupling_range": [-18.0, 15.0]}
    return {"per_group_coupling_range": [-13.0, 10.0]}
