"""The eight nets of `python -m benchmarks.check_cost --nets`, with their faults.

Each factory returns a model in eval mode with the same weights in every process. `SAMPLES` makes
its samples; `FAULTS` changes the copy that is exported, so that the file is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Arrays = dict[str, NDArray[np.generic]]


def mlp() -> nn.Module:
    """Four linear layers with layer norms on 64 columns."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (64, 256, 256):
        layers += [nn.Linear(width, 256), nn.LayerNorm(256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)).eval()


def resnet() -> nn.Module:
    """resnet18 of torchvision."""
    import torchvision

    torch.manual_seed(0)
    return _settled(torchvision.models.resnet18(num_classes=10), torch.randn(8, 3, 96, 96))


def convnet() -> nn.Module:
    """Convolutions of 64 channels at full resolution."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 64, 64):
        layers += [nn.Conv2d(width, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    whole = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return _settled(whole, torch.randn(2, 3, 96, 96))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 128)
        self.places = nn.Parameter(torch.randn(64, 128) * 0.02)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.words(words) + self.places)
        return self.head(self.norm(hidden).mean(1))


def transformer() -> nn.Module:
    """Four encoder layers on 64 words."""
    torch.manual_seed(0)
    return _Transformer().eval()


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(32, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


def lstm() -> nn.Module:
    """Two LSTM layers on 100 steps."""
    torch.manual_seed(0)
    return _Lstm().eval()


class _Detector(nn.Module):
    """One stage: per cell a box and a score, all of them returned."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, out in ((3, 16), (16, 32), (32, 64), (64, 128)):
            conv = nn.Conv2d(width, out, 3, 2, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(out), nn.SiLU()]
        self.trunk = nn.Sequential(*layers)
        self.boxes = nn.Conv2d(128, 4, 1)
        self.scores = nn.Conv2d(128, 20, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        boxes = self.boxes(hidden).flatten(2).transpose(1, 2)
        return boxes, self.scores(hidden).flatten(2).transpose(1, 2).sigmoid()


def detector() -> nn.Module:
    """Boxes and scores of each cell of a picture of 160 x 160."""
    torch.manual_seed(0)
    return _settled(_Detector(), torch.randn(8, 3, 160, 160))


class _Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, out in ((1, 32), (32, 64), (64, 64), (64, 64)):
            layers += [nn.Conv1d(width, out, 9, 4, 4), nn.GroupNorm(8, out), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).transpose(1, 2))[..., 0]


def audio() -> nn.Module:
    """A pitch for each 256 of 16 000 values of a sound."""
    torch.manual_seed(0)
    return _Audio().eval()


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(5000, 256, mode="mean")
        self.norm = nn.LayerNorm(256)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.norm(self.words.weight[words].mean(1)))
        return hidden / hidden.norm(dim=-1, keepdim=True)


def embedding() -> nn.Module:
    """A unit vector for a text of 32 words."""
    torch.manual_seed(0)
    return _Embedding().eval()


def _settled(model: nn.Module, samples: torch.Tensor) -> nn.Module:
    """With statistics of its batch norms as after training."""
    with torch.no_grad():
        for _ in range(20):
            model.train()(samples)
    return model.eval()


@dataclass(frozen=True)
class Net:
    """A factory, and the samples that it takes."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Of one sample."""
    words: int = 0
    """Size of the vocabulary, where samples are integers."""
    samples: int = 64
    batch_size: int = 32

    def inputs(self) -> NDArray[np.generic]:
        """All samples, shape (samples, *shape)."""
        random, shape = np.random.default_rng(0), (self.samples, *self.shape)
        if self.words:
            return random.integers(0, self.words, shape)
        return random.normal(size=shape).astype(np.float32)


NETS = {
    "mlp": Net(mlp, (64,)),
    "resnet": Net(resnet, (3, 224, 224)),
    "convnet": Net(convnet, (3, 320, 320), samples=32, batch_size=8),
    "transformer": Net(transformer, (64,), words=1000),
    "lstm": Net(lstm, (100, 32)),
    "detector": Net(detector, (3, 160, 160)),
    "audio": Net(audio, (1, 16_000)),
    "embedding": Net(embedding, (32,), words=5000),
}


def _weights(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.dim() > 1 and "weight" in name]


def half_layer(model: nn.Module) -> bool:
    """Round one layer in the middle to float16."""
    weights = _weights(model)
    middle = weights[len(weights) // 2]
    middle.data = middle.data.half().float()
    return True


def perturbed(model: nn.Module) -> bool:
    """Perturb one weight tensor by 1e-4 of its values."""
    weights = _weights(model)
    middle = weights[len(weights) // 2]
    torch.manual_seed(1)
    middle.data = middle.data * (1.0 + 1e-4 * torch.randn_like(middle))
    return True


def wrong_epsilon(model: nn.Module) -> bool:
    """Give one normalization ten times its epsilon; False without any."""
    norms = [module for module in model.modules() if hasattr(module, "eps")]
    for norm in norms[len(norms) // 2 :][:1]:
        norm.eps *= 10.0
    return bool(norms)


FAULTS: dict[str, Callable[[nn.Module], bool]] = {
    "half_layer": half_layer,
    "perturbed": perturbed,
    "wrong_epsilon": wrong_epsilon,
}
