"""The metric of the detector of `mend_precision`, without PyTorch: each check imports it anew."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def hits(outputs: dict[str, NDArray[Any]], labels: NDArray[Any]) -> NDArray[Any]:
    """Return 1 where the class is right and the box overlaps by half: shape (samples,)."""
    scores, boxes, true = outputs["scores"], outputs["boxes"], labels[:, 1:]
    lows = np.maximum(boxes[:, :2] - boxes[:, 2:] / 2, true[:, :2] - true[:, 2:] / 2)
    highs = np.minimum(boxes[:, :2] + boxes[:, 2:] / 2, true[:, :2] + true[:, 2:] / 2)
    shared = np.clip(highs - lows, 0, None).prod(1)
    overlap = shared / (boxes[:, 2:].prod(1) + true[:, 2:].prod(1) - shared)
    return (scores.argmax(1) == labels[:, 0]) & (overlap > 0.5)
