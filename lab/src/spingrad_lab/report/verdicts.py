"""Every figure, table and statement of the paper: what it finds, what we find, and whether that is the same.

A claim is *reproduced*, *contradicted* (the difference is significantly the other way, or its 95 % interval
excludes the claim) or *undecided*. Comparisons of methods are taken from the experiment on equal terms:
within one reading of the paper's loss and layers, the one in which its claim holds best. What needs a D-Wave
chip, or is a drawing, is listed apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from spingrad_lab.experiments import EXPERIMENTS
from spingrad_lab.paper import equal_terms
from spingrad_lab.paper.equal_terms import PROXQUANT, SGD, Lead
from spingrad_lab.report.sections import Table
from spingrad_lab.report.statistics import Estimate, estimate
from spingrad_lab.runs import current_lines, to_frame, where

Outcome = Literal["reproduced", "contradicted", "undecided", "not run yet"]
OUTCOMES: tuple[Outcome, ...] = ("reproduced", "contradicted", "undecided", "not run yet")
SIMILAR = 0.03
"""Two losses that differ by less are called similar."""
MAJORITY = 0.76
"""Share of the larger class in Adult."""


class Judgement(NamedTuple):
    """What we find with its interval, what follows, why, and where it comes from."""

    ours: str
    verdict: Outcome
    why: str = ""
    reading: str = "–"
    seeds: int = 0


class NotRunError(LookupError):
    """The runs that a judgement needs are not on file."""


@dataclass(frozen=True)
class Item:
    """A figure, table or statement of the paper, and how it is judged by the runs of an experiment."""

    name: str
    finding: str
    experiment: str
    judge: Callable[[pd.DataFrame], Judgement]


def verdicts(folder: Path) -> Table:
    """One row for each item that can be tested here, from the runs in a folder of results."""
    rows = []
    for item in ITEMS:
        found, commits = judgement_of(item, folder)
        seeds = str(found.seeds) if found.seeds else "–"
        cells = [found.ours, f"**{found.verdict}**", found.why, found.reading, seeds, commits]
        rows.append([item.name, item.finding, *cells])
    counts = {verdict: sum(row[3] == f"**{verdict}**" for row in rows) for verdict in OUTCOMES}
    caption = "The paper, item by item: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    header = ["item", "the paper's finding", "ours", "verdict", "why", "reading", "seeds", "commit"]
    return Table(header, rows, f"{caption}. Intervals are 95 %.")


def apart() -> Table:
    """What nothing on this machine can test."""
    rows = [[name, finding, why] for name, finding, why in APART]
    return Table(
        ["item", "the paper's finding", "why it is not tested"], rows, "Listed apart, without a verdict."
    )


def judgement_of(item: Item, folder: Path) -> tuple[Judgement, str]:
    """The judgement of one item and the commits of its runs; without the runs it needs there is none yet."""
    lines, _ = current_lines(folder / f"{item.experiment}.jsonl", EXPERIMENTS[item.experiment])
    latest = sorted({line.commit[:10] for line in lines if line.commit})
    commits = ", ".join(latest[:2]) + (f" and {len(latest) - 2} more" if len(latest) > 2 else "") or "–"
    try:
        return item.judge(to_frame(lines)), commits
    except NotRunError as missing:
        return Judgement("–", "not run yet", str(missing)), "–"


def _need(there: bool, what: str) -> None:
    if not there:
        raise NotRunError(what)


def said(difference: Estimate) -> Outcome:
    """What an interval says of the claim that a difference is positive.

    Example:
        >>> [said(Estimate(mean, 0.1)) for mean in (0.2, 0.0, -0.2)]
        ['reproduced', 'undecided', 'contradicted']
    """
    mean, half = difference
    return "reproduced" if mean > half else "contradicted" if mean < -half else "undecided"


def _all(outcomes: Sequence[Outcome]) -> Outcome:
    """A claim about several tasks: it falls with the first that contradicts it."""
    if "contradicted" in outcomes:
        return "contradicted"
    return "reproduced" if set(outcomes) == {"reproduced"} else "undecided"


def _by_reading(runs: pd.DataFrame, names: Sequence[str]) -> dict[str, list[Lead]]:
    """The leads of some items in each reading that has all of them, that in which they hold best first."""
    found: dict[str, list[Lead]] = {}
    for name in names:
        for lead in equal_terms.leads(runs, name):
            found.setdefault(str(lead.reading), []).append(lead)
    whole = {reading: own for reading, own in found.items() if len(own) == len(names)}
    _need(bool(whole), f"no final runs of equal-terms, {names[0]}")
    order = sorted(whole, key=lambda r: min(equal_terms.strength(own) for own in whole[r]), reverse=True)
    return {reading: whole[reading] for reading in order}


def _ahead(*names: str) -> Callable[[pd.DataFrame], Judgement]:
    """The paper: its method is ahead of every rival, in each of these tasks."""

    def judge(runs: pd.DataFrame) -> Judgement:
        found = _by_reading(runs, names)
        outcomes = {reading: _all([said(own.lead) for own in leads]) for reading, leads in found.items()}
        (reading, best), *_ = found.items()
        text = "; ".join(
            f"{_short(n)}: {own}" if len(names) > 1 else str(own) for n, own in zip(names, best, strict=True)
        )
        others = "; ".join(f"{name}: {what}" for name, what in list(outcomes.items())[1:])
        return Judgement(text, outcomes[reading], f"other readings: {others or '–'}", reading, best[0].seeds)

    return judge


def _short(name: str) -> str:
    return name.split(", ")[1]


def _similar(runs: pd.DataFrame) -> Judgement:
    """The paper: like BinaryConnect, SGD slightly ahead; it plots the loss."""
    name = "Fig. 3 left, Adult 15-10-1"
    finals = equal_terms.finals_of(runs, name)
    _need(len(finals) > 0, f"no final runs of equal-terms, {name}")
    found = {}
    for reading in equal_terms.READINGS:
        own = equal_terms.within(finals, reading)
        if {equal_terms.PUBLISHED, SGD} <= set(own["method"]):
            found[str(reading)] = equal_terms.difference(own, SGD, "train_loss"), len(where(own, method=SGD))
    _need(bool(found), f"no final runs of equal-terms, {name}")
    outcomes = {reading: _level(difference) for reading, (difference, _) in found.items()}
    best = min(found, key=lambda r: abs(found[r][0].mean) + found[r][0].half)
    others = "; ".join(f"{name}: {what}" for name, what in outcomes.items() if name != best)
    (mean, half), seeds = found[best]
    text = f"training loss minus SGD's {_signed(mean)} ± {half:.3f}"
    return Judgement(
        text, outcomes[best], f"similar: within {SIMILAR}; other readings: {others}", best, seeds
    )


def _fails(runs: pd.DataFrame) -> Judgement:
    """The paper: ProxQuant does not train ten layers; the larger class has 76 % of the rows."""
    name = "Fig. 3 right, Adult, ten layers"
    finals = equal_terms.finals_of(runs, name)
    _need(len(finals) > 0, f"no final runs of equal-terms, {name}")
    found = {}
    for reading in equal_terms.READINGS:
        own = where(equal_terms.within(finals, reading), method=PROXQUANT)
        if len(own) > 1:
            found[str(reading)] = estimate(own["test_accuracy"]), len(own)
    _need(bool(found), f"no final runs of equal-terms, {name}")
    best = min(found, key=lambda reading: found[reading][0].mean)
    outcomes = {r: said(Estimate(MAJORITY + 0.02 - own.mean, own.half)) for r, (own, _) in found.items()}
    others = "; ".join(f"{reading}: {what}" for reading, what in outcomes.items() if reading != best)
    (mean, half), seeds = found[best]
    why = f"the larger class has {MAJORITY:.0%}; other readings: {others}"
    return Judgement(f"test accuracy {mean:.3f} ± {half:.3f}", outcomes[best], why, best, seeds)


def _level(difference: Estimate) -> Outcome:
    mean, half = abs(difference.mean), difference.half
    return "reproduced" if mean + half < SIMILAR else "contradicted" if mean - half > SIMILAR else "undecided"


def _quality(runs: pd.DataFrame) -> Judgement:
    """The paper: as D-Wave's solutions are worse, its convergence is slower."""
    from spingrad_lab.beyond import horizons

    cells = {c: horizons.finals_of(runs, c) for c in horizons.CELLS if c.kind == "as published" and len(runs)}
    cells = {cell: own for cell, own in cells.items() if len(own)}
    _need(bool(cells), "no final runs of horizons")
    behind = horizons.behind(cells)
    count = sum(name in set(own["method"]) for own in cells.values() for name in horizons.COARSE)
    seeds = max(own["seed"].nunique() for own in cells.values())
    ours = f"solved to 20 %, behind exact solutions in {len(behind)} of {count} comparisons"
    why = "test accuracy of larger networks; corrected intervals; none of them is on blobs"
    reading = "sum, unscaled"
    return Judgement(ours, "reproduced" if behind else "undecided", why, reading, seeds)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _z_values(runs: pd.DataFrame, method: str, reduction: str) -> list[float]:
    from spingrad_lab.paper.direction import z_values

    own = where(runs, method=method, reduction=reduction, scale=False)
    _need(len(own) > 0, "no runs of direction-test")
    return z_values(own)


