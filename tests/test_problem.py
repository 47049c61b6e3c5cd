import itertools
from dataclasses import replace

import pytest
import torch
from helpers import posed, random_target
from hypothesis import given, settings
from hypothesis import strategies as st

from spingrad import BinaryQuadratic
from spingrad.scaling import factor, leading, overlap, size_of
from spingrad.solvers import ExactSolver
from spingrad.testing import random_problem


def all_spins(n):
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64)


def test_a_problem_is_shown_in_one_line():
    problem = random_problem(r=4, n=300, m=200, seed=0)
    assert repr(problem) == "BinaryQuadratic(300 spins, 200 units, 4 rows, torch.float32, cpu)"
    resting = replace(problem, idle=torch.arange(200) < 3).double()
    assert repr(resting) == "BinaryQuadratic(300 spins, 200 units, 4 rows, 3 idle, torch.float64, cpu)"


@pytest.mark.parametrize("n", range(1, 11))
def test_energy_ising_form_and_bqm_agree_on_every_spin_vector(n):
    Z, V = random_target(r=4, n=n, m=2, seed=n, dtype=torch.float64)
    problem = BinaryQuadratic.least_squares(Z, V)
    more = torch.randn(n, 2, generator=torch.manual_seed(n)).double() * (n % 2)
    problem = replace(problem, H=problem.H + more)
    every = all_spins(n)
    for unit in range(2):
        expected = (V[:, unit] - every @ Z.T).square().sum(1) - 2 * every @ more[:, unit]
        repeated = BinaryQuadratic.of(
            problem.Z, problem.H[:, [unit]].expand(-1, len(every)), problem.offset[unit].expand(len(every))
        )
        torch.testing.assert_close(repeated.energy(every.T), expected)
        h, J, offset = problem.to_ising(unit)
        ising = every @ h + ((every @ J) * every).sum(1) + offset
        torch.testing.assert_close(ising, expected)
        bqm = problem.to_bqm(unit)
        assert list(bqm.variables) == list(range(n))
        torch.testing.assert_close(torch.from_numpy(bqm.energies(every.numpy())), expected)
        bits = (every + 1) / 2
        linear, quadratic, offset = problem.to_qubo(unit)
        torch.testing.assert_close(bits @ linear + ((bits @ quadratic) * bits).sum(1) + offset, expected)


def test_a_whole_layer_is_one_model_of_units_that_nothing_joins():
    problem = random_problem(4, 5, 3, seed=0, dtype=torch.float64)
    G = torch.randint(2, (5, 3), generator=torch.manual_seed(0)) * 2.0 - 1
    model = problem.to_bqm()
    sample = {(unit, i): int(G[i, unit]) for unit in range(3) for i in range(5)}
    assert model.energy(sample) == pytest.approx(float(problem.energy(G.double()).sum()))
    assert all(first[0] == second[0] for first, second in model.quadratic)
    for whole, name in ((problem.to_ising(), "to_ising"), (problem.to_qubo(), "to_qubo")):
        for unit in range(3):
            linear, quadratic, offset = getattr(problem, name)(unit)
            torch.testing.assert_close(
                (whole[0][:, unit], whole[1], whole[2][unit]), (linear, quadratic, offset)
            )


def test_a_layer_that_is_too_large_for_one_model_is_refused():
    problem = random_problem(2, 400, 700, seed=0)
    with pytest.raises(ValueError, match=r"700 units .* problem.units\(0, 8\).to_bqm\(\)"):
        problem.to_bqm()


