"""README and docs hold only measured numbers that the committed lines print."""

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
    rf"\d\.\d|± \d|\b1 ?: ?\d|\b1/\d\d|\b\d[\d,]* ?{UNIT}"
    rf"|({WORD}|\bone) (points?|per cent)\b|{WORD} times as\b"
)
"""A decimal, an interval, a ratio, or a number with a unit."""

CODE = r"(?ms)^ *```(?:python|py)\n.*?^ *```|^ *```\w*$|^    .*?$", r"`[^`]+`|\]\([^)]*\)"
"""First Python, other fences and indented formulas; then code in a line and the targets of links."""

EXCEPTIONS = {
    "versions, licences and addresses": [
        "version 0.1.0", "[0.1.0]", "[0.2.0]", "version 0.2.0", "Before 1.0", "Python 3.11", "PyTorch 2.6",
        "torch 2.13", "torch==2.13.0", "Ray 2.60",
        "spingrad-0.2.0", "spingrad_lab-0.2.0", "Python:3.11+", "(*default of 0.1.0*)",
        "onnx 1.19.1", "onnx 1.23", "onnxruntime 1.31", "qonnx 1.0.0", "Apache-2.0", "127.0.0.1", "10.0.0.5",
    ],
    "limits and settings of the code": [
        "A reply may have 16 MiB", "by default 30 minutes", "the median on less than 53 %",
        "is 24 bytes in a message", "a header of more than 1 MB", "up to 16 times",
        "a multiple of 4,096 bytes", "a download of 163 MB", "were first 0.0005 and 0.002",
        "have at most 1 GiB and 4 GiB", "A journal has at most 64 GiB",
        "A file has at most 1 GiB", "step-000000100.1-0c4be91f2a7d",
        "step-000000200.1-5a0c6d1e9b7f", "with a probability of 99 %",
    ],
    "what a test asserts": [
        "in an address space that can grow by 64 MB",
        "twice its size plus 12 times its header, or plus 16 kB",
        "to within 1 % of what the emulator",
        "A file of 64 GB that claims anything",
    ],
    "arithmetic": [
        "32 times the memory", "holds 4 bytes each of latent weights", "keeps 4 bytes of signs",
        "20 GB for a billion weights", "95 % interval",
    ],
    "from the authors' code": ["moves the limits to ±1.001"],
}  # fmt: skip
"""Numbers that nobody has measured, with the words that show it."""


@pytest.fixture(scope="module")
def results():
    return docs.Results(ROOT / "lab/results")


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if docs.PLACE.search(text)])
def test_a_page_holds_what_the_committed_lines_print(page, results):
    assert PAGES[page] == docs.filled(PAGES[page], results), "`spingrad-lab docs` prints it again"


def test_every_mark_begins_or_ends_a_place():
    for page, text in PAGES.items():
        marks = re.findall(r"(?m)^ *<!-- (?:lab:|end)", text)
        assert len(marks) == 2 * len(docs.PLACE.findall(text)), page


def test_every_place_is_in_a_page():
    assert {name for text in PAGES.values() for name in docs.PLACE.findall(text)} == set(docs.PLACES)


@pytest.mark.parametrize("name", docs.PICTURES)
def test_pictures_are_as_the_command_draws_them(name):
    assert (ROOT / name).read_text() == docs.PICTURES[name]()


@pytest.mark.parametrize("page", PAGES)
def test_no_number_that_looks_measured_stands_outside_of_a_place(page):
    assert measured(PAGES[page]) == [], "print it by docs.py, leave it out, or add it to the exceptions"


def measured(page):
    """Numbers outside of places that look measured, with the words around them."""
    text = docs.PLACE.sub(" ", page)
    for pattern in CODE:
        text = re.sub(pattern, " ", text)
    text = " ".join(text.split())
    for fragment in itertools.chain(*EXCEPTIONS.values()):
        text = text.replace(fragment, " ")
    return [text[max(0, number.start() - 40) : number.end() + 20] for number in MEASURED.finditer(text)]


def test_every_exception_is_needed():
    everything = " ".join("\n".join(PAGES.values()).split())
    assert [own for own in itertools.chain(*EXCEPTIONS.values()) if own not in everything] == []


@pytest.mark.parametrize(
    "number", ["0.98", "1 : 46,324", "30 ms", "0 per\ncent", "four times as", "± 3", "5 %", "a quarter point"]
)
def test_a_number_is_found_unless_it_is_code_or_in_a_place(number):
    assert measured(f"```bash\nls\n```\n\nIt is `now` {number} here, in `code`.")
    assert measured(f"```text\n{number} here\n```")
    assert not measured(f"It is `{number}` here.")
    assert not measured(f"<!-- lab: kills -->\n{number}\n<!-- end -->")


def test_the_command_prints_a_page_again(tmp_path, capsys):
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


def test_a_place_without_runs_says_which_command_makes_them(tmp_path):
    text = docs.filled("<!-- lab: kills -->\n<!-- end -->", docs.Results(tmp_path))
    assert "no runs of the present version yet: `spingrad-lab bench kills`" in text
