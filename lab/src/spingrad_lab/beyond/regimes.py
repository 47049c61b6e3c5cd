"""Where the projection beats the sign, and where a better solver helps: should I use this, with what?"""

from typing import Any

import numpy as np
import pandas as pd

from spingrad import QPSBGD, BinaryQuadratic, binary_parameters
from spingrad_lab.methods import ALL_DIRECTIONS, DEFAULT, ONE_BATCH, SOLVER_LABELS, grid, make_solver
from spingrad_lab.posed import posed, target_squares
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Estimate, Paired, estimate
from spingrad_lab.runs import Experiment, Job, Lab, groups, seeded, where
from spingrad_lab.tasks.images import Digits
from spingrad_lab.tasks.training import train
from spingrad_lab.trials import TUNING_SEED, ahead, best_trial, current_finals

INPUTS = ("pixels", "centred", "whitened")


_CELL: dict[str, Any] = {
    "width": 128,
    "depth": 3,
    "batch": 100,
    "side": 28,
    "inputs": "pixels",
    "norm": False,
}
WIDTHS, DEPTHS, BATCHES, SIDES = (32, 128, 512), (1, 3, 8), (10, 30, 100, 300), (2, 3, 4, 5, 7, 10, 14)
_TRIALS = {
    DEFAULT: grid(lr=(1e-4, 3e-4, 1e-3, 3e-3)),
    ALL_DIRECTIONS: grid(lr=(1e-4, 3e-4, 1e-3, 3e-3), target_rms=(2,), momentum=(0.9,)),
    "BinaryConnect signSGD": grid(lr=(3e-5, 1e-4, 3e-4, 1e-3), momentum=(0.9,)),
}
_SOLVERS = tuple(SOLVER_LABELS)
_EXACT_GAP, _SLOW_TRAINING = 49, 16  # fan-ins up to which optima are proved, and slow solvers train


class Regimes(Experiment):
    """Two questions: projection or sign, and which solver."""

    title = "Regimes: should I use this, and do I need an annealer for it?"
    source = "beyond the paper"

    def plan(self, lab: Lab) -> None:
        seeds = lab.seeds or (2 if lab.quick else 5)
        cells = _cells() if not lab.quick else _cells()[:2]
        trials: list[Job] = [
            {
                "part": "map",
                "stage": "trial",
                "cell": cell,
                "method": method,
                "settings": s,
                "seed": TUNING_SEED,
            }
            for cell in cells
            for method, settings in _TRIALS.items()
            for s in (settings[2:3] if lab.quick else settings)
        ]
        scored = lab.run(trials, "map, trials")
        finals: list[Job] = [
            {"part": "map", "stage": "final", "cell": cell, "method": method, "settings": s, "seed": seed}
            for cell in cells
            for method in _TRIALS
            for s in [best_trial(where(scored, cell=cell, method=method)).settings]
            for seed in range(seeds)
        ]
        lab.run(finals, "map, finals")
        sides = SIDES[:2] if lab.quick else SIDES
        lab.run(
            [{"part": "gap", "side": side, "seed": s} for side in sides for s in range(seeds)], "energies"
        )
        slow = ("annealing", "exact")
        pairs = [(a, b) for a in sides for b in _SOLVERS if b not in slow or a * a <= _SLOW_TRAINING]
        rates = (1e-3,) if lab.quick else (3e-4, 1e-3, 3e-3)
        trials = [
            {
                "part": "solver",
                "stage": "trial",
                "side": a,
                "solver": b,
                "settings": {"lr": lr},
                "seed": TUNING_SEED,
            }
            for a, b in pairs
            for lr in rates
        ]
        scored = lab.run(trials, "solvers, trials")
        finals = [
            {"part": "solver", "stage": "final", "side": a, "solver": b, "settings": s, "seed": seed}
            for a, b in pairs
            for s in [best_trial(where(scored, side=a, solver=b)).settings]
            for seed in range(seeds)
        ]
        lab.run(finals, "solvers, finals")

    def compute(self, job: Job) -> dict[str, Any]:
        with seeded(job["seed"]):
            if job["part"] == "gap":
                return _gaps(job["side"], job["quick"])
            tuning = job["stage"] == "trial"
            if job["part"] == "map":
                task = Digits(job["seed"], tuning, job["quick"], job["cell"])
                return train(task, job["method"], job["settings"], job["seed"])
            task = Digits(job["seed"], tuning, job["quick"], _small(job["side"]))
            settings = job["settings"] | {"solver": job["solver"]}
            return train(task, ALL_DIRECTIONS, settings, job["seed"])

    def show(self, runs: pd.DataFrame) -> Section:
        gains = {}
        finals = where(runs, part="map", stage="final")
        ours = DEFAULT if len(where(finals, method=DEFAULT)) else ALL_DIRECTIONS
        for cell in _cells():
            own = current_finals(where(runs, part="map", cell=cell), ["method"])
            if len(own) and ours in set(own["method"]):
                gains[_name(cell)] = ahead(_in_points(own), ours, "BinaryConnect signSGD", score="points")
        gaps = _gap_frame(where(runs, part="gap"))
        scores = current_finals(where(runs, part="solver"), ["side", "solver"])
        scores = scores.assign(fan_in=scores["side"] ** 2)
        tables = [_gain_table(gains, ours), _gap_table(gaps), _score_table(scores)]
        caption = (
            f"Top: gain of *{ours}* over signSGD in points of test accuracy (bold: 95 % interval beyond "
            "zero), MNIST, 5,000 images. Bottom: how far each solver stays above the optimum, "
            "and what that does to the trained network."
        )
        figure = Figure("map", caption, to_svg(_picture(gains, gaps, scores)))
        return Section(_answers(gains, scores, ours), tables, [figure])


