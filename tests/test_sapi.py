import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import dimod.testing
import minorminer
import numpy as np
import pytest
import requests
from dwave.cloud import api
from dwave.cloud.coders import decode_qp, decode_qp_numpy, encode_problem_as_qp
from dwave.cloud.exceptions import SolverAuthenticationError, SolverFailureError
from dwave.system import DWaveCliqueSampler, DWaveSampler, EmbeddingComposite
from hypothesis import given, settings
from hypothesis import strategies as st

import spingrad.testing
from spingrad.solvers import DimodSolver
from spingrad.testing.sapi import Sapi
from spingrad.testing.sapi.admission import admit
from spingrad.testing.sapi.annealer import Annealer
from spingrad.testing.sapi.chip import working_chip
from spingrad.testing.sapi.faults import TRANSPORT, Fault, mutated
from spingrad.testing.sapi.wire import decode_problem, encode_answer, from_base64

pytestmark = pytest.mark.usefixtures("sapi_env")

CHIPS = {"pegasus": working_chip("pegasus", 3, 0.05, 1), "zephyr": working_chip("zephyr", 2, 0.05, 1)}


PAUSE = [[0, 0], [10, 0.5], [110, 0.5], [120, 1]]
REVERSE = [[0, 1], [5, 0.45], [15, 0.45], [20, 1]]


@contextmanager
def connect(sapi, **config):
    """D-Wave's own sampler, unmodified, at the emulator."""
    sampler = DWaveSampler(endpoint=sapi.url, token=sapi.token, **config)
    try:
        yield sampler
    finally:
        sampler.client.close(wait=False)  # after a lost reply, waiting would take for ever


@pytest.fixture(scope="module", params=["pegasus", "zephyr"])
def sapi(request, sapi_env):
    with Sapi(request.param, size={"pegasus": 4, "zephyr": 3}[request.param], seed=1) as sapi:
        yield sapi


@pytest.fixture(scope="module")
def qpu(sapi):
    with connect(sapi) as sampler:
        yield sampler


@pytest.fixture
def tiny(sapi_env):
    """A fresh emulator whose ledger, log and faults belong to one test."""
    with Sapi(size=2, broken=0.0) as sapi:
        yield sapi


@pytest.fixture(autouse=True, scope="module")
def clique_cache(tmp_path_factory):
    """minorminer keeps pickles in the user's folders; here it does not."""
    folder = str(tmp_path_factory.mktemp("busclique"))
    with pytest.MonkeyPatch.context() as patch:
        cache = minorminer.busclique.busgraph_cache
        patch.setattr(cache, "cache_rootdir", staticmethod(lambda *_: folder))
        yield


def random_problem(nodes, edges, seed, share=0.7):
    """Biases and couplings on a random part of a graph, some of them zero."""
    rng = random.Random(seed)
    used = {node for node in nodes if rng.random() < share}
    h = {node: round(rng.gauss(0, 1), rng.randint(0, 9)) for node in used}
    J = {(u, v): rng.gauss(0, 1) for u, v in edges if u in used and v in used and rng.random() < share}
    return h, J


def couple(sampler, **params):
    """Submit the smallest problem with a coupling; a future of D-Wave's client."""
    u, v = sampler.edgelist[0]
    return sampler.solver.sample_ising({u: 0.5, v: -0.25}, {(u, v): -1.0}, **params)


def body(chip, h, J, kind="ising", **params):
    """A submission as it arrives."""
    solver = SimpleNamespace(
        _encoding_qubits=chip.properties["qubits"],
        _encoding_couplers=[tuple(coupler) for coupler in chip.properties["couplers"]],
    )
    data = encode_problem_as_qp(solver, h, J)
    return {"solver": chip.identity, "type": kind, "data": data, "params": params}


def first_pair(chip):
    return tuple(chip.properties["couplers"][0])


