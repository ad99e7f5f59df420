"""The base of everything that stands between a model and PyTorch's operators.

PyTorch's own is not taken as it is, because its first operator costs an import of 1.5 s.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """PyTorch's own, without the import of torch._dynamo at its first operator (1.5 s)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
