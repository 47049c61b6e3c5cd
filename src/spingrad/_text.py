"""Tables as plain text."""

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """A table as lines of text, with the first column aligned to the left and the others to the right.

    Example:
        >>> print(*aligned([["layer", "kB"], ["first", "12.5"]]), sep=chr(10))
        layer    kB
        first  12.5
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))])
        for first, *others in table
    ]
