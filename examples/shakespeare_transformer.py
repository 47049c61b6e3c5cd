"""A transformer on tiny Shakespeare, built of torch's own layers and made binary by one call.

    pip install ".[fast]" ./lab
    python examples/shakespeare_transformer.py             # 1,000 steps: some minutes on a laptop
    python examples/shakespeare_transformer.py --real      # the same network with real weights and AdamW

Attention and feed-forward layers are binary; embeddings, norms and the last layer stay real.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from spingrad import QPSBGD, binary_parameters, convert, real_parameters
from spingrad_lab.data import tiny_shakespeare

LENGTH = 64  # characters that the network looks back


class Transformer(nn.Module):
    """Predicts the next character at every place of a text."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.place = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        for table in (self.embedding, self.place):
            nn.init.normal_(table.weight, std=0.3)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text) + self.place(torch.arange(LENGTH, device=text.device))
        return self.head(self.encoder(x, self.mask, is_causal=True))  # type: ignore[no-any-return]


def batch(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - LENGTH, (count, 1), generator=generator)
    places = starts + torch.arange(LENGTH + 1)
    return text[places[:, :-1]], text[places[:, 1:]]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validated(model: nn.Module, text: Tensor, batches: int) -> float:
    model.eval()
    generator = torch.Generator().manual_seed(99)
    losses = [loss_of(model, *batch(text, 48, generator)).item() for _ in range(batches)]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3, help="of the binary weights")
    parser.add_argument("--real", action="store_true", help="real weights and AdamW, for comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test-batches", type=int, default=20)
    parser.add_argument("--every", type=int, default=100, help="steps between lines of output")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    text = tiny_shakespeare()
    codes = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([codes[character] for character in text])
    train, test = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]

    model = Transformer(len(codes), args.width, args.layers)
    if not args.real:
        convert(model, keep="last")  # new
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(real_parameters(model), lr=2e-3)  # was: model.parameters()
    ]
    if not args.real:
        optimizers.append(QPSBGD(binary_parameters(model), lr=args.lr))  # new

    def factor(step: int) -> float:  # a short warm-up, then a cosine down to 2 %
        return min(1, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / args.steps)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(own, factor) for own in optimizers]
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(1, args.steps + 1):
        loss = loss_of(model, *batch(train, 16, generator))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % args.every == 0 or step == args.steps:
            print(f"step {step}: validation loss {validated(model, test, args.test_batches):.4f}", flush=True)


if __name__ == "__main__":
    main()