def _direction(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.direction import ACCEPTED, PUBLISHED, share, z_values
    from spingrad_lab.paper.direction import SIGN_SGD as RIVAL

    z = _z_values(runs, PUBLISHED, "sum")
    walks = where(runs, method=RIVAL, scale=False)
    chance = float(np.mean(np.abs(z_values(walks, "arbitrary")) > ACCEPTED))
    agree = float(np.mean(share(where(runs, method=PUBLISHED, reduction="sum", scale=False), "all")))
    mean, half = estimate(z)
    why = f"agrees in {agree:.0%} of entries; but random spins leave the band in {chance:.0%} of runs"
    verdict = said(Estimate(mean - ACCEPTED, half))
    return Judgement(f"Z {mean:.1f} ± {half:.1f}", verdict, why, "sum, unscaled", len(z))


def _direction_of_signs(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.direction import PUBLISHED
    from spingrad_lab.paper.direction import SIGN_SGD as RIVAL

    theirs, ours = (estimate(_z_values(runs, m, r)) for m, r in ((RIVAL, "mean"), (PUBLISHED, "sum")))
    less = Estimate(ours.mean - theirs.mean, hypot(ours.half, theirs.half))
    text = f"Z {theirs.mean:.1f} ± {theirs.half:.1f}, lower by {less.mean:.1f} ± {less.half:.1f}"
    seeds = len(_z_values(runs, RIVAL, "mean"))
    return Judgement(text.replace("-", "−"), said(less), "", "unscaled", seeds)


def _embedding(runs: pd.DataFrame) -> Judgement:
    layer = where(runs, stage="layer")
    _need(len(layer) > 0, "no runs of embedding")
    chains = [len(chain) for chain in layer.iloc[0]["chains"]]
    ours = f"{len(chains)} spins on {sum(chains)} qubits, longest chain {max(chains)}"
    return Judgement(
        ours, "reproduced", "on the chip's graph without defects; nothing was annealed on it", "–", 1
    )


def _evolution(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.layer_problems import Readings

    _need(len(runs) > 0, "no runs of qubo-evolution")
    mean, half = Readings.of(runs).estimate("as published", "density")
    inputs, units = 16, 4
    own, every = units * inputs * (inputs - 1) / 2, inputs * units * (inputs * units - 1) / 2
    share = Estimate(mean * own / every, half * own / every)
    verdict = said(Estimate(0.5 - share.mean, share.half))
    why = f"of the {every:.0f} pairs of a layer's {inputs * units} variables; within a unit {mean:.1%}"
    return Judgement(
        f"{share.percent()} of the pairs are coupled", verdict, why, "mean, scaled", runs["seed"].nunique()
    )


def _ablation(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.methods import PUBLISHED

    own = where(runs, method=PUBLISHED)
    _need(len(own) > 0, "no runs as published in the paper's reading")
    spread = {by: _range(own, by) for by in ("lr", "fraction")}
    more = estimate(spread["lr"] - spread["fraction"])
    ours = f"range by step size minus by batch size {_signed(more.mean)} ± {more.half:.3f}"
    means = ", ".join(f"{values.mean():.3f} by {by}" for by, values in spread.items())
    return Judgement(
        ours, said(more), f"ranges of each seed: {means}", "sum, unscaled", own["seed"].nunique()
    )


def _range(runs: pd.DataFrame, by: str) -> "pd.Series[float]":
    """For each seed, by how much the accuracy varies over the values of one column."""
    means = runs.astype({"test_accuracy": float}).groupby(["seed", by])["test_accuracy"].mean().unstack()
    return means.max(axis=1) - means.min(axis=1)


def _gap(runs: pd.DataFrame) -> Judgement:
    _need(len(runs) > 0, "no runs of spectral-gap")
    single = where(runs.dropna(subset="update"), batch=1)["as published"]
    one, two = ([own["plain"][place][0] for own in single] for place in (0, 1))
    less = estimate(np.subtract(one, two))
    ours = f"{np.mean(one):.3f} and {np.mean(two):.3f}, smaller by {less.mean:.3f} ± {less.half:.3f}"
    same = float(np.mean(np.equal(one, two)))
    why = f"no term joins two neurons: each keeps its own gap, and {same:.0%} of the runs have equal ones"
    excluded = less.mean + less.half < 0.1 * float(np.mean(one))  # not even a tenth smaller
    return Judgement(ours, "contradicted" if excluded else said(less), why, "mean, scaled", len(single))


def _growth(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.bench.timing import exponent, larger_half

    solved = where(runs, stage="growth")
    _need(len(solved) > 0, "no runs of runtime")
    batch = exponent(larger_half(where(solved, axis="batch").groupby("batch")["seconds"].median()))
    why = (
        "on paper: a unit has n (n − 1) / 2 couplings whatever the batch B; forming them takes B n² products"
    )
    ours = f"quadratic in width, linear in batch size; our time grows with the batch to the power {batch:.2f}"
    return Judgement(ours, "contradicted", f"{why}; the width agrees", "–", solved["seed"].nunique())


def _too_large(runs: pd.DataFrame) -> Judgement:
    own = where(runs, widths="10-10-7") if len(runs) else runs
    _need(len(own) > 0, "no runs of plans")
    run = own.iloc[0]
    ours = f"{run['calls']} call, {run['qubits']:,} qubits with {run['copies']} copies of each unit"
    return Judgement(
        ours, "contradicted", "a plan for a chip without defects; nothing was annealed on it", "–", 1
    )


def _minute(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.plans import DIGITS, STEPS

    own = where(runs, widths=DIGITS) if len(runs) else runs
    _need(len(own) > 0, "no runs of plans")
    alone, packed = (STEPS * float(own.iloc[0][key]) for key in ("one_by_one", "step"))
    ours = f"{alone:.0f} s for {STEPS} steps unit by unit; {packed:.1f} s packed"
    verdict: Outcome = "reproduced" if 30 < alone < 120 else "contradicted"
    return Judgement(ours, verdict, "by D-Wave's timing model; between half a minute and two", "–", 1)


def _proposition(runs: pd.DataFrame) -> Judgement:
    _need(len(runs) > 0, "no runs of theory")
    gap, orthogonal = (estimate(runs[key]) for key in ("gap", "gap of orthogonal rows"))
    ours = f"the two differ by {gap.mean:.2f} ± {gap.half:.2f} of the gradient's length"
    why = f"zero for orthogonal rows ({orthogonal.mean:.0e}); the proof takes one row at a time"
    return Judgement(ours, "contradicted", why, "–", len(runs))


def _theorem(runs: pd.DataFrame) -> Judgement:
    _need(len(runs) > 0, "no runs of theory")
    share = float((runs["fixed points"] > 0).mean())
    why = "it says which points are fixed; it needs gradients without zeros and rates whose sum diverges"
    ours = f"proved on paper; {share:.0%} of small random problems have a fixed point"
    return Judgement(ours, "reproduced", why, "–", len(runs))


def _abstract(runs: pd.DataFrame) -> Judgement:
    _need(len(runs) > 0, "no runs of theory")
    some = runs[runs["fixed points"] > 0]
    _need(len(some) > 1, "no problem with a fixed point")
    mean, half = estimate(some["ended at one"])
    ours = f"{100 * mean:.0f} ± {100 * half:.0f} % of starts end at a fixed point, where there is one"
    verdict: Outcome = "contradicted" if mean + half < 1 else "undecided"
    return Judgement(
        ours, verdict, "more than Theorem 1 proves, which is about starts at the point itself", "–", len(some)
    )


_PAIRS = "Tab. 1, pairs of digits"
_FIG_2 = tuple(name for name in equal_terms.ITEMS if name.startswith("Fig. 2"))
ITEMS = (
    Item(
        "Abstract, convergence",
        "if a fixed point exists, the updates will converge to it",
        "theory",
        _abstract,
    ),
    Item("Prop. 1", "the relaxed projection is the gradient of the weights", "theory", _proposition),
    Item("Thm. 1", "s is a fixed point if and only if −Π(s) = s", "theory", _theorem),
    Item(
        "Fig. 2 (i), logistic regression",
        "QP-SBGD (Gurobi) has the lowest loss",
        "equal-terms",
        _ahead(*_FIG_2),
    ),
    Item("Fig. 2 (ii)", "worse projections converge more slowly", "horizons", _quality),
    Item(
        "Fig. 3 left, Adult 15-10-1", "similar to BinaryConnect, SGD slightly ahead", "equal-terms", _similar
    ),
    Item(
        "Fig. 3 right, Adult, ten layers",
        "QP-SBGD ahead of BinaryConnect",
        "equal-terms",
        _ahead("Fig. 3 right, Adult, ten layers"),
    ),
    Item("Fig. 3 right, ProxQuant", "fails to train ten layers", "equal-terms", _fails),
    *(
        Item(
            f"{_PAIRS}, {network}",
            "best on 1/2 and 1/7 (0.73, 0.75)",
            "equal-terms",
            _ahead(f"Tab. 1, 1/2, {network}", f"Tab. 1, 1/7, {network}"),
        )
        for network in ("16-4-2", "16-4-4-2")
    ),
    Item("Fig. 4 left, Karate", "QP-SBGD best (0.56)", "equal-terms", _ahead("Fig. 4, Karate")),
    Item("Fig. 4 middle, Cora", "QP-SBGD best, by the text (0.57)", "equal-terms", _ahead("Fig. 4, Cora")),
    Item("Fig. 4 right, PubMed", "QP-SBGD best, by the text (0.66)", "equal-terms", _ahead("Fig. 4, PubMed")),
    Item("Sec. 4.3, graph layers", "10 dimensions are too large for Advantage 6.1", "plans", _too_large),
    Item("Tab. 3, directions of QP-SBGD", "Z 10.4 to 12.4, beyond 1.96", "direction-test", _direction),
    Item(
        "Tab. 4, directions of signSGD",
        "Z −6.9 to 8.4, weaker than QP-SBGD's",
        "direction-test",
        _direction_of_signs,
    ),
    Item(
        "Fig. 6, Adult 3-5-2",
        "QP-SBGD (Gurobi) best in training",
        "equal-terms",
        _ahead("Fig. 6, Adult 3-5-2"),
    ),
    Item("Fig. 9, embedding", "a layer's problem fits on Pegasus, with chains", "embedding", _embedding),
    Item("Fig. 10, evolution of the QUBO", "sparse graphs", "qubo-evolution", _evolution),
    Item("Fig. 13, ablation on Cora", "step size matters more than batch size", "ablation", _ablation),
    Item("Fig. 14, spectral gap", "0.03 for one neuron, 0.01 for two", "spectral-gap", _gap),
    Item("Appendix, QPU time", "about a minute for a run on the digits", "plans", _minute),
    Item("Sec. 5, growth", "quadratic in width and in batch size", "runtime", _growth),
)
"""What can be tested here, in the paper's order."""

_QPU, _DRAWN = "needs a D-Wave chip", "a drawing or a list: it has no result"
APART = (
    ("Fig. 1, the method", "a drawing", _DRAWN),
    ("Tab. 2, notation", "a list of symbols", _DRAWN),
    ("Fig. 5, feature extraction", "an example", f"{_DRAWN}; drawn anew, as its superpixels are lost"),
    ("Tab. 1, D-Wave's column", "0.62, 0.70, 0.74", _QPU),
    ("Fig. 2, Fig. 6, D-Wave's curves", "slower; on par with signSGD or better", _QPU),
    ("Figs 7 and 8, classified digits", "72.5 % right", f"{_QPU}: its network was trained on one"),
    ("Fig. 11, energies of samples", "a heavy tail, as of hard problems", _QPU),
    ("Fig. 12, similarity of samples", "dissimilar; highest pair about 0.4", _QPU),
    (
        "Appendix, Rosenbrock",
        "one minute of QPU time for five runs",
        f"{_QPU}; the values reached are not given",
    ),
    (
        "Appendix, runtime",
        "six hours of CPU for Cora, of wall clock for the digits",
        "other hardware and software",
    ),
)
"""What cannot be tested here: the item, what the paper says, and why."""
