"""Checkpoints of a training run, by one process or many: complete, checked, and never replaced by less."""

import hashlib
import json
import os
import platform
import random
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from spingrad._files import flush_folder, write_atomically, write_new
from spingrad._state import PackedState, unpacked
from spingrad._version import __version__

__all__ = ["Checkpoint", "Stateful"]

T = TypeVar("T")

KEPT = 2  # generations
MANIFEST = "manifest.json"
LONGEST_MANIFEST = 2**26  # bytes
NAMED = 5  # differences that an error names
RANDOM = "random"
FORMAT = 1

GENERATION = re.compile(r"step-(\d{9,})")
OURS = re.compile(r"manifest\.json|\.spingrad-[0-9a-f]{16}\.tmp|[\w-]+\.[0-9a-f]{16}\.state")


@runtime_checkable
class Stateful(Protocol):
    """A model, an optimizer, a scheduler, a scaler, a data loader: gives its state and takes it back.

    Example:
        >>> class Epochs:
        ...     count = 0
        ...     def state_dict(self):
        ...         return {"count": self.count}
        ...     def load_state_dict(self, state_dict):
        ...         self.count = state_dict["count"]
        >>> isinstance(Epochs(), Stateful)
        True
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Entry(NamedTuple):
    """A file of a generation, as the manifest lists it."""

    file: str
    size: int
    sha256: str


class DamagedError(Exception):
    """A generation that cannot be loaded, and why."""


class Checkpoint:
    """The state of a run in a folder of its own, from which the run continues bit for bit.

    A checkpoint holds the state of every part, and the random state of torch (CPU and current accelerator),
    numpy and Python. The last two generations are kept. A generation counts once its manifest is there, with
    the SHA-256 of every file; one that is damaged or incomplete is reported by a warning, and the one before
    it is loaded. :meth:`load` changes nothing unless all of the state fits.

    In a process group all ranks call :meth:`save` and :meth:`load` together, on a folder that all of them can
    reach. A part that is the same on all ranks is written once; where ranks differ (random states, momentum
    under ``reduction="vote"``), each rank writes its own.

    Args:
        folder: Where the generations are kept, and nothing else: ``step-000000100/``, ``step-000000200/``.
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

    def __init__(self, folder: str | Path, group: dist.ProcessGroup | None = None, **parts: Stateful) -> None:
        if not parts:
            raise ValueError("a checkpoint needs something to keep: Checkpoint(folder, model=model, …)")
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise TypeError(
                    f"{name} has to have the methods state_dict() and load_state_dict(), got {type(part)}"
                )
        if RANDOM in parts:
            raise ValueError(f"a part cannot be called {RANDOM!r}: the random state is always kept, under it")
        self.folder, self.group, self.parts = Path(folder), group, parts
        self._unusable: set[str] = set()  # generations that load() has found damaged or incomplete

    def save(self, step: int) -> None:
        """Keep the state of now under ``step``, the number of steps that have been taken.

        The state that was saved under the same number before is replaced; older generations than the last two
        are removed when this one is safely on disk.
        """
        steps = self._together(lambda: step)
        if any(own != steps[0] for own in steps):
            raise ValueError(f"all ranks have to save the same step, got {steps}")
        packed = self._packed()
        shared = self._shared(packed)
        target = self.folder / f"step-{step:09}"
        self._together(lambda: self._first() and self._prepare(step, target))
        try:
            written = self._together(lambda: self._write(target, packed, shared))
            entries = {
                name: [Entry(*own[name]) for own in (written[:1] if name in shared else written)]
                for name in packed
            }
            self._together(lambda: self._first() and self._finish(step, target, entries))
        except Exception:  # such as a full disk: make room again
            if self._first():
                with suppress(OSError, DamagedError):
                    _tidy(target)
            raise

    def load(self) -> int:
        """Take back the newest intact state; the number of steps that it was saved under, 0 if there is none.

        Raises:
            ValueError: The state is that of another model, optimizer or set of parts. Nothing has changed.
            RuntimeError: There are checkpoints, and all are damaged. Nothing has changed.
        """
        found = self._together(lambda: [(p.name, (p / MANIFEST).exists()) for p in self._generations()])[0]
        damaged = []
        for name, complete in reversed(found):
            reason = (
                self._try(self.folder / name) if complete else "it is incomplete: it has no manifest.json"
            )
            if not reason:
                return int(name.removeprefix("step-"))
            self._unusable.add(name)
            damaged += [f"{name}: {reason}"] * complete
            if self._first():
                warnings.warn(f"checkpoint {self.folder / name} is left out: {reason}", stacklevel=2)
        if damaged:
            raise RuntimeError(
                f"no checkpoint in {self.folder} is intact ({'; '.join(damaged)}). Move the folder away to "
                "start anew"
            )
        return 0

    # Saving

    def _prepare(self, step: int, target: Path) -> bool:
        """Make the folder of a new generation, unless that could cost the user something."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step is the number of steps taken, at least 0, got {step!r}")
        newer = [p.name for p in self._generations() if _step(p) > step and p.name not in self._unusable]
        if newer:
            raise ValueError(
                f"{self.folder} already holds {newer[-1]}, which is newer than step {step}. Continue from it "
                "by load(), or give this run a folder of its own"
            )
        made = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(parents=True, exist_ok=True)
        for path in made:
            flush_folder(path.parent)
        return True

    def _packed(self) -> dict[str, PackedState]:
        def pack() -> None:
            for name, part in self.parts.items():
                packed[name] = PackedState(_described(part), name)
            packed[RANDOM] = PackedState(_random_state(), RANDOM)  # last: a state_dict() may draw numbers

        packed: dict[str, PackedState] = {}
        self._together(pack)
        names = self._together(lambda: sorted(packed))
        if any(own != names[0] for own in names):
            raise ValueError(f"all ranks have to save the same parts, got {names}")
        return packed

    def _shared(self, packed: dict[str, PackedState]) -> set[str]:
        """The parts that are the same on all ranks."""
        if self._size() == 1:
            return set(packed)
        digests = self._together(lambda: {name: state.digest() for name, state in packed.items()})
        return {name for name in packed if all(own[name] == digests[0][name] for own in digests)}

    def _write(self, target: Path, packed: dict[str, PackedState], shared: set[str]) -> dict[str, Entry]:
        """Write the files of this rank."""
        entries = {}
        for name, state in packed.items():
            if name not in shared or self._first():
                whose = "" if name in shared else f"-rank-{self._rank()}"
                file = f"{re.sub(r'[^A-Za-z0-9_-]', '-', name)}{whose}.{secrets.token_hex(8)}.state"
                entries[name] = _write_state(target / file, state)
        flush_folder(target)
        return entries

    def _finish(self, step: int, target: Path, entries: dict[str, list[Entry]]) -> bool:
        """Write the manifest, which makes the files a generation, and remove what is no longer needed."""
        versions = {"spingrad": __version__, "torch": torch.__version__, "numpy": np.__version__}
        content = {
            "format": FORMAT,
            "step": step,
            "ranks": self._size(),
            "versions": versions | {"python": platform.python_version()},
            "parts": {name: [entry._asdict() for entry in own] for name, own in entries.items()},
        }
        write_atomically(target / MANIFEST, _with_digest(content))
        flush_folder(self.folder)
        self._unusable.discard(target.name)
        _tidy(target)
        usable = [p for p in self._generations() if p.name not in self._unusable]
        kept = [p for p in usable if (p / MANIFEST).exists()][-KEPT:]
        for path in set(self._generations()) - set(kept):
            _remove_generation(path)
        return True

    # Loading

    def _try(self, path: Path) -> str:
        """Load a generation; if it is damaged on some rank, the reason."""
        states: dict[str, Any] = {}

        def read() -> str:
            try:
                states.update(self._read(path))
            except DamagedError as damage:
                return str(damage)
            return ""

        if reasons := [reason for reason in self._together(read) if reason]:
            return "; ".join(dict.fromkeys(reasons))
        self._together(lambda: self._check(path, states))
        before = self._packed()
        copies = {name: bytearray().join(packed.chunks()) for name, packed in before.items()}
        try:
            self._together(lambda: self._apply(states))
        except Exception:  # a part may refuse a state that looks right, on one rank
            for name, copy in copies.items():
                with suppress(Exception):  # the same part again: it has kept what it had
                    self._apply({name: unpacked(copy)})
            raise
        return ""

    def _read(self, path: Path) -> dict[str, Any]:
        """The states in a generation, each file checked before it is parsed."""
        manifest = _manifest(path)
        if manifest["step"] != _step(path):
            raise DamagedError(f"{MANIFEST} is that of step {manifest['step']}")
        if (ranks := manifest["ranks"]) != self._size() and self._first():
            warnings.warn(
                f"{path} was saved by {ranks} ranks and is loaded by {self._size()}: where ranks differed, "
                f"rank r takes the state of rank r modulo {ranks}, so the run does not continue bit for bit",
                stacklevel=2,
            )
        states = {}
        for name, entries in manifest["parts"].items():
            entry = Entry(**entries[self._rank() % len(entries)])
            states[name] = _read_state(path / entry.file, entry)
        return states

    def _check(self, path: Path, states: dict[str, Any]) -> None:
        """Raise if the states are not those of our parts."""
        expected = {*self.parts, RANDOM}
        if states.keys() != expected:
            raise ValueError(
                f"{path} holds {sorted(states.keys() - {RANDOM})}, expected {sorted(self.parts)}. Nothing "
                "was loaded"
            )
        for name, part in self.parts.items():
            found = _differences(states[name], _described(part))
            if found:
                more = f"; and {len(found) - NAMED} more differences" if len(found) > NAMED else ""
                raise ValueError(
                    f"{path} does not fit {name}: {'; '.join(found[:NAMED])}{more}. Nothing was loaded"
                )

    def _apply(self, states: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            if name in states:
                _load(part, states[name]["state"])
        if RANDOM in states:
            _set_random_state(states[RANDOM])  # last: a part may draw numbers

    # The folder and the ranks

    def _generations(self) -> list[Path]:
        """The generations, oldest first; an error if the folder holds anything else."""
        if not self.folder.exists():
            return []
        if not self.folder.is_dir():
            raise NotADirectoryError(f"a checkpoint needs a folder, and {self.folder} is a file")
        paths = list(self.folder.iterdir())
        for path in paths:
            if not GENERATION.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
                raise _foreign(self.folder, path)
            for file in path.iterdir():
                if not OURS.fullmatch(file.name) or file.is_symlink() or not file.is_file():
                    raise _foreign(self.folder, file)
        return sorted(paths, key=_step)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` returns on every rank, as JSON; if it raises on one rank, all ranks raise."""
        error: Exception | None = None
        try:
            own: dict[str, Any] = {"value": work()}
        except Exception as raised:
            error, own = raised, {"error": f"{type(raised).__name__}: {raised}"}
        told = [json.loads(text) for text in self._texts(json.dumps(own))] if self._size() > 1 else [own]
        if error is not None:
            raise error
        if failed := {rank: one["error"] for rank, one in enumerate(told) if "error" in one}:
            rank, message = failed.popitem()
            raise RuntimeError(f"rank {rank} could not take part in the checkpoint: {message}")
        return [one["value"] for one in told]

    def _texts(self, own: str) -> list[str]:
        from spingrad.distributed.handshake import texts
        from spingrad.distributed.wire import Wire

        nccl = dist.get_backend(self.group) == "nccl"
        return texts(Wire(self.group), own, torch.device("cuda" if nccl else "cpu"))

    def _rank(self) -> int:
        return dist.get_rank(self.group) if _in_group() else 0

    def _size(self) -> int:
        return dist.get_world_size(self.group) if _in_group() else 1

    def _first(self) -> bool:
        return self._rank() == 0


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _foreign(folder: Path, path: Path) -> FileExistsError:
    return FileExistsError(
        f"{folder} holds {path.relative_to(folder)}, which is no part of a checkpoint. Give checkpoints a "
        "folder of their own; nothing was changed"
    )