def eventually(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def fetch(sapi, path, method="GET", **kwargs):
    """A reply of the emulator, without D-Wave's client in between."""
    headers = kwargs.pop("headers", {"X-Auth-Token": sapi.token})
    return requests.request(method, f"{sapi.url}/{path}", headers=headers, timeout=60, **kwargs)


# The real client, unmodified


def test_the_real_sampler_samples_and_every_energy_is_that_of_its_sample(sapi, qpu):
    h, J = random_problem(qpu.nodelist, qpu.edgelist, seed=0)
    for bqm in (dimod.BQM.from_ising(h, J, 0.5), dimod.BQM.from_ising(h, J).change_vartype("BINARY")):
        samples = qpu.sample(bqm, num_reads=20)
        dimod.testing.assert_sampleset_energies(samples, bqm)
        assert set(samples.variables) == set(bqm.variables)
        assert samples.record.num_occurrences.sum() == 20
        assert samples.vartype is bqm.vartype


def test_the_service_reads_exactly_the_biases_that_were_sent(sapi, qpu):
    h, J = random_problem(qpu.nodelist, qpu.edgelist, seed=1)
    samples = qpu.sample_ising(h, J)
    problem = sapi.service.job(samples.info["problem_id"]).problem
    assert dict(zip(problem.qubits.tolist(), problem.linear.tolist(), strict=True)) == h
    pairs = map(frozenset, problem.qubits[problem.pairs].tolist())
    decoded = dict(zip(pairs, problem.quadratic.tolist(), strict=True))
    assert {pair: bias for pair, bias in decoded.items() if bias} == {frozenset(e): J[e] for e in J}


@pytest.mark.parametrize("sampler_class", [EmbeddingComposite, DWaveCliqueSampler])
def test_composites_find_the_optimum_of_a_small_clique(sapi, qpu, sampler_class):
    bqm = dimod.generators.gnp_random_bqm(7, 1.0, "SPIN", random_state=3)
    optimum = dimod.ExactSolver().sample(bqm).first.energy
    if sampler_class is EmbeddingComposite:
        samples = EmbeddingComposite(qpu).sample(bqm, num_reads=100, embedding_parameters={"random_seed": 1})
    else:
        with DWaveCliqueSampler(endpoint=sapi.url, token=sapi.token) as sampler:
            assert sampler.largest_clique_size >= 7
            samples = sampler.sample(bqm, num_reads=100)
            samples.resolve()
    dimod.testing.assert_sampleset_energies(samples, bqm)
    assert samples.first.energy == pytest.approx(optimum)


def test_a_solver_around_ocean_s_sampler_tells_of_qpu_time_and_broken_chains(qpu):
    sampler = DimodSolver(EmbeddingComposite(qpu), num_reads=20, embedding_parameters={"random_seed": 1})
    info = sampler.solve(spingrad.testing.random_problem(6, 5, 2, seed=0)).info
    assert all(timing["qpu_access_time"] > 0 for timing in info["timing"])
    assert info["chain_breaks"].shape == (2,)
    assert ((info["chain_breaks"] >= 0) & (info["chain_breaks"] < 1)).all()


def test_raw_answers_keep_the_reads_apart_and_histograms_count_them(qpu):
    u, v = qpu.edgelist[0]
    raw = qpu.sample_ising({}, {(u, v): -1.0}, num_reads=50, answer_mode="raw")
    histogram = qpu.sample_ising({}, {(u, v): -1.0}, num_reads=50, answer_mode="histogram")
    assert len(raw) == 50
    assert len(histogram) <= 4
    assert histogram.record.num_occurrences.sum() == 50
    assert list(histogram.record.energy) == sorted(histogram.record.energy)
    assert sorted(raw.record.energy) == sorted(
        np.repeat(histogram.record.energy, histogram.record.num_occurrences)
    )


def test_the_sampler_conforms_to_dimod(qpu):
    dimod.testing.assert_sampler_api(qpu)
    dimod.testing.assert_structured_api(qpu)

    @dimod.testing.load_sampler_bqm_tests(EmbeddingComposite(qpu))
    class Conformance(unittest.TestCase):
        pass

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Conformance).run(result)
    assert result.testsRun > 30
    assert not result.errors + result.failures


def test_jobs_can_be_found_read_and_cancelled_as_the_client_asks(sapi_env):
    with Sapi(size=2, queue_seconds=1.5) as sapi, connect(sapi) as sampler:
        problems = api.Problems.from_config(sampler.client.config)
        first = couple(sampler, label="first")
        assert first.wait_id()
        second = couple(sampler, label="second").wait_id()
        (found,) = problems.list_problems(label="second")
        assert found.id == second
        assert problems.cancel_problem(found.id).status.value == "CANCELLED"
        assert problems.get_problem(first.id, timeout=30).answer is not None  # waits for it
        assert problems.get_problem_info(first.id).metadata.label == "first"
        assert problems.get_problem_answer(first.id).root.num_variables == 48
        assert problems.get_problem_messages(first.id) == []
        assert [p.label for p in problems.list_problems(max_results=1)] == ["second"]
        assert [p.id for p in problems.list_problems(status="COMPLETED")] == [first.id]
        with pytest.raises(api.exceptions.ResourceNotFoundError):
            problems.get_problem("unknown")
        assert {c.label: c.status for c in sapi.ledger()} == {"first": "COMPLETED", "second": "CANCELLED"}
        assert [c.cost_us > 0 for c in sapi.ledger()] == [True, False]
        problems.close()


# The wire


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(CHIPS)), st.integers(0, 2**31))
def test_the_decoder_reads_what_the_client_encodes(topology, seed):
    chip = CHIPS[topology]
    h, J = random_problem(chip.properties["qubits"], chip.properties["couplers"], seed)
    problem = decode_problem("ising", body(chip, h, J)["data"], chip)
    bits = np.random.default_rng(seed).integers(0, 2, (3, len(problem.qubits)), dtype=np.uint8)
    expected = dimod.BQM.from_ising(h, J).energies((2 * bits.astype(np.int8) - 1, problem.qubits.tolist()))
    np.testing.assert_allclose(problem.energies(bits), expected, atol=1e-9)
    assert sorted(problem.qubits) == sorted(h)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from(["ising", "qubo"]))
def test_the_client_decodes_what_the_encoder_writes(seed, num_rows, kind):
    chip, rng = CHIPS["pegasus"], np.random.default_rng(seed)
    num_qubits = chip.properties["num_qubits"]
    h, J = random_problem(chip.properties["qubits"], chip.properties["couplers"], seed)
    problem = decode_problem(kind, body(chip, h, J)["data"], chip)
    bits = rng.integers(0, 2, (num_rows, len(h)), dtype=np.uint8)
    counts = rng.integers(1, 9, num_rows)
    for decoder in (decode_qp, decode_qp_numpy):
        answer = encode_answer(problem, bits, problem.energies(bits), counts, num_qubits)
        decoded = decoder({"type": kind, "answer": answer})
        solutions = np.array(decoded["solutions"]).reshape(num_rows, num_qubits)
        values = bits if kind == "qubo" else 2 * bits.astype(np.int8) - 1
        assert np.array_equal(solutions[:, problem.qubits], values)
        assert np.array_equal(decoded["energies"], problem.energies(bits))
        assert np.array_equal(decoded["num_occurrences"], counts)


