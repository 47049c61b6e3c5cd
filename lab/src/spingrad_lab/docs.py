"""Measured numbers in README and docs: every one is printed from the lines in ``lab/results``.

A place in a Markdown page is marked by two comments, which are not shown. What stands between them is printed
by the function of :data:`PLACES` with that name; ``spingrad-lab docs`` writes it again, and a test compares.

.. code-block:: markdown

    <!-- lab: kills -->
    | network | processes | killed |
    …
    <!-- end -->

To add a number: write a function, give it a name in ``PLACES``, put the two comments into the page, and run
``spingrad-lab docs``. ``tests/test_docs.py`` fails on numbers that look measured and stand elsewhere, except
those in its list.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from spingrad._files import write_atomically
from spingrad.export.c import to_c
from spingrad_lab.bench.devices import packed
from spingrad_lab.beyond.step import GAINS
from spingrad_lab.experiments import BENCHMARKS, EXPERIMENTS
from spingrad_lab.methods import DEFAULT
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Line, current_lines, to_frame

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "lab/README.md", "docs/*.md")
PLACE = re.compile(r"^<!-- lab: (\S+) -->\n.*?^<!-- end -->", re.DOTALL | re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """The pages of a checkout that may hold measured numbers."""
    return [path for pattern in PAGES for path in sorted(root.glob(pattern))]


def rewrite(root: Path) -> list[Path]:
    """Print every place of every page of a checkout again; the pages that have changed."""
    if not (root / "lab/results").is_dir():
        raise FileNotFoundError(
            f"expected a checkout of spingrad, got {root}, which has no folder lab/results"
        )
    results = Results(root / "lab/results")
    texts = {path: path.read_text(encoding="utf-8") for path in pages(root)}
    new = {
        path: filled(text, results) for path, text in texts.items()
    }  # an error leaves all pages as they are
    changed = [path for path, text in texts.items() if new[path] != text]
    if (root / "docs").is_dir():
        new |= {root / name: drawn() for name, drawn in PICTURES.items()}
        changed += [path for path in new if path not in texts and not _holds(path, new[path])]
    for path in changed:
        write_atomically(path, new[path].encode())
    return changed


def filled(text: str, results: "Results") -> str:
    """A page with what its places should hold."""

    def printed(place: re.Match[str]) -> str:
        name = place[1]
        if name not in PLACES:
            raise ValueError(f"expected the name of a place ({', '.join(PLACES)}), got {name!r}")
        return f"<!-- lab: {name} -->\n\n{PLACES[name](results)}\n\n<!-- end -->"

    return PLACE.sub(printed, text)


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def _memory(network: str, name: str) -> str:
    """The picture of the memory of one of the networks that ``bench devices`` runs."""
    return to_c(packed(network), name).picture()


PICTURES: dict[str, Callable[[], str]] = {
    "docs/memory-uno.svg": partial(_memory, "averages of 2 × 2 pixels, 196-256-320-10", "uno"),
    "docs/memory-residual.svg": partial(_memory, "residual, CIFAR-10, all signs", "residual"),
}
"""Pictures of the pages, by their paths."""


class Results:
    """What the experiments and benchmarks show of the lines in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.section = cache(self._section)

    def lines(self, name: str) -> list[Line]:
        """The current runs of an experiment, or of ``bench/NAME``."""
        return current_lines(self.folder / f"{name}.jsonl", _experiment(name))[0]

    def _section(self, name: str) -> Section:
        return _experiment(name).show(to_frame(self.lines(name)))

    def table(self, name: str, caption: str = "", column: str = "") -> Table:
        """The first table of an experiment, or of ``bench/NAME``, with this caption and this column."""
        tables = self.section(name).tables
        for table in tables:
            if caption in table.caption and (not column or column in table.header):
                return table
        wanted = f"a table of {name} with {caption!r} in its caption and the column {column!r}"
        raise ValueError(f"expected {wanted}, got {[(table.caption, table.header) for table in tables]}")


def _experiment(name: str) -> Experiment:
    return BENCHMARKS[name.removeprefix("bench/")] if name.startswith("bench/") else EXPERIMENTS[name]


Print = Callable[[Results], str]


def _with_origin(name: str, table: Print) -> Print:
    """A table and, below it, the command that computed its runs and the commits at which it did."""
    command = f"spingrad-lab {name.replace('/', ' ')}" if "/" in name else f"spingrad-lab run {name}"

    def printed(results: Results) -> str:
        commits = list(dict.fromkeys(line.commit for line in results.lines(name)))
        if not commits:
            return f"*There are no runs of the present version yet: `{command}`.*"
        at = ", ".join(commits) if len(commits) < 4 else f"{len(commits)} commits, which the lines name"
        return f"{table(results)}\n\n*`{command}`, at {at}.*"

    return printed


def _table(name: str, caption: str = "", column: str = "", *, without: str = "") -> Print:
    """A table as the report has it, without one of its columns."""

    def printed(results: Results) -> str:
        table = results.table(name, caption, column)
        kept = [place for place, header in enumerate(table.header) if header != without]
        header, *rows = [[row[place] for place in kept] for row in (table.header, *table.rows)]
        marked = any("†" in cell for row in rows for cell in row)
        note = table.caption if marked else table.caption.partition(" †")[0]
        return Table(header, rows, note).to_markdown()

    return _with_origin(name, printed)


