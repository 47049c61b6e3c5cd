import importlib.util
import itertools
import math
import subprocess
import sys
from dataclasses import replace

import dimod
import pytest
import torch
from dwave.samplers import SimulatedAnnealingSampler

import spingrad_lab.analysis.spectra as spectra
from spingrad import BinaryQuadratic
from spingrad.solvers import ExactSolver
from spingrad.testing import random_problem
from spingrad_lab.analysis import (
    all_energies,
    all_spins,
    annealing_spectrum,
    chain_lengths,
    find_embedding,
    ground_degeneracy,
    jaccard,
    logical_graph,
    same_direction,
    sampled,
    spectral_gap,
    z_value,
)

needs_scipy = pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="needs scipy")


def problem_with_everything(r=4, n=6, m=3, seed=0):
    """Fields of their own and an offset for each unit."""
    H = torch.randn(n, m, generator=torch.Generator().manual_seed(seed + 1))
    return replace(random_problem(r=r, n=n, m=m, seed=seed), H=H, offset=torch.arange(m) + 0.5)


def symmetric_problem(n, seed=0):
    """Two spins that nothing acts on, three that may trade places, and no preferred sign."""
    Z = random_problem(r=4, n=n, m=1, seed=seed).double().Z.clone()
    Z[:, :2], Z[:, 3:5] = 0, Z[:, 2:3]
    return BinaryQuadratic.least_squares(Z, torch.zeros(4, 1).double())


def energies_without_offset(problem, unit):
    return all_energies(problem, unit) - problem.double().to_ising(unit)[2]


def test_importing_the_package_imports_no_extra():
    extras = "{'scipy', 'matplotlib', 'minorminer', 'networkx'}"
    code = f"import sys, spingrad_lab.analysis; assert not {extras} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_spins_holds_every_vector_once():
    rows = {tuple(row) for row in all_spins(4).tolist()}
    assert rows == set(itertools.product((-1.0, 1.0), repeat=4))


@pytest.mark.parametrize("n", [0, 21])
def test_enumeration_refuses_what_it_cannot_hold(n):
    with pytest.raises(ValueError, match=f"1 to 20 spins, got {n}"):
        all_spins(n)
    with pytest.raises(ValueError, match=f"1 to 20 spins, got {n}"):
        all_energies(BinaryQuadratic.least_squares(torch.ones(1, n), torch.ones(1, 1)))


@pytest.mark.parametrize("r", [4, 9])  # below and above the number of spins
@pytest.mark.parametrize("unit", [0, 2])
def test_all_energies_are_those_of_the_problem(r, unit, monkeypatch):
    monkeypatch.setattr("spingrad_lab.analysis.energies.CHUNK", 24)  # does not divide 64
    problem = problem_with_everything(r=r)
    expected = [problem.double().energy(s[:, None].expand(-1, 3))[unit] for s in all_spins(6)]
    torch.testing.assert_close(all_energies(problem, unit), torch.stack(expected))


def test_the_lowest_energy_is_that_of_the_exact_solver():
    problem = random_problem(r=8, n=14, m=2, seed=3).double()
    lowest = torch.stack([all_energies(problem, unit).min() for unit in range(2)])
    torch.testing.assert_close(lowest, ExactSolver().solve(problem).energy)


def test_sampled_energies_are_sorted_and_belong_to_their_spins():
    problem = problem_with_everything()
    spins, energies = sampled(
        problem, 1, SimulatedAnnealingSampler(), num_reads=30, num_sweeps=1, beta_range=[0.01, 0.02], seed=1
    )
    assert spins.shape == (30, 6)
    assert energies.unique().numel() > 5
    assert (energies.diff() >= 0).all()
    expected = [problem.double().energy(s[:, None].expand(-1, 3))[1] for s in spins]
    torch.testing.assert_close(energies, torch.stack(expected))


def test_a_sample_counts_as_often_as_it_occurred():
    class Fixed:
        def sample(self, bqm):
            samples = ([[1, -1], [-1, -1]], [1, 0])  # the variables in another order
            return dimod.SampleSet.from_samples(
                samples, "SPIN", energy=[7, 8], num_occurrences=[1, 3], sort_labels=False
            )

    problem = BinaryQuadratic.least_squares(torch.eye(2), torch.tensor([[-3.0], [2.0]]))
    spins, energies = sampled(problem, 0, Fixed())
    assert spins.tolist() == [[-1, 1], [-1, -1], [-1, -1], [-1, -1]]
    assert energies.tolist() == [5, 13, 13, 13]


