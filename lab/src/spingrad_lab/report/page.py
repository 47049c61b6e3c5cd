"""The report: every experiment's text, tables and figures, as one HTML page and as Markdown."""

from collections.abc import Sequence
from pathlib import Path

from spingrad._files import write_atomically
from spingrad_lab.report.sections import Section, Table
from spingrad_lab.runs import Experiment, Line, read_lines

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
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ intro }}</p>
{{ drawn(summary) }}
<nav>
{% for part in parts %}<div><a href="#{{ part.name }}">{{ part.experiment.title }}</a></div>
{% endfor %}</nav>
{% for part in parts %}
<h2 id="{{ part.name }}">{{ part.experiment.title }}</h2>
<p class="source">{{ part.experiment.source }} · {{ part.runs }} runs, {{ part.minutes }} processor minutes ·
<code>{{ part.command }}</code></p>
{% for note in part.section.notes %}<p>{{ note|rich }}</p>
{% endfor %}{% for table in part.section.tables %}{{ drawn(table) }}
{% endfor %}{% for figure in part.section.figures %}<figure>{{ figure.svg|safe }}
<figcaption>{{ figure.caption|rich }}</figcaption></figure>
{% endfor %}{% endfor %}
</body>
</html>
"""


class Part:
    """One experiment in a report."""

    def __init__(self, name: str, experiment: Experiment, lines: Sequence[Line]) -> None:
        self.name, self.experiment, self.lines = name, experiment, lines
        self.section = experiment.show(lines)
        self.runs = f"{len(lines):,}"
        self.minutes = f"{sum(line.seconds for line in lines) / 60:.1f}"
        quick = bool(lines) and lines[0].job["quick"]
        self.command = f"spingrad-lab run {name}{' --quick' if quick else ''}"


def write_report(folder: Path) -> list[Path]:
    """Write ``report.html``, ``report.md`` and the figures beside the runs they show."""
    from spingrad_lab.experiments import EXPERIMENTS

    parts = []
    for name, experiment in EXPERIMENTS.items():
        if lines := read_lines(folder / f"{name}.jsonl"):
            parts.append(Part(name, experiment, lines))
    if not parts:
        raise FileNotFoundError(
            f"{folder} holds no finished runs; `spingrad-lab run NAME --out {folder}` makes them"
        )
    title = "spingrad: the paper's experiments, and more"
    intro = (
        "Every number was measured by the command beside it. Each method had the same number of trials of "
        "its settings on validation data (on training loss where convergence is the claim); final runs use "
        "fresh seeds. Intervals are 95 %. A loss is printed like a win."
    )
    for part in parts:
        _write_figures(folder, part.name, part.section)
    paths = folder / "report.html", folder / "report.md"
    summary = _summary(parts)
    write_atomically(paths[0], _html(title, intro, summary, parts).encode())
    text = [
        f"# {title}",
        intro,
        summary.to_markdown(),
        "\n".join(f"- [{p.experiment.title}](#{p.name})" for p in parts),
    ]
    for part in parts:
        text.append(f'<a id="{part.name}"></a>')
        text.append(section_markdown(part.name, part.experiment, part.section))
        text.append(f"{part.runs} runs, {part.minutes} processor minutes: `{part.command}`")
    write_atomically(paths[1], ("\n\n".join(text) + "\n").encode())
    return list(paths)


def show(folder: Path, name: str, experiment: Experiment) -> tuple[Section, list[Path]]:
    """What one experiment shows, its figures drawn beside its runs, and where they are."""
    section = experiment.show(read_lines(folder / f"{name}.jsonl"))
    _write_figures(folder, name, section)
    return section, [folder / _file(name, figure.name) for figure in section.figures]


def section_markdown(name: str, experiment: Experiment, section: Section) -> str:
    """One experiment as Markdown; its figures are files beside it."""
    parts = [f"## {experiment.title}", f"*{experiment.source}*", *section.notes]
    parts += [table.to_markdown() for table in section.tables]
    for figure in section.figures:
        parts.append(f"![{figure.caption}]({_file(name, figure.name)})")
    return "\n\n".join(parts)


def _write_figures(folder: Path, name: str, section: Section) -> None:
    for figure in section.figures:
        write_atomically(folder / _file(name, figure.name), figure.svg.encode())


def _file(name: str, figure: str) -> str:
    plain = "".join(c if c.isalnum() or c == "-" else "-" for c in figure.lower())
    return f"figures/{name}-{plain}.svg".replace("--", "-")


def _summary(parts: list[Part]) -> Table:
    """Every comparison in one line: ours, the best baseline, their difference, and real weights."""
    header = ["experiment", "score", "QP-SBGD", "best baseline", "difference, paired", "real weights"]
    rows = []
    for part in parts:
        for task, *rest in part.experiment.summary(part.lines):
            known = part.name.startswith(task.lower())
            name = part.name if known else f"{part.name}, {task}"
            rows.append([name, *rest])
    caption = (
        "Mean ± 95 % interval over fresh seeds, settings tuned alike. Real weights are a ceiling, no rival."
    )
    return Table(header, rows, caption)


def _html(title: str, intro: str, summary: Table, parts: list[Part]) -> str:
    import re

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
    return environment.from_string(_PAGE).render(title=title, intro=intro, summary=summary, parts=parts)
