"""Clocks that give all candidates the same conditions."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch, and afterwards as many as before."""
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
    """Seconds of every call; the candidates take turns, so that a slow moment of the machine meets all.

    A turn is several calls of one candidate, so that each finds its caches as it left them. The first turn
    of each warms up and is not counted. On a busy machine ``time.process_time`` is the steadier clock for
    what runs on one thread.
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
