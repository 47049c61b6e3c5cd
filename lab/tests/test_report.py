import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spingrad_lab.report.figures import Panel, _spread, curves
from spingrad_lab.report.page import _origin
from spingrad_lab.report.sections import Table
from spingrad_lab.report.statistics import Duel, judged
from spingrad_lab.runs import Line

RESULTS = Path(__file__).parents[1] / "results"
PAGE_PIXELS = 62 * 16
LETTER, PADDING = 0.55 * 0.82 * 16, 16  # of a table: the mean width of a letter, and of a cell's two sides


class Tables(HTMLParser):
    """Reads the cells of every table that a page shows."""

    def __init__(self):
        super().__init__()
        self.tables, self.in_cell = [], False

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        self.in_cell = self.in_cell and tag not in ("th", "td")

    def handle_data(self, data):
        if self.in_cell:
            self.tables[-1][-1][-1] += data


def narrowest(table):
    """The width in pixels below which a browser would have to break a word or a number."""
    columns = zip(*table, strict=True)
    longest = (
        max((len(word) for cell in own for word in re.split(r"[ \n]", cell)), default=0) for own in columns
    )
    return sum(LETTER * letters + PADDING for letters in longest)


def test_no_table_of_the_report_is_wider_than_its_page():
    reader = Tables()
    reader.feed((RESULTS / "report.html").read_text())
    assert len(reader.tables) > 50
    wide = [table[0] for table in reader.tables if narrowest(table) > PAGE_PIXELS]
    assert not wide


def test_every_experiment_of_the_report_is_finished():
    assert "Unfinished:" not in (RESULTS / "report.md").read_text()


def line(commit):
    return Line({"seed": 0, "quick": False}, {}, 30.0, {}, commit)


def test_a_section_names_the_commits_that_computed_its_runs():
    text = _origin([line("0123456789"), line("0123456789"), line("abcdefabcd+")], outdated=0)
    assert text == "3 runs in 1.5 minutes, by commit 0123456 (2), abcdefa+ (1)"
    assert _origin([line("0.2.0")], outdated=2).endswith("2 runs of earlier revisions are not shown")


def test_a_folded_table_shows_its_caption_and_numbers_are_right_aligned():
    table = Table(
        ["method", "score", "chosen"], [["a", "0.5 ± 0.1", "lr 1"], ["b", "–", "lr 2"]], "Trials", True
    )
    text = table.to_markdown()
    assert text.startswith("<details><summary>Trials</summary>\n\n| method")
    assert "| --- | ---: | --- |" in text


def test_verdicts_are_corrected_for_all_duels_of_a_family():
    def duel(shift, higher=True):
        values = [0.5, 0.6, 0.7, 0.8], [0.5 - shift, 0.601 - shift, 0.699 - shift, 0.8 - shift]
        return Duel("task", "accuracy", ("ours", "theirs"), values, higher)

    found = judged([duel(0.01), duel(0.01, higher=False), duel(0.0)])
    assert [what for *_, what in found] == ["ahead", "behind", "level"]
    alone = judged([duel(0.01)])[0][1]
    assert found[0][1].holm == pytest.approx(3 * alone.p)


def test_names_at_the_ends_of_curves_keep_their_order_and_their_distance():
    heights = {"a": 0.5, "b": 0.51, "c": 0.52, "d": 1.7, "e": 0.99, "f": -3.0}
    places = _spread(heights, gap=0.05)
    assert sorted(places, key=places.__getitem__) == sorted(heights, key=heights.__getitem__)
    ordered = sorted(places.values())
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 0.049
    assert ordered[0] >= 0
    assert ordered[-1] <= 1


def test_every_method_of_a_panel_is_named_once_also_when_its_curve_leaves_the_panel():
    series = {
        "QP-SBGD": ([1, 2], [[0.8, 0.9]]),
        "Bop": ([1, 2], [[0.8, 0.88]]),
        "SGD": ([1, 2], [[0.1, 0.1]]),
    }
    series |= {f"BinaryConnect {k}": ([1, 2], [[0.8, 0.87 + k / 100]]) for k in range(3)}
    panel = Panel(series, {"ProxQuant": 0.86}, ["QP-SBGD"])
    canvas = curves({"task": panel}, "epoch", "accuracy")
    texts = [text.get_text() for text in canvas.axes[0].texts]
    assert sorted(texts) == ["0", "1", "2", "Bop", "ProxQuant", "QP-SBGD", "SGD ↓"]


def test_only_columns_of_numbers_are_right_aligned():
    rows = [
        ["a", "0.5 ± 0.1", "–", "68 key points"],
        ["b", "–", "–", "85 % of the ones; of both 68 % (50 to 80)"],
    ]
    table = Table(["name", "number", "nothing", "words"], rows)
    assert table.numeric == [False, True, False, False]
