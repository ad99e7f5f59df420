"""The eight nets of `python -m benchmarks.check_cost --nets`, and their faults.

Each factory returns a model in eval mode with the same weights in every process. `NETS` also
describes the samples. `FAULTS` modifies the model before the export, so that the file is wrong.
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
    """Build a perceptron of four linear layers with layer norms for 64 columns."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (64, 256, 256):
        layers += [nn.Linear(width, 256), nn.LayerNorm(256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)).eval()


def resnet() -> nn.Module:
    """Build torchvision's resnet18."""
    import torchvision

    torch.manual_seed(0)
    return _calibrate_batch_norm(
        torchvision.models.resnet18(num_classes=10), torch.randn(8, 3, 96, 96)
    )


def convnet() -> nn.Module:
    """Build a network of 64-channel convolutions at full resolution."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 64, 64):
        layers += [nn.Conv2d(width, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return _calibrate_batch_norm(model, torch.randn(2, 3, 96, 96))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        self.positions = nn.Parameter(torch.randn(64, 128) * 0.02)
        layer = nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.tokens(tokens) + self.positions)
        return self.head(self.norm(hidden).mean(1))


def transformer() -> nn.Module:
    """Build a transformer of four encoder layers for 64 tokens."""
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
    """Build a network of two LSTM layers for 100 time steps."""
    torch.manual_seed(0)
    return _Lstm().eval()


class _Detector(nn.Module):
    """A one-stage detector that returns a box and the class scores of every grid cell."""

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
    """Build a detector for images of 160 x 160 pixels."""
    torch.manual_seed(0)
    return _calibrate_batch_norm(_Detector(), torch.randn(8, 3, 160, 160))


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
    """Build a network that predicts a pitch for each 256 of 16 000 audio samples."""
    torch.manual_seed(0)
    return _Audio().eval()


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.EmbeddingBag(5000, 256, mode="mean")
        self.norm = nn.LayerNorm(256)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.norm(self.tokens.weight[tokens].mean(1)))
        return hidden / hidden.norm(dim=-1, keepdim=True)


def embedding() -> nn.Module:
    """Build a network that returns a unit vector for a text of 32 tokens."""
    torch.manual_seed(0)
    return _Embedding().eval()


def _calibrate_batch_norm(model: nn.Module, samples: torch.Tensor) -> nn.Module:
    """Update the BatchNorm statistics on `samples` and return the model in eval mode."""
    with torch.no_grad():
        for _ in range(20):
            model.train()(samples)
    return model.eval()


@dataclass(frozen=True)
class Net:
    """A model factory and the description of its samples."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of one sample."""
    vocabulary: int = 0
    """Size of the vocabulary if samples are integers, else 0."""
    samples: int = 64
    batch_size: int = 32

    def inputs(self) -> NDArray[np.generic]:
        """Return all samples, shape (samples, *shape)."""
        random, shape = np.random.default_rng(0), (self.samples, *self.shape)
        if self.vocabulary:
            return random.integers(0, self.vocabulary, shape)
        return random.normal(size=shape).astype(np.float32)


NETS = {
    "mlp": Net(mlp, (64,)),
    "resnet": Net(resnet, (3, 224, 224)),
    "convnet": Net(convnet, (3, 320, 320), samples=32, batch_size=8),
    "transformer": Net(transformer, (64,), vocabulary=1000),
    "lstm": Net(lstm, (100, 32)),
    "detector": Net(detector, (3, 160, 160)),
    "audio": Net(audio, (1, 16_000)),
    "embedding": Net(embedding, (32,), vocabulary=5000),
}


def _weight_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.dim() > 1 and "weight" in name]


def round_layer_to_float16(model: nn.Module) -> bool:
    """Round the weights of a layer in the middle to float16."""
    weights = _weight_parameters(model)
    middle = weights[len(weights) // 2]
    middle.data = middle.data.half().float()
    return True


def perturb_weight(model: nn.Module) -> bool:
    """Perturb one weight tensor by a relative error of 1e-4."""
    weights = _weight_parameters(model)
    middle = weights[len(weights) // 2]
    torch.manual_seed(1)
    middle.data = middle.data * (1.0 + 1e-4 * torch.randn_like(middle))
    return True


def enlarge_epsilon(model: nn.Module) -> bool:
    """Multiply the epsilon of one normalization by ten; return False if the net has none."""
    norms = [module for module in model.modules() if hasattr(module, "eps")]
    for norm in norms[len(norms) // 2 :][:1]:
        norm.eps *= 10.0
    return bool(norms)


FAULTS: dict[str, Callable[[nn.Module], bool]] = {
    "half_layer": round_layer_to_float16,
    "perturbed": perturb_weight,
    "wrong_epsilon": enlarge_epsilon,
}
