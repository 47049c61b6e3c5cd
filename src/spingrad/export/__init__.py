"""From a trained network to a device: packed bits, a popcount runtime, C, ONNX and QONNX."""

from spingrad.export.c import to_c
from spingrad.export.fold import pack
from spingrad.export.onnx import to_onnx
from spingrad.export.packed import PackedFileError, PackedModel
from spingrad.export.qonnx import to_qonnx

__all__ = ["PackedFileError", "PackedModel", "pack", "to_c", "to_onnx", "to_qonnx"]
