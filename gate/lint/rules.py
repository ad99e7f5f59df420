"""Rules TRC001–TRC020: title, level, affected strategies, and the texts of their findings."""

from __future__ import annotations

from typing import NamedTuple

from gate.records.export import LintLevel, Strategy

_TRACE: frozenset[Strategy] = frozenset({"traced", "direct"})

_TORCHSCRIPT: frozenset[Strategy] = _TRACE | {"scripted"}

_ALL: frozenset[Strategy] = _TORCHSCRIPT | {"dynamo"}


class Rule(NamedTuple):
    """The default level and texts of a finding."""

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


class Hazard(NamedTuple):
    """A finding, with its deviations from the level and texts of its rule.

    `{}` in a message stands for a name or a number.
    """

    code: str
    level: LintLevel | None = None
    message: str | None = None
    rewrite: str | None = None

    def format(self, value: object) -> Hazard:
        """Return the finding with this name or number in its message."""
        return self._replace(message=self.message and self.message.format(value))


NUMBER_OF_TENSOR = Hazard(
    "TRC001",
    message="{} computes outside of torch: the example's numbers are written into the file as "
    "constants",
)

COPIED_TENSOR = Hazard(
    "TRC001",
    message="torch.tensor copies the example's numbers into the file as a constant",
    rewrite="use the tensor itself, torch.stack for several, x.clone() for a copy",
)

SELECTED_ITEM = Hazard(
    "TRC001",
    message="the file has the item that the example selects",
    rewrite="stack the items and index the tensor, or use torch.where",
)

NUMBER_OF_SIZE = Hazard(
    "TRC004",
    "warning",
    f"{RULES['TRC004'].message}: wrong where that axis is dynamic",
)

UNCHECKED = Hazard("TRC008", "note", "the file does not check this and continues")

LOOP_OVER_ROWS = Hazard(
    "TRC008",
    message="the loop has as many iterations in the file as the example has rows",
    rewrite="use operations on the whole tensor, or strategy: scripted",
)

LOOP_OVER_RANGE = Hazard(
    "TRC008",
    message="the loop has as many iterations in the file as for the example",
)

ITERATING_FUNCTION = Hazard(
    "TRC008",
    message="{} iterates over a tensor: in the file as often as the example has rows",
    rewrite="use the operation on the whole tensor: torch.sum, torch.any, torch.amax",
)

EXTREME_OF_TENSORS = Hazard(
    "TRC008",
    message="{} of tensors is decided by the example",
    rewrite="use torch.minimum or torch.maximum",
)

TRUTH_AS_NUMBER = Hazard(
    "TRC008",
    message="the file computes with True or False of the example",
    rewrite="use the mask itself, torch.logical_not, &, |",
)

SINGLE_NEGATIVE_INDEX = Hazard(
    "TRC009", "note", "a single index tensor may be negative; two would be read wrongly"
)

MAYBE_NEGATIVE_INDEX = Hazard(
    "TRC009", "warning", "if one of these index tensors is negative, another element is read"
)

WRITE_BEHIND_NONE = Hazard(
    "TRC010",
    message="None in an index that is written to: the exporter writes to other places",
    rewrite="leave None out, and give the value that shape: y[:, i] = v instead of "
    "y[:, None, i] = v[:, None]",
)

SEPARATE_INDEX_TENSORS = Hazard(
    "TRC010",
    message="index tensors that are not adjacent: the exporter refuses them, or writes to other "
    "places",
)

INDEX_OF_RANK_TWO = Hazard(
    "TRC010",
    message="an index tensor of rank 2 or more: behind a slice the exporter broadcasts it against "
    "the other axes",
)

INPUT_IS_TEXT = Hazard(
    "TRC012",
    message="an input is text: the file has the example's in it",
    rewrite="put the choice that it makes into __init__",
)

ITEM_OF_DICT = Hazard(
    "TRC012",
    message="an input is a dict: the file takes its tensors by position, in the order of the "
    "example's keys",
)

INPUT_IS_DICT = ITEM_OF_DICT._replace(
    rewrite="take the tensors one by one: forward(self, image, mask)"
)

OUTPUT_IS_DICT = Hazard(
    "TRC012",
    message="the model returns a dict: the file has its tensors in the order in which the keys "
    "were set",
    rewrite="name the outputs in that order, or return a tuple",
)

OUTPUT_IS_TEXT = Hazard(
    "TRC012",
    "error",
    "the model returns text: it is not in the file",
    "return only tensors, and handle texts outside of forward",
)

ACTIVE_DROPOUT = Hazard("TRC013", message="this dropout is active in eval mode, too")

OTHER_WHILE_EXPORTED = Hazard(
    "TRC014",
    message="the code behind {}() changes the result: the file and the model differ",
)

RANK_OF_NAME = Hazard(
    "TRC015", message="{} has another rank in each branch: the exporter takes one for both"
)

RANK_OF_RESULT = Hazard("TRC015", message="the branches return tensors of different rank")

LOOP_OVER_SIZE = Hazard(
    "TRC016",
    message="the loop has as many iterations in the file as for the example's size: wrong where "
    "that axis is dynamic",
)

EXTREME_OF_SIZES = Hazard(
    "TRC016",
    message="{} of sizes is decided by the example: wrong where an axis is dynamic",
)
