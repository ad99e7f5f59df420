"""Modules that can't be exported, one for each frequent cause."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.export.custom_example import ShiftedSwish


class Eigenvalues(nn.Module):
    """No exporter supports eigenvalues. Input (batch, 4, 4), as for all modules here. tanh keeps
    the values finite: LAPACK crashes on NaN and infinity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.linalg.eigvals(x).real.sum().tanh()


class GridSample(nn.Module):
    """The TorchScript-based exporter supports grid_sample since opset 16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grid = torch.zeros(x.shape[0], 4, 4, 2)
        return nn.functional.grid_sample(x[:, None], grid, align_corners=False)[:, 0]


class Attention(nn.Module):
    """Fused attention if torch may use its fast path; otherwise supported since opset 14."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mix(x, x, x, need_weights=False)[0]
        return mixed


class Antialias(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x[:, None], (3, 3), mode="bilinear", antialias=True)


class Fourier(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft2(x).abs()


class UnevenPool(nn.Module):
    """Pool 4 into 3 cells. The operator is supported, but not for this output size."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x[:, None], (3, 3))


class Median(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.median(-1)[0]


class DictInput(nn.Module):
    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return x["image"] * 2


class TextInput(nn.Module):
    def forward(self, x: torch.Tensor, mode: Any) -> torch.Tensor:
        return x * 2 if mode == "double" else x


class DictOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"double": x * 2}


class TextOutput(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, "cat"


class Branch(nn.Module):
    """Branch on data with a Python `if`, which torch.export rejects."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x + 1
        return x - 1


class NormBranch(nn.Module):
    """Branch on `x.norm()`, which the exporter of scripted modules cannot write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.norm() > 1.0:
            x = x / x.norm()
        return x


class SortedByLambda(nn.Module):
    """Sort with a lambda, which TorchScript does not support."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sorted(x, key=lambda row: float(row.sum()))[0]


class LoopedEigenvalues(nn.Module):
    """A scripted module with the operator in a branch inside a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(x.shape[0]):
            if bool(x.sum() > 0):
                x = x + torch.linalg.eigvals(x).real.sum().tanh()
        return x


class WithoutFake(nn.Module):
    """A custom operator without the fake implementation that torch.export needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.parity_gate_tests.without_fake(x)


class Several(nn.Module):
    """Several unsupported operators in several submodules, lists and sequences."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.left = nn.ModuleList([nn.Sequential(nn.ReLU(), Eigenvalues()) for _ in range(blocks)])
        self.right = nn.ModuleDict({"odd": ShiftedSwish(), "even": nn.Sequential(Eigenvalues())})
        self.head = GridSample()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.left:
            x = block(x)
        for block in self.right.values():
            x = block(x)
        return self.head(x)


@torch.library.custom_op("parity_gate_tests::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def register_without_lowering(symbolics: Any) -> None:
    """Register a symbolic function that writes an operator without an implementation in any
    runtime."""

    def write(g: Any, x: Any, shift: Any) -> Any:
        return g.op("mydomain::ShiftedSwish", x, shift).setType(x.type())

    symbolics.legacy("example::shifted_swish", write)