def test_jaccard_compares_the_sets_of_up_spins():
    spins = torch.tensor([[1, 1, -1, -1], [-1, 1, 1, 1], [-1, -1, -1, -1], [-1, -1, -1, -1]])
    expected = [[1, 0.25, 0, 0], [0.25, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert jaccard(spins).tolist() == expected


@needs_scipy
def test_an_anneal_starts_with_the_levels_of_the_transverse_field():
    levels = annealing_spectrum(problem_with_everything(n=2), [0, 2], [0.0], 16)[0]
    assert levels.tolist() == [-4] + 4 * [-2] + 6 * [0] + 4 * [2] + [4]


@needs_scipy
def test_an_anneal_ends_with_the_energies_of_the_problem():
    problem = problem_with_everything(n=3)
    one, two = (energies_without_offset(problem, unit) for unit in (0, 2))
    expected = (one[:, None] + two).flatten().sort().values
    torch.testing.assert_close(annealing_spectrum(problem, [0, 2], [1.0], 64)[0], expected)


@needs_scipy
@pytest.mark.parametrize("s", [0.0, 0.4, 1.0])
def test_the_levels_of_two_units_are_those_of_their_joint_matrix(s):
    problem = problem_with_everything(n=2)
    x, one = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double(), torch.eye(2).double()
    energies = energies_without_offset(problem, 0)[:, None] + energies_without_offset(problem, 1)
    H = torch.diag(s * energies.flatten())
    for qubit in range(4):
        factors = [x if qubit == i else one for i in range(4)]
        H -= (1 - s) * torch.kron(torch.kron(torch.kron(*factors[:2]), factors[2]), factors[3])
    torch.testing.assert_close(annealing_spectrum(problem, [0, 1], [s], 16)[0], torch.linalg.eigvalsh(H))


@needs_scipy
@pytest.mark.parametrize("make", [random_problem, symmetric_problem])
def test_the_sparse_and_the_dense_spectrum_agree_in_every_multiplicity(make, monkeypatch):
    problem = make(n=7, seed=0) if make is symmetric_problem else make(r=4, n=7, m=1, seed=0)
    fractions = [0.0, 0.01, 0.5, 0.99, 1.0]
    dense = annealing_spectrum(problem, [0], fractions, 12)
    monkeypatch.setattr(spectra, "DENSE_QUBITS", 0)
    torch.testing.assert_close(annealing_spectrum(problem, [0], fractions, 12), dense)


@needs_scipy
def test_a_normalized_problem_has_a_largest_coefficient_of_one():
    problem = problem_with_everything(n=3)
    large = replace(problem, Z=10 * problem.Z, H=100 * problem.H)
    levels = [annealing_spectrum(p, [0, 1], [0.3, 1.0], 5, normalize=True) for p in (problem, large)]
    torch.testing.assert_close(*levels)
    single = BinaryQuadratic.least_squares(torch.tensor([[2.0]]), torch.tensor([[3.0]]))  # h = -12
    assert annealing_spectrum(single, [0], [1.0], 2, normalize=True).tolist() == [[-1, 1]]


@needs_scipy
def test_the_gap_of_one_spin_has_a_closed_form():
    z, v = 0.5, 0.75  # h = -2 z v, so E = ±√((1-s)² + s² h²), least at s = 1 / (1 + h²)
    h = 2 * z * v
    fractions = [0.0, 0.3, 1 / (1 + h**2), 0.9, 1.0]
    spectrum = annealing_spectrum(
        BinaryQuadratic.least_squares(torch.tensor([[z]]), torch.tensor([[v]])), [0], fractions, 2
    )
    expected = [math.hypot(1 - s, s * h) for s in fractions]
    torch.testing.assert_close(
        spectrum, torch.tensor([[-e, e] for e in expected]).double(), rtol=1e-6, atol=0
    )
    gap, row = spectral_gap(spectrum, degeneracy=1)
    assert gap == pytest.approx(2 * h / math.sqrt(1 + h**2))
    assert row == 2


def test_a_gap_needs_a_level_above_the_ground_state():
    with pytest.raises(ValueError, match="level 3 is not above the ground state among 3 levels"):
        spectral_gap(torch.zeros(2, 3), degeneracy=3)


def test_ground_degeneracy_multiplies_over_units_and_respects_the_tolerance():
    # In the first unit a field sets the lowest two energies 0.25 apart; the second unit is free.
    fields = torch.tensor([[0.0625, 0.0], [1.0, 0.0]])
    problem = BinaryQuadratic.of(torch.zeros(1, 2), fields)
    assert ground_degeneracy(problem, [0], 1e-9) == 1
    assert ground_degeneracy(problem, [0, 1], 1e-9) == 4
    assert ground_degeneracy(problem, [0, 1], 0.25) == 8
    assert ground_degeneracy(problem, [0, 0], 0.25) == 3  # both up, or either unit a quarter above


@pytest.mark.parametrize(
    ("units", "fractions", "num_levels", "message"),
    [
        ([0, 1, 2], [0.5], 1, "16 qubits, got 3 units of 6 spins"),
        ([], [0.5], 1, "16 qubits, got 0 units"),
        ([0], [1.5], 1, "between 0 and 1"),
        ([0], [0.5], 65, "1 to 64 levels, got 65"),
    ],
)
def test_a_spectrum_refuses_what_it_cannot_give(units, fractions, num_levels, message):
    with pytest.raises(ValueError, match=message):
        annealing_spectrum(problem_with_everything(), units, fractions, num_levels)


def test_zeros_of_the_gradient_have_no_direction():
    move = torch.tensor([[1.0, 1.0, -1.0], [-1.0, 1.0, -1.0]])
    gradient = torch.tensor([[0.1, -3.0, -1e-30], [0.0, 0.0, 2.0]])
    assert same_direction(move, gradient) == (2, 4)


@pytest.mark.parametrize(
    ("same", "total", "published"),
    [
        (2285, 3915, 10.4),
        (2199, 3647, 12.4),
        (2311, 3886, 11.8),
        (2334, 3984, 10.8),
        (2356, 3990, 11.4),
        (2334, 4626, 0.61),
        (732, 1176, 8.39),
        (339, 630, 1.91),
        (2559, 4702, 6.06),
        (2103, 4683, -6.9),
    ],
)
def test_z_values_are_the_papers(same, total, published):
    digits = 2 if f"{published}"[-3] == "." else 1
    assert math.trunc(z_value(same, total) * 10**digits) == round(published * 10**digits)  # it cuts off


def test_a_z_value_needs_comparisons():
    with pytest.raises(ValueError, match="total is positive, got 0 and 0"):
        z_value(0, 0)


def test_the_logical_graph_holds_the_couplings_of_the_ising_form():
    problem = BinaryQuadratic.least_squares(
        torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.25]]), torch.ones(2, 1)
    )
    assert logical_graph(problem).adj == {
        0: {1: {"weight": 4.0}},
        1: {0: {"weight": 4.0}, 2: {"weight": 0.5}},
        2: {1: {"weight": 0.5}},
    }
    graph = logical_graph(problem, tolerance=0.5)
    assert list(graph.nodes) == [0, 1, 2]
    assert list(graph.edges) == [(0, 1)]


