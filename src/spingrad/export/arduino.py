"""A packed network as an Arduino library: the C files, and a sketch that classifies one example."""

from dataclasses import dataclass
from pathlib import Path

from spingrad._version import __version__
from spingrad.export.c import INPUT_TYPES, CSource, to_c
from spingrad.export.library import filled, named, source
from spingrad.export.packed import PackedModel
from spingrad.export.stages import Array
from spingrad.export.text import listed, write_texts
from spingrad.export.vectors import examples

_PROPERTIES = """\
name=@name@
version=@version@
author=spingrad
maintainer=spingrad
sentence=A neural network with weights of one bit.
paragraph=@title@
category=Data Processing
url=https://pypi.org/project/spingrad/
architectures=*
includes=@name@.h
"""


@dataclass(frozen=True)
class ArduinoLibrary:
    """An Arduino library.

    Args:
        source: The network in C.
        files: Content by path inside the library's folder.

    Example:
        >>> from torch import nn
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> list(to_arduino(packed, "gestures").files)
        ['library.properties', 'src/gestures.h', 'src/gestures.c', 'examples/gestures/gestures.ino']
    """

    source: CSource
    files: dict[str, str]

    def save(self, folder: str | Path) -> list[Path]:
        """Write the library into a folder; copy it to the ``libraries`` of your sketchbook, or zip it."""
        return write_texts(folder, self.files)


def to_arduino(model: PackedModel, name: str = "network", example: Array | None = None) -> ArduinoLibrary:
    """A packed network as an Arduino library with an example sketch.

    Args:
        model: The network.
        name: Name of the library, and prefix of its functions.
        example: One input for the sketch; a random one if none is given.

    Example:
        >>> from torch import nn
        >>> from spingrad import BinaryLinear, Sign
        >>> from spingrad.export import pack
        >>> packed = pack(nn.Sequential(BinaryLinear(16, 8), Sign(), BinaryLinear(8, 3)))
        >>> library = to_arduino(packed, "gestures")  # library.save(folder) writes it
        >>> library.source.constants, library.source.ram  # bytes
        (44, 36)
    """
    network = to_c(model, name)
    x = examples(model, 1) if example is None else example.reshape(1, -1)
    fields = {
        "name": name,
        "version": __version__,
        "title": network.source.splitlines()[0].strip("/* "),
        "kind": INPUT_TYPES[model.kind],
        "example": listed(x),
        "expected": int(model.classes(x)[0]),
    }
    files = {
        "library.properties": filled(_PROPERTIES, fields),
        **{f"src/{file}": text for file, text in network.files.items()},
        f"examples/{name}/{name}.ino": named(filled(source("sketch.ino"), fields), name),
    }
    return ArduinoLibrary(network, files)
