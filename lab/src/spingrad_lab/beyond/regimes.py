"""Where the projection beats the sign, and where a better solver helps: should I use this, with what?"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, binary_parameters
from spingrad.problem import BinaryLeastSquares
from spingrad.record import record_of
from spingrad_lab.data import mnist
from spingrad_lab.methods import ONE_BATCH, SOLVER_LABELS, Settings, grid, make_solver
from spingrad_lab.report import figures
from spingrad_lab.report.sections import Figure, Section, Table, to_svg
from spingrad_lab.report.statistics import Estimate, Paired, estimate, paired
from spingrad_lab.runs import Experiment, Job, Lab, Line, seeded
from spingrad_lab.tasks.training import VectorTask, train
from spingrad_lab.trials import TUNING_SEED

INPUTS = ("pixels", "centred", "whitened")


@cache
def _images(split: str) -> tuple[Tensor, Tensor]:
    data = mnist(split)  # type: ignore[arg-type]
    return data.pixels(), data.labels


class Digits(VectorTask):
    """5,000 images of MNIST and 4 epochs, in a network of any width and depth.

    Args:
        cell: Width, number of hidden layers, batch size, side of the image, inputs and BatchNorm.
    """

    epochs = 4

    def __init__(self, seed: int, tuning: bool, quick: bool, cell: dict[str, Any]) -> None:
        self.cell = cell
        self.batch = cell["batch"]
        x, y = _images("train")
        order = torch.randperm(len(x))[: 400 if quick else 5_000]
        count = 4 * len(order) // 5 if tuning else len(order)
        fit, held_out = order[:count], order[count:]
        features = self._features(x[order])
        self.train = features(x[fit]), y[fit]
        self.test = (
            (features(x[held_out]), y[held_out])
            if tuning
            else (features(_images("test")[0]), _images("test")[1])
        )
        if quick:
            self.epochs = 1

    def _features(self, x: Tensor) -> Any:
        """Pixels of the side asked for with a root mean square of one, centred or whitened if asked."""
        side = self.cell["side"]

        def shrunk(x: Tensor) -> Tensor:
            return nn.functional.adaptive_avg_pool2d(x.view(-1, 28, 28), side).flatten(1)

        own = shrunk(x)
        mean = own.mean(0) if self.cell["inputs"] != "pixels" else torch.zeros(side * side)
        turn = torch.eye(side * side)
        if self.cell["inputs"] == "whitened":
            values, vectors = torch.linalg.eigh(torch.cov(own.T))
            turn = vectors / (values.clamp(min=0) + 1e-2 * values[-1]).sqrt()
        scale = ((own - mean) @ turn).square().mean().sqrt()
        return lambda x: (shrunk(x) - mean) @ turn / scale

    def network(self) -> nn.Module:
        width, depth = self.cell["width"], self.cell["depth"]
        layers: list[nn.Module] = []
        for fan_in, fan_out in itertools.pairwise([self.cell["side"] ** 2, *[width] * depth, 10]):
            layers.append(BinaryLinear(fan_in, fan_out))
            if self.cell["norm"]:
                layers.append(nn.BatchNorm1d(fan_out))
            layers.append(nn.Hardtanh())
        return nn.Sequential(*layers[:-1])

    def watched(self, model: nn.Module) -> dict[str, float]:
        return {}


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
    "QP-SBGD": grid(lr=(1e-4, 3e-4, 1e-3, 3e-3), target_rms=(2,), momentum=(0.9,)),
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
            for s in [_best(scored, cell=cell, method=method)]
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
            for s in [_best(scored, side=a, solver=b)]
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
            return train(task, "QP-SBGD", settings, job["seed"])

    def show(self, lines: Sequence[Line]) -> Section:
        gains = {}
        for cell in _cells():
            own = [
                li
                for li in lines
                if li.job["part"] == "map" and li.job["stage"] == "final" and li.job["cell"] == cell
            ]
            if own:
                gains[_name(cell)] = _gain(own)
        gaps: dict[str, dict[int, list[float]]] = {}
        for line in (li for li in lines if li.job["part"] == "gap"):
            for solver, values in line.metrics["excess"].items():
                gaps.setdefault(solver, {}).setdefault(line.job["side"] ** 2, []).extend(values)
        scores: dict[str, dict[int, list[float]]] = {}
        for line in (li for li in lines if li.job["part"] == "solver" and li.job["stage"] == "final"):
            by_side = scores.setdefault(line.job["solver"], {})
            by_side.setdefault(line.job["side"] ** 2, []).append(line.metrics["test_accuracy"])
        tables = [_gain_table(gains), _gap_table(gaps), _score_table(scores)]
        caption = (
            "Top: gain of QP-SBGD over signSGD in points of test accuracy (bold: 95 % interval beyond zero), "
            "MNIST, 5,000 images. Bottom: how far each solver stays above the optimum, and what that does to "
            "the trained network."
        )
        figure = Figure("map", caption, to_svg(_picture(gains, gaps, scores)))
        return Section(_answers(gains, scores), tables, [figure])


def _cells() -> list[dict[str, Any]]:
    cells = [_CELL | {"width": w, "depth": d} for w in WIDTHS for d in DEPTHS]
    cells += [_CELL | {"batch": b} for b in BATCHES if b != 100]
    cells += [_CELL | {"inputs": inputs} for inputs in INPUTS[1:]]
    return cells + [_CELL | {"depth": d, "norm": True} for d in DEPTHS]


def _small(side: int) -> dict[str, Any]:
    return _CELL | {"side": side, "width": 16, "depth": 1}


def _name(cell: dict[str, Any]) -> tuple[int, int, int, str, bool]:
    return cell["width"], cell["depth"], cell["batch"], cell["inputs"], cell["norm"]


def _best(scored: Sequence[Line], **where: Any) -> Settings:
    own = [line for line in scored if all(line.job[k] == v for k, v in where.items())]
    return max(own, key=lambda line: line.metrics["test_accuracy"]).job["settings"]  # type: ignore[no-any-return]


def _gaps(side: int, quick: bool) -> dict[str, Any]:
    """Energy above the optimum, as a share of ‖V‖², on first-layer problems met in training."""
    task = Digits(0, False, quick, _small(side))
    network = task.network()
    optimizer = QPSBGD(binary_parameters(network), 1e-3, **ONE_BATCH)
    weight = dict(binary_parameters(network))["0.weight"]
    excess: dict[str, list[float]] = {}
    for step, loss in enumerate(task.batches()):
        optimizer.zero_grad()
        loss(network).backward()
        if step % 12 == 0:
            record = record_of(weight)
            assert record is not None
            problem = BinaryLeastSquares.from_record(record.layers()[0], "uniform", 1.0)
            for name, value in _excess(problem, step).items():
                excess.setdefault(name, []).append(value)
        optimizer.step()
    return {"excess": excess}


def _excess(problem: BinaryLeastSquares, seed: int) -> dict[str, float]:
    names = [name for name in _SOLVERS if name != "exact" or problem.num_spins <= _EXACT_GAP]
    energies = {name: make_solver(name).solve(problem, seed=seed).energy.double().sum() for name in names}
    floor = energies["exact"] if "exact" in energies else problem.lower_bound().double().sum()
    size = problem.V.double().square().sum()
    return {name: float((energy - floor) / size) for name, energy in energies.items() if name != "exact"}


def _gain(lines: Sequence[Line]) -> Paired:
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        values.setdefault(line.job["method"], {})[line.job["seed"]] = 100 * line.metrics["test_accuracy"]
    first, second = (values[method] for method in _TRIALS)
    seeds = sorted(first.keys() & second.keys())
    return paired([first[s] for s in seeds], [second[s] for s in seeds])


def _gain_table(gains: dict[Any, Paired]) -> Table:
    rows = [
        [f"{width} × {depth}", str(batch), inputs, "yes" if norm else "no", _points(gain), f"{gain.p:.2g}"]
        for (width, depth, batch, inputs, norm), gain in gains.items()
    ]
    header = ["width × hidden layers", "batch", "inputs", "BatchNorm", "gain in points", "p"]
    return Table(header, rows, "QP-SBGD minus signSGD, test accuracy; both with momentum 0.9 and four trials")


def _points(gain: Paired) -> str:
    return f"{gain.difference.mean:+.2f} ± {gain.difference.half:.2f}"


def _gap_table(gaps: dict[str, dict[int, list[float]]]) -> Table:
    sizes = sorted({n for own in gaps.values() for n in own})
    rows = [[SOLVER_LABELS[name], *(_percent(own.get(n)) for n in sizes)] for name, own in gaps.items()]
    caption = "Energy above the optimum (fan-in above 49: above a certified bound), as a share of ‖V‖²"
    return Table(["solver", *(f"fan-in {n}" for n in sizes)], rows, caption)


def _percent(values: list[float] | None) -> str:
    return "–" if not values else f"{100 * float(np.mean(values)):.3f} %"


def _score_table(scores: dict[str, dict[int, list[float]]]) -> Table:
    sizes = sorted({n for own in scores.values() for n in own})
    rows = [
        [SOLVER_LABELS[name], *(str(estimate(own[n])) if n in own else "–" for n in sizes)]
        for name, own in scores.items()
    ]
    return Table(
        ["solver", *(f"fan-in {n}" for n in sizes)], rows, "Test accuracy of n-16-10 trained with each solver"
    )


def _answers(gains: dict[Any, Paired], scores: dict[str, dict[int, list[float]]]) -> list[str]:
    """What the map says, in words; every number comes from the runs."""
    notes = []
    wins = [k for k, g in gains.items() if g.difference.mean - g.difference.half > 0]
    losses = [k for k, g in gains.items() if g.difference.mean + g.difference.half < 0]
    ties = len(gains) - len(wins) - len(losses)
    notes.append(
        f"**Projection or sign?** Of {len(gains)} settings QP-SBGD is ahead of signSGD beyond its interval "
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
    if "exact" in scores and "block" in scores:
        both = sorted(scores["exact"].keys() & scores["block"].keys())
        results = {n: paired(scores["exact"][n], scores["block"][n]) for n in both}
        text = "; ".join(
            f"fan-in {n}: {100 * r.difference.mean:+.2f} ± {100 * r.difference.half:.2f}"
            for n, r in results.items()
        )
        notes.append(
            "**Do I need an annealer?** Exact solutions instead of the default's, in points of test "
            f"accuracy: {text}."
        )
    return notes


def _picture(gains: dict[Any, Paired], gaps: dict[str, Any], scores: dict[str, Any]) -> Any:
    canvas, axes = figures.new(10, 6.4, rows=2, columns=3)
    _heat(axes[0, 0], gains)
    bars = {f"batch {b}": gains.get((128, 3, b, "pixels", False)) for b in BATCHES}
    bars |= {name: gains.get((128, 3, 100, name, False)) for name in INPUTS}
    _bars(axes[0, 1], bars, "batch size and inputs\n(width 128, 3 hidden layers)")
    plain = {f"{d} hidden": gains.get((128, d, 100, "pixels", False)) for d in DEPTHS}
    normed = {f"{d} hidden, BatchNorm": gains.get((128, d, 100, "pixels", True)) for d in DEPTHS}
    _bars(axes[0, 2], plain | normed, "depth and BatchNorm\n(width 128)")
    colours = dict(
        zip(
            _SOLVERS,
            (figures.BLUE, figures.ORANGE, figures.VERMILION, figures.GREEN, figures.BLACK),
            strict=True,
        )
    )
    markers = dict(zip(_SOLVERS, "sDo^x", strict=True))
    for name, own in gaps.items():
        sizes = sorted(own)
        shown = [max(float(np.mean(own[n])), 1e-7) for n in sizes]
        axes[1, 0].plot(
            sizes, shown, marker=markers[name], color=colours[name], label=SOLVER_LABELS[name], markersize=4
        )
    axes[1, 0].axvspan(_EXACT_GAP + 1, 250, color="#000000", alpha=0.05, linewidth=0)
    axes[1, 0].set(xscale="log", yscale="log", xlabel="fan-in n", ylabel="energy above the optimum, of ‖V‖²")
    axes[1, 0].set_title("Do I need an annealer?\nsolvers, above the optimum")
    axes[1, 0].text(0.98, 0.03, "grey: above a bound", transform=axes[1, 0].transAxes, ha="right", fontsize=7)
    for place, (name, own) in enumerate(scores.items()):
        style = {"marker": markers[name], "color": colours[name], "markersize": 4, "capsize": 2}
        style |= {"label": SOLVER_LABELS[name], "linewidth": 0.8, "shift": 0.95 + 0.025 * place}
        _intervals(axes[1, 1], {n: estimate(values) for n, values in own.items()}, style)
        if name != "block":
            both = own.keys() & scores.get("block", {}).keys()
            in_points = {n: [[100 * v for v in scored[n]] for scored in (own, scores["block"])] for n in both}
            _intervals(axes[1, 2], {n: paired(*values).difference for n, values in in_points.items()}, style)
    axes[1, 1].set(xscale="log", xlabel="fan-in n", ylabel="test accuracy")
    axes[1, 1].set_title("networks n-16-10\ntrained with each solver")
    axes[1, 1].legend(fontsize=7, loc="lower right")
    axes[1, 2].axhline(0, color=figures.BLACK, linewidth=0.8)
    axes[1, 2].set(
        xscale="log",
        xlabel="fan-in n",
        ylabel="points against the default",
        title="the same networks\nagainst the default solver",
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
    limit = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    axes.imshow(values, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        gain = found[row][column]
        if gain is not None:
            sure = abs(gain.difference.mean) > gain.difference.half
            ink = "white" if abs(value) > 0.6 * limit else "black"
            text = f"{value:+.1f} ± {gain.difference.half:.1f}"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                color=ink,
                fontweight="bold" if sure else "normal",
                fontsize=8,
            )
    axes.set_xticks(range(len(WIDTHS)), [str(w) for w in WIDTHS])
    axes.set_yticks(range(len(DEPTHS)), [str(d) for d in DEPTHS])
    axes.grid(False)
    axes.set(
        xlabel="width", ylabel="hidden layers", title="Should I use this?\nQP-SBGD minus signSGD, points"
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
    axes.set(xlabel="QP-SBGD minus signSGD, points", title=title)


REGIMES = Regimes()
