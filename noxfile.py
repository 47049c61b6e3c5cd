"""The checks of spingrad, one session each: ``nox -l`` lists them, ``nox -s lint`` runs one.

``plain``, ``wheel``, ``fpga``, ``minimum`` and ``newest`` make environments of their own, by uv if it
is installed; the others run in that of nox.
"""

import os
import re
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|venv"

PINNED = ("-c", ".ci/constraints.txt")
OF_FINN = (  # what FINN+ imports up to its hardware layers
    *("click", "mashumaro[yaml]", "mip", "onnx-passes", "onnxoptimizer", "pandas", "psutil", "pydantic"),
    *("rich", "scikit-learn", "scipy", "termcolor"),
)
PINNED_FPGA = ("-c", ".ci/constraints-fpga.txt")
REQUIREMENTS: list[str] = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]
NO_EXTRAS = ("-e", ".", "pytest", "pytest-rerunfailures", "pytest-xdist", "hypothesis")
# Two processes of one thread each. A test that fails runs once more, since hundreds start processes and wait
# for them; the summary lists it as RERUN, to be mended.
PYTEST = ("-n2", "--dist=loadfile", "--no-loadscope-reorder", "--reruns=1", "-raR")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LIST_CUDA = (
    "import importlib.metadata as m; print(*{d.name for d in m.distributions() if d.name[:6] == 'nvidia'})"
)


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Format, lint, types and the import contract."""
    _run(session, "ruff", "format", "--check", ".")
    _run(session, "ruff", "check", ".")
    _run(session, "mypy")
    session.run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """The library's tests, slow ones too; arguments after ``--`` go to pytest in place of the coverage."""
    _run(session, "pytest", "-m", "not long", *PYTEST, *(session.posargs or ["--cov", "--durations=40"]))


@nox.session(python=False)
def lab(session: nox.Session) -> None:
    """The lab's tests, slow ones too."""
    with session.chdir("lab"):
        _run(session, "pytest", "-m", "not long", *PYTEST, *(session.posargs or ["--durations=40"]))


@nox.session(python=False)
def site(session: nox.Session) -> None:
    """The site in ``docs/_build/html``: warnings and broken links are errors. Needs the extra ``docs``."""
    options = ("-q", "-W", "--keep-going", "-n", "-c", "docs")
    _run(session, "sphinx", *options, ".", "docs/_build/html")
    session.run(sys.executable, "docs/links.py", "docs/_build/html")


@nox.session
def wheel(session: nox.Session) -> None:
    """Wheel and sdist of library and lab; the wheels alone, without extras, run README's first example."""
    session.install(*PINNED, "build[uv]", "torch")  # first: a build of torch without CUDA where there is one
    dist = Path("dist").resolve()
    shutil.rmtree(dist, ignore_errors=True)
    for project in (".", "lab"):
        session.run("python", "-m", "build", "--installer=uv", "--outdir", str(dist), project, silent=True)
    library, lab = (next(dist.glob(f"{name}-*.whl")) for name in ("spingrad", "spingrad_lab"))
    session.install(*PINNED, str(library))
    refuse_cuda(session)
    example = _first_example("README.md")
    with session.chdir(session.create_tmp()):  # away from the checkout
        session.run("python", "-c", example, silent=True)
        session.run("spingrad", "doctor")
    session.install(*PINNED, str(lab))
    with session.chdir(session.create_tmp()):
        session.run("spingrad-lab", "list", silent=True)


@nox.session(python=False, default=False)
def mutants(session: nox.Session) -> None:
    """Change one place of the library at a time: does a test fail? By hand: it takes hours."""
    session.run(sys.executable, "tests/mutants.py", *session.posargs, env=ONE_THREAD)


@nox.session
def plain(session: nox.Session) -> None:
    """The library with its requirements and no extra: the tests pass, or are skipped where they need one."""
    session.install(*PINNED, "torch")  # first: a build without CUDA packages where there is one
    session.install(*PINNED, *NO_EXTRAS)
    refuse_cuda(session)
    session.run("python", "-c", _first_example("README.md"), silent=True)
    session.run("spingrad", "--help", silent=True)
    _test_without_extras(session)