def _against(name: str, ours: str, *rivals: str) -> Print:
    """A row for each network of a contest: our score, and its difference from each rival's."""

    def printed(results: Results) -> str:
        rows = []
        for table in (table for table in results.section(name).tables if table.header[0] == "method"):
            found = {method: cells for method, *cells in table.rows}
            differences = [_difference(*found[rival][1:3]) for rival in rivals]
            rows.append([table.caption.partition(". ")[0], found[ours][0], *differences])
        return Table(["network", ours, *(f"minus {rival}" for rival in rivals)], rows).to_markdown()

    return _with_origin(name, printed)


def _whitening(results: Results) -> str:
    """A row for each network: the default with whitening, minus the default and minus the best rival."""
    rows, commands = [], []
    for name in ("fully-connected", "twenty-epochs", "cifar", "transformer", "spoken-digits"):
        for table in (table for table in results.section(name).tables if table.header[0] == "network"):
            commands.append(f"`spingrad-lab run {name}`")
            for network, whitening, score, *tests, rival in table.rows:
                found = [f"{test.partition(' ')[0]}, {test.rpartition(', ')[2]}" for test in tests]
                strength = whitening.removeprefix("whitening ").removesuffix(", BatchNorm")
                rows.append([network, strength, score, found[0], f"{found[1]} ({rival})"])
    header = ["network", "whitening", "score", "minus QP-SBGD", "minus the best rival"]
    return f"{Table(header, rows).to_markdown()}\n\n*{', '.join(commands)}.*"


def _difference(test: str, verdict: str) -> str:
    """Bold if we are ahead or behind; else with the verdict."""
    less = test.partition(" ")[0]
    return f"**{less}**" if verdict in ("**ahead**", "**behind**") else f"{less}, {verdict}"


def _step_finals(*shapes: str) -> Print:
    """The final runs of the experiment ``step``: a table for each shape, without candidates left behind."""
    left_out = "one batch alone", "best of the others", "which they are"
    named = {"leading directions": "default of 0.1.0", "gains": "default of 0.1.0, Gain"}

    def printed(results: Results) -> str:
        tables = []
        for shape in shapes:
            found = results.table("step", f"{shape}: test accuracy")
            rows = [
                [
                    named.get(method, method.replace("gains", "Gain")),
                    *(score.partition(", ")[0] for score in scores),
                ]
                for method, *scores in found.rows
                if method not in left_out
            ]
            tables.append(Table([shape, *found.header[1:]], rows).to_markdown())
        return "\n\n".join(tables)

    return _with_origin("step", printed)


def _in_short(results: Results) -> str:
    """Some networks of ``step`` and the spoken digits: where QP-SBGD is ahead, and where it is not."""
    header = ["network", "QP-SBGD", "Adam", "Adam, BatchNorm", "QP-SBGD minus Adam, BatchNorm"]
    rows = []
    for shape, place, ours, adam, shown in (
        ("784-512-512-10", "mnist, hardtanh", DEFAULT, "Adam", "784-512-512-10, MNIST"),
        ("8 layers of 256", "fashion, sign", DEFAULT, "Adam", "8 layers, signs, Fashion-MNIST"),
        ("convolutional", "mnist, hardtanh", DEFAULT, "Adam", "convolutional, MNIST"),
        ("convolutional", "mnist, hardtanh", GAINS, "Adam, gains", "the same with `Gain`"),
    ):
        table = results.table("step", f"{shape}: test accuracy")
        column = table.header.index(place)
        found = {name: scores[column - 1].partition(", ")[0] for name, *scores in table.rows}
        less = f"{ours} minus BatchNorm, Adam"
        rows.append([shown, found[ours], found[adam], found["BatchNorm, Adam"], found[less]])
    spoken = {name: scores for name, *scores in results.table("spoken-digits").rows}
    with_norm, less = spoken["Adam, BatchNorm"][:2]
    less = less.partition(", Holm")[0]
    rows.append(["1-d convolutions, spoken digits", spoken["QP-SBGD"][0], spoken["Adam"][0], with_norm, less])
    seeds = _fewest_seeds(results, "step", "spoken-digits")
    note = (
        f"`spingrad-lab run step`, and `spingrad-lab run spoken-digits` for the last row; {seeds} seeds each."
    )
    return f"{Table(header, rows).to_markdown()}\n\n{note}"


def _fewest_seeds(results: Results, *experiments: str) -> int:
    """The number of final runs of a method on a network, at least."""
    jobs = [line.job for name in experiments for line in results.lines(name)]
    what = [{k: v for k, v in job.items() if k not in ("seed", "settings")} for job in jobs]
    return min(Counter(str(own) for own in what if own["stage"] == "final").values())


