"""A step on an emulated QPU: layouts, packing, blocks, plans. For faults and costs see test_qpu_faults.py."""

import itertools
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import dimod
import numpy as np
import pytest
import torch
from dwave.cloud import coders
from dwave.cloud.solver import StructuredSolver
from dwave.embedding import chain_strength as dwave_chain_strength
from dwave.embedding import embed_bqm, verify_embedding
from file_helpers import FOREIGN

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters
from spingrad._files import FileFormatError, append_record
from spingrad.qpu import REVERSE_SCHEDULE, Chip, QPUService, QPUSolver, plan
from spingrad.qpu.calls import block_sizes, calls_for
from spingrad.qpu.embedding import FIRST_LINE, fill, pages, to_file
from spingrad.qpu.inspect import answered_calls
from spingrad.qpu.journal import Journal
from spingrad.qpu.packing import Ising, Page, chain_strength, packed_gauge, unpacked_gauge
from spingrad.qpu.service import encoded
from spingrad.solvers import BlockDescentSolver, ExactSolver, SignSolver
from spingrad.testing import check_solver, random_problem
from spingrad.testing.sapi import Sapi


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["pegasus", "zephyr"])
def chip(request):
    with Sapi(request.param, size=4 if request.param == "pegasus" else 3, broken=0.02) as sapi:
        definition = sapi.chip.definition
    return Chip(definition["identity"]["name"], "graph", definition["properties"])


@pytest.fixture
def solver(sapi_env, tmp_path, monkeypatch):
    with Sapi(size=6, num_sweeps=100) as sapi:
        monkeypatch.setenv("DWAVE_API_TOKEN", sapi.token)
        service = QPUService(endpoint=sapi.url)
        solver = QPUSolver(tmp_path / "journal", 100.0, service=service, num_reads=32)
        solver.sapi = sapi
        yield solver
        solver.close()


def random_isings(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [Ising(rng.normal(size=n), np.triu(rng.normal(size=(n, n)), 1)) for n in sizes]


def bqm_of(problem):
    return dimod.BinaryQuadraticModel(problem.h, problem.J, 0.0, dimod.SPIN)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8, 12, 20])
def test_cliques_are_minors_of_the_working_graph_and_share_no_qubit(chip, size):
    page = fill(chip, {size: 3})
    assert page
    qubits = [q for clique in page for chain in clique for q in chain]
    assert len(set(qubits)) == len(qubits)
    complete = list(itertools.combinations(range(size), 2))
    for clique in page:
        assert len(clique) == size
        source = complete or [(0, 0)]
        assert verify_embedding(dict(enumerate(clique)), source, chip.couplers.tolist())


# The cache of layouts


@pytest.fixture
def cached(chip, tmp_path):
    """A layout with chains in a cache, and its file."""
    layout = fill(chip, {8: 2, 3: 1}, tmp_path)
    (path,) = tmp_path.rglob("*.jsonl")
    return layout, path


def search_once(monkeypatch, layout):
    """Count the searches from now on, each of which finds the layout."""
    searches = []
    monkeypatch.setattr("spingrad.qpu.embedding._search", lambda *a: searches.append(1) or iter(layout))
    return searches


def test_a_layout_is_searched_once(chip, cached, tmp_path, monkeypatch):
    layout, _ = cached
    searches = search_once(monkeypatch, layout)
    assert fill(chip, {8: 2, 3: 1}, tmp_path) == layout
    assert not searches


def test_a_damaged_layout_is_made_anew_or_refused_and_never_used(chip, cached, tmp_path, monkeypatch):
    layout, path = cached
    searches, whole = search_once(monkeypatch, layout), path.read_bytes()
    rng = np.random.default_rng(0)
    damages = [whole[:length] for length in rng.integers(0, len(whole), 50)]
    for bit in rng.integers(0, 8 * len(whole), 150):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        damages.append(bytes(flipped))
    for number, damage in enumerate(damages):
        path.write_bytes(damage)
        searches.clear()
        if damage and not damage.startswith(FIRST_LINE):
            with pytest.raises(FileFormatError, match="expected a layout"):
                fill(chip, {8: 2, 3: 1}, tmp_path)
            assert path.read_bytes() == damage
        else:
            assert fill(chip, {8: 2, 3: 1}, tmp_path) == layout
            assert searches, number
            assert path.read_bytes() == whole


