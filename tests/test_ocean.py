"""Ocean's own samplers and composites, unmodified, as solvers, against the emulator."""

import itertools
import os
from functools import partial
from types import MappingProxyType

import dimod
import numpy as np
import pytest
import torch
from dwave.cloud.exceptions import ProblemUploadError, SolverError, SolverFailureError
from dwave.embedding.chain_strength import scaled, uniform_torque_compensation
from dwave.preprocessing.composites import SpinReversalTransformComposite
from dwave.samplers import SimulatedAnnealingSampler
from dwave.system import (
    DWaveSampler,
    EmbeddingComposite,
    FixedEmbeddingComposite,
    LazyFixedEmbeddingComposite,
    LeapHybridSampler,
)
from torch import nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad._files import FileFormatError
from spingrad.cli import main
from spingrad.qpu import load_samples, save_samples
from spingrad.qpu.samples import picture
from spingrad.solvers import DimodSolver, ExactSolver
from spingrad.testing import check_solver, random_problem
from spingrad.testing.sapi import Sapi

pytestmark = pytest.mark.usefixtures("sapi_env")

REVERSE = [[0, 1], [5, 0.45], [15, 0.45], [20, 1]]
SEEDED = {"embedding_parameters": {"random_seed": 1}}


@pytest.fixture(scope="module")
def sapi(sapi_env):
    with Sapi(size=4, num_sweeps=100) as sapi:
        yield sapi


@pytest.fixture(scope="module")
def qpu(sapi):
    with DWaveSampler(endpoint=sapi.url, token=sapi.token) as sampler:
        yield sampler


@pytest.fixture(scope="module")
def hybrid(sapi):
    with LeapHybridSampler(endpoint=sapi.url, token=sapi.token) as sampler:
        yield sampler


# The hybrid solver


def test_a_hybrid_solver_solves_whole_layers_with_one_call_each(sapi, hybrid):
    problems = [random_problem(8, 6, 3, 0), random_problem(8, 4, 2, 1)]
    before = sapi.charged_us
    solutions = DimodSolver(hybrid, whole_layers=True, time_limit=4).solve_all(problems)
    for problem, solution in zip(problems, solutions, strict=True):
        torch.testing.assert_close(solution.energy, ExactSolver().solve(problem).energy)
        assert solution.info["timing"] == [{"run_time": 4e6, "charge_time": 4e6, "qpu_access_time": 0}]
    assert sapi.charged_us - before == pytest.approx(2 * 4e6 / 20)  # hybrid time counts a twentieth


def test_a_hybrid_solver_solves_unit_by_unit_too_and_takes_no_start(hybrid):
    problem = random_problem(8, 5, 2, 2)
    solution = DimodSolver(hybrid).solve(problem)
    torch.testing.assert_close(solution.energy, ExactSolver().solve(problem).energy)
    assert len(solution.info["timing"]) == 2
    with pytest.raises(ValueError, match="LeapHybridSampler takes no start"):
        DimodSolver(hybrid).solve(problem, initial=solution.spins)


def test_models_of_several_parts_arrive_whole(hybrid, monkeypatch):
    monkeypatch.setattr(type(hybrid.client), "_UPLOAD_PART_SIZE_BYTES", 1000)
    bqm = random_problem(12, 12, 6, 0).to_bqm().change_vartype("BINARY")
    samples = hybrid.sample(bqm)
    dimod.testing.assert_sampleset_energies(samples, bqm)


def test_what_a_hybrid_solver_does_not_take_is_refused_and_costs_nothing(sapi, hybrid):
    with random_problem(4, 4, 1, 0).to_bqm(0).to_file() as file:
        uploaded = hybrid.solver.upload_bqm(file).result()
    before = sapi.charged_us
    for message, problem, params in (
        ("time_limit must be between 3", uploaded, {"time_limit": 1}),
        ("Unknown parameter colour", uploaded, {"colour": "blue"}),
        ("does not exist", "no-such-upload", {}),
    ):
        with pytest.raises(SolverFailureError, match=message):
            hybrid.solver.sample_bqm(problem, **params).sampleset.resolve()
    assert sapi.charged_us == before


def test_an_upload_meets_faults(sapi, hybrid, monkeypatch):
    monkeypatch.setattr("dwave.cloud.client.base.time.sleep", lambda seconds: None)
    bqm = random_problem(4, 4, 1, 0).to_bqm(0)
    sapi.inject("upload", "reset", times=2)
    assert len(hybrid.sample(bqm)) == 1
    sapi.inject("upload", "status", times=40, code=500)
    with pytest.raises((ProblemUploadError, SolverError)):
        hybrid.sample(bqm)
    sapi.faults._plans.clear()
    assert sapi.fired["upload", "reset"] == 2


# Composites


