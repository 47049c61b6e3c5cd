"""How figures look: colours that survive colour blindness, named axes, spread of seeds shaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from spingrad._figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW, new
from spingrad_lab.report.statistics import estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLACK",
    "BLUE",
    "FILLS",
    "GREEN",
    "GREY",
    "ORANGE",
    "PURPLE",
    "SKY",
    "STYLES",
    "VERMILION",
    "YELLOW",
    "Curves",
    "Panel",
    "curves",
    "legend_below",
    "new",
]

FILLS = (ORANGE, SKY, GREEN, YELLOW, VERMILION, PURPLE, GREY)
"""Colours on which black text can be read."""
Curves = tuple[Sequence[float], Sequence[Sequence[float]]]
"""Places on the horizontal axis, and a curve for each run."""

STYLES = {
    "QP-SBGD": (VERMILION, "-"),
    "QP-SBGD, exact": (VERMILION, "--"),
    "QP-SBGD, all directions": (YELLOW, "-"),
    "QP-SBGD, all directions, exact": (YELLOW, "--"),
    "QP-SBGD as published": (PURPLE, "-"),
    "QP-SBGD as published, exact": (PURPLE, "--"),
    "QP-SBGD as published, mean loss, scaled layers": (PURPLE, ":"),
    "QP-SBGD as published, mean loss, scaled layers, exact": (PURPLE, "-."),
    "BinaryConnect SGD": (SKY, "-"),
    "BinaryConnect signSGD": (BLUE, "-"),
    "BinaryConnect Adam": (GREEN, "-"),
    "ProxQuant": (ORANGE, "-"),
    "Bop": (GREY, "-"),
    "binary layers frozen": (BLACK, ":"),
    "real weights, Adam": (BLACK, "--"),
    "logistic regression": (BLACK, "-."),
    "usual GCN, real weights": (GREEN, ":"),
}


@dataclass(frozen=True)
class Panel:
    """What one panel of curves shows.

    Args:
        series: Each method's curves.
        levels: Scores of methods without a curve.
        named: The methods that are drawn in colour, with intervals; the others are thin and grey.
        higher_is_better: False if the score is a loss.
    """

    series: dict[str, Curves]
    levels: dict[str, float]
    named: Sequence[str]
    higher_is_better: bool = True


def curves(panels: dict[str, Panel], x_label: str, y_label: str) -> "Figure":
    """A panel for each task: means of each method's curves, whose names stand at their ends."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    canvas, axes = new(4.9 * columns, 3.4 * rows, rows, columns)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for axis, (title, panel) in zip(axes.flat, panels.items(), strict=False):
        low, high = _limits(panel)
        axis.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(low, high))
        axis.xaxis.get_major_locator().set_params(integer=True)
        ends = {**_draw_series(axis, panel), **panel.levels}
        for name, level in panel.levels.items():
            axis.axhline(level, xmin=0.97, color=_style(name, panel)[0], linewidth=1.2)
        _name_ends(axis, panel, {name: (end - low) / (high - low) for name, end in ends.items()})
    return canvas


def _draw_series(axis: "Axes", panel: Panel) -> dict[str, float]:
    """Draw the curves of a panel; where each one's mean ends."""
    ends = {}
    for name, (x, runs) in panel.series.items():
        values = np.asarray(runs, dtype=float)
        mean = values.mean(0)
        ends[name] = float(mean[-1])
        colour, dash = _style(name, panel)
        front = name in panel.named
        axis.plot(x, mean, dash, color=colour, linewidth=1.7 if front else 0.7, zorder=3 if front else 2)
        if front and len(values) > 2:  # the interval of two runs covers everything
            half = np.array([estimate(point).half for point in values.T])
            axis.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    return ends


def _style(name: str, panel: Panel) -> tuple[str, str]:
    colour, dash = STYLES.get(name, (GREY, "-"))
    return (colour, dash) if name in panel.named else (GREY, dash)


def _name_ends(axis: "Axes", panel: Panel, heights: dict[str, float]) -> None:
    """Names beside the right edge of a panel, as near to the given heights as they fit."""
    for name, place in _spread(heights).items():
        height, colour = min(max(heights[name], 0.0), 1.0), _style(name, panel)[0]
        outside = " ↑" if heights[name] > 1 else " ↓" if heights[name] < 0 else ""
        style: dict[str, Any] = {"transform": axis.transAxes, "clip_on": False, "color": colour}
        axis.plot([1.0, 1.04], [height, place], linewidth=0.5, **style)
        weight = "bold" if name in panel.named else "normal"
        text = _SHORT.get(name, name).removeprefix("BinaryConnect ") + outside
        axis.text(1.05, place, text, va="center", fontsize=7, fontweight=weight, **style)


_SHORT = {"real weights, Adam": "real weights", "binary layers frozen": "frozen"}


def _spread(heights: dict[str, float], gap: float = 0.052) -> dict[str, float]:
    """Heights between 0 and 1 in the same order, moved as little as keeps them ``gap`` apart."""
    names = sorted(heights, key=heights.__getitem__)
    places: list[float] = []
    for name in names:
        wanted = min(max(heights[name], 0.0), 1.0)
        places.append(max(wanted, places[-1] + gap) if places else wanted)
    highest = 1.0
    for index in reversed(range(len(places))):  # what the first pass pushed out at the top comes back
        places[index] = min(places[index], highest)
        highest = places[index] - gap
    return dict(zip(names, places, strict=True))


def _limits(panel: Panel) -> tuple[float, float]:
    """A range that shows every curve, except those far worse than the others, which leave the picture."""
    means = [np.asarray(runs, dtype=float).mean(0) for _, runs in panel.series.values()]
    levels = list(panel.levels.values())
    ends = np.array([mean[-1] for mean in means] + levels)
    middle = float(np.median(ends))
    reach = 4 * float(np.median(np.abs(ends - middle))) + 1e-9
    worse = -1 if panel.higher_is_better else 1
    inside = [mean for mean in means if worse * (mean[-1] - middle) <= reach]
    near = [level for level in levels if worse * (level - middle) <= reach]
    values = np.concatenate([*inside, near, [middle]])
    margin = 0.06 * (float(values.max() - values.min()) + 1e-9)
    return float(values.min()) - margin, float(values.max()) + margin


def legend_below(canvas: "Figure", axes: "Axes") -> None:
    """One legend for all panels: that of ``axes``, in a row under them."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
