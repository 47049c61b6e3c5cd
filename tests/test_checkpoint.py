import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import time
import tracemalloc
import warnings
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR
from workers import _work, run_workers

import spingrad.checkpoint
from spingrad import QPSBGD, BinaryLinear, binary_parameters, real_parameters
from spingrad._files import read_records, to_records
from spingrad._state import PackedState, read_state
from spingrad.checkpoint import Checkpoint


class Run:
    """A small run with most of what a script has: two optimizers, schedules, a scaler, noise, dropout."""

    def __init__(self, group=None, ranks=None, width=12):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        self.model = nn.Sequential(
            BinaryLinear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Hardtanh(), nn.Linear(width, 3)
        )
        own = binary_parameters(self.model)
        if ranks:
            self.binary = QPSBGD(own, lr=1e-2, ranks=ranks, group=group)
        else:
            self.binary = QPSBGD(own, lr=1e-2)
        self.replica = DistributedDataParallel(self.model) if ranks == "together" else self.model
        self.real = torch.optim.Adam([weight for _, weight in real_parameters(self.model)], lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        self.schedules = CosineAnnealingLR(self.binary, 20), MultiStepLR(self.real, [2, 4])

    def parts(self):
        first, second = self.schedules
        optimizers = dict(binary=self.binary, real=self.real, first=first, second=second)
        return dict(model=self.model, scaler=self.scaler) | optimizers

    def step(self, share=slice(None)):
        """One step on rows drawn from the global generators of torch, numpy and Python."""
        rows = np.random.permutation(24)[:8]  # noqa: NPY002
        x = torch.randn(24, 8)[rows] + random.random()
        y = torch.randint(3, (8,))
        loss = nn.functional.cross_entropy(self.replica(x[share]), y[share])
        self.real.zero_grad()
        self.binary.zero_grad()
        self.scaler.scale(loss).backward()
        for optimizer, schedule in zip((self.binary, self.real), self.schedules, strict=True):
            self.scaler.step(optimizer)
            schedule.step()
        self.scaler.update()

    def state(self):
        """Everything that decides how the run goes on, as one number."""
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        parts |= {"random": spingrad.checkpoint._RandomState().state_dict()}
        return PackedState(parts).digest()


def saved(folder, *steps):
    """A run with a checkpoint at each of ``steps``, and its state at each."""
    run, states = Run(), {}
    checkpoint = Checkpoint(folder, **run.parts())
    for step in range(1, max(steps) + 1):
        run.step()
        if step in steps:
            checkpoint.save(step)
            states[step] = run.state()
    return run, states


def resumed(folder):
    """What load() returns in a new run, the run, and the warnings."""
    run = Run()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step = Checkpoint(folder, **run.parts()).load()
    return step, run, " ".join(str(one.message) for one in told)


def steps(folder):
    """The steps of the saves in a folder, complete or not, oldest first."""
    return [
        spingrad.checkpoint._place(path)[0] for path in Checkpoint(folder, x=nn.Identity())._generations()
    ]


def generation(folder, step):
    """The folder of the last save of a step."""
    return max(folder.glob(f"step-{step:09}.*"), key=spingrad.checkpoint._place)


def test_a_resumed_run_goes_on_bit_for_bit_and_two_generations_are_kept(tmp_path):
    folder = tmp_path / "deep" / "run"
    assert resumed(folder)[0] == 0
    assert not folder.exists()
    whole, states = saved(folder, 1, 2, 3)
    for _ in range(5):
        whole.step()
    end = whole.state()
    assert steps(folder) == [2, 3]
    step, run, told = resumed(folder)
    assert (step, told) == (3, "")
    assert run.state() == states[3]
    for _ in range(5):
        run.step()
    assert run.state() == end


def test_a_state_of_any_form_comes_back_as_it_was(tmp_path):
    state = {
        "numbers": [1, -0.0, float("inf"), 2**80, True, None, "ä\ud800"],
        3: (torch.float16, b"\0\1", b"", {1, 2}, frozenset("a"), torch.Size([1, 2])),
        "counter": Counter({4: 2}),
        "arrays": [np.arange(3, dtype=">u2"), np.float64(0.1), np.zeros((0, 2)), np.array([True])],
        "tensors": [
            torch.tensor(1.5),
            torch.zeros(0, 3),
            torch.arange(12).view(3, 4).T,
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.tensor([1 + 2j]).conj(),
            torch.randn(3, dtype=torch.bfloat16),
            nn.Parameter(torch.ones(2)),
        ],
    }
    state["model"] = nn.BatchNorm1d(2).state_dict()
    (tmp_path / "state").write_bytes(b"".join(PackedState(state).chunks()))
    with open(tmp_path / "state", "rb") as file:
        back = read_state(file)
    assert back["numbers"] == state["numbers"]
    assert str(back["numbers"][1]) == "-0.0"
    assert back[3] == state[3]
    assert type(back[3][-1]) is torch.Size
    assert type(back["counter"]) is Counter
    assert back["counter"] == state["counter"]
    for was, now in zip(state["arrays"], back["arrays"], strict=True):
        assert type(was) is type(now)
        assert was.dtype == now.dtype
        np.testing.assert_array_equal(was, now)
    for was, now in zip(state["tensors"], back["tensors"], strict=True):
        assert was.dtype == now.dtype
        assert torch.equal(was, now)
    assert back["tensors"][3].stride() == state["tensors"][3].stride()
    assert type(back["model"]) is OrderedDict
    assert back["model"]._metadata == state["model"]._metadata


def test_what_cannot_be_saved_is_named_and_leaves_the_last_checkpoint(tmp_path):
    class Part(nn.Module):
        def get_extra_state(self):
            return {"hook": print}

        def set_extra_state(self, state): ...

    saved(tmp_path, 1)
    for state in (Part(), nn.Linear(2, 2, device="meta")):
        with pytest.raises(TypeError, match=r"^part\.(_extra_state\.hook|weight) is a .*Expected"):
            Checkpoint(tmp_path, part=state).save(2)
    assert resumed(tmp_path)[0::2] == (1, "")
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_flipped_bits_and_truncated_files_are_reported_and_the_generation_before_is_loaded(tmp_path, count):
    _, states = saved(tmp_path, 1, 2)
    chance = random.Random(count)
    files = sorted(generation(tmp_path, 2).iterdir())
    run = Run()
    for i in range(count):
        path = files[i % len(files)]
        good = path.read_bytes()
        if i % 6 == 5:
            bad = good[: chance.randrange(len(good))]
        else:
            place = chance.randrange(len(good))
            bad = good[:place] + bytes([good[place] ^ 1 << chance.randrange(8)]) + good[place + 1 :]
        path.write_bytes(bad)
        with pytest.warns(UserWarning, match=rf"step-000000002\.1-\w+ is left out: .*{re.escape(path.name)}"):
            assert Checkpoint(tmp_path, **run.parts()).load() == 1
        path.write_bytes(good)
    assert run.state() == states[1]
    assert resumed(tmp_path)[1].state() == states[2]


def test_lost_files_longer_files_and_an_empty_newer_folder_are_reported(tmp_path):
    _, states = saved(tmp_path, 1, 2)
    (tmp_path / "step-000000007.1-0123456789ab").mkdir()
    step, run, told = resumed(tmp_path)
    assert (step, run.state()) == (2, states[2])
    assert "step-000000007.1-0123456789ab is left out: it is incomplete: it has no manifest.jsonl" in told
    file = generation(tmp_path, 2) / "rank-0.safetensors"
    os.truncate(file, 2**40)  # sparse: nobody reads this much
    step, run, told = resumed(tmp_path)
    assert (step, run.state()) == (1, states[1])
    assert f"{file.name} has {2**40} bytes, expected " in told
    file.unlink()
    assert f"No such file or directory: '{file}'" in resumed(tmp_path)[2]
    generation(tmp_path, 1).rename(tmp_path / "step-000000009.1-0123456789ab")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(
            RuntimeError, match=r"no checkpoint .* intact \(step-000000009\.\S+: .* that of step 9; step-"
        ),
    ):
        Checkpoint(tmp_path, **Run().parts()).load()


