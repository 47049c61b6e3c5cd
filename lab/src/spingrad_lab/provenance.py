"""Where a line of results comes from: code, settings, versions of packages, and revisions of methods."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import spingrad

_PHOTOGRAPHS, _SPEECH = ("CIFAR-10, VGG", "CIFAR-10, residual"), ("spoken digits, 1-d convolutions",)
_STRENGTHS = ("0.0625", "0.125", "0.25", "1", "100")
REVISIONS: dict[tuple[str, ...], int] = {
    **{(name,): 2 for name in ("Muon", "sign of Muon")},  # in single precision, no longer in bfloat16
    # A sample of the patches of all images, where it was one of the left edges of the first images.
    **{("QP-SBGD", task): 2 for task in _PHOTOGRAPHS + _SPEECH},
    **{("QP-SBGD, BatchNorm", task): 2 for task in _PHOTOGRAPHS + _SPEECH},
    **{("QP-SBGD, Gain", task): 2 for task in _PHOTOGRAPHS + _SPEECH},
    **{("QP-SBGD, whitening 0.125, BatchNorm", task): 2 for task in _PHOTOGRAPHS},
    # Its targets depend on the sample too. (Not run again: the other network for photographs.)
    ("sign of FOOF, BatchNorm", "CIFAR-10, residual"): 2,
    **{("sign of FOOF", task): 2 for task in _SPEECH},
    **{(f"whitened, {strength}", "CIFAR-10, residual"): 2 for strength in _STRENGTHS},
    **{(name, "CIFAR-10, residual"): 2 for name in ("momentum 0.95", "momentum 0.98", "512 rows")},
    **{("QP-SBGD", "block", network): 2 for network in ("convolutional", "convolutional, BatchNorm")},
    **{("QP-SBGD", "convolutional", activation): 2 for activation in ("hardtanh", "sign")},
    **{("QP-SBGD, gains", "convolutional", activation): 2 for activation in ("hardtanh", "sign")},
}
"""The revision of what has changed: of jobs with a name, or with several names together.

Names are those of methods, candidates, solvers, tasks and so on, as jobs have them. What is not listed has
revision 1. Raise the number in the commit that changes what a name means or what it computes: lines of an
earlier revision are then neither shown nor taken for finished runs. A change of a whole experiment raises its
attribute ``revision``.
"""


def revision(own: int, job: Mapping[str, Any]) -> int:
    """The present revision of a job: a number that grows with each change of anything that the job names.

    Args:
        own: The revision of the experiment.
        job: What defines the run.
    """
    names = {value for value in job.values() if isinstance(value, str)}
    return own + sum(number - 1 for together, number in REVISIONS.items() if names.issuperset(together))


@cache
def commit() -> str:
    """The commit of the checkout that this process runs; the version of an installed package.

    A "+" follows if files of spingrad or of the lab differ from the commit.
    """
    library, lab = Path(spingrad.__file__), Path(__file__)
    try:
        root = Path(_git(lab.parent, "rev-parse", "--show-toplevel").strip())
        # Fails for packages that are installed in the folder of another project.
        _git(root, "ls-files", "--error-unmatch", str(library), str(lab))
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src", "lab/src")
        return _git(root, "rev-parse", "--short=10", "HEAD").strip() + "+" * bool(changed.strip())
    except (OSError, subprocess.CalledProcessError):
        return spingrad.__version__


def _git(folder: Path, *arguments: str) -> str:
    # Without its locks, a look at a checkout never gets in the way of someone who works there.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@cache
def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on most."""
    others = {name: version(name) for name in ("torch", "numpy")}
    return {"spingrad": spingrad.__version__, **others, "python": platform.python_version()}


TEXTS = ("title", "source", "notes", "paper")


def fingerprint(experiment: object) -> str:
    """A short hash of an experiment's settings: public attributes, its own and its tasks', without texts."""
    text = json.dumps(_settings(experiment, TEXTS), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _settings(owner: object, without: tuple[str, ...] = ()) -> dict[str, Any]:
    names = (name for name in dir(owner) if not name.startswith("_") and name not in without)
    values = {name: getattr(owner, name) for name in names}
    return {k: _plain(v) for k, v in values.items() if isinstance(v, type) or not callable(v)}


def _plain(value: object) -> Any:
    """A value as JSON can hold it; of what JSON cannot hold, the name or the name of its type."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    if isinstance(value, type):
        return [value.__qualname__, _settings(value) if value.__module__.startswith("spingrad") else {}]
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return getattr(value, "__qualname__", type(value).__qualname__)
