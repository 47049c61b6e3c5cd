"""README: short, plain, and every block of it runs in order in an empty folder."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?ms)^```(\w+)\n(.*?)^```", TEXT)


def prose():
    """The sentences, without code, tables, pictures, titles and quotations."""
    text = re.sub(r"(?s)```.*?```|<!-- lab:.*?<!-- end -->|!\[.*?\]\(.*?\)", "", TEXT)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=- )", text))
    said = [re.sub(r"^- |[`*]", "", part) for part in paragraphs if part and part[0] not in "#>|"]
    return [sentence for part in said for sentence in re.split(r"(?<=[.?!:]) (?=[A-Z])", part)]


def test_it_has_at_most_a_thousand_words_and_one_table_of_eight_rows():
    assert len(TEXT.split()) <= 1000
    assert sum(line.startswith("|") for line in TEXT.splitlines()) <= 2 + 8


def test_its_sentences_are_short_and_easy():
    sentences = [sentence.split() for sentence in prose()]
    assert [" ".join(words) for words in sentences if len(words) > 30] == []
    words = [word for sentence in sentences for word in sentence]
    # Groups of vowels: an estimate that rather counts too many syllables, as with a silent e.
    syllables = sum(max(1, len(re.findall(r"[aeiouy]+", word.lower()))) for word in words)
    flesch = 206.835 - 1.015 * len(words) / len(sentences) - 84.6 * syllables / len(words)
    assert flesch >= 50


def test_the_code_of_a_door_has_at_most_ten_lines():
    doors = [code for language, code in BLOCKS if language == "python"][1:]
    assert len(doors) == 3
    assert all(len(code.strip().splitlines()) <= 10 for code in doors)


def test_its_badges_are_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = re.findall(r"badge/(\w+)-(.*?)-blue", TEXT)
    assert badges == [
        ("licence", project["license"].replace("-", "--")),
        ("python", project["requires-python"].removeprefix(">=") + "+"),
    ]


def test_the_extras_that_it_installs_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"pip install \"\.\[(.*?)\]\"", TEXT)
    assert named
    assert set(",".join(named).split(",")) <= set(extras)


@pytest.mark.needs("safetensors")
@pytest.mark.slow
def test_every_block_runs_in_order_in_an_empty_folder(tmp_path):
    code = ["from spingrad.cli import main"]
    for language, block in BLOCKS:
        commands = [shlex.split(line) for line in block.splitlines() if line.startswith("spingrad ")]
        code += [block] if language == "python" else [f"main({command[1:]})" for command in commands]
    allowed = ["-W", "error", "-W", "ignore:numba is not installed"]
    command = [sys.executable, *allowed, "-c", "\n".join(code)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "nothing is wrong" in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "digits.safetensors",
        "digits_arduino",
        "firmware",
    ]
