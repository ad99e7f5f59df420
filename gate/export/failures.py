"""Reading torch's messages: the operator that they name, or the cause and the way out.

Matched against torch 2.15's texts; what matches nothing is told by its type and first line.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from gate.errors import first_line
from gate.export.refusals.places import source_line
from gate.export.refusals.unsupported import UnsupportedOperator
from gate.model.source_place import source_place

_READ = 50_000
"""Characters of a message that are searched."""
_WIDEST = 240
"""Characters of what others wrote: messages, notes, places, reasons."""

_OPERATOR = re.compile(r"operator '([\w:.]+)' to ONNX opset version (\d+)")
_SINCE = re.compile(r"added in version (\d+)")
_CUSTOM = re.compile(r"unrecognized namespace ([\w:]+)")
_NEEDS_OPSET = re.compile(
    r"Unsupported: ONNX export of ([^\n]+?) in opset \d+\. "
    r"(?:(.+?)\. )?Please try opset version (\d+)"
)
_PARTIAL = re.compile(r"Unsupported: ONNX export of (?:operator )?([^\n]+?)\. Please feel free")
_DISPATCH = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)'")
_NODE_KIND = re.compile(r"containing node has kind '([\w:]+)'")
_IDENTIFIER = re.compile(r"(\w+)(?=$|[\s,(])")

_TRACE_TENSORS = (
    "Give forward tensors alone: texts, numbers and other settings belong into the model's "
    "constructor."
)
_OTHER_STRATEGY = "Set export.strategy to direct or dynamo, or change this part of forward."

_MESSAGES: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not guard on data-dependent expression|Dynamic control flow is not supported",
        "forward decides by the values of a tensor{at}",
        "Use torch.where or torch.cond there, or set export.strategy to scripted, which keeps "
        "if, for and while.",
    ),
    (
        r"Constraints violated|You marked .{1,200} as dynamic but",
        "forward fixes an axis that was to be dynamic{at}: {brief}",
        "Use the tensor's own shape there (x.shape[0], -1), or leave this axis out of the dynamic "
        "ones.",
    ),
    (
        r"(?:no fake impl registered|find fake impl|register_fake|Meta backend|meta kernel)",
        "a custom operator can't say the shape of its result{at}: {brief}",
        "Register one with @torch.library.register_fake, see docs/custom-operators.md.",
    ),
    (
        r"Type '(.+?)' cannot be traced",
        "a trace takes tensors only, it was given {1}",
        _TRACE_TENSORS,
    ),
    (
        r"received an input of unsupported type: (\w+)",
        "a trace takes tensors only, it was given {1}",
        _TRACE_TENSORS,
    ),
    (
        r"Encountering a dict at the output of the tracer",
        "a traced module can't return a dict",
        "Set export.strategy to direct or dynamo, which flatten dicts, or return a tuple.",
    ),
    (
        r"Only tensors, lists, tuples of tensors|Type 'str' is not .{0,60}output",
        "forward returns something that is no tensor",
        "Return the tensors alone.",
    ),
    (
        r"(?:missing value for argument|missing \d+ required positional arguments?:|"
        r"missing a required argument:) '(\w+)'",
        "forward was not given its argument {1}",
        "Give the example one array for each argument of forward. torch takes a dict in the last "
        "place for keyword arguments: let forward take the tensors themselves.",
    ),
    (
        r"failed in the TorchScript interpreter(?:.*\n)*.*Error: (.+)",
        "the scripted module fails{at}: {1}",
        _OTHER_STRATEGY,
    ),
    (
        r"required keyword attribute 'Subgraph' is undefined",
        "the scripted module calls Python code that TorchScript can't see into",
        "Call a custom operator as torch.ops.namespace.name(…), not by its Python function; give "
        "other Python code to export.strategy: direct.",
    ),
    (
        r"<--- HERE",
        "torch.jit.script can't compile forward{at}: {brief}",
        "Set export.strategy to traced or direct if forward takes one path for all inputs, or "
        "write this part in what TorchScript knows.",
    ),
    (
        r"[Cc]ouldn't export Python operator (\w+)",
        "the Python operator {1} has no ONNX form{at}",
        "Write it with torch's operators, or give it a static method symbolic(g, *inputs), or set "
        "export.autograd_inlining: true.",
    ),
    (
        r"of unknown rank|Cannot determine scalar type|unknown (?:shape|dtype)",
        "the exporter has lost a shape or a type that it needs{at}: {brief}",
        "Set export.strategy to direct if the module was traced or scripted, else to dynamo.",
    ),
    (r"INTERNAL ASSERT FAILED", "the exporter failed inside{at}: {brief}", _OTHER_STRATEGY),
    (
        r"Failed to export the model with torch\.export",
        "torch.export can't take forward{at}: {brief}",
        "Change this part of forward, or set export.strategy to direct or scripted.",
    ),
    (
        r"Failed to (?:decompose|convert) the (?:FX graph|exported program)",
        "the dynamo exporter failed{at}: {brief}",
        "Set export.strategy to direct, or change this part of forward.",
    ),
)


def brief(error: BaseException) -> str:
    """Type and first line of an error, without the graph that torch appends."""
    line = first_line(error).partition("  [Caused by")[0].rstrip(".: ")
    return clipped(f"{type(error).__name__}: {line}")


def clipped(text: str) -> str:
    """As much of what others wrote as is shown."""
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}…"


def operator_in(error: BaseException) -> UnsupportedOperator | None:
    """The operator that the error names, if it is about one: without its place."""
    text = _text(error)
    if named := _OPERATOR.search(text):
        since = _SINCE.search(text)
        return UnsupportedOperator(named[1], since=int(since[1]) if since else None)
    if named := _CUSTOM.search(text):
        return UnsupportedOperator(named[1])
    if named := _DISPATCH.search(text):
        return UnsupportedOperator(f"{named[1]}::{named[2]}")
    if named := _NEEDS_OPSET.search(text):
        reason = named[2] or named[1]
        return UnsupportedOperator(_guessed(named[1]), since=int(named[3]), reason=reason)
    if named := _PARTIAL.search(text):
        return UnsupportedOperator(_guessed(named[1]), reason=named[1])
    return None


def opset_in(error: BaseException) -> int | None:
    """The opset that the export was asked for, if the error says so."""
    named = _OPERATOR.search(_text(error))
    return int(named[2]) if named else None


def reading(error: BaseException) -> tuple[str, str]:
    """Cause and remedy of an error that is about no single operator."""
    text, source = _text(error), where(error)
    at = f" at {source}" if source else ""
    message = brief(_chain(error)[-1])
    for pattern, cause, remedy in _MESSAGES:
        if found := re.search(pattern, text):
            groups = [clipped(group or "") for group in (found[0], *found.groups())]
            return cause.format(*groups, at=at, brief=message), remedy
    kind = _NODE_KIND.search(text)
    place = f" at the operator {kind[1]}" if kind else at
    return f"the exporter failed{place}: {message}", "Simplify this part of forward."


def where(error: BaseException) -> str | None:
    """The innermost line of the user's code that an error names, or that it came from."""
    text = _text(error)
    if named := source_line(text):
        return named
    for one in reversed(_chain(error)):
        frames = traceback.extract_tb(one.__traceback__)[1:]  # the first is who caught it
        own = [frame for frame in frames if not _is_machinery(frame.filename)]
        if own:
            return source_place(own[-1].filename, own[-1].lineno or 0)
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what caused it, outermost first."""
    return list(_causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__


def _text(error: BaseException) -> str:
    return "\n".join(str(one) for one in _chain(error))[:_READ]


def _guessed(message: str) -> str:
    """`aten::name` for what torch calls its operator in this message, which is often its name."""
    word = _IDENTIFIER.match(message)
    return f"aten::{word[1]}" if word else message


_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_MACHINERY = ("gate/", "torch/", "onnxscript/", "onnx_ir/", "onnx/", "sympy/")


def _is_machinery(filename: str) -> bool:
    """True for frames of Python, of torch's exporters, and of this package."""
    if filename.startswith("<"):
        return True
    path = Path(filename)
    if path.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in path.parts:
        return True
    return source_place(filename, 0).startswith(_MACHINERY)
