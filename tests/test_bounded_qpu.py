"""Mutated journals, layouts and samples say the same, or are refused by an error that names the file."""

import base64
import json
import os
import random
import time
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from test_journal import fill, seen

from spingrad._files import FileFormatError, to_line
from spingrad.qpu import Journal, embedding, load_samples, samples
from spingrad.qpu.journal import LARGEST_FILE, JournalError

HUGE = 64 * 2**30
LAYOUT = [[[0, 4], [1, 5], [2]], [[7], [8], [9]]]
GRAPH = {
    "topology": {"type": "pegasus", "shape": [2]},
    "qubits": [0, 1, 2, 3],
    "couplers": [[0, 1]],
    "num_qubits": 4,
}


def call(num_samples=5, units=2, spins=3):
    chance = np.random.default_rng(0)
    return {
        "layer": 0,
        "units": list(range(units)),
        "chains": [[[unit * spins + i] for i in range(spins)] for unit in range(units)],
        "energies": chance.normal(size=(num_samples, units)).tolist(),
        "occurrences": [1] * num_samples,
        "breaks": [0.0] * num_samples,
        "timing": {"qpu_access_time": 15.5},
        "bits": base64.b64encode(bytes(-(-num_samples * units * spins // 8))).decode(),
    }


def samples_file(*calls):
    record = {"chip": "chip", "graph": GRAPH, "calls": calls}
    return samples.FIRST_LINE + to_line(json.dumps(record).encode())


def read_samples(path):
    chip, calls = load_samples(path)
    arrays = [(own.spins.tolist(), own.energies.tolist(), own.occurrences.tolist()) for own in calls]
    return chip.name, dict(chip.properties), arrays, [(own.chains, own.timing) for own in calls]


KINDS = {
    "journal": (fill, lambda path: seen(Journal(path, read_only=True)), JournalError),
    "layout": (
        lambda path: path.write_bytes(embedding.to_file(LAYOUT)),
        embedding._kept,
        FileFormatError,
    ),
    "samples": (
        lambda path: path.write_bytes(samples_file(call(), call(7, 1, 20))),
        read_samples,
        FileFormatError,
    ),
}


def outcome(kind, path):
    """What a file says, or ``None`` if refused, and the seconds and bytes it took, without SQLite's own."""
    _, read, error = KINDS[kind]
    tracemalloc.start()
    began, found, message = time.perf_counter(), None, str(path)
    try:
        found = read(path)
    except error as refusal:
        message = str(refusal)
    seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in message
    return found, seconds, peak


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def mutated(whole, i, chance):
    """A file with something changed: a bit, a byte, a block, a number, its end."""
    place = chance.randrange(len(whole))
    match i % 6:
        case 0:
            return whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]
        case 1:
            return (
                whole[:place] + chance.randbytes(length := chance.randrange(1, 9)) + whole[place + length :]
            )
        case 2:
            return whole[:place]
        case 3:
            return whole[:place] + whole[chance.randrange(len(whole)) :]
        case 4:  # a number of the header, or of the text
            place = chance.randrange(min(len(whole), 100))
            return whole[:place] + b"\xff\xff\xff\xff" + whole[place + 4 :]
    return whole + chance.randbytes(chance.randrange(1, 5000))


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_mutated_file_says_the_same_or_is_refused(kind, tmp_path, count):
    make, read, _ = KINDS[kind]
    path, chance = tmp_path / "file", random.Random(count)
    make(path)
    whole, expected = path.read_bytes(), read(path)
    refused, slowest, most = 0, 0.0, 0
    for i in range(count):
        content = mutated(whole, i, chance)
        path.write_bytes(content)
        found, seconds, peak = outcome(kind, path)
        assert found in (None, expected)
        refused, slowest, most = refused + (found is None), max(slowest, seconds), max(most, peak)
        assert path.read_bytes() == content
    print(f"{kind}: {refused:,} of {count:,} refused, at most {1000 * slowest:.0f} ms and {most:,} bytes")
    assert refused > 0.4 * count  # most of a small database is empty
    assert slowest < 2
    assert most < 2**22


@pytest.mark.parametrize("size", [2**28 + 1, HUGE, LARGEST_FILE + 1])
@pytest.mark.parametrize("claimed", [False, True])
def test_a_sparse_file_costs_what_a_small_one_does(kind, tmp_path, size, claimed):
    make, read, _ = KINDS[kind]
    path = tmp_path / "file"
    make(path)
    expected = read(path)
    if claimed:
        with open(path, "r+b") as file:  # where a database says how many pages it has
            file.seek(28)
            file.write((size // 4096).to_bytes(4, "big"))
    os.truncate(path, size)
    found, seconds, peak = outcome(kind, path)
    assert found is None or (kind == "journal" and found == expected)  # its pages come first
    print(f"{kind} of {size:,} bytes: {1000 * seconds:.1f} ms, {peak:,} bytes")
    assert seconds < 1
    assert peak < 2**20


def test_a_journal_of_more_than_the_limit_is_not_opened(tmp_path, monkeypatch):
    path = tmp_path / "run.journal"
    fill(path)
    monkeypatch.setattr("spingrad.qpu.journal.LARGEST_FILE", path.stat().st_size - 1)
    for read_only in (True, False):
        with pytest.raises(JournalError, match="and a journal at most"):
            Journal(path, read_only=read_only)


def test_a_journal_does_not_grow_beyond_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "run.journal"
    monkeypatch.setattr("spingrad.qpu.journal.LARGEST_FILE", 2**16)
    journal = Journal(path)
    kept = 0
    with suppress(OSError):  # the database is full
        for kept in range(20):
            journal.keep_layout(str(kept), ["x" * 2**13])
    assert path.stat().st_size <= 2**16
    assert 1 < len(Journal(path, read_only=True).layouts) == kept < 8


@pytest.mark.parametrize(
    "change",
    [
        {"energies": [[0.0] * 1000] * 1000, "chains": [[[0]] * 10**6]},  # 10¹² spins
        {"bits": ""},
        {"chains": []},
        {"energies": "x"},
    ],
    ids=["huge", "no bits", "no chains", "text"],
)
def test_samples_have_the_bits_that_their_shape_needs(tmp_path, change):
    path = tmp_path / "step.samples"
    path.write_bytes(samples_file(call() | change))
    with pytest.raises(FileFormatError, match=r"step\.samples is damaged"):
        load_samples(path)
