"""``spingrad export``: converts a checkpoint to packed bits, C, ONNX or QONNX, or reports size and time."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from torch import nn

from spingrad._command import UsageError
from spingrad._files import check_own, write_atomically
from spingrad.export.fold import pack
from spingrad.export.packed import PackedModel
from spingrad.export.text import write_texts


def report(args: argparse.Namespace) -> list[str]:
    """The report of a checkpoint, or of 784-1024-1024-10 with random weights if none is given."""
    from spingrad.export.report import example, lines, measure

    model = example() if args.checkpoint is None else read(args)
    return lines(model, measure(model, args.batch), args.batch)


def convert(args: argparse.Namespace) -> list[str]:
    """Write the files; the lines say which and how large they are."""
    if args.checkpoint is None or args.to is None:
        raise UsageError("give a CHECKPOINT and --to packed, c, arduino, onnx or qonnx; or --report")
    model = read(args)
    out: Path = args.out or args.checkpoint.with_name(f"{args.checkpoint.stem}-{args.to}")
    if args.test_vectors and args.to != "c":
        raise UsageError(f"--test-vectors writes a test in C: use it with --to c, got --to {args.to}")
    if args.to in ("c", "arduino"):
        return _c(model, out, args)
    content = _content(model, args.to)
    path = out if out.suffix else out.with_name(out.name + {"packed": ".safetensors"}.get(args.to, ".onnx"))
    if args.out is None:
        check_own(path, b"spingrad")
    write_atomically(path, content)
    return [str(path), f"{model.num_weights:,} weights in {len(content):,} bytes"]


def _c(model: PackedModel, out: Path, args: argparse.Namespace) -> list[str]:
    """Write C files, with a test if asked, or an Arduino library."""
    from spingrad.export.arduino import to_arduino
    from spingrad.export.c import to_c
    from spingrad.export.vectors import examples, to_test

    name = out.name.replace("-", "_")
    if args.to == "arduino":
        library = to_arduino(model, name)
        source, folder, files = library.source, out.with_name(name), library.files
    else:
        source, folder = to_c(model, name), out.parent
        files = source.files
        if args.test_vectors:
            files[f"{name}_test.c"] = to_test(model, source, examples(model, args.test_vectors))
    if args.out is None:
        for file in files:
            check_own(folder / file, b"spingrad")
    paths = write_texts(folder, files)
    sizes = f"{source.constants:,} bytes of constants (flash) and {source.ram:,} bytes of buffers (RAM)"
    return [*map(str, paths), f"{model.num_weights:,} weights; {sizes}, code not included"]


def read(args: argparse.Namespace) -> PackedModel:
    """A packed file, or a torch checkpoint whose network ``--model`` builds."""
    inputs = {"scale": args.scale, "shift": args.shift}
    given = [f"--{name}" for name, value in inputs.items() if value is not None]
    if args.model is None:
        given += ["--spins"] * args.spins + ["--shape"] * (args.shape is not None)
        if given:
            raise UsageError(f"{given[0]} needs --model: a packed file knows its inputs already")
        return PackedModel.load(args.checkpoint)
    if args.spins and given:
        raise UsageError(f"{given[0]} is for pixels, and --spins says that inputs are -1 and +1")
    try:
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import load_file
    except ImportError:
        raise ImportError('reading checkpoints needs safetensors: pip install "spingrad[export]"') from None
    network = _network(args.model)
    try:
        with safe_open(args.checkpoint, "pt") as file:  # before any tensor is read
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        needed = {name: tuple(value.shape) for name, value in network.state_dict().items()}
        if other := sorted(name for name in {**needed, **shapes} if needed.get(name) != shapes.get(name)):
            raise RuntimeError(f"missing, superfluous or of another shape: {', '.join(other[:5])}")
        network.load_state_dict(load_file(args.checkpoint))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{args.checkpoint} does not hold the weights of {args.model}: {error}. Expected a file written "
            "by safetensors.torch.save_file(model.state_dict(), path)"
        ) from None
    if args.spins:
        return pack(network, args.shape, kind="spins")
    return pack(network, args.shape, **{name: own for name, own in inputs.items() if own is not None})


def _network(model: str) -> nn.Module:
    """What ``MODULE:FUNCTION`` returns."""
    module, _, function = model.partition(":")
    if not module or not function:
        raise UsageError(f"--model must be MODULE:FUNCTION, such as mynets:digits, got {model!r}")
    sys.path.insert(0, os.getcwd())  # as python -m does
    try:
        network = getattr(importlib.import_module(module), function)()
    except Exception as error:  # the user's own code
        raise ValueError(f"--model {model}: {type(error).__name__}: {error}; --debug shows where") from error
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(network, nn.Module):
        raise ValueError(
            f"--model {model}: expected it to return a torch.nn.Module, got {type(network).__name__}"
        )
    return network


def _content(model: PackedModel, to: str) -> bytes:
    if to == "packed":
        return model.to_bytes()
    if to == "onnx":
        from spingrad.export.onnx import to_onnx

        return bytes(to_onnx(model).SerializeToString())
    from spingrad.export.qonnx import to_qonnx

    return bytes(to_qonnx(model).SerializeToString())
