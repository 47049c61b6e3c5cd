"""Places cliques side by side on a chip: every unit of a layer is a fully coupled problem."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from spingrad._files import FileFormatError, cache_folder, read_record, to_line, write_atomically
from spingrad.qpu.chip import Chip, client_module

Clique = list[list[int]]
"""One chain of qubits for each spin of a unit; any two chains are coupled."""

FIRST_LINE = b'{"format": "spingrad layout", "version": 1}\n'
LARGEST = 4 * 2**20  # bytes of a layout on disk; a full chip takes 50 kB
NATIVE = 4  # in both families, up to four qubits can be fully coupled without chains


def fill(chip: Chip, counts: Mapping[int, int], cache: Path | None = None) -> list[Clique]:
    """As many of the wanted cliques as fit on the chip together, large ones first.

    Args:
        chip: The working graph.
        counts: How many cliques of each size are wanted.
        cache: Folder that keeps layouts between runs; by default in the user's cache.

    Raises:
        ValueError: Not even one clique of the largest size fits.
        FileFormatError: The cache has a file in this place that spingrad did not write; it was left as it is.
    """
    wanted = {size: count for size, count in sorted(counts.items(), reverse=True) if count > 0}
    name = "-".join(f"{size}x{count}" for size, count in wanted.items())
    path = (cache or cache_folder() / "layouts") / chip.key / f"{name}.jsonl"
    kept = _kept(path)
    if is_layout(kept, chip, wanted):
        return kept
    cliques = list(_search(chip, wanted))
    write_atomically(path, to_file(cliques))
    return cliques


def pages(chip: Chip, counts: Mapping[int, int], cache: Path | None = None) -> list[list[Clique]]:
    """The cliques of every call, enough calls for all cliques.

    The search rounds sizes up and the surplus chains are dropped, so that networks of similar widths share
    layouts. Calls with equal cliques share one search.
    """
    waiting = {size: count for size, count in sorted(counts.items(), reverse=True) if count}
    result: list[list[Clique]] = []
    page: list[Clique] = []
    while waiting:
        left: Counter[int] = Counter()
        for size, count in waiting.items():
            left[_rounded(size)] += count
        held = Counter(len(clique) for clique in page)
        if any(left[size] > held[size] for size in left):
            page = fill(chip, left, cache)
            held = Counter(len(clique) for clique in page)
        for _ in range(max(1, min(left[size] // held[size] for size in held))):
            result.append(_cut(page, waiting))
    return result


def _rounded(size: int) -> int:
    return size if size <= NATIVE else -(-size // 4) * 4


def _cut(page: list[Clique], waiting: dict[int, int]) -> list[Clique]:
    """Shorten the cliques of a page to sizes that are still wanted, and subtract them from ``waiting``."""
    cut = []
    for clique in page:
        size = next((size for size in waiting if _rounded(size) == len(clique)), None)
        if size is not None:
            cut.append(clique[:size])
            waiting[size] -= 1
            if not waiting[size]:
                del waiting[size]
    return cut


def _search(chip: Chip, wanted: Mapping[int, int]) -> Iterator[Clique]:
    graph = _working_graph(chip)
    free = set(graph)
    for size, count in wanted.items():
        native = size <= NATIVE
        search = _native_cliques(graph, free, size) if native else _chained_cliques(chip, graph, free, size)
        found = 0
        for clique in search:
            yield clique
            found += 1
            if found == count:
                break
        if not found and size == max(wanted):
            raise ValueError(
                f"{chip.name} ({len(free)} working qubits) has no room for a clique of {size} spins; "
                "choose a smaller block_size"
            )


def _native_cliques(graph: Any, free: set[int], size: int) -> Iterator[Clique]:
    """Cliques without chains: qubits that are all coupled to one another."""

    def extend(chosen: list[int], candidates: list[int]) -> list[int] | None:
        if len(chosen) == size:
            return chosen
        for i, qubit in enumerate(candidates):
            later = [other for other in candidates[i + 1 :] if graph.has_edge(qubit, other)]
            if (result := extend([*chosen, qubit], later)) is not None:
                return result
        return None

    for qubit in sorted(free):
        while qubit in free:
            qubits = extend([qubit], sorted(free.intersection(graph[qubit])))
            if qubits is None:
                break
            free.difference_update(qubits)
            yield [[q] for q in qubits]


def _chained_cliques(chip: Chip, graph: Any, free: set[int], size: int) -> Iterator[Clique]:
    """Cliques by D-Wave's busclique, searched in small tiles of the chip so that many fit side by side."""
    asked = max(size, 9) if chip.topology == "zephyr" else size  # busclique runs out of memory for 5 to 8
    for shape in range(_tile_size(chip, asked), chip.size + 1):
        found = False
        for tile, to_chip in _tiles(chip, shape):
            while chains := _clique_in(tile, to_chip, graph, free, asked):
                clique = [[to_chip[q] for q in chain] for chain in chains[:size]]
                free.difference_update(q for chain in clique for q in chain)
                found = True
                yield clique
        if found:  # larger tiles would find hardly any more
            return


