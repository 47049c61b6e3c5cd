"""The report: every experiment's text, tables and figures, as one HTML page and as Markdown."""

import re
from pathlib import Path

import pandas as pd

from spingrad import _figures
from spingrad._files import check_own, write_atomically
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Line, current_lines, to_frame

_PAGE = """{% macro drawn(table) %}<table>
{% if table.caption %}<caption>{{ table.caption|rich }}</caption>
{% endif %}<tr>{% for cell in table.header %}<th>{{ cell }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell|rich }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endmacro %}<!doctype html>
<html lang="en-GB">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { border-top: 1px solid #ddd; padding-top: 1.2rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 1rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-style: italic; padding-bottom: 0.3rem; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #e5e5e5; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } code { background: #f4f4f4; padding: 0.1rem 0.3rem; }
figure { margin: 1.2rem 0; } figure svg { max-width: 100%; height: auto; } figcaption { font-size: 0.85rem; }
nav { columns: 3 14rem; font-size: 0.9rem; } .source { color: #666; }
.banner { background: #fbe3c8; padding: 0.6rem 1rem; font-weight: bold; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% if banner %}<p class="banner">{{ banner }}</p>
{% endif %}<p>{{ intro }}</p>
{% if summary.rows %}{{ drawn(summary) }}{% endif %}
<nav>
{% for part in parts %}<div><a href="#{{ part.anchor }}">{{ part.experiment.title }}</a></div>
{% endfor %}</nav>
{% for part in parts %}
<h2 id="{{ part.anchor }}">{{ part.experiment.title }}</h2>
<p class="source">{{ part.experiment.source }} · {{ part.runs }}, {{ part.minutes }} minutes ·
<code>{{ part.command }}</code></p>
{% for note in part.section.notes %}<p>{{ note|rich }}</p>
{% endfor %}{% for table in part.section.tables %}{{ drawn(table) }}
{% endfor %}{% for figure in part.section.figures %}<figure>{{ figure.svg|safe }}
<figcaption>{{ figure.caption|rich }}</figcaption></figure>
{% endfor %}{% endfor %}
</body>
</html>
"""


BANNER = (
    "Quick sizes, not a result: these runs show only that everything works. "
    "The notes describe the full sizes."
)
INTRO = (
    "Every number was measured by the command beside it. Each method had the same number of trials of "
    "its settings on validation data (on training loss where convergence is the claim); final runs use "
    "fresh seeds. Intervals are 95 %. A loss is printed like a win."
)
# In the first bytes of what we write; a file without its mark is not replaced.
HTML_MARK, MARKDOWN_MARK = b"<title>spingrad: ", b"# spingrad: "


class Part:
    """One experiment or benchmark in a report; ``folder`` is that of its runs below the report's."""

    def __init__(
        self, name: str, experiment: Experiment, lines: list[Line], outdated: int = 0, folder: str = ""
    ) -> None:
        self.name, self.experiment, self.folder = name, experiment, folder
        self.frame, self.quick = to_frame(lines), bool(lines[0].job["quick"])
        self.section = _shown(experiment, self.frame)
        self.runs = "1 run" if len(lines) == 1 else f"{len(lines):,} runs"
        self.minutes = f"{sum(line.seconds for line in lines) / 60:.1f}"
        action = "bench" if folder else "run"
        self.command = f"spingrad-lab {action} {name}{' --quick' if self.quick else ''}"
        self.anchor = f"bench-{name}" if folder else name


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
    summary = _summary(parts)
    write_atomically(paths[0], _html(title, banner, summary, parts).encode())
    text = [f"# {title}", *([f"**{banner}**"] if banner else []), INTRO]
    text += [summary.to_markdown()] if summary.rows else []
    text.append("\n".join(f"- [{part.experiment.title}](#{part.anchor})" for part in parts))
    for part in parts:
        text.append(f'<a id="{part.anchor}"></a>')
        text.append(section_markdown(part.name, part.experiment, part.section, part.folder))
        text.append(f"{part.runs}, {part.minutes} minutes: `{part.command}`")
    write_atomically(paths[1], ("\n\n".join(text) + "\n").encode())
    return list(paths)


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


def section_markdown(name: str, experiment: Experiment, section: Section, below: str = "") -> str:
    """One experiment as Markdown; its figures are files beside it."""
    parts = [f"## {experiment.title}", f"*{experiment.source}*", *section.notes]
    parts += [table.to_markdown() for table in section.tables]
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


def _summary(parts: list[Part]) -> Table:
    """Every comparison in one line: ours, the best baseline, their difference, and real weights."""
    header = ["experiment", "score", "QP-SBGD", "best baseline", "difference, paired", "real weights"]
    rows = []
    for part in parts:
        for task, *rest in part.experiment.summary(part.frame):
            known = part.name.startswith(task.lower())
            name = part.name if known else f"{part.name}, {task}"
            rows.append([name, *rest])
    caption = "Mean ± 95 % interval over fresh seeds, settings tuned alike. "
    caption += "Real weights are a ceiling and not a rival."
    return Table(header, rows, caption)


def _html(title: str, banner: str, summary: Table, parts: list[Part]) -> str:
    from jinja2 import Environment
    from markupsafe import Markup, escape

    def rich(text: str) -> Markup:
        """Bold, emphasis and code of our own notes."""
        safe = str(escape(text))
        safe = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", safe)
        safe = re.sub(r"(?<!\w)\*(?! )(.+?)\*", r"<em>\1</em>", safe)
        return Markup(re.sub(r"`(.+?)`", r"<code>\1</code>", safe))

    environment = Environment(autoescape=True, keep_trailing_newline=True)
    environment.filters["rich"] = rich
    return environment.from_string(_PAGE).render(
        title=title, banner=banner, intro=INTRO, summary=summary, parts=parts
    )
