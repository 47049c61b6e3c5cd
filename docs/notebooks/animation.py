"""Draws ``solve.gif``: spins and residual of one layer while a solver sets one spin after the other.

python docs/notebooks/animation.py      # needs matplotlib and pillow
"""

from pathlib import Path

import matplotlib as mpl
import torch

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.animation import FuncAnimation, PillowWriter

from spingrad import BinaryQuadratic

INPUTS, UNITS, ROWS, EVERY = 64, 48, 16, 2


def frames() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Spins (0 where none is set yet) and residual, after every second spin of two sweeps."""
    generator = torch.Generator().manual_seed(0)
    Z, V = torch.randn(ROWS, INPUTS, generator=generator), 6 * torch.randn(ROWS, UNITS, generator=generator)
    problem = BinaryQuadratic.least_squares(Z, V)
    G, U, found = torch.zeros(INPUTS, UNITS), torch.zeros(ROWS, UNITS), [(torch.zeros(INPUTS, UNITS), V)]
    for visit in range(2 * INPUTS):
        i = visit % INPUTS
        others = U - Z[:, i, None] * G[i]  # what the other spins give
        U -= Z[:, i, None] * G[i]
        G[i] = torch.where(problem.H[i] - Z[:, i] @ others >= 0, 1.0, -1.0)
        U += Z[:, i, None] * G[i]
        if visit % EVERY == EVERY - 1:
            found.append((G.clone(), V - U))
    return found


def main() -> None:
    shown = frames()
    start = float(shown[0][1].square().sum())
    shares = [float(residual.square().sum()) / start for _, residual in shown]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(8, 2.9), dpi=80, layout="constrained")
    spins = left.imshow(shown[0][0], cmap="gray", vmin=-1, vmax=1, aspect="auto")
    left.set(title="spins", xlabel="unit", ylabel="input", xticks=[], yticks=[])
    rest = middle.imshow(shown[0][1], cmap="RdBu_r", vmin=-15, vmax=15, aspect="auto")
    middle.set(title="what is left of the target", xlabel="unit", ylabel="row", xticks=[], yticks=[])
    (curve,) = right.plot([], [], color="#D55E00")
    right.set(
        title="its energy, as a share", xlabel="spins set", xlim=(0, 2 * INPUTS), ylim=(0, max(shares) * 1.05)
    )
    right.axvline(INPUTS, color="#777777", linewidth=0.8, linestyle=":")
    right.text(INPUTS + 2, 0.9 * max(shares), "second sweep", fontsize=8, color="#777777")

    def draw(frame: int) -> tuple[()]:
        frame = min(frame, len(shown) - 1)
        spins.set_data(shown[frame][0])
        rest.set_data(shown[frame][1])
        curve.set_data([EVERY * place for place in range(frame + 1)], shares[: frame + 1])
        return ()

    animation = FuncAnimation(figure, draw, frames=len(shown) + 12, blit=False)
    animation.save(Path(__file__).with_name("solve.gif"), writer=PillowWriter(fps=10))


if __name__ == "__main__":
    main()