# Files


def _write_state(path: Path, state: PackedState) -> Entry:
    digest, size = hashlib.sha256(), 0

    def chunks() -> Iterator[bytes | memoryview]:
        nonlocal size
        for chunk in state.chunks():
            digest.update(chunk)
            size += len(chunk)
            yield chunk

    write_new(path, chunks())
    return Entry(path.name, size, digest.hexdigest())


def _read_state(path: Path, entry: Entry) -> Any:
    if not OURS.fullmatch(entry.file):
        raise DamagedError(f"{MANIFEST} names the file {entry.file!r}, which is no file of a checkpoint")
    data = _read_bytes(path, entry.size)
    if len(data) != entry.size:
        raise DamagedError(f"{path.name} has {len(data)} bytes, expected {entry.size}")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise DamagedError(f"{path.name} does not have the SHA-256 that {MANIFEST} names")
    try:
        return unpacked(data)
    except ValueError as error:
        raise DamagedError(f"{path.name} is {error}") from error


def _read_bytes(path: Path, at_most: int) -> bytearray:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > at_most:
                raise DamagedError(f"{path.name} has {size} bytes, expected at most {at_most}")
            data = bytearray(size)
            return data[: file.readinto(data)]
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error})") from error


def _manifest(path: Path) -> dict[str, Any]:
    data = _read_bytes(path / MANIFEST, LONGEST_MANIFEST)
    try:
        content: dict[str, Any] = json.loads(data)["content"]
        intact = _with_digest(content) == data
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{MANIFEST} is not as it was written")
    if content["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {content['format']}, and this version of spingrad reads format {FORMAT}. It "
            f"was saved with {content['versions']}"
        )
    return content