@pytest.mark.parametrize("topology", ["pegasus", "zephyr"])
def test_an_embedding_is_valid(topology):
    pytest.importorskip("minorminer")
    from dwave.embedding import verify_embedding

    problem = random_problem(r=3, n=12, m=1, seed=0)
    Z = problem.Z.clone()
    Z[:, 0] = 0  # a spin that nothing couples to still needs a qubit
    graph = logical_graph(replace(problem, Z=Z))
    embedding, target = find_embedding(graph, topology, size=3)
    assert target.graph["family"] == topology
    assert list(embedding) == list(range(12))
    assert verify_embedding(embedding, graph, target)
    lengths = chain_lengths(embedding)
    assert lengths[0] == 1
    assert sum(lengths) == len({qubit for chain in embedding.values() for qubit in chain}) > 12


def test_an_impossible_embedding_is_an_error():
    pytest.importorskip("minorminer")
    graph = logical_graph(random_problem(r=3, n=30, m=1, seed=0))
    with pytest.raises(
        RuntimeError, match="no embedding of 30 nodes and 435 edges in a zephyr graph of size 1"
    ):
        find_embedding(graph, "zephyr", size=1)


def test_a_missing_extra_is_named(monkeypatch):
    problem = random_problem(r=3, n=3, m=1, seed=0)
    monkeypatch.setitem(sys.modules, "minorminer", None)
    with pytest.raises(ImportError, match=r'pip install "spingrad\[qpu\]"'):
        find_embedding(logical_graph(problem))
