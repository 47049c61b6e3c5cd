"""The command ``spingrad``.

``qpu`` plans, inspects and emulates QPU runs, ``export`` converts networks, ``doctor`` checks an install.
"""

import argparse
import io
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spingrad._command import Parser, input_file, number, run, whole
from spingrad._version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spingrad.qpu import Chip


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the ``spingrad`` command."""
    run(_parser(), arguments)


def _parser() -> Parser:
    parser = Parser("spingrad", description="Binary neural networks on annealers and devices.")
    parser.add_argument("--version", action="version", version=f"spingrad {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_qpu(commands)
    _add_export(commands)
    _add_doctor(commands)
    return parser


def _add_qpu(commands: Any) -> None:
    qpu = commands.add_parser(
        "qpu",
        help="plan, inspect or emulate training on a D-Wave QPU",
        description='Training on a D-Wave QPU. Needs: pip install "spingrad[qpu]"',
    )
    actions = qpu.add_subparsers(required=True, metavar="ACTION")
    plan = actions.add_parser(
        "plan",
        help="calls and QPU time of a run, before anything is sent",
        description="Computes the calls and the QPU time of training a network on a QPU. Without --connect, "
        "an ideal chip is assumed and nothing is sent; with it, the configured service is asked for the "
        'working graph of its QPU, which is free. Needs: pip install "spingrad[qpu]"',
    )
    plan.add_argument("widths", type=_widths, metavar="WIDTHS", help="inputs and units per layer: 16-4-4-2")
    plan.add_argument("--batch-size", type=whole(), required=True, metavar="N", help="examples per batch")
    plan.add_argument(
        "--num-examples", type=whole(), required=True, metavar="N", help="examples in the training set"
    )
    for name, default, text in (
        ("--epochs", 1, "passes over the training set"),
        ("--num-reads", 100, "samples per unit"),
        ("--block-size", 32, "most spins of a unit that are on the chip at once"),
        ("--num-sweeps", 1, "passes over the blocks of a wide layer"),
    ):
        plan.add_argument(
            name, type=whole(), default=default, metavar="N", help=f"{text}; default: {default}"
        )
    plan.add_argument(
        "--annealing-time", type=number(positive=True), metavar="US", help="microseconds; default: the chip's"
    )
    plan.add_argument(
        "--topology", choices=["pegasus", "zephyr"], default="pegasus", help="of the ideal chip; %(default)s"
    )
    plan.add_argument("--connect", action="store_true", help="plan for the working graph of your QPU")
    plan.set_defaults(command=_plan)

    inspect = actions.add_parser(
        "inspect",
        help="cost and chain breaks of a run, from its journal, or of a step, from its samples",
        description="Prints the jobs, the cost and the chain breaks of a run, and how well the chip has "
        "sampled (P(opt), TTS99, distances, β_eff, errors that last), from its journal alone, or of "
        "a step that spingrad.qpu.save_samples has written. With --call or --out it also draws one call: the "
        "chains on the chip, the energies of the samples, the chain breaks. "
        'Needs: pip install "spingrad[qpu]", and to draw "spingrad[qpu,plot]"',
    )
    inspect.add_argument("journal", type=input_file, metavar="JOURNAL", help="or the samples of a step")
    inspect.add_argument(
        "--call", type=whole(), metavar="N", help="draw this call, from 1; default: the last"
    )
    inspect.add_argument("--out", type=Path, metavar="FILE", help="draw into this file; default: JOURNAL.svg")
    inspect.set_defaults(command=_inspect)

    _add_emulate(actions)


def _add_emulate(actions: Any) -> None:
    emulate = actions.add_parser(
        "emulate",
        help="run an emulated QPU on this machine until Ctrl-C",
        description="Runs an emulated QPU on 127.0.0.1 until Ctrl-C, which is its normal end (exit code 0), "
        "and prints the settings of D-Wave's client as shell commands. Needs: "
        'pip install "spingrad[qpu]"',
    )
    emulate.add_argument("--topology", choices=["pegasus", "zephyr"], default="pegasus", help="%(default)s")
    emulate.add_argument(
        "--size",
        type=whole(2, 20),
        metavar="N",
        help="grid parameter of the lattice; default: a full-size chip",
    )
    emulate.add_argument(
        "--broken", type=number(0, 1), default=0.01, metavar="SHARE", help="of the qubits; %(default)s"
    )
    emulate.add_argument("--seed", type=whole(0), default=0, metavar="N", help="%(default)s")
    for name, drawn in (("--noise", "drawn for each job"), ("--persistent-noise", "that the chip keeps")):
        emulate.add_argument(
            name,
            type=number(0),
            nargs=2,
            default=(0.0, 0.0),
            metavar=("SIGMA_H", "SIGMA_J"),
            help=f"standard deviations of the control errors on h and J, {drawn}",
        )
    emulate.add_argument(
        "--num-sweeps", type=whole(), default=25, metavar="N", help="of annealing per read; %(default)s"
    )
    emulate.add_argument(
        "--queue-seconds", type=number(0), default=0.0, metavar="S", help="that a job waits; %(default)s"
    )
    emulate.add_argument(
        "--quota-us", type=number(0), default=math.inf, metavar="US", help="most microseconds to charge"
    )
    emulate.add_argument(
        "--port", type=whole(0, 65535), default=0, metavar="N", help="on 127.0.0.1; 0 chooses a free one"
    )
    emulate.set_defaults(command=_emulate)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="convert a trained network to packed bits, C, Arduino, ONNX or QONNX, or report on it",
        description="Converts a packed network (spingrad.export.pack(model).save(path)), or with --model the "
        "safetensors checkpoint of a torch network. --report measures every layer against torch. Needs: "
        'pip install "spingrad[export]", and for --to onnx or qonnx "spingrad[export,onnx]"',
    )
    export.add_argument(
        "checkpoint", nargs="?", type=input_file, metavar="CHECKPOINT", help="a safetensors file"
    )
    export.add_argument(
        "--to", choices=["packed", "c", "arduino", "onnx", "qonnx"], help="the format to write"
    )
    export.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help="file to write; for C without .c and .h, for Arduino the folder of the library",
    )
    export.add_argument(
        "--test-vectors",
        type=whole(),
        metavar="N",
        help="with --to c: also write a program that checks N random inputs on the device",
    )
    export.add_argument(
        "--report", action="store_true", help="print size, operations and time of every layer"
    )
    export.add_argument(
        "--batch", type=whole(), default=256, metavar="N", help="batch size of the report; %(default)s"
    )
    export.add_argument("--model", metavar="MODULE:FUNCTION", help="builds the network of a torch checkpoint")
    export.add_argument("--shape", type=_shape, metavar="C,H,W", help="with --model: of one example")
    export.add_argument("--spins", action="store_true", help="with --model: inputs are -1 and +1")
    export.add_argument(
        "--scale", type=number(positive=True), help="with --model: factor on pixels in training; 1/255"
    )
    export.add_argument("--shift", type=number(), help="with --model: added to scale * pixel; 0")
    export.set_defaults(command=_export)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what works, and what to do about the rest",
        description="Prints versions, extras, threads, devices, folders and D-Wave's settings without the "
        "token, and tries a step, a solve with a certificate and a packed network. Nothing is sent. Each "
        "thing that is wrong gets one line of advice, and the exit code is then 1.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for bug reports")
    doctor.set_defaults(command=_doctor)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(whole()(part) for part in text.split(","))


def _widths(text: str) -> list[int]:
    widths = [whole()(part) for part in text.split("-")]
    if len(widths) < 2:
        raise argparse.ArgumentTypeError(
            f"expected the inputs and the units of every layer, such as 16-4-4-2, got {text!r}"
        )
    return widths


def _export(args: argparse.Namespace) -> None:
    from spingrad.export import command

    print("\n".join(command.report(args) if args.report else command.convert(args)))


def _doctor(args: argparse.Namespace) -> None:
    from spingrad import doctor

    doctor.run(as_json=args.json)


def _plan(args: argparse.Namespace) -> None:
    from spingrad.qpu import plan

    extra = {} if args.annealing_time is None else {"annealing_time": args.annealing_time}
    planned = plan(
        args.widths,
        args.batch_size,
        args.num_examples,
        args.epochs,
        chip=_chip(args),
        num_reads=args.num_reads,
        block_size=args.block_size,
        num_sweeps=args.num_sweeps,
        **extra,
    )
    _print_pairs(planned.summary())


def _chip(args: argparse.Namespace) -> "Chip":
    from spingrad.qpu import Chip, QPUService, ServiceError

    if not args.connect:
        return Chip.ideal(args.topology)
    try:
        return QPUService().chip
    except (ServiceError, RuntimeError) as error:
        raise ConnectionError(f"found no QPU to plan for: {error}") from None


def _inspect(args: argparse.Namespace) -> None:
    from spingrad.qpu import Journal, diagnostics, inspect, samples

    draw = args.call or args.out
    if samples.is_samples(args.journal):
        chip, step = samples.load_samples(args.journal)
        _print_pairs(samples.summary(chip, step))
        if draw:
            _write_picture(args, samples.picture(chip, step, args.call or len(step)))
        return
    journal = Journal(args.journal, read_only=True)
    _print_pairs(inspect.summary(journal) + diagnostics.diagnosis(journal))
    if draw:
        calls = inspect.answered_calls(journal)
        _write_picture(args, inspect.picture(calls, args.call or len(calls)))


def _write_picture(args: argparse.Namespace, canvas: "Figure") -> None:
    from spingrad._figures import MARK
    from spingrad._files import check_own, write_atomically

    out = args.out or args.journal.with_name(f"{args.journal.name}.svg")
    if args.out is None:
        check_own(out, MARK)
    drawing = io.BytesIO()
    canvas.savefig(drawing, format=out.suffix[1:] or None, dpi=200)
    write_atomically(out, drawing.getvalue())
    print(out)


def _emulate(args: argparse.Namespace) -> None:
    from spingrad.testing.sapi import Sapi

    names = ("topology", "size", "broken", "seed", "num_sweeps", "queue_seconds", "quota_us", "port")
    options = {name: getattr(args, name) for name in names}
    try:
        noise, kept = tuple(args.noise), tuple(args.persistent_noise)
        sapi = Sapi(**options, noise=noise, persistent_noise=kept)
    except OSError as error:
        raise OSError(f"--port {args.port} of 127.0.0.1: {error.strerror}; choose another one") from None
    received: list[int] = []
    with sapi:
        for ending in (signal.SIGINT, signal.SIGTERM):  # a shell makes background jobs ignore SIGINT
            signal.signal(ending, lambda number, frame: received.append(number))
        for name, value in sapi.settings.items():
            print(f"export {name}={value}", flush=True)
        while not received:
            time.sleep(0.1)


def _print_pairs(pairs: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in pairs)
    print("\n".join(f"{name:{width}}  {value}" for name, value in pairs))
