"""From a trained network to a device: packed bits, a popcount runtime, C, ONNX and QONNX."""

from spinstep.export.fold import pack
from spinstep.export.packed import PackedFileError, PackedModel

__all__ = ["PackedFileError", "PackedModel", "pack"]
