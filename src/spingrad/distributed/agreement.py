"""How often workers vote with the majority: one that sends inverted or random bits stands out."""

import warnings
from typing import Any

import torch
from torch import Tensor

LOOKS = 5  # times that a worker is examined before it can be a suspect
MEMORY = 20  # length of the running average, in examinations
SAMPLE = 2**14  # spins
INFORMED = 0.53  # agreement of the median worker below which nobody can be told from random bits


class Agreement:
    """How often each worker votes as the majority of the others do.

    Random bits agree half of the time, inverted ones less, and workers that train on the same data more. Each
    step examines one worker. Every worker compares that one's votes on the weights that it counts, and the
    median of these comparisons is used, so a minority of workers cannot discredit another.

    Args:
        size: Number of workers.
        report: Warn of suspects, once each.

    Attributes:
        agreement: Of every worker, a running average, shape ``(workers,)``.
        looks: How often each worker has been examined.
    """

    def __init__(self, size: int, report: bool) -> None:
        self.agreement = torch.zeros(size)
        self.looks = [0] * size
        self.report = report
        self._steps = 0
        self._reported: set[int] = set()

    @property
    def next(self) -> int:
        """The worker that the next step examines."""
        return self._steps % len(self.looks)

    def suspects(self) -> list[int]:
        """Workers whose votes are nearer to random bits than to those of the others.

        Empty before every worker has been examined five times, with fewer than three workers, and where even
        honest workers agree hardly more than random bits would, as with few rows each and a small target.
        """
        middle = float(self.agreement.median())
        if min(self.looks) < LOOKS or len(self.looks) < 3 or middle < INFORMED:
            return []
        bar = min((0.5 + middle) / 2, middle - 0.01)
        return [rank for rank, own in enumerate(self.agreement.tolist()) if own < bar]

    def update(self, seen: Tensor) -> None:
        """Take in every worker's comparison with the one that was examined, shape ``(workers,)``."""
        rank = self.next
        self._steps += 1
        now = seen.nanmedian().cpu()
        if now.isnan():  # it abstained, or its votes met no majority
            return
        self.looks[rank] += 1
        self.agreement[rank] += (now - self.agreement[rank]) * max(1 / self.looks[rank], 1 / MEMORY)
        for suspect in set(self.suspects()) - self._reported:
            self._reported.add(suspect)
            if self.report:
                warnings.warn(self._message(suspect), RuntimeWarning, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know to count the same votes."""
        known = {"agreement": self.agreement.clone(), "looks": [*self.looks]}
        return known | {"steps": self._steps, "reported": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; with another number of workers, begin anew."""
        if len(state["looks"]) == len(self.looks):
            self.agreement, self.looks = state["agreement"].clone(), [*state["looks"]]
            self._steps, self._reported = state["steps"], {*state["reported"]}

    def _message(self, suspect: int) -> str:
        own, middle = float(self.agreement[suspect]), float(self.agreement.median())
        return (
            f"worker {suspect} votes with the others on {own:.1%} of the weights, the median worker on "
            f"{middle:.1%}: its bits look inverted or random. They do not count; check its data and machine"
        )


def agreement(votes: Tensor, rank: int, start: int) -> Tensor:  # (workers, spins) -> ()
    """How often one worker's votes are those of the majority of the others, on some thousand spins.

    Example:
        >>> agreement(torch.tensor([[1, 1, -1], [1, 1, 1], [-1, 1, -1]]), rank=2, start=0)
        tensor(0.5000)
    """
    first = start % max(1, votes.shape[1] - SAMPLE)
    sample = votes[:, first : first + SAMPLE].int()
    together = sample[rank] * (sample.sum(0) - sample[rank]).sign()
    return (together > 0).sum() / (together != 0).sum()