def _cells() -> list[dict[str, Any]]:
    cells = [_CELL | {"width": w, "depth": d} for w in WIDTHS for d in DEPTHS]
    cells += [_CELL | {"batch": b} for b in BATCHES if b != 100]
    cells += [_CELL | {"inputs": inputs} for inputs in INPUTS[1:]]
    return cells + [_CELL | {"depth": d, "norm": True} for d in DEPTHS]


def _small(side: int) -> dict[str, Any]:
    return _CELL | {"side": side, "width": 16, "depth": 1}


def _name(cell: dict[str, Any]) -> tuple[int, int, int, str, bool]:
    return cell["width"], cell["depth"], cell["batch"], cell["inputs"], cell["norm"]


def _gaps(side: int, quick: bool) -> dict[str, Any]:
    """Energy above the optimum, as a share of ‖V‖², on first-layer problems met in training."""
    task = Digits(0, False, quick, _small(side))
    network = task.network()
    optimizer = QPSBGD(binary_parameters(network), 1e-3, **ONE_BATCH)
    excess: dict[str, list[float]] = {}
    for step, loss in enumerate(task.batches()):
        optimizer.zero_grad()
        loss(network).backward()
        if step % 12 == 0:
            first = posed(network, loss, target_rms=1.0, rank=None)[0]
            for name, value in _excess(first, step).items():
                excess.setdefault(name, []).append(value)
        optimizer.step()
    return {"excess": excess}


def _excess(problem: BinaryQuadratic, seed: int) -> dict[str, float]:
    names = [name for name in _SOLVERS if name != "exact" or problem.num_spins <= _EXACT_GAP]
    energies = {name: make_solver(name).solve(problem, seed=seed).energy.double().sum() for name in names}
    floor = energies["exact"] if "exact" in energies else problem.lower_bound().double().sum()
    size = target_squares(problem).sum()
    return {name: float((energy - floor) / size) for name, energy in energies.items() if name != "exact"}


