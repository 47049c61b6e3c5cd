"""The sources of the site: what is generated, the notebooks, and the check of links."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import spingrad

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
sys.path.append(str(ROOT / "docs"))

from inventories import inventories  # noqa: E402
from layers import drawn, layers  # noqa: E402
from links import broken  # noqa: E402
from report_pages import linked, pages, places  # noqa: E402


def test_the_version_is_the_same_everywhere():
    lab = tomllib.loads((ROOT / "lab/pyproject.toml").read_text())["project"]["version"]
    cited = re.search(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())[1]
    newest = re.search(r"(?m)^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[1]
    pages = "".join((ROOT / name).read_text() for name in ("README.md", "docs/tutorials.md", "lab/README.md"))
    wheels = re.findall(r"spingrad(?:_lab)?-(.*?)-py3", pages)
    assert {lab, cited, newest, *wheels} == {spingrad.__version__}


def test_the_picture_of_the_layers_is_that_of_the_contract():
    assert (ROOT / "docs/layers.svg").read_text(encoding="utf-8") == drawn(layers(ROOT / "pyproject.toml"))


def test_every_page_is_reached_from_the_first():
    pages = [*(ROOT / "docs").glob("*.md"), *NOTEBOOKS]
    listed = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.suffix == ".md")
    for page in pages:
        assert re.search(rf"(?m)^(notebooks/)?{page.stem}$", listed) or page.stem == "index"


def test_links_to_files_and_anchors_that_do_not_exist_are_found(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="there"></h1>')
    links = "b.html#there", "b.html", "#own", "https://elsewhere.org/x", "b.html#gone", "gone.html"
    (tmp_path / "a.html").write_text('<p id="own">' + "".join(f'<a href="{link}"></a>' for link in links))
    assert broken(tmp_path) == ["a.html: b.html#gone", "a.html: gone.html"]


def test_docs_of_other_libraries_are_linked_where_they_can_be_reached(tmp_path, capsys):
    (tmp_path / "objects.inv").write_bytes(b"names")
    sites = {"here": tmp_path.as_uri(), "gone": f"{tmp_path.as_uri()}/gone"}
    found = inventories(sites, tmp_path / "kept")
    assert found == {"here": (tmp_path.as_uri(), str(tmp_path / "kept/here.inv"))}
    assert (tmp_path / "kept/here.inv").read_bytes() == b"names"
    assert "names of gone will be no links" in capsys.readouterr().err


def test_the_report_becomes_an_overview_and_a_page_for_each_chapter():
    report = """# Report

[digits](#digits)

## The paper

<a id="digits"></a>

### Digits

Runs are in [a file](digits.jsonl), their [speed](#speed) below.

![Curves of training.](figures/digits.svg)

## Benchmarks

<a id="speed"></a>
"""
    made = pages(report)
    overview, paper, benchmarks = made.values()
    assert [*made] == ["lab/results/report.md", "docs/report/the-paper.md", "docs/report/benchmarks.md"]
    assert "[digits](../../docs/report/the-paper.md#digits)" in overview
    assert "\n../../docs/report/the-paper.md\n../../docs/report/benchmarks.md\n" in overview
    assert paper.startswith("# The paper\n")
    assert "\n## Digits\n" in paper
    assert "[a file](../../lab/results/digits.jsonl), their [speed](benchmarks.md#speed)" in paper
    assert ":::{figure} ../../lab/results/figures/digits.svg\nCurves of training.\n:::" in paper
    assert benchmarks.startswith("# Benchmarks\n")
    link = linked("[speed](../lab/results/report.md#speed), [own](#speed)", "docs/method.md", places(made))
    assert link == "[speed](report/benchmarks.md#speed), [own](#speed)"


def test_the_notebooks_hold_their_output_and_the_animation_is_small():
    assert len(NOTEBOOKS) == 5
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert outputs
        assert not any(output["output_type"] == "error" for output in outputs)
    assert (ROOT / "docs/notebooks/solve.gif").stat().st_size < 2e6


@pytest.mark.needs("IPython", "matplotlib", "sklearn", "dwave.system", "numba")
@pytest.mark.slow
def test_the_notebooks_run(tmp_path):
    """All in one process, one after the other: most of the time goes into imports."""
    command = [sys.executable, __file__, *NOTEBOOKS]
    environment = os.environ | {"MPLBACKEND": "agg"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("different classes: 0") >= 1
    assert "equal: True" in ran.stdout


if __name__ == "__main__":
    for name in sys.argv[1:]:
        cells = json.loads(Path(name).read_text())["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        exec(compile(code, name, "exec"), {"__name__": name})
