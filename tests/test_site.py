"""The sources of the site: the drawing of the contract, the notebooks, and the check of links."""

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

from layers import drawn, layers  # noqa: E402
from links import broken  # noqa: E402


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
