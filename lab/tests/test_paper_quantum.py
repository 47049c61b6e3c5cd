import itertools
import json

import pytest
import torch

from spingrad.solvers import ExactSolver
from spingrad.testing import random_problem
from spingrad_lab.analysis import all_energies, all_spins
from spingrad_lab.paper import embedding, layer_problems, qubo_evolution, sampling, spectral_gap
from spingrad_lab.runs import Lab, read_lines, seeded, to_frame
from spingrad_lab.tasks.small import Digits12

EXPERIMENTS = {
    "energy-histogram": sampling.ENERGY_HISTOGRAM,
    "similarity": sampling.SIMILARITY,
    "qubo-evolution": qubo_evolution.QUBO_EVOLUTION,
    "embedding": embedding.EMBEDDING,
    "spectral-gap": spectral_gap.SPECTRAL_GAP,
}


@pytest.fixture(scope="module")
def snapshots(data_folder):
    """The first 21 problems of a network on digits."""
    with seeded(0):
        task = Digits12(0, False, True)
        return list(itertools.islice(layer_problems.snapshots(task, 0), 21))


@pytest.fixture(scope="module")
def lines(data_folder, tmp_path_factory):
    """Lines of each experiment's quick plan, read back from file."""
    folder = tmp_path_factory.mktemp("quantum")
    for name, experiment in EXPERIMENTS.items():
        if name == "embedding":
            pytest.importorskip("minorminer")
        seeds = 2 if name == "qubo-evolution" else 1  # with and without an interval
        experiment.plan(Lab(name, experiment, folder, quick=True, seeds=seeds, workers=0))
    return {name: read_lines(folder / f"{name}.jsonl") for name in EXPERIMENTS}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_lines_are_enough_to_show(name, lines):
    section = EXPERIMENTS[name].show(to_frame(lines[name]))
    assert section.notes
    for table in section.tables:
        assert all(len(row) == len(table.header) for row in table.rows)
    assert all(figure.svg.startswith("<svg") for figure in section.figures)
    text = " ".join(section.notes) + "".join(table.to_markdown() for table in section.tables)
    assert "nan" not in text.split()
    assert max(len(json.dumps(vars(line))) for line in lines[name]) < 30_000


def test_a_run_with_the_same_seed_measures_the_same(lines):
    line = lines["qubo-evolution"][0]
    again = qubo_evolution.QUBO_EVOLUTION.compute(line.job)
    assert json.loads(json.dumps(again)) == line.metrics


def test_snapshots_are_of_sixteen_spins_and_four_units(snapshots):
    assert [snapshot.update for snapshot in snapshots] == list(range(21))
    for snapshot in snapshots:
        for problem in snapshot.problems.values():
            assert (problem.num_spins, problem.num_units) == (16, 4)


@pytest.mark.parametrize("name", layer_problems.POSINGS)
def test_the_marked_optimum_is_that_of_the_exact_solver(name, snapshots):
    for snapshot in snapshots[::10]:
        problem = snapshot.problems[name].double()
        metrics = sampling.ENERGY_HISTOGRAM.measure(problem, snapshot.unit, seed=0)
        exact = float(ExactSolver().solve(problem).energy[snapshot.unit])
        assert metrics["optimum"] == pytest.approx(exact, rel=1e-9)
        assert sum(metrics["reads"]) == sampling.NUM_READS


@pytest.mark.parametrize("seed", range(3))
def test_qubo_matrix_gives_energy_differences_for_all_bits(seed):
    problem = random_problem(r=4, n=6, m=2, seed=seed).double()
    Q = qubo_evolution.qubo_matrix(problem, unit=1)
    torch.testing.assert_close(Q, Q.T)
    ground = problem.energy(-torch.ones(6, 2, dtype=torch.float64))[1]
    for bits in itertools.product((0.0, 1.0), repeat=6):
        b = torch.tensor(bits, dtype=torch.float64)
        spins = (2 * b - 1)[:, None].expand(6, 2)
        torch.testing.assert_close(b @ Q @ b, problem.energy(spins)[1] - ground)


def test_lowest_states_are_distinct_and_no_other_is_lower():
    problem = random_problem(r=4, n=8, m=1, seed=0)
    energies = all_energies(problem)
    spins = all_spins(8)
    repeated, doubled = torch.cat([spins, spins]), torch.cat([energies, energies])
    generator = torch.Generator().manual_seed(0)
    lowest = sampling.lowest(repeated, doubled, 10, 1e-9, generator)
    assert len(lowest.unique(dim=0)) == 10
    torch.testing.assert_close(problem.double().energy(lowest.T.contiguous()[:, :1]), energies.min()[None])
    found = torch.stack([problem.double().energy(row[:, None])[0] for row in lowest])
    torch.testing.assert_close(found, energies.sort().values[:10])


def test_gap_of_units_without_a_common_term_is_the_smallest_of_theirs(lines):
    for line in lines["spectral-gap"]:
        for name in layer_problems.POSINGS:
            own, together = line.metrics[name]["own"], line.metrics[name]["plain"]
            for count, (gap, _, degeneracy) in enumerate(together, 1):
                if degeneracy == 1:
                    assert gap == pytest.approx(min(own[:count]), rel=1e-4)


def test_chains_of_the_drawn_embedding_are_connected_and_carry_every_coupling(lines):
    networkx = pytest.importorskip("networkx")
    layer = next(line.metrics for line in lines["embedding"] if line.job["stage"] == "layer")
    chip = networkx.Graph(layer["couplers"])
    for chain in layer["chains"]:
        assert len(chain) == 1 or networkx.is_connected(chip.subgraph(chain))
    for i, j, _ in layer["couplings"]:
        pairs = itertools.product(layer["chains"][i], layer["chains"][j])
        assert any(chip.has_edge(a, b) for a, b in pairs)
