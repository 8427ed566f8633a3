"""The models of models.py in PyTorch: the same layers and sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.step_time.models import (
    CLASSES,
    DENSE,
    DEPTH,
    HEADS,
    LENGTH,
    PATCH,
    ROWS,
    TABLES,
    VECTOR,
    WIDTH,
    WORDS,
)


class Bottleneck(nn.Module):
    """arXiv:1512.03385, with the stride at the first convolution, as Keras has it."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()

        def block(before: int, after: int, size: int, step: int) -> list[nn.Module]:
            return [nn.Conv2d(before, after, size, step, size // 2), nn.BatchNorm2d(after)]

        self.path = nn.Sequential(
            *block(given, width, 1, stride),
            nn.ReLU(),
            *block(width, width, 3, 1),
            nn.ReLU(),
            *block(width, 4 * width, 1, 1),
        )
        same = stride == 1 and given == 4 * width
        self.short = nn.Identity() if same else nn.Sequential(*block(given, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.path(x) + self.short(x))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    given = 64
    for number, count in enumerate((3, 4, 6, 3)):
        width = 64 << number
        for i in range(count):
            layers.append(Bottleneck(given, width, 2 if number and not i else 1))
            given = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 10))


class Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, places, _ = x.shape
        heads = self.into(self.before(x)).view(rows, places, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).reshape(rows, places, WIDTH))
        return x + self.wide(self.between(x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(True) for _ in range(DEPTH)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.blocks(self.words(tokens) + self.places(places))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(False) for _ in range(DEPTH)), nn.LayerNorm(WIDTH))
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor, places: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return self.last(self.blocks(patches + self.places(places)).mean(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.last = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.lstm(self.words(tokens))[0])


class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, VECTOR, sparse=True) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, VECTOR), nn.ReLU())
        given = VECTOR + (TABLES + 1) ** 2
        self.top = nn.Sequential(nn.Linear(given, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        stacked = torch.stack([bottom, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        return self.top(torch.cat([bottom, (stacked @ stacked.transpose(1, 2)).flatten(1)], 1))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, CLASSES))


MODELS = {"resnet50": resnet50, "gpt": Gpt, "vit": Vit, "lstm": Lstm, "dlrm": Dlrm, "fc": wide}
