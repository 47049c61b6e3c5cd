"""The compiled kernel of descent beside the same descent in torch."""

import itertools

import pytest
import torch

from spingrad import BinaryQuadratic
from spingrad.kernels import cpu, plain
from spingrad.kernels.compiled import HAS_NUMBA
from spingrad.solvers import BlockDescentSolver

pytestmark = pytest.mark.skipif(not HAS_NUMBA, reason="needs the extra fast")
SIZES = {
    "whole vectors": (64, 256, 8),
    "parts of vectors": (70, 133, 64),
    "one unit": (1, 50, 12),
    "one spin": (40, 1, 3),
    "more rows than spins": (33, 6, 64),
    "one row": (20, 35, 1),
    "no rows": (5, 9, 0),
}


def whole_numbers(m, n, k, seed=0):
    """Rows and fields with which single precision does not round: two orders of addition give one result."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randint(-2, 3, (k, n), generator=generator).float()
    return Z, torch.randint(-3 * k - 1, 3 * k + 2, (m, n), generator=generator).float()


def trained(m, n, k, seed=0):
    """Rows as in a trained layer: a few directions lead, inputs are clamped, and some are always zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(128, 6, generator=generator) @ torch.randn(6, n, generator=generator)
    x = (x + torch.randn(128, n, generator=generator)).clamp(-1, 1)
    x[:, ::7] = 0
    V = torch.randn(128, m, generator=generator) * (x[:, :1] + 1)
    _, strength, directions = torch.linalg.svd(x / n, full_matrices=False)
    return strength[:k, None] * directions[:k], V.T @ x / n


def by_kernel(Z, H, num_sweeps, start=None):
    G = torch.full((len(H), H.shape[1] + 16), 7.0)[:, :-16] if start is None else start.clone()
    cpu.descend_(Z, H, G, num_sweeps, start is not None)
    return G


def by_torch(Z, H, num_sweeps):
    """In double precision."""
    G = torch.empty_like(H.double())
    plain.descend_(Z.double(), H.double(), G, num_sweeps)
    return G.float()


def energy(Z, H, G):  # -> (m,)
    return BinaryQuadratic.of(Z.double(), H.double().T).energy(G.double().T)


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_returns_the_spins_of_the_reference(size):
    Z, H = whole_numbers(*SIZES[size])
    for num_sweeps in (1, 2, 20):
        assert torch.equal(by_kernel(Z, H, num_sweeps), by_torch(Z, H, num_sweeps))


def test_zeros_and_ties_give_the_spins_of_the_reference():
    Z, H = whole_numbers(40, 37, 16)
    Z[:, 3:9] = 0
    Z[:, 11] = Z[:, 12]
    H[:, 5], H[7] = 0, 0
    for rows in (Z, torch.zeros_like(Z), torch.zeros_like(Z).index_fill_(1, torch.tensor([36]), 1.0)):
        for fields in (H, torch.zeros_like(H)):
            assert torch.equal(by_kernel(rows, fields, 3), by_torch(rows, fields, 3))


@pytest.mark.parametrize("k", [8, 32, 64])
def test_on_a_trained_layer_the_kernel_is_as_good_as_the_reference(k):
    Z, H = trained(90, 250, k)
    for num_sweeps in (1, 2, 4):
        found, expected = by_kernel(Z, H, num_sweeps), by_torch(Z, H, num_sweeps)
        assert (found == expected).float().mean() > 0.999
        torch.testing.assert_close(energy(Z, H, found), energy(Z, H, expected), rtol=1e-4, atol=1e-6)


def test_a_sweep_never_raises_the_energy_and_the_last_one_leaves_a_local_minimum():
    Z, H = whole_numbers(70, 90, 32)
    energies = [energy(Z, H, by_kernel(Z, H, k)) for k in (*range(1, 9), 200)]
    for before, after in itertools.pairwise(energies):
        assert (after <= before).all()
    assert (energies[1] < energies[0]).any()
    G = by_kernel(Z, H, 200)
    flip = 4 * (G * (H - G @ Z.T @ Z) + Z.square().sum(0))  # by how much each flip raises the energy
    assert (flip >= 0).all()


def test_descent_goes_on_from_given_spins():
    Z, H = whole_numbers(50, 70, 24)
    for done, more in ((1, 1), (2, 3)):
        start = by_kernel(Z, H, done)
        assert torch.equal(by_kernel(Z, H, more, start), by_kernel(Z, H, done + more))
    start = torch.where(torch.randn(50, 70, generator=torch.manual_seed(0)) > 0, 1.0, -1.0)
    found = by_kernel(Z, H, 2, start)
    assert (energy(Z, H, found) <= energy(Z, H, start)).all()


def test_threads_and_the_layout_of_the_fields_change_nothing():
    Z, H = trained(150, 60, 16)
    expected, before = by_kernel(Z, H, 3), torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert torch.equal(by_kernel(Z, H, 3), expected)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(by_kernel(Z.T.contiguous().T, H.T.contiguous().T, 3), expected)
    units = [by_kernel(Z, H[i : i + 1], 3) for i in (0, 31, 149)]
    assert torch.equal(torch.cat(units), expected[[0, 31, 149]])


def test_the_default_solver_sets_single_spins_with_few_rows_and_in_further_sweeps():
    for k, num_sweeps in ((8, 1), (64, 1), (64, 2), (100, 2)):
        Z, H = trained(40, 200, k)
        solver = BlockDescentSolver(num_sweeps)
        spins = solver.solve(BinaryQuadratic.of(Z, H.T)).spins.T
        assert torch.equal(spins, by_kernel(Z, H, num_sweeps))
