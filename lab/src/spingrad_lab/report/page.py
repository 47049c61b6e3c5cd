"""The report: every experiment's text, tables and figures, as one HTML page and as Markdown."""

import re
from collections import Counter
from pathlib import Path

import pandas as pd

from spingrad import _figures
from spingrad._files import check_own, write_atomically
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.report.statistics import estimate, judged, shown
from spingrad_lab.report.verdicts import apart, verdicts
from spingrad_lab.runs import Experiment, Line, current_lines, to_frame

_PAGE = """{% macro kind(table, column) %}class="{{ "number" if table.numeric[column] else "text" }}"\
{% endmacro %}{% macro drawn(table) %}{% if table.folded %}
<details><summary>{{ table.caption|rich }}</summary>
{% endif %}<table>
{% if table.caption and not table.folded %}<caption>{{ table.caption|rich }}</caption>
{% endif %}<tr>
{% for cell in table.header %}<th {{ kind(table, loop.index0) }}>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>
{% for cell in row %}<td {{ kind(table, loop.index0) }}>{{ cell|rich }}</td>{% endfor %}</tr>
{% endfor %}</table>{% if table.folded %}</details>{% endif %}{% endmacro %}<!doctype html>
<html lang="en-GB">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; }
h3 { border-top: 1px solid #ddd; padding-top: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.82rem; line-height: 1.35; margin: 1rem 0; }
caption { text-align: left; font-style: italic; padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.5rem; border-bottom: 1px solid #e5e5e5; text-align: left; vertical-align: top; }
th { vertical-align: bottom; } th.number, td.number { text-align: right; }
code { background: #f4f4f4; padding: 0.1rem 0.3rem; overflow-wrap: anywhere; }
details { margin: 0.6rem 0; font-size: 0.85rem; } summary { cursor: pointer; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { font-size: 0.85rem; }
nav { columns: 3 14rem; font-size: 0.9rem; } .source { color: #666; font-size: 0.85rem; }
.banner { background: #fbe3c8; padding: 0.6rem 1rem; font-weight: bold; }
@media (max-width: 64rem) { table { display: block; overflow-x: auto; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if banner %}<p class="banner">{{ banner }}</p>
{% endif %}<p>{{ intro }}</p>
<p>{{ step|rich }}</p>
{% for table in tables %}{{ drawn(table) }}
{% endfor %}{% for group, own in groups.items() %}<p><strong>{{ group }}</strong></p>
<nav>
{% for part in own %}<div><a href="#{{ part.anchor }}">{{ part.experiment.title }}</a></div>
{% endfor %}</nav>
{% endfor %}{% for group, own in groups.items() %}
<h2>{{ group }}</h2>
{% for part in own %}<h3 id="{{ part.anchor }}">{{ part.experiment.title }}</h3>
<p class="source">{{ part.experiment.source }} · {{ part.origin|rich }}</p>
{% for note in part.section.notes %}<p>{{ note|rich }}</p>
{% endfor %}{% for table in part.section.tables %}{{ drawn(table) }}
{% endfor %}{% for figure in part.section.figures %}<figure>{{ figure.svg|safe }}
<figcaption>{{ figure.caption|rich }}</figcaption></figure>
{% endfor %}{% endfor %}{% endfor %}
</body>
</html>
"""


BANNER = (
    "Quick sizes, not a result: these runs show only that everything works. "
    "The notes describe the full sizes."
)
INTRO = (
    "Every number was measured by the command beside it. Each method had the same number of trials of its "
    "settings on validation data (on training loss where convergence is the claim; where some methods had "
    "more trials, the notes say so); final runs use fresh seeds. Intervals are 95 %. p-values, those of "
    "equivalence tests too, are corrected by Holm's method over the tests of a table or of an experiment, as "
    "each says, and in the first table of scores over all its rows. A method is ahead or behind where the "
    "difference is then significant, level where only an equivalence test is: it shows that the difference "
    "is smaller than 0.3 points, unless another margin is named. Else it is undecided. A loss is printed "
    "like a win."
)
STEP = (
    "The step of QP-SBGD has changed since version 0.2.0. Runs by commits up to 5a74dca, which each section "
    "names, are of the step of 0.2.0 until their experiment is run again; the table of *versions* names the "
    "step of each column."
)
# In the first bytes of what we write; a file without its mark is not replaced.
HTML_MARK, MARKDOWN_MARK = b"<title>spingrad: ", b"# spingrad: "


