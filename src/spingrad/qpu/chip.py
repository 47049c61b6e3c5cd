"""A quantum annealer as its service describes it: qubits, couplers, ranges, and the cost of a call."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Topology = Literal["pegasus", "zephyr"]
SIZES: dict[Topology, int] = {"pegasus": 16, "zephyr": 12}  # of Advantage and Advantage2

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chip:
    """The working graph of an annealer and the other properties in its solver definition.

    Args:
        name: Name of the QPU, which D-Wave calls a solver.
        graph_id: Identifies the working graph, if the service gives it an id. The service refuses jobs for a
            working graph that it no longer has.
        properties: The properties as D-Wave's client receives them.

    Example:
        >>> chip = Chip.ideal("pegasus", size=2)
        >>> chip.topology, len(chip.qubits), len(chip.couplers)
        ('pegasus', 40, 164)
    """

    name: str
    graph_id: str | None
    properties: Mapping[str, Any]

    @classmethod
    def ideal(cls, topology: Topology = "pegasus", size: int | None = None) -> "Chip":
        """A chip without defects, for planning; its times are those that D-Wave published for Advantage."""
        if topology not in SIZES:
            raise ValueError(f'topology must be "pegasus" or "zephyr", got {topology!r}')
        mocks = client_module("dwave.cloud.testing.mocks")
        shape = SIZES[topology] if size is None else size
        build = {"pegasus": mocks.qpu_pegasus_solver_data, "zephyr": mocks.qpu_zephyr_solver_data}[topology]
        properties = build(shape)["properties"] | {"problem_timing_data": mocks.qpu_problem_timing_data()}
        return cls(f"ideal {topology} of size {shape}", None, properties)

    @cached_property
    def qubits(self) -> Ints:  # (q,)
        return np.asarray(self.properties["qubits"], dtype=np.int64)

    @cached_property
    def couplers(self) -> Ints:  # (c, 2)
        return np.asarray(self.properties["couplers"], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def neighbors(self) -> dict[int, set[int]]:
        """The qubits that are coupled to each working qubit."""
        found: dict[int, set[int]] = {qubit: set() for qubit in self.qubits.tolist()}
        for one, other in self.couplers.tolist():
            found[one].add(other)
            found[other].add(one)
        return found

    @property
    def topology(self) -> Topology:
        kind = self.properties["topology"]["type"]
        if kind not in SIZES:
            raise ValueError(f"expected a Pegasus or Zephyr graph, {self.name} has the topology {kind!r}")
        return kind  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        return int(self.properties["topology"]["shape"][0])

    @cached_property
    def key(self) -> str:
        """A name of the working graph; chips with equal qubits and couplers have equal keys."""
        digest = hashlib.sha256(f"{self.topology} {self.size}".encode())
        digest.update(np.sort(self.qubits).tobytes())
        digest.update(np.unique(np.sort(self.couplers, axis=1), axis=0).tobytes())
        return digest.hexdigest()[:32]

    def access_time(self, num_qubits: int, **sample_kwargs: Any) -> float:
        """Microseconds of QPU time that a call is charged, by D-Wave's timing model of this chip.

        An ``anneal_schedule`` counts with its duration; one that begins at ``s = 1`` is reverse annealing.
        """
        if (
            "anneal_schedule" in sample_kwargs
        ):  # the model asks for a start, and looks only whether there is one
            sample_kwargs = {"initial_state": True, "reinitialize_state": True, **sample_kwargs}
        solver = client_module("dwave.cloud.solver")
        data = {"id": self.name, "identity": {"name": self.name}, "properties": dict(self.properties)}
        model = solver.StructuredSolver(None, data)
        return float(model.estimate_qpu_access_time(num_qubits=max(num_qubits, 1), **sample_kwargs))


def client_module(name: str) -> Any:
    """A module that the extra ``qpu`` installs, or an error that says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError('D-Wave\'s client is needed: pip install "spingrad[qpu]"') from error
