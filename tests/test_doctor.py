"""The command ``spingrad doctor``."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

from spingrad import doctor
from spingrad.cli import main

TOKEN = "DEV-0123456789abcdef"


@pytest.fixture(autouse=True)
def healthy(tmp_path, monkeypatch):
    """An empty folder, no settings of this machine, and as many threads as cores."""
    monkeypatch.chdir(tmp_path)
    for name in ("SPINGRAD_DATA", "DWAVE_API_ENDPOINT", "DWAVE_API_SOLVER", "DWAVE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DWAVE_API_TOKEN", TOKEN)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def test_where_nothing_is_wrong_the_report_says_so_and_shows_no_token(monkeypatch, capsys):
    monkeypatch.setenv("DWAVE_API_ENDPOINT", f"https://user:{TOKEN}@cloud.dwavesys.com/sapi/v2")
    main(["doctor", "--json"])
    text = capsys.readouterr().out
    report = json.loads(text)
    assert TOKEN not in text
    assert report["advice"] == []
    assert all(result.startswith("works") for result in report["self_test"].values())
    if report["dwave"]["client"]:
        assert report["dwave"]["token is set"]
        assert report["dwave"]["endpoint"] == "https://cloud.dwavesys.com"
    main(["doctor"])
    assert capsys.readouterr().out.endswith("\nnothing is wrong\n")


def test_each_thing_that_is_wrong_has_one_line_of_advice_and_the_command_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("SPINGRAD_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10**6)
    monkeypatch.setattr(doctor, "_oldest", lambda package: "999" if package == "numba" else "0")
    monkeypatch.setattr(doctor, "_step", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "_version", lambda package: "1.0" if package == "numba" else None)
    with pytest.raises(SystemExit, match="things above need attention"):
        main(["doctor"])
    text = capsys.readouterr().out
    advice = [line for line in text.splitlines() if line.startswith("advice: ")]
    expected = "numba 1.0 is older", "threads on", "SPINGRAD_DATA is not", "the cache cannot", "a step failed"
    assert all(any(words in line for line in advice) for words in expected)
    assert "failed: ZeroDivisionError: division by zero" in text


@pytest.mark.parametrize(("found", "by"), [(True, "numba"), (False, "torch, slowly")])
def test_the_report_says_what_sets_single_spins(monkeypatch, found, by):
    monkeypatch.setattr(doctor, "HAS_NUMBA", found)
    monkeypatch.setattr(doctor, "HAS_TRITON", False)
    assert doctor._machine([])["single spins on a CPU"] == f"by {by}"
    monkeypatch.setattr(doctor, "_devices", lambda: ["MPS"])
    assert doctor._machine([])["single spins on GPUs"] == "by torch, slowly"


@pytest.mark.needs("dwave.cloud")
def test_a_configuration_in_the_working_folder_is_mentioned(tmp_path):
    (tmp_path / "dwave.conf").write_text("[defaults]\n")
    advice = []
    doctor._dwave(advice)
    assert ["is ignored" in line for line in advice] == [True]


@pytest.mark.needs("dwave.cloud")
def test_a_damaged_configuration_is_one_line_without_its_content(tmp_path, monkeypatch):
    (tmp_path / "own.conf").write_text(f"token {TOKEN}\n")
    monkeypatch.setenv("DWAVE_CONFIG_FILE", str(tmp_path / "own.conf"))
    advice = []
    doctor._dwave(advice)
    assert len(advice) == 1
    assert TOKEN not in advice[0]


def test_the_extras_are_those_of_the_package():
    project = Path(__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    packages = {
        name: tuple(re.match(r"[\w-]+", needed)[0] for needed in extras[name])
        for name in extras
        if name not in ("all", "dev", "docs")
    }
    assert packages == {name: extra.packages for name, extra in doctor.EXTRAS.items()}


@pytest.mark.parametrize(
    ("installed", "needed", "older"),
    [
        ("1.9.2", "1.10", True),
        ("2.13.0+cpu", "2.6", False),
        ("12", "12.0.1", True),
        ("1.32.0", "1.32", False),
    ],
)
def test_versions_are_compared_number_by_number(installed, needed, older):
    assert (doctor._numbers(installed) < doctor._numbers(needed)) is older
