"""The lab's report as pages of the site: an overview, and a page for each of its chapters."""

import re
from os.path import dirname, join, normpath, relpath

REPORT = "lab/results/report.md"
FOLDER = "docs/report"
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([\w-]+))?\)")
TOCTREE = "\n```{{toctree}}\n:hidden:\n\n{}\n```\n"


def pages(report: str) -> dict[str, str]:
    """The text of each page by its path: the report up to its first chapter, then the chapters."""
    overview, *chapters = re.split(r"(?m)^(?=## )", report)
    texts = {f"{FOLDER}/{_slug(text)}.md": text for text in chapters}
    listed = "\n".join(relpath(path, dirname(REPORT)) for path in texts)
    anchors = places({REPORT: overview, **texts})
    return {
        REPORT: linked(overview + TOCTREE.format(listed), REPORT, anchors),
        **{path: linked(_chapter(text, path), path, anchors) for path, text in texts.items()},
    }


def places(texts: dict[str, str]) -> dict[str, str]:
    """The page of every anchor."""
    return {anchor: path for path, text in texts.items() for anchor in re.findall(r'<a id="([^"]+)"', text)}


def linked(text: str, page: str, anchors: dict[str, str]) -> str:
    """The text of a page, in which links to anchors of the report lead to the pages that have them."""

    def to_its_page(link: re.Match[str]) -> str:
        path, anchor = link.groups()
        target = normpath(join(dirname(page), path)) if path else page
        is_report = target == REPORT or target.startswith(f"{FOLDER}/")
        if not is_report or anchor not in anchors:
            return link[0]
        return f"]({relpath(anchors[anchor], dirname(page))}#{anchor})"

    return LINK.sub(to_its_page, text)


def _slug(chapter: str) -> str:
    return "-".join(re.findall(r"\w+", chapter.splitlines()[0].lower()))


def _chapter(text: str, page: str) -> str:
    """A chapter as a page of its own folder: higher headings, figures with captions, links from there."""

    def moved(link: re.Match[str]) -> str:
        path = link[1]
        if not path or "://" in path:
            return link[0]
        return link[0].replace(path, relpath(join(dirname(REPORT), path), dirname(page)), 1)

    raised = re.sub(r"(?m)^##", "#", text)
    return re.sub(r"(?m)^!\[(.+)\]\((\S+)\)$", r":::{figure} \2\n\1\n:::", LINK.sub(moved, raised))
