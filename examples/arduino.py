"""Trains a network of one-bit weights on MNIST and runs it on a simulated Arduino Uno.

    pip install ".[export]" ./lab
    apt-get install gcc-avr avr-libc simavr
    python examples/arduino.py

Trains 196-256-320-10 on digits whose pixels are averaged in squares of 2 x 2, writes an Arduino library into
a folder, compares the C program on this machine with torch on all 10,000 test images, and classifies some
of them on an ATmega328P in simavr. Takes a few minutes on one core. Without avr-gcc and simavr it stops
after the comparison on this machine, for which it needs gcc.
"""

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryLinear, Sign, binary_parameters
from spingrad.export import chips, pack, verify
from spingrad.export.arduino import to_arduino
from spingrad_lab.data import mnist

SCALE = 1 / 64  # a power of two: torch's sums are then exact, so that even ties agree


def network() -> nn.Sequential:
    """196-256-320-10 with sign activations; the first layer reads averages of pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.AvgPool2d(2),
        nn.Flatten(),
        BinaryLinear(196, 256),
        Sign(),
        BinaryLinear(256, 320),
        Sign(),
        BinaryLinear(320, 10),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    optimizer = QPSBGD(binary_parameters(model), lr=1e-3)
    steps = epochs * -(-len(x) // 100)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch] * SCALE), y[batch])
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
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--images", type=int, default=60_000, help="number of training images")
    parser.add_argument("--on-chip", type=int, default=200, help="number of test images in simavr")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("digits"), help="folder for the Arduino library")
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    data, test = mnist("train"), mnist("test")
    model = network()
    train(model, data.images[: args.images].flatten(1).float(), data.labels[: args.images], args.epochs)
    with torch.no_grad():
        in_torch = model(test.images.flatten(1) * SCALE).argmax(1).numpy()

    packed = pack(model, scale=SCALE)
    packed.save(args.out.with_suffix(".safetensors"))
    x = test.images.flatten(1).numpy()
    library = to_arduino(packed, "digits", x[0])
    library.save(args.out)
    print(f"{args.out}: an Arduino library of {packed.num_weights:,} weights")
    print(draw(test.images[0]))
    if shutil.which("gcc") is None:
        sys.exit(f"gcc is not installed; open {args.out} in the Arduino IDE")
    in_c = verify.from_c(packed, x).classes
    accuracy = [float((found == test.labels.numpy()).mean()) for found in (in_c, in_torch)]
    print(f"{len(x):,} test images: accuracy {accuracy[0]:.4f} in C, {accuracy[1]:.4f} in torch; "
          f"different classes: {int((in_c != in_torch).sum())}")  # fmt: skip
    if chips.UNO.missing:
        sys.exit(
            f"{' and '.join(chips.UNO.missing)} not installed; try apt-get install gcc-avr avr-libc simavr"
        )
    ran = chips.run(chips.UNO, packed, x[: args.on_chip])
    different = int((ran.classes != in_torch[: args.on_chip]).sum())
    cycles = int(np.median(ran.cost))
    print(f"the chip reads a {ran.classes[0]}, the label says {test.labels[0]}")
    print(f"{args.on_chip} images in simavr: different classes: {different}; {cycles:,} cycles "
          f"({cycles / 16_000:.1f} ms at 16 MHz) per image")  # fmt: skip
    print(
        f"{ran.flash:,} of {chips.UNO.flash:,} bytes of flash, {ran.ram:,} of {chips.UNO.ram:,} bytes of RAM"
    )


if __name__ == "__main__":
    main()