def test_the_ising_form_of_a_qubo_has_its_energies_up_to_a_constant():
    chip = CHIPS["zephyr"]
    h, J = random_problem(chip.properties["qubits"], chip.properties["couplers"], seed=2)
    problem = decode_problem("qubo", body(chip, h, J)["data"], chip)
    bits = np.random.default_rng(0).integers(0, 2, (6, len(problem.qubits)), dtype=np.uint8)
    spins = 2.0 * bits - 1
    biases, couplings = problem.to_ising()
    energies = spins @ biases + (spins[:, problem.pairs[:, 0]] * spins[:, problem.pairs[:, 1]]) @ couplings
    constant = problem.energies(bits) - energies
    np.testing.assert_allclose(constant, constant[0])


# What is refused


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_reads": 0}, "num_reads"),
        ({"num_reads": 10_001}, "num_reads"),
        ({"num_reads": 1.5}, "num_reads"),
        ({"num_reads": True}, "num_reads"),
        ({"num_reads": "7"}, "not supported between"),
        ({"annealing_time": 0.1}, "annealing_time"),
        ({"annealing_time": float("nan")}, "annealing_time"),
        ({"anneal_schedule": [[0, 0], [5000, 1]]}, "annealing_time"),
        ({"anneal_schedule": [[0, 0]]}, "2 to 12 points"),
        ({"anneal_schedule": [[t, t / 12] for t in range(13)]}, "2 to 12 points"),
        ({"anneal_schedule": [[0, 0, 0], [20, 1, 0]]}, "points"),
        ({"anneal_schedule": [[1, 0], [20, 1]]}, "begin at time 0"),
        ({"anneal_schedule": [[0, 0], [10, 0.5], [10, 1]]}, "increasing times"),
        ({"anneal_schedule": [[0, 0], [10, 1.5], [20, 1]]}, "between 0 and 1"),
        ({"anneal_schedule": [[0, 0.5], [20, 1]]}, "begin at s = 0"),
        ({"anneal_schedule": [[0, 0], [20, 0.9]]}, "end at s = 1"),
        ({"anneal_schedule": [[0, 0], [10, 0.5], [15, 0.4], [20, 1]]}, "decrease in a forward anneal"),
        ({"anneal_schedule": [[0, 0], [0.4, 1], [20, 1]]}, "steeper than 2"),
        ({"anneal_schedule": REVERSE}, "initial_state"),
        ({"initial_state": [1] * 144}, "begins at s = 1"),
        ({"anneal_schedule": REVERSE, "initial_state": [1]}, "list of 144 values"),
        ({"anneal_schedule": REVERSE, "initial_state": [0] * 144}, "may hold -1, 1 and 3"),
        ({"anneal_schedule": REVERSE, "initial_state": [3] * 144}, "every qubit of the problem"),
        ({"annealing_time": 20, "anneal_schedule": [[0, 0], [20, 1]]}, "only one"),
        ({"programming_thermalization": -1e6}, "programming_thermalization"),
        ({"num_reads": 10_000, "annealing_time": 1000}, "problem_run_duration"),
        ({"annealing_time": 0.004, "fast_anneal": True}, "fast_anneal_time"),
        ({"anneal_schedule": [[0, 0], [1, 0.5], [2, 1]], "fast_anneal": True}, "2 to 2 points"),
        ({"answer_mode": "best"}, "answer_mode"),
        ({"colour": "blue"}, "Unknown parameter colour"),
    ],
    ids=str,
)
def test_parameters_outside_the_definition_are_refused(params, message):
    chip = CHIPS["pegasus"]
    with pytest.raises((ValueError, TypeError), match=message):
        admit(body(chip, {}, {first_pair(chip): 1.0}, **params), Annealer(chip))


def test_a_fast_anneal_is_accepted_without_biases_and_refused_with_them():
    chip = CHIPS["pegasus"]
    u, v = first_pair(chip)
    schedule = {"anneal_schedule": [[0, 0], [0.007, 1]]}
    for timed in ({}, {"annealing_time": 0.005}, schedule):
        admit(body(chip, {}, {(u, v): 1.0}, fast_anneal=True, **timed), Annealer(chip))
        with pytest.raises(ValueError, match="h of zero"):
            admit(body(chip, {u: 0.1}, {(u, v): 1.0}, fast_anneal=True, **timed), Annealer(chip))


@pytest.mark.parametrize("topology", CHIPS)
@pytest.mark.parametrize(("h", "J"), [(4.1, 0.0), (-4.1, 0.0), (0.0, 1.1), (0.0, -2.1)])
def test_biases_out_of_range_are_refused_unless_scaled(topology, h, J):
    chip = CHIPS[topology]
    u, v = first_pair(chip)
    problem = {u: h}, {(u, v): J}
    with pytest.raises(ValueError, match="out of range"):
        admit(body(chip, *problem, auto_scale=False), Annealer(chip))
    admit(body(chip, *problem, auto_scale=True), Annealer(chip))
    edge = {u: np.clip(h, -4, 4)}, {(u, v): np.clip(J, -2, 1)}
    admit(body(chip, *edge, auto_scale=False), Annealer(chip))


