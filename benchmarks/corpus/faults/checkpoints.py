"""Files with the weights of another checkpoint than the reference."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.corpus.architecture import Architecture
from benchmarks.corpus.entry import in_layer, in_model
from benchmarks.corpus.exporters import (
    DIRECT_13,
    DIRECT_17,
    DYNAMO_18,
    EXTERNAL_18,
    TRACED_13,
    TRACED_17,
)
from benchmarks.corpus.trained import build_trained, train_further


@in_model(
    "swapped checkpoint", ("resnet", TRACED_13), ("tokens", DYNAMO_18), ("generator", DIRECT_17)
)
def another_run(_: nn.Module, architecture: Architecture) -> nn.Module:
    """Use the weights of another training run of the same architecture."""
    return build_trained(architecture, seed=1)


@in_model("stale checkpoint", ("mobilenet", DIRECT_17), ("vit", EXTERNAL_18))
def ten_steps_away(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Use the weights of ten steps later: the reference checkpoint was not updated."""
    return _train_further(model, architecture, steps=10)


@in_model("stale checkpoint", ("resnet18", TRACED_13), ("difference", DIRECT_13))
def one_step_away(model: nn.Module, architecture: Architecture) -> nn.Module:
    """Use the weights of one step later."""
    return _train_further(model, architecture, steps=1)


@in_model("stale checkpoint", ("camera", DIRECT_17))
def averaged_weights(model: nn.Module, architecture: Architecture) -> None:
    """Use the moving average of the weights, while the reference has the weights themselves."""
    later_model = _train_further(model, architecture, steps=4)
    for parameter, later_parameter in zip(
        model.parameters(), later_model.parameters(), strict=True
    ):
        parameter.copy_(0.9 * parameter + 0.1 * later_parameter)


@in_layer(
    "partly loaded checkpoint", ("vit", "block2.down", DIRECT_17), ("two-inputs", "fc", TRACED_17)
)
def layer_not_loaded(layer: nn.Module, _: Architecture) -> None:
    """Reset a layer to random weights, as `strict=False` leaves it if its key was renamed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layer.reset_parameters()


@in_layer("partly loaded checkpoint", ("segmenter", "joined.norm", DIRECT_17))
def norm_not_loaded(layer: nn.Module, _: Architecture) -> None:
    """Reset the statistics of a BatchNorm, as if its buffers were missing from the checkpoint."""
    layer.reset_running_stats()


def _train_further(model: nn.Module, architecture: Architecture, *, steps: int) -> nn.Module:
    model = model.requires_grad_(True)
    with torch.enable_grad():
        later_model = train_further(model, architecture.draw(64, 2000), steps=steps)
    model.requires_grad_(False)
    return later_model.requires_grad_(False)
