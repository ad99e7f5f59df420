"""Small modules for the export tests: one correct module, and one for each possible fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gate.records.export import ExportSettings

SIDE = 6
CLASSES = 3
_DEFAULT_SETTINGS = {
    "lint": "off",  # these modules are faulty on purpose; tests/export/test_safety.py tests lint
    "strategy": "traced", "batch_size": 2, "input_names": ("input",), "output_names": ("logits",)
}  # fmt: skip


class Small(nn.Module):
    """Convolution, batch norm, linear: images (batch, 2, 6, 6) to logits (batch, 3)."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(width, CLASSES)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x)).relu().mean((2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(self.dropout(self.features(x)))


def seeded(kind: type[nn.Module] = Small, *, seed: int = 0) -> nn.Module:
    """Return a model with seeded weights and batch norm statistics that are not the identity."""
    torch.manual_seed(seed)
    model = kind()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    return model


def images(count: int = 5, *, seed: int = 1) -> dict[str, NDArray[Any]]:
    """Return `count` samples for `Small`."""
    rng = np.random.default_rng(seed)
    return {"input": rng.standard_normal((count, 2, SIDE, SIDE)).astype(np.float32)}


def settings(**overrides: Any) -> ExportSettings:
    """Return settings for tracing with a small batch."""
    return ExportSettings(**{**_DEFAULT_SETTINGS, **overrides})


class TwoInputs(nn.Module):
    """scale (batch, 4) and shift (batch, 4) have different effects, so that a swap changes the
    output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.fc(scale * 3 + shift)


class IgnoresSecond(TwoInputs):
    def forward(self, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return self.fc(scale)


class TwoOutputs(Small):
    def forward(self, x: torch.Tensor) -> Any:
        features = self.features(x)
        return self.fc(features), features


class DictOutput(Small):
    def forward(self, x: torch.Tensor) -> Any:
        features = self.features(x)
        return {"zzz": self.fc(features), "aaa": features}


class TextOutput(Small):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), "cat"


class BakedBatch(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(int(x.shape[0]), CLASSES)


class NotFinite(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 0.0


class Swap(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.swapaxes(x, 2, 3)


class Swapped(Small):
    """`swapaxes` in a traced submodule can't be exported; the exporter's own trace supports it."""

    def __init__(self) -> None:
        super().__init__()
        self.swap = Swap()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.swap(x))


class Attention(nn.Module):
    """Fused multi-head attention; needs opset 14. (batch, 5, 8) to (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.fc(mixed.mean(1))


class Unsupported(Small):
    """The exporter has no operator for eigenvalues."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.linalg.eigvals(x[:, 0]).real.sum()


class RandomBranch(Small):
    """Build a different graph on each call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        logits = super().forward(x)
        for _ in range(self.calls):
            logits = logits + 1
        return logits


class NoTrace(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise RuntimeError("not while tracing")
        return super().forward(x)


class DataBranch(Small):
    """Branch on data with a Python `if`: the tracer warns, and the file keeps one branch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        if logits.sum() > 1e9:
            logits = -logits
        return logits


class AlwaysDropout(Small):
    """Dropout that eval mode does not disable."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class Uncopyable(Small):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


class TiedWeights(nn.Module):
    """Two modules that share one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


class Masked(nn.Module):
    """A buffer with -inf that is valid: a causal attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) @ self.mask.softmax(-1)


def not_a_module() -> str:
    return "resnet18"


def on_meta() -> nn.Module:
    return Small().to("meta")


def needs_arguments(width: int) -> nn.Module:
    return Small(width)


def fails_inside() -> nn.Module:
    return Small({}["weights"])


def leaves() -> nn.Module:
    raise SystemExit(3)


class Holder:
    small = Small
    number = 3


READY = Small()
