"""A Lightning module with two optimizers: QP-SBGD for the binary weights, Adam for all others.

    pip install ".[fast,lightning]" ./lab
    python examples/lightning_two_optimizers.py

With more than one optimizer Lightning asks for manual optimization; the training step below is all of it.
"""

import argparse
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from spingrad import QPSBGD, BinaryConv2d, BinaryLinear, binary_parameters, real_parameters
from spingrad_lab.data import Images, fashion_mnist


class Clothes(lightning.LightningModule):
    """A small convolutional network on Fashion-MNIST."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.lr = lr
        self.model = nn.Sequential(
            BinaryConv2d(1, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.Hardtanh(),
            BinaryConv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.Hardtanh(),
            nn.Flatten(),
            BinaryLinear(32 * 7 * 7, 10),
            nn.BatchNorm1d(10),
        )

    def configure_optimizers(self) -> Any:
        optimizers = [
            QPSBGD(binary_parameters(self), lr=self.lr),
            torch.optim.Adam(real_parameters(self), lr=3e-3),
        ]
        steps = int(self.trainer.estimated_stepping_batches)
        return optimizers, [CosineAnnealingLR(own, steps) for own in optimizers]

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        schedules: Any = self.lr_schedulers()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.log("loss", loss, prog_bar=True)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean(), prog_bar=True)


def loader(data: Images, count: int, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
    pixels = data.images[:count, None].float() / 127.5 - 1
    return DataLoader(TensorDataset(pixels, data.labels[:count]), batch_size=100, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000, help="train on the first N")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3, help="of the binary weights")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lightning.seed_everything(args.seed, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=args.epochs, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    train, test = fashion_mnist("train"), fashion_mnist("test")
    trainer.fit(Clothes(args.lr), loader(train, args.images, True), loader(test, 10_000, False))
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()
