"""Rules TRC001–TRC020: title, level, message, rewrite, affected strategies."""

from __future__ import annotations

from dataclasses import dataclass

from gate.records.export import LintLevel, Strategy

_TRACE: frozenset[Strategy] = frozenset({"traced", "direct"})

_TORCHSCRIPT: frozenset[Strategy] = _TRACE | {"scripted"}

_ALL: frozenset[Strategy] = _TORCHSCRIPT | {"dynamo"}


@dataclass(frozen=True)
class Rule:
    """The default texts of a finding."""

    title: str
    level: LintLevel
    message: str
    rewrite: str
    strategies: frozenset[Strategy]


# Each rule has a page, `docs/lint/<code>.md`, and a test with a model that breaks it.
RULES: dict[str, Rule] = {
    "TRC001": Rule(
        "Python or NumPy numbers from tensors",
        "error",
        "the example's number is written into the file as a constant",
        "stay in tensors: torch.abs, torch.sqrt, tensor.detach() instead of NumPy, math, float()",
        _TRACE,
    ),
    "TRC002": Rule(
        "Tensor.item()",
        "error",
        "the example's number is written into the file as a constant",
        "leave out .item(): a tensor of one element broadcasts as a number does",
        _TRACE,
    ),
    "TRC003": Rule(
        "Tensor.tolist()",
        "error",
        "the example's numbers are written into the file as constants",
        "keep the tensor; index it, or use torch.stack and torch.cat",
        _TRACE,
    ),
    "TRC004": Rule(
        "a Python number of a shape",
        "error",
        "the example's size is written into the file as a constant",
        "use x.shape[i] as it is, or -1 in reshape; // instead of int(… / …)",
        _TRACE,
    ),
    "TRC005": Rule(
        "len(tensor)",
        "error",
        "the example's size is written into the file as a constant",
        "use x.shape[0]",
        _TRACE,
    ),
    "TRC006": Rule(
        "Tensor.data",
        "error",
        "the exporter does not follow .data: what is read there becomes a constant, what is "
        "written there is lost",
        "use x.detach(), and y = y * 2 instead of y.data.mul_(2)",
        _TORCHSCRIPT,
    ),
    "TRC007": Rule(
        "in-place arithmetic on a shape",
        "error",
        "in a trace a size is a tensor: += changes all names of it",
        "write n = n + 2 instead of n += 2",
        _TRACE,
    ),
    "TRC008": Rule(
        "Python control flow on tensor values",
        "error",
        "the file has only the branch, or the number of iterations, of the example",
        "use torch.where, torch.clamp, or a mask; or export with strategy: scripted",
        _TRACE,
    ),
    "TRC009": Rule(
        "negative indices in index tensors",
        "error",
        "two and more index tensors are flattened into one; a negative index reads another element",
        "count from the front: x.shape[i] - 1 instead of -1",
        _TORCHSCRIPT,
    ),
    "TRC010": Rule(
        "writing through an index that the exporter can't express",
        "error",
        "the exporter writes to other places",
        "write through one-dimensional, adjacent index tensors, or build the result with "
        "torch.where, torch.cat or scatter",
        _TORCHSCRIPT,
    ),
    "TRC011": Rule(
        "implicit broadcast on assignment",
        "error",
        "the exporter does not expand the value to the places that it is written to",
        "expand it yourself: y[:, 1:3] = v.expand(-1, 2), or use torch.where",
        _TORCHSCRIPT,
    ),
    "TRC012": Rule(
        "text or dicts as inputs or outputs",
        "warning",
        "an ONNX file has tensors in a fixed order: text becomes a constant, a dict is taken by "
        "position",
        "take and return tensors; put the choice that a text makes into __init__",
        _ALL,
    ),
    "TRC013": Rule(
        "dropout that is always on",
        "error",
        "functional dropout drops in eval mode too: its default is training=True",
        "pass training=self.training, or use nn.Dropout",
        _ALL,
    ),
    "TRC014": Rule(
        "another result while it is exported",
        "error",
        "what is exported is not what the model computes",
        "compute the same in both cases",
        _ALL,
    ),
    "TRC015": Rule(
        "branches of different rank under script",
        "error",
        "the exporter takes one branch's rank for both",
        "give both branches the same rank (unsqueeze, flatten)",
        frozenset({"scripted"}),
    ),
    "TRC016": Rule(
        "Python control flow on shapes",
        "warning",
        "the file has only the branch, or the number of iterations, of the example's size: wrong "
        "where that axis is dynamic",
        "compute with the sizes (torch.nn.functional.pad, slices), or fix the axis at the export",
        _TRACE,
    ),
    "TRC017": Rule(
        "an argument that the exporter drops",
        "error",
        "the exporter drops the argument: the file computes with another value",
        "write the formula out",
        _ALL,
    ),
    "TRC018": Rule(
        "a function that the exporter writes otherwise",
        "warning",
        "the file computes another formula, which is not the same everywhere",
        "write the formula out",
        _ALL,
    ),
    "TRC019": Rule(
        "an embedding with max_norm",
        "error",
        "the exporter drops max_norm: only rows that the example looks up are renormalized in the "
        "file, or none",
        "renormalize the rows in forward, without max_norm; or export with strategy: dynamo",
        _TORCHSCRIPT,
    ),
    "TRC020": Rule(
        "index_add with repeated indices",
        "error",
        "of several values for one place the file adds one, torch all of them",
        "multiply by a one-hot matrix, or use scatter_add from opset 16 on; or export with "
        "strategy: dynamo",
        _TORCHSCRIPT,
    ),
}