def _all_of_mnist(results: Results) -> str:
    """What ``examples/mnist_without_batchnorm.py`` wrote."""
    rows = []
    for path in sorted((results.folder / "examples").glob("mnist_full_seed*.json")):
        run = json.loads(path.read_text())
        scores = f"{run['test_accuracy']:.4f}", f"{run['train_accuracy']:.4f}"
        rows.append([f"{run['settings']['seed']}", *scores, f"{run['bits'] / 8:,.0f}"])
    return Table(["seed", "test accuracy", "training accuracy", "bytes of weights"], rows).to_markdown()


def _qpu_plan(results: Results) -> str:
    """What ``spingrad qpu plan`` prints; it is computed, not measured."""
    from spingrad.qpu import plan

    pairs = plan([16, 4, 4, 2], batch_size=50, num_examples=500, epochs=8).summary()
    width = max(len(name) for name, _ in pairs)
    return "\n".join(["```text", *(f"{name:{width}}  {value}" for name, value in pairs), "```"])


def _public_problems(results: Results) -> str:
    """What the files of the public set say of themselves."""
    from spingrad import BinaryQuadratic

    found: dict[int, list[bool]] = {}
    for path in sorted((results.folder.parent / "problems").glob("*.safetensors")):
        problem = BinaryQuadratic.load(path)
        found.setdefault(problem.num_spins, []).extend(problem.origin["proved"])
    rows = [[str(n), str(len(own)), str(sum(own))] for n, own in sorted(found.items())]
    every = [proved for own in found.values() for proved in own]
    rows.append(["all", str(len(every)), str(sum(every))])
    return Table(["inputs", "problems", "proved optima"], rows).to_markdown()


def _quality_sizes(results: Results) -> str:
    """What the rows are, how they are tuned, and the sizes."""
    return "\n\n".join(results.section("solve-quality").notes)


def _tables(name: str) -> Print:
    """All tables of an experiment."""
    return _with_origin(
        name, lambda results: "\n\n".join(own.to_markdown() for own in results.section(name).tables)
    )


def _beside(results: Results) -> str:
    """Times of two versions in one run."""
    tables = [own for own in results.section("bench/step").tables if "there is" in own.caption]
    return "\n\n".join(own.to_markdown() for own in tables)


PLACES: dict[str, Print] = {
    "in-short": _in_short,
    "without-batchnorm": _step_finals("784-512-512-10", "8 layers of 256"),
    "convolutions": _step_finals("convolutional"),
    "versions": _table("versions"),
    "passes": _table("passes"),
    "mnist-methods": _table("mnist-methods", without="seconds"),
    "all-of-mnist": _all_of_mnist,
    "fully-connected": _against(
        "fully-connected", DEFAULT, "Adam", "signSGD", "Muon", "sign of FOOF", "Adam, BatchNorm"
    ),
    "twenty-epochs": _against(
        "twenty-epochs", DEFAULT, "Adam", "signSGD", "Muon", "sign of FOOF", "Adam, BatchNorm"
    ),
    "cifar-vgg": _table("cifar", "VGG", without="chosen"),
    "cifar-residual": _table("cifar", "residual", without="chosen"),
    "transformer": _table("transformer", without="chosen"),
    "whitening": _whitening,
    "step-time": _table("bench/step", "784-1024-1024-10, batches of 128", "1 thread: ms"),
    "step-time-convolutional": _table("bench/step", "convolutional", "1 thread: ms"),
    "step-time-passes": _table("bench/step", "16 passes", "1 thread: ms"),
    "step-time-beside": _with_origin("bench/step", _beside),
    "solvers": _table("bench/solvers", "A wide layer"),
    "narrow-layers": _table("bench/solvers", "Narrow layers"),
    "growth": _table("bench/growth"),
    "memory": _table("bench/memory", column="of the layer"),
    "memory-steps": _table("bench/memory", "What torch has allocated"),
    "slow-link": _table("bench/slow-link"),
    "vote-accuracy": _table("bench/vote-accuracy"),
    "elastic": _table("bench/elastic"),
    "kills": _table("bench/kills"),
    "ray-farm": _table("bench/ray-farm"),
    "devices": _table("bench/devices", column="chip"),
    "export-same": _table("bench/export", column="torch accuracy"),
    "export-bytes": _table("bench/export", column="packed file"),
    "export-times": _table("bench/export", column="× int8"),
    "lfc": _table("lfc"),
    "int8": _table("int8"),
    "annealers": _table("bench/annealers", "A wide layer"),
    "annealers-narrow": _table("bench/annealers", "Narrow layers"),
    "starts": _table("bench/starts"),
    "public-problems": _public_problems,
    "rounding": _tables("rounding"),
    "solve-quality": _table("solve-quality", "Test accuracy minus"),
    "solve-quality-loss": _table("solve-quality", "Training loss minus"),
    "solve-quality-rates": _table("solve-quality", "equal learning rates"),
    "solve-quality-sizes": _quality_sizes,
    "solve-quality-best": _table("solve-quality", "The best known spins"),
    "qpu-wide-layer": _table("bench/qpu-wide-layer"),
    "qpu-plan": _qpu_plan,
}
"""What prints each place."""