def test_energies_of_1000_random_problems_are_those_of_the_least_squares_form():
    """In single precision, relative to the largest of the terms that are added."""
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed)
        r, n, m = (int(torch.randint(1, 40, (), generator=generator)) for _ in range(3))
        Z, V = random_target(r, n, m, seed)
        V = V * 10 ** (3 * torch.rand((), generator=generator) - 1.5)
        G = torch.randint(2, (n, m), generator=generator) * 2.0 - 1
        expected = (V.double() - Z.double() @ G.double()).square().sum(0)
        size = (Z.double() @ G.double()).square().sum(0) + V.double().square().sum(0)
        found = BinaryQuadratic.least_squares(Z, V).energy(G).double()
        assert ((found - expected).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("rank", [None, 3])
def test_compression_keeps_every_energy(rank):
    problem = random_problem(r=40, n=8, m=3, seed=0, rank=rank)
    small = problem.compressed()
    assert small.Z.shape == (8, 8)
    for seed in range(20):
        G = torch.randint(2, (8, 3), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
        torch.testing.assert_close(small.energy(G), problem.energy(G))
    h, J, offset = problem.to_ising(1)
    torch.testing.assert_close(small.to_ising(1), (h, J, offset), rtol=1e-4, atol=1e-4)
    assert small.compressed() is small


def test_compression_survives_nearly_dependent_patches():
    """Sixteen copies of one image differ by 1e-4: a Cholesky factor would not exist."""
    torch.manual_seed(0)
    Z = torch.randn(2000, 1) + 1e-4 * torch.randn(2000, 16)
    problem = BinaryQuadratic.least_squares(Z, torch.randn(2000, 4))
    G = torch.randint(2, (16, 4)) * 2.0 - 1
    torch.testing.assert_close(problem.compressed().energy(G), problem.energy(G))


@pytest.mark.parametrize("r", [3, 8, 30])
def test_the_lower_bound_is_never_above_the_proven_optimum(r):
    """1,008 units in all: 28 seeds of four kinds at each number of rows, three units each."""
    solver = ExactSolver()
    for seed in range(28):
        for rank, scale in ((None, 1.0), (2, 1.0), (None, 0.05), (None, 30.0)):
            Z, V = random_target(r, 10, 3, seed=seed, rank=rank, dtype=torch.float64)
            problem = BinaryQuadratic.least_squares(Z, V * scale)
            if seed % 3 == 0:
                H = torch.randn(10, 3, generator=torch.manual_seed(seed), dtype=torch.float64)
                problem = replace(problem, H=problem.H + H)
            optimum = problem.energy(solver.solve(problem).spins)
            bound = problem.lower_bound(max_iterations=100)
            assert (bound <= optimum).all()


def test_the_lower_bound_meets_the_optimum_where_spins_are_independent():
    problem = BinaryQuadratic.least_squares(
        torch.eye(6), 3 * torch.randn(6, 4, generator=torch.manual_seed(0)).sign()
    )
    optimum = problem.energy(problem.H.sign()).double()
    bound = problem.lower_bound()
    assert (bound <= optimum).all()
    torch.testing.assert_close(bound, optimum, rtol=1e-9, atol=0)


def test_the_lower_bound_of_a_tall_problem_is_rigorous_to_the_last_bit():
    for seed in range(40):
        Z, V = random_target(300, 4, 1, seed=seed, dtype=torch.float64)
        problem = BinaryQuadratic.least_squares(Z, V * 1e6)
        optimum = (1e6 * V - Z @ all_spins(4).T).square().sum(0).min()
        assert problem.lower_bound().item() <= optimum


def test_the_lower_bound_holds_however_early_it_stops():
    problem = random_problem(20, 12, 5, seed=1, dtype=torch.float64)
    optimum = ExactSolver().solve(problem).energy
    bounds = [problem.lower_bound(max_iterations=k) for k in (1, 11, 101, 1001)]
    for bound in bounds:
        assert (bound <= optimum).all()
    assert bounds[-1].sum() > bounds[0].sum()


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_the_problem_does_not_know_in_which_units_inputs_and_loss_are_measured(a, b, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    grad = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    one, other = posed(x, grad), posed(a * x, b * grad)
    torch.testing.assert_close(one.gram(), other.gram())
    torch.testing.assert_close(one.H, other.H)
    torch.testing.assert_close(one.offset, other.offset)


def test_uniform_rows_reach_one_and_published_rows_are_the_normalised_jacobian():
    x, grad = torch.tensor([[1.0, -1.0, 1.0, 1.0]]), torch.ones(1, 1)
    assert float((posed(x, grad).Z @ x.T).abs()) == pytest.approx(1)
    x, grad = torch.randn(6, 4, generator=torch.manual_seed(0)), torch.ones(6, 1)
    Z = torch.stack([row / row.norm() ** 2 for row in x])
    torch.testing.assert_close(posed(x, grad, rows="normalized").gram(), Z.T @ Z)


def test_linear_terms_have_the_asked_length_and_zero_stays_zero():
    scales = torch.tensor([1.0, 1e-5, 1e-3, 0.0])
    x, grad = torch.randn(50, 6), torch.randn(50, 4, generator=torch.manual_seed(0)) * scales
    for small in (1.0, 1e-25):  # the squares of the second underflow
        problem = posed(x, grad * small, target_rms=0.7)
        length = problem.H.square().sum(0).sqrt()
        assert float(length[:3].square().sum() / 4) ** 0.5 == pytest.approx(0.7 * (50 / 6) ** 0.5, rel=0.2)
        assert problem.idle.tolist() == [False, False, False, True]
        assert length[3] == 0
    nothing = posed(torch.randn(3, 4), torch.zeros(3, 2))
    assert not nothing.H.any()
    assert nothing.idle.all()


def test_the_rounding_error_of_a_zero_is_no_target():
    x, weight = torch.randn(20, 3), torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], requires_grad=True)
    hidden = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(hidden @ weight, torch.arange(20) % 2).backward()
    problem = posed(x, hidden.grad)
    assert problem.idle.tolist() == [False, True, False]  # the second unit says the same to both classes
    assert not problem.H[:, 1].any()


def test_sizes_of_nothing_are_zero():
    assert size_of(torch.zeros(3), torch.ones(3)).tolist() == [0, 0, 0]


def test_rows_without_a_gradient_are_left_out_of_uniform_problems_only():
    x, grad = torch.randn(4, 3), torch.randn(4, 2)
    grad[1] = 0
    others = x[[0, 2, 3]], grad[[0, 2, 3]]
    for kept in (posed(*others).gram(), posed(*others, rank=32).gram()):
        torch.testing.assert_close(posed(x, grad).gram(), kept)
    with_all = posed(x, torch.ones(4, 2), rows="normalized")
    torch.testing.assert_close(posed(x, grad, rows="normalized").gram(), with_all.gram())


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_a_factor_has_as_many_rows_as_the_matrix_has_ranks(rank):
    torch.manual_seed(0)
    rows = torch.randn(30, rank).double() @ torch.randn(rank, 12).double()
    rows[:, 4] = 0
    rows[:, 7] = rows[:, 2]
    Z = factor(gram := rows.T @ rows)
    assert Z.shape == (min(rank, 10), 12)
    torch.testing.assert_close(Z.T @ Z, gram)
    assert not Z[:, 4].any()
    torch.testing.assert_close(Z[:, 7], Z[:, 2])
    assert factor(torch.zeros(3, 3).double()).shape == (0, 3)


def test_wrong_shapes_are_explained():
    with pytest.raises(ValueError, match=r"equally many rows, got shapes \(3, 2\) and \(4, 1\)"):
        BinaryQuadratic.least_squares(torch.zeros(3, 2), torch.zeros(4, 1))


def test_what_is_no_matrix_or_has_another_dtype_is_refused_at_once():
    H = torch.ones(3, 2)
    with pytest.raises(TypeError, match="Z is a matrix, got str"):
        BinaryQuadratic.of("not a matrix", H)
    with pytest.raises(TypeError, match=r"Z is a matrix, got shape \(3,\)"):
        BinaryQuadratic.of(torch.ones(3), H)
    with pytest.raises(TypeError, match="H is a matrix, got list"):
        BinaryQuadratic.of(torch.eye(3), [[1.0]])
    with pytest.raises(TypeError, match=r"one real dtype, got torch\.float64 and torch\.float32"):
        BinaryQuadratic.of(torch.eye(3).double(), H)
    with pytest.raises(TypeError, match=r"one real dtype, got torch\.int64 and torch\.int64"):
        BinaryQuadratic.of(torch.eye(3).long(), H.long())
    with pytest.raises(TypeError, match="idle is a tensor, got NoneType"):
        BinaryQuadratic(torch.eye(3), H, torch.zeros(2), None)


@pytest.mark.parametrize(
    ("rows", "fields", "offset"),
    [(1.0, float("nan"), 0.0), (float("inf"), 1.0, 0.0), (1e25, 1.0, 0.0), (1.0, 1.0, float("nan"))],
)
def test_problems_whose_energies_are_not_finite_are_refused(rows, fields, offset):
    given = torch.full((5, 4), rows), torch.full((4, 2), fields), torch.full((2,), offset)
    with pytest.raises(ValueError, match=r"finite in torch\.float32, got a Z with the norm"):
        BinaryQuadratic.of(*given)


def test_inputs_too_large_for_single_precision_make_a_problem_in_double():
    Z, V = 1e25 * torch.ones(5, 4), 1e25 * torch.ones(5, 2)
    with pytest.raises(ValueError, match=r"make large numbers smaller or use torch\.float64"):
        BinaryQuadratic.least_squares(Z, V)
    assert (
        BinaryQuadratic.least_squares(Z.double(), V.double())
        .energy(torch.ones(4, 2).double())
        .isfinite()
        .all()
    )


def test_the_energy_between_the_spins_is_that_of_the_least_squares_form():
    Z, V, G = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 4), (5, 3), (4, 3)))
    energy = BinaryQuadratic.least_squares(Z, V).energy(G)
    torch.testing.assert_close(energy, (V - Z @ G).square().sum(0))


