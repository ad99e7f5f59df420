"""The metric of the detector of `mend_precision`, without PyTorch: each check imports it anew."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def hits(outputs: dict[str, NDArray[Any]], labels: NDArray[Any]) -> NDArray[Any]:
    """Return 1 for samples with the right class and a box overlap above 0.5, shape (samples,)."""
    scores, boxes, true_boxes = outputs["scores"], outputs["boxes"], labels[:, 1:]
    lows = np.maximum(boxes[:, :2] - boxes[:, 2:] / 2, true_boxes[:, :2] - true_boxes[:, 2:] / 2)
    highs = np.minimum(boxes[:, :2] + boxes[:, 2:] / 2, true_boxes[:, :2] + true_boxes[:, 2:] / 2)
    intersection = np.clip(highs - lows, 0, None).prod(1)
    overlap = intersection / (boxes[:, 2:].prod(1) + true_boxes[:, 2:].prod(1) - intersection)
    return (scores.argmax(1) == labels[:, 0]) & (overlap > 0.5)
