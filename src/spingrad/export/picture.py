"""A picture of a network's memory on a chip: which buffer is where, and when."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from spingrad.export.plan import Buffer

WIDTH, HEIGHT = 640, 300  # of the area with the buffers, in pixels
LEFT, TOP, BOTTOM, RIGHT = 70, 34, 52, 14
LINE = 15  # height of a line of text
_STYLE = """\
text { font: 12px sans-serif; fill: #333 } .end { text-anchor: end }
.free { fill: #8882 } .axis { stroke: #888 } .step { font-size: 9px; text-anchor: middle }
.buffer { fill: #4a7fb5; stroke: #fff } .name { fill: #fff; text-anchor: middle }
@media (prefers-color-scheme: dark) { .end, .step, .title { fill: #ccc } .buffer { stroke: #222 } }
"""


def memory_picture(
    title: str, memory: Sequence[tuple[Buffer, int]], size: int, steps: Sequence[Sequence[str]]
) -> str:
    """The buffers of a network over the steps of its computation, as an SVG file.

    Args:
        title: Stands above the picture.
        memory: Buffers and the offset of each.
        size: Bytes in all.
        steps: What each step computes, one line for each part of it.
    """
    wide, tall = WIDTH / len(steps), HEIGHT / max(size, 1)
    parts = [
        f'<rect class="free" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
        f'<text class="title" x="{LEFT}" y="20">{escape(title)}</text>',
        f'<text class="end" x="{LEFT - 8}" y="{TOP + 10}">{size:,} B</text>',
        f'<text class="end" x="{LEFT - 8}" y="{TOP + HEIGHT}">0</text>',
    ]
    for buffer, offset in memory:
        x, y = LEFT + buffer.start * wide, TOP + HEIGHT - (offset + buffer.size) * tall
        width, height = (min(buffer.end + 1, len(steps)) - buffer.start) * wide, buffer.size * tall
        label = f"{buffer.name}, {buffer.size:,} B"
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="buffer" {box}><title>{escape(label)}</title></rect>')
        if height >= LINE and width >= 7 * len(label):
            parts += _lines([label], x + width / 2, y + height / 2 + 4, "name")
        elif height >= 2 * LINE and width >= 7 * len(buffer.name):
            parts += _lines(label.split(", "), x + width / 2, y + height / 2 - 4, "name")
    floor = TOP + HEIGHT
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{floor}" x2="{LEFT + WIDTH}" y2="{floor}"/>')
    for number, step in enumerate(steps):
        parts += _lines(step, LEFT + (number + 0.5) * wide, floor + LINE, "step")
    view = f"0 0 {LEFT + WIDTH + RIGHT} {TOP + HEIGHT + BOTTOM}"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img">'
    return "\n".join([start, f"<style>\n{_STYLE}</style>", *parts, "</svg>", ""])


def _lines(texts: Sequence[str], x: float, y: float, kind: str) -> list[str]:
    return [
        f'<text class="{kind}" x="{x:.1f}" y="{y + LINE * line:.1f}">{escape(text)}</text>'
        for line, text in enumerate(texts)
    ]
