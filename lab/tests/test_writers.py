"""What the lab writes: on a full disk, in a folder that cannot be written, over files of others."""

import os
import sys
from pathlib import Path

import pytest
import torch

from spingrad import _figures
from spingrad._files import FileFormatError, check_own
from spingrad_lab import experiments
from spingrad_lab.cli import main
from spingrad_lab.report.page import HTML_MARK, MARKDOWN_MARK
from spingrad_lab.report.sections import Figure, Section
from spingrad_lab.runs import Experiment, Line, append_line
from spingrad_lab.tasks import small

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from file_helpers import FOREIGN, contents, full_disk


class Squares(Experiment):
    title, source = "Squares", "nowhere"

    def plan(self, lab):
        lab.run([{"seed": 3}])

    def compute(self, job):
        return {"square": 9}

    def show(self, runs):
        text = "<svg><title>https://matplotlib.org</title></svg>" + " " * 300
        return Section(figures=[Figure("plot", "A plot.", text)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Results of one experiment, with a figure and a report."""
    monkeypatch.setattr(experiments, "EXPERIMENTS", {"squares": Squares()})
    main(["run", "squares", "--workers", "0", "--out", str(tmp_path / "results")])
    main(["report", str(tmp_path / "results")])
    return tmp_path / "results"


def test_a_file_of_somebody_else_in_the_place_of_a_report_or_figure_is_untouched(folder):
    for name in ("report.html", "report.md", "figures/squares-plot.svg"):
        ours = (folder / name).read_bytes()
        (folder / name).write_text("my only copy")
        with pytest.raises(SystemExit, match=rf"or one that spingrad has written, got .*{name}"):
            main(["report", str(folder)])
        assert (folder / name).read_text() == "my only copy"
        (folder / name).write_bytes(ours)


@pytest.mark.parametrize("mark", [HTML_MARK, MARKDOWN_MARK, _figures.MARK])
def test_no_file_of_somebody_else_has_the_mark_of_ours(mark, tmp_path):
    for kind, write in FOREIGN.items():
        write(tmp_path / kind)
        with pytest.raises(FileFormatError, match=kind):
            check_own(tmp_path / kind, mark)


def test_every_file_of_somebody_else_in_the_place_of_results_is_untouched(tmp_path):
    path = tmp_path / "logistic.jsonl"
    for kind, write in FOREIGN.items():
        path.unlink(missing_ok=True)
        write(path)
        before = contents(tmp_path)
        for command in (["report", str(tmp_path)], ["run", "logistic", "--out", str(tmp_path)]):
            with pytest.raises(SystemExit, match=r"logistic\.jsonl is no file of spingrad's records"):
                main(command)
        assert contents(tmp_path) == before, kind


@pytest.mark.skipif(os.name != "posix", reason="needs limits of POSIX")
def test_on_a_full_disk_report_and_results_stay_as_they_were(folder, tmp_path):
    main(["report", str(folder)])  # our own report is replaced
    before = contents(folder)
    with full_disk(), pytest.raises(SystemExit, match=rf"{folder}/.*File too large"):
        main(["report", str(folder)])
    assert contents(folder) == before
    with full_disk(), pytest.raises(OSError, match=r"File too large: .*squares\.jsonl"):
        append_line(folder / "squares.jsonl", Line({}, {}, 0.0, {}))
    assert contents(folder) == before


def test_key_points_in_the_cache_are_checked_and_computed_anew(tmp_path, monkeypatch, data_folder):
    pytest.importorskip("skimage")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def some(images, compute=small.key_points):
        made.append(len(images))
        return compute(images[:1]).repeat(len(images), 1, 1)

    monkeypatch.setattr(small, "key_points", some)
    points = small.pair_points.__wrapped__
    path = tmp_path / "spingrad" / "key-points-400"
    first = points(True)
    for digit, again in points(True).items():
        torch.testing.assert_close(again, first[digit], equal_nan=True, rtol=0, atol=0)
    assert len(made) == 4
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    points(True)
    assert len(made) == 8
    for kind, write in FOREIGN.items():
        path.unlink()
        write(path)
        before = path.read_bytes()
        with pytest.raises(ValueError, match="key-points-400"):
            points(True)
        assert path.read_bytes() == before, kind