COMPOSITES = {
    "spin reversal": lambda qpu: DimodSolver(
        SpinReversalTransformComposite(EmbeddingComposite(qpu), seed=1), num_reads=20, **SEEDED
    ),
    "three spin reversals": lambda qpu: DimodSolver(
        SpinReversalTransformComposite(EmbeddingComposite(qpu), seed=1),
        num_spin_reversal_transforms=3,
        num_reads=10,
        **SEEDED,
    ),
    "a fixed embedding": lambda qpu: DimodSolver(FixedEmbeddingComposite(qpu, fixed(qpu, 5)), num_reads=20),
    "the first embedding": lambda qpu: DimodSolver(LazyFixedEmbeddingComposite(qpu), num_reads=20),
    "a chain strength": lambda qpu: DimodSolver(
        EmbeddingComposite(qpu), num_reads=20, chain_strength=3.0, **SEEDED
    ),
    "a rule for chain strengths": lambda qpu: DimodSolver(
        EmbeddingComposite(qpu),
        num_reads=20,
        chain_strength=partial(uniform_torque_compensation, prefactor=2.0),
        **SEEDED,
    ),
    "scaled chains, whole layers": lambda qpu: DimodSolver(
        EmbeddingComposite(qpu), whole_layers=True, num_reads=100, chain_strength=scaled, **SEEDED
    ),
}


def fixed(qpu, n):
    """An embedding of n variables that are all coupled."""
    import minorminer

    clique = [(a, b) for a in range(n) for b in range(a)]
    return minorminer.find_embedding(clique, qpu.edgelist, random_seed=1)


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_finds_the_optimum(qpu, name):
    problem = random_problem(6, 5, 2, seed=0)
    solution = COMPOSITES[name](qpu).solve(problem)
    torch.testing.assert_close(solution.energy, ExactSolver().solve(problem).energy)
    assert solution.info["chain_breaks"].shape == (2,)


def test_chains_that_are_too_weak_break_and_are_counted(qpu):
    problem = random_problem(10, 9, 1, seed=0)
    weak, strong = (
        DimodSolver(EmbeddingComposite(qpu), num_reads=50, chain_strength=strength, **SEEDED)
        .solve(problem)
        .info["chain_breaks"]
        .item()
        for strength in (0.01, 3.0)
    )
    assert weak > 0.2 > strong


def test_embeddings_and_all_samples_are_kept_on_request(qpu):
    problem = random_problem(6, 5, 2, seed=0)
    info = DimodSolver(EmbeddingComposite(qpu), keep_samples=True, num_reads=30, **SEEDED).solve(problem).info
    assert [sorted(embedding) for embedding in info["embeddings"]] == [list(range(5))] * 2
    assert all(set(chain) <= set(qpu.nodelist) for e in info["embeddings"] for chain in e.values())
    second = info["samples"][0].record.energy
    assert len(second) > 1
    assert info["samples"][0].record.num_occurrences.sum() == 30


def test_a_start_goes_through_a_composite_but_not_through_one_that_reverses_it(qpu):
    problem = random_problem(6, 5, 2, seed=0)
    start = ExactSolver().solve(problem).spins
    for whole in (False, True):
        solver = DimodSolver(
            EmbeddingComposite(qpu), whole_layers=whole, anneal_schedule=[[0, 1], [20, 1]], **SEEDED
        )
        assert torch.equal(solver.solve(problem, initial=start.neg()).spins, start.neg())
    reversing = DimodSolver(SpinReversalTransformComposite(EmbeddingComposite(qpu)), anneal_schedule=REVERSE)
    with pytest.raises(ValueError, match="SpinReversalTransformComposite"):
        reversing.solve(problem, initial=start)


def test_whole_layers_keep_the_contract_and_the_best_of_each_unit():
    sampler = SimulatedAnnealingSampler()
    check_solver(DimodSolver(sampler, whole_layers=True, num_reads=5, num_sweeps=50), max_spins=6)
    problem = random_problem(4, 3, 3, seed=1)
    own = ExactSolver().solve(problem).spins

    class Mixed(dimod.Sampler):
        """Each sample is best for one unit and worst for the others."""

        parameters = properties = MappingProxyType({})

        def sample(self, bqm, **kwargs):
            rows = []
            for best in range(3):
                signs = np.where(np.arange(3) == best, 1, -1)
                rows.append({(u, i): int(own[i, u] * signs[u]) for u in range(3) for i in range(3)})
            return dimod.SampleSet.from_samples_bqm(rows, bqm)

    assert torch.equal(DimodSolver(Mixed(), whole_layers=True).solve(problem).spins, own)


# The quota


def test_a_used_up_quota_is_an_error_of_the_service_that_moves_no_weight(sapi_env):
    with Sapi(size=2, quota_us=1.0) as sapi, sapi.configured(), DWaveSampler() as qpu:
        solver = DimodSolver(EmbeddingComposite(qpu))
        with pytest.raises(SolverFailureError, match="Insufficient remaining solver access time"):
            solver.solve(random_problem(4, 3, 1, seed=0))
        assert sapi.ledger() == []
    assert "DWAVE_API_TOKEN" not in os.environ