PAPER, BEYOND, BENCH = "The paper", "Beyond the paper", "Benchmarks"


class Part:
    """One experiment or benchmark in a report; ``folder`` is that of its runs below the report's."""

    def __init__(
        self, name: str, experiment: Experiment, lines: list[Line], outdated: int = 0, folder: str = ""
    ) -> None:
        self.name, self.experiment, self.folder = name, experiment, folder
        self.frame, self.quick = to_frame(lines), bool(lines[0].job["quick"])
        self.section = _shown(experiment, self.frame)
        self.origin = f"{_origin(lines, outdated)}: `{_command(name, folder, self.quick)}`"
        self.anchor = f"bench-{name}" if folder else name

    @property
    def group(self) -> str:
        """Under which heading a report has it."""
        if self.folder:
            return BENCH
        return BEYOND if self.experiment.source.startswith("beyond") else PAPER


def _command(name: str, folder: str, quick: bool) -> str:
    return f"spingrad-lab {'bench' if folder else 'run'} {name}{' --quick' if quick else ''}"


def _origin(lines: list[Line], outdated: int) -> str:
    """How many runs a section shows, how long they took, and which commits computed how many of them."""
    runs = "1 run" if len(lines) == 1 else f"{len(lines):,} runs"
    minutes = sum(line.seconds for line in lines) / 60
    changed = {line.commit for line in lines if line.commit.endswith("+")}
    counts = Counter(line.commit[:7] + "+" * (line.commit in changed) for line in lines)
    commits = ", ".join(f"{commit} ({count:,})" for commit, count in counts.items())
    text = f"{runs} in {minutes:.1f} minutes, by commit {commits}"
    return text + (f"; {outdated:,} runs of earlier revisions are not shown" if outdated else "")


def _shown(experiment: Experiment, runs: pd.DataFrame) -> Section:
    """What an experiment shows; while it is being run, there may be too little for that."""
    try:
        return experiment.show(runs)
    except (LookupError, ValueError) as error:
        note = f"Unfinished: the {len(runs)} runs so far are too few to show"
        return Section([f"{note} ({type(error).__name__}: {error})."], [])


def write_report(folder: Path) -> list[Path]:
    """Write ``report.html``, ``report.md`` and the figures beside the runs they show.

    Where a folder has only quick runs, which are in its folder ``quick``, the report is of these.
    """
    parts = _parts(folder)
    if not parts and (parts := _parts(folder / "quick")):
        folder = folder / "quick"
    if not parts:
        raise FileNotFoundError(
            f"{folder} holds no finished runs; `spingrad-lab run NAME --out {folder}` makes them"
        )
    title = "spingrad: the paper's experiments, and more"
    banner = BANNER if any(part.quick for part in parts) else ""
    paths = folder / "report.html", folder / "report.md"
    for path, mark in zip(paths, (HTML_MARK, MARKDOWN_MARK), strict=True):
        check_own(path, mark)
    for part in parts:
        _write_figures(folder / part.folder, part.name, part.section)
    tables, grouped = _first_tables(folder, parts), _grouped(parts)
    write_atomically(paths[0], _html(title, banner, tables, grouped).encode())
    write_atomically(paths[1], _markdown(title, banner, tables, grouped).encode())
    return list(paths)


def _grouped(parts: list[Part]) -> dict[str, list[Part]]:
    found = {group: [part for part in parts if part.group == group] for group in (PAPER, BEYOND, BENCH)}
    return {group: own for group, own in found.items() if own}


def _markdown(title: str, banner: str, tables: list[Table], groups: dict[str, list[Part]]) -> str:
    text = [f"# {title}", *([f"**{banner}**"] if banner else []), INTRO, STEP]
    text += [table.to_markdown() for table in tables]
    for group, own in groups.items():
        text.append(f"**{group}**")
        text.append("\n".join(f"- [{part.experiment.title}](#{part.anchor})" for part in own))
    for group, own in groups.items():
        text.append(f"## {group}")
        for part in own:
            text += [f'<a id="{part.anchor}"></a>', f"### {part.experiment.title}"]
            text.append(f"*{part.experiment.source}* · {part.origin}")
            text.append(_section_markdown(part.name, part.section, part.folder))
    return "\n\n".join(text) + "\n"


