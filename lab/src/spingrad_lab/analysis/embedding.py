"""A problem on a quantum annealer: its graph, and the chains of qubits that stand for its spins."""

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING

from spingrad import BinaryQuadratic
from spingrad.qpu.chip import SIZES, Topology, client_module
from spingrad.qpu.embedding import lattice_module

if TYPE_CHECKING:
    import networkx


def logical_graph(problem: BinaryQuadratic, tolerance: float = 0.0) -> "networkx.Graph":
    """The couplings ``2 ZᵀZ`` as a graph; the units of a layer share it.

    Nodes are the spins ``0 … n-1``; an edge joins two whose coupling exceeds ``tolerance`` in magnitude
    and carries it as ``weight``.
    """
    import networkx

    _, J, _ = problem.double().to_ising(unit=0)
    pairs = (J.abs() > tolerance).nonzero()
    graph = networkx.Graph()
    graph.add_nodes_from(range(problem.num_spins))
    graph.add_weighted_edges_from((i, j, float(J[i, j])) for i, j in pairs.tolist())
    return graph


def find_embedding(
    graph: "networkx.Graph",
    topology: Topology = "pegasus",
    size: int | None = None,
    seed: int = 0,
) -> tuple[dict[int, tuple[int, ...]], "networkx.Graph"]:
    """Chains of qubits that stand for the nodes of a graph, and the annealer's graph they live in.

    The annealer is an ideal one, without defects.

    Args:
        graph: The couplings, as of :func:`logical_graph`.
        topology: The annealer's family of graphs.
        size: Its member; by default 16 for Pegasus (Advantage) and 12 for Zephyr (Advantage2).
        seed: Of minorminer's search.

    Raises:
        RuntimeError: No embedding was found, which does not prove that there is none.
    """
    if topology not in SIZES:
        raise ValueError(f'topology is "pegasus" or "zephyr", got {topology!r}')
    size = SIZES[topology] if size is None else size
    target = getattr(lattice_module(), f"{topology}_graph")(size)
    chains = client_module("minorminer").find_embedding(graph, target, random_seed=seed)
    if len(chains) < len(graph):
        raise RuntimeError(
            f"found no embedding of {len(graph)} nodes and {graph.number_of_edges()} edges "
            f"in a {topology} graph of size {size}; try a larger one or another seed"
        )
    return {node: tuple(chains[node]) for node in sorted(chains)}, target


def chain_lengths(embedding: Mapping[int, Sized]) -> list[int]:
    """The number of qubits of each node's chain, in the order of the embedding.

    Example:
        >>> chain_lengths({0: (5,), 1: (2, 7)})
        [1, 2]
    """
    return [len(chain) for chain in embedding.values()]
