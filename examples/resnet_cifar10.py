"""A residual network on CIFAR-10, an ordinary torch script but for its layers and its optimizer.

    pip install ".[fast]" ./lab
    python examples/resnet_cifar10.py                # 10,000 images, 10 epochs: some minutes on a laptop
    python examples/resnet_cifar10.py --real         # the same network with real weights and AdamW

The first and the last layer are real, as usual in binary networks. Lines that differ from an ordinary script
are marked.
"""

import argparse

import torch
from torch import Tensor, nn

from spingrad import QPSBGD, BinaryConv2d, binary_parameters, real_parameters
from spingrad_lab.data import Images, cifar10


class Block(nn.Module):
    """Two convolutions beside a shortcut, which averages and doubles the channels where the size halves."""

    def __init__(self, channels: int, out_channels: int, stride: int, real: bool) -> None:
        super().__init__()
        Conv2d = nn.Conv2d if real else BinaryConv2d
        self.first = Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.second = Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (channels, out_channels))
        self.stride, self.more = stride, out_channels - channels

    def forward(self, x: Tensor) -> Tensor:
        out = self.first(nn.functional.relu(self.norms[0](x)))
        out = self.second(nn.functional.relu(self.norms[1](out)))
        shortcut = nn.functional.avg_pool2d(x, self.stride) if self.stride > 1 else x
        return out + nn.functional.pad(shortcut, (0, 0, 0, 0, 0, self.more))  # type: ignore[no-any-return]


def network(width: int, real: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        Block(width, width, 1, real),
        Block(width, 2 * width, 2, real),
        Block(2 * width, 4 * width, 2, real),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def augmented(x: Tensor) -> Tensor:
    """Each image shifted by up to four pixels, half of them mirrored."""
    shift = torch.randint(9, (2,)).tolist()
    x = nn.functional.pad(x, (4, 4, 4, 4))[..., shift[0] : shift[0] + 32, shift[1] : shift[1] + 32]
    return torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)


def normalized(data: Images, count: int) -> tuple[Tensor, Tensor]:
    return (data.images[:count].float() / 255 - 0.47) / 0.25, data.labels[:count]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    found = torch.cat([model(part).argmax(1) for part in x.split(500)])
    model.train()
    return (found == y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000, help="train on the first N")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the binary weights")
    parser.add_argument("--real", action="store_true", help="real weights and AdamW, for comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-images", type=int, default=10_000)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    x, y = normalized(cifar10("train"), args.images)
    test_x, test_y = normalized(cifar10("test"), args.test_images)

    model = network(args.width, args.real)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(real_parameters(model), lr=3e-3)  # was: model.parameters()
    ]
    if not args.real:
        optimizers.append(QPSBGD(binary_parameters(model), lr=args.lr))  # new
    steps = args.epochs * -(-len(x) // 100)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(own, steps) for own in optimizers]
    for epoch in range(args.epochs):
        for rows in torch.randperm(len(x)).split(100):
            loss = nn.functional.cross_entropy(model(augmented(x[rows])), y[rows])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
        print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test_x, test_y):.4f}", flush=True)


if __name__ == "__main__":
    main()
