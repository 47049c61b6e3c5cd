"""The public set of problems is intact, and anything changed in it is noticed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spingrad import BinaryQuadratic
from spingrad_lab import problems
from spingrad_lab.cli import main

pytest.importorskip("safetensors")
FOLDER = Path(__file__).parents[1] / "problems"


def test_the_committed_set_is_intact_and_small():
    rows = problems.verify(FOLDER)
    assert sum(row["units"] for row in rows) >= 200
    assert sum(row["proved"] for row in rows) >= 100
    assert (min(row["n"] for row in rows), max(row["n"] for row in rows)) == (16, 784)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5_000_000


def test_spins_are_the_same_after_text():
    spins = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, 1.0]).double()
    assert torch.equal(problems.from_hex(problems.to_hex(spins), 11), spins)


def changed(tmp_path, **origin):
    problem = BinaryQuadratic.load(min(FOLDER.glob("n016*")))
    replace(problem, origin={**problem.origin, **origin}).save(tmp_path / "one.safetensors")
    return problem


@pytest.mark.parametrize("prove", [False, True])
def test_a_wrong_energy_is_named(prove, tmp_path):
    problem = changed(tmp_path, energy=[0.0] * 8)
    with pytest.raises(ValueError, match="the spins have the energies"):
        problems.verify(tmp_path, prove=prove)
    worse = -torch.ones(16, 8)
    spins = [problems.to_hex(own) for own in worse.T]
    changed(tmp_path, spins=spins, energy=problem.double().energy(worse.double()).tolist())
    if not prove:
        assert problems.verify(tmp_path)  # only a proof shows that there are better spins
        return
    with pytest.raises(ValueError, match="could not be proved"):
        problems.verify(tmp_path, prove=True)


def test_the_command_writes_and_verifies(data_folder, tmp_path, capsys):
    main(["problems", str(tmp_path), "--write", "--quick"])
    printed = capsys.readouterr().out
    assert "n784-of-784-16-10-step-002.safetensors" in printed
    assert "16 problems, 8 of them proved" in printed


def test_a_folder_without_problems_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="which has none"):
        main(["problems", str(tmp_path)])