@pytest.mark.parametrize("topology", CHIPS)
def test_the_total_coupling_of_a_qubit_or_group_is_limited(topology):
    chip = CHIPS[topology]
    ferromagnet = {tuple(coupler): -2.0 for coupler in chip.properties["couplers"]}
    with pytest.raises(ValueError, match="out of range"):
        admit(body(chip, {}, ferromagnet, auto_scale=False), Annealer(chip))
    membership, (low, _) = chip.groups
    most = np.bincount(membership.ravel()).max()
    weaker = dict.fromkeys(ferromagnet, low / most)
    admit(body(chip, {}, weaker, auto_scale=False), Annealer(chip))


def test_problems_that_do_not_fit_the_chip_are_refused():
    chip = CHIPS["pegasus"]
    good = body(chip, {}, {first_pair(chip): 1.0})
    data = good["data"]
    u, v = first_pair(chip)
    bad = [
        ({"data": {**data, "lin": data["lin"][32:]}}, "values in lin"),
        ({"data": {**data, "quad": ""}}, "values in quad"),
        ({"data": {**data, "quad": "@@@@"}}, "base64"),
        ({"data": {**data, "format": "bq"}}, "format"),
        ({"data": body(chip, {u: float("inf")}, {})["data"]}, "finite"),
        ({"data": body(chip, {}, {(u, v): float("nan")})["data"]}, "finite"),
        ({"type": "bqm"}, "problem type"),
        ({"solver": {"name": "Advantage_system4.1"}}, "does not exist"),
        ({"solver": {**chip.identity, "version": {"graph_id": "old"}}}, "graph has changed"),
    ]
    admit(good, Annealer(chip))
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            admit({**good, **change}, Annealer(chip))


def test_a_nan_bias_means_an_unused_qubit_unless_its_couplers_betray_it(tiny):
    with connect(tiny) as sampler:
        u, v = sampler.edgelist[0]
        with pytest.raises(SolverFailureError, match="expected 0 values in quad"):
            sampler.sample_ising({u: float("nan"), v: 1.0}, {}).resolve()
        apart = next(w for w in sampler.nodelist if w != u and w not in sampler.adjacency[u])
        samples = sampler.sample_ising({u: float("nan"), apart: 1.0}, {})
        assert list(samples.variables) == [apart]


def test_refusals_reach_the_client_and_cost_nothing(tiny):
    with connect(tiny) as sampler:
        with pytest.raises(SolverFailureError, match="num_reads"):
            couple(sampler, num_reads=20_000).result()
        with pytest.raises(SolverFailureError, match="out of range"):
            sampler.sample_ising({sampler.nodelist[0]: 5.0}, {}, auto_scale=False).resolve()
    assert tiny.ledger() == []


@pytest.mark.parametrize("request_body", [b"", b"{", b"[1]", b"[{}]", b'{"solver": 3}', b"null"])
def test_malformed_submissions_are_answered_with_an_error(tiny, request_body):
    assert "error_code" in fetch(tiny, "problems/", "POST", data=request_body).text
    assert tiny.ledger() == []


# Money


def test_the_ledger_is_the_sum_of_the_reported_access_times(tiny):
    with connect(tiny) as sampler:
        futures = [couple(sampler, num_reads=reads, label=str(reads)) for reads in (1, 10, 100)]
        timings = [future.timing for future in futures]
        estimates = [sampler.solver.estimate_qpu_access_time(2, num_reads=reads) for reads in (1, 10, 100)]
    assert sum(t["qpu_access_time"] for t in timings) == pytest.approx(tiny.charged_us)
    assert sorted(c.cost_us for c in tiny.ledger()) == pytest.approx(estimates)
    assert {c.label: c.num_reads for c in tiny.ledger()} == {"1": 1, "10": 10, "100": 100}
    assert len({c.digest for c in tiny.ledger()}) == 1
    for timing, reads in zip(timings, (1, 10, 100), strict=True):
        assert timing["qpu_access_time"] == pytest.approx(
            timing["qpu_programming_time"] + timing["qpu_sampling_time"]
        )
        per_sample = sum(timing[f"qpu_{part}_time_per_sample"] for part in ("anneal", "readout", "delay"))
        assert timing["qpu_sampling_time"] == pytest.approx(reads * per_sample)


def test_eight_threads_cannot_overspend_the_quota(sapi_env):
    price = CHIPS["pegasus"].access_time(2, {})
    with Sapi(size=2, quota_us=10.5 * price) as sapi, connect(sapi) as sampler:

        def outcome(_):
            try:
                return couple(sampler).result() and "ran"
            except SolverFailureError as error:
                return str(error)

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(outcome, range(40)))
        assert outcomes.count("ran") == 10
        assert sum("Insufficient remaining solver access time" in o for o in outcomes) == 30
        assert sapi.charged_us == pytest.approx(10 * price)


# Samples


def test_samples_depend_on_seed_problem_and_label_but_not_on_the_order_of_jobs(sapi_env):
    def samples(labels, seed):
        with Sapi(size=2, seed=seed, broken=0.0) as sapi, connect(sapi) as sampler:
            futures = {
                label: sampler.solver.sample_ising(dict.fromkeys(sampler.nodelist, 0.0), {}, label=label)
                for label in labels
            }
            return {label: future.samples for label, future in futures.items()}

    labels = [str(i) for i in range(8)]
    once, again, other = samples(labels, 0), samples(labels[::-1], 0), samples(labels, 1)
    assert once == again
    assert once != other
    assert len({str(s) for s in once.values()}) == len(labels)


