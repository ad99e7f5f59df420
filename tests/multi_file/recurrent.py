"""An encoder and a GRU with its state: the batch axis is 0 for one input and 1 for the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

B0, B1 = {0: "batch"}, {1: "batch"}


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, features: torch.Tensor, h0: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, h = self.gru(features, h0)
        return self.head(y[:, -1]), h


class Graph(nn.Module):
    """A layer that adds messages along the edges of one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 3)

    def forward(self, nodes: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        is_target = edge_index[1][None] == torch.arange(nodes.shape[0])[:, None]
        return self.second(nodes + is_target.float() @ nodes[edge_index[0]])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"encoder": nn.Linear(5, 4), "gru": Gru(), "graph": Graph()}).eval()


def run(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, torch.Tensor]) -> Any:
    y, h = parts["gru"](parts["encoder"](batch["x"]).tanh(), batch["h0"])
    return {"y": y, "h": h}


def run_graph(parts: Mapping[str, Callable[..., Any]], batch: Mapping[str, torch.Tensor]) -> Any:
    return {"y": parts["graph"](parts["encoder"](batch["x"]).relu(), batch["edge_index"])}


def export_parts(folder: Path, *, factor: float = 1.0) -> None:
    """Export the parts and their release files; `factor` scales the last weights."""
    model = build()
    with torch.no_grad():
        model["gru"].head.weight *= factor
        model["graph"].second.weight *= factor
    edges = torch.zeros(2, 14, dtype=torch.int64)
    for name, arguments, inputs, outputs, axes in (
        ("encoder", (torch.zeros(2, 7, 5),), ["x"], ["e"], {"x": B0, "e": B0}),
        ("encoder1", (torch.zeros(9, 5),), ["x"], ["e"], {"x": {0: "nodes"}, "e": {0: "nodes"}}),
        ("gru", (torch.zeros(2, 7, 4), torch.zeros(2, 2, 6)), ["features", "h0"], ["y", "h"],
         {"features": B0, "h0": B1, "y": B0, "h": B1}),
        ("graph", (torch.zeros(9, 4), edges), ["nodes", "edge_index"], ["y"],
         {"nodes": {0: "nodes"}, "edge_index": {1: "edges"}, "y": {0: "nodes"}}),
    ):  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model[name.removesuffix("1")], arguments, str(folder / f"{name}.onnx"), dynamo=False,
                input_names=inputs, output_names=outputs, dynamic_axes=axes,
            )  # fmt: skip
    (folder / "release.yaml").write_text(
        f"chain: {__name__}:run\nparts: {{encoder: {{file: encoder.onnx}}, gru: {{file: gru.onnx}}}}\n"
    )
    (folder / "graph.yaml").write_text(
        f"chain: {__name__}:run_graph\n"
        "parts: {encoder: {file: encoder1.onnx}, graph: {file: graph.onnx}}\n"
    )


def samples(*, rows: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    h0 = rng.normal(size=(2, 20, 6)).astype(np.float32)
    x = rng.normal(size=(20, 7, 5)).astype(np.float32)
    return {"x": x, "h0": h0.swapaxes(0, 1).copy() if rows else h0}


def graphs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 9, 5)).astype(np.float32)
    return {"x": x, "edge_index": rng.integers(0, 9, (12, 2, 14))}