# A whole training step


@pytest.fixture(scope="module", params=["unit by unit", "whole layers"])
def step(request, qpu, tmp_path_factory):
    """A step of training, and the file of its samples."""
    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(6, 3), nn.Hardtanh(), BinaryLinear(3, 2))
    whole = request.param == "whole layers"
    solver = DimodSolver(
        EmbeddingComposite(qpu), keep_samples=True, whole_layers=whole, num_reads=30, **SEEDED
    )
    optimizer = QPSBGD(binary_parameters(model), lr=0.1, solver=solver)
    x = torch.randn(20, 6)
    nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("step") / "step.samples"
    save_samples(path, solver)
    return solver, path


def test_a_step_keeps_timing_chain_breaks_all_samples_and_the_embedding(step, sapi):
    solver, _ = step
    first, second = (solution.info for solution in solver.latest)
    calls = (1, 1) if solver.whole_layers else (3, 2)
    for info, count in zip((first, second), calls, strict=True):
        assert len(info["timing"]) == len(info["samples"]) == len(info["embeddings"]) == count
        assert all(timing["qpu_access_time"] > 0 for timing in info["timing"])
        assert all(samples.record.num_occurrences.sum() == 30 for samples in info["samples"])
    assert first["chain_breaks"].shape == (3,)


def test_the_samples_of_a_step_come_back_from_their_file(step, qpu):
    solver, path = step
    chip, calls = load_samples(path)
    assert set(chip.qubits) == set(qpu.nodelist)
    for layer, solution in enumerate(solver.latest):
        own = [call for call in calls if call.layer == layer]
        assert sorted(unit for call in own for unit in call.units) == list(range(solution.problem.num_units))
        for call in own:
            for place, unit in enumerate(call.units):
                best = call.spins[call.energies[:, place].argmin(), place]
                assert torch.equal(torch.from_numpy(best).to(solution.spins), solution.spins[:, unit])
                above, times = call.excess(place)
                assert above[0] == 0
                assert (np.diff(above) > 0).all()
                assert times.sum() == 30
            assert sum(call.parts.values()) == pytest.approx(call.timing["qpu_access_time"] / 1000)


def test_the_energies_in_the_file_are_zero_on_average_over_all_spins(step):
    solver, path = step
    _, (call, *_) = load_samples(path)
    problem = solver.latest[0].problem.double().units(0, 1)
    spins = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=6)), dtype=torch.float64).T
    average = problem.energy(spins).mean()
    first = torch.from_numpy(call.spins[0, 0].astype(float))[:, None]
    assert call.energies[0, 0] == pytest.approx((problem.energy(first) - average).item())


def test_a_step_is_summed_up_and_drawn_from_its_file(step, tmp_path, capsys):
    _, path = step
    main(["qpu", "inspect", str(path), "--call", "2", "--out", str(tmp_path / "step.svg")])
    printed = capsys.readouterr().out
    assert "3 units of 6 spins, best energy in" in printed
    assert "broken chains, layer 2" in printed
    drawn = (tmp_path / "step.svg").read_text()
    assert 50_000 < len(drawn) < 1_000_000
    chip, calls = load_samples(path)
    texts = {t.get_text() for t in picture(chip, calls, 1).findobj(lambda a: hasattr(a, "get_text"))}
    assert {
        "layer 1",
        "layer 2",
        "programming",
        "readout",
        "samples of every unit (ring: second best)",
    } <= texts
    with pytest.raises(SystemExit, match=f"calls 1 to {len(calls)}, got 99"):
        main(["qpu", "inspect", str(path), "--call", "99"])


def test_samples_that_could_not_be_read_again_are_not_written(step, tmp_path, monkeypatch):
    solver, _ = step
    monkeypatch.setattr("spingrad.qpu.samples.LARGEST", 1000)
    with pytest.raises(ValueError, match="fewer num_reads"):
        save_samples(tmp_path / "large", solver)
    assert not (tmp_path / "large").exists()


def test_a_file_that_is_damaged_or_a_solver_without_samples_is_refused(step, qpu, tmp_path):
    _, path = step
    content = path.read_bytes()
    for name, damaged in {
        "cut": content[:-99],
        "flipped": content.replace(b'"layer": 0', b'"layer": 7'),
    }.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(FileFormatError, match="damaged"):
            load_samples(tmp_path / name)
    problem = random_problem(4, 3, 1, seed=0)
    with pytest.raises(ValueError, match="keep_samples=True"):
        save_samples(tmp_path / "none", DimodSolver(EmbeddingComposite(qpu)))
    plain = DimodSolver(SimulatedAnnealingSampler(), keep_samples=True)
    plain.solve_all([problem])
    with pytest.raises(ValueError, match="sampler on a D-Wave chip"):
        save_samples(tmp_path / "none", plain)
