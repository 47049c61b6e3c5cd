"""Whole numbers as arguments: Python's own, numpy's, or a tensor of one."""

from operator import index

LARGEST = 2**63 - 1  # of torch's integers


def is_whole(value: object, low: int, high: int = LARGEST) -> bool:
    """Whether a value is a whole number in a range that includes its ends.

    Example:
        >>> is_whole(3, 1), is_whole(0, 1), is_whole(3.0, 1), is_whole(True, 1)
        (True, False, False, False)
    """
    try:
        return not isinstance(value, bool) and low <= index(value) <= high  # type: ignore[arg-type]
    except TypeError:
        return False


def check_whole(name: str, value: object, low: int, high: int = LARGEST) -> None:
    """Raise a ``ValueError`` if an argument is not a whole number in a range that includes its ends."""
    if not is_whole(value, low, high):
        ends = f"from {low} to {high}" if high < LARGEST else f"of at least {low}, below 2**63"
        raise ValueError(f"{name} is a whole number {ends}, got {value!r}")