def _tile_size(chip: Chip, size: int) -> int:
    """Size of the smallest lattice of the family that has a clique of this size."""
    if chip.topology == "zephyr":
        return -(-(size + 8) // 16)
    return 2 if size <= 10 else 1 - (-size // 12)


def _tiles(chip: Chip, shape: int) -> Iterator[tuple[Any, dict[int, int]]]:
    """A small lattice with every embedding of it into the chip's lattice, those without overlap first."""
    lattices = lattice_module()
    build, mappings = (
        getattr(lattices, f"{chip.topology}_{part}") for part in ("graph", "sublattice_mappings")
    )
    tile, stride = build(shape), max(shape - 1, 1)
    places = sorted(
        mappings(tile, build(chip.size)), key=lambda to: (any(o % stride for o in to.offset[-2:]), to.offset)
    )
    for to_chip in places:
        yield tile, {qubit: int(to_chip(qubit)) for qubit in tile}


def _clique_in(tile: Any, to_chip: dict[int, int], graph: Any, free: set[int], size: int) -> Clique:
    here = [qubit for qubit in tile if to_chip[qubit] in free]
    if len(here) < size:
        return []
    part = tile.subgraph(here).copy()
    part.remove_edges_from([(a, b) for a, b in part.edges if not graph.has_edge(to_chip[a], to_chip[b])])
    busclique = client_module("minorminer.busclique")
    chains = busclique.find_clique_embedding(size, part, seed=0, use_cache=False)  # the cache is a pickle
    return [list(chains[i]) for i in range(len(chains))]


def _working_graph(chip: Chip) -> Any:
    networkx = client_module("networkx")
    graph = networkx.Graph()
    graph.add_nodes_from(chip.qubits.tolist())
    graph.add_edges_from(chip.couplers.tolist())
    return graph


def lattice_module() -> Any:
    """D-Wave's module of lattice graphs, under the name that is installed."""
    try:
        return client_module("dwave.graphs")
    except ImportError:  # the name in older releases of dwave-system
        return client_module("dwave_networkx")


def to_file(cliques: Any) -> bytes:
    """The file of a layout: a first line that says what it is, and a second one with a checksum."""
    return FIRST_LINE + to_line(json.dumps(cliques).encode())


def _kept(path: Path) -> Any:
    """What the cache holds, to be checked by ``is_layout``; ``None`` if it is nothing or damaged."""
    if not path.exists():
        return None
    start = b"no file"
    if path.is_file():  # a pipe would not end
        with open(path, "rb") as file:
            start = file.read(len(FIRST_LINE))
    if start and start != FIRST_LINE:
        raise FileFormatError(
            f"expected a layout that spingrad has cached, {path} is something else. It was not changed; move "
            "it away, and a new layout is made"
        )
    try:
        return read_record(path, FIRST_LINE, LARGEST)
    except (ValueError, RecursionError):
        return None


def is_layout(cliques: Any, chip: Chip, wanted: Mapping[int, int]) -> TypeGuard[list[Clique]]:
    """Whether these are wanted cliques that can be on the chip together, at least one of the largest size."""
    if not isinstance(cliques, list) or not all(_is_list_of_chains(clique) for clique in cliques):
        return False
    sizes = Counter(len(clique) for clique in cliques)
    if not sizes[max(wanted)] or any(count > wanted.get(size, 0) for size, count in sizes.items()):
        return False
    qubits = [qubit for clique in cliques for chain in clique for qubit in chain]
    if len(set(qubits)) < len(qubits) or not chip.neighbors.keys() >= set(qubits):
        return False
    return all(_is_clique(clique, chip) for clique in cliques)


def _is_list_of_chains(clique: Any) -> bool:
    return isinstance(clique, list) and all(
        isinstance(chain, list) and chain and all(type(qubit) is int for qubit in chain) for chain in clique
    )


def _is_clique(clique: Clique, chip: Chip) -> bool:
    """Whether every chain is connected and coupled to every other chain."""
    chain_of = {qubit: i for i, chain in enumerate(clique) for qubit in chain}
    for own, chain in enumerate(clique):
        touched = {chain_of.get(other) for qubit in chain for other in chip.neighbors[qubit]}
        if not touched >= set(range(len(clique))) - {own} or not _is_connected(chain, chip):
            return False
    return True


def _is_connected(chain: list[int], chip: Chip) -> bool:
    rest, reached = set(chain[1:]), [chain[0]]
    while reached:
        found = chip.neighbors[reached.pop()] & rest
        rest -= found
        reached += found
    return not rest