def test_control_noise_changes_the_samples_but_not_the_reported_energies(sapi_env):
    def samples(*noise):
        with Sapi(size=2, noise=noise, num_sweeps=100) as sapi, connect(sapi) as sampler:
            bqm = dimod.BQM.from_ising(dict.fromkeys(sampler.nodelist, 0.01), {sampler.edgelist[0]: 0.1})
            result = sampler.sample(bqm, num_reads=20, auto_scale=False, answer_mode="raw")
            dimod.testing.assert_sampleset_energies(result, bqm)
            return result.record.sample.astype(float)

    def order(spins):  # mean strength of the preferences of single spins, and of pairs
        return np.abs(spins.mean(0)).mean(), np.abs(spins.T @ spins).mean() / len(spins)

    clean, biases, couplings = order(samples(0, 0)), order(samples(1, 0)), order(samples(0, 1))
    assert biases[0] > 0.8 > 0.5 > clean[0]  # weak biases hardly hold a spin at the chip's temperature
    assert couplings[1] > 1.5 * clean[1]


def test_errors_that_the_chip_keeps_are_the_same_in_every_job_and_end_with_its_graph(sapi_env):
    def signs(sapi, label):
        """The spin that each qubit without a bias prefers."""
        with connect(sapi) as sampler:
            zero = dimod.BQM.from_ising(dict.fromkeys(sampler.nodelist, 0.0), {})
            found = sampler.sample(zero, num_reads=50, answer_mode="raw", auto_scale=False, label=label)
            return dict(zip(found.variables, np.sign(found.record.sample.astype(float).mean(0)), strict=True))

    def agreement(one, other):
        both = one.keys() & other.keys()
        return np.mean([one[qubit] == other[qubit] for qubit in both])

    with Sapi(size=3, broken=0.1, persistent_noise=(1, 0), seed=4) as sapi:
        first, second = signs(sapi, "a"), signs(sapi, "b")
        sapi.change_graph(5)
        changed = signs(sapi, "a")
    with Sapi(size=3, broken=0.1, noise=(1, 0), seed=4) as sapi:
        redrawn = agreement(signs(sapi, "a"), signs(sapi, "b"))
    assert agreement(first, second) > 0.9 > 0.7 > max(redrawn, agreement(first, changed))


def test_parameters_that_change_nothing_are_named_once(sapi_env, caplog):
    with Sapi(size=2) as sapi, connect(sapi) as sampler:
        problem = dimod.BQM.from_ising({sampler.nodelist[0]: 1.0}, {})
        none = [0.0] * sampler.properties["num_qubits"]
        for _ in range(2):
            sampler.sample(problem, annealing_time=5, flux_biases=none).resolve()
    assert [record.args[0] for record in caplog.records if "emulator" in record.message] == ["annealing_time"]


def test_auto_scale_fills_the_ranges_and_leaves_samples_of_a_multiple_unchanged():
    chip = CHIPS["pegasus"]
    h, J = random_problem(chip.properties["qubits"], chip.properties["couplers"], seed=5)
    answers = []
    for factor in (1, 1024):
        scaled = {v: factor * b for v, b in h.items()}, {e: factor * b for e, b in J.items()}
        problem = decode_problem("ising", body(chip, *scaled)["data"], chip)
        answers.append(Annealer(chip).answer(problem, {"num_reads": 5}, np.random.default_rng(0)))
    assert answers[0]["solutions"] == answers[1]["solutions"]


def distances(params, bottom, state=1):
    """How many spins of each read differ from the start, on a chip with random couplings."""
    chip = CHIPS["pegasus"]
    _, J = random_problem(chip.properties["qubits"], chip.properties["couplers"], seed=6)
    start = [state if (q in {v for pair in J for v in pair}) else 3 for q in range(144)]
    schedule = [[0, 1], [5, bottom], [15, bottom], [20, 1]]
    params = {"anneal_schedule": schedule, "initial_state": start, "answer_mode": "raw", **params}
    problem, _ = admit(body(chip, {}, J, num_reads=20, **params), Annealer(chip))
    answer = Annealer(chip, num_sweeps=50).answer(
        problem, {"num_reads": 20, **params}, np.random.default_rng(0)
    )
    samples = np.unpackbits(from_base64(answer["solutions"], "u1").reshape(20, -1), axis=1)
    return (samples[:, : len(problem.qubits)] != (state > 0)).sum(1), len(problem.qubits)


def test_reverse_annealing_begins_at_the_given_state_and_forgets_it_the_further_it_goes_back():
    frozen, near, far = (distances({}, bottom)[0].mean() for bottom in (1, 0.8, 0))
    size = distances({}, 1)[1]
    assert frozen == 0
    assert 0 < near < far
    assert far == pytest.approx(size / 2, rel=0.15)  # as far as any two samples: the couplings have no bias


def test_reads_begin_at_the_state_again_or_where_the_read_before_has_ended():
    again, onward = (distances({"reinitialize_state": value}, 0.6)[0] for value in (True, False))
    assert onward[-5:].mean() > again[-5:].mean()
    assert distances({"reinitialize_state": False}, 0.6)[0][0] < onward.max()


def test_a_forward_schedule_gives_the_samples_of_the_same_anneal_without_one(tiny):
    with connect(tiny) as sampler:
        _, J = random_problem(sampler.nodelist, sampler.edgelist, seed=1)
        plain, scheduled, paused = (
            sampler.solver.sample_ising({}, J, num_reads=9, **params)
            for params in ({}, {"anneal_schedule": [[0, 0], [20, 1]]}, {"anneal_schedule": PAUSE})
        )
        assert plain.samples == scheduled.samples != paused.samples
        assert paused.timing["qpu_anneal_time_per_sample"] == 120


