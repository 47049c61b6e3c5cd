"""What a file claims costs nothing: it is compared with its description before any of it is read."""

import json
import os
import random
import struct
import time
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from spingrad import BinaryQuadratic
from spingrad._files import FIRST_LINE, FileFormatError, append_record, read_records
from spingrad._tensors import DTYPES, checksum
from spingrad.checkpoint import Checkpoint
from spingrad.export import PackedFileError, PackedModel
from spingrad.export.packed import FORMAT as PACKED
from spingrad.export.stages import Linear, Rescale, Threshold
from spingrad.problem import FORMAT as PROBLEM
from spingrad.problem import ProblemFileError
from spingrad.testing import random_problem

pytestmark = pytest.mark.needs("safetensors")

HUGE = 64 * 2**30


def packed(units=10, inputs=64):
    bits = np.random.default_rng(0).integers(0, 256, (units, inputs // 8), np.uint8)
    numbers = np.random.default_rng(1).integers(-9, 9, (10, units), np.int8)
    signs = Threshold(np.zeros(units, np.int32), np.ones(units, np.int8))
    rescale = Rescale(np.ones(10, np.int32), np.zeros(10, np.int64), 3, -9, 9)
    return PackedModel("int8", (inputs,), (Linear(bits, inputs), signs, Linear(numbers, units), rescale))


KINDS = {
    "packed network": (packed, PackedModel.load, PackedFileError, PACKED),
    "problem": (lambda: random_problem(8, 16, 4, seed=0), BinaryQuadratic.load, ProblemFileError, PROBLEM),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def header_of(content):
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def cost(read, path, error):
    """Seconds and bytes that a refusal takes, and what it says."""
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(error) as caught:
            read(path)
        return time.perf_counter() - began, tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


def claims(header, size):
    """Headers that claim ``size`` bytes, and fit a file of that size."""
    name, last = max(
        ((name, one) for name, one in header.items() if name != "__metadata__"),
        key=lambda item: item[1]["data_offsets"],
    )
    begin, end = last["data_offsets"]
    more = size - end
    yield header | {"unrelated": {"dtype": "U8", "shape": [more], "data_offsets": [end, size]}}
    for dtype in ("U8", "F32", "I64", "F8_E4M3"):
        shape = [(size - begin) // np.dtype(DTYPES.get(dtype, "u1")).itemsize]
        for wanted in (shape, [1, *shape], [*shape, 1], [1] * 30 + shape):
            yield header | {name: {"dtype": dtype, "shape": wanted, "data_offsets": [begin, size]}}
    yield header


def test_a_sparse_file_costs_no_more_to_refuse_than_a_small_one(kind, tmp_path):
    make, read, error, _ = kind
    path = tmp_path / "file"
    make().save(path)
    read(path)
    header, data = header_of(path.read_bytes())
    worst = {}
    for size in (2**20, 2**32, HUGE):
        for claim in claims(header, len(data) // 8 * 8 + size):
            content = with_header(claim, data)
            path.write_bytes(content)
            os.truncate(path, len(content) + size - len(data) % 8)
            seconds, peak, message = cost(read, path, error)
            assert str(path) in message
            worst[size] = max(worst.get(size, (0, 0)), (seconds, peak))
    for size, (seconds, peak) in worst.items():
        print(f"{size:>14,} bytes claimed: refused after {1000 * seconds:.1f} ms with {peak:,} bytes")
        assert seconds < 1
        assert peak < 2**18


def test_a_description_that_claims_too_much_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "file"
    packed().save(path)
    header, _ = header_of(path.read_bytes())
    units = HUGE // 8
    entry = {"dtype": "U8", "shape": [units, 8], "data_offsets": [0, HUGE]}
    signed = json.loads(header["__metadata__"][PACKED.key])
    signed["network"]["stages"] = signed["network"]["stages"][:1]
    header = {"__metadata__": {PACKED.key: json.dumps(signed)}, "0.weight": entry}
    content = with_header(header, b"")
    path.write_bytes(content)
    os.truncate(path, len(content) + HUGE)
    seconds, peak, message = cost(PackedModel.load, path, PackedFileError)
    assert "a packed network has at most 1,073,741,824 bytes" in message
    assert (seconds < 1, peak < 2**18) == (True, True)


HEADERS = [
    0,
    -1,
    1.5,
    2**31,
    2**62,
    2**63,
    2**64,
    10**30,
    1e300,
    "8",
    "",
    None,
    True,
    [],
    {},
    [0, 0],
    "F32",
    "U8",
]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_hostile_headers_are_refused_with_a_reason_and_little_memory(kind, tmp_path, count):
    make, read, error, form = kind
    path = tmp_path / "file"
    make().save(path)
    whole, (header, data) = path.read_bytes(), header_of(path.read_bytes())
    names = [name for name in header if name != "__metadata__"]
    chance = random.Random(count)
    refused, worst = 0, (0.0, 0)
    for i in range(count):
        spoiled = json.loads(json.dumps(header))
        name, value = chance.choice(names), chance.choice(HEADERS)
        match i % 8:
            case 0:
                spoiled[name][chance.choice(["dtype", "shape", "data_offsets"])] = value
            case 1:
                spoiled[name][chance.choice(["shape", "data_offsets"])][0] = value
            case 2:
                spoiled[chance.choice([name, "__metadata__", "../x", "\ud800", ""])] = value
            case 3:
                spoiled["__metadata__"][form.key] = chance.choice(["[" * 10**5, "9" * 10**4, "{}", "NaN", ""])
            case 4:
                spoiled["__metadata__"][form.key] = value
            case 5:
                spoiled = chance.choice(
                    [b"[" * 10**6, b"{}", b"", b'{"a":' * 10**5, b"\xff" * 99, b"9" * 10**4]
                )
            case 6:  # a flipped bit anywhere
                place = chance.randrange(len(whole))
                spoiled = None
                content = (
                    whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :]
                )
            case 7:
                spoiled, content = None, whole[: chance.randrange(len(whole))]
        if spoiled is not None:
            content = with_header(spoiled, data)
        path.write_bytes(content)
        if spoiled == header:
            continue
        seconds, peak, message = cost(read, path, error)
        assert message.startswith(str(path))
        assert path.read_bytes() == content
        refused += 1
        worst = max(worst[0], seconds), max(worst[1], peak)
    assert refused > 0.9 * count
    print(f"{refused:,} refused, at most {1000 * worst[0]:.1f} ms and {worst[1]:,} bytes each")
    assert worst[0] < 2
    assert worst[1] < 2**25  # a header of a megabyte, parsed


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: packed(20_000, 8_000), PackedModel.load),
        (
            lambda: PackedModel("int8", (1000,), (Linear(np.ones((20_000, 1000), np.int8), 1000),)),
            PackedModel.load,
        ),
        (lambda: random_problem(64, 4000, 4000, seed=0), BinaryQuadratic.load),
    ],
    ids=["bits", "numbers", "problem"],
)
def test_reading_takes_the_memory_of_what_is_read(make, read, tmp_path):
    path = tmp_path / "file"
    make().save(path)
    size = path.stat().st_size
    tracemalloc.start()
    read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{size:,} bytes are read with {peak:,}, {peak / size:.2f} of them")
    assert size > 15_000_000
    assert peak < 1.2 * size


def test_bytes_of_a_bool_are_0_or_1(tmp_path):
    path = tmp_path / "file"
    random_problem(3, 4, 2, seed=1).save(path)
    header, data = header_of(path.read_bytes())
    begin, _ = header["idle"]["data_offsets"]
    path.write_bytes(with_header(header, data[:begin] + b"\2" + data[begin + 1 :]))
    with pytest.raises(ProblemFileError, match="'idle' has values besides true and false"):
        BinaryQuadratic.load(path)


def test_safetensors_itself_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    from safetensors.numpy import load_file, save_file

    path, problem = tmp_path / "file", random_problem(8, 16, 4, seed=0)
    problem.save(path)
    arrays = load_file(path)
    assert np.array_equal(arrays["Z"], problem.Z.numpy())
    signed = {"version": 1, "sha256": checksum({}, arrays), "origin": {}}
    save_file(arrays, path, {PROBLEM.key: json.dumps(signed)})
    assert torch.equal(BinaryQuadratic.load(path).H, problem.H)


@pytest.mark.parametrize("start", [b"", FIRST_LINE])
def test_a_sparse_file_of_records_is_refused(tmp_path, start):
    path = tmp_path / "records"
    path.write_bytes(start)
    os.truncate(path, HUGE)
    for use in (read_records, lambda path: append_record(path, 1)):
        seconds, peak, message = cost(use, path, FileFormatError)
        print(f"{message[-60:]}: {seconds:.2f} s, {peak:,} bytes")
        assert seconds < 5
        assert peak < 4 * 2**26  # a line may have 2**26 bytes
    assert path.stat().st_size == HUGE


def test_a_sparse_file_in_a_checkpoint_is_left_out(tmp_path):
    model = nn.Linear(3, 2)
    checkpoint = Checkpoint(tmp_path, model=model)
    checkpoint.save(1)
    checkpoint.save(2)
    for path in tmp_path.glob("step-000000002.*/*"):
        content = path.read_bytes()
        os.truncate(path, HUGE)
        tracemalloc.start()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert checkpoint.load() == 1
        assert tracemalloc.get_traced_memory()[1] < 2**24
        tracemalloc.stop()
        assert path.name in str(told[0].message)
        path.write_bytes(content)
