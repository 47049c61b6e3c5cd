"""Texts of programs: templates, lists of numbers, files."""

from collections.abc import Mapping
from pathlib import Path

from spingrad._files import write_atomically
from spingrad.export.stages import Array


def listed(values: Array, wide: int = 20) -> str:
    """Numbers as the lines of an array in C."""
    texts = [str(int(value)) for value in values.ravel()]
    return ",\n    ".join(", ".join(texts[i : i + wide]) for i in range(0, len(texts), wide))


def write_texts(folder: str | Path, files: Mapping[str, str]) -> list[Path]:
    """Write each text to its path inside a folder, which is made if there is none."""
    paths = [Path(folder) / name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        write_atomically(path, text.encode())
    return paths
