"""README and docs hold no measured number but those that the committed lines print."""

import itertools
import re
from pathlib import Path

import pytest

from spingrad_lab import docs
from spingrad_lab.cli import main

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in docs.pages(ROOT)}

UNIT = r"(%|per cent|times|points?|[mµ]?s|seconds?|minutes?|hours?|[kMG]i?B|(mega)?bytes)(?!\w)"
WORD = r"\b(two|three|four|five|six|seven|eight|nine|ten|half|third|quarter|eighth)"
MEASURED = re.compile(
    rf"\d\.\d|± \d|\b1 ?: ?\d|\b1/\d\d|\b\d[\d,]* ?{UNIT}|({WORD}|\bone) (points?|per cent)\b|{WORD} times as"
)
"""A decimal, an interval, a ratio, or a number with a unit."""

CODE = re.compile(r"^ *```(?:python|py)\n.*?^ *```|^    .*?$|`[^`]+`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
"""Python, indented formulas, code in a line, and the targets of links."""

EXCEPTIONS = {
    "versions": [
        "Python 3.11", "PyTorch 2.6", "Apache-2.0",
    ],
    "definitions": [
        "95 % interval",
    ],
    "settings and limits": [
    ],
}  # fmt: skip
"""Numbers that nobody has measured."""


@pytest.fixture(scope="module")
def results():
    return docs.Results(ROOT / "lab/results")


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if docs.PLACE.search(text)])
def test_a_page_holds_what_the_committed_lines_print(page, results):
    assert PAGES[page] == docs.filled(PAGES[page], results), "`spingrad-lab docs` prints it again"


def test_every_mark_begins_or_ends_a_place():
    for page, text in PAGES.items():
        marks = len(re.findall(r"<!-- (?:lab:|end)", text))
        assert marks == 2 * len(docs.PLACE.findall(text)), page


def test_every_place_is_in_a_page():
    assert {name for text in PAGES.values() for name in docs.PLACE.findall(text)} <= set(docs.PLACES)


@pytest.mark.parametrize("page", PAGES)
def test_no_number_that_looks_measured_stands_outside_of_a_place(page):
    text = " ".join(CODE.sub(" ", docs.PLACE.sub(" ", PAGES[page])).split())
    for fragment in itertools.chain(*EXCEPTIONS.values()):
        text = text.replace(fragment, " ")
    found = [text[max(0, n.start() - 40) : n.end() + 20] for n in MEASURED.finditer(text)]
    assert not found, "print it by spingrad_lab/docs.py, leave it out, or say why it is not measured"


def test_every_exception_is_needed():
    everything = " ".join("\n".join(PAGES.values()).split())
    assert [own for own in itertools.chain(*EXCEPTIONS.values()) if own not in everything] == []


@pytest.mark.parametrize(
    "sentence", ["It reaches 0.98.", "1 : 46,324", "30 ms", "four times as fast", "± 3", "5 %"]
)
def test_such_a_number_looks_measured(sentence):
    assert MEASURED.search(sentence)


def test_docs_command_writes_a_page_again(tmp_path, capsys):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab/results").symlink_to(ROOT / "lab/results")
    page = tmp_path / "README.md"
    page.write_text("before\n\n<!-- lab: kills -->\n<!-- end -->\n\nafter\n")
    main(["docs", str(tmp_path)])
    assert capsys.readouterr().out.split() == [str(page)]
    text = page.read_text()
    assert "| network | processes |" in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    main(["docs", str(tmp_path)])
    assert capsys.readouterr().out == ""


def test_an_unknown_place_is_named(results):
    with pytest.raises(ValueError, match="got 'speed'"):
        docs.filled("<!-- lab: speed -->\n<!-- end -->", results)
