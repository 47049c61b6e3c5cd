"""The command line: ``spingrad-lab`` for the experiments, ``qpu``, ``bench`` and ``export``."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spingrad.qpu import Chip


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the ``spingrad`` command."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if args.command is _emulate:
        args.rest = rest  # the emulator reads its own options
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        args.command(args)
    except ImportError as error:
        sys.exit(f'{error}; all commands need: pip install "spingrad[paper,fast,graph,qpu,export,onnx]"')
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("spingrad", description="Binary neural networks, trained in spins.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_qpu(commands)
    _add_export(commands)
    return parser


def _add_qpu(commands: Any) -> None:
    qpu = commands.add_parser("qpu", help="training on a D-Wave QPU: planned, looked at, emulated")
    actions = qpu.add_subparsers(required=True, metavar="ACTION")
    plan = actions.add_parser(
        "plan",
        help="what a run will cost, before anything is sent",
        description="What training a network on a QPU will take. Without --connect an ideal chip is assumed "
        "and nothing leaves this machine; with it, the configured service is asked for its working graph.",
    )
    plan.add_argument("widths", type=_widths, metavar="WIDTHS", help="of the network, such as 16-4-4-2")
    plan.add_argument("--batch-size", type=_count, required=True, metavar="N", help="rows of a batch")
    plan.add_argument(
        "--num-samples", type=_count, required=True, metavar="N", help="rows of the training set"
    )
    plan.add_argument("--epochs", type=_count, default=1, metavar="N", help="passes over it; %(default)s")
    plan.add_argument(
        "--num-reads", type=_count, default=100, metavar="N", help="samples a unit; %(default)s"
    )
    plan.add_argument("--annealing-time", type=float, metavar="US", help="default: the chip's")
    plan.add_argument("--block-size", type=_count, default=32, metavar="N", help="spins at once; %(default)s")
    plan.add_argument("--num-sweeps", type=_count, default=1, metavar="N", help="over blocks; %(default)s")
    plan.add_argument("--topology", choices=["pegasus", "zephyr"], default="pegasus", help="%(default)s")
    plan.add_argument("--connect", action="store_true", help="plan on the working graph of your QPU")
    plan.set_defaults(command=_plan)

    inspect = actions.add_parser(
        "inspect",
        help="a run from its journal: the step on the chip, energies, chain breaks",
        description="Prints what a run cost and how its chains held, from its journal alone, and draws one "
        "of its calls: the chains on the chip, the energies of the samples, the chain breaks of the run.",
    )
    inspect.add_argument("journal", type=Path, metavar="JOURNAL")
    inspect.add_argument("--call", type=_count, metavar="N", help="which to draw, from 1; default: the last")
    inspect.add_argument("--out", type=Path, metavar="FILE", help="the picture; default: JOURNAL.svg")
    inspect.set_defaults(command=_inspect)

    actions.add_parser(
        "emulate",
        add_help=False,
        help="an emulated QPU on this machine, until Ctrl-C; --help for its options",
    ).set_defaults(command=_emulate)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="a trained network as packed bits, C, ONNX or QONNX; or what packing buys",
        description="Convert a packed network (spingrad.export.pack(model).save(path)), or with --model the "
        "safetensors checkpoint of a torch network. --report times every layer against torch.",
    )
    export.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help="a safetensors file")
    export.add_argument("--to", choices=["packed", "c", "onnx", "qonnx"], help="what to write")
    export.add_argument("--out", type=Path, metavar="PATH", help="where; of C the name without .c and .h")
    export.add_argument("--report", action="store_true", help="size, operations and time of every layer")
    export.add_argument("--batch", type=_count, default=256, metavar="N", help="of the report; %(default)s")
    export.add_argument("--model", metavar="MODULE:FUNCTION", help="builds the network of a torch checkpoint")
    export.add_argument("--shape", type=_shape, metavar="C,H,W", help="of one sample, if not one row")
    export.add_argument("--spins", action="store_true", help="its inputs are -1 and +1, and not pixels")
    export.add_argument("--scale", type=float, default=1 / 255, help="what torch saw of a pixel; 1/255")
    export.add_argument("--shift", type=float, default=0.0, help="added to scale * pixel; %(default)s")
    export.set_defaults(command=_export)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def _widths(text: str) -> list[int]:
    widths = [_count(part) for part in text.split("-")]
    if len(widths) < 2:
        raise argparse.ArgumentTypeError(f"expected the inputs and every layer's units, got {text!r}")
    return widths


def _export(args: argparse.Namespace) -> None:
    from spingrad.export import command

    print("\n".join(command.report(args) if args.report else command.convert(args)))


def _plan(args: argparse.Namespace) -> None:
    from spingrad.qpu import plan

    extra = {} if args.annealing_time is None else {"annealing_time": args.annealing_time}
    planned = plan(
        args.widths,
        args.batch_size,
        args.num_samples,
        args.epochs,
        chip=_chip(args),
        num_reads=args.num_reads,
        block_size=args.block_size,
        num_sweeps=args.num_sweeps,
        **extra,
    )
    _print_rows(planned.rows())


def _chip(args: argparse.Namespace) -> "Chip":
    from spingrad.qpu import Chip, QPUService, ServiceError

    if not args.connect:
        return Chip.ideal(args.topology)
    try:
        return QPUService().chip
    except (ServiceError, RuntimeError) as error:
        raise ConnectionError(f"there is no QPU to plan for: {error}") from None


def _inspect(args: argparse.Namespace) -> None:
    from spingrad.qpu import Journal
    from spingrad.qpu.inspect import answered_calls, picture, rows

    journal = Journal(args.journal, read_only=True)
    _print_rows(rows(journal))
    calls = answered_calls(journal)
    canvas = picture(calls, args.call or len(calls))
    out = args.out or args.journal.with_name(f"{args.journal.name}.svg")
    canvas.savefig(out, dpi=200)
    print(out)


def _emulate(args: argparse.Namespace) -> None:
    from spingrad.testing.sapi.__main__ import main as emulate

    emulate(args.rest)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:{width}}  {value}" for name, value in rows))
