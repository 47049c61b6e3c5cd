"""How figures look: colours that survive colour blindness, named axes, spread of seeds shaded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    "curves",
    "draw_curves",
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


def curves(
    series: dict[str, Curves],
    flat: dict[str, float],
    x_label: str,
    y_label: str,
    higher_is_better: bool,
) -> "Figure":
    """Mean of each method's curves with its 95 % interval shaded; ``flat`` are levels without a curve."""
    canvas, axes = new(7.2, 3.8)
    draw_curves(axes[0, 0], series, flat)
    axes[0, 0].set_xlabel(x_label)
    axes[0, 0].set_ylabel(y_label)
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set_ylim(*_limits(series, flat, higher_is_better))
    axes[0, 0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return canvas


def _limits(series: dict[str, Curves], flat: dict[str, float], higher_is_better: bool) -> tuple[float, float]:
    """A range that shows every curve, except those far worse than the others, which leave the picture."""
    means = [np.asarray(runs, dtype=float).mean(0) for _, runs in series.values()]
    ends = np.array([mean[-1] for mean in means] + list(flat.values()))
    middle = float(np.median(ends))
    reach = 4 * float(np.median(np.abs(ends - middle))) + 1e-9
    worse = -1 if higher_is_better else 1
    inside = [mean for mean in means if worse * (mean[-1] - middle) <= reach]
    levels = [level for level in flat.values() if worse * (level - middle) <= reach]
    values = np.concatenate([*inside, levels, [middle]])
    margin = 0.06 * (float(values.max() - values.min()) + 1e-9)
    return float(values.min()) - margin, float(values.max()) + margin


def draw_curves(
    axes: "Axes",
    series: dict[str, Curves],
    flat: dict[str, float],
) -> None:
    for name, (x, runs) in series.items():
        colour, dash = STYLES.get(name, (GREY, "-"))
        values = np.asarray(runs, dtype=float)
        mean = values.mean(0)
        axes.plot(x, mean, dash, color=colour, label=name, linewidth=1.6)
        if len(values) > 2:  # the interval of two runs covers everything
            half = np.array([estimate(point).half for point in values.T])
            axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.15, linewidth=0)
    for name, level in flat.items():
        colour, dash = STYLES.get(name, (GREY, "-."))
        axes.axhline(level, color=colour, linestyle=dash, label=name, linewidth=1.2)


def legend_below(canvas: "Figure", axes: "Axes") -> None:
    """One legend for all panels: that of ``axes``, in a row under them."""
    handles, labels = axes.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
