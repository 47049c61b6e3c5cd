"""From a trained network to a device: packed bits, a popcount runtime, C, ONNX and QONNX."""

from spingrad.export.fold import pack
from spingrad.export.packed import PackedFileError, PackedModel

__all__ = ["PackedFileError", "PackedModel", "pack"]
