"""The command ``spingrad-lab``: list and run experiments, run benchmarks, write the report and the docs."""

import argparse
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from spingrad._command import Parser, UsageError, folder, run, whole

if TYPE_CHECKING:
    from spingrad_lab.report.sections import Section
    from spingrad_lab.runs import Lab

RESULTS, PROBLEMS = Path("lab-results"), Path("lab/problems")


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the ``spingrad-lab`` command."""
    run(_parser(), arguments)


def _parser() -> Parser:
    parser = Parser("spingrad-lab", description="Experiments and benchmarks of spingrad.")
    versions = " ".join(f"{name} {version(name)}" for name in ("spingrad-lab", "spingrad"))
    parser.add_argument("--version", action="version", version=versions)
    actions = parser.add_subparsers(required=True, metavar="COMMAND")
    actions.add_parser("list", help="every experiment and benchmark").set_defaults(command=_list)

    runs = actions.add_parser(
        "run",
        help="run an experiment and print what it shows",
        description="Run an experiment and print what it shows. Finished runs are kept in OUT/NAME.jsonl: "
        "stop at any time, and the same command goes on from there.",
    )
    runs.add_argument("names", nargs="+", metavar="NAME", help="as listed by `spingrad-lab list`, or all")
    runs.add_argument("--quick", action="store_true", help="small sizes, to see that it works: not a result")
    runs.add_argument("--seeds", type=whole(), metavar="N", help="number of seeds of the final runs")
    runs.add_argument("--solver", metavar="NAME", help="for QP-SBGD: block, exact, sign, annealing, tabu")
    runs.add_argument("--out", type=folder, default=RESULTS, metavar="DIR", help="%(default)s")
    runs.add_argument(
        "--workers",
        type=_workers,
        metavar="N",
        help='processes side by side, or "ray" for the CPUs of a Ray cluster; default: all cores',
    )
    runs.add_argument("--address", metavar="HOST:PORT", help="of a Ray cluster; default: on this machine")
    runs.add_argument("--tensorboard", action="store_true", help="also write the runs to DIR/tensorboard")
    runs.set_defaults(command=_run)

    report = actions.add_parser(
        "report",
        help="write report.html and report.md from the runs in a folder",
        description="Write report.html, report.md and the figures from the runs in a folder; nothing is run "
        "again. Where there are only quick runs, the report is of these and says so.",
    )
    report.add_argument("folder", nargs="?", type=folder, default=RESULTS, metavar="DIR", help="%(default)s")
    report.set_defaults(command=_report)

    docs = actions.add_parser(
        "docs",
        help="print the measured numbers in README and docs again",
        description="Print every table of README and docs that stands between <!-- lab: NAME --> and "
        "<!-- end --> again, from the runs in lab/results of a checkout; nothing is run.",
    )
    docs.add_argument("root", nargs="?", type=folder, default=Path("."), metavar="DIR", help="the checkout")
    docs.set_defaults(command=_docs)

    problems = actions.add_parser(
        "problems",
        help="write or verify the public set of projection problems",
        description="Verify every file of the public set: its checksum, that its spins have the energies "
        "that it names, and that no energy is below the lower bound. With --write, train networks on MNIST "
        "and write the set first.",
    )
    problems.add_argument(
        "folder", nargs="?", type=folder, default=PROBLEMS, metavar="DIR", help="%(default)s"
    )
    problems.add_argument("--write", action="store_true", help="write the set first; some minutes")
    problems.add_argument(
        "--prove", action="store_true", help="prove what is said to be proved; some minutes"
    )
    problems.add_argument("--quick", action="store_true", help="with --write, two small layers")
    problems.set_defaults(command=_problems)

    bench = actions.add_parser(
        "bench",
        help="how fast spingrad is on this machine",
        description="Run benchmarks on this machine, one thing at a time, and draw the plots. Finished runs "
        "are kept in OUT/bench/NAME.jsonl: stop at any time, the same command goes on.",
    )
    bench.add_argument("names", nargs="+", metavar="NAME", help="as listed by `spingrad-lab list`, or all")
    bench.add_argument("--quick", action="store_true", help="small sizes, to see that it works: not a result")
    bench.add_argument("--repeats", type=whole(), metavar="N", help="runs of each; default: as in the report")
    bench.add_argument("--out", type=folder, default=RESULTS, metavar="DIR", help="%(default)s")
    bench.add_argument("--device", type=_device, default="cpu", help="for step: cpu, cuda, mps; %(default)s")
    bench.add_argument(
        "--beside",
        type=folder,
        metavar="DIR",
        help="for step: a checkout of another commit of this project, timed in the same run",
    )
    bench.set_defaults(command=_bench)
    return parser


def _workers(text: str) -> int | str:
    if text == "ray":
        return text
    try:
        return whole(0, 1024)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'{error}; or "ray"') from None


def _device(text: str) -> str:
    if not re.fullmatch(r"cpu|mps|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda, cuda:1 or mps, got {text!r}")
    return text


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {device} cannot be used on this machine: {error}") from None


def _list(args: argparse.Namespace) -> None:
    from spingrad_lab.experiments import BENCHMARKS, EXPERIMENTS

    console = Console()
    for action, known in (("run", EXPERIMENTS), ("bench", BENCHMARKS)):
        table = Table(
            "name", "what", "where", box=None, title=f"spingrad-lab {action} NAME", title_justify="left"
        )
        for name, experiment in known.items():
            table.add_row(name, experiment.title, experiment.source)
        console.print(table, "")


def _run(args: argparse.Namespace) -> None:
    from spingrad_lab.experiments import EXPERIMENTS
    from spingrad_lab.methods import make_solver
    from spingrad_lab.runs import Lab

    names = _known(args.names, "experiment", EXPERIMENTS)
    if args.solver is not None:
        try:
            make_solver(args.solver)  # an unknown name ends here and not after the first trial
        except ValueError as error:
            raise UsageError(f"--{error}") from None
    folder = args.out / "quick" if args.quick else args.out
    folder = folder / f"solver-{args.solver}" if args.solver else folder
    options = {"quick": args.quick, "seeds": args.seeds, "solver": args.solver, "workers": args.workers}
    if args.address and args.workers != "ray":
        raise UsageError("--address is that of a Ray cluster: add --workers ray")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers end with us
    for name in names:
        options |= {"address": args.address, "tensorboard": args.tensorboard}
        lab = Lab(name, EXPERIMENTS[name], folder, **options)
        _run_and_print(lab)


def _bench(args: argparse.Namespace) -> None:
    from spingrad_lab.bench.step import Step
    from spingrad_lab.experiments import BENCHMARKS
    from spingrad_lab.runs import Lab

    _check_device(args.device)
    folder = (args.out / "quick" if args.quick else args.out) / "bench"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers end with us
    for name in _known(args.names, "benchmark", BENCHMARKS):  # one after the other: they time each other
        benchmark = Step(args.device, args.beside) if name == "step" else BENCHMARKS[name]
        options = {"quick": args.quick, "seeds": args.repeats, "workers": 1}
        _run_and_print(Lab(name, benchmark, folder, **options))


def _known(names: list[str], kind: str, known: Mapping[str, object]) -> list[str]:
    """The names asked for, or all; refused before anything is run."""
    for name in names:
        if name != "all" and name not in known:
            raise UsageError(f"there is no {kind} {name!r}; choose from: all, {', '.join(known)}")
    return list(known) if "all" in names else names


def _run_and_print(lab: "Lab") -> None:
    from spingrad_lab.report.page import show

    try:
        lab.experiment.plan(lab)
    except KeyboardInterrupt:
        kept = f"{len(lab.finished)} runs are kept in {lab.path}"
        raise KeyboardInterrupt(f"stopped; {kept}, the same command goes on") from None
    _print(*show(lab.folder, lab.name, lab.experiment))


def _print(section: "Section", drawings: list[Path]) -> None:
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
    from spingrad_lab.report.page import write_report

    for path in write_report(args.folder):
        print(path)


def _problems(args: argparse.Namespace) -> None:
    from spingrad_lab import problems

    if args.write:
        for path in problems.write(args.folder, quick=args.quick):
            print(path)
    rows = problems.verify(args.folder, prove=args.prove)
    table = Table("file", "inputs", "units", "proved", "% above the lower bound", box=None)
    for row in rows:
        table.add_row(
            row["name"], *(str(row[key]) for key in ("n", "units", "proved")), f"{row['gap %']:.4f}"
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(
        f"{sum(row['units'] for row in rows)} problems, {sum(row['proved'] for row in rows)} of them proved"
    )


def _docs(args: argparse.Namespace) -> None:
    from spingrad_lab.docs import rewrite

    for path in rewrite(args.root):
        print(path)
