"""Why the exporter refused, in one sentence with the operator and the way out."""

from __future__ import annotations

import re

_UNSUPPORTED = re.compile(r"operator '([\w:.]+)' to ONNX opset version (\d+)")
_SINCE = re.compile(r"added in version (\d+)")
_CUSTOM = re.compile(r"unrecognized namespace ([\w:.]+)")
_NODE_KIND = re.compile(r"containing node has kind '([\w:]+)'")


def explain(error: Exception) -> str:
    """One sentence for an error of the TorchScript-based exporter, ending with the remedy."""
    text = str(error)
    unsupported = _UNSUPPORTED.search(text)
    if unsupported:
        operator, opset = unsupported.groups()
        since = _SINCE.search(text)
        if since:
            return (
                f"the operator {operator} can't be exported at opset {opset}: "
                f"set export.opset to {since.group(1)} or more."
            )
        return (
            f"the operator {operator} can't be exported at opset {opset}: "
            "replace it in the model by operators that ONNX has, or try a higher export.opset."
        )
    custom = _CUSTOM.search(text)
    if custom:
        return (
            f"the operator {custom.group(1)} is not one of torch's own and has no ONNX form: "
            "replace it in the model, or register a symbolic function for it."
        )
    kind = _NODE_KIND.search(text)
    at = f" (at {kind.group(1)})" if kind else ""
    return f"the exporter failed{at}: {brief(error)}. Simplify this part of forward."


def brief(error: Exception) -> str:
    """Type and first line of an error, without the graph that torch appends."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    line = line.partition("  [Caused by")[0].rstrip(".: ")
    return f"{type(error).__name__}: {line}"
