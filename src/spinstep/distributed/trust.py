"""Who votes with the others: a worker that sends inverted or random bits stands out."""

import warnings

import torch
from torch import Tensor

WINDOW = 50
SAMPLE = 2**14


class Trust:
    """How often each worker votes as the majority of the others do, over about the last 50 steps.

    Random bits agree half of the time, inverted ones less, and workers that train on the same data more.
    Each worker sees the votes that it counts, and the workers take the median of what they saw, so a
    minority cannot slander.

    Args:
        size: Number of workers.
        report: Warn of suspects, once each.

    Attributes:
        agreement: Of every worker, shape ``(workers,)``.
    """

    def __init__(self, size: int, report: bool) -> None:
        self.agreement = torch.full((size,), torch.nan)
        self.report = report
        self.steps = 0
        self._reported: set[int] = set()

    def suspects(self) -> list[int]:
        """Workers nearer to a coin than to the others; none before 50 steps or among fewer than three."""
        if self.steps < WINDOW or len(self.agreement) < 3:
            return []
        middle = float(self.agreement.median())
        bar = min((0.5 + middle) / 2, middle - 0.01)
        return [rank for rank, own in enumerate(self.agreement.tolist()) if own < bar]

    def update(self, seen: Tensor) -> None:
        """Take in what every worker saw of every other in a step, shape ``(workers, workers)``."""
        now = seen.nanmedian(0).values.cpu()
        known = ~now.isnan()  # not who abstained from everything
        rate = max(1 / (self.steps + 1), 1 / WINDOW)
        start = self.agreement.isnan() & known
        self.agreement[start] = now[start]
        self.agreement[known] += rate * (now - self.agreement)[known]
        self.steps += 1
        for rank in self.suspects():
            if self.report and rank not in self._reported:
                warnings.warn(
                    f"worker {rank} votes with the others on {self.agreement[rank]:.1%} of the weights, the "
                    f"median worker on {self.agreement.median():.1%}: its bits look inverted or random. It "
                    "is outvoted; check its data and its machine",
                    RuntimeWarning,
                    stacklevel=2,
                )
                self._reported.add(rank)


def agreement(votes: Tensor, start: int) -> Tensor:  # (workers, spins) -> (workers,)
    """How often each worker's votes are those of the majority of the others, on some thousand spins.

    Example:
        >>> agreement(torch.tensor([[1, 1], [1, 1], [-1, -1]]), start=0)
        tensor([nan, nan, 0.])
    """
    first = start % max(1, votes.shape[1] - SAMPLE)
    sample = votes[:, first : first + SAMPLE].int()
    others = (sample.sum(0) - sample).sign()
    compared = (others * sample != 0).sum(1)
    return (others * sample > 0).sum(1) / compared