def test_a_unit_that_is_not_there_is_refused():
    problem = random_problem(4, 3, 2, seed=0)
    for unit in (-1, 2):
        with pytest.raises(ValueError, match="unit is a whole number"):
            problem.to_ising(unit)


def test_parts_are_the_units_in_their_order():
    problem = BinaryQuadratic.least_squares(torch.randn(3, 4), torch.randn(3, 7))
    parts = list(problem.in_parts(3))
    assert [part.num_units for part in parts] == [3, 3, 1]
    assert torch.equal(torch.cat([part.H for part in parts], 1), problem.H)
    for shapes in ((problem.H[:3], problem.offset), (problem.H, problem.offset[:3])):
        with pytest.raises(ValueError, match=r"Z has shape \(r, n\), H \(n, m\)"):
            BinaryQuadratic.of(problem.Z, *shapes)


def test_the_target_follows_what_rows_have_in_common():
    torch.manual_seed(0)
    alone, grad = torch.randn(50, 4000), torch.randn(50, 3)
    alike = torch.randn(4000) + 0.01 * alone
    for x, alike_rows in ((alone, 1), (alike, 50)):
        length = posed(x, grad, target_rms="auto", rank=32).H.square().sum(0).mean().sqrt()
        assert float(length) == pytest.approx(0.35 * (alike_rows * 50 / 4000) ** 0.5, rel=0.02)


def test_some_directions_stand_for_all():
    torch.manual_seed(0)
    rows = torch.randn(128, 6) @ torch.randn(6, 30)
    products, count = rows @ rows.T, torch.tensor(5000.0)
    few = leading(rows, products, 6)
    torch.testing.assert_close(few.T @ few, rows.T @ rows, rtol=1e-3, atol=1e-2 * float(products.abs().max()))
    assert len(leading(rows, products, 2)) == 2
    assert len(leading(rows[:3], products[:3, :3], 8)) == 3
    everything = torch.randn(5000, 6) @ torch.randn(6, 30)
    own = everything[::40]
    squares = (everything.T @ everything).square().sum() * 5000 / everything.square().sum() ** 2
    assert float(overlap(own @ own.T, count)) == pytest.approx(float(squares), rel=0.2)