def test_a_run_that_fell_back_goes_on_saving_and_removes_nothing_that_is_intact(tmp_path):
    saved(tmp_path, 1, 3)
    (generation(tmp_path, 3) / "rank-0.safetensors").unlink()
    run = Run()
    checkpoint = Checkpoint(tmp_path, **run.parts())
    with pytest.raises(ValueError, match=r"already holds step-000000003\.\S+, which is newer than step 2"):
        checkpoint.save(2)
    with pytest.warns(UserWarning, match="rank-0"):
        assert checkpoint.load() == 1
    for step, left in ((2, [1, 2, 3]), (3, [2, 3, 3]), (4, [3, 4])):
        run.step()
        checkpoint.save(step)
        assert steps(tmp_path) == left
        assert resumed(tmp_path)[0] == step


class Crash(BaseException):
    """The process ends here."""


def test_the_first_save_that_did_not_finish_is_no_checkpoint(tmp_path, monkeypatch):
    def crash(*_):
        raise Crash

    monkeypatch.setattr(spingrad.checkpoint, "write_atomically", crash)
    with pytest.raises(Crash):
        saved(tmp_path, 1)
    step, _, told = resumed(tmp_path)
    assert (step, steps(tmp_path)) == (0, [1])
    assert "incomplete" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_what_was_there(tmp_path, monkeypatch):
    run, states = saved(tmp_path, 1)
    for step in (1, 2):
        for full, named in (("rank-0", "rank-0.safetensors"), (".spingrad-", "manifest.jsonl")):

            def open_full(path, flags, *mode, full=full, really=os.open):
                is_full = f"/{full}" in str(path) and flags & os.O_CREAT
                return really("/dev/full", os.O_WRONLY) if is_full else really(path, flags, *mode)

            with monkeypatch.context() as patch:
                patch.setattr(os, "open", open_full)
                with pytest.raises(OSError, match=f"No space left on device: '.*/{named}'"):
                    Checkpoint(tmp_path, **run.parts()).save(step)
            assert steps(tmp_path) == [1]
            assert len(list(generation(tmp_path, 1).iterdir())) == 2
    assert resumed(tmp_path)[1].state() == states[1]


