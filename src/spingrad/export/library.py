"""The C files: what stands in them, and which of their functions a network needs."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_INCLUDED = re.compile(r'((?:^#define (?:T|TABLE) \w+\n)*)^#include "(\w+\.c)"\n', re.MULTILINE)
_NAME = re.compile(r"(\w+)\(")


class Function(NamedTuple):
    """A function of ``library.c``: its text, with the comment above it, and the other ones that it calls."""

    text: str
    calls: tuple[str, ...]


def source(name: str) -> str:
    """The text of a file in ``sources``."""
    return files("spingrad.export").joinpath("sources", name).read_text(encoding="utf-8")


def filled(text: str, fields: Mapping[str, object]) -> str:
    """A file of C with values in the places that it marks.

    A word with a comment ``/*@name*/`` behind it is replaced together with the comment, and so is
    everything from ``/* @name: … */`` to ``/* @end */``; in other comments and in texts, ``@name@``.

    Example:
        >>> filled("/* @title@ */ int x = 3 /*@count*/;", {"title": "A test", "count": 7})
        '/* A test */ int x = 7;'
    """
    for name, value in fields.items():
        block = rf"[ ]*/\* @{name}:[^*]*\*/\n.*?/\* @end \*/\n"
        literal = str(value).replace("\\", r"\\")
        text = re.sub(rf"\*?\w+ /\*@{name}\*/", literal, text)
        text = re.sub(block, literal, text, flags=re.DOTALL)
        text = text.replace(f"@{name}@", str(value))
    return text


def named(text: str, name: str) -> str:
    """A file of C for a network of this name: ``network_scores`` becomes ``name_scores``."""
    text = re.sub(r"\bNETWORK_", f"{name.upper()}_", text)
    return re.sub(r"\bnetwork(?=_\w|\.[ch]\b)", name, text)


def needed(used: Iterable[str]) -> str:
    """The functions of these names and all that they call, in the order of the file."""
    known, found, waiting = functions(), set(), list(used)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += known[name].calls
    return "".join(f"{function.text}\n\n" for name, function in known.items() if name in found)


@cache
def functions() -> dict[str, Function]:
    """All functions of ``library.c`` by their names, in its order."""
    texts = dict(_texts())
    return {
        name: Function(
            text, tuple(other for other in _NAME.findall(text) if other in texts and other != name)
        )
        for name, text in texts.items()
    }


def types() -> str:
    """The types and macros that all functions need: ``types.h`` without its guard."""
    return source("types.h").split("\n", 3)[3].rpartition("\n#endif")[0]


def _texts() -> Iterator[tuple[str, str]]:
    """Name and text of every function; those of a file that is included once per type, for that type."""
    text = source("library.c")
    for defined, included in _INCLUDED.findall(text):
        words = dict(re.findall(r"^#define (\w+) (\w+)$", defined, re.MULTILINE))
        yield from _paragraphs(_instance(source(included), words))
    yield from _paragraphs(text)


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """A function is what stands between two blank lines."""
    for paragraph in text.split("\n\n"):
        if found := re.search(r"^(?:static|INLINE) .*?(\w+)\(", paragraph, re.MULTILINE):
            yield found[1], paragraph.strip("\n")


def _instance(text: str, words: Mapping[str, str]) -> str:
    """A file that is included once per type, for the types of its macros."""
    text = re.sub(r"\bNAMED\((\w+)\)", rf"\1_{words['T']}", text)
    text = text.replace("SUM(", f"sum_{words['T']}_in_{words.get('TABLE')}(")
    return re.sub(r"\b(T|TABLE)\b", lambda word: words[word[0]], text)
