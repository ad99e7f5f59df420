"""Why the exporter refused: the operator that it could not write, and the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNSUPPORTED = re.compile(r"operator '([\w:.]+)' to ONNX opset version (\d+)")
_SINCE = re.compile(r"added in version (\d+)")
_CUSTOM = re.compile(r"unrecognized namespace ([\w:]+)")
_NODE_KIND = re.compile(r"containing node has kind '([\w:]+)'")


@dataclass(frozen=True)
class Refusal:
    """What the exporter could not do, and what the user can do."""

    cause: str
    remedy: str

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Read an error of the TorchScript-based exporter."""
        text = str(error)
        if unsupported := _UNSUPPORTED.search(text):
            operator, opset = unsupported.groups()
            since = _SINCE.search(text)
            return cls(
                f"the operator {operator} can't be exported at opset {opset}",
                f"Set export.opset to {since.group(1)} or more."
                if since
                else "Replace it in the model by operators that ONNX has, or try a higher "
                "export.opset.",
            )
        if custom := _CUSTOM.search(text):
            return cls(
                f"the operator {custom.group(1)} is not torch's own and has no ONNX form",
                "Replace it in the model, or register a symbolic function for it.",
            )
        kind = _NODE_KIND.search(text)
        at = f" at the operator {kind.group(1)}" if kind else ""
        return cls(f"the exporter failed{at}: {brief(error)}", "Simplify this part of forward.")


def brief(error: Exception) -> str:
    """Type and first line of an error, without the graph that torch appends."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    line = line.partition("  [Caused by")[0].rstrip(".: ")
    return f"{type(error).__name__}: {line}"
