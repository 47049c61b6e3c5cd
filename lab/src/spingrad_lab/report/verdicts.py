"""Every figure and table of the paper: what it finds, what we find, and whether that is the same.

The numbers are computed from the runs on file. What the paper says of its own method is judged by our rows as
published, in the paper's reading (summed loss, unscaled layers).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from spingrad_lab.experiments import EXPERIMENTS
from spingrad_lab.report.sections import Table
from spingrad_lab.runs import current_lines, to_frame, where
from spingrad_lab.trials import ahead

Outcome = Literal["reproduced", "not reproduced", "cannot be tested here", "not run yet"]
SGD, SIGN_SGD, PROXQUANT = "BinaryConnect SGD", "BinaryConnect signSGD", "ProxQuant"
BASELINES = (SGD, SIGN_SGD, PROXQUANT)
"""The rivals that the paper compares itself with."""
MAJORITY = 0.76
"""Share of the larger class in Adult."""
SIMILAR = 0.02
"""Two accuracies that differ by less are called similar."""


class Judgement(NamedTuple):
    """What we find, whether it is what the paper finds, and why (not)."""

    ours: str
    verdict: Outcome
    why: str = ""


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
    """One row for each item of the paper, from the runs in a folder of results."""
    rows = []
    for item in ITEMS:
        found = judgement_of(item, folder)
        rows.append([item.name, item.finding, found.ours, f"**{found.verdict}**", found.why])
    counts = {verdict: sum(row[3] == f"**{verdict}**" for row in rows) for verdict in _VERDICTS}
    caption = "The paper, item by item: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    return Table(["item", "the paper's finding", "ours", "verdict", "why"], rows, f"{caption}.")


def judgement_of(item: Item, folder: Path) -> Judgement:
    """The judgement of one item; without the runs it needs there is none yet."""
    if not item.experiment:
        return item.judge(pd.DataFrame())
    lines, _ = current_lines(folder / f"{item.experiment}.jsonl", EXPERIMENTS[item.experiment])
    try:
        return item.judge(to_frame(lines))
    except NotRunError as missing:
        return Judgement("–", "not run yet", str(missing))


_VERDICTS: tuple[Outcome, ...] = ("reproduced", "not reproduced", "cannot be tested here", "not run yet")


def _finals(experiment: str, runs: pd.DataFrame, task: str) -> pd.DataFrame:
    """Final runs of a comparison, if there are any."""
    from spingrad_lab.comparison import Comparison

    comparison = EXPERIMENTS[experiment]
    assert isinstance(comparison, Comparison)
    finals = comparison.finals(runs, task) if len(runs) else runs
    _need(len(finals) > 0, f"no final runs of {experiment}, {task}")
    return finals


def _need(there: bool, what: str) -> None:
    if not there:
        raise NotRunError(what)


def _published(finals: pd.DataFrame) -> str:
    """The row as published: solved exactly where that was run, else by descent."""
    from spingrad_lab.methods import PUBLISHED

    present = set(finals["method"])
    for method in (f"{PUBLISHED}, exact", PUBLISHED):
        if method in present:
            return method
    raise NotRunError("no runs as published in the paper's reading")


class Lead(NamedTuple):
    """The row as published against the best of some rivals; a positive lead is ours."""

    text: str
    mean: float
    lead: float
    half: float

    @property
    def ahead(self) -> bool:
        return self.lead > self.half


def _lead(
    experiment: str,
    runs: pd.DataFrame,
    task: str,
    score: str = "test_accuracy",
    rivals: Sequence[str] = BASELINES,
    lower_is_better: bool = False,
) -> Lead:
    finals, sign = _finals(experiment, runs, task), -1 if lower_is_better else 1
    ours = _published(finals)
    means = finals.groupby("method")[score].mean()
    present = [rival for rival in rivals if rival in means]
    _need(bool(present), f"no runs of the paper's rivals in {experiment}, {task}")
    best = max(present, key=lambda rival: sign * means[rival])
    difference = ahead(finals, ours, best, score=score).difference
    name = best.removeprefix("BinaryConnect ")
    text = f"{means[ours]:.3f}, {name} {means[best]:.3f} ({_signed(difference.mean)} ± {difference.half:.3f})"
    return Lead(text, float(means[ours]), sign * difference.mean, difference.half)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _best_of_all(found: dict[str, Lead]) -> Judgement:
    """The paper: its method is ahead of every rival, in each of these tasks."""
    leads = [name for name, own in found.items() if own.ahead]
    ours = "; ".join(f"{name}: {own.text}" if len(found) > 1 else own.text for name, own in found.items())
    verdict: Outcome = "reproduced" if len(leads) == len(found) else "not reproduced"
    why = "ahead beyond the 95 % interval" if len(found) == 1 else f"ahead in {len(leads)} of {len(found)}"
    behind = [own for own in found.values() if -own.lead > own.half]
    if not leads:
        why = "behind the best rival" if len(behind) == len(found) else "not ahead beyond the 95 % interval"
    return Judgement(ours, verdict, why)


def _logistic(runs: pd.DataFrame) -> Judgement:
    tasks = ("symmetric", "offset", "random")
    return _best_of_all(
        {t: _lead("logistic", runs, t, "excess", (SGD, SIGN_SGD), lower_is_better=True) for t in tasks}
    )


def _adult_two(runs: pd.DataFrame) -> Judgement:
    own = _lead("adult-two-layer", runs, "15-10-1", rivals=(SGD,))
    similar = abs(own.lead) < SIMILAR and not own.ahead
    verdict: Outcome = "reproduced" if similar else "not reproduced"
    return Judgement(own.text, verdict, "test accuracy: losses of unscaled layers are not comparable")


def _adult_ten(runs: pd.DataFrame) -> Judgement:
    own = _lead("adult-ten-layer", runs, "ten layers", rivals=(SGD, SIGN_SGD))
    finals = _finals("adult-ten-layer", runs, "ten layers")
    fails = float(where(finals, method=PROXQUANT)["test_accuracy"].mean())
    ours = f"{own.text}, ProxQuant {fails:.3f}"
    larger = f"is hardly better than always saying the larger class ({MAJORITY:.0%})"
    stuck = f"ProxQuant {larger if fails < MAJORITY + SIMILAR else 'trains'}"
    if own.ahead:
        return Judgement(ours, "reproduced", stuck)
    return Judgement(ours, "not reproduced", f"{stuck}; unscaled, ten layers hardly train")


def _pairs(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.small import MNIST_PAIRS, TABLE_1

    stroke = [task for task in MNIST_PAIRS.tasks if "stroke" in task]
    found = {task[:3]: _lead("mnist-pairs", runs, task) for task in stroke}
    best = [pair for pair in ("1/2", "1/7") if found[pair].ahead]
    levels = [abs(found[pair].mean - own["QP-SBGD as published, exact"]) for pair, own in TABLE_1.items()]
    ours = "; ".join(f"{pair}: {own.text}" for pair, own in found.items())
    verdict: Outcome = "reproduced" if len(best) == 2 else "not reproduced"
    why = f"best in {len(best)} of these 2; {sum(gap <= 0.03 for gap in levels)} of 3 accuracies within 0.03"
    return Judgement(ours, verdict, f"{why}; features of the stroke")


def _graph(experiment: str, task: str) -> Callable[[pd.DataFrame], Judgement]:
    return lambda runs: _best_of_all({task: _lead(experiment, runs, task)})


def _adult_small(runs: pd.DataFrame) -> Judgement:
    found = _best_of_all({"3-5-2": _lead("adult-small", runs, "3-5-2", "train_accuracy")})
    return found._replace(why=f"{found.why}; its order of D-Wave and signSGD cannot be tested here")


def _z_values(runs: pd.DataFrame, method: str, reduction: str) -> list[float]:
    from spingrad_lab.paper.direction import z_values

    own = where(runs, method=method, reduction=reduction, scale=False)
    _need(len(own) > 0, "no runs of direction-test")
    return z_values(own)


def _direction(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.direction import ACCEPTED, PUBLISHED, share
    from spingrad_lab.paper.direction import SIGN_SGD as RIVAL

    z = _z_values(runs, PUBLISHED, "sum")
    walks = where(runs, method=RIVAL, scale=False)
    chance = float(np.mean(np.abs(_against(walks, "arbitrary")) > ACCEPTED))
    agree = float(np.mean(share(where(runs, method=PUBLISHED, reduction="sum", scale=False), "all")))
    verdict: Outcome = "reproduced" if min(z) > ACCEPTED else "not reproduced"
    why = f"agrees in {agree:.0%} of entries; but random spins leave the band in {chance:.0%} of runs"
    return Judgement(f"Z {np.mean(z):.1f} ({min(z):.1f} to {max(z):.1f})", verdict, why)


def _against(runs: pd.DataFrame, what: str) -> list[float]:
    from spingrad_lab.paper.direction import z_values

    _need(len(runs) > 0, "no runs of direction-test")
    return z_values(runs, what)


def _direction_of_signs(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.direction import PUBLISHED
    from spingrad_lab.paper.direction import SIGN_SGD as RIVAL

    z, ours = _z_values(runs, RIVAL, "mean"), _z_values(runs, PUBLISHED, "sum")
    lower = np.mean(z) < np.mean(ours)
    verdict: Outcome = "reproduced" if lower else "not reproduced"
    text = f"Z {np.mean(z):.1f} ({min(z):.1f} to {max(z):.1f})".replace("-", "−")
    return Judgement(
        text, verdict, f"{'below' if lower else 'above'} the published step's {np.mean(ours):.1f}"
    )


def _features(runs: pd.DataFrame) -> Judgement:
    _need(len(runs) > 0, "no runs of feature-extraction")
    points = np.mean([len(own) for own in runs["points"]])
    return Judgement(
        f"{points:.0f} key points, 16 bits",
        "cannot be tested here",
        "an illustration; drawn anew, with superpixels of our own: theirs are lost",
    )


def _classified(digit: int) -> Callable[[pd.DataFrame], Judgement]:
    def judge(runs: pd.DataFrame) -> Judgement:
        _need(len(runs) > 0, "no runs of classified-digits")
        own = where(runs, features="those on the stroke, centre of the points")
        both = [
            float(np.mean([given == d for d in (1, 2) for given in run[f"{d}s as"]]))
            for _, run in own.iterrows()
        ]
        right = [float(np.mean([given == digit for given in given_])) for given_ in own[f"{digit}s as"]]
        ours = f"{np.mean(right):.1%} of the {digit}s; of both {np.mean(both):.1%}"
        ours += f" ({min(both):.1%} to {max(both):.1%})"
        return Judgement(ours, "cannot be tested here", "one network on a QPU; ours are on a computer")

    return judge


def _embedding(runs: pd.DataFrame) -> Judgement:
    layer = where(runs, stage="layer")
    _need(len(layer) > 0, "no runs of embedding")
    chains = [len(chain) for chain in layer.iloc[0]["chains"]]
    ours = f"{len(chains)} spins on {sum(chains)} qubits, longest chain {max(chains)}"
    return Judgement(ours, "reproduced", "on the chip's graph without defects; nothing was annealed on it")


def _layers(runs: pd.DataFrame) -> "pd.DataFrame":
    from spingrad_lab.paper.layer_problems import Readings

    _need(len(runs) > 0, "no runs")
    return where(Readings.of(runs).measured, posing="as published")


def _evolution(runs: pd.DataFrame) -> Judgement:
    density = float(_layers(runs)["density"].mean())
    verdict: Outcome = "reproduced" if density < 0.5 else "not reproduced"
    return Judgement(f"{density:.1%} of the couplings are not zero", verdict, "ZᵀZ of a batch is dense")


def _energies(runs: pd.DataFrame) -> Judgement:
    own = _layers(runs)
    ours = f"skewness {own['skew_reads'].mean():+.2f} of simulated annealing's reads"
    why = f"needs a QPU; all states have the tail too ({own['skew_states'].mean():+.2f})"
    return Judgement(ours, "cannot be tested here", why)


def _similarity(runs: pd.DataFrame) -> Judgement:
    own = _layers(runs)
    mean, chance, high = (float(own[key].mean()) for key in ("enumeration", "random", "enumeration highest"))
    verdict: Outcome = "reproduced" if mean <= chance else "not reproduced"
    why = f"{'more' if mean > chance else 'no more'} alike than random spins ({chance:.2f}); no QPU"
    return Judgement(f"ten lowest states: mean {mean:.2f}, highest pair {high:.2f}", verdict, why)


def _ablation(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.methods import PUBLISHED

    own = where(runs, method=PUBLISHED)
    _need(len(own) > 0, "no runs as published in the paper's reading")
    spread = {by: float(np.ptp(own.groupby(by)["test_accuracy"].mean())) for by in ("lr", "fraction")}
    ours = f"{spread['lr']:.3f} by step size, {spread['fraction']:.3f} by batch size"
    holds = spread["lr"] > spread["fraction"]
    verdict: Outcome = "reproduced" if holds else "not reproduced"
    return Judgement(ours, verdict, "range of the accuracy over four values of each")


def _gap(runs: pd.DataFrame) -> Judgement:
    _need(len(runs) > 0, "no runs of spectral-gap")
    single = where(runs.dropna(subset="update"), batch=1)["as published"]
    one, two = (float(np.mean([own["plain"][place][0] for own in single])) for place in (0, 1))
    verdict: Outcome = "reproduced" if two < 0.9 * one else "not reproduced"
    return Judgement(f"{one:.3f} and {two:.3f}", verdict, "no term joins two neurons: each keeps its own gap")


def _runtime(runs: pd.DataFrame) -> Judgement:
    own = where(runs, stage="train", task="Cora", solver="exact")
    _need(len(own) > 0, "no runs of runtime")
    ours = f"Cora: {own['seconds'].median():.1f} s on one core, solved exactly"
    return Judgement(ours, "cannot be tested here", "other hardware and software; no QPU")


def _growth(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.bench.timing import exponent, larger_half

    solved = where(runs, stage="growth")
    _need(len(solved) > 0, "no runs of runtime")
    powers = [
        exponent(larger_half(where(solved, axis=axis).groupby(axis)["seconds"].median()))
        for axis in ("width", "batch")
    ]
    ours = f"time to the power {powers[0]:.2f} of the width and {powers[1]:.2f} of the batch"
    verdict: Outcome = "reproduced" if min(powers) > 1.7 else "not reproduced"
    return Judgement(ours, verdict, "the matrix of the QUBO is never formed, so the batch costs linear time")


def _wide(runs: pd.DataFrame) -> Judgement:
    from spingrad_lab.paper.readings import PAPER, RIVALS, SIGN_SGD
    from spingrad_lab.trials import current_finals

    own = where(runs, task="MNIST, 784-256-256-10")
    finals = current_finals(own, ["method"]) if len(own) else own
    _need(
        len(finals) > 0 and {PAPER, *SIGN_SGD} <= set(finals["method"]), "no final runs of the wide network"
    )
    means = finals.groupby("method")["test_accuracy"].mean()
    leads = [ahead(finals, PAPER, rival).difference for rival in RIVALS]
    verdict: Outcome = "reproduced" if all(d.mean > d.half for d in leads) else "not reproduced"
    plain, momentum = (float(means[rival]) for rival in RIVALS)
    ours = f"{means[PAPER]:.3f}, signSGD {plain:.3f}, with momentum 0.9 {momentum:.3f}, all unscaled"
    scaled = max(float(means[rival]) for rival in SIGN_SGD if rival not in RIVALS)
    other = float(means["as published: mean, scaled"])
    why = "in the paper's reading, on equal layers; on layers divided by √fan-in signSGD has "
    why += f"{scaled:.3f}, and the published step with a mean loss {other:.3f}"
    return Judgement(ours, verdict, why)


def _drawing(why: str) -> Callable[[pd.DataFrame], Judgement]:
    return lambda runs: Judgement("–", "cannot be tested here", why)


ITEMS = (
    Item("Fig. 1, the method", "a drawing", "", _drawing("has no result")),
    Item("Fig. 2, logistic regression", "QP-SBGD (Gurobi) has the lowest loss", "logistic", _logistic),
    Item(
        "Fig. 3 left, Adult 15-10-1",
        "similar to BinaryConnect, SGD slightly ahead",
        "adult-two-layer",
        _adult_two,
    ),
    Item(
        "Fig. 3 right, Adult, ten layers",
        "QP-SBGD ahead of BinaryConnect, ProxQuant fails",
        "adult-ten-layer",
        _adult_ten,
    ),
    Item("Tab. 1, pairs of digits", "0.66, 0.73, 0.75; best on 1/2 and 1/7", "mnist-pairs", _pairs),
    Item("Fig. 4 left, Karate", "QP-SBGD best (0.56)", "karate", _graph("karate", "6-10-4")),
    Item("Fig. 4 middle, Cora", "QP-SBGD best, by the text (0.57)", "cora", _graph("cora", "Cora")),
    Item("Fig. 4 right, PubMed", "QP-SBGD best, by the text (0.66)", "pubmed", _graph("pubmed", "PubMed")),
    Item(
        "Sec. 1, wide layers",
        "solving the QUBO beats the sign (signSGD); shown on small networks only",
        "readings",
        _wide,
    ),
    Item("Tab. 2, notation", "a list of symbols", "", _drawing("has no result")),
    Item("Fig. 5, feature extraction", "an example", "feature-extraction", _features),
    Item("Tab. 3, directions of QP-SBGD", "Z 10.4 to 12.4, beyond 1.96", "direction-test", _direction),
    Item(
        "Tab. 4, directions of signSGD",
        "Z −6.9 to 8.4, weaker than QP-SBGD's",
        "direction-test",
        _direction_of_signs,
    ),
    Item("Fig. 6, Adult 3-5-2", "QP-SBGD (Gurobi) best in training", "adult-small", _adult_small),
    Item("Fig. 7, classified 1s", "with Fig. 8: 72.5 % right (D-Wave)", "classified-digits", _classified(1)),
    Item("Fig. 8, classified 2s", "with Fig. 7: 72.5 % right (D-Wave)", "classified-digits", _classified(2)),
    Item("Fig. 9, embedding", "a layer's problem fits on Pegasus, with chains", "embedding", _embedding),
    Item("Fig. 10, evolution of the QUBO", "sparse graphs", "qubo-evolution", _evolution),
    Item(
        "Fig. 11, energies of samples",
        "a heavy tail, as of hard problems (D-Wave)",
        "energy-histogram",
        _energies,
    ),
    Item("Fig. 12, similarity", "dissimilar; highest pair about 0.4 (D-Wave)", "similarity", _similarity),
    Item("Fig. 13, ablation on Cora", "step size matters more than batch size", "ablation", _ablation),
    Item("Fig. 14, spectral gap", "0.03 for one neuron, 0.01 for two", "spectral-gap", _gap),
    Item("Appendix, runtime", "Cora: 6 h of CPU; digits: 6 h with D-Wave", "runtime", _runtime),
    Item(
        "Appendix, Rosenbrock",
        "one minute of QPU time for five runs",
        "",
        _drawing("needs a QPU; the values reached are not given"),
    ),
    Item("Sec. 5, growth", "quadratic in width and in batch size", "runtime", _growth),
)
"""In the paper's order."""
