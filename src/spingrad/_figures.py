"""The style of figures: colours that colour-blind readers can tell apart, light grids, no frames."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

# The palette of Okabe and Ito.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#777777"
MARK = b"matplotlib.org"  # in every figure that matplotlib writes


def new(
    width: float = 6.4, height: float = 3.8, rows: int = 1, columns: int = 1
) -> tuple["Figure", "np.ndarray"]:
    """A figure and its axes as an array of ``rows`` by ``columns``."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ImportError('drawing needs matplotlib: pip install "spingrad[plot]"') from None

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    settings: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "legend.frameon": False,
    }
    mpl.rcParams.update(settings)  # stays set, so that legends and texts drawn later use it too
    canvas, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
    return canvas, axes
