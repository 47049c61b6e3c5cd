"""The command line: ``spinstep paper`` for the experiments, ``qpu``, ``bench`` and ``export``."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spinstep.paper.lab import Lab
    from spinstep.paper.sections import Section
    from spinstep.qpu import Chip


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the ``spinstep`` command."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if args.command is _emulate:
        args.rest = rest  # the emulator reads its own options
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        args.command(args)
    except ImportError as error:
        sys.exit(f'{error}; all commands need: pip install "spinstep[paper,fast,graph,qpu,export,onnx]"')
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("spinstep", description="Binary neural networks, trained in spins.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_paper(commands)
    _add_qpu(commands)
    _add_bench(commands)
    _add_export(commands)
    return parser


def _add_paper(commands: Any) -> None:
    paper = commands.add_parser("paper", help="the experiments of the QP-SBGD paper, and more, on real data")
    actions = paper.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="every experiment, and where it is in the paper").set_defaults(
        command=_list
    )

    run = actions.add_parser(
        "run",
        help="run an experiment and print what it shows",
        description="Run an experiment and print what it shows. Finished runs are kept in OUT/NAME.jsonl: "
        "stop at any time, and the same command goes on from there.",
    )
    run.add_argument("names", nargs="+", metavar="NAME", help="as listed by `spinstep paper list`, or all")
    run.add_argument("--quick", action="store_true", help="small sizes, to see that it works: not a result")
    run.add_argument("--seeds", type=int, metavar="N", help="number of seeds of the final runs")
    run.add_argument("--solver", metavar="NAME", help="for QP-SBGD: block, exact, sign, annealing, tabu")
    run.add_argument("--out", type=Path, default=Path("paper-results"), metavar="DIR", help="%(default)s")
    run.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help='processes side by side, or "ray" for the CPUs of a Ray cluster; default: all cores',
    )
    run.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster; default: on this machine")
    run.add_argument("--tensorboard", action="store_true", help="also write the runs to DIR/tensorboard")
    run.set_defaults(command=_run)

    report = actions.add_parser("report", help="write report.html and report.md from the runs in a folder")
    report.add_argument("folder", type=Path, metavar="DIR")
    report.set_defaults(command=_report)


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


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="how fast spinstep is on this machine",
        description="Time steps, solvers, growth and memory on this machine, one thing at a time, and draw "
        "the plots. Finished runs are kept in OUT/NAME.jsonl: stop at any time, the same command goes on.",
    )
    bench.add_argument("names", nargs="*", metavar="NAME", help="step, solvers, growth, memory; default: all")
    bench.add_argument("--quick", action="store_true", help="small sizes, to see that it works: not a result")
    bench.add_argument("--repeats", type=_count, metavar="N", help="runs of each; default: 3")
    bench.add_argument("--out", type=Path, default=Path("bench-results"), metavar="DIR", help="%(default)s")
    bench.add_argument("--device", default="cpu", help="of the step benchmark: cpu, cuda, mps; %(default)s")
    bench.set_defaults(command=_bench)


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="a trained network as packed bits, C, ONNX or QONNX; or what packing buys",
        description="Convert a packed network (spinstep.export.pack(model).save(path)), or with --model the "
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


def _workers(text: str) -> int | str:
    if text != "ray" and not text.isdigit():
        raise argparse.ArgumentTypeError(f'expected a number or "ray", got {text!r}')
    return text if text == "ray" else int(text)


def _widths(text: str) -> list[int]:
    widths = [_count(part) for part in text.split("-")]
    if len(widths) < 2:
        raise argparse.ArgumentTypeError(f"expected the inputs and every layer's units, got {text!r}")
    return widths


def _list(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from spinstep.paper.experiments import EXPERIMENTS

    table = Table("name", "what", "where", box=None)
    for name, experiment in EXPERIMENTS.items():
        table.add_row(name, experiment.title, experiment.source)
    Console().print(table)


def _run(args: argparse.Namespace) -> None:
    from spinstep.paper.experiments import EXPERIMENTS
    from spinstep.paper.lab import Lab
    from spinstep.paper.methods import make_solver

    names = list(EXPERIMENTS) if "all" in args.names else args.names
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}; choose from: all, {', '.join(EXPERIMENTS)}")
    if args.solver is not None:
        make_solver(args.solver)  # an unknown name ends here and not after the first trial
    folder = args.out / "quick" if args.quick else args.out
    folder = folder / f"solver-{args.solver}" if args.solver else folder
    options = {"quick": args.quick, "seeds": args.seeds, "solver": args.solver, "workers": args.workers}
    if args.address and args.workers != "ray":
        raise ValueError("--address is that of a Ray cluster: add --workers ray")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers end with us
    for name in names:
        options |= {"address": args.address, "tensorboard": args.tensorboard}
        lab = Lab(name, EXPERIMENTS[name], folder, **options)
        _run_and_print(lab)


def _bench(args: argparse.Namespace) -> None:
    from spinstep.bench import BENCHMARKS, STEP
    from spinstep.paper.lab import Lab

    for name in args.names or BENCHMARKS:
        if name not in BENCHMARKS:
            raise ValueError(f"there is no benchmark {name!r}; choose from: {', '.join(BENCHMARKS)}")
    folder = args.out / "quick" if args.quick else args.out
    STEP.device = args.device
    for name in args.names or BENCHMARKS:  # one after the other, or they would time each other
        options = {"quick": args.quick, "seeds": args.repeats, "workers": 1}
        _run_and_print(Lab(name, BENCHMARKS[name], folder, **options))


def _export(args: argparse.Namespace) -> None:
    from spinstep.export import command

    if args.report:
        _print(command.report(args), [])
    else:
        print("\n".join(command.convert(args)))


def _run_and_print(lab: "Lab") -> None:
    from spinstep.paper.report import show

    try:
        lab.experiment.plan(lab)
    except KeyboardInterrupt:
        sys.exit(f"stopped; {len(lab.finished)} runs are kept in {lab.path}, the same command goes on")
    _print(*show(lab.folder, lab.name, lab.experiment))


def _print(section: "Section", drawings: list[Path]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)  # a file is as wide as its tables
    for note in section.notes:
        console.print(Markdown(note), "")
    for shown in section.tables:
        table = Table(title=shown.caption, title_justify="left", box=None)
        for place, name in enumerate(shown.header):
            table.add_column(name, no_wrap=place == 0, justify="right" if place else "left")
        for row in shown.rows:
            table.add_row(*row)
        console.print(table, "")
    for path in drawings:
        print(path)


def _report(args: argparse.Namespace) -> None:
    from spinstep.paper.report import write_report

    for path in write_report(args.folder):
        print(path)


def _plan(args: argparse.Namespace) -> None:
    from spinstep.qpu import plan

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
    from spinstep.qpu import Chip, QPUService, ServiceError

    if not args.connect:
        return Chip.ideal(args.topology)
    try:
        return QPUService().chip
    except (ServiceError, RuntimeError) as error:
        raise ConnectionError(f"there is no QPU to plan for: {error}") from None


def _inspect(args: argparse.Namespace) -> None:
    from spinstep.qpu import Journal
    from spinstep.qpu.inspect import answered_calls, picture, rows

    journal = Journal(args.journal, read_only=True)
    _print_rows(rows(journal))
    calls = answered_calls(journal)
    canvas = picture(calls, args.call or len(calls))
    out = args.out or args.journal.with_name(f"{args.journal.name}.svg")
    canvas.savefig(out, dpi=200)
    print(out)


def _emulate(args: argparse.Namespace) -> None:
    from spinstep.testing.sapi.__main__ import main as emulate

    emulate(args.rest)


def _print_rows(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