def _gap_frame(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean energy above the optimum, a row for each solver and a column for each fan-in."""
    values = [
        (solver, side**2, value)
        for side, excess in zip(runs["side"], runs["excess"], strict=True)
        for solver, own in excess.items()
        for value in own
    ]
    frame = pd.DataFrame(values, columns=["solver", "fan_in", "excess"])
    return frame.pivot_table("excess", "solver", "fan_in", sort=False).sort_index(axis=1)


def _in_points(finals: pd.DataFrame) -> pd.DataFrame:
    return finals.assign(points=100 * finals["test_accuracy"])


def _gain_over_default(scores: pd.DataFrame, solver: str) -> dict[int, Paired]:
    """By fan-in, in points of test accuracy: a solver minus block descent, where both were trained with."""
    return {
        n: ahead(own, solver, "block", "solver", "points")
        for n, own in groups(_in_points(scores.sort_values("fan_in")), "fan_in")
        if {solver, "block"} <= set(own["solver"])
    }


def _gain_table(gains: dict[Any, Paired], ours: str) -> Table:
    rows = [
        [f"{width} × {depth}", str(batch), inputs, "yes" if norm else "no", _points(gain), f"{gain.p:.2g}"]
        for (width, depth, batch, inputs, norm), gain in gains.items()
    ]
    header = ["width × hidden layers", "batch", "inputs", "BatchNorm", "gain in points", "p"]
    caption = f"{ours} minus signSGD, test accuracy; both with momentum 0.9 and four trials"
    return Table(header, rows, caption)


def _points(gain: Paired) -> str:
    return f"{gain.difference.mean:+.2f} ± {gain.difference.half:.2f}"


def _gap_table(gaps: pd.DataFrame) -> Table:
    rows = [
        [SOLVER_LABELS[name], *("–" if np.isnan(value) else f"{100 * value:.3f} %" for value in own)]
        for name, own in zip(map(str, gaps.index), gaps.to_numpy(), strict=True)
    ]
    caption = "Energy above the optimum (fan-in above 49: above a certified bound), as a share of ‖V‖²"
    return Table(["solver", *(f"fan-in {n}" for n in gaps.columns)], rows, caption)


def _score_table(scores: pd.DataFrame) -> Table:
    cells = {key: estimate(own["test_accuracy"]) for key, own in groups(scores, ["solver", "fan_in"])}
    sizes = sorted(set(scores["fan_in"]))
    rows = [
        [label, *(str(cells[name, n]) if (name, n) in cells else "–" for n in sizes)]
        for name, label in SOLVER_LABELS.items()
        if name in set(scores["solver"])
    ]
    return Table(
        ["solver", *(f"fan-in {n}" for n in sizes)], rows, "Test accuracy of n-16-10 trained with each solver"
    )


def _answers(gains: dict[Any, Paired], scores: pd.DataFrame, ours: str) -> list[str]:
    """What the map says, in words; every number comes from the runs."""
    notes = []
    wins = [k for k, g in gains.items() if g.difference.mean - g.difference.half > 0]
    losses = [k for k, g in gains.items() if g.difference.mean + g.difference.half < 0]
    ties = len(gains) - len(wins) - len(losses)
    notes.append(
        f"**Projection or sign?** Of {len(gains)} settings *{ours}* is ahead of signSGD beyond its interval "
        f"in {len(wins)} and behind in {len(losses)}; the other {ties} are ties."
    )
    for label, keys in (("ahead", wins), ("behind", losses)):
        if keys:
            best = max(keys, key=lambda k: abs(gains[k].difference.mean))
            width, depth, batch, inputs, norm = best
            notes.append(
                f"Furthest {label}: {_points(gains[best])} points at width {width}, {depth} hidden layers, "
                f"batch {batch}, {inputs}, {'with' if norm else 'without'} BatchNorm."
            )
    if results := _gain_over_default(scores, "exact"):
        text = "; ".join(f"fan-in {n}: {_points(result)}" for n, result in results.items())
        notes.append(
            "**Do I need an annealer?** Exact solutions instead of those of block descent (without momentum, "
            f"all directions), in points of test accuracy: {text}."
        )
    return notes


def _picture(gains: dict[Any, Paired], gaps: pd.DataFrame, scores: pd.DataFrame) -> Any:
    canvas, axes = figures.new(10, 6.4, rows=2, columns=3)
    _heat(axes[0, 0], gains)
    bars = {f"batch {b}": gains.get((128, 3, b, "pixels", False)) for b in BATCHES}
    bars |= {name: gains.get((128, 3, 100, name, False)) for name in INPUTS[1:]}  # batch 100 has pixels
    _bars(axes[0, 1], bars, "batch size (pixels), inputs (batch 100)\n(width 128, 3 hidden layers)")
    normed = {f"{d} hidden": gains.get((128, d, 100, "pixels", True)) for d in DEPTHS}
    _bars(axes[0, 2], normed, "with BatchNorm\n(width 128; without: in the map)")
    colours = dict(
        zip(
            _SOLVERS,
            (figures.BLUE, figures.ORANGE, figures.VERMILION, figures.GREEN, figures.BLACK),
            strict=True,
        )
    )
    markers = dict(zip(_SOLVERS, "sDo^x", strict=True))
    for name in map(str, gaps.index):
        shown = gaps.loc[name].dropna().clip(lower=1e-7)
        style = {"marker": markers[name], "color": colours[name], "markersize": 4}
        axes[1, 0].plot(shown.index, shown, label=SOLVER_LABELS[name], **style)
    axes[1, 0].axvspan(_EXACT_GAP + 1, 250, color="#000000", alpha=0.05, linewidth=0)
    axes[1, 0].set(xscale="log", yscale="log", xlabel="fan-in n", ylabel="energy above the optimum, of ‖V‖²")
    axes[1, 0].set_title("Do I need an annealer?\nsolvers, above the optimum")
    axes[1, 0].text(0.98, 0.03, "grey: above a bound", transform=axes[1, 0].transAxes, ha="right", fontsize=7)
    for place, name in enumerate(name for name in _SOLVERS if name in set(scores["solver"])):
        style = {"marker": markers[name], "color": colours[name], "markersize": 4, "capsize": 2}
        style |= {"label": SOLVER_LABELS[name], "linewidth": 0.8, "shift": 0.95 + 0.025 * place}
        own = groups(where(scores, solver=name), "fan_in")
        _intervals(axes[1, 1], {n: estimate(runs["test_accuracy"]) for n, runs in own}, style)
        if name != "block":
            gained = {n: gain.difference for n, gain in _gain_over_default(scores, name).items()}
            _intervals(axes[1, 2], gained, style)
    axes[1, 1].set(xscale="log", xlabel="fan-in n", ylabel="test accuracy")
    axes[1, 1].set_title("networks n-16-10\ntrained with each solver")
    axes[1, 1].legend(fontsize=7, loc="lower right")
    axes[1, 2].axhline(0, color=figures.BLACK, linewidth=0.8)
    axes[1, 2].set(
        xscale="log",
        xlabel="fan-in n",
        ylabel="points against block descent",
        title="the same networks\nagainst block descent",
    )
    for panel in axes[1]:
        panel.set_xticks([4, 9, 16, 25, 49, 100, 196], ["4", "9", "16", "25", "49", "100", "196"])
        panel.minorticks_off()
    return canvas


def _intervals(axes: Any, values: dict[int, Estimate], style: dict[str, Any]) -> None:
    sizes, shift = sorted(values), style["shift"]  # side by side, or the intervals hide each other
    style = {key: value for key, value in style.items() if key != "shift"}
    places = [shift * n for n in sizes]
    axes.errorbar(places, [values[n].mean for n in sizes], [values[n].half for n in sizes], **style)


def _heat(axes: Any, gains: dict[Any, Paired]) -> None:
    found = [[gains.get((w, d, 100, "pixels", False)) for w in WIDTHS] for d in DEPTHS]
    values = np.array([[np.nan if g is None else g.difference.mean for g in row] for row in found])
    sure = np.array(
        [[g is not None and abs(g.difference.mean) > g.difference.half for g in row] for row in found]
    )
    shown = np.where(sure, values, 0)  # a gain within its interval has no colour
    limit = float(np.abs(shown).max()) or 1.0
    axes.imshow(shown, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        gain = found[row][column]
        if gain is not None:
            ink = "white" if abs(shown[row, column]) > 0.6 * limit else "black"
            text = f"{value:+.1f} ± {gain.difference.half:.1f}"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                color=ink,
                fontweight="bold" if sure[row, column] else "normal",
                fontsize=8,
            )
    axes.set_xticks(range(len(WIDTHS)), [str(w) for w in WIDTHS])
    axes.set_yticks(range(len(DEPTHS)), [str(d) for d in DEPTHS])
    axes.grid(False)
    axes.set(
        xlabel="width",
        ylabel="hidden layers",
        title="Should I use this?\ngain over signSGD, points",
    )


def _bars(axes: Any, bars: dict[str, Paired | None], title: str) -> None:
    shown = {name: gain.difference for name, gain in bars.items() if gain is not None}
    places = np.arange(len(shown))
    colours = [figures.VERMILION if g.mean > 0 else figures.BLUE for g in shown.values()]
    axes.barh(
        places,
        [g.mean for g in shown.values()],
        xerr=[g.half for g in shown.values()],
        color=colours,
        capsize=2,
    )
    axes.set_yticks(places, list(shown))
    axes.invert_yaxis()
    axes.axvline(0, color=figures.BLACK, linewidth=0.8)
    axes.set(xlabel="gain over signSGD, points", title=title)


REGIMES = Regimes()