def test_ocean_s_composite_reverse_anneals_on_the_emulator_and_is_charged_for_it(tiny):
    with connect(tiny) as qpu:
        bqm = dimod.generators.gnp_random_bqm(5, 1.0, "SPIN", random_state=3)
        sampler = EmbeddingComposite(qpu)
        start = dict.fromkeys(bqm.variables, 1)
        kept = {"anneal_schedule": [[0, 1], [20, 1]], "initial_state": start, "reinitialize_state": False}
        samples = sampler.sample(bqm, num_reads=7, embedding_parameters={"random_seed": 1}, **kept)
        assert (samples.record.sample == 1).all()
        timing = samples.info["timing"]
        per_read = sum(timing[f"qpu_{part}_time_per_sample"] for part in ("anneal", "readout", "delay"))
        assert timing["qpu_sampling_time"] == pytest.approx(7 * per_read)
        assert timing["qpu_access_time"] == pytest.approx(tiny.charged_us)


# Chips


@pytest.mark.parametrize(("topology", "size", "full"), [("pegasus", 4, 264), ("zephyr", 3, 336)])
def test_a_chip_lacks_its_broken_qubits_and_their_couplers(topology, size, full):
    chip = working_chip(topology, size, broken=0.1, seed=0)
    qubits = set(chip.properties["qubits"])
    assert len(qubits) == full - round(0.1 * full)
    assert all(qubits.issuperset(coupler) for coupler in chip.properties["couplers"])
    again, other = (working_chip(topology, size, broken=0.1, seed=seed) for seed in (0, 1))
    assert chip.identity == again.identity
    assert chip.identity != other.identity


def test_full_size_chips_have_thousands_of_qubits():
    assert len(working_chip("pegasus", None, 0.0, 0).qubits) == 5640
    assert len(working_chip("zephyr", None, 0.0, 0).qubits) == 4800


def test_unknown_topologies_are_refused():
    with pytest.raises(ValueError, match="pegasus, zephyr"):
        working_chip("chimera", 4, 0.0, 0)


# Faults: the real client's behaviour as measured in advance


def outcome_of(sapi, patience=300.0, **config):
    """What becomes of one small job: ``ok``, ``no samples``, the name of an exception, or ``hangs``."""
    try:
        with connect(sapi, http_retry_backoff_max=0.01, **config) as sampler:
            future = couple(sampler)
            if not future.wait(patience):
                return "hangs"
            assert eventually(lambda: has_decoded(future))
            return "ok" if len(future.result()["energies"]) else "no samples"
    except Exception as error:
        return type(error).__name__


def has_decoded(future):
    """Whether the client is done with an answer, which it decodes after it has told that it is there."""
    return future._result is not None or future._exception is not None


STATUS_CASES = [
    # code, headers, outcomes at solvers, submit, poll, load
    (401, {}, ["SolverAuthenticationError"] * 4),
    (403, {}, ["ResourceAccessForbiddenError", "SolverError", "SolverError", "SolverError"]),
    (404, {}, ["ResourceNotFoundError", "SolverError", "SolverError", "SolverError"]),
    (429, {}, ["ResourceLimitsExceededError", "SolverError", "SolverError", "SolverError"]),
    (429, {"Retry-After": "0"}, ["ok", "SolverError", "ok", "ok"]),
    (500, {}, ["InternalServerError", "SolverError", "ok", "SolverError"]),
    (503, {"Retry-After": "0"}, ["ok", "SolverError", "ok", "ok"]),
]
NETWORK_CASES = [
    # kind, details, outcomes at solvers, submit, poll, load
    ("reset", {}, ["ok", "ConnectionError", "ok", "ok"]),
    ("reset_after", {}, ["ok", "ConnectionError", "ok", "ok"]),
    ("slow", {"seconds": 0.1}, ["ok"] * 4),
    ("garbage", {}, ["InvalidAPIResponseError"] * 4),
    ("media", {}, ["InvalidAPIResponseError"] * 4),
]
SINGLE_FAULTS = [
    (stage, kind, details, expected)
    for kind, details, outcomes in [
        *(
            ("status", {"code": code, "headers": headers}, outcomes)
            for code, headers, outcomes in STATUS_CASES
        ),
        *NETWORK_CASES,
    ]
    for stage, expected in zip(("solvers", "submit", "poll", "load"), outcomes, strict=True)
]
SPECIAL_FAULTS = [
    ("submit", "empty", {}, "InvalidAPIResponseError"),
    ("load", "truncate", {}, "ChunkedEncodingError"),
    ("batch", "error", {"code": 400}, "SolverFailureError"),
    ("run", "FAILED", {}, "SolverFailureError"),
    ("run", "FAILED", {"message": "Solver is offline"}, "SolverOfflineError"),
    ("run", "CANCELLED", {}, "CanceledFutureError"),
    *(
        (stage, kind, details, expected)
        for stage in ("answer", "transit")
        for kind, details, expected in [
            ("bad_b64", {}, "Error"),
            ("short", {}, "ValueError"),
            ("format", {}, "ValueError"),
            ("flip", {}, "ok"),  # wrong data, accepted
            ("nan", {}, "ok"),  # likewise
            ("missing", {"key": "energies"}, "KeyError"),
            ("missing", {"key": "active_variables"}, "KeyError"),
            ("missing", {"key": "timing"}, "ok"),
            ("missing", {"key": "num_occurrences"}, "ok"),
        ]
    ),
]