def wrong_layouts(layout, chip):
    """Layouts with a valid checksum that cannot be used, by what is wrong with them."""
    first, rest = layout[0], layout[1:]
    used = {qubit for clique in layout for chain in clique for qubit in chain}
    far = next(qubit for qubit, others in chip.neighbors.items() if not used & {qubit, *others})
    return {
        "a chain is in two parts": [[[*first[0], far], *first[1:]], *rest],
        "chains are not coupled": [[[far], *first[1:]], *rest],
        "chains share a qubit": [[[*first[0], first[1][0]], *first[1:]], *rest],
        "a broken qubit": [[[999_999], *first[1:]], *rest],
        "a chain is empty": [[[], *first[1:]], *rest],
        "chains have lost their ends": [[c[:1] for c in first], *rest],
        "no clique of the largest size": layout[2:],
        "more cliques than wanted": [*layout, [[far]]],
        "another size": [*layout[:2], [[far], [far]]],
        "real numbers": [[[float(q) for q in c] for c in clique] for clique in layout],
        "nothing": [],
        "an object": {"cliques": layout},
        "words": [["chain", "chain"]],
        "deep": [[[[[0]]]]],
        "huge numbers": [[[10**400]]],
        "not a number": [[[float("nan")]]],
    }


def test_a_layout_for_another_chip_or_of_another_program_is_made_anew(chip, cached, tmp_path, monkeypatch):
    layout, path = cached
    searches = search_once(monkeypatch, layout)
    for name, wrong in wrong_layouts(layout, chip).items():
        path.write_bytes(to_file(wrong))
        searches.clear()
        assert fill(chip, {8: 2, 3: 1}, tmp_path) == layout, name
        assert searches, name
    with open(path, "r+b") as file:
        file.truncate(2**40)  # sparse: it takes no room on disk
    searches.clear()
    assert fill(chip, {8: 2, 3: 1}, tmp_path) == layout
    assert searches
    assert path.stat().st_size < 10_000


