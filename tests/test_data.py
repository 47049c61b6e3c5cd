import shutil
from pathlib import Path

import pytest
import torch

from spinstep.data import fashion_mnist, files, mnist


@pytest.mark.parametrize("load", [mnist, fashion_mnist])
def test_images_have_the_published_counts(data_folder, load):
    train, test = load("train"), load("test")
    assert train.images.shape == (60_000, 28, 28)
    assert test.images.shape == (10_000, 28, 28)
    assert train.images.dtype == torch.uint8
    assert test.labels.bincount().sum() == 10_000
    assert len(train.labels.unique()) == 10
    pixels = train.pixels()
    assert pixels.shape == (60_000, 784)
    if load is mnist:
        assert pixels.mean().item() == pytest.approx(0.1307, abs=1e-4)
        assert pixels.std().item() == pytest.approx(0.3081, abs=1e-4)


def test_a_changed_byte_is_refused_before_parsing(data_folder, tmp_path, monkeypatch):
    shutil.copytree(Path(data_folder) / "mnist", tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.unlink()
    path.write_bytes(content)
    monkeypatch.setenv("SPINSTEP_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"t10k-labels.*expected a file with SHA-256 f7ae60f9"):
        mnist("test")


def test_a_download_is_checked_and_kept(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_bytes(b"data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPINSTEP_DATA", raising=False)
    good = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"
    with pytest.raises(ValueError, match="expected a file with SHA-256 0000"):
        files.fetch("a/file", "0" * 64, source.as_uri())
    assert not (tmp_path / "cache").exists()
    assert files.fetch("a/file", good, source.as_uri()) == b"data"
    source.unlink()
    assert files.fetch("a/file", good, source.as_uri()) == b"data"
    assert [p.name for p in (tmp_path / "cache/spinstep/a").iterdir()] == ["file"]


def test_a_file_that_is_nowhere_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="point SPINSTEP_DATA at a folder that has it"):
        files.fetch("a/file", "0" * 64, (tmp_path / "none").as_uri())


def test_wrong_splits_are_explained():
    with pytest.raises(ValueError, match='"train" or "test", got \'valid\''):
        mnist("valid")
