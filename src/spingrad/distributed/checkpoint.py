"""The state of a run on disk, whole or not at all: what workers that are started again go on from."""

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch

from spingrad.distributed.optim import DistributedQPSBGD
from spingrad.distributed.wire import Wire


class Stateful(Protocol):
    """A model, an optimizer, a scheduler: what can give its state and take it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Checkpoint:
    """The last checkpoint of a run, in a folder that all workers can reach.

    ``torchrun --max-restarts=3`` starts all workers anew when one dies. They make the same objects, call
    :meth:`load`, and go on from the step that it returns. If the rows of a batch follow from the step, as
    from ``torch.randperm(n, generator=torch.Generator().manual_seed(epoch))``, and the solver repeats
    itself, the run ends with the weights of one that nothing happened to.

    The first worker writes what all have in common; of an optimizer that votes, every worker writes its own
    momentum. A checkpoint appears under its name when it is complete; before that, the last one stays.

    Args:
        folder: Where checkpoints are kept; one is.
        group: The process group; ``None`` is all workers.
        **parts: What to keep, by name: ``model=model, optimizer=optimizer``.

    Example:
        >>> checkpoint = Checkpoint("run", model=model, optimizer=optimizer)  # doctest: +SKIP
        >>> for step in range(checkpoint.load(), num_steps):  # doctest: +SKIP
        ...     train(step)
        ...     if (step + 1) % 100 == 0:
        ...         checkpoint.save(step + 1)
    """

    def __init__(self, folder: str | Path, group: Any = None, **parts: Stateful) -> None:
        self.folder, self.parts = Path(folder), parts
        self.wire = Wire(group)

    def save(self, step: int) -> None:
        """Keep the state before step ``step`` and forget the one before. Called by all workers together."""
        being_written = self.folder / f".step-{step:09}"
        if self.wire.rank == 0:
            shutil.rmtree(being_written, ignore_errors=True)
            being_written.mkdir(parents=True)
            _write(
                {k: v.state_dict() for k, v in self.parts.items() if not _own(v)}, being_written / "all.pt"
            )
        self.wire.barrier()
        if own := {k: v.state_dict() for k, v in self.parts.items() if _own(v)}:
            _write(own, being_written / f"{self.wire.rank}.pt")
        self.wire.barrier()
        if self.wire.rank == 0:
            before = self._complete()
            os.rename(being_written, self.folder / f"step-{step:09}")
            for path in before:
                shutil.rmtree(path)

    def load(self) -> int:
        """Take back the last complete state; the step to go on with, 0 if there is none."""
        last = max(self._complete(), default=None)
        if last is None:
            return 0
        state = _read(last / "all.pt")
        votes = len(list(last.glob("*.pt"))) - 1
        if votes:  # on more workers than before, some begin with another's momentum
            state |= _read(last / f"{self.wire.rank % votes}.pt")
        if state.keys() != self.parts.keys():
            raise ValueError(f"{last} holds {sorted(state)}, expected {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        return int(last.name.removeprefix("step-"))

    def _complete(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def _own(part: Stateful) -> bool:
    return isinstance(part, DistributedQPSBGD) and part.votes


def _write(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
