"""What an experiment shows: text, tables and figures, as Markdown and as HTML."""

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column is left-aligned."""

    header: list[str]
    rows: list[list[str]]
    caption: str = ""

    def to_markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.header) - 1)
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        return (f"*{self.caption}*\n\n" if self.caption else "") + "\n".join(lines)


@dataclass(frozen=True)
class Figure:
    """A drawing as SVG text."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Section:
    """The part of a report that shows one experiment."""

    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def to_svg(canvas: "Canvas") -> str:
    """A matplotlib figure as SVG, the same text whenever it is drawn again."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "spingrad", "svg.fonttype": "none"}):
        canvas.savefig(text, format="svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(canvas)
    svg = text.getvalue()
    return "\n".join(line.rstrip() for line in svg[svg.index("<svg") :].splitlines()) + "\n"
