"""Measures times of several candidates under the same conditions."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_turns(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    turn: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every call; the candidates take turns, so that a slow phase of the machine affects all.

    A turn is several calls of one candidate, so that it finds the caches as it left them. The first turn of
    each candidate is a warm-up and not counted. On a busy machine, ``time.process_time`` is the more reliable
    clock for code that runs on one thread.

    Args:
        candidates: The functions to measure, by name.
        repeats: Number of calls to measure per candidate, rounded up to whole turns.
        turn: Calls per turn.
        clock: Returns the time in seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(1 + -(-repeats // turn)):
        for name, call in candidates.items():
            for _ in range(turn):
                begin = clock()
                call()
                if round_:
                    seconds[name].append(clock() - begin)
    return seconds
