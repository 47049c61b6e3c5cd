"""Hostile input through every public door: the call works, or raises an error that the docs name.

CI makes some hundred calls, always the same. 10,000 others:
``pytest tests/test_hostile.py --hypothesis-profile=long``.
"""

import copy
import math
import struct
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spingrad
from spingrad import (
    QPSBGD,
    BinaryConv1d,
    BinaryConv2d,
    BinaryConv3d,
    BinaryConvTranspose2d,
    BinaryLinear,
    BinaryQuadratic,
    Bits,
    Gain,
    binary_parameters,
    convert,
    real_parameters,
    sign,
)
from spingrad._files import FIRST_LINE, append_record, read_records
from spingrad.baselines import BinaryConnect, Bop, ProxQuant, SignSGD
from spingrad.checkpoint import Checkpoint
from spingrad.export import PackedModel, pack
from spingrad.nn import BinaryGCNConv, BinaryMultiheadAttention
from spingrad.solvers import BlockDescentSolver, ExactSolver, SignSolver, derive_seed

pytestmark = pytest.mark.filterwarnings("ignore")

DOCUMENTED = (
    ValueError,
    TypeError,
    RuntimeError,
    FloatingPointError,
    OSError,
    IndexError,
)  # the last: torch's
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
KINDS = [*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64]
CONVOLUTIONS = [BinaryConv1d, BinaryConv2d, BinaryConv3d, BinaryConvTranspose2d]
LAYERS = [BinaryLinear, BinaryGCNConv, BinaryMultiheadAttention, *CONVOLUTIONS]

NUMBERS = [0, -1, True, 0.5, 2.5, math.nan, math.inf, -math.inf, 1e300, 1e-300, 10**30, -(10**30)]
TEXTS = ["", "3", "same", "circular", "nowhere", b"1"]
OTHERS = [None, (), (1, 2), [3], {}, torch.tensor(2), torch.zeros(0), np.float32(1), np.int64(2), nn.ReLU()]
odd = st.sampled_from([*NUMBERS, *TEXTS, *OTHERS, torch.float16, object])
small = st.integers(1, 4)
either = st.one_of(small, small, small, odd)


@st.composite
def tensors(draw, least=0):
    shape = draw(st.lists(st.integers(0, 4), min_size=least, max_size=4))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
    match draw(st.integers(0, 9)):
        case 0:
            x = x * math.nan
        case 1:
            x = x / 0
        case 2:
            x = x * 1e38
        case 3:
            x = torch.zeros_like(x)
        case 4:
            x = x.transpose(0, -1) if x.ndim else x
        case 5:
            x = x.to("meta")
        case 6:
            x = x.to_sparse() if x.ndim else x
        case 7:
            x = x.requires_grad_()
    return x.to(draw(st.sampled_from(KINDS))) if draw(st.booleans()) else x


@contextmanager
def documented():
    """Only documented errors, each with a message."""
    try:
        yield
    except DOCUMENTED as error:
        if not str(error).strip():
            pytest.fail(f"{type(error).__name__} without a message")


@given(st.data())
def test_layers(data):
    kind = data.draw(st.sampled_from(LAYERS))
    arguments = data.draw(st.lists(either, min_size=2, max_size=5))
    names = st.sampled_from(
        ["bias", "scale", "groups", "padding", "stride", "device", "dtype", "padding_mode"]
    )
    options = data.draw(st.dictionaries(names, either, max_size=1))
    with documented():
        layer = kind(*arguments, **options)
        y = layer(*data.draw(st.lists(tensors(1), min_size=1, max_size=3)))
        (y[0] if isinstance(y, tuple) else y).sum().backward()


@given(st.data())
def test_a_step_works_or_changes_nothing(data):
    torch.manual_seed(0)
    model = nn.Sequential(BinaryLinear(4, 3), nn.Hardtanh(), BinaryLinear(3, 2, bias=True))
    names = ["lr", "target_rms", "momentum", "whitening", "rank", "rows", "clamp", "seed"]
    names += ["on_nonfinite"]
    options = data.draw(st.dictionaries(st.sampled_from([*names, "solver"]), either, max_size=2))
    with documented():
        optimizer = QPSBGD(binary_parameters(model), **options)
        x = data.draw(st.one_of(tensors(1), st.just(torch.ones(5, 4)), st.just(torch.full((5, 4), 1e30))))
        factor = data.draw(st.sampled_from([1.0, 0.0, math.nan, math.inf, 1e38, 1e-38]))
        (model(x).sum() * factor).backward()
        before = copy.deepcopy(model.state_dict())
        try:
            optimizer.step()
        except DOCUMENTED:
            assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            raise
        assert all(weight.isfinite().all() for weight in model.parameters())


