"""Files with another checkpoint than the reference."""

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
from benchmarks.corpus.trained import later_checkpoint, trained


@in_model(
    "swapped checkpoint", ("resnet", TRACED_13), ("tokens", DYNAMO_18), ("generator", DIRECT_17)
)
def another_run(_: nn.Module, architecture: Architecture) -> nn.Module:
    """The weights are those of another training of the same architecture."""
    return trained(architecture, seed=1)


@in_model("stale checkpoint", ("mobilenet", DIRECT_17), ("vit", EXTERNAL_18))
def ten_steps_away(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The file has the weights of ten steps later: the checkpoint was replaced after the export."""
    return _later(model, architecture, steps=10)


@in_model("stale checkpoint", ("resnet18", TRACED_13), ("difference", DIRECT_13))
def one_step_away(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The file has the weights of a single step later."""
    return _later(model, architecture, steps=1)


@in_model("stale checkpoint", ("camera", DIRECT_17))
def averaged_weights(model: nn.Module, architecture: Architecture) -> None:
    """The file has the moving average of the weights, the reference has the weights."""
    later = _later(model, architecture, steps=4)
    for kept, new in zip(model.parameters(), later.parameters(), strict=True):
        kept.copy_(0.9 * kept + 0.1 * new)


@in_layer(
    "partly loaded checkpoint", ("vit", "block2.down", DIRECT_17), ("two-inputs", "fc", TRACED_17)
)
def layer_not_loaded(layer: nn.Module, _: Architecture) -> None:
    """A renamed key: `strict=False` left the layer at its random initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layer.reset_parameters()


@in_layer("partly loaded checkpoint", ("segmenter", "joined.norm", DIRECT_17))
def norm_not_loaded(layer: nn.Module, _: Architecture) -> None:
    """The buffers of one BatchNorm were not in the checkpoint: its statistics are the initial."""
    layer.reset_running_stats()


def _later(model: nn.Module, architecture: Architecture, *, steps: int) -> nn.Module:
    model = model.requires_grad_(True)
    with torch.enable_grad():
        later = later_checkpoint(model, architecture.draw(64, 2000), steps=steps)
    model.requires_grad_(False)
    return later.requires_grad_(False)
