"""Everything that writes a file: on a full disk, in a folder that cannot be written, over files of others."""

import os
import shutil
import stat

import pytest
import torch
from file_helpers import FOREIGN, contents, full_disk
from torch import nn

from spingrad import BinaryLinear, _files
from spingrad.checkpoint import Checkpoint
from spingrad.cli import main

posix = pytest.mark.skipif(os.name != "posix", reason="needs limits and permissions of POSIX")


def network():
    pytest.importorskip("safetensors")
    from spingrad.export.report import example

    return example((64, 32, 10))


def checkpoint(folder):
    torch.manual_seed(len(contents(folder)) if folder.is_dir() else 0)
    model = nn.Sequential(BinaryLinear(8, 4))
    step = len(list(folder.glob("checkpoint/step-*"))) if folder.is_dir() else 0
    Checkpoint(folder / "checkpoint", model=model).save(step)


def records(folder):
    _files.append_record(folder / "runs.jsonl", ["x" * 300])


def packed(folder):
    network().save(folder / "net.safetensors")


def c(folder):
    from spingrad.export import to_c

    to_c(network(), "net").save(folder)


def command(to):
    def write(folder):
        model = network()
        if to.endswith("onnx"):
            pytest.importorskip("onnx")
        source = folder.parent / "source.safetensors"
        if not source.exists():
            model.save(source)
        main(["export", str(source), "--to", to, "--out", str(folder / f"net-{to}")])

    return write


def journal(folder):
    pytest.importorskip("dwave.cloud")
    from spingrad.qpu import Journal

    run = Journal(folder / "run.journal", budget=1000.0)
    try:
        for number in range(20):
            run.carry(run.spent_us + number + 1)
    finally:
        run.close()


def layout(folder):
    pytest.importorskip("dwave.cloud")
    from spingrad.qpu import Chip
    from spingrad.qpu.embedding import fill

    wanted = {4: 10 + len(contents(folder)) if folder.is_dir() else 10}
    fill(Chip.ideal("zephyr", 3), wanted, folder / "cache")


WRITERS = {
    "checkpoint": checkpoint,
    "records": records,
    "packed": packed,
    "c": c,
    "command packed": command("packed"),
    "command c": command("c"),
    "command onnx": command("onnx"),
    "command qonnx": command("qonnx"),
    "journal": journal,
    "layout": layout,
}


@posix
@pytest.mark.parametrize("name", WRITERS)
def test_on_a_full_disk_the_error_names_the_file_and_what_was_there_is_intact(name, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    WRITERS[name](folder)
    before = contents(folder)
    assert before
    with full_disk(), pytest.raises((OSError, SystemExit), match=str(folder)) as caught:
        WRITERS[name](folder)
    assert any(reason in str(caught.value) for reason in ("File too large", "disk"))
    after = contents(folder)
    if name == "journal":  # a journal from which a reader takes the same as before
        from spingrad.qpu import Journal

        assert Journal(folder / "run.journal", read_only=True).spent_us == 210
    else:
        assert after == before
    WRITERS[name](folder)  # the disk has space again


@posix
@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(name, tmp_path):
    file = tmp_path / "file"
    file.write_text("my only copy")
    with pytest.raises((OSError, SystemExit), match=rf"{file}|Not a directory"):
        WRITERS[name](file / "folder")
    assert file.read_text() == "my only copy"
    if os.geteuid() == 0:
        return  # to root, every folder is writable
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises((OSError, SystemExit), match=str(folder)):
        WRITERS[name](folder)
    assert contents(folder) == {}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_somebody_else_is_untouched_where_the_user_named_no_file(kind, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    network().save(tmp_path / "net.safetensors")
    for to, file in (("packed", "net-packed.safetensors"), ("c", "net_c.c"), ("c", "net_c.h")):
        path = tmp_path / file
        FOREIGN[kind](path)
        before = path.read_bytes()
        with pytest.raises(SystemExit, match=file):
            main(["export", "net.safetensors", "--to", to])
        assert path.read_bytes() == before
        path.unlink()
        main(["export", "net.safetensors", "--to", to])
        main(["export", "net.safetensors", "--to", to])  # our own is replaced
        for ours in tmp_path.glob("net[_-]*"):
            ours.unlink()


@pytest.mark.filterwarnings("ignore:checkpoint .* is left out")
@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_leaves_every_file_of_somebody_else(kind, tmp_path):
    checkpoint = Checkpoint(tmp_path, model=nn.Sequential(BinaryLinear(8, 4)))
    for place in ("notes", "step-000000001/notes", "step-000000001.1-0123456789ab/notes"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        FOREIGN[kind](path)
    before = contents(tmp_path)
    for step in range(5):
        checkpoint.save(step)
    assert checkpoint.load() == 4
    assert before.items() <= contents(tmp_path).items()
    for path in [
        path for path in tmp_path.rglob("*") if path.is_file() and str(path.relative_to(tmp_path)) in before
    ]:
        path.unlink()
    shutil.rmtree(min(tmp_path.glob("step-000000003.*")))
    for path in tmp_path.glob("step-000000004.*/*"):
        ours = path.read_bytes()
        path.unlink()
        FOREIGN[kind](path)
        before = contents(tmp_path)
        with pytest.raises(RuntimeError, match=path.name):
            checkpoint.load()
        assert contents(tmp_path) == before
        path.write_bytes(ours)


@pytest.mark.parametrize("kind", FOREIGN)
def test_every_foreign_file_is_refused_as_a_packed_network(kind, tmp_path):
    pytest.importorskip("safetensors")
    from spingrad.export import PackedModel

    FOREIGN[kind](tmp_path / "net.safetensors")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"net\.safetensors is not a packed network"):
        PackedModel.load(tmp_path / "net.safetensors")
    assert contents(tmp_path) == before
