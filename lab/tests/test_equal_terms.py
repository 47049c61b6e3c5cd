import torch

from spingrad_lab.paper.equal_terms import ITEMS, PUBLISHED, READINGS, RIVALS, leads, places, tried
from spingrad_lab.paper.theory import _gap
from spingrad_lab.runs import Line, to_frame

NAME = "Tab. 1, 1/2, 16-4-4-2"


def runs(levels):
    """Trials of one setting and five paired seeds; ``levels`` has accuracies by reading and method."""
    lines = []
    for method, reading in places():
        settings = tried(method, ITEMS[NAME], reading)[0]
        for stage, seed in (("trial", 1000), *(("final", seed) for seed in range(5))):
            job = {"stage": stage, "task": NAME, "method": method, "reading": str(reading)}
            level = levels.get((method, str(reading)), 0.7) + 0.001 * seed * (method == PUBLISHED)
            scores = {"test_accuracy": level, "test_loss": 1.0}
            lines.append(Line({**job, "settings": settings, "seed": seed}, scores, 0.0, {}))
    return to_frame(lines)


def test_every_method_has_eight_settings_in_every_reading():
    for method in (PUBLISHED, *RIVALS, "default"):
        for item in ITEMS.values():
            assert {len(tried(method, item, reading)) for reading in READINGS} == {8}


def test_the_reading_in_which_the_claim_holds_best_comes_first():
    found = leads(runs({(PUBLISHED, "mean, scaled"): 0.8, (PUBLISHED, "sum, unscaled"): 0.6}), NAME)
    assert [str(own.reading) for own in found][::3] == ["mean, scaled", "sum, unscaled"]
    assert found[0].lead.mean - found[0].lead.half > 0 > found[-1].lead.mean + found[-1].lead.half
    assert {own.seeds for own in found} == {5}


def test_signs_stand_in_sum_and_mean_alike():
    found = leads(runs({("signSGD", "mean, unscaled"): 0.9}), NAME)
    best = {str(own.reading): own.rival for own in found}
    assert best["sum, unscaled"] == best["mean, unscaled"] == "signSGD"


def test_proposition_1_holds_for_orthogonal_rows_and_not_for_others():
    rows = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    v = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    assert _gap(rows, v) < 1e-12
    assert _gap(rows + 0.5, v) > 0.1