def test_of_two_saves_of_a_step_the_later_one_is_loaded(tmp_path, monkeypatch):
    run, states = saved(tmp_path, 1)
    run.step()
    with monkeypatch.context() as patch:  # the second save dies just before it counts
        patch.setattr(spingrad.checkpoint, "write_atomically", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Checkpoint(tmp_path, **run.parts()).save(1)
    assert resumed(tmp_path)[1].state() == states[1]
    for _ in range(11):  # the eleventh comes after the second, and not after the first
        Checkpoint(tmp_path, **run.parts()).save(1)
        assert resumed(tmp_path)[1].state() == run.state()
        run.step()
    assert steps(tmp_path) == [1, 1]


def test_files_of_others_are_left_alone_and_do_not_block_a_folder(tmp_path):
    inside = generation(saved(tmp_path, 1) and tmp_path, 1)
    foreign = [".nfs0000000001", ".DS_Store", "notes.txt", "lost+found/x", "step-1/x", "step-000000009/x"]
    foreign = [tmp_path / name for name in foreign] + [inside / ".nfs02", inside / "manifest.jsonl.bak"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / "step-000000009.1-0123456789ab").symlink_to(tmp_path / "lost+found")
    assert resumed(tmp_path)[0::2] == (1, "")
    for step in (2, 3, 4):
        Checkpoint(tmp_path, **Run().parts()).save(step)
    assert resumed(tmp_path)[0::2] == (4, "")
    assert all(path.read_text() == "mine" for path in foreign)
    assert sorted(path.name for path in inside.iterdir()) == [".nfs02", "manifest.jsonl.bak"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError):
        Checkpoint(tmp_path / "file", model=Run().model).save(1)


class Picky:
    """A part that refuses every state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise ArithmeticError("not this one")


def test_a_mismatch_changes_nothing(tmp_path):
    run, _ = saved(tmp_path / "run", 1)
    fresh = Run()
    other = fresh.parts()
    weights = [weight for _, weight in real_parameters(fresh.model)]
    cases = {
        "model: 0.weight is float32 of shape (12, 8) in the checkpoint and float32 of shape (9, 8)": (
            other | {"model": Run(width=9).model}
        ),
        "and missing here": other | {"model": fresh.model[0]},
        "0.weight is float32 of shape (12, 8) in the checkpoint and float64": (
            other | {"model": Run().model.double()}
        ),
        "real: weight 0 is float32 of shape": other | {"real": torch.optim.Adam(weights[::-1])},
        "different number of parameter groups": (
            other | {"real": torch.optim.Adam([{"params": weights[:2]}, {"params": weights[2:]}])}
        ),
        "of another optimizer than SGD": other | {"real": torch.optim.SGD(weights, lr=0.1)},
        "real: 0.weight is missing in the checkpoint": other | {"real": fresh.model},
        "scaler: itself is there in the checkpoint and missing here": {"model": fresh.model},
    }
    for message, parts in cases.items():
        before = {name: PackedState(part.state_dict()).digest() for name, part in parts.items()}
        chance = torch.get_rng_state()
        with pytest.raises(ValueError, match=re.escape(message)):
            Checkpoint(tmp_path / "run", **parts).load()
        assert {name: PackedState(part.state_dict()).digest() for name, part in parts.items()} == before
        assert torch.equal(torch.get_rng_state(), chance)

    Checkpoint(tmp_path / "picky", picky=Picky(), model=run.model, real=run.real).save(1)
    before = fresh.state()
    with pytest.raises(ArithmeticError, match="not this one"):
        Checkpoint(tmp_path / "picky", model=fresh.model, picky=Picky(), real=fresh.real).load()
    assert fresh.state() == before


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="something to keep"):
        Checkpoint(tmp_path)
    with pytest.raises(TypeError, match="state_dict"):
        Checkpoint(tmp_path, model=3)
    with pytest.raises(ValueError, match="a part needs a name"):
        Checkpoint(tmp_path, **{"": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match="random"):
        Checkpoint(tmp_path, random=nn.Linear(1, 1))
    for step in (-1, True, 1.5):
        with pytest.raises((ValueError, TypeError), match="step is a whole number"):
            Checkpoint(tmp_path, model=nn.Linear(1, 1)).save(step)


def test_everything_is_on_disk_before_the_manifest_and_that_before_anything_is_removed(tmp_path, monkeypatch):
    run, _ = saved(tmp_path / "run", 1, 2)
    events = []

    def watch(module, name, told):
        real = getattr(module, name)

        def wrapper(*args, **kwargs):
            events.append((name, told(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    watch(os, "fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    watch(os, "replace", lambda source, target: str(target))
    watch(Path, "unlink", lambda path, *_: str(path))
    Checkpoint(tmp_path / "run", **run.parts()).save(3)
    target = generation(tmp_path / "run", 3)
    replaced = events.index(("replace", str(target / "manifest.jsonl")))
    removed = next(i for i, (name, _) in enumerate(events) if name == "unlink")
    before = {path for name, path in events[:replaced] if name == "fsync"}
    after = {path for name, path in events[replaced:removed] if name == "fsync"}
    assert {str(path) for path in target.glob("*.safetensors")} | {str(target), str(target.parent)} <= before
    assert any(".spingrad-" in path for path in before)  # the manifest, before it has its name
    assert {str(target), str(target.parent)} <= after


@pytest.mark.parametrize("step", [2, 3])
def test_a_crash_before_any_change_on_disk_leaves_the_old_state_or_the_new_one(tmp_path, monkeypatch, step):
    run, states = saved(tmp_path / "run", 1, 2)
    run.step()
    old, new = states[2], run.state()
    chance = spingrad.checkpoint._RandomState().state_dict()
    left = 0

    def crash_in_time(change):
        def wrapper(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return change(*args, **kwargs)

        return wrapper

    found = []
    for count in itertools.count():
        folder, left = tmp_path / str(count), count
        shutil.copytree(tmp_path / "run", folder)
        spingrad.checkpoint._RandomState().load_state_dict(dict(chance))
        checkpoint = Checkpoint(folder, **run.parts())
        with monkeypatch.context() as patch, suppress(Crash):
            patch.setattr(os, "fsync", crash_in_time(lambda _: None))
            for owner, names in ((os, ["replace"]), (Path, ["mkdir", "unlink", "rmdir"])):
                for name in names:
                    patch.setattr(owner, name, crash_in_time(getattr(owner, name)))
            checkpoint.save(step)
        loaded, resumed_run, _ = resumed(folder)
        found.append(resumed_run.state())
        assert (loaded, found[-1]) in {(2, old), (step, new)}
        shutil.rmtree(folder)
        if left >= 0:
            break
    assert found == [old] * found.count(old) + [new] * found.count(new)
    assert found.count(old) > 5
    assert found.count(new) > 5


class Evil:
    def __reduce__(self):
        return Path.touch, (Path(os.environ["EVIL"]),)


def forged_state(described, place=(0, 8), version=3):
    """A file of eight bytes of data, with any description."""
    signed = json.dumps({"version": version, "state": described})
    header = {"__metadata__": {"spingrad state": signed}}
    header["x"] = {"dtype": "U8", "shape": [8], "data_offsets": list(place)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.needs("safetensors")
def test_a_state_is_a_safetensors_file_and_takes_the_memory_of_its_tensors(tmp_path):
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(500, 2000), nn.BatchNorm1d(2000))
    Checkpoint(tmp_path, model=model).save(1)
    (path,) = tmp_path.glob("step-*/rank-0.safetensors")
    tensors = load_file(path)
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], value)
    size = path.stat().st_size
    tracemalloc.start()
    with open(path, "rb") as file:
        read_state(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{size:,} bytes are read with {peak:,}, {peak / size:.2f} of them")
    assert peak < 1.2 * size


def test_a_pickle_with_the_right_checksum_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    _, states = saved(tmp_path / "run", 1, 2)
    manifest = generation(tmp_path / "run", 2) / "manifest.jsonl"
    (content,) = read_records(manifest)
    torch.save({"state": Evil()}, tmp_path / "evil.pt")
    forged = {
        "pickle": pickle.dumps({"state": Evil()}),
        "torch.save": (tmp_path / "evil.pt").read_bytes(),
        "empty": b"",
        "longer": (2**25).to_bytes(8, "little") + b"{}",
        "deep": (10**5).to_bytes(8, "little") + b"[" * 10**5,
        "beyond the end": forged_state({"tensor": ["x", "uint8", [9], [1]]}, [0, 9]),
        "a hole": forged_state({"tensor": ["x", "uint8", [4], [1]]}, [4, 8]),
        "negative": forged_state({"tensor": ["x", "uint8", [-8], [1]]}),
        "twice": forged_state([{"tensor": ["x", "uint8", [8], [1]]}, {"bytes": "x"}]),
        "no dtype": forged_state({"tensor": ["x", "load", [8], [1]]}),
        "no kind": forged_state({"eval": "1"}),
        "no place for versions": forged_state({"dict": [[], {"set": []}]}),
        "no dtype of numpy": forged_state({"numpy": [{"bytes": "x"}, "(,i4", [1], False]}),
        "objects": forged_state({"numpy": [{"bytes": "x"}, "O", [1], False]}),
        "a huge stride": forged_state({"tensor": ["x", "uint8", [8], [2**60]]}),
        "another version": forged_state({"dict": [[], None]}, version=4),
    }
    for name, data in forged.items():
        (manifest.parent / "rank-0.safetensors").write_bytes(data)
        content["files"] = [[len(data), hashlib.sha256(data).hexdigest()]]
        manifest.write_bytes(to_records(content))
        step, run, told = resumed(tmp_path / "run")
        assert (step, run.state()) == (1, states[1]), name
        assert "is left out" in told
    assert not (tmp_path / "evil").exists()


def on_two_ranks(rank, size, folder):
    """Many cases in one group; what this rank saw in each."""
    seen = {}
    run, share = Run(ranks="vote"), slice(4 * rank, 4 * rank + 4)
    checkpoint = Checkpoint(folder, **run.parts())
    for step in (1, 2):
        run.step(share)
        checkpoint.save(step)
        seen[f"state {step}"] = run.state()
    seen["files"] = {path.name: path.stat().st_size for path in generation(folder, 2).iterdir()}

    def load(parts=None):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            step = Checkpoint(folder, **(parts or run.parts())).load()
        return [step, run.state(), " ".join(str(one.message) for one in told)]

    def failure(work):
        dist.barrier()
        try:
            work()
        except Exception as error:
            return [f"{type(error).__name__}: {error}", run.state()]

    run.step(share)
    seen["loaded"] = load()
    wider = nn.BatchNorm1d(2) if rank else run.model
    seen["other model"] = failure(lambda: load(run.parts() | {"model": wider}))
    run.step(share)
    seen["before"] = run.state()
    seen["refused"] = failure(lambda: load(run.parts() | ({"scaler": Picky()} if rank else {})))
    if rank == 0:
        (generation(folder, 2) / "rank-1.safetensors").write_bytes(b"")
    dist.barrier()
    seen["damaged"] = load()
    seen["other parts"] = failure(lambda: Checkpoint(folder, **{f"model{rank}": run.model}).save(3))
    return seen


def test_ranks_load_the_newest_generation_that_is_intact_for_all_or_nothing(tmp_path):
    folder = tmp_path / "run"
    ranks = first, second = run_workers(on_two_ranks, 2, tmp_path, folder)
    # Optimizers with momentum of their own, BatchNorm's statistics; equal seeds, so equal random states.
    files = first["files"]
    assert files.keys() == {"manifest.jsonl", "rank-0.safetensors", "rank-1.safetensors"}
    assert files["rank-1.safetensors"] < files["rank-0.safetensors"]
    for seen in ranks:
        assert seen["loaded"] == [2, seen["state 2"], ""]
        assert seen["other model"][1] == seen["state 2"]
        assert seen["refused"][1] == seen["before"]
        assert seen["damaged"][:2] == [1, seen["state 1"]]
        assert "all ranks have to save the same parts" in seen["other parts"][0]
    assert first["other model"][0].startswith(
        "RuntimeError: rank 1 could not take part in the checkpoint: Val"
    )
    assert second["other model"][0].startswith("ValueError: ")
    assert "rank 1 could not take part in the checkpoint: ArithmeticError" in first["refused"][0]
    assert re.search(r"rank-1\.safetensors has 0 bytes, expected \d+", first["damaged"][2])

    (tmp_path / "alone").mkdir()
    (alone,) = run_workers(load_alone, 1, tmp_path / "alone", folder)
    assert alone["step"] == 2  # what is damaged belongs to rank 1
    assert "was saved by 2 ranks and is loaded by 1" in alone["told"]


def load_alone(rank, size, folder):
    run = Run(ranks="vote")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        return {
            "step": Checkpoint(folder, **run.parts()).load(),
            "told": " ".join(str(one.message) for one in told),
        }


STEPS = 12


def train(rank, size, folder, ranks=None):
    """The whole run, from where the last life ended, with a checkpoint after every step."""
    torch.set_num_threads(1)
    run = Run(ranks=ranks)
    share = torch.arange(8).tensor_split(size)[rank]
    checkpoint = Checkpoint(folder, **run.parts())
    warnings.simplefilter("ignore")  # of a generation that was being written
    for step in range(checkpoint.load(), STEPS):
        run.step(share)
        checkpoint.save(step + 1)
        time.sleep(0.01)
    return run.state()


def reached(folder):
    """The newest generation, complete or not."""
    return max([0, *steps(folder)])


def lives(size, tmp_path, kills, ranks=None):
    """Start the run, kill all its processes at a random moment, and again; the states it ends with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "spingrad.distributed"])
    chance = random.Random(kills)
    folder = tmp_path / f"run-{size}-{ranks}"
    whole = run_workers(train, size, tmp_path, tmp_path / f"whole-{size}-{ranks}", ranks)
    for life in range(kills):
        group = tmp_path / f"life-{size}-{life}"
        group.mkdir()
        args = [(train, rank, size, group, (folder, ranks), 60) for rank in range(size)]
        processes = [context.Process(target=_work, args=own) for own in args]
        for process in processes:
            process.start()
        goal = min(STEPS - 2, reached(folder) + chance.randrange(2))
        while reached(folder) < goal:  # a life ends a random time after this step
            assert all(process.is_alive() for process in processes)
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.06))
        chance.shuffle(processes)
        for process in processes:
            process.kill()  # SIGKILL
            time.sleep(chance.uniform(0, 0.01))
        for process in processes:
            process.join()
    assert run_workers(train, size, tmp_path, folder, ranks) == whole


def test_a_process_killed_at_random_moments_ends_as_if_it_had_never_been(tmp_path):
    lives(1, tmp_path, kills=5)


@pytest.mark.parametrize("ranks", ["together", "vote"])
def test_two_processes_killed_at_random_moments_end_as_if_they_had_never_been(tmp_path, ranks):
    lives(2, tmp_path, kills=2, ranks=ranks)
