"""The operators of descent and annealing: one meaning, whichever kernel computes them."""

import itertools

import pytest
import torch

from spingrad.kernels import cpu, operators, plain

OPERATORS = torch.ops.spingrad
DTYPES = [torch.float32, torch.float64]


def random_numbers(r, n, m, seed, groups=(), start=False):
    """Rows, fields and spins to begin at, with units without fields and inputs that are always zero."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(*groups, r, n, generator=generator) / n**0.5
    H = torch.randn(*groups, m, n, generator=generator)
    Z[..., ::7], H[..., ::5, :] = 0, 0
    G = torch.randint(-1, 2, H.shape, generator=generator).float()
    return Z, H, G if start else torch.full_like(H, 7.0)


def whole_numbers(r, n, m, seed, groups=(), start=False):
    """As :func:`random_numbers`, but no sum is rounded, and many fields are zero."""
    Z, H, G = random_numbers(r, n, m, seed, groups, start)
    return (Z * 2 * n**0.5).round(), (H * 3).round(), G


def noise_for(H, reads, sweeps, seed):
    """Whole numbers and places for an annealing."""
    generator = torch.Generator().manual_seed(seed)
    wide = 32 * (-(-H.shape[1] // 4) * 4)
    noise = torch.randint(-4, 5, (500 + wide,), generator=generator).to(H)
    return noise, torch.randint(500, (-(-len(H) // 32), reads, sweeps), generator=generator)


def descended(module, Z, H, G, sweeps, started):
    found = G.clone()
    module.descend_(Z, H, found, sweeps, started)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [(), (3,)])
@pytest.mark.parametrize("started", [False, True])
def test_opcheck_passes_for_descent(dtype, groups, started):
    Z, H, G = (own.to(dtype) for own in random_numbers(4, 6, 5, 0, groups, started))
    transposed = H.mT.contiguous().mT
    for rows, fields in ((Z, H), (Z, transposed), (Z.requires_grad_(), H.requires_grad_())):
        torch.library.opcheck(OPERATORS.descend_.default, (rows, fields, G.clone(), 2, started))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_passes_for_annealing(dtype):
    Z, H, G = (own.to(dtype) for own in random_numbers(4, 6, 5, 0, start=True))
    noise, places = noise_for(H, 2, 3, 0)
    transposed = H.mT.contiguous().mT
    for rows, fields in ((Z, H), (Z, transposed), (Z.requires_grad_(), H.requires_grad_())):
        arguments = (rows, fields, G.clone(), [1.0, 0.5, 0.1], noise, places, True)
        torch.library.opcheck(OPERATORS.anneal_.default, arguments)


@pytest.mark.needs("numba")
@pytest.mark.parametrize("groups", [(), (4,)])
def test_numba_sets_the_spins_of_torch_bit_for_bit_where_nothing_is_rounded(groups):
    for seed, (r, n, m) in enumerate(itertools.product((0, 1, 5, 70), (1, 30, 65), (1, 40))):
        Z, H, G = whole_numbers(r, n, m, seed, groups, start=bool(seed % 2))
        for numbers in ((Z, H, G), (Z.double(), H.double(), G.double())):
            expected = descended(plain, *numbers, 3, bool(seed % 2))
            assert torch.equal(descended(cpu, *numbers, 3, bool(seed % 2)), expected)


def spins_that_differ(problems):
    """Between numba and torch after two sweeps, and of how many; the first ones of each unit are ties."""
    different = total = 0
    for seed, (r, n, m) in enumerate(problems):
        Z, H, G = random_numbers(r, n, m, seed)
        found, expected = (descended(module, Z, H, G, 2, False) for module in (cpu, plain))
        units = (found != expected).any(1).nonzero().flatten().tolist()
        first_sweeps = [descended(module, Z, H, G, 1, False) for module in (cpu, plain) if units]
        for unit in units:
            once, other = (spins[unit] for spins in first_sweeps)
            if torch.equal(once, other):
                old, new, other = once, found[unit], expected[unit]  # they part in the second sweep
            else:
                old, new = torch.zeros_like(once), once
            first = int((new != other).nonzero()[0])
            spins = torch.cat([new[:first], torch.zeros(1), old[first + 1 :]]).double()
            field = H[unit, first] - Z[:, first].double() @ (Z.double() @ spins)
            assert abs(float(field)) < 1e-5
        different, total = different + int((found != expected).sum()), total + found.numel()
    return different, total


def sizes(count, most_spins, most_units):
    """Of random problems of 1 to 64 directions."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        yield tuple(
            int(torch.randint(1, most + 1, (), generator=generator)) for most in (64, most_spins, most_units)
        )


@pytest.mark.needs("numba")
def test_numba_and_torch_differ_in_ties_alone():
    different, total = spins_that_differ(sizes(30, 300, 100))
    assert different < 1e-4 * total


@pytest.mark.long
@pytest.mark.needs("numba")
def test_numba_and_torch_differ_in_ties_alone_on_large_problems(capsys):
    different, total = spins_that_differ(sizes(200, 5_000, 300))
    with capsys.disabled():
        print(f"{different} of {total} spins differ")
    assert different < 1e-4 * total


@pytest.mark.needs("numba")
@pytest.mark.parametrize("started", [False, True])
def test_annealing_by_numba_sets_the_spins_of_torch_where_nothing_is_rounded(started):
    for seed, (r, n, m) in enumerate(itertools.product((1, 5, 20), (1, 30, 47), (1, 40))):
        Z, H, G = whole_numbers(r, n, m, seed, start=True)
        noise, places = noise_for(H, 3, 2, seed)
        G = torch.where(G >= 0, 1.0, -1.0)
        found, expected = G.clone(), G.clone()
        for module, own in ((cpu, found), (plain, expected)):
            module.anneal_(Z, H, own, [2.0, 1.0], noise, places, started)
        assert torch.equal(found, expected)


def test_all_sizes_and_layouts_of_the_spins_are_taken():
    Z, H, _ = whole_numbers(3, 20, 10, 0)
    expected = descended(plain, Z, H, H, 2, False)
    for G in (torch.empty(10, 36)[:, :-16], torch.empty(20, 10).T):
        operators.descend_(Z, H, G, 2)
        assert torch.equal(G, expected)
    operators.descend_(Z, H[:0], H[:0].clone(), 2)
