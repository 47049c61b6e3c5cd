import itertools
from dataclasses import replace

import pytest
import torch
from helpers import dense_record, posed, random_target
from hypothesis import given, settings
from hypothesis import strategies as st

from spingrad import BinaryQuadratic
from spingrad.rows import DenseRows
from spingrad.scaling import jacobian, leading, overlap, target_factor, unit_rms
from spingrad.solvers import ExactSolver
from spingrad.testing import random_problem


def all_spins(n):
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=torch.float64)


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
            problem.rows, problem.H[:, [unit]].expand(-1, len(every)), problem.offset[unit].expand(len(every))
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
    assert small.rows.shape == (8, 8)
    for seed in range(20):
        G = torch.randint(2, (8, 3), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
        torch.testing.assert_close(small.energy(G), problem.energy(G))
    h, J, offset = problem.to_ising(1)
    torch.testing.assert_close(small.to_ising(1), (h, J, offset), rtol=1e-4, atol=1e-4)
    assert small.compressed() is small


@pytest.mark.parametrize(("inputs", "expected"), [(3, 2**24 // 3), (2**13, 2**14)])
def test_compression_takes_as_many_rows_as_fit_into_little_memory(inputs, expected, monkeypatch):
    asked = []
    rows = DenseRows(torch.zeros(1, inputs).expand(inputs + 1, inputs))
    monkeypatch.setattr(DenseRows, "chunks", lambda self, count: asked.append(count) or [])
    BinaryQuadratic.of(rows, torch.zeros(inputs, 1)).compressed()
    assert asked == [expected]


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
    one, other = posed(dense_record(x, grad)), posed(dense_record(a * x, b * grad))
    torch.testing.assert_close(one.rows.dense(), other.rows.dense())
    torch.testing.assert_close(one.H, other.H)
    torch.testing.assert_close(one.offset, other.offset)


def test_uniform_rows_reach_one_and_published_rows_are_the_normalised_jacobian():
    x = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    assert (jacobian(DenseRows(x), "uniform") @ x.T).item() == pytest.approx(1)
    x = torch.randn(6, 4, generator=torch.manual_seed(0))
    expected = torch.stack([row / row.norm() ** 2 for row in x])
    torch.testing.assert_close(jacobian(DenseRows(x), "normalized").dense(), expected)
    with pytest.raises(ValueError, match='"uniform" or "normalized", got \'equal\''):
        jacobian(DenseRows(x), "equal")


def test_targets_have_the_asked_root_mean_square_and_zero_stays_zero():
    scales = torch.tensor([1.0, 1e-5, 1e-3, 0.0])
    grad = torch.randn(50, 4, generator=torch.manual_seed(0)) * scales
    for small in (1.0, 1e-25):  # the squares of the second underflow
        problem = posed(dense_record(torch.randn(50, 6), grad * small), target_rms=0.7)
        torch.testing.assert_close((problem.offset / 50).sqrt(), torch.tensor([0.7, 0.7, 0.7, 0.0]))
        assert problem.idle.tolist() == [False, False, False, True]
    nothing = posed(dense_record(torch.randn(3, 4), torch.zeros(3, 2)))
    assert not nothing.H.any()
    assert nothing.idle.all()


def test_the_rounding_error_of_a_zero_is_no_target():
    x, weight = torch.randn(20, 3), torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]], requires_grad=True)
    hidden = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(hidden @ weight, torch.arange(20) % 2).backward()
    rms = unit_rms(hidden.grad, 20)
    factor = target_factor(rms, 1.0)  # the second unit says the same to both classes
    assert factor[1] == 0
    torch.testing.assert_close((rms * factor)[[0, 2]], torch.ones(2))


def test_rows_without_a_gradient_are_left_out_of_uniform_problems_only():
    x, grad = torch.randn(4, 3), torch.randn(4, 2)
    grad[1] = 0
    assert len(posed(dense_record(x, grad)).rows) == 3
    assert len(posed(dense_record(x, grad), rows="normalized").rows) == 4


def test_wrong_shapes_are_explained():
    with pytest.raises(ValueError, match=r"equally many rows, got shapes \(3, 2\) and \(4, 1\)"):
        BinaryQuadratic.least_squares(torch.zeros(3, 2), torch.zeros(4, 1))


@pytest.mark.parametrize(
    ("rows", "fields", "offset"),
    [(1.0, float("nan"), 0.0), (float("inf"), 1.0, 0.0), (1e25, 1.0, 0.0), (1.0, 1.0, float("nan"))],
)
def test_problems_whose_energies_are_not_finite_are_refused(rows, fields, offset):
    given = torch.full((5, 4), rows), torch.full((4, 2), fields), torch.full((2,), offset)
    with pytest.raises(ValueError, match=r"finite in torch\.float32, got rows with the norm"):
        BinaryQuadratic.of(DenseRows(given[0]), *given[1:])


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
        with pytest.raises(ValueError, match="for rows of 4 inputs, H has shape"):
            BinaryQuadratic.of(problem.rows, *shapes)


def test_the_target_follows_what_rows_have_in_common():
    torch.manual_seed(0)
    alone, grad = torch.randn(50, 4000), torch.randn(50, 3)
    alike = torch.randn(4000) + 0.01 * alone
    rms = [
        float((posed(dense_record(x, grad), target_rms="auto").offset / 50).mean().sqrt())
        for x in (alone, alike)
    ]
    assert rms[0] == pytest.approx(0.35, rel=0.02)
    assert rms[1] == pytest.approx(0.35 * 50**0.5, rel=0.02)


def test_some_rows_stand_for_all():
    torch.manual_seed(0)
    x = torch.randn(5000, 6) @ torch.randn(6, 30)
    rows, gram = DenseRows(x).sketch
    assert len(rows) <= 128
    assert torch.equal(gram, rows @ rows.T)
    everything = x @ x.T
    assert float(overlap(gram, 5000)) == pytest.approx(float(overlap(everything, 5000)), rel=0.2)
    few = leading(rows, gram, 6)
    torch.testing.assert_close(few.T @ few, rows.T @ rows, rtol=1e-3, atol=1e-2 * float(gram.abs().max()))
    assert len(leading(rows, gram, 2)) == 2
    assert len(leading(rows[:3], gram[:3, :3], 8)) == 3