def _with_digest(content: dict[str, Any]) -> bytes:
    """The manifest as text, with a digest of itself."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({"content": content, "sha256": digest}, indent=1) + "\n").encode()


def _tidy(generation: Path) -> None:
    """Remove the files of a save that failed, or that a later save of the same step has replaced."""
    if not (generation / MANIFEST).exists():
        return _remove_generation(generation)
    parts = _manifest(generation)["parts"]
    listed = {MANIFEST, *(entry["file"] for entries in parts.values() for entry in entries)}
    for path in list(generation.iterdir()):
        if path.name not in listed:
            path.unlink()


def _remove_generation(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)  # first: without it the rest is no generation
    for file in list(path.iterdir()):
        file.unlink()
    path.rmdir()


# What a part has to have in common with its saved state


def _described(part: Stateful) -> dict[str, Any]:
    """The state of a part; for an optimizer also the names and shapes of the weights that it is for."""
    described: dict[str, Any] = {"state": part.state_dict()}
    if isinstance(part, Optimizer):
        described["weights"] = [_weights(group) for group in part.param_groups]
    if isinstance(part, nn.Module):
        described["model"] = True
    return described


def _weights(group: dict[str, Any]) -> list[str]:
    names = group.get("param_names", [""] * len(group["params"]))
    return [f"{name} {_form(weight)}".strip() for name, weight in zip(names, group["params"], strict=True)]


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _differences(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    if saved.keys() != own.keys():
        return [f"it was saved as {_kind(saved)} and is {_kind(own)}"]
    if "model" in own:
        return _unlike(
            *({name: _form(value) for name, value in one["state"].items()} for one in (saved, own))
        )
    return _unlike_groups(saved, own) if "weights" in own else []


def _kind(described: dict[str, Any]) -> str:
    if "model" in described:
        return "a model"
    return "an optimizer" if "weights" in described else "neither a model nor an optimizer"


def _unlike(saved: dict[str, str], own: dict[str, str]) -> list[str]:
    return [
        f"{name} is {saved.get(name, 'missing')} in the checkpoint and {own.get(name, 'missing')} here"
        for name in dict.fromkeys([*saved, *own])
        if saved.get(name) != own.get(name)
    ]


def _unlike_groups(saved: dict[str, Any], own: dict[str, Any]) -> list[str]:
    old, new = saved["state"]["param_groups"], own["state"]["param_groups"]
    if len(old) != len(new):
        return [f"it has {len(old)} parameter groups in the checkpoint and {len(new)} here"]
    found = _unlike(*(_numbered(one["weights"]) for one in (saved, own)))
    for i, (before, now) in enumerate(zip(old, new, strict=True)):
        # A scheduler or another version of torch may add settings. Another optimizer has others instead.
        if (gone := before.keys() - now.keys()) and (come := now.keys() - before.keys()):
            found.append(
                f"group {i} has the settings {sorted(gone)} in the checkpoint and {sorted(come)} here"
            )
    return found


def _numbered(groups: list[list[str]]) -> dict[str, str]:
    return {
        f"weight {j} of group {i}": text for i, group in enumerate(groups) for j, text in enumerate(group)
    }


def _load(part: Stateful, state: dict[str, Any]) -> None:
    if isinstance(part, Optimizer):
        _to_device_(state["param_groups"], part.param_groups)
    part.load_state_dict(state)


def _to_device_(groups: list[dict[str, Any]], like: list[dict[str, Any]]) -> None:
    """Move settings that are tensors, such as a learning rate, to where those of ``like`` are."""
    for group, own in zip(groups, like, strict=True):
        for name, value in group.items():
            if isinstance(value, Tensor) and isinstance(own.get(name), Tensor):
                group[name] = value.to(own[name].device)


# Random state


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = np.random.get_state()  # noqa: NPY002, that of the global generator
    if accelerator := _accelerator():
        state[accelerator] = torch.get_device_module(accelerator).get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    for accelerator in state.keys() - {"torch", "numpy", "python"}:
        if accelerator == _accelerator(in_use=False):
            torch.get_device_module(accelerator).set_rng_state(state[accelerator])
        else:
            warnings.warn(f"there is no {accelerator} here: its random state was not restored", stacklevel=2)


def _accelerator(in_use: bool = True) -> str | None:
    """The accelerator of this machine; with ``in_use``, only if this process has used it."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    kind = device.type
    started = getattr(torch.get_device_module(kind), "is_initialized", lambda: True)()
    return kind if started or not in_use else None
