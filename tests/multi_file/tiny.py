"""A detector of two files, and a chain with code between encoder and head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(4, 3)


class ChannelsLast(nn.Module):
    """The wrapped module with a channels-last output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).permute(0, 2, 3, 1)


def run(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, torch.Tensor]) -> Any:
    voxels = parts["encoder"](batch["input"])
    return {"boxes": parts["head"](voxels.mean(dim=(2, 3))), "peak": voxels.amax(dim=(1, 2, 3))}


def run_by_keyword(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, Any]) -> Any:
    low, high = parts["split"](batch["input"])
    return {"fused": parts["fuse"](right=high, left=low), "mean": low.mean()}


class Split(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clamp(max=0.0), x.clamp(min=0.0) * 3


class Fuse(nn.Module):
    """A module with two inputs of the same shape, which a call can exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.left(left) - 2 * self.right(right)


def split_and_fuse() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"split": Split(), "fuse": Fuse()}).eval()


class Masked(nn.Module):
    """A module with a mask that is the same for all samples."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x @ mask


def masked() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"stem": nn.Linear(4, 4), "masked": Masked()}).eval()


def run_masked(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, Any]) -> Any:
    return parts["masked"](parts["stem"](batch["input"]), torch.eye(4) * 2)


class Rectified(nn.Module):
    """A module that changes its input in place."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.act = inner, nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.act(x))


def build_rectified() -> nn.Module:
    model = Detector()
    model.head = Rectified(model.head)  # type: ignore[assignment]
    return model.eval()


def run_and_keep(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, Any]) -> Any:
    """Return the head's input, which the head changed in place."""
    pooled = parts["encoder"](batch["input"]).mean(dim=(2, 3)) - 0.2
    boxes = parts["head"](pooled)
    return {"boxes": boxes, "pooled": pooled}


def run_on_a_copy(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, Any]) -> Any:
    pooled = parts["encoder"](batch["input"]).mean(dim=(2, 3)) - 0.2
    boxes = parts["head"](pooled.clone())
    return {"boxes": boxes, "pooled": pooled}


def run_by_kind(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, Any]) -> Any:
    """Compute another result with files than with modules."""
    voxels = parts["encoder"](batch["input"]).mean(dim=(2, 3))
    scale = 1.0 if isinstance(parts["head"], nn.Module) else 1.1
    return {"boxes": parts["head"](voxels) * scale}


def runs_head_twice(parts: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> Any:
    voxels = parts["encoder"](batch["input"]).mean(dim=(2, 3))
    return parts["head"](voxels), parts["again"](voxels * 100)


class Scaled(nn.Module):
    """A module that accepts any dtype and has an attribute; its file does neither."""

    scale = 1.0

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.float())


def run_in_double(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, Any]) -> Any:
    return parts["head"](parts["encoder"](batch["input"]).mean(dim=(2, 3)).double())


def run_with_attributes(parts: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    voxels = parts["encoder"](batch["input"]).mean(dim=(2, 3))
    return parts["head"](voxels) * parts["head"].scale


def build_scaled() -> nn.Module:
    model = Detector()
    model.head = Scaled(model.head)  # type: ignore[assignment]
    return model.eval()


def build() -> nn.Module:
    return Detector().eval()


def never_calls_head(parts: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> Any:
    return parts["encoder"](batch["input"])


def breaks(parts: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> Any:
    return parts["encoder"](batch["image"])


def export(module: nn.Module, path: Path, *, shape: tuple[int, ...], name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.zeros(2, *shape),), str(path), dynamo=False, input_names=["x"],
            output_names=[name], dynamic_axes={"x": {0: "n"}, name: {0: "n"}},
        )  # fmt: skip


def write_release(folder: Path, **files: str) -> Path:
    """Write the release file with these files by part."""
    lines = [f"  {name}: {{file: {file}}}" for name, file in files.items()]
    path = folder / "release.yaml"
    path.write_text("\n".join(["chain: tests.multi_file.tiny:run", "parts:", *lines, ""]))
    return path


def export_files(folder: Path) -> None:
    """Export the parts, a changed head, an encoder with another layout, and samples."""
    model = build()
    assert isinstance(model, Detector)
    export(model.encoder, folder / "encoder.onnx", shape=(2, 5, 5), name="voxels")
    export(model.head, folder / "head.onnx", shape=(4,), name="boxes")
    with torch.no_grad():
        model.head.weight[0] *= 1.01
    export(model.head, folder / "yesterday.onnx", shape=(4,), name="boxes")

    export(ChannelsLast(model.encoder), folder / "turned.onnx", shape=(2, 5, 5), name="voxels")
    rows = np.random.default_rng(0).normal(size=(24, 2, 5, 5)).astype(np.float32)
    np.save(folder / "x.npy", rows)


class NearTies(nn.Module):
    """Features whose argmax changes with rounding, and logits that depend on their sum only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(6, 4), nn.Linear(4, 3)
        with torch.no_grad():
            noise = 1e-3 * torch.randn(4, 6)
            self.encoder.weight.copy_(self.encoder.weight[:1] + noise)
            self.encoder.bias.zero_()
            self.head.weight.copy_(torch.tensor([[8.0], [-8.0], [0.0]]).expand(3, 4))
            self.head.bias.copy_(torch.tensor([0.0, 0.0, -1.0]))


def runs_two(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, torch.Tensor]) -> Any:
    return {"logits": parts["head"](parts["encoder"](batch["input"]))}


def near_ties() -> nn.Module:
    return NearTies().eval()
