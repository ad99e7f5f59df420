"""By how much the memory of a CUDA device grows while a runtime opens a file and computes.

Allocators keep what they were given, so that a look after each step sees the peak. The device says
how much is used, not by whom: other processes count.
"""

from __future__ import annotations

import torch


class DeviceMemory:
    """Of the first device, from the moment that this is made. Nothing without one."""

    def __init__(self) -> None:
        self._before = _used()
        self.grown: int | None = None
        """In bytes; None: there is no device, or nobody looked."""

    def look(self) -> None:
        """After a step."""
        if self._before is not None:
            self.grown = max(self.grown or 0, (_used() or 0) - self._before)


def _used() -> int | None:
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)
