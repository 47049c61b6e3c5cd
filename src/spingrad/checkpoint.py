"""Checkpoints of a training run, by one process or many: complete, checked, and never replaced by less."""

import hashlib
import json
import os
import platform
import random
import re
import secrets
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from spingrad._files import Claim, claim, flush_folder, read_records, to_records, write_atomically, write_new
from spingrad._numbers import check_whole
from spingrad._state import PackedState, read_state
from spingrad._version import __version__
from spingrad.distributed.handshake import names_of, texts
from spingrad.distributed.wire import Wire

__all__ = ["Checkpoint"]

T = TypeVar("T")

KEPT = 2  # generations
MANIFEST = "manifest.jsonl"
LONGEST_MANIFEST = 2**22  # bytes
NAMED = 5  # differences that an error names

GENERATION = re.compile(r"step-(\d{9,})\.(\d+)-([0-9a-f]{12})")  # step, which save of it, nonce
OURS = re.compile(r"manifest\.jsonl|\.spingrad-[0-9a-f]{16}\.tmp|rank-\d+\.safetensors")


class Checkpoint:
    """The state of a run in a folder of its own, from which the run continues bit for bit.

    A checkpoint holds the state of every part, and the random state of torch (CPU and current accelerator),
    numpy and Python. The last two generations are kept. A generation counts once its manifest is there, with
    the SHA-256 of every file; one that is damaged or incomplete is reported by a warning, and the one before
    it is loaded. :meth:`load` changes nothing unless all of the state fits. Two processes that save to the
    same folder by mistake cannot damage what the other has saved; a warning names the other one.

    In a process group all ranks make the checkpoint after the group, and call :meth:`save` and :meth:`load`
    together. Each writes a file of its own, without what is the same as on the first rank.

    Args:
        folder: Where the generations are kept; all ranks can reach it. Files of others are left alone.
        group: The process group; ``None`` is all ranks, or this process if there is no group.
        **parts: What to keep, by name: anything with ``state_dict()`` and ``load_state_dict()``.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = Checkpoint(folder, model=model, optimizer=optimizer)
        ...     first = checkpoint.load()  # 0: there is none yet
        ...     checkpoint.save(100)
        ...     checkpoint.load()
        100
    """

    def __init__(self, folder: str | Path, group: dist.ProcessGroup | None = None, **parts: Any) -> None:
        if not parts:
            raise ValueError("a checkpoint needs something to keep: Checkpoint(folder, model=model, …)")
        for name, part in parts.items():
            if name in ("", "outline", "random"):
                raise ValueError(f"a part needs a name, which is not outline or random, got {name!r}")
            if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
                raise TypeError(f"{name} needs the methods state_dict() and load_state_dict(): {type(part)}")
        self.folder = Path(folder)
        self._wire = Wire(group) if dist.is_available() and dist.is_initialized() else None
        self._rank, self._size = (self._wire.rank, self._wire.size) if self._wire else (0, 1)
        # In this order: what does not fit is refused first, and a part may draw random numbers.
        self._parts: dict[str, Any] = {"outline": _Outline(parts), **parts, "random": _RandomState()}
        self._damaged: dict[str, str] = {}  # generations that load() could not use, and why
        self._claim: Claim | None = None

    def save(self, step: int) -> None:
        """Keep the state of now under ``step``, the number of steps that have been taken.

        A state that was saved under the same number before is older than this one. Generations older than the
        two newest are removed when this one is safely on disk.
        """
        asked = self._gather([step, sorted(self._parts)])
        if any(own != asked[0] for own in asked):
            raise ValueError(f"all ranks have to save the same parts at the same step, got {asked}")
        packed = self._packed()
        target = self.folder / self._gather(self._together(lambda: self._prepare(step)))[0]
        try:
            files = self._gather(self._together(lambda: self._write(target, packed)))
            self._together(lambda: self._finish(step, target, files))
        except Exception:  # such as a full disk: make room again
            if self._rank == 0 and not (target / MANIFEST).exists():
                _remove(target)
            raise

    def load(self) -> int:
        """Take back the newest intact state; the number of steps that it was saved under, 0 if there is none.

        Raises:
            ValueError: The state is that of another model, optimizer or set of parts. Nothing has changed.
            RuntimeError: There are checkpoints, and all are damaged. Nothing has changed.
        """
        self._damaged = {}
        while names := self._gather([path.name for path in self._complete()])[0]:
            path = self.folder / names[-1]
            reason = self._try(path)
            if not reason:
                break
            if self._gather((path / MANIFEST).exists())[0]:  # or else it was removed: there are newer ones
                self._damaged[path.name] = reason
        loaded = _place(path) if names else (0, 0, "")
        if self._rank == 0:
            complete = self._complete()
            for path in self._generations():
                if path not in complete and _place(path) > loaded:
                    reason = self._damaged.get(path.name, f"it is incomplete: it has no {MANIFEST}")
                    warnings.warn(f"checkpoint {path} is left out: {reason}", stacklevel=2)
        if self._damaged and not names:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self._damaged.items())
            raise RuntimeError(
                f"no checkpoint in {self.folder} is intact ({reasons}). Move the folder away to start anew"
            )
        return loaded[0]

    # Saving

    def _packed(self) -> PackedState:
        """The states of all parts, but for those that are the same on the first rank."""
        states = self._together(self._states)
        if self._size > 1:
            own = self._together(
                lambda: {name: PackedState(state).digest() for name, state in states.items()}
            )
            first = self._gather(own)[0]
            if self._rank > 0:
                states = {name: state for name, state in states.items() if own[name] != first[name]}
        return self._together(lambda: PackedState(states))

    def _prepare(self, step: int) -> str:
        """Make the folder of a new generation, unless that could cost the user something; its name."""
        if self._rank > 0:
            return ""
        check_whole("step", step, 0)
        complete = self._complete()
        if complete and _place(complete[-1])[0] > step:
            raise ValueError(
                f"{self.folder} already holds {complete[-1].name}, which is newer than step {step}. Continue "
                "from it by load(), or give this run a folder of its own"
            )
        saves = [_place(path)[1] for path in self._generations() if _place(path)[0] == step]
        target = self.folder / f"step-{step:09}.{max(saves, default=0) + 1}-{secrets.token_hex(6)}"
        made = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(parents=True)
        for path in made:
            flush_folder(path.parent)
        self._claim = claim(self.folder)
        return target.name

    def _write(self, target: Path, packed: PackedState) -> tuple[int, str]:
        """Write the file of this rank; its size and SHA-256."""
        written = write_new(target / _file(self._rank), packed.chunks())
        flush_folder(target)
        return written

    def _finish(self, step: int, target: Path, files: list[tuple[int, str]]) -> None:
        """Write the manifest, which makes the files a generation, and remove what is no longer needed."""
        if self._rank > 0:
            return
        for rank, (size, _) in enumerate(files):
            if (found := (target / _file(rank)).stat().st_size) != size:
                raise OSError(f"{target / _file(rank)} has {found} bytes, {size} were written")
        versions = {"spingrad": __version__, "torch": torch.__version__, "numpy": np.__version__}
        versions["python"] = platform.python_version()
        write_atomically(target / MANIFEST, to_records({"step": step, "files": files, "versions": versions}))
        flush_folder(self.folder)
        complete = self._complete()
        for path in self._generations():
            # Names are never used again, so it does no harm if another process has saved since, or if this
            # one is stopped here for an hour: these were too old already.
            if len(complete) >= KEPT and _place(path) < _place(complete[-KEPT]):
                _remove(path)

    # Loading

    def _try(self, path: Path) -> str:
        """Load a generation; if it is damaged on some rank, the reason."""
        try:
            states, ranks = self._read(path)
            reason = ""
        except Exception as error:  # whatever a damaged file leads to
            reason = f"{type(error).__name__}: {error}"
        if reasons := [told for told in self._gather(reason) if told]:
            return "; ".join(dict.fromkeys(reasons))
        if ranks != self._size and self._rank == 0:
            warnings.warn(
                f"{path} was saved by {ranks} ranks and is loaded by {self._size}: where ranks differed, "
                f"rank r takes the state of rank r modulo {ranks}, so the run does not continue bit for bit",
                stacklevel=3,
            )
        before = self._together(lambda: PackedState(self._states()).copy())
        try:
            self._together(lambda: self._apply(states))
        except Exception:  # a part may refuse a state that looks right, on one rank
            for name, part in self._parts.items():
                with suppress(Exception):  # the same part again: it has kept what it had
                    _load(part, before[name])
            raise
        return ""

    def _read(self, path: Path) -> tuple[dict[str, Any], int]:
        """The states in a generation, each file checked before it is parsed; how many ranks have saved it."""
        records, step = read_records(path / MANIFEST, LONGEST_MANIFEST), _place(path)[0]
        if len(records) != 1 or records[0]["step"] != step:
            raise ValueError(f"{MANIFEST} is not that of step {step}")
        files, states = records[0]["files"], dict[str, Any]()
        for rank in dict.fromkeys([0, self._rank % len(files)]):
            with open(path / _file(rank), "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) != files[rank][0]:
                    raise ValueError(f"{_file(rank)} has {size} bytes, expected {files[rank][0]}")
                if hashlib.file_digest(file, "sha256").hexdigest() != files[rank][1]:
                    raise ValueError(f"{_file(rank)} does not have the SHA-256 that {MANIFEST} names")
                file.seek(0)
                states |= read_state(file)
        return states, len(files)

    def _states(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _apply(self, states: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            if name not in states:
                raise ValueError(f"the checkpoint has no state of {name!r}")
            _load(part, states[name])

    # The folder and the ranks

    def _generations(self) -> list[Path]:
        """The folders of all saves, complete or not, oldest first."""
        if not self.folder.exists():
            return []
        paths = [path for path in self.folder.iterdir() if GENERATION.fullmatch(path.name)]
        return sorted((path for path in paths if path.is_dir() and not path.is_symlink()), key=_place)

    def _complete(self) -> list[Path]:
        """The generations that have a manifest and were not found damaged, oldest first.

        Another process may save meanwhile, and remove what was listed before we look at it. A generation is
        removed only when there are two newer ones, so we look at the older first, and list them again.
        """
        while True:
            listed = self._generations()
            found = [path for path in listed if path.name not in self._damaged and (path / MANIFEST).exists()]
            if found or listed == self._generations():
                return found

    def _together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; if it raises on one rank, all ranks raise."""
        error, message = None, ""
        try:
            result = work()
        except Exception as raised:
            error, message = raised, f"{type(raised).__name__}: {raised}"
        told = self._gather(message)
        if error is not None:
            raise error
        for rank, message in enumerate(told):
            if message:
                raise RuntimeError(f"rank {rank} could not take part in the checkpoint: {message}")
        return result

    def _gather(self, own: Any) -> list[Any]:
        """What each rank brings, which JSON can hold."""
        if self._wire is None:
            return [own]
        device = torch.device("cuda" if dist.get_backend(self._wire.group) == "nccl" else "cpu")
        return [json.loads(text) for text in texts(self._wire, json.dumps(own), device)]


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _place(path: Path) -> tuple[int, int, str]:
    """What the generations are ordered by: step, which save of this step, nonce."""
    match = GENERATION.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2]), match[3]


def _remove(generation: Path) -> None:
    """Remove a generation, which another process may be doing too; files of others stay, in their folder."""
    with suppress(FileNotFoundError):
        (generation / MANIFEST).unlink(missing_ok=True)  # first: without it the rest is no generation
        for file in list(generation.iterdir()):
            if OURS.fullmatch(file.name):
                file.unlink(missing_ok=True)
    with suppress(OSError):
        generation.rmdir()


class _Outline:
    """Name, dtype and shape of every weight: a part that refuses what the other parts could not take."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, str]:
        outline: dict[str, str] = {}
        for name, part in self.parts.items():
            weights = {"itself": part}
            if isinstance(part, nn.Module):
                weights = part.state_dict()
            elif isinstance(part, Optimizer):
                groups = part.param_groups
                own = [weight for group in groups for weight in group["params"]]
                weights = dict(zip(names_of(groups), own, strict=True))
            outline |= {f"{name}: {place}": _form(weight) for place, weight in weights.items()}
        return outline

    def load_state_dict(self, saved: dict[str, str]) -> None:
        own = self.state_dict()
        unlike = [
            f"{name} is {saved.get(name, 'missing')} in the checkpoint and {own.get(name, 'missing')} here"
            for name in {**saved, **own}
            if saved.get(name) != own.get(name)
        ]
        if unlike:
            more = f"; and {len(unlike) - NAMED} more differences" if len(unlike) > NAMED else ""
            raise ValueError(f"{'; '.join(unlike[:NAMED])}{more}. Nothing was loaded")


class _RandomState:
    """The random state of torch, numpy and Python, as a part."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        state["numpy"] = np.random.get_state()  # noqa: NPY002, that of the global generator
        for kind, module in _accelerator().items():
            if getattr(module, "is_initialized", lambda: True)():
                state[kind] = module.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state.pop("torch"))
        np.random.set_state(state.pop("numpy"))  # noqa: NPY002
        random.setstate(state.pop("python"))
        for kind, own in state.items():
            if kind in _accelerator():
                _accelerator()[kind].set_rng_state(own)
            else:
                warnings.warn(f"there is no {kind} here: its random state was not restored", stacklevel=2)


def _accelerator() -> dict[str, Any]:
    """The accelerator of this machine and its module, if there is one."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {} if device is None else {device.type: torch.get_device_module(device)}


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return "there"


def _load(part: Any, state: dict[str, Any]) -> None:
    """``part.load_state_dict``; an optimizer keeps the devices of its settings, and none may be missing."""
    before = [dict(group) for group in part.param_groups] if isinstance(part, Optimizer) else []
    part.load_state_dict(state)
    for own, group in zip(before, part.param_groups if before else (), strict=True):
        if missing := own.keys() & part.defaults.keys() - group.keys():
            raise ValueError(
                f"the checkpoint has no {sorted(missing)}: it holds the state of another optimizer than "
                f"{type(part).__name__}. Nothing was loaded"
            )
        for name, value in own.items():  # such as lr
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name] = group[name].to(value.device)