@given(st.data())
def test_loaded_states(data):
    model = nn.Sequential(BinaryLinear(3, 2, bias=True))
    optimizer = QPSBGD(binary_parameters(model), momentum=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    part = data.draw(st.sampled_from([model, optimizer]))
    state = copy.deepcopy(part.state_dict())
    inner = state
    for _ in range(data.draw(st.integers(0, 3))):
        if isinstance(inner, dict) and inner:
            key = data.draw(st.sampled_from(sorted(inner, key=str)))
            if isinstance(inner[key], dict) and data.draw(st.booleans()):
                inner = inner[key]
            elif data.draw(st.booleans()):
                inner[key] = data.draw(st.one_of(odd, tensors()))
            else:
                del inner[key]
    with documented():
        part.load_state_dict(state)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@given(st.data())
def test_other_optimizers(data):
    layer = BinaryLinear(3, 2)
    kind = data.draw(st.sampled_from([SignSGD, Bop, ProxQuant, BinaryConnect]))
    params = data.draw(st.one_of(st.just(binary_parameters(layer)), st.just(layer.parameters()), odd))
    with documented():
        optimizer = kind(params, *data.draw(st.lists(either, max_size=2)))
        layer(torch.ones(2, 3)).sum().backward()
        optimizer.step()


@given(st.data())
def test_problems_and_solvers(data):
    with documented():
        Z, V = data.draw(tensors(1)), data.draw(tensors(1))
        if data.draw(st.booleans()):
            Z, V = torch.randn(4, 5), torch.randn(4, 2) * data.draw(st.sampled_from([1, 0, 1e30, math.nan]))
        problem = BinaryQuadratic.least_squares(Z, V)
        match data.draw(st.integers(0, 4)):
            case 0:
                problem.energy(data.draw(tensors()))
            case 1:
                problem.to_bqm(data.draw(either))
            case 2:
                problem.to_ising(data.draw(either))
            case 3:
                problem.units(data.draw(either), data.draw(either))
            case 4:
                problem.lower_bound(tolerance=data.draw(either), max_iterations=data.draw(either))
    with documented():
        kind = data.draw(st.sampled_from([BlockDescentSolver, ExactSolver, SignSolver]))
        solver = kind(*data.draw(st.lists(either, max_size=2)))
        problem = BinaryQuadratic.least_squares(torch.randn(4, 3), torch.randn(4, 2))
        spins = solver.solve(problem, seed=data.draw(either)).spins
        assert (spins.abs() == 1).all()


@given(st.data())
def test_small_doors(data):
    call = data.draw(
        st.sampled_from(
            [
                lambda: sign(data.draw(st.one_of(tensors(), odd))),
                lambda: Bits(data.draw(either), data.draw(either))(data.draw(tensors())),
                lambda: Gain(data.draw(either))(data.draw(tensors())),
                lambda: convert(data.draw(odd)),
                lambda: convert(nn.Sequential(nn.Linear(2, 2)), keep=data.draw(odd), scale=data.draw(either)),
                lambda: binary_parameters(data.draw(odd)),
                lambda: real_parameters(data.draw(odd)),
                lambda: derive_seed(*data.draw(st.lists(either, max_size=3))),
                lambda: pack(
                    data.draw(
                        st.sampled_from([BinaryLinear(3, 2), nn.Linear(3, 2), nn.ReLU(), nn.Sequential()])
                    ),
                    data.draw(either),
                    scale=data.draw(either),
                ),
                lambda: pack(BinaryLinear(3, 2))(data.draw(tensors())),
            ]
        )
    )
    with documented():
        call()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One good file of each kind, and how it is read."""
    folder = tmp_path_factory.mktemp("files")
    append_record(folder / "records.jsonl", {"a": [1, 2.5, "x"]})
    pack(
        nn.Sequential(BinaryLinear(9, 4), nn.BatchNorm1d(4).eval(), spingrad.Sign(), BinaryLinear(4, 2))
    ).save(folder / "packed.safetensors")
    layer = BinaryLinear(3, 2)
    Checkpoint(folder / "run", model=layer).save(1)
    state = next((folder / "run").glob("step-*/rank-0.safetensors"))

    def load_checkpoint(path: Path) -> None:
        state.write_bytes(path.read_bytes())
        Checkpoint(folder / "run", model=layer).load()

    return (
        folder,
        {
            folder / "records.jsonl": read_records,
            folder / "packed.safetensors": PackedModel.load,
            folder / "state": load_checkpoint,
        },
        state.read_bytes(),
    )


@pytest.mark.needs("safetensors")
@given(data=st.data())
def test_files(data, files):
    folder, readers, state = files
    path, read = data.draw(st.sampled_from(list(readers.items())))
    good = path.read_bytes() if path.exists() else state
    match data.draw(st.integers(0, 4)):
        case 0:
            content = data.draw(st.binary(max_size=200))
        case 1:
            place = data.draw(st.integers(0, len(good) - 1))
            content = good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
        case 2:
            content = good[: data.draw(st.integers(0, len(good)))]
        case 3:
            content = FIRST_LINE + data.draw(st.binary(max_size=200))
        case 4:
            content = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1))) + good[8:]
    other = folder / "hostile"
    other.write_bytes(content)
    with documented():
        read(other)
    assert other.read_bytes() == content
    state_file = next((folder / "run").glob("step-*/rank-0.safetensors"), None)
    assert state_file is not None
    state_file.write_bytes(state)
