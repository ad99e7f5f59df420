"""The chain function of `tiny.encoder_and_head`."""

from collections.abc import Callable, Mapping

import torch


def run(
    parts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]], batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the logits."""
    return parts["head"](parts["encoder"](batch["input"] * 2.0).flatten(1))
