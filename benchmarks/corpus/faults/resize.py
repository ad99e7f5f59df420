"""Faults of resizing: the mode or the coordinate transformation."""

from __future__ import annotations

import onnx
import torch
from torch import nn
from torch.nn import functional

from benchmarks.corpus import graph
from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_graph, in_layer, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DIRECT_20,
    DYNAMO_18,
    SCRIPTED_17,
    TRACED_13,
)
from benchmarks.corpus.models import spatial, wiring


def _find_resize(model: onnx.ModelProto, layer: str) -> onnx.NodeProto:
    return graph.find_node(model, f"/{layer}/Resize")


@in_layer("resize mode", ("pyramid", "nearest", DIRECT_17))
def linear_for_nearest(_: nn.Module, __: Architecture) -> nn.Module:
    """Use bilinear interpolation instead of the nearest pixel."""
    return nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)


@in_layer("resize mode", ("pyramid", "cubic", DYNAMO_18), ("pyramid", "linear", SCRIPTED_17))
def nearest_for_smooth(_: nn.Module, __: Architecture) -> nn.Module:
    """Use the nearest pixel instead of interpolation, as in an old runtime."""
    return nn.Upsample(scale_factor=2, mode="nearest")


@in_graph("resize mode", ("pyramid", DIRECT_17), layer="cubic")
def cubic_of_pillow(model: onnx.ModelProto) -> None:
    """Use Pillow's cubic coefficient of -0.5 instead of PyTorch's -0.75."""
    graph.set_attribute(_find_resize(model, "cubic"), "cubic_coeff_a", -0.5)


@in_graph("resize mode", ("pyramid", DIRECT_13), layer="nearest")
def nearest_rounded_up(model: onnx.ModelProto) -> None:
    """Round the nearest pixel up instead of down."""
    graph.set_attribute(_find_resize(model, "nearest"), "nearest_mode", "ceil")


@in_layer("resize coordinates", ("pyramid", "linear", DYNAMO_18))
def corners_aligned(_: nn.Module, __: Architecture) -> nn.Module:
    """Align corners instead of pixel centers."""
    return nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)


@in_layer("resize coordinates", ("pyramid", "corners", DIRECT_17))
def corners_not_aligned(_: nn.Module, __: Architecture) -> nn.Module:
    """Align pixel centers instead of corners."""
    return nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)


@in_graph("resize coordinates", ("pyramid", DIRECT_17), layer="linear")
def asymmetric(model: onnx.ModelProto) -> None:
    """Use asymmetric coordinates, as some converters do for speed."""
    graph.set_attribute(
        _find_resize(model, "linear"), "coordinate_transformation_mode", "asymmetric"
    )


@in_graph("resize coordinates", ("pyramid", DIRECT_20), layer="cubic")
def cubic_asymmetric(model: onnx.ModelProto) -> None:
    """Use asymmetric coordinates with cubic interpolation."""
    graph.set_attribute(
        _find_resize(model, "cubic"), "coordinate_transformation_mode", "asymmetric"
    )


class _AlignedSegmenter(spatial.Segmenter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.first(x)
        coarse = self.third(self.second(self.down(fine)))
        size = (fine.shape[2], fine.shape[3])
        wide = functional.interpolate(coarse, size=size, mode="bilinear", align_corners=True)
        return self.fc(self.joined(torch.cat([fine, wide], dim=1)))


@in_model("resize coordinates", ("segmenter", DIRECT_17))
def unet_with_aligned_corners(model: nn.Module, _: Architecture) -> None:
    """Align corners in the decoder, as the first U-Nets did."""
    model.__class__ = _AlignedSegmenter


class _NearestCamera(wiring.Camera):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = image.permute(0, 3, 1, 2).to(self.mean.dtype) / 255.0
        x = functional.interpolate(x, size=(32, 32), mode="nearest")
        x = (x - self.mean) / self.std
        return self.fc(self.backbone(x).mean((2, 3)))


@in_model("resize mode", ("camera", TRACED_13))
def preprocessing_by_nearest(model: nn.Module, _: Architecture) -> None:
    """Use the nearest pixel in the preprocessing."""
    model.__class__ = _NearestCamera
