"""What an experiment shows: text, tables and figures, as Markdown and as HTML."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spingrad_lab.report.statistics import Duel, judged, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; columns of numbers are right-aligned."""

    header: list[str]
    rows: list[list[str]]
    caption: str = ""
    folded: bool = False
    """Whether a page shows only the caption until the reader opens the table."""

    @property
    def numeric(self) -> list[bool]:
        """Whether each column, except the first, holds numbers: most of its cells that hold anything."""
        columns = [
            [row[place] for row in self.rows if row[place] != "–"] for place in range(len(self.header))
        ]
        shares = [sum(_is_number(cell) for cell in own) / max(1, len(own)) for own in columns]
        return [place > 0 and share > 0.5 for place, share in enumerate(shares)]

    def to_markdown(self) -> str:
        rule = ["---:" if right else "---" for right in self.numeric]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        text = "\n".join(lines)
        if self.folded:
            return f"<details><summary>{self.caption}</summary>\n\n{text}\n\n</details>"
        return (f"*{self.caption}*\n\n" if self.caption else "") + text


def table_of(duels: Sequence[Duel], rival: str, caption: str) -> Table:
    """A row for each comparison of a family; its p-values are corrected for all of them.

    Args:
        duels: The comparisons.
        rival: What the second methods are.
        caption: Of the table.
    """
    rows = [
        [duel.task, *duel.names, test.signed, test.corrected, shown(what, duel.margin)]
        for duel, test, what in judged(duels)
    ]
    return Table(["task", "method", rival, "difference", "p (Holm)", "the method is"], rows, caption)


def three_digits(value: float) -> str:
    """A number with three significant digits, without a power of ten where it is large.

    Example:
        >>> [three_digits(value) for value in (0.00372, 1.186, 1183.2)]
        ['0.00372', '1.19', '1,180']
    """
    return f"{value:.3g}" if abs(value) < 1_000 else f"{float(f'{value:.3g}'):,.0f}"


def _is_number(cell: str) -> bool:
    """Whether a cell begins with a number and is no sentence; 784-512-10 is none."""
    number = r"\*{0,2}[+−-]?\d[\d.,]*(e[+-]?\d+)?(?![\d.,-])"
    return len(cell) <= 40 and re.match(number, cell) is not None


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
