"""Loading a packed file gives the same network or a documented error, never a crash."""

import json
import struct
import sys
import tempfile
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from test_export import SIGN_NETWORKS, images, made
from test_export_c import averages, hardtanh_with_norm

from spingrad import BinaryConv2d, BinaryLinear, Sign, sign
from spingrad._tensors import checksum
from spingrad.export import PackedFileError, PackedModel, pack
from spingrad.export.packed import FORMAT
from spingrad.export.stages import Threshold

pytest.importorskip("safetensors")


def test_files_are_written_and_read_without_safetensors(monkeypatch, tmp_path):
    packed, path = pack(made(SIGN_NETWORKS[0])), tmp_path / "net.safetensors"
    monkeypatch.setitem(sys.modules, "safetensors", None)
    packed.save(path)
    assert len(PackedModel.load(path).stages) == len(packed.stages)


def parts(content):
    """Header and data of a safetensors file."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def header_size(content):
    """Length of the header of a safetensors file; 0 if it says that it is longer than the file."""
    length = int.from_bytes(content[:8], "little")
    return length if length <= len(content) - 8 else 0


def joined(header, data):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors_of(header, data):
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], _DTYPES[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def with_network(content, change):
    """The file with a changed description of its network and the right checksum for it."""
    header, data = parts(content)
    signed = json.loads(header["__metadata__"][FORMAT.key])
    change(signed["network"])
    signed["sha256"] = checksum(signed["network"], tensors_of(header, data))
    header["__metadata__"][FORMAT.key] = json.dumps(signed)
    return joined(header, data)


_DTYPES = {"U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}


@pytest.mark.parametrize("network", [*SIGN_NETWORKS, hardtanh_with_norm, averages], ids=lambda n: n.__name__)
def test_a_file_holds_the_same_network(network, tmp_path):
    packed, x = pack(made(network)), images(10)
    packed.save(tmp_path / "net.safetensors")
    loaded = PackedModel.load(tmp_path / "net.safetensors")
    assert loaded.to_bytes() == packed.to_bytes()
    np.testing.assert_array_equal(loaded.scores(x), packed.scores(x))


def test_the_bits_of_a_wide_network_take_a_thirtieth_of_its_floats(tmp_path):
    from torch import nn

    model = nn.Sequential(
        BinaryLinear(784, 1024), Sign(), BinaryLinear(1024, 1024), Sign(), BinaryLinear(1024, 10)
    )
    floats = sum(4 * value.numel() for value in model.state_dict().values())
    assert 30 * len(pack(model).to_bytes()) < floats


def small_files():
    """Small files with thresholds, rescaling, pooling and convolutions."""
    from torch import nn

    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    first = nn.Sequential(
        BinaryConv2d(1, 4, 3, padding=1), norm, nn.MaxPool2d(2), Sign(), nn.Flatten(), BinaryLinear(64, 3)
    )
    second = nn.Sequential(BinaryLinear(64, 5), nn.Hardtanh(), BinaryLinear(5, 3), nn.BatchNorm1d(3))
    branched = Branched().eval()
    packed = [pack(first.eval(), (1, 8, 8)), pack(second.eval()), pack(branched, (1, 4, 4), shift=-0.1)]
    return [one.to_bytes() for one in packed]


class Branched(torch.nn.Module):
    """Adds, joins and pads, with real ends."""

    def __init__(self):
        super().__init__()
        self.stem, self.layer = torch.nn.Conv2d(1, 2, 3, padding=1), BinaryConv2d(4, 4, 3, padding=1)
        self.head = torch.nn.Linear(5 * 16, 3)

    def forward(self, x):
        x = sign(self.stem(x))
        x = torch.cat([x, x], 1)
        x = torch.nn.functional.pad(self.layer(x) + x, (0, 0, 0, 0, 0, 1))
        return self.head(torch.relu(x).flatten(1))


def malformed(count, seed=0):
    """``count`` damaged files: flipped bits, cut ends, wrong shapes, huge sizes, random bytes."""
    rng, originals = np.random.default_rng(seed), small_files()
    huge = [0, -1, 2**24 + 1, 2**31, 2**62, 10**30, 1e300, "8", None, True, [], [1, 2, 3], [2**40, 2**40], {}]
    for place in range(count):
        content = originals[place % len(originals)]
        damage = place % 5
        if damage == 0:
            changed = bytearray(content)
            for _ in range(rng.integers(1, 4)):
                spot = int(rng.integers(len(changed)))
                changed[spot] ^= 1 << int(rng.integers(8))
            content = bytes(changed)
        elif damage == 1:
            content = content[: rng.integers(len(content))]
        elif damage == 2:  # one value of the description, with a new checksum
            value = huge[rng.integers(len(huge))]
            content = with_network(content, lambda network, v=value: _spoil(network, rng, v))
        elif damage == 3:  # shapes and offsets of the tensors
            header, data = parts(content)
            name = list(header)[rng.integers(1, len(header))]
            field = ["shape", "data_offsets", "dtype"][rng.integers(3)]
            others = {"dtype": ["F64", "BF16", "BOOL", "X9", 3]}.get(field, huge)
            header[name][field] = others[rng.integers(len(others))]
            content = joined(header, data)
        else:  # a header longer than the file, or random bytes
            if rng.integers(2):
                content = struct.pack("<Q", int(rng.integers(2**63))) + content[8:]
            else:
                content = rng.bytes(int(rng.integers(1, 400)))
        yield content


def _spoil(network, rng, value):
    """Put ``value`` somewhere into the description, remove a field, or nest it very deeply."""
    stage = network["stages"][rng.integers(len(network["stages"]))]
    choice = rng.integers(6)
    if choice == 0:
        network["shape"] = value
    elif choice == 1:
        network[["kind", "stages", "new"][rng.integers(3)]] = value
    elif choice == 2:
        stage.pop(list(stage)[rng.integers(len(stage))])
    elif choice == 3:
        network["shape"][rng.integers(len(network["shape"]))] = value
    else:
        stage[list(stage)[rng.integers(len(stage))]] = value


@contextmanager
def little_room(megabytes):
    """Limit the growth of the address space, so that larger allocations fail, in Rust as in Python."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc to know how large the process is")
    size = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 2**20, limits[1]))
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture
def memory_folder(tmp_path):
    """A folder in memory if the system has one, since rewriting a file on disk takes milliseconds."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_malformed_files_give_a_documented_error_and_take_little_memory(count, memory_folder):
    path = memory_folder / "net.safetensors"
    path.write_bytes(small_files()[0])
    PackedModel.load(path).scores(np.zeros((1, 64), np.uint8), backend="numpy")  # imports, once
    messages, others, excess = [], [], []
    with little_room(megabytes=64):
        for content in malformed(count):
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                others.append(
                    PackedModel.load(path)
                )  # with a new checksum it may be a valid network, though another one
            except PackedFileError as error:
                messages.append(str(error))
            taken = tracemalloc.get_traced_memory()[1] - before - 2 * len(content)
            excess.append(taken - max(16_000, 12 * header_size(content)))
    assert len(messages) + len(others) == count
    assert all(message.startswith(str(path)) for message in messages)
    assert len(others) < 0.02 * count
    for model in others:
        x = np.ones((1, *model.shape), np.int8 if model.kind == "int8" else np.uint8)
        model.scores(x, backend="numpy")
    assert max(excess) < 0  # twice the file, a parsed header and an error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: n["stages"][0].update(channels=2), "bytes"),
        (lambda n: n["stages"][0].update(kernel=[2**40, 2**40]), "kernel must be a pair"),
        (lambda n: n["stages"][0].update(stage="exec"), "must be one of linear"),
        (lambda n: n["stages"][0].update(more=1), "needs"),
        (lambda n: n["stages"].pop(), "no stage uses"),
        (lambda n: n.update(shape=[1, 20, 20]), "64 inputs got"),
        (lambda n: n.update(shape=[1, 2**13, 2**13]), "values between two stages"),
        (lambda n: n.update(kind="integers"), "pixels"),
        (lambda n: n["stages"].insert(0, {"stage": "flatten", "tensors": ["x"]}), "is missing"),
    ],
)
def test_a_wrong_description_is_refused_even_if_its_checksum_fits(change, message, tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(with_network(small_files()[0], change))
    with pytest.raises(PackedFileError, match=message):
        PackedModel.load(path)


def test_changed_content_and_other_versions_are_told_apart(tmp_path):
    path, content = tmp_path / "net.safetensors", small_files()[0]
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PackedFileError, match="SHA-256"):
        PackedModel.load(path)
    header, data = parts(content)
    header["__metadata__"][FORMAT.key] = header["__metadata__"][FORMAT.key].replace(
        '"version": 2', '"version": 3'
    )
    path.write_bytes(joined(header, data))
    with pytest.raises(PackedFileError, match="version"):
        PackedModel.load(path)
    path.write_bytes(with_network(content, lambda network: None))
    PackedModel.load(path)  # the same description with a new checksum


def test_a_long_header_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    path = tmp_path / "net.safetensors"
    path.write_bytes(small_files()[0])
    monkeypatch.setattr("spingrad._tensors.MAX_HEADER", 100)
    with pytest.raises(PackedFileError, match="a header of at most 100 bytes"):
        PackedModel.load(path)


def test_a_description_holds_nothing_else(tmp_path):
    path, (header, data) = tmp_path / "net.safetensors", parts(small_files()[0])
    signed = json.loads(header["__metadata__"][FORMAT.key])
    header["__metadata__"][FORMAT.key] = json.dumps(signed | {"more": 1})
    path.write_bytes(joined(header, data))
    with pytest.raises(PackedFileError, match="version, sha256 and network, and nothing else"):
        PackedModel.load(path)


def test_the_checksum_covers_names_dtypes_and_shapes_of_tensors():
    tensor = np.arange(6, dtype=np.int8).reshape(2, 3)
    others = [{"b": tensor}, {"a": tensor.view(np.uint8)}, {"a": tensor.reshape(3, 2)}, {"a": -tensor}]
    assert len({checksum({}, tensors) for tensors in ({"a": tensor}, *others)}) == 5


def test_thresholds_have_a_negative_and_directions_are_signs():
    largest, sign = np.array([2**31 - 1], np.int32), np.array([-1], np.int8)
    Threshold(largest, sign)
    with pytest.raises(ValueError, match="below 2\\^31"):
        Threshold(-largest - 1, sign)
    for other in (0, 2, -2):
        with pytest.raises(ValueError, match="directions must be -1 or \\+1"):
            Threshold(largest, sign * 0 + np.int8(other))


def test_deep_nesting_and_long_numbers_are_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    header, data = parts(small_files()[0])
    for network in ("[" * 100_000, "9" * 10_000, '{"kind": NaN}', ""):
        header["__metadata__"][FORMAT.key] = network
        path.write_bytes(joined(header, data))
        with pytest.raises(PackedFileError):
            PackedModel.load(path)


def test_a_checkpoint_of_torch_weights_is_told_what_to_do(tmp_path):
    from safetensors.torch import save_file

    save_file(made(SIGN_NETWORKS[0]).state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(PackedFileError, match="must be packed first"):
        PackedModel.load(tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError):
        PackedModel.load(tmp_path / "none.safetensors")