@pytest.mark.parametrize("kind", [*FOREIGN, "records", "folder", "pipe"])
def test_a_file_of_somebody_else_in_the_cache_is_refused_by_name_and_untouched(chip, cached, tmp_path, kind):
    _, path = cached
    path.unlink()
    others = {"records": lambda path: append_record(path, "ours, and no layout"), "folder": Path.mkdir}
    (FOREIGN | others | {"pipe": os.mkfifo})[kind](path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(FileFormatError, match=re.escape(str(path))):
        fill(chip, {8: 2, 3: 1}, tmp_path)
    assert before is None or path.read_bytes() == before


def test_pages_hold_every_unit_and_similar_sizes_share_layouts(chip, monkeypatch):
    calls = []
    monkeypatch.setattr("spingrad.qpu.embedding.fill", lambda *a: calls.append(1) or fill(*a))
    found = pages(chip, {12: 9, 11: 3, 10: 1, 2: 4})
    assert Counter(len(clique) for page in found for clique in page) == {12: 9, 11: 3, 10: 1, 2: 4}
    assert len(calls) <= 3


def test_a_clique_larger_than_the_chip_is_an_error_that_says_what_to_do(chip):
    with pytest.raises(ValueError, match="smaller block_size"):
        fill(chip, {500: 1})


def test_programmed_energies_are_those_of_the_units_when_chains_hold(chip):
    page = Page.of(chip, fill(chip, {5: 2, 3: 1}))
    problems = random_isings(len(clique) for clique in page.cliques)
    programmed = page.program(problems)
    rng = np.random.default_rng(1)
    spins = rng.choice((-1, 1), size=(7, int(page.starts[-1])))
    for flipped in (0, 1, 2):  # flipping one unit changes the energy by that unit's change, times its scale
        other = spins.copy()
        own = slice(page.starts[flipped], page.starts[flipped + 1])
        other[:, own] *= -1
        change = programmed.energies(other[:, page.spin_of]) - programmed.energies(spins[:, page.spin_of])
        expected = problems[flipped].energies(1.0 * other[:, own]) - problems[flipped].energies(
            1.0 * spins[:, own]
        )
        ratio = change / expected
        assert np.allclose(ratio, ratio[0])
        assert ratio[0] > 0


def test_a_layout_whose_chains_are_not_coupled_is_refused(chip):
    one, *others = chip.qubits.tolist()
    stranger = next(qubit for qubit in others if qubit not in chip.neighbors[one])
    with pytest.raises(ValueError, match="two chains that no coupler"):
        Page.of(chip, [[[one], [stranger]]])


def test_a_programmed_clique_is_what_dwave_embeds(chip):
    (clique,) = fill(chip, {6: 1})
    page, (problem,) = Page.of(chip, [clique]), random_isings([6])
    strength = chain_strength(problem)
    expected = embed_bqm(bqm_of(problem), dict(enumerate(clique)), _adjacency(chip), chain_strength=strength)
    programmed = page.program([problem])
    scale = programmed.h[np.abs(programmed.h).argmax()] / max(expected.linear.values(), key=abs)
    for qubit, bias in zip(programmed.qubits, programmed.h, strict=True):
        assert bias == pytest.approx(scale * expected.linear[qubit], rel=1e-9)
    for (a, b), strength in zip(programmed.qubits[programmed.couplers], programmed.J, strict=True):
        assert strength == pytest.approx(scale * expected.quadratic.get((a, b), 0.0), abs=1e-9)


def test_every_unit_uses_the_whole_range_and_none_leaves_it(chip):
    page = Page.of(chip, fill(chip, {5: 3}))
    problems = [Ising(h * 10.0**k, J * 10.0**k) for k, (h, J) in enumerate(random_isings([5, 5, 5]))]
    programmed = page.program(problems)
    h_max = chip.properties["h_range"][1]
    j_min, j_max = chip.properties["extended_j_range"]
    assert np.abs(programmed.h).max() <= h_max
    assert j_min <= programmed.J.min()
    assert programmed.J.max() <= j_max
    loudest = [np.abs(programmed.h[page.clique_of == k]).max() for k in range(3)]
    assert max(loudest) < 30 * min(loudest)  # the problems themselves differ by a factor of 100


def test_chain_strength_is_dwaves_uniform_torque_compensation():
    for problem in random_isings([2, 5, 30]):
        expected = dwave_chain_strength.uniform_torque_compensation(bqm_of(problem))
        assert chain_strength(problem) == pytest.approx(expected)


def test_broken_chains_are_repaired_by_descent_and_counted(chip):
    page = Page.of(chip, fill(chip, {12: 1}))
    (problem,) = random_isings([12])
    optimum = min(itertools.product((-1.0, 1.0), repeat=12), key=lambda s: problem.energies(np.array([s]))[0])
    samples = np.array(optimum, dtype=np.int8)[page.spin_of][None].repeat(2, 0)
    chain = page.qubits[page.spin_of == 3]
    assert len(chain) > 1
    samples[1, page.spin_of == 3] = [1, -1] * (len(chain) // 2) + [-int(optimum[3])] * (len(chain) % 2)
    (reading,) = page.read(samples, np.array([3, 1]), [problem])
    assert np.array_equal(reading.spins[0], optimum)
    assert np.array_equal(reading.spins[1], optimum)
    assert reading.broken == pytest.approx(1 / 48)  # one chain of twelve, in one read of four


def test_the_wire_format_is_the_clients(chip):
    page = Page.of(chip, fill(chip, {5: 2}))
    programmed = page.program(random_isings([5, 5]))
    solver = StructuredSolver(
        None, {"identity": {"name": chip.name}, "properties": {**chip.properties, "parameters": {}}}
    )
    linear = dict(zip(programmed.qubits.tolist(), programmed.h, strict=True))
    pairs = programmed.qubits[programmed.couplers].tolist()
    quadratic = {(a, b): J for (a, b), J in zip(pairs, programmed.J, strict=True)}
    expected = coders.encode_problem_as_qp(solver, linear, quadratic)
    ours = encoded(programmed, chip)
    assert ours["lin"] == expected["lin"]
    assert ours["quad"] == expected["quad"]


def test_copies_of_the_units_save_reads(chip):
    (call,) = calls_for(chip, [3, 3], num_reads=40)
    copies = Counter(call.units)
    assert copies[0] == copies[1] > 1
    assert call.num_reads == -(-40 // copies[0])
    (alone,) = calls_for(chip, [3, 3], num_reads=1)
    assert Counter(alone.units) == {0: 1, 1: 1}


def test_blocks_are_nearly_equal_and_never_too_large():
    for n, size in itertools.product(range(1, 130), (1, 7, 32)):
        blocks = block_sizes(n, size)
        assert sum(blocks) == n
        assert max(blocks) <= size
        assert max(blocks) - min(blocks) <= 1


@pytest.mark.slow
def test_the_solver_keeps_the_contract(solver):
    check_solver(solver, max_spins=12)


def test_all_units_of_a_step_take_one_call_and_reach_the_optimum(solver):
    problems = [random_problem(20, 8, 4, 0), random_problem(20, 4, 4, 1), random_problem(9, 4, 2, 2)]
    solutions = solver.solve_all(problems, seed=5)
    assert len(solver.sapi.ledger()) == 1
    for problem, solution in zip(problems, solutions, strict=True):
        best = ExactSolver().solve(problem)
        torch.testing.assert_close(solution.energy, best.energy)
        assert solution.info["chain_breaks"].shape == (problem.num_units,)


def test_leaving_the_context_closes_the_journal(solver):
    with solver as same:
        assert same is solver
        solver.solve(random_problem(6, 4, 2, 0))
    with pytest.raises(RuntimeError, match="closed"):
        solver.solve(random_problem(6, 4, 2, 1), seed=1)


@pytest.mark.slow
def test_a_layer_wider_than_a_block_is_solved_block_by_block(solver):
    problem = random_problem(30, 40, 3, 0)
    solver.block_size = 10
    one = solver.solve(problem).energy
    assert len(solver.sapi.ledger()) == 4
    solver.num_sweeps = 3
    three = solver.solve(problem, seed=1).energy
    assert (three <= one).all()
    assert three.sum() < one.sum()
    spin_by_spin = BlockDescentSolver(num_sweeps=8).solve(problem).energy  # not stuck where blocks are
    assert three.sum() < 1.25 * spin_by_spin.sum()


@pytest.mark.slow
def test_512_inputs_on_a_full_chip_come_within_five_per_cent_of_descent(sapi_env, tmp_path, monkeypatch):
    problem = random_problem(700, 512, 2, 0)
    with Sapi() as sapi:
        monkeypatch.setenv("DWAVE_API_TOKEN", sapi.token)
        solver = QPUSolver(tmp_path / "journal", 10.0, service=QPUService(endpoint=sapi.url), num_reads=32)
        energy = solver.solve(problem).energy
        solver.close()
        assert len(sapi.ledger()) == 16  # blocks of 32, both units in one call
    assert (problem.lower_bound() < energy).all()
    assert (energy < 1.05 * BlockDescentSolver().solve(problem).energy).all()


def test_momentum_and_double_precision_reach_the_chip(solver):
    problem = random_problem(8, 6, 2, 3, dtype=torch.float64)
    problem = replace(problem, H=0.1 * problem.H + torch.randn(6, 2, dtype=torch.float64))
    torch.testing.assert_close(solver.solve(problem).energy, ExactSolver().solve(problem).energy)


# Gauges


def test_a_gauge_changes_what_is_sent_and_no_energy(chip):
    page = Page.of(chip, fill(chip, {5: 2, 3: 1}))
    problems = random_isings(len(clique) for clique in page.cliques)
    gauge = page.random_gauge("step")
    assert np.array_equal(gauge, page.random_gauge("step"))
    assert not np.array_equal(gauge, page.random_gauge("another"))
    assert np.array_equal(unpacked_gauge(packed_gauge(gauge), len(gauge)), gauge)
    rng = np.random.default_rng(1)
    for problem, signs in zip(problems, page.by_clique(gauge), strict=True):
        spins = rng.choice((-1.0, 1.0), size=(7, len(signs)))
        np.testing.assert_allclose(problem.in_gauge(signs).energies(spins * signs), problem.energies(spins))
    turned = page.program([p.in_gauge(s) for p, s in zip(problems, page.by_clique(gauge), strict=True)])
    a, b = page.spin_of[turned.couplers].T
    assert (turned.J[a == b] < 0).all()  # chains hold together in any gauge


def test_gauges_are_drawn_by_step_and_replayed_and_cost_nothing(sapi_env, tmp_path):
    problem = random_problem(12, 8, 3, 0)
    with Sapi(size=4) as sapi, sapi.configured():
        for name, reversal in (("plain", False), ("turned", True)):
            with QPUSolver(tmp_path / name, 1.0, num_reads=256, spin_reversal=reversal) as solver:
                found = [solver.solve(problem, seed=seed) for seed in (1, 2)]
        best = ExactSolver().solve(problem).energy
        assert all(torch.allclose(solution.energy, best) for solution in found)
        costs = [job.cost_us for job in sapi.ledger()]
        assert len(set(costs)) == 1
        assert len({job.digest for job in sapi.ledger()}) == 3  # without gauges, both steps send the same
    again = QPUSolver.replay(tmp_path / "turned")
    assert again.spin_reversal
    for seed, solution in zip((1, 2), found, strict=True):
        assert torch.equal(again.solve(problem, seed=seed).spins, solution.spins)
    calls = answered_calls(Journal(tmp_path / "turned", read_only=True))
    assert all(max(own.min() for own in call.excess_energies().values()) == 0 for call in calls)


def test_a_gauge_turns_starts_too(sapi_env, tmp_path):
    problem = random_problem(12, 8, 3, 0)
    start = ExactSolver().solve(problem).spins.neg()
    with Sapi(size=4) as sapi, sapi.configured():
        stay = [[0.0, 1.0], [20.0, 1.0]]
        with QPUSolver(tmp_path / "journal", 1.0, spin_reversal=True, reverse_schedule=stay) as solver:
            assert torch.equal(solver.solve(problem, initial=start).spins, start)


def test_gauges_make_errors_that_a_chip_keeps_differ_from_step_to_step(sapi_env, tmp_path):
    problem = random_problem(12, 8, 3, 0)
    zero = replace(problem, Z=0 * problem.Z, H=0 * problem.H)  # the chip sees its own errors
    with Sapi(size=4, persistent_noise=(2, 0)) as sapi, sapi.configured():
        spins = {}
        for reversal in (False, True):
            name = tmp_path / f"{reversal}"
            with QPUSolver(name, 10.0, num_reads=1, spin_reversal=reversal) as solver:
                readings = [solver.solve(zero, seed=seed).spins for seed in range(12)]
            spins[reversal] = torch.stack(readings).mean(0).abs().mean()
    assert spins[True] < 0.6 * spins[False]


# Starts


def random_spins(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, problem.H.shape, generator=generator).mul(2).sub(1).to(problem.H)


def test_all_qubits_of_a_chain_begin_alike_and_unused_ones_have_no_value(chip):
    page = Page.of(chip, fill(chip, {5: 2, 3: 1}))
    starts = [np.array([1, -1, 1, 1, -1][: len(clique)], dtype=np.int8) for clique in page.cliques]
    state = page.state(starts)
    assert len(state) == chip.properties["num_qubits"]
    for clique, start in zip(page.cliques, starts, strict=True):
        assert [{state[qubit] for qubit in chain} for chain in clique] == [{value} for value in start]
    used = {qubit for clique in page.cliques for chain in clique for qubit in chain}
    assert all((value == 3) is (qubit not in used) for qubit, value in enumerate(state))


def test_a_start_reaches_the_chip_by_reverse_annealing_and_is_never_made_worse(solver):
    problem = random_problem(12, 8, 3, 0)
    start = random_spins(problem)
    found = solver.solve(problem, initial=start)
    (job,) = solver.sapi.service._jobs.values()
    assert job.params["anneal_schedule"] == [list(point) for point in REVERSE_SCHEDULE]
    assert job.params["reinitialize_state"]
    assert (found.energy < problem.energy(start)).all()
    best = ExactSolver().solve(problem).spins
    assert torch.equal(solver.solve(problem, initial=best, seed=1).spins, best)
    with pytest.raises(ValueError, match="spins of shape"):
        solver.solve(problem, initial=start[:, :2])


def test_a_schedule_that_stays_at_one_returns_the_start_and_one_to_zero_forgets_it(solver):
    problem = random_problem(12, 8, 3, 0)
    start = ExactSolver().solve(problem).spins.neg()  # no sample of a start that stays is better
    solver.reverse_schedule = [[0.0, 1.0], [20.0, 1.0]]
    assert torch.equal(solver.solve(problem, initial=start).spins, start)
    solver.reverse_schedule = [[0.0, 1.0], [5.0, 0.0], [15.0, 0.0], [20.0, 1.0]]
    found = solver.solve(problem, initial=start, seed=1)
    torch.testing.assert_close(found.energy, ExactSolver().solve(problem).energy)


def test_blocks_of_a_wide_layer_begin_at_the_start_too(solver):
    problem, solver.block_size = random_problem(10, 12, 2, 1), 6
    start = random_spins(problem)
    solver.reverse_schedule = [[0.0, 1.0], [20.0, 1.0]]
    assert torch.equal(solver.solve(problem, initial=start).spins, start)
    solver.reverse_schedule = [list(point) for point in REVERSE_SCHEDULE]
    assert (solver.solve(problem, initial=start, seed=1).energy <= problem.energy(start)).all()


def test_the_duration_of_a_schedule_is_planned_reserved_and_charged(solver):
    problem = random_problem(8, 4, 2, 3)
    for number, length in enumerate((20.0, 500.0)):
        schedule = [[0.0, 1.0], [5.0, 0.5], [length - 5.0, 0.5], [length, 1.0]]
        solver.reverse_schedule, before = schedule, solver.sapi.charged_us
        planned = plan([4, 2], 1, 1, chip=solver.chip, num_reads=32, anneal_schedule=schedule)
        solver._known_calls.clear()
        solver.solve(problem, initial=random_spins(problem), seed=number)
        assert 1e-6 * (solver.sapi.charged_us - before) == pytest.approx(planned.step_seconds)
        assert [call.num_reads for call in planned.calls] == [solver.sapi.ledger()[-1].num_reads]
    assert solver.qpu_seconds == pytest.approx(1e-6 * solver.sapi.charged_us)
    reads = solver.sapi.ledger()[-1].num_reads
    assert (
        planned.step_seconds
        > plan([4, 2], 1, 1, chip=solver.chip, num_reads=32).step_seconds + 470e-6 * reads
    )


def test_steps_with_starts_are_replayed_and_a_fallback_keeps_the_start(solver, tmp_path):
    problem = random_problem(12, 8, 3, 0)
    start = random_spins(problem)
    cold, warm = solver.solve(problem), solver.solve(problem, initial=start)
    assert len(solver.sapi.ledger()) == 2
    best = ExactSolver().solve(problem)
    solver.fallback, solver._journal.budget_us = SignSolver(), 0.0
    assert torch.equal(solver.solve(problem, initial=best.spins, seed=9).energy, best.energy)
    solver.close()
    again = QPUSolver.replay(tmp_path / "journal")
    assert torch.equal(again.solve(problem, initial=start).spins, warm.spins)
    assert torch.equal(again.solve(problem).spins, cold.spins)


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [[0, 1]],
        [[0, 0], [20, 1]],
        [[0, 1], [20, 0.5]],
        [[0, 1], [9, 0.5], [5, 1]],
        [[0, 1], [5, -1], [9, 1]],
    ],
    ids=str,
)
def test_schedules_that_are_no_reverse_anneal_are_refused(schedule):
    with pytest.raises(ValueError, match="reverse_schedule has points"):
        QPUSolver("never made", 1.0, reverse_schedule=schedule)
    with pytest.raises(ValueError, match="passed as reverse_schedule"):
        QPUSolver("never made", 1.0, anneal_schedule=[[0, 1], [9, 0.5], [20, 1]])


# Plans


@pytest.mark.slow
def test_a_model_is_charged_what_its_plan_says(solver):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        BinaryConv2d(1, 2, 3, stride=2), torch.nn.Hardtanh(), torch.nn.Flatten(), BinaryLinear(8, 3)
    )
    expected = plan(model, 5, 10, epochs=2, chip=solver.chip, num_reads=32)
    optimizer = QPSBGD(binary_parameters(model), solver=solver)
    for _ in range(expected.steps_per_epoch * expected.epochs):
        optimizer.zero_grad()
        model(torch.randn(5, 1, 6, 6)).square().mean().backward()
        optimizer.step()
    assert expected.run_seconds == pytest.approx(solver.qpu_seconds, rel=1e-2)
    assert solver.sapi.charged_us == pytest.approx(1e6 * expected.run_seconds, rel=1e-2)
    assert len(solver.sapi.ledger()) == 4 * len(expected.calls)
    assert expected.one_by_one_seconds > 4 * expected.step_seconds


def test_the_summary_of_a_plan_counts_the_copies_of_each_unit(chip):
    small = plan([4, 2], 5, 10, chip=chip, num_reads=100)
    (call,) = small.calls
    copies = len(call.units) // 2
    assert copies > 1
    assert dict(small.summary())["copies of each unit"] == f"{copies}, read {call.num_reads} times"
    assert copies * call.num_reads >= 100


def test_plans_for_wrong_models_widths_and_topologies_are_refused():
    with pytest.raises(ValueError, match="no binary layers"):
        plan(torch.nn.Linear(2, 2), 1, 1)
    with pytest.raises(ValueError, match="widths"):
        plan([4], 1, 1)
    with pytest.raises(ValueError, match="topology"):
        Chip.ideal("chimera")


def _adjacency(chip):
    graph = {q: set() for q in chip.qubits.tolist()}
    for a, b in chip.couplers.tolist():
        graph[a].add(b)
        graph[b].add(a)
    return graph
