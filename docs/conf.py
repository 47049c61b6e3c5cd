"""The site, built by ``nox -s site``. Its source is the root of the checkout, so links work on GitHub too."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "src")]

from inventories import SITES, inventories  # noqa: E402
from layers import drawn, layers  # noqa: E402
from report_pages import REPORT, linked, pages, places  # noqa: E402

from spingrad import __version__ as release  # noqa: E402, F401

project = author = "spingrad"
project_copyright = "the spingrad developers"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    *("docs/**", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"),
    *("lab/README.md", REPORT),
]
exclude_patterns = ["docs/_build", ".*", "build", "dist", "src", "tests", "lab/src", "lab/tests"]

# Markdown and notebooks. Notebooks are rendered as they are committed; a test runs them.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# The report has anchors in HTML, which MyST does not know; docs/links.py checks all links of the built pages.
suppress_warnings = ["myst.xref_missing", "myst.header"]

# The reference, from docstrings.
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "convolve"}
autodoc_mock_imports = ["ray", "gurobipy"]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
INTERNAL = (
    r"spingrad\.(.*\b_\w+|export\.(stages|plan)|nn\.conv|optim\.(qpsbgd|gradient)"
    r"|distributed\.agreement|qpu\.\w+)"
)
nitpick_ignore_regex = [("py:.*", r"(?!spingrad).*"), ("py:.*", rf"{INTERNAL}(\..*)?")]
intersphinx_mapping = inventories(SITES, ROOT / "docs/_build/inventories")

html_theme = "pydata_sphinx_theme"
html_title = "spingrad"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_static/root"]  # index.html, which leads to docs/index.html
html_show_sourcelink = False
html_theme_options = {
    "show_nav_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}


PAGES = pages((ROOT / REPORT).read_text(encoding="utf-8"))


def setup(app):
    """Write what is generated, mend links of the sources, and find names by where they are documented."""
    _write("docs/layers.svg", drawn(layers(ROOT / "pyproject.toml")))
    for path, text in PAGES.items():
        if path != REPORT:
            _write(path, text)
    app.connect("source-read", _mended)
    app.connect("missing-reference", _documented)


def _write(path, text):
    """Write a file if that changes it: pages that have changed are built again."""
    file = ROOT / path
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")


def _mended(app, docname, source):
    """Links to folders become plain text; links to the report lead to its pages."""
    here = (ROOT / docname).parent

    def plain(link):
        return link[1] if "://" not in link[2] and (here / link[2]).is_dir() else link[0]

    page = f"{docname}.md"
    text = PAGES[REPORT] if page == REPORT else linked(source[0], page, places(PAGES))
    text = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)#]+)\)", plain, text)
    source[0] = re.sub(r"(?m)^\|.*", lambda row: _unbroken(row[0]), text)


def _unbroken(row):
    """A row of a table whose cells are not broken at ``a ± b``, ``a × b`` and ``a–b``."""
    spaced = re.sub(r"(?<=\d) (?=[±×])|(?<=[±×]) (?=\d)", "\N{NO-BREAK SPACE}", row)
    return re.sub(r"(?<=\d)–(?=\d)", "\N{WORD JOINER}–\N{WORD JOINER}", spaced)


def _documented(app, env, node, contnode):
    """Find ``spingrad.QPSBGD`` or ``spingrad.solvers.base.Solution`` where the reference has them."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("spingrad."):
        return None
    name = target.rpartition(".")[2]
    found = {full for full, *_ in env.domains["py"].get_objects() if full.rpartition(".")[2] == name}
    if not found:
        return None
    shortest = min(sorted(found), key=len)
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", shortest, node, contnode)
