"""Trains a binary network on MNIST and turns it into a C program without floating point.

    pip install ".[export]" ./lab
    python examples/to_microcontroller.py

Trains 784-128-10, writes digits.c and digits.h into a folder, compiles them with gcc for this machine and
classifies the test digits with the program. Takes about half a minute on one core.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, Sign, binary_parameters
from spingrad.export import pack, to_c
from spingrad_lab.data import mnist

MAIN = """\
#include <stdio.h>
#include "digits.h"

int main(void)
{
    static uint8_t image[DIGITS_INPUTS];
    while (fread(image, 1, DIGITS_INPUTS, stdin) == DIGITS_INPUTS)
        printf("%d\\n", digits_class(image));
    return 0;
}
"""


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = QPSBGD(binary_parameters(model), lr=1e-3)
    steps = epochs * -(-len(x) // 100)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch} of {epochs}: loss {total / len(x):.3f}", flush=True)
    model.eval()


def draw(image: Tensor) -> str:
    return "\n".join("".join(" .:*#"[int(pixel) // 52] * 2 for pixel in row) for row in image[4:24:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=60_000, help="number of training images")
    parser.add_argument("--out", type=Path, default=Path("digits"), help="folder for the C files")
    args = parser.parse_args()
    torch.manual_seed(0)

    data, test = mnist("train"), mnist("test")
    scale = 1 / 128  # with a power of two torch's sums are exact, so that even ties agree
    model = nn.Sequential(BinaryLinear(784, 128), Sign(), BinaryLinear(128, 10))
    train(model, data.images[: args.images].flatten(1) * scale, data.labels[: args.images], args.epochs)
    with torch.no_grad():
        in_torch = model(test.images.flatten(1) * scale).argmax(1)

    packed = pack(model, scale=scale)
    source = to_c(packed, "digits")
    source.save(args.out)
    (args.out / "main.c").write_text(MAIN)
    print(f"{args.out}/digits.c: {source.constants:,} bytes of flash for {packed.num_weights:,} weights, "
          f"{source.ram:,} bytes of RAM, code not included")  # fmt: skip

    if shutil.which("gcc") is None:
        sys.exit(
            f"gcc is not installed; compile {args.out}/main.c and {args.out}/digits.c with another compiler"
        )
    command = [
        "gcc",
        "-std=c99",
        "-Os",
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-o",
        "digits",
        "main.c",
        "digits.c",
    ]
    subprocess.run(command, cwd=args.out, check=True)
    raw = test.images.numpy().tobytes()
    answers = subprocess.run(
        [args.out.resolve() / "digits"], input=raw, capture_output=True, check=True
    ).stdout
    in_c = torch.tensor([int(line) for line in answers.split()])

    print(draw(test.images[0]))
    print(f"the program reads a {in_c[0]}, the label says {test.labels[0]}")
    right = [float((found == test.labels).float().mean()) for found in (in_c, in_torch)]
    print(f"{len(in_c):,} test images: accuracy {right[0]:.4f} in C, {right[1]:.4f} in torch; "
          f"different classes: {int((in_c != in_torch).sum())}")  # fmt: skip


if __name__ == "__main__":
    main()
