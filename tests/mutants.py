"""Mutation testing: does a test fail when one place of the library is changed?

``nox -s mutants`` takes the lines where a silent error costs most, :data:`AREAS`. It changes one place of
them at a time in a copy of the checkout and runs the tests of their area. A mutant that fails no test has
survived. Finished mutants are kept: stop at any time, and the same command goes on.

``tests/mutants.md`` lists the survivors of the last run, each with the reason.
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
LIBRARY = Path("src/spingrad")
LEFT_OUT = (".git", ".venv*", ".nox", ".mypy_cache", ".ruff_cache", "__pycache__", "results")

# Imported once: each mutant's tests run in a fork of this process, which must not import spingrad itself.
IMPORTED = ["hypothesis", "torch._dynamo", "numba", "scipy.sparse.linalg", "dimod", "dwave.system", "pandas"]


class Area(NamedTuple):
    """Functions of a file (all, if none is named), and the test files that should notice a change."""

    file: str
    functions: str
    tests: tuple[str, ...]


AREAS = {
    "budget": Area(
        "qpu/journal.py",
        "is_open cost_us spent_us superfluous carry reserve wasted voided answered _added_us",
        ("tests/test_journal.py", "tests/test_qpu_faults.py"),
    ),
    "journal": Area(
        "qpu/journal.py",
        "_note _read _event _check _apply _answer _inflated _sum _create _check_kind",
        ("tests/test_journal.py", "tests/test_bounded_qpu.py"),
    ),
    "fold": Area(
        "export/rules.py",
        "",
        ("tests/test_export.py", "tests/test_rules.py"),
    ),
    "packing": Area("qpu/packing.py", "", ("tests/test_qpu.py",)),
    "targets": Area("scaling.py", "", ("tests/test_functional.py",)),
    "sketches": Area("sketch.py", "", ("tests/test_sketch.py",)),
    "descent": Area("solvers/block_descent.py", "", ("tests/test_solvers.py",)),
    "distributed": Area(
        "distributed/handshake.py",
        "facts_of names_of _as_text digest differ agree texts differences fingerprints _fingerprint",
        ("tests/test_distributed.py",),
    ),
}
# Survivors of the reviews: file, old text, new text, area. They are tried in every run.
REVIEWED = [
    ("qpu/journal.py", "not spent + cost_us <= self.budget_us", "not spent < self.budget_us", "budget"),
    ("qpu/journal.py", "if spent_us > self.spent_us:", "if True:", "budget"),
    ("qpu/journal.py", 'database.execute("PRAGMA synchronous = EXTRA")', "pass", "journal"),
    ("export/rules.py", " and not pads", "", "fold"),
    ("export/rules.py", "reach(stage) >= EXACT:", "reach(stage) > 2 * EXACT:", "fold"),
]
SWAPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


class Mutant(NamedTuple):
    """A change of one place: the bytes from ``start`` to ``end`` of a file become ``new``."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.start} {self.old!r} -> {self.new!r}"


def mutants(file: Path, source: str) -> list[Mutant]:
    """Every mutant of a file, without those of parts that decide nothing (:func:`_decides_nothing`)."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + column

    def change(node: ast.AST, start: int, end: int, new: str) -> Mutant:
        return Mutant(str(file), node.lineno, start, end, data[start:end].decode(), new)  # type: ignore[attr-defined]

    def operator(node: ast.AST, left: ast.expr, right: ast.expr, kind: ast.AST) -> Iterator[Mutant]:
        if type(kind) not in SWAPPED:
            return
        old, new = SWAPPED[type(kind)]
        begin = place(left.end_lineno or 0, left.end_col_offset or 0)
        found = data.find(old.encode(), begin, place(right.lineno, right.col_offset))
        if found >= 0:
            yield change(node, found, found + len(old), new)

    found: list[Mutant] = []
    for node in _code(ast.parse(source)):
        start = place(getattr(node, "lineno", 1), getattr(node, "col_offset", 0))
        end = place(getattr(node, "end_lineno", 1), getattr(node, "end_col_offset", 0))
        match node:
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                found += operator(node, left, right, kind)
            case ast.BinOp(left=left, op=kind, right=right) if not (_is_text(left) or _is_text(right)):
                found += operator(node, left, right, kind)
            case ast.BoolOp(op=kind, values=[left, right, *_]):
                found += operator(node, left, right, kind)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                found.append(change(node, start, place(operand.lineno, operand.col_offset), ""))
            case ast.Constant(value=bool() as value):
                found.append(change(node, start, end, str(not value)))
            case ast.Constant(value=int() as value):
                found.append(change(node, start, end, str(value + 1)))
            case ast.Constant(value=float() as value):
                found.append(change(node, start, end, str(2 * value or 1.0)))
            case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
                found.append(change(node, start, end, "pass"))
    return found


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a tree that decide what a program does."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _decides_nothing(child):
                yield from _code(child)


def _decides_nothing(node: ast.AST) -> bool:
    """Imports for type checkers, drawings, ``stacklevel``, and ``strict`` of ``zip``: it checks our code."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.keyword(arg="strict" | "stacklevel"):
            return True
        case ast.FunctionDef():
            types = [ast.dump(a.annotation) for a in node.args.args if a.annotation] + [
                ast.dump(node.returns) if node.returns else ""
            ]
            modules = [part.module or "" for part in ast.walk(node) if isinstance(part, ast.ImportFrom)]
            return any("Axes" in t or "Figure" in t for t in types) or any("matplotlib" in m for m in modules)
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def reviewed(root: Path) -> Iterator[tuple[str, Mutant]]:
    """The mutants of :data:`REVIEWED`, with their areas."""
    for part, old, new, area in REVIEWED:
        file = LIBRARY / part
        data = (root / file).read_bytes()
        start = data.index(old.encode())
        line = data[: start + len(old) - len(old.lstrip())].count(b"\n") + 1
        yield area, Mutant(str(file), line, start, start + len(old.encode()), old, new)