def _parts(folder: Path) -> list[Part]:
    """Every experiment with runs in a folder, then every benchmark with runs in its folder ``bench``."""
    from spingrad_lab.experiments import BENCHMARKS, EXPERIMENTS

    return [
        Part(name, experiment, lines, outdated, below)
        for below, known in (("", EXPERIMENTS), ("bench", BENCHMARKS))
        for name, experiment in known.items()
        for lines, outdated in [current_lines(folder / below / f"{name}.jsonl", experiment)]
        if lines
    ]


def show(folder: Path, name: str, experiment: Experiment) -> tuple[Section, list[Path]]:
    """What one experiment shows, its figures drawn beside its runs, and where they are."""
    lines, _ = current_lines(folder / f"{name}.jsonl", experiment)
    section = experiment.show(to_frame(lines))
    _write_figures(folder, name, section)
    return section, [folder / _file(name, figure.name) for figure in section.figures]


def _section_markdown(name: str, section: Section, below: str) -> str:
    """One experiment as Markdown; its figures are files beside it."""
    parts = [*section.notes, *(table.to_markdown() for table in section.tables)]
    for figure in section.figures:
        path = Path(below, _file(name, figure.name)).as_posix()
        parts.append(f"![{figure.caption}]({path})")
    return "\n\n".join(parts)


def _write_figures(folder: Path, name: str, section: Section) -> None:
    for figure in section.figures:
        path = folder / _file(name, figure.name)
        check_own(path, _figures.MARK)
        write_atomically(path, figure.svg.encode())


def _file(name: str, figure: str) -> str:
    plain = "".join(c if c.isalnum() or c == "-" else "-" for c in figure.lower())
    return f"figures/{name}-{plain}.svg".replace("--", "-")


def _first_tables(folder: Path, parts: list[Part]) -> list[Table]:
    """What a reader wants to know first: does the paper hold, and how does the default do?"""
    tables = [verdicts(folder), apart()] if any(part.group == PAPER for part in parts) else []
    summary = _summary(parts)
    return [*tables, summary] if summary.rows else tables


def _summary(parts: list[Part]) -> Table:
    """The default against the best baseline, in one line for each comparison; all tests are one family."""
    found = [(part, duel) for part in parts for duel in part.experiment.summary(part.frame)]
    rows = []
    for (part, _), (duel, test, what) in zip(found, judged([duel for _, duel in found]), strict=True):
        known = part.name.startswith(duel.task.lower())
        name = part.name if known else f"{part.name}, {duel.task}"
        name += "" if duel.higher_is_better else f" ({duel.score}: lower is better)"
        ours, rival = (str(estimate(values)) for values in duel.values)
        control = str(estimate(duel.control)) if duel.control else "–"
        rival = f"{rival} ({duel.names[1].removeprefix('BinaryConnect ')})"
        rows.append([name, ours, rival, test.signed, test.corrected, shown(what, duel.margin), control])
    header = [
        "experiment",
        "QP-SBGD",
        "best baseline",
        "difference",
        "p (Holm)",
        "QP-SBGD is",
        "real weights",
    ]
    caption = (
        "The default, QP-SBGD, against the best baseline: mean ± 95 % interval over fresh seeds, settings "
        "tuned alike. The best baseline is the one with the best mean of these runs. Scores are accuracies "
        "unless it says so. Real weights are a control, not a rival."
    )
    return Table(header, rows, caption)


def _html(title: str, banner: str, tables: list[Table], groups: dict[str, list[Part]]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup, escape

    def rich(text: str) -> Markup:
        """Bold, emphasis and code of our own notes."""
        safe = str(escape(text)).replace(" ± ", "\u00a0±\u00a0").replace("lr ", "lr\u00a0")
        safe = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", safe)
        safe = re.sub(r"(?<!\w)\*(?! )(.+?)\*", r"<em>\1</em>", safe)
        return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", safe))

    environment = Environment(autoescape=True, keep_trailing_newline=True)
    environment.filters["rich"] = rich
    return environment.from_string(_PAGE).render(
        title=title, banner=banner, intro=INTRO, step=STEP, tables=tables, groups=groups
    )
