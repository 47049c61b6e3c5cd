"""The command line: ``spinstep paper list``, ``run NAME`` and ``report FOLDER``."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spinstep.paper.sections import Section


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the ``spinstep`` command."""
    args = _parser().parse_args(arguments)
    try:
        args.command(args)
    except ImportError as error:
        sys.exit(f'{error}; the experiments need: pip install "spinstep[paper,fast,graph,qpu]"')
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("spinstep", description="Binary neural networks, trained in spins.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
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
    run.add_argument("--workers", type=int, metavar="N", help="processes side by side; default: all cores")
    run.add_argument("--tensorboard", action="store_true", help="also write the runs to DIR/tensorboard")
    run.set_defaults(command=_run)

    report = actions.add_parser("report", help="write report.html and report.md from the runs in a folder")
    report.add_argument("folder", type=Path, metavar="DIR")
    report.set_defaults(command=_report)
    return parser


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
    from spinstep.paper.report import show

    names = list(EXPERIMENTS) if "all" in args.names else args.names
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"there is no experiment {name!r}; choose from: all, {', '.join(EXPERIMENTS)}")
    if args.solver is not None:
        make_solver(args.solver)  # an unknown name ends here and not after the first trial
    folder = args.out / "quick" if args.quick else args.out
    folder = folder / f"solver-{args.solver}" if args.solver else folder
    options = {"quick": args.quick, "seeds": args.seeds, "solver": args.solver, "workers": args.workers}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers end with us
    for name in names:
        lab = Lab(name, EXPERIMENTS[name], folder, **options, tensorboard=args.tensorboard)
        try:
            EXPERIMENTS[name].plan(lab)
        except KeyboardInterrupt:
            sys.exit(f"stopped; {len(lab.finished)} runs are kept in {lab.path}, the same command goes on")
        _print(*show(folder, name))


def _print(section: "Section", drawings: list[Path]) -> None:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.table import Table

    console = Console()
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
