import re
from pathlib import Path

import pytest

from spingrad_lab.paper.equal_terms import ITEMS as COMPARISONS
from spingrad_lab.paper.equal_terms import PUBLISHED, RIVALS, places, tried
from spingrad_lab.report.statistics import Estimate
from spingrad_lab.report.verdicts import APART, ITEMS, OUTCOMES, apart, said, verdicts
from spingrad_lab.runs import Line, append_line

RESULTS = Path(__file__).parents[1] / "results"
KNOWN = {f"**{outcome}**" for outcome in OUTCOMES}


def rows(folder):
    return {row[0]: row[1:] for row in verdicts(folder).rows}


def test_every_figure_and_table_of_the_paper_is_judged_or_listed_apart():
    found = rows(RESULTS)
    named = " ".join([*found, *(name for name, _, _ in APART), "Fig. 7 Fig. 8"])
    for kind, count in (("Fig.", 14), ("Tab.", 4)):
        assert {int(n) for n in re.findall(rf"{re.escape(kind)} (\d+)", named)} == set(range(1, count + 1))
    assert {own[2] for own in found.values()} <= KNOWN
    assert len(found) == len(ITEMS)


def test_only_what_needs_a_chip_or_other_machines_or_has_no_result_is_listed_apart():
    for _, _, why in apart().rows:
        assert re.match("needs a D-Wave chip|a drawing or a list|other hardware", why)


def test_without_runs_nothing_is_judged(tmp_path):
    for _, ours, verdict, _, _, seeds, commits in rows(tmp_path).values():
        assert (ours, verdict, seeds, commits) == ("–", "**not run yet**", "–", "–")


def test_what_was_judged_has_seeds_and_a_commit():
    for name, (_, _, verdict, _, _, seeds, commits) in rows(RESULTS).items():
        if verdict != "**not run yet**":
            assert int(seeds) > 0, name
            assert re.match(r"[0-9a-f]{10}|\d+\.\d+", commits), name


@pytest.mark.parametrize(
    ("accuracy", "spread", "expected"),
    [(0.9, 0.01, "reproduced"), (0.6, 0.01, "contradicted"), (0.72, 0.3, "undecided")],
)
def test_a_verdict_is_taken_in_the_reading_in_which_the_claim_holds_best(
    tmp_path, accuracy, spread, expected
):
    path, name = tmp_path / "equal-terms.jsonl", "Fig. 4, Cora"
    for method, reading in places():
        settings = tried(method, COMPARISONS[name], reading)[0]
        level = 0.7 if method in RIVALS else 0.5
        if (method, str(reading)) == (PUBLISHED, "mean, scaled"):
            level = accuracy
        for stage, seed in (("trial", 1000), *(("final", seed) for seed in range(4))):
            job = {"stage": stage, "task": name, "method": method, "reading": str(reading)}
            noise = spread * (-1) ** seed if method == PUBLISHED else 0
            scores = {"test_accuracy": level + noise}
            append_line(
                path, Line({**job, "settings": settings, "seed": seed}, scores, 0.0, {}, "0123456789ab")
            )
    _, ours, verdict, why, reading, seeds, commits = rows(tmp_path)["Fig. 4 middle, Cora"]
    assert (verdict, seeds, commits) == (f"**{expected}**", "4", "0123456789")
    if expected != "undecided":
        assert reading == "mean, scaled"
        assert ours.startswith(f"{accuracy:.3f}, S")
        assert why.count("contradicted") == 3


def test_an_interval_decides_only_if_it_leaves_out_zero():
    assert said(Estimate(0.1, float("nan"))) == "undecided"  # one seed
    assert [said(Estimate(mean, 0.5)) for mean in (1, 0.5, -0.5, -1)] == [
        "reproduced",
        "undecided",
        "undecided",
        "contradicted",
    ]
