import math

import numpy as np
import pytest

from spingrad_lab.report.statistics import (
    Duel,
    equivalence,
    estimate,
    family,
    holm,
    judged,
    paired,
    shown,
    verdict,
)


def test_intervals_are_those_of_student():
    assert estimate([1.0, 2.0, 3.0, 4.0]).half == pytest.approx(2.0543, abs=1e-4)
    assert paired([1.0, 2.0, 4.0], [0.0, 1.0, 2.0]).p == pytest.approx(0.0572, abs=1e-4)
    assert paired([1.0, 1.0], [1.0, 1.0]).p == 1.0


def test_holm_gives_the_values_of_r():
    # p.adjust(c(0.01, 0.02, 0.03, 0.04, 0.9), "holm") of R
    assert holm([0.04, 0.01, 0.9, 0.02, 0.03]) == pytest.approx([0.09, 0.05, 0.9, 0.08, 0.09])
    assert holm([0.3, 0.6]) == [0.6, 0.6]
    assert holm([]) == []


def test_a_test_without_a_p_value_does_not_count_in_its_family():
    first, second, third = holm([0.01, math.nan, 0.02])
    assert (first, third) == (0.02, 0.02)
    assert math.isnan(second)


def test_a_corrected_p_value_is_printed_as_such():
    test = paired([0.9, 0.8, 0.9], [0.7, 0.7, 0.6])
    assert str(test).endswith(", p = 0.074")
    assert str(family([test, test])[0]).endswith(", Holm p = 0.15")


def test_equivalence_passes_exactly_when_the_90_per_cent_interval_is_within_the_margin():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(2, 12))
        first, second = rng.normal(0, 0.003, n), rng.normal(0.001, 0.003, n)
        within = _interval_of_90_per_cent(first - second) < 0.003
        assert (equivalence(first, second, 0.003) < 0.05) == within


def _interval_of_90_per_cent(differences):
    from scipy import stats

    half = stats.t.ppf(0.95, len(differences) - 1) * differences.std(ddof=1) / math.sqrt(len(differences))
    return abs(differences.mean()) + half


def test_equal_scores_are_equivalent_and_a_single_seed_shows_nothing():
    assert equivalence([0.5, 0.6], [0.5, 0.6]) == 0.0
    assert equivalence([0.75, 0.75], [0.5, 0.5]) == 1.0
    assert math.isnan(equivalence([0.5], [0.5]))


@pytest.mark.parametrize(
    ("first", "adjusted_p", "equivalence_p", "expected"),
    [
        ([0.9, 0.8], 0.01, 0.9, "ahead"),
        ([0.2, 0.1], 0.01, 0.9, "behind"),
        ([0.9, 0.8], 0.2, 0.01, "level"),
        ([0.9, 0.8], 0.2, 0.9, "undecided"),
        ([0.9, 0.8], math.nan, math.nan, "undecided"),
        ([0.9, 0.8], 0.01, 0.01, "ahead"),
    ],
)
def test_level_is_said_only_where_equivalence_was_shown(first, adjusted_p, equivalence_p, expected):
    result = paired(first, [0.5, 0.5])
    assert verdict(result, adjusted_p, equivalence_p) == expected


def test_equivalence_is_corrected_for_its_family_too():
    near = [0.9, 0.9026, 0.8978, 0.9007], [0.9, 0.9, 0.9, 0.9]
    far = [0.9, 0.92, 0.88, 0.91], [0.9, 0.9, 0.9, 0.9]
    p = equivalence(*near)
    assert 0.025 < p < 0.05
    duels = [Duel("here", "accuracy", ("ours", "other"), values) for values in (near, far)]
    assert [what for _, _, what in judged(duels[:1])] == ["level"]
    assert [what for _, _, what in judged(duels)] == ["undecided", "undecided"]


def test_an_unusual_margin_is_named():
    assert [shown("level"), shown("level", 0.01), shown("ahead", 0.01)] == [
        "level",
        "level within 0.01",
        "**ahead**",
    ]


def test_the_lower_loss_is_ahead():
    assert verdict(paired([0.1, 0.2], [0.5, 0.5]), 0.01, 1.0, higher_is_better=False) == "ahead"


def test_methods_without_a_common_seed_have_no_difference():
    test, other = family([paired([], []), paired([0.9, 0.8, 0.9], [0.7, 0.7, 0.6])])
    assert (str(test), test.signed, test.corrected) == ("no common seed", "–", "–")
    assert other.corrected == "0.074"  # a family of one
    assert str(estimate([])) == "–"


def test_a_single_seed_has_a_difference_and_nothing_else():
    assert str(paired([0.9], [0.7])) == "+0.2000, one seed"
