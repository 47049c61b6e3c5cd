import itertools
from dataclasses import replace
from types import MappingProxyType

import dimod
import numpy as np
import pytest
import torch
from dwave.samplers import RandomSampler, SimulatedAnnealingSampler, SteepestDescentSolver, TabuSampler
from helpers import computed_by, random_target
from hypothesis import given, settings
from hypothesis import strategies as st

from spingrad import BinaryQuadratic, Bits
from spingrad.kernels import cpu, plain
from spingrad.kernels.compiled import HAS_NUMBA
from spingrad.nn.sign import spins_of
from spingrad.solvers import (
    AnnealingSolver,
    BlockDescentSolver,
    DimodSolver,
    ExactSolver,
    SignSolver,
    Solution,
    Solver,
    derive_seed,
)
from spingrad.solvers.block_descent import _compression_pays
from spingrad.testing import check_solver, random_problem

SOLVERS = {
    "sign": SignSolver(),
    "descent": BlockDescentSolver(),
    "error feedback": BlockDescentSolver(num_sweeps=1, num_reads=1),
    "exact": ExactSolver(),
    "annealing": DimodSolver(SimulatedAnnealingSampler(), num_reads=4, num_sweeps=50),
    "tabu": DimodSolver(TabuSampler(), timeout=2_000, num_restarts=1),
    "steepest descent": DimodSolver(SteepestDescentSolver(), num_reads=2),
}
KERNELS = pytest.mark.parametrize("module", [plain, *([cpu] if HAS_NUMBA else [])])


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_keeps_the_contract(name):
    check_solver(SOLVERS[name])


class Broken(Solver):
    def __init__(self, breaks):
        self.breaks = breaks

    def solve(self, problem, *, seed=0):
        return self.breaks(problem, SignSolver().solve(problem).spins)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda p, s: Solution(p, s.T), "spins have shape"),
        (lambda p, s: Solution(p, s.half()), "spins are torch.float16"),
        (lambda p, s: Solution(p, (s + 1) / 2), "other than -1 and"),
        (lambda p, s: Solution(replace(p, offset=p.offset + 1), s), "energy is not that of the spins"),
        (lambda p, s: Solution(p, -s), "orthonormal rows"),
        (lambda p, s: (torch.rand(1), Solution(p, s))[1], "global generator"),
        (lambda p, s: (p.H.neg_(), Solution(p, s))[1], "changed H"),
        (lambda p, s: (p.Z.neg_(), Solution(p, s))[1], "changed the rows"),
    ],
)
def test_the_contract_catches_a_broken_solver(breaks, message):
    with pytest.raises(AssertionError, match=message):
        check_solver(Broken(breaks))


def test_the_contract_catches_answers_in_the_wrong_order():
    class Swapped(SignSolver):
        def solve_all(self, problems, *, seed=0):
            answers = super().solve_all(problems, seed=seed)
            answers[2], answers[3] = answers[3], answers[2]
            return answers

    with pytest.raises(AssertionError, match="solve_all on fewer rows"):
        check_solver(Swapped())


@pytest.mark.parametrize("max_spins", [1, 2, 3])
def test_the_contract_respects_a_solvers_limit(max_spins):
    class Limited(SignSolver):
        def solve(self, problem, *, seed=0):
            assert problem.num_spins <= max_spins
            return super().solve(problem, seed=seed)

    check_solver(Limited(), max_spins=max_spins)


def brute_force(problem):
    every = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=problem.num_spins)), dtype=torch.float64)
    outputs = (every @ problem.Z.double().T).square().sum(1)  # (2^n,)
    fields = problem.H.double().T
    lowest = torch.stack([(outputs - 2 * every @ h).min() for h in fields])
    return lowest + problem.offset.double()