@pytest.mark.parametrize(("stage", "kind", "details", "expected"), SINGLE_FAULTS + SPECIAL_FAULTS, ids=str)
def test_the_real_client_meets_a_fault_as_measured(tiny, stage, kind, details, expected):
    tiny.inject(stage, kind, **details)
    assert outcome_of(tiny) == expected
    assert tiny.fired == {(stage, kind): 1}
    never_accepted = stage in ("solvers", "submit", "batch") and expected != "ok" and kind != "reset_after"
    given_back = stage == "run"
    assert (tiny.charged_us > 0) is not (never_accepted or given_back)


def test_a_short_answer_that_the_client_decodes_twice_has_no_samples(tiny):
    tiny.inject("answer", "short")
    with connect(tiny) as sampler:
        future = couple(sampler)
        assert future.wait(300)
        assert eventually(lambda: has_decoded(future))
        with pytest.raises(ValueError, match="shape"):
            future.result()
        assert len(future.solver.decode_response(future._message)["energies"]) == 0


@pytest.mark.parametrize("stage", ["solvers", "poll", "load"])
def test_requests_that_change_nothing_are_tried_eleven_times(tiny, stage):
    tiny.inject(stage, "reset", times=np.inf)
    assert outcome_of(tiny) == "ConnectionError"
    assert tiny.fired == {(stage, "reset"): 11}


@pytest.mark.parametrize("stage", ["solvers", "poll", "load"])
def test_slow_replies_are_awaited_again(tiny, stage):
    tiny.inject(stage, "slow", times=np.inf, seconds=1.5)
    assert outcome_of(tiny, request_timeout=0.5, http_retry_total=1) == "RequestTimeout"
    assert tiny.fired == {(stage, "slow"): 2}


def test_a_submission_slower_than_the_clients_patience_is_paid_though_its_id_is_lost(tiny):
    tiny.inject("submit", "slow", seconds=1.5)
    assert outcome_of(tiny, request_timeout=0.5) == "RequestTimeout"
    assert tiny.ledger() == []
    assert eventually(lambda: tiny.charged_us > 0)


def test_a_late_acceptance_is_paid_after_the_client_has_given_up(tiny):
    tiny.inject("submit", "late", seconds=1.0)
    assert outcome_of(tiny) == "ConnectionError"
    assert tiny.ledger() == []
    assert eventually(lambda: [c.status for c in tiny.ledger()] == ["COMPLETED"])


def test_an_empty_list_of_statuses_leaves_the_client_waiting_for_ever(tiny):
    tiny.inject("poll", "empty")
    assert outcome_of(tiny, patience=1.0, polling_timeout=0.5) == "hangs"
    assert sum(request.stage == "poll" for request in tiny.requests) == 1


def test_errors_while_polling_send_the_client_into_a_hot_loop(tiny):
    tiny.inject("poll", "status", times=np.inf, code=500)
    assert outcome_of(tiny, patience=1.0) == "hangs"
    assert tiny.fired["poll", "status"] > 10


def test_a_job_that_never_finishes_stays_charged_and_ends_the_polling(tiny):
    tiny.inject("run", "stuck")
    assert outcome_of(tiny, polling_timeout=0.5, poll_wait_time=1) == "PollingTimeout"
    assert [charge.status for charge in tiny.ledger()] == ["IN_PROGRESS"]
    assert tiny.charged_us > 0


def test_a_redirect_takes_the_token_to_another_host(tiny):
    with Sapi(size=2, broken=0.0, token=tiny.token) as other:
        tiny.inject("solvers", "redirect", times=np.inf, to=other.url)
        assert outcome_of(tiny) == "ok"
        assert [request.stage for request in other.requests] == ["solvers", "solvers"]


def test_damage_in_the_store_stays_and_damage_in_transit_passes(tiny):
    with connect(tiny) as sampler:
        for stage in ("answer", "transit"):
            tiny.inject(stage, "bad_b64")
            future = couple(sampler)
            future.wait()
            problems = api.Problems.from_config(sampler.client.config)
            solutions = problems.get_problem_answer(future.id).root.solutions
            problems.close()
            assert (solutions == "!!not base64!!") is (stage == "answer")


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=50), st.integers(0, 2**31))
def test_a_mutation_changes_one_to_three_bytes(data, seed):
    changed = mutated(data, random.Random(seed))
    assert len(changed) == len(data)
    assert 1 <= sum(a != b for a, b in zip(data, changed, strict=True)) <= 3


def test_mutated_answers_differ_from_the_true_one_and_from_each_other(tiny):
    with connect(tiny) as sampler:
        future = couple(sampler, num_reads=20)
        future.wait()
    path = f"problems/{future.id}"
    true = fetch(tiny, path).content
    tiny.inject("transit", "mutate", times=50)
    bodies = {fetch(tiny, path).content for _ in range(50)}
    assert fetch(tiny, path).content == true
    assert true not in bodies
    assert len(bodies) == 50
    answer = tiny.service.job(future.id).answer
    for seed in range(50):
        damaged = Fault("answer", "mutate", seed=seed).damaged(answer)
        (name,) = (name for name in answer if damaged[name] != answer[name])
        assert 1 <= np.sum(from_base64(damaged[name], "u1") != from_base64(answer[name], "u1")) <= 3


