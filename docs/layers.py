"""Draws the import contract of ``pyproject.toml``: a box for each module, imports point down."""

import tomllib
from pathlib import Path

ABOUT = {
    "cli": "the command",
    "testing": "contract of solvers, emulated QPU",
    "qpu": "D-Wave",
    "export": "bits, C, ONNX",
    "distributed": "many workers",
    "optim": "the optimizer",
    "solvers": "descent, exact, any sampler",
    "problem": "‖Z G‖² − 2⟨H, G⟩",
    "nn": "layers of −1 and +1",
    "sketch": "what a backward pass leaves",
}
WIDTH, TALL, GAP = 900, 34, 10
STYLE = """\
text { font: 13px Helvetica, Arial, sans-serif; text-anchor: middle; fill: #1f2933 }
.name { font-weight: bold } .about { font-size: 11px; fill: #52606d }
rect { fill: #e3f2fd; stroke: #0072b2; rx: 6px } .back { fill: #f7f9fb; stroke: none }
"""


def layers(pyproject: Path) -> list[list[str]]:
    """The modules of each layer, the highest first."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    listed = next(contract for contract in contracts if contract["id"] == "layers")["layers"]
    return [[name.strip("() ") for name in layer.split("|")] for layer in listed]


def drawn(found: list[list[str]]) -> str:
    """The layers as an SVG file."""
    height = GAP + len(found) * (TALL + GAP)
    label = "The modules of spingrad in layers; imports point down"
    view = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
        f"<style>\n{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
    ]
    for row, names in enumerate(found):
        y, wide = GAP + row * (TALL + GAP), (WIDTH - GAP) / len(names) - GAP
        for column, name in enumerate(names):
            x = GAP + column * (wide + GAP)
            parts.append(f'<rect x="{x:.0f}" y="{y}" width="{wide:.0f}" height="{TALL}"/>')
            about = ABOUT.get(name)
            middle = f'x="{x + wide / 2:.0f}"'
            parts.append(f'<text class="name" {middle} y="{y + (15 if about else 22)}">{name}</text>')
            if about:
                parts.append(f'<text class="about" {middle} y="{y + 29}">{about}</text>')
    return "\n".join([*parts, "</svg>", ""])