@nox.session
def fpga(session: nox.Session) -> None:
    """QONNX files in hls4ml and FINN+; by hand ``nox -s fpga -- -m long`` for trained networks."""
    session.install(*PINNED_FPGA, "torch")  # first: a build without CUDA packages where there is one
    session.install(*PINNED_FPGA, *NO_EXTRAS, "safetensors", "hls4ml", "qonnx", *OF_FINN)
    # Without its requirements: one of them, Brevitas, needs an older setuptools than torch does.
    session.install(*PINNED_FPGA, "--no-deps", "finn-plus")
    refuse_cuda(session)
    chosen = session.posargs or ["-m", "slow", "-n2"]
    session.run("pytest", "tests/test_fpga.py", *chosen, env=ONE_THREAD)


@nox.session(python="3.11", default=False)
def minimum(session: nox.Session) -> None:
    """The oldest requirements that pyproject.toml allows. By hand: older torch brings CUDA packages."""
    session.install(*NO_EXTRAS, *(requirement.replace(">=", "==") for requirement in REQUIREMENTS))
    _test_without_extras(session)


@nox.session(python="3.11", default=False)
def newest(session: nox.Session) -> None:
    """The newest torch and other requirements. By hand: newer torch brings CUDA packages."""
    session.install("--upgrade", "torch", *NO_EXTRAS)
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    _test_without_extras(session)


def refuse_cuda(session: nox.Session) -> None:
    """Stop if CUDA packages were installed, unless ``SPINGRAD_ALLOW_CUDA`` is set."""
    found = session.run("python", "-c", LIST_CUDA, silent=True)
    if found.strip() and not os.environ.get("SPINGRAD_ALLOW_CUDA"):
        session.error(f"CUDA packages were installed: {found}")


def _run(session: nox.Session, module: str, *arguments: str) -> None:
    session.run(sys.executable, "-m", module, *arguments, env=ONE_THREAD)


def _test_without_extras(session: nox.Session) -> None:
    # No doctests of qpu, nor of modules that cannot be imported without an extra. The exact solver keeps its
    # contract without numba too, which takes minutes; its other tests run.
    exact = "tests/test_solvers.py::test_every_solver_keeps_the_contract[exact]"
    options = ["--doctest-ignore-import-errors", "--ignore=src/spingrad/qpu", f"--deselect={exact}"]
    session.run("pytest", *PYTEST, *options, *session.posargs, env=ONE_THREAD)


def _first_example(page: str) -> str:
    return re.findall(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)[0]


EXTRAS = (
    *("fast", "export", "qpu", "gurobi", "openjij", "plot"),
    *("graph", "onnx", "qonnx", "lightning", "ray"),
)
OWN_IMPORT = ("openjij", "lightning")  # which users import, not the library


@nox.session
@nox.parametrize("name", EXTRAS, ids=EXTRAS)
def extra(session: nox.Session, name: str) -> None:
    """One extra alone: what it is for works with it, and without it an error says what to install."""
    others = "[qpu]" if name == "plot" else ""  # it draws what the extra qpu has recorded
    session.install(*PINNED, "torch")  # first: a build without CUDA packages where there is one
    session.install(*PINNED, f".{others}")
    use = ("python", "tests/extras.py", name)
    error = session.run(*use, success_codes=[1], silent=True, env=ONE_THREAD).strip().splitlines()[-1]
    missing = f"No module named '{name}'" if name in OWN_IMPORT else f'pip install "spingrad[{name}]"'
    if missing not in error:
        session.error(f"without the extra, expected an error with {missing}, got: {error}")
    # Ray gives its processes 15 seconds to start: too few if a busy machine has to compile them first.
    session.install(*PINNED, f".[{name}]", env={"UV_COMPILE_BYTECODE": "1"} if name == "ray" else {})
    refuse_cuda(session)
    session.run(*use, silent=True, env=ONE_THREAD)
