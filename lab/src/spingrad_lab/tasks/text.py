"""The next character of tiny Shakespeare, by a transformer of nanoGPT's size for a CPU."""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from spingrad import convert
from spingrad_lab.data import tiny_shakespeare
from spingrad_lab.tasks.training import Task

LENGTH = 64  # characters that the network looks back


@cache
def characters() -> tuple[Tensor, int]:
    """The text as numbers, and how many different characters it has."""
    text = tiny_shakespeare()
    codes = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([codes[character] for character in text]), len(codes)


class Transformer(nn.Module):
    """Predicts the next character at every place of a text."""

    mask: Tensor

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
        logits: Tensor = self.head(self.encoder(x, self.mask, is_causal=True))
        return logits


class Shakespeare(Task):
    """Four layers of width 128, attention and feed-forward layers binary; 12 texts of 64 characters a step.

    The last tenth of the text is the test set, as is custom. For tuning, the tenth before it is held out, and
    the network trains for half as many steps, unless a subclass says otherwise.
    """

    epochs, steps, batch = 1, 2_000, 12
    width, layers = 128, 4
    exact, encoder_lr = False, 2e-3

    def __init__(self, seed: int, tuning: bool, quick: bool) -> None:
        text, self.characters = characters()
        tenth = len(text) // 10
        self.train = text[: (8 if tuning else 9) * tenth]
        self.test = text[8 * tenth : 9 * tenth] if tuning else text[9 * tenth :]
        self.scored = 2 if quick else 40
        if tuning:
            self.steps = self.steps // 2
        if quick:
            self.steps, self.width, self.layers = 5, 32, 1

    def network(self) -> nn.Module:
        return convert(Transformer(self.characters, self.width, self.layers), keep="last")

    def batches(self) -> Iterator[Callable[[nn.Module], Tensor]]:
        for _ in range(self.steps):
            x, y = self._texts(self.train, self.batch)
            yield lambda model, x=x, y=y: _loss(model, x, y)  # type: ignore[misc]

    def scores(self, model: nn.Module) -> dict[str, float]:
        generator = torch.Generator().manual_seed(0)  # the same texts for every method and seed
        texts = [self._texts(self.test, 50, generator) for _ in range(self.scored)]
        return {"test_loss": sum(float(_loss(model, x, y)) for x, y in texts) / len(texts)}

    def _texts(
        self, text: Tensor, count: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - LENGTH, (count, 1), generator=generator)
        places = starts + torch.arange(LENGTH + 1)
        return text[places[:, :-1]], text[places[:, 1:]]


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
