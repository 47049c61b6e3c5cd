import re
from pathlib import Path

import pytest

from spingrad_lab.methods import PUBLISHED
from spingrad_lab.report.verdicts import ITEMS, verdicts
from spingrad_lab.runs import Line, append_line

RESULTS = Path(__file__).parents[1] / "results"
KNOWN = {"**reproduced**", "**not reproduced**", "**cannot be tested here**", "**not run yet**"}


def rows(folder):
    return {row[0]: row[1:] for row in verdicts(folder).rows}


def test_every_figure_and_table_of_the_paper_has_one_verdict():
    found = rows(RESULTS)
    for kind, count in (("Fig.", 14), ("Tab.", 4)):
        named = {int(n) for name in found for n in re.findall(rf"^{re.escape(kind)} (\d+)", name)}
        assert named == set(range(1, count + 1))
    assert {own[2] for own in found.values()} <= KNOWN
    assert len(found) == len(ITEMS)


def test_without_runs_nothing_is_judged_but_what_has_no_result(tmp_path):
    for _, ours, verdict, _ in rows(tmp_path).values():
        assert ours == "–"
        assert verdict in ("**not run yet**", "**cannot be tested here**")


@pytest.mark.parametrize(("accuracy", "expected"), [(0.9, "**reproduced**"), (0.6, "**not reproduced**")])
def test_a_verdict_follows_from_the_runs(tmp_path, accuracy, expected):
    path = tmp_path / "cora.jsonl"
    for method, level in ((PUBLISHED, accuracy), ("BinaryConnect SGD", 0.7), ("ProxQuant", 0.65)):
        for stage, seed in (("trial", 1000), ("final", 0), ("final", 1), ("final", 2)):
            settings = {"lr": 1e-3} if method == PUBLISHED else {"lr": 0.1, "momentum": 0}
            settings = {"lr": 0.01, "regularization": 1e-3} if method == "ProxQuant" else settings
            job = {"stage": stage, "task": "Cora", "method": method, "settings": settings, "seed": seed}
            append_line(path, Line(job, {"test_accuracy": level + 0.001 * seed**2}, 0.0, {}))
    _, ours, verdict, _ = rows(tmp_path)["Fig. 4 middle, Cora"]
    assert verdict == expected
    assert ours.startswith(f"{accuracy + 0.005 / 3:.3f}, SGD 0.702")
