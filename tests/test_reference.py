"""Every public name is on a page of the reference, with an example that runs."""

import doctest
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import spingrad

ROOT = Path(__file__).parents[1]
PAGES = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
MODULES = re.findall(r"\.\. automodule:: (\S+)", PAGES)
CLASSES = re.findall(r"\.\. autoclass:: (\S+)", PAGES)

pytestmark = pytest.mark.needs("dwave.system")  # which modules of the reference import


def exported(module: ModuleType) -> list[str]:
    """The names that a module lists in ``__all__``, or those that it defines."""
    own = [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


@cache
def on_a_page() -> set[str]:
    """Classes and functions of the reference, by the module that defines them and their name there."""
    values = [
        getattr(module, name) for module in map(importlib.import_module, MODULES) for name in exported(module)
    ]
    named = [value for value in values if inspect.isclass(value) or inspect.isfunction(value)]
    return {*CLASSES, *(f"{value.__module__}.{value.__qualname__}" for value in named)}


def with_an_example(module: str) -> set[str]:
    """The names in a module whose docstring has an example that doctest runs."""
    tests = doctest.DocTestFinder().find(importlib.import_module(module))
    return {test.name for test in tests if any(doctest.SKIP not in own.options for own in test.examples)}


def test_every_documented_name_has_an_example_that_runs():
    modules = {name.rpartition(".")[0] for name in on_a_page()}
    assert on_a_page() - set().union(*map(with_an_example, modules)) == set()


def test_every_name_that_the_package_exports_is_on_a_page():
    values = [getattr(spingrad, name) for name in spingrad.__all__]
    assert {f"{value.__module__}.{value.__qualname__}" for value in values} <= on_a_page()


def test_every_module_with_a_list_of_public_names_is_on_a_page():
    source = ROOT / "src"
    listing = [path for path in source.rglob("*.py") if "\n__all__ = " in path.read_text(encoding="utf-8")]
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__") for path in listing
    }
    assert modules - {"spingrad"} <= set(MODULES)