@pytest.mark.parametrize("chunk", range(4))
def test_exact_equals_brute_force_on_200_problems(chunk):
    """Fan-in 1 to 16, more and fewer rows than inputs, a quarter rank-deficient, both algorithms."""
    solver = ExactSolver()
    for seed in range(50 * chunk, 50 * chunk + 50):
        n = 1 + seed % 16
        r = (n // 2 + 1, n, 2 * n)[seed % 3]
        rank = max(1, min(r, n) // 2) if seed % 4 == 0 else None
        problem = random_problem(r, n, 1, seed=seed, rank=rank, dtype=torch.float64)
        solution = solver.solve(problem)
        assert solution.info["proved"].all()
        torch.testing.assert_close(solution.energy, brute_force(problem), rtol=1e-9, atol=1e-12)


PARALLEL = {
    "two bits": lambda x: Bits(2)(x[:, :7]),
    "three bits": lambda x: Bits(3)(x[:, :5]),
    "equal": lambda x: x[:, torch.randint(3, (14,))],
    "opposite": lambda x: x[:, torch.randint(5, (14,))] * torch.randn(14).sign(),
    "one row": lambda x: x[:1],
    "mixed": lambda x: torch.cat([x[:, :6], x[:, :4] / 2, x[:, :4]], 1),
}


@pytest.mark.parametrize("driven", [False, True])
@pytest.mark.parametrize("kind", PARALLEL)
def test_exact_equals_brute_force_where_couplings_are_parallel(kind, driven):
    for seed in range(6):
        torch.manual_seed(seed)
        x = PARALLEL[kind](torch.rand(9, 14, dtype=torch.float64))
        H = torch.zeros(x.shape[1], 2).double()
        if driven:  # by more fields, of the same proportions or of others
            H = x.T @ torch.randn(len(x), 2).double() if seed % 2 else torch.randn(x.shape[1], 2).double()
        problem = BinaryQuadratic.least_squares(x / 8, (0.3 + seed) * torch.randn(len(x), 2).double())
        problem = replace(problem, H=problem.H + H)
        solution = ExactSolver().solve(problem)
        assert solution.info["proved"].all()
        torch.testing.assert_close(solution.energy, brute_force(problem), rtol=1e-9, atol=1e-12)


@pytest.mark.skipif(not HAS_NUMBA, reason="needs the extra fast")
@pytest.mark.parametrize("bits", [2, 3])
def test_exact_proves_weights_of_several_bits(bits):
    """As those of 16 inputs: 32 and 48 spins, of which a search among spins would not see the end."""
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.rand(40, 16, dtype=torch.float64)
        problem = BinaryQuadratic.least_squares(Bits(bits)(x) / (16 * bits), torch.randn(40, 2).double())
        assert ExactSolver().solve(problem).info["proved"].all()


@pytest.mark.skipif(not HAS_NUMBA, reason="needs the extra fast")
@pytest.mark.parametrize("r", [60, 100])
def test_exact_proves_sixty_spins_with_noise_targets(r):
    solver = ExactSolver(max_nodes=4_000_000)  # about a second on one quiet core
    for seed in range(5):
        solution = solver.solve(random_problem(r, 60, 1, seed=seed, dtype=torch.float64))
        assert solution.info["proved"].all(), f"seed {seed}: {solution.info}"


def test_descent_says_that_it_is_slow_without_numba(monkeypatch):
    monkeypatch.setattr(cpu, "HAS_NUMBA", False)
    problem = random_problem(20, 33, 3, seed=0)
    for solver in (BlockDescentSolver(), AnnealingSolver(1, 1)):
        with pytest.warns(UserWarning, match=r'numba is not installed: .*"spingrad\[fast\]"'):
            solver.solve(problem)


def test_inputs_that_are_always_zero_cost_the_decoder_nothing():
    problem = random_problem(14, 14, 1, seed=0, dtype=torch.float64)
    Z = torch.cat([torch.zeros(14, 30).double(), problem.Z], 1)
    padded = BinaryQuadratic.of(Z, torch.cat([torch.zeros(30, 1).double(), problem.H]), problem.offset)
    alone, among = ExactSolver().solve(problem), ExactSolver().solve(padded)
    assert torch.equal(among.spins[30:], alone.spins)
    assert torch.equal(among.info["nodes"], alone.info["nodes"])
    nothing = BinaryQuadratic.least_squares(torch.zeros(3, 20), torch.randn(3, 2))
    assert ExactSolver().solve(nothing).info["proved"].all()


def test_exact_takes_a_problem_without_units():
    for n in (4, 40):
        problem = random_problem(3, n, 2, seed=0).units(0, 0)
        assert ExactSolver().solve(problem, seed=0).spins.shape == (n, 0)


def test_exact_says_when_a_limit_kept_it_from_a_proof():
    problem = random_problem(40, 40, 2, seed=0)
    for solver in (ExactSolver(max_nodes=3), ExactSolver(time_limit=1e-9)):
        solution = solver.solve(problem)
        assert not solution.info["proved"].any()
        assert (solution.spins.abs() == 1).all()


def plain_descent(Z, v, h, num_sweeps):
    """Coordinate descent from zero, as it is written on paper: one unit, one spin, double precision."""
    Z, v = Z.double(), v.double()
    g, residual = torch.zeros(Z.shape[1], dtype=torch.float64), v.clone()
    for _ in range(num_sweeps):
        for i in range(Z.shape[1]):
            z = Z[:, i]
            field = z @ residual + h[i] + (z @ z) * g[i]
            new = 1.0 if field >= 0 else -1.0
            residual = residual - z * (new - g[i])
            g[i] = new
    return g


@KERNELS
@pytest.mark.parametrize(("r", "n", "m"), [(5, 8, 3), (30, 17, 4), (12, 65, 2), (40, 100, 3)])
@pytest.mark.parametrize("num_sweeps", [1, 2, 4])
def test_descent_is_the_plain_loop(module, r, n, m, num_sweeps):
    Z, V = random_target(r, n, m, seed=n, dtype=torch.float64)
    H = (torch.zeros(n, m) if n == 17 else torch.randn(n, m, generator=torch.manual_seed(0))).double()
    problem = BinaryQuadratic.of(Z, Z.T @ V + H)
    solver = BlockDescentSolver(num_sweeps=num_sweeps, num_reads=1)
    expected = torch.stack([plain_descent(Z, v, h, num_sweeps) for v, h in zip(V.T, H.T, strict=True)], 1)
    single = BinaryQuadratic.of(Z.float(), problem.H.float())
    with computed_by(module):
        assert torch.equal(solver.solve(problem).spins, expected)
        assert (solver.solve(single).spins == expected).double().mean() > 0.99


def test_with_many_rows_one_sweep_is_the_plain_loop_over_thirds_of_the_inputs():
    Z, V = random_target(70, 100, 3, seed=0, dtype=torch.float64)
    problem = BinaryQuadratic.least_squares(Z, V)
    residual, expected = V.clone(), []
    for z in Z.split(48, 1):  # vector registers are whole
        expected.append(torch.where(z.T @ residual >= 0, 1.0, -1.0).double())
        residual -= z @ expected[-1]
    solution = BlockDescentSolver().solve(problem)
    assert torch.equal(solution.spins, torch.cat(expected))
    torch.testing.assert_close(solution.energy, residual.square().sum(0))


@KERNELS
def test_further_sweeps_never_raise_the_energy(module):
    problem = random_problem(60, 90, 40, seed=0, dtype=torch.float64)
    with computed_by(module):
        energies = [BlockDescentSolver(num_sweeps=k).solve(problem).energy for k in (1, 2, 3, 6, 12)]
    for before, after in itertools.pairwise(energies):
        assert (after <= before + 1e-9).all()
    assert (energies[-1] < energies[0]).any()


def test_restarts_find_the_optimum_of_small_layers_more_often():
    problem = random_problem(40, 20, 64, seed=0)
    optimum = ExactSolver().solve(problem).energy
    found = {
        reads: (BlockDescentSolver(num_reads=reads).solve(problem).energy < optimum * 1.00001).float().mean()
        for reads in (1, 8, 64)
    }
    assert found[1] < found[8] < found[64]
    assert found[64] > 0.95


def test_tall_problems_give_the_same_spins_with_and_without_compression():
    problem = random_problem(400, 20, 30, seed=0, dtype=torch.float64)
    solver = BlockDescentSolver(num_sweeps=5, num_reads=1)
    compressed = solver.solve(problem.compressed())
    assert torch.equal(solver.solve(problem).spins, compressed.spins)
    torch.testing.assert_close(solver.solve(problem).energy, compressed.energy)


def test_rows_are_compressed_only_where_that_saves_more_than_it_costs():
    def pays(rows, units, sweeps):
        return _compression_pays(random_problem(rows, 50, units, seed=0), sweeps)

    assert pays(200, units=100, sweeps=8)
    assert not pays(200, units=1, sweeps=8)  # one unit saves less than a factorisation costs
    assert not pays(51, units=100, sweeps=1)  # one row less saves hardly anything
    assert not pays(50, units=1000, sweeps=100)  # nothing to save


@given(st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_orthonormal_z_reduces_to_the_sign_of_the_gradient(seed):
    Z, V = random_target(9, 9, 4, seed=seed, dtype=torch.float64)
    Q, _ = torch.linalg.qr(Z)
    rotated = BinaryQuadratic.least_squares(Q, V)
    expected = torch.where(Q.T @ V >= 0, 1.0, -1.0).double()
    for solver in (SignSolver(), BlockDescentSolver(), ExactSolver()):
        assert torch.equal(solver.solve(rotated).spins, expected)


def test_a_target_far_out_of_reach_gives_the_sign_of_the_fields_bit_for_bit():
    Z, V = random_target(100, 300, 200, seed=0)
    far = BinaryQuadratic.least_squares(Z, V * 1e9)
    expected = SignSolver().solve(far).spins
    for solver in (BlockDescentSolver(), BlockDescentSolver(num_sweeps=3)):
        assert torch.equal(solver.solve(far).spins, expected)


class Shuffled(dimod.Sampler):
    """Answers with its variables in another order and the best sample last."""

    properties = None
    parameters = MappingProxyType({})

    def sample(self, bqm, **kwargs):
        samples = dimod.ExactSolver().sample(bqm)
        order = list(reversed(list(bqm.variables)))
        worst_first = sorted(samples.data(), key=lambda d: -d.energy)
        rows = [[datum.sample[v] for v in order] for datum in worst_first]
        return dimod.SampleSet.from_samples_bqm((rows, order), bqm)


def test_a_sampler_may_answer_in_any_order():
    problem = random_problem(6, 7, 3, seed=0)
    spins = DimodSolver(Shuffled()).solve(problem).spins
    assert torch.equal(spins, ExactSolver().solve(problem).spins)


def test_a_sampler_gets_the_model_of_each_unit():
    class Spy(Shuffled):
        def sample(self, bqm, **kwargs):
            seen.append(bqm.copy())
            return super().sample(bqm)

    seen = []
    problem = random_problem(6, 5, 2, seed=0)
    DimodSolver(Spy()).solve(problem)
    for unit, bqm in enumerate(seen):
        assert bqm.is_almost_equal(problem.to_bqm(unit))


@pytest.mark.parametrize("whole_layers", [False, True])
def test_kept_samples_have_the_energies_of_the_solution(whole_layers):
    problem = random_problem(6, 5, 3, seed=0).double()
    solver = DimodSolver(dimod.ExactSolver(), keep_samples=True, whole_layers=whole_layers)
    solution = solver.solve(problem)
    found = torch.tensor([samples.first.energy for samples in solution.info["samples"]])
    torch.testing.assert_close(
        found, solution.energy.sum(0, keepdim=True) if whole_layers else solution.energy, check_dtype=False
    )


def test_the_seed_reaches_the_sampler_unless_the_user_sets_one():
    seen = []

    class Spy(SimulatedAnnealingSampler):
        def sample(self, bqm, **kwargs):
            seen.append(kwargs["seed"])
            return super().sample(bqm, **kwargs)

    problem = random_problem(4, 5, 2, seed=0)
    DimodSolver(Spy()).solve(problem, seed=1)
    DimodSolver(Spy(), seed=42).solve(problem, seed=1)
    assert seen == [derive_seed(1, 0), derive_seed(1, 1), 42, 42]


def test_wrong_arguments_are_explained():
    with pytest.raises(ValueError, match="num_sweeps is a whole number of at least 1, below"):
        BlockDescentSolver(num_sweeps=0)
    with pytest.raises(ValueError, match="max_nodes is a whole number of at least 1"):
        ExactSolver(max_nodes=0)
    with pytest.raises(ValueError, match="positive number of seconds, got -1"):
        ExactSolver(time_limit=-1)
    with pytest.raises(TypeError, match="pass an instance"):
        DimodSolver("SimulatedAnnealingSampler")


def test_derived_seeds_differ_by_place_and_never_change():
    places = {derive_seed(seed, step) for seed in range(10) for step in range(100)}
    assert len(places) == 1000
    assert derive_seed(0, 0) == 1484405855
    assert all(0 <= seed < 2**31 for seed in places)


STARTS = [BlockDescentSolver(), BlockDescentSolver(num_sweeps=1, num_reads=1), ExactSolver()]


@pytest.mark.parametrize("solver", STARTS, ids=["default", "one sweep", "exact"])
def test_a_start_at_the_optimum_is_kept(solver):
    problem = random_problem(30, 20, 4, seed=1)
    best = ExactSolver().solve(problem)
    assert best.info["proved"].all()
    found = solver.solve(problem, initial=best.spins)
    torch.testing.assert_close(found.energy, best.energy)


def test_wide_layers_begin_at_the_start():
    problem = random_problem(40, 300, 8, seed=2)
    start = spins_of(problem.H)
    cold, warm = (BlockDescentSolver(num_sweeps=s).solve(problem, initial=start) for s in (1, 20))
    assert (warm.energy <= cold.energy + 1e-4).all()
    assert (cold.energy < problem.energy(start)).all()


def test_annealers_get_the_start_of_each_unit():
    class Echo:
        """Returns the start."""

        parameters = MappingProxyType({"initial_states": []})

        def sample(self, bqm, initial_states):
            rows, labels = initial_states
            return dimod.SampleSet.from_samples_bqm((rows, labels), bqm)

    problem = random_problem(6, 5, 3, seed=3)
    start = torch.randint(2, (5, 3), generator=torch.manual_seed(0)) * 2.0 - 1
    assert torch.equal(DimodSolver(Echo()).solve(problem, initial=start).spins, start)
    for sampler in (SimulatedAnnealingSampler(), TabuSampler()):
        options = {"timeout": 1} if isinstance(sampler, TabuSampler) else {"num_sweeps": 1}
        assert DimodSolver(sampler, **options).solve(problem, initial=start).spins.shape == start.shape


def test_wrong_starts_are_explained():
    problem = random_problem(6, 5, 3, seed=3)
    start = torch.ones(5, 3)
    with pytest.raises(ValueError, match=r"spins of shape \(5, 3\), like H; got \(3, 5\)"):
        BlockDescentSolver().solve(problem, initial=start.T)
    with pytest.raises(ValueError, match="-1 or \\+1; got other values"):
        ExactSolver().solve(problem, initial=0 * start)
    with pytest.raises(ValueError, match="RandomSampler takes no start"):
        DimodSolver(RandomSampler()).solve(problem, initial=start)


def test_a_sampler_may_answer_in_bits():
    class Bits:
        parameters = MappingProxyType({})

        def sample(self, bqm, **_):
            return dimod.ExactSolver().sample(bqm.change_vartype("BINARY", inplace=False))

    problem = random_problem(r=20, n=6, m=3, seed=0)
    assert torch.equal(DimodSolver(Bits()).solve(problem).spins, ExactSolver().solve(problem).spins)


@pytest.mark.parametrize("value", [0, 3, 0.5, float("nan")])
def test_a_sampler_that_does_not_return_spins_is_refused(value):
    class Constant:
        parameters = MappingProxyType({})

        def sample(self, bqm, **_):
            samples = np.full((2, len(bqm.variables)), value), [*bqm.variables]
            return dimod.SampleSet.from_samples(samples, "SPIN", energy=0)

    for whole_layers in (False, True):
        with pytest.raises(ValueError, match=f"with the spin {value}; expected -1 or \\+1"):
            DimodSolver(Constant(), whole_layers=whole_layers).solve(random_problem(6, 5, 2, seed=0))


def test_a_sampler_that_leaves_out_a_variable_is_refused():
    class Short:
        parameters = MappingProxyType({})

        def sample(self, bqm, **_):
            return dimod.SampleSet.from_samples(np.ones((2, len(bqm.variables) - 1)), "SPIN", energy=0)

    with pytest.raises(ValueError, match="no value of the variable 4; expected one of each of the 5"):
        DimodSolver(Short()).solve(random_problem(6, 5, 2, seed=0))


def test_problems_that_are_not_finite_or_not_of_floats_are_refused():
    Z, V = torch.randn(30, 24), torch.randn(30, 2)
    with pytest.raises(TypeError, match=r"Z is a tensor of float32 or float64, got torch\.int64"):
        BinaryQuadratic.least_squares(Z.long(), V)
    with pytest.raises(TypeError, match="V is a tensor of float32 or float64, got ndarray"):
        BinaryQuadratic.least_squares(Z, V.numpy())
    problem = BinaryQuadratic.least_squares(Z, V)
    V[0, 0] = torch.nan
    with pytest.raises(ValueError, match="V has entries that are not finite"):
        BinaryQuadratic.least_squares(Z, V)
    problem.H[0, 0] = torch.nan
    with pytest.raises(ValueError, match="expected a problem of finite numbers"):
        ExactSolver().solve(problem)
