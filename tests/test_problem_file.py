"""A problem on disk is the same problem or an error, and a run's problems can be kept."""

import json
import struct
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from file_helpers import FOREIGN, contents, full_disk
from torch import nn

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, BinaryQuadratic, __version__, binary_parameters
from spingrad._tensors import checksum
from spingrad.optim import capture
from spingrad.problem import FORMAT, ProblemFileError
from spingrad.testing import random_problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_file_holds_the_same_problem_and_where_it_came_from(dtype, tmp_path):
    problem = replace(random_problem(5, 7, 3, seed=0, dtype=dtype), idle=torch.tensor([True, False, False]))
    problem = replace(problem, origin={"step": 3, "weight": "0.weight"})
    problem.save(tmp_path / "one.safetensors")
    loaded = BinaryQuadratic.load(tmp_path / "one.safetensors")
    for own in ("Z", "H", "offset", "idle"):
        assert torch.equal(getattr(loaded, own), getattr(problem, own))
    assert (loaded.origin["step"], loaded.origin["weight"]) == (3, "0.weight")
    assert loaded.origin["versions"]["spingrad"] == __version__
    loaded.save(tmp_path / "two.safetensors")
    assert (tmp_path / "two.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_files_are_refused_and_left_as_they_are(kind, tmp_path):
    FOREIGN[kind](tmp_path / "file")
    before = contents(tmp_path)
    with pytest.raises(ProblemFileError, match="is not a problem of spingrad"):
        BinaryQuadratic.load(tmp_path / "file")
    assert contents(tmp_path) == before


def test_a_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "problem.safetensors"
    random_problem(3, 4, 2, seed=1).save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ProblemFileError):
            BinaryQuadratic.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("idle"), "must hold the tensors H, Z, idle and offset"),
        (lambda t: t.update(H=t["H"].double()), "have one dtype, float32 or float64"),
        (lambda t: t.update(idle=t["idle"].float()), "and idle must be bool, got .*float32"),
        (lambda t: t.update(Z=t["Z"][:, :2]), r"Z has shape \(r, n\), H \(n, m\)"),
        (lambda t: t.update(Z=t["Z"][0]), r"Z has shape \(r, n\), H \(n, m\)"),
        (
            lambda t: t.update({name: t[name].half() for name in ("Z", "H", "offset")}),
            "have one dtype, float32 or float64",
        ),
        (lambda t: t.update(Z=t["Z"] * 3e38), "expected finite numbers whose energies are finite"),
        (lambda t: t.update(offset=t["offset"] / 0), "expected finite numbers whose energies are finite"),
    ],
)
def test_tensors_that_make_no_problem_are_refused_with_the_reason(change, message, tmp_path):
    problem = random_problem(3, 4, 2, seed=1)
    own = {"Z": problem.Z, "H": problem.H, "offset": problem.offset, "idle": problem.idle}
    change(own)
    content = FORMAT.to_bytes({}, {name: tensor.contiguous().numpy() for name, tensor in own.items()})
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ProblemFileError, match=message):
        BinaryQuadratic.load(tmp_path / "file")


def test_a_file_of_a_later_version_says_so(tmp_path):
    problem = random_problem(3, 4, 2, seed=1)
    problem.save(tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    signed = json.loads(header["__metadata__"][FORMAT.key]) | {"version": 2, "sha256": checksum({}, {})}
    header["__metadata__"][FORMAT.key] = json.dumps(signed)
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    with pytest.raises(ProblemFileError, match="reads version 1 of the format, the file has version 2"):
        BinaryQuadratic.load(tmp_path / "file")


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "problem.safetensors"
    random_problem(3, 4, 2, seed=1).save(path)
    before = contents(tmp_path)
    with full_disk(), pytest.raises(OSError, match=r"problem\.safetensors"):
        random_problem(9, 9, 9, seed=2).save(path)
    assert contents(tmp_path) == before


def test_an_origin_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    problem = replace(random_problem(3, 4, 2, seed=1), origin={"step": torch.tensor(3)})
    with pytest.raises(TypeError, match="JSON"):
        problem.save(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_files_are_written_and_read_without_safetensors(monkeypatch, tmp_path):
    problem = random_problem(3, 4, 2, seed=1)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    problem.save(tmp_path / "file")
    assert torch.equal(BinaryQuadratic.load(tmp_path / "file").Z, problem.Z)


def test_a_problem_that_could_not_be_loaded_is_not_saved(tmp_path):
    problem = random_problem(3, 4, 2, seed=1)
    half = replace(problem, Z=problem.Z.half(), H=problem.H.half(), offset=problem.offset.half())
    for other, message in ((half, "float32 or float64"), (replace(problem, Z=problem.Z / 0), "finite")):
        with pytest.raises(ValueError, match=message):
            other.save(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def trained(steps, within=None, names=True):
    """The weights of a small network after some steps; ``within`` runs around them."""
    torch.manual_seed(0)
    model = nn.Sequential(BinaryConv2d(2, 4, 3, groups=2), nn.Flatten(), BinaryLinear(36, 3))
    weights = binary_parameters(model)
    optimizer = QPSBGD(weights if names else [weight for _, weight in weights])
    x = torch.rand(8, 2, 5, 5)
    with within(optimizer) if within else nullcontext() as problems:
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [weight.detach() for _, weight in weights], problems


def test_captured_problems_name_their_step_and_weight_and_training_is_unchanged():
    weights, problems = trained(4, lambda optimizer: capture(optimizer, {1, 3}))
    layers = [{"weight": "0.weight", "group": 0}, {"weight": "0.weight", "group": 1}, {"weight": "2.weight"}]
    assert [problem.origin for problem in problems] == [{"step": s, **own} for s in (1, 3) for own in layers]
    assert all(torch.equal(*pair) for pair in zip(weights, trained(4)[0], strict=True))
    assert [p.origin["weight"] for p in trained(1, lambda o: capture(o, [0]), names=False)[1]] == [0, 0, 1]


def test_a_captured_problem_stays_as_it_was():
    _, early = trained(2, lambda optimizer: capture(optimizer, [1]))
    _, late = trained(6, lambda optimizer: capture(optimizer, [1]))
    assert all(torch.equal(a.H, b.H) for a, b in zip(early, late, strict=True))


def test_one_capture_may_run_inside_another():
    optimizer = QPSBGD(binary_parameters(layer := BinaryLinear(4, 2)))

    def step():
        layer(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

    with capture(optimizer, range(9)) as outer:
        with capture(optimizer, range(9)) as inner:
            step()
        step()
    step()
    assert (len(outer), len(inner)) == (2, 1)


def test_other_optimizers_are_refused():
    with (
        pytest.raises(TypeError, match="expected an optimizer QPSBGD, got SGD"),
        capture(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [0]),
    ):
        pass
