"""Steps of another checkout of this project, timed in turns with our own."""

import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from spingrad._files import write_atomically
from spingrad_lab.bench import other_version

METHODS = ("SignSGD", "QP-SBGD")
Turn = Callable[[int], list[float]]
"""A function that takes a number of steps and returns the seconds of each."""


def package_in(checkout: Path) -> str:
    """The package of a checkout: the only one in its src, whatever it was called then."""
    found = [path.parent.name for path in (checkout / "src").glob("*/__init__.py")]
    if len(found) != 1:
        raise ValueError(f"{checkout} is no checkout of this project: expected one package, got {found}")
    return found[0]


def revision(checkout: Path) -> str:
    """The commit of a checkout, with a mark of its own for each state of uncommitted changes."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(checkout), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        changes = git("diff", "HEAD", "--", "src")
        changed = f"+{hashlib.sha256(changes.encode()).hexdigest()[:6]}" if changes else ""
        return git("rev-parse", "--short=7", "HEAD").strip() + changed
    except (OSError, subprocess.CalledProcessError):
        return checkout.resolve().name


@contextmanager
def steps_of(checkout: Path, setting: dict[str, Any]) -> Iterator[dict[str, Turn]]:
    """Turns of each method, taken by the version in a checkout.

    Args:
        checkout: A folder with the other version's ``src``.
        setting: The network's name and weights, batches, threads and device.
    """
    source, name = checkout / "src", package_in(checkout)
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "setting.pt")
        content = io.BytesIO()
        torch.save(setting, content)
        write_atomically(given, content.getvalue())
        # -P: the folder of the script, with its modules, is not on the path.
        command = [sys.executable, "-P", other_version.__file__, name, str(source), str(given)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            sent, received = process.stdin, process.stdout

            def answer() -> Any:
                line = received.readline()
                if not line:
                    raise RuntimeError(f"the version in {checkout} has stopped; its error is above")
                return json.loads(line)

            def turn(method: str, count: int) -> list[float]:
                print(json.dumps([method, count]), file=sent, flush=True)
                seconds: list[float] = answer()
                return seconds

            try:
                answer()  # it is ready
                yield {method: lambda count, method=method: turn(method, count) for method in METHODS}  # type: ignore[misc]
            finally:
                sent.close()  # at which it ends
