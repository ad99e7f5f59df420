"""How far a ratio of two measured errors scatters by chance alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtri

_CHANCE = 1e-4
"""That the largest of all ratios of an output exceeds its scatter, were all errors normal."""
_MOST = 100.0


def scatter(draws: NDArray[np.float64], groups: int) -> NDArray[np.float64]:
    """By what factor a ratio of two rms of equal size exceeds 1 in the worst of `groups` groups.

    The ratio of two mean squares of n normal errors follows Fisher's F(n, n); here the floor below
    it is the larger of two such, which is taken as F(n, 2n). It is its quantile at
    1 - 1e-4 / groups: 1.03 for 10 000 draws of one group, 1.25 for 320, 2.1 for 32 in each of ten
    columns, 25 for 2. At most 100, whatever few draws there are.
    """
    quantile = fdtri(draws, 2.0 * draws, 1.0 - _CHANCE / max(groups, 1))
    return np.asarray(np.clip(np.sqrt(np.nan_to_num(quantile, nan=np.inf)), 1.0, _MOST))
