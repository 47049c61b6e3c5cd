"""Trains a binary network on spoken digits and turns it into C for a Cortex-M.

    pip install ".[export]" ./lab
    python examples/spoken_digits.py                    # some minutes on one core
    python examples/spoken_digits.py --speaker lucas    # another one of the six is never heard in training

The data are the Free Spoken Digit Dataset. A recording becomes 32 bands of 64 frames, one byte each: that is
what the network reads. Three 1-d convolutions and a linear layer, all of them with weights of one bit, are
trained on five people and tested on the sixth. The C is compiled for this machine and must give torch's class
for every recording. With arm-none-eabi-gcc and qemu-system-arm some recordings are classified on a simulated
Cortex-M3 too.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryConv1d, BinaryLinear, Sign, binary_parameters, real_parameters
from spingrad.export import chips, pack, to_c, verify
from spingrad_lab.data import spoken_digits
from spingrad_lab.tasks.networks import BANDS, spectra


def as_bytes(bands: Tensor) -> Tensor:
    """Each band without its mean over the recording: 128 is the mean, 32 a standard deviation."""
    centred = bands - bands.mean(2, keepdim=True)
    return (centred / bands.std((1, 2), keepdim=True) * 32 + 128).clamp(0, 255).round().to(torch.uint8)


def real(numbers: Tensor) -> Tensor:
    """What the torch network reads: whole 128ths, so that its sums are exact."""
    return numbers.float() / 128


def network(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, size in ((BANDS, 5), (channels, 5), (channels, 3)):
        layers += [BinaryConv1d(fan_in, channels, size, padding="same"), nn.BatchNorm1d(channels)]
        layers += [Sign(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.Flatten(), BinaryLinear(8 * channels, 10), nn.BatchNorm1d(10))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    reals = [value for _, value in real_parameters(model)]
    optimizers = [QPSBGD(binary_parameters(model), lr=3e-3), torch.optim.Adam(reals, lr=1e-2)]
    steps = epochs * -(-len(x) // 50)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, steps) for one in optimizers]
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(x)).split(50):
            later, higher = (int(torch.randint(-n, n + 1, ())) for n in (6, 2))  # frames and bands
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows].roll((higher, later), (1, 2))), y[rows])
            loss.backward()
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            total += loss.item() * len(rows)
        print(f"epoch {epoch} of {epochs}: loss {total / len(x):.3f}", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--speaker", default="theo", help="who is never heard in training")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--recordings", type=int, help="train on N of them only")
    parser.add_argument("--on-chip", type=int, default=20, help="recordings for the simulated Cortex-M3")
    parser.add_argument("--out", type=Path, default=Path("spoken"), help="folder of the C files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    bands, digits, _ = spectra()
    heard = torch.tensor([recording.speaker != args.speaker for recording in spoken_digits()])
    if heard.all():
        parser.error(f"--speaker: expected one of {sorted({r.speaker for r in spoken_digits()})}")
    x = as_bytes(bands)
    fit = heard.nonzero()[:, 0]
    fit = fit[torch.randperm(len(fit))[: args.recordings]]
    model = network(args.channels)
    train(model, real(x[fit]), digits[fit], args.epochs)
    test, labels = x[~heard], digits[~heard]
    with torch.no_grad():
        theirs = model(real(test)).argmax(1)
    print(f"torch: {(theirs == labels).float().mean():.3f} of {len(test)} recordings of {args.speaker}")

    packed = pack(model, (BANDS, x.shape[2]), scale=1 / 128)
    source = to_c(packed, "spoken")
    files = source.save(args.out)
    print(f"wrote {files[1]}: {source.constants:,} bytes of constants, {source.ram:,} bytes of RAM")
    if shutil.which("gcc"):
        ours = verify.from_c(packed, test.numpy()).classes
        print(f"the C program: {int((ours != theirs.numpy()).sum())} classes that differ from torch's")
    if not chips.CORTEX_M3.missing:
        some = torch.randperm(len(test))[: args.on_chip]
        ran = chips.run(chips.CORTEX_M3, packed, test[some].numpy())
        print(
            f"Cortex-M3 in qemu: {int((ran.classes != theirs[some].numpy()).sum())} of {len(some)} classes "
            f"differ; {int(np.median(ran.cost)):,} instructions per recording, {ran.flash:,} bytes of flash, "
            f"{ran.ram:,} bytes of RAM"
        )


if __name__ == "__main__":
    main()
