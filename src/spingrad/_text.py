"""Tables as plain text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines of text, the first column flush left and the others flush right.

    Example:
        >>> print(*aligned([["layer", "kB"], ["first", "12.5"]]), sep=chr(10))
        layer    kB
        first  12.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