def test_faults_strike_as_often_as_asked_and_repeat_with_the_seed():
    def course(seed):
        with Sapi(size=2, seed=seed) as sapi:
            sapi.inject("load", "reset", times=5, probability=0.5)
            return [sapi.faults.take("load") is not None for _ in range(100)]

    assert sum(course(0)) == 5
    assert course(0) == course(0) != course(1)


def test_faults_that_do_not_exist_are_refused(tiny):
    with pytest.raises(ValueError, match="stage must be one of solvers"):
        tiny.inject("lunch", "reset")
    with pytest.raises(ValueError, match="a fault of stage run must be one of FAILED"):
        tiny.inject("run", "reset")
    with pytest.raises(TypeError, match="colour"):
        tiny.inject("load", "status", colour="blue")


@pytest.mark.parametrize("kind", TRANSPORT)
@pytest.mark.parametrize(("stage", "method"), [("list", "GET"), ("cancel", "DELETE")])
def test_the_server_outlives_every_fault_of_its_network(tiny, capfd, stage, method, kind):
    tiny.inject(stage, kind, seconds=0.01, to=tiny.url)
    with suppress(requests.RequestException):
        fetch(tiny, "problems/", method, json=[])
    assert tiny.fired == {(stage, kind): 1}
    assert fetch(tiny, "problems/", method, json=[]).json() == []
    assert capfd.readouterr().err == ""


# The server


def test_only_this_machine_can_connect(tiny):
    assert tiny.server.server_address[0] == "127.0.0.1"
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", tiny.server.server_port), timeout=5)


def test_a_wrong_token_is_refused(tiny):
    with pytest.raises(SolverAuthenticationError):
        DWaveSampler(endpoint=tiny.url, token="wrong")
    for headers in ({}, {"X-Auth-Token": "wrong"}):
        assert fetch(tiny, "problems/", headers=headers).status_code == 401


def test_the_token_appears_in_no_reply(tiny):
    with connect(tiny) as sampler:
        job_id = couple(sampler).wait_id()
    of_job = [f"problems/{job_id}{part}" for part in ("", "/answer", "/info", "/messages")]
    paths = ["solvers/remote/", "problems/", f"problems/?id={job_id}", *of_job, "problems/unknown", "nowhere"]
    headers = [{"X-Auth-Token": tiny.token}, {"X-Auth-Token": "wrong"}]
    replies = [fetch(tiny, path, headers=h) for path, h in itertools.product(paths, headers)]
    tiny.inject("list", "status")
    for reply in [*replies, fetch(tiny, "problems/")]:
        assert tiny.token not in reply.text + str(reply.headers)


def test_broken_connections_leave_no_trace_on_the_terminal(tiny, capfd):
    address = ("127.0.0.1", tiny.server.server_port)
    for request in (
        b"",
        b"GET /prob",
        b"POST /problems/ HTTP/1.1\r\nContent-Length: 99\r\n\r\n[",
        b"\0\r\n\r\n",
    ):
        with socket.create_connection(address, timeout=5) as connection:
            connection.sendall(request)
    tiny.inject("poll", "slow", seconds=3.0)  # its reply finds nobody at the other end
    assert outcome_of(tiny, request_timeout=2.0) == "ok"
    time.sleep(1.2)
    assert capfd.readouterr().err == ""


def test_closing_leaves_neither_threads_nor_waiting_clients(sapi_env):
    before = set(threading.enumerate())
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        sapi = stack.enter_context(Sapi(size=2, queue_seconds=60))
        submission = body(sapi.chip, {}, {first_pair(sapi.chip): 1.0})
        job = fetch(sapi, "problems/", "POST", json=submission).json()
        poll = pool.submit(fetch, sapi, f"problems/?id={job['id']}&timeout=50")
        assert eventually(lambda: sapi.requests[-1].stage == "poll")
        start = time.monotonic()
        stack.close()
        poll.exception()
        assert time.monotonic() - start < 40  # the poll alone would take 50
    assert set(threading.enumerate()) == before


@pytest.mark.slow
def test_the_command_prints_what_a_shell_needs_and_serves_until_interrupted(sapi_env):
    command = [sys.executable, "-m", "spingrad", "qpu", "emulate", "--topology", "zephyr", "--size", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(60, process.kill)  # whatever happens, nobody waits for ever
        stop.start()
        exports = [process.stdout.readline().split() for _ in range(3)]
        settings = dict(setting.split("=", 1) for _, setting in exports)
        assert list(settings) == ["DWAVE_API_ENDPOINT", "DWAVE_API_TOKEN", "DWAVE_CACHE_HOME"]
        emulator = SimpleNamespace(url=settings["DWAVE_API_ENDPOINT"], token=settings["DWAVE_API_TOKEN"])
        with connect(emulator) as sampler:
            assert sampler.solver.properties["topology"] == {"type": "zephyr", "shape": [2, 4]}
        process.send_signal(2)
        assert process.wait() == 0
        assert process.stderr.read() == ""
        stop.cancel()


def test_a_configured_process_finds_the_emulator_and_forgets_it_afterwards(tiny, sapi_env, monkeypatch):
    monkeypatch.setenv("DWAVE_API_TOKEN", "the user's own")
    monkeypatch.delenv("DWAVE_API_ENDPOINT", raising=False)
    with tiny.configured(), DWaveSampler() as sampler:
        assert sampler.solver.name == tiny.solver_name
    assert os.environ["DWAVE_API_TOKEN"] == "the user's own"
    assert "DWAVE_API_ENDPOINT" not in os.environ
