"""The strategy `direct`: the TorchScript-based exporter traces the module by itself.

Its own trace resolves some fused operators (multi-head attention, `swapaxes`) that it can't write
when they come in a traced module. Apart, because each strategy has a module.
"""

from __future__ import annotations

from pathlib import Path

from gate.export.custom import Symbolics
from gate.export.request import Request
from gate.export.strategies.exporter import ExporterOptions
from gate.export.strategies.torchscript import write_legacy


def write_direct(request: Request, path: Path, *, symbolics: Symbolics) -> ExporterOptions:
    """Export the module to `path`; say what was set.

    Raises RungFailed, and OSError where the file can't be written.
    """
    with request.flat() as module:
        return write_legacy(request, module, path, strategy="direct", opset=symbolics.opset)