def outcome(mutant: Mutant, tests: tuple[str, ...], folder: Path, most_seconds: float) -> str:
    """``killed``, ``survived`` or ``too slow``: the tests did not end."""
    path = folder / mutant.file
    data = path.read_bytes()
    path.write_bytes(data[: mutant.start] + mutant.new.encode() + data[mutant.end :])
    try:
        code = _run(tests, folder, most_seconds)
    finally:
        path.write_bytes(data)
    return {0: "survived", -signal.SIGKILL: "too slow"}.get(code, "killed")


def _run(tests: tuple[str, ...], folder: Path, most_seconds: float) -> int:
    """The exit code of the tests, in a fork of this process."""
    if not (child := os.fork()):
        os.setsid()  # so that its own processes can be stopped with it
        os.chdir(folder)
        os.environ.update(_environment(folder))
        sys.path.insert(0, str(folder / "src"))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        # Plain asserts: pytest would rewrite those of hypothesis for every mutant, which takes seconds.
        os._exit(pytest.main(["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *tests]))
    alarm = threading.Timer(most_seconds, os.killpg, (child, signal.SIGKILL))
    alarm.start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    alarm.cancel()
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return code


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def choose(root: Path, count: int, seed: int, areas: list[str]) -> Iterator[tuple[str, Mutant]]:
    """``count`` mutants of each area, at random; the choice of a mutant depends on its own line only."""
    for area in areas:
        file = LIBRARY / AREAS[area].file
        source = (root / file).read_text()
        names = AREAS[area].functions.split()
        lines = {
            line
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and (node.name in names or not names)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)
        }
        drawn = sorted(draw for draw in _draws(file, source, seed) if draw[1].line in lines)
        yield from ((area, mutant) for _, mutant in drawn[:count])


def _draws(file: Path, source: str, seed: int) -> Iterator[tuple[str, Mutant]]:
    """Every mutant of a file, with a random number that depends on the seed, its line and its change."""
    lines, seen = source.splitlines(), Counter[str]()
    for mutant in mutants(file, source):
        text = f"{seed} {file} {lines[mutant.line - 1].strip()} {mutant.old!r} {mutant.new!r}"
        seen[text] += 1
        yield hashlib.sha256(f"{text} {seen[text]}".encode()).hexdigest(), mutant


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("mutants"), help="copy and results; %(default)s")
    parser.add_argument("--count", type=int, default=20, help="mutants of each area; %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--areas", nargs="+", default=list(AREAS), choices=AREAS, metavar="AREA")
    args = parser.parse_args()
    folder = args.folder.resolve()
    copy, clean, results = folder / "copy", folder / "clean", folder / "mutants.jsonl"
    if not clean.exists():
        shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT, folder.name))
        shutil.copytree(copy / LIBRARY, clean / LIBRARY)
    shutil.copytree(clean, copy, dirs_exist_ok=True)  # a run that was stopped may have left a mutant
    done = dict(map(json.loads, results.read_text().splitlines())) if results.exists() else {}
    for module in IMPORTED:
        importlib.import_module(module)
    pairs = [*reviewed(clean), *choose(clean, args.count, args.seed, args.areas)]
    chosen = [pair for pair in pairs if pair[0] in args.areas]
    for number, (area, mutant) in enumerate(chosen, 1):
        tests, key = AREAS[area].tests, f"{area}: {mutant.name}"
        if area not in done:  # the tests of the library as it is
            done[area] = outcome(mutant._replace(new=mutant.old), tests, copy, most_seconds=900)
            if done[area] != "survived":
                sys.exit(f"the tests of {area} fail without any change")
        if key not in done:
            done[key] = outcome(mutant, tests, copy, most_seconds=900)
            with results.open("a") as file:
                print(json.dumps([key, done[key]]), file=file)
            print(f"{number} of {len(chosen)}: {done[key]:9} {key}", flush=True)
    for area in args.areas:
        counts = Counter(done[f"{area}: {mutant.name}"] for own, mutant in chosen if own == area)
        print(f"{area}: " + ", ".join(f"{number} {what}" for what, number in counts.items()))


if __name__ == "__main__":
    main()
