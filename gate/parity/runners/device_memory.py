"""By how much the memory of a CUDA device grows while a runtime opens a file and computes.

Allocators keep what they were given, so that a look after each step sees the peak. The device says
how much is used, not by whom: other processes count.
"""

from __future__ import annotations

import torch


class DeviceMemory:
    """Of the first device, from the moment that this is made. Nothing without one, nor where the
    device can't be asked."""

    def __init__(self) -> None:
        self._before = _used()
        self.grown: int | None = None
        """In bytes; None: there is no device, or it did not say."""

    def look(self) -> None:
        """After a step."""
        now = _used()
        if self._before is None or now is None:
            self._before = self.grown = None
        else:
            self.grown = max(self.grown or 0, now - self._before)


def _used() -> int | None:
    try:
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(0)
    except Exception:  # a device that is full, or gone: whether it computes, the outputs show
        return None
    return int(total - free)
