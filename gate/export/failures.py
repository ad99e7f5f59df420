"""Explain an export failure: unsupported operators, their source locations, and a remedy."""

from __future__ import annotations

import contextlib
import io
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from gate.errors import ExportError
from gate.export.export_warnings import captured, clipped, shorten_message
from gate.export.torchscript_settings import overriding
from gate.model.source_code import source_location
from gate.records.export import Strategy
from gate.storage.safe_text import list_first


class FailureText(NamedTuple):
    """Cause and remedy as format strings; their fields are the parameters of the code."""

    cause: str
    remedy: str
    pattern: str | None = None
    """Regular expression of torch's messages. In the texts, `{0}` is the match, `{1}` its first
    group."""


_TENSORS_ONLY = (
    "a trace takes only tensors; it was called with {1}",
    "Call forward with tensors only: pass texts, numbers and other settings to the model's "
    "constructor.",
)

_OTHER_STRATEGY = "Set export.strategy to direct or dynamo, or change this part of forward."

_NAMED_TUPLE = "Return a named tuple instead: its fields may be of any type."

_NO_PYTHON = "Keep Python code on data and sizes out of forward; see the tracer warnings."

_FIXED_SIZE = (
    "Probably the trace fixed the batch size or a branch: use x.shape[0] instead of len(x), "
    "and no Python if on data; see the tracer warnings."
)

FAILURES: dict[str, FailureText] = {
    # what torch raises
    "data_dependent": FailureText(
        "forward decides by the values of a tensor{at}",
        "Use torch.where or torch.cond there, or set export.strategy to scripted, which keeps "
        "if, for and while.",
        r"Could not guard on data-dependent expression|Dynamic control flow is not supported",
    ),
    "fixed_axis": FailureText(
        "forward fixes an axis that should be dynamic{at}: {brief}",
        "Use the tensor's own shape there (x.shape[0], -1), or leave this axis out of the dynamic "
        "ones.",
        r"Constraints violated|You marked .{1,200} as dynamic but",
    ),
    "no_fake": FailureText(
        "a custom operator has no rule for the shape of its result{at}: {brief}",
        "Register one with @torch.library.register_fake, see docs/custom-operators.md.",
        r"no fake impl registered|find fake impl|register_fake|Meta backend|meta kernel",
    ),
    "untraceable_type": FailureText(*_TENSORS_ONLY, r"Type '(.+?)' cannot be traced"),
    "unsupported_type": FailureText(
        *_TENSORS_ONLY, r"received an input of unsupported type: (\w+)"
    ),
    "returns_dict": FailureText(
        "a traced module can't return a dict",
        "Set export.strategy to direct or dynamo, which flatten dicts, or return a tuple.",
        r"Encountering a dict at the output of the tracer",
    ),
    "returns_other": FailureText(
        "forward returns something that is no tensor",
        "Return the tensors alone.",
        r"Only tensors, lists, tuples of tensors|Type 'str' is not .{0,60}output",
    ),
    "missing_argument": FailureText(
        "forward was called without its argument {1}",
        "Give the example one array for each argument of forward. torch takes a dict in the last "
        "place for keyword arguments: let forward take the tensors themselves.",
        # Not a function of the exporter: norm() missing 1 required positional argument: 'dim'.
        r"(?:missing value for argument|forward\(\) missing \d+ required positional arguments?:|"
        r"missing a required argument:) '(\w+)'",
    ),
    "interpreter": FailureText(
        "the scripted module fails{at}: {1}",
        _OTHER_STRATEGY,
        r"failed in the TorchScript interpreter(?:.*\n)*.*Error: (.+)",
    ),
    "hidden_python": FailureText(
        "the scripted module calls Python code that TorchScript can't see into",
        "Call a custom operator as torch.ops.namespace.name(…), not by its Python function; give "
        "other Python code to export.strategy: direct.",
        r"required keyword attribute 'Subgraph' is undefined",
    ),
    "uncompiled": FailureText(
        "torch.jit.script can't compile forward{at}: {brief}",
        "Set export.strategy to traced or direct if forward takes one path for all inputs, or "
        "write this part with what TorchScript supports.",
        r"<--- HERE",
    ),
    "python_operator": FailureText(
        "the Python operator {1} has no ONNX form{at}",
        "Write it with torch's operators, or give it a static method symbolic(g, *inputs), or set "
        "export.autograd_inlining: true.",
        r"[Cc]ouldn't export Python operator (\w+)",
    ),
    "lost_shape": FailureText(
        "the exporter has lost a shape or a type that it needs{at}: {brief}",
        "Set export.strategy to direct if the module was traced or scripted, else to dynamo.",
        r"of unknown rank|Cannot determine scalar type|unknown (?:shape|dtype)",
    ),
    "internal": FailureText(
        "the exporter failed inside{at}: {brief}", _OTHER_STRATEGY, r"INTERNAL ASSERT FAILED"
    ),
    "uncaptured": FailureText(
        "torch.export can't take forward{at}: {brief}",
        "Change this part of forward, or set export.strategy to direct or scripted.",
        r"Failed to export the model with torch\.export",
    ),
    "untranslated": FailureText(
        "the dynamo exporter failed{at}: {brief}",
        "Set export.strategy to direct, or change this part of forward.",
        r"Failed to (?:decompose|convert) the (?:FX graph|exported program)",
    ),
    "unread": FailureText("the exporter failed{at}: {brief}", "Simplify this part of forward."),
    # before the exporter
    "not_installed": FailureText("the strategy dynamo {needs}", "{install}."),
    "unequal_traces": FailureText(
        "two traces of the model gave different graphs: forward draws random numbers, or "
        "depends on state that it changes itself",
        "Make eval mode repeatable.",
    ),
    "trace_failed": FailureText(
        "torch.jit.trace failed: {brief}",
        "Call forward with the example alone, and remove what is not a tensor operation.",
    ),
    "script_failed": FailureText(
        "torch.jit.script failed: {brief}",
        "Annotate the types of arguments that are not tensors, and take out of forward what "
        "TorchScript does not support.",
    ),
    "not_flat": FailureText(
        "the compiled model does not take or return flat tensors: {brief}",
        "Take and return tensors, in tuples.",
    ),
    "keyword_only": FailureText(
        "forward takes {name} by keyword only, and a trace around TorchScript cannot pass it",
        "Take {name} by position, too: leave out the * before it.",
    ),
    "unannotated": FailureText(
        "forward takes {name} as a dict, list or tuple without an annotation: TorchScript "
        "takes every argument without an annotation for a tensor",
        "Annotate it, such as {name}: dict[str, torch.Tensor].",
    ),
    "mixed_values": FailureText(
        "{place} is a {kind} with values of several types ({types}), and TorchScript supports "
        "{kind}s of one type of value only",
        _NAMED_TUPLE,
    ),
    # of the file that was written
    "invalid_file": FailureText(
        "the exporter wrote a file that is not valid: {reason}", "{remedy}."
    ),
    "other_opset": FailureText(
        "the file is written in opset {opset}, expected opset {wanted}",
        "Set export.opset to {opset}, or to auto for the lowest that works.",
    ),
    "foreign_operators": FailureText(
        "the file needs operators that ONNX Runtime does not have: {operators}",
        "Write them with ONNX's own operators in the symbolic function, see "
        "docs/custom-operators.md.",
    ),
    "other_inputs": FailureText(
        "the exported file has the inputs {inputs}, expected {wanted}: forward ignores an argument",
        "Leave the argument out of the example, or use it in forward.",
    ),
    "other_outputs": FailureText(
        "the exported file has the outputs {outputs}, expected {wanted}",
        "Name what forward returns, in its order, or set export.output_names: null.",
    ),
    "other_domains": FailureText(
        "the file uses the domains {{{domains}}}, expected {domain}: {version} as "
        "export.custom_opsets says",
        "Leave {domain} out of it, or write an operator of it in custom_symbolics.",
    ),
    "static_axis": FailureText(
        "{name} has the shape {shape} in the file, expected a dynamic axis {axis} ({label}): "
        "forward fixes its size (len(x), int(x.shape[{axis}]))",
        "Use -1 or x.shape[{axis}] as it is.",
    ),
    "wrong_file": FailureText("wrote a file that {reason}", _NO_PYTHON),
    "wrong_export": FailureText("the exported file {reason}", _NO_PYTHON),
    "differs": FailureText(
        "differs by {error:.2g} from the model in {name}, at {sizes}", _NO_PYTHON
    ),
    "differs_on": FailureText("{reason}, where the inputs are {title}", _NO_PYTHON),
    "unusable": FailureText("can't be right: {reason}", _NO_PYTHON),
    "changed_parameters": FailureText(
        "has {names} as forward changed it for the example", _NO_PYTHON
    ),
    "unloadable": FailureText(
        "ONNX Runtime can't load {file}: {reason}",
        "Try a lower export.opset, or a newer onnxruntime.",
    ),
    "fails": FailureText("the exported file fails with {sizes}: {reason}", _FIXED_SIZE),
    "other_shape": FailureText(
        "with {sizes} the exported file returns {got} for {name}, the model {want}",
        _FIXED_SIZE,
    ),
    "not_finite": FailureText(
        "with {sizes} {side} returns NaN or infinity for {name}, expected finite values",
        "Check the checkpoint and the example.",
    ),
    # of a ladder
    "no_strategy": FailureText(
        "no strategy of the ladder could export the model",
        "Change forward so that one strategy can export it. The lines above say why each failed.",
    ),
}
"""The texts by code. For an error of torch, the first matching pattern counts."""


def failure_texts(code: str, *groups: str, **params: Any) -> tuple[str, str]:
    """Return the cause and the remedy of a code."""
    cause, remedy, _ = FAILURES[code]
    return cause.format(*groups, **params), remedy.format(*groups, **params)


def export_error(code: str, **params: Any) -> ExportError:
    """Return the error of an exported file that is wrong."""
    return ExportError(". ".join(failure_texts(code, **params)))


_TORCH_NAMESPACES = ("aten", "prim", "quantized", "prims")


@dataclass(frozen=True)
class OperatorFamily:
    """Operators that fail for one reason. `instead` is a sentence with the remedy.

    `strategy` is the strategy that it suggests, if any; the suggestion is omitted if that one
    failed.
    """

    pattern: str
    why: str
    instead: str
    strategy: str | None = None
    opset: int | None = None
    """The lowest opset in which another exporter supports them, if this one does not."""


_FAMILIES = (
    OperatorFamily(
        r"torchvision::deform_conv2d",
        "the dynamo exporter writes it, from opset 19 on",
        "Set export.strategy to dynamo and export.opset to 19 or more.",
        opset=19,
    ),
    OperatorFamily(
        r"aten::(_native_multi_head_attention|_transformer_encoder_layer_fwd)",
        "fused attention, baked in when the module was traced",
        "Give the nn.Module itself in the place of the traced one, or trace it under "
        "torch.backends.mha.set_fastpath_enabled(False).",
    ),
    OperatorFamily(
        r"aten::_upsample_\w+_aa",
        "an antialiased resize",
        "Set export.strategy to dynamo, which writes it, or resize before the model; "
        "antialias=False would compute something else.",
        "dynamo",
    ),
    OperatorFamily(
        r"aten::_?(fft_\w+|stft|istft|complex|polar|real|imag|view_as_real|view_as_complex|"
        r"view_as_real_copy|view_as_complex_copy|angle)",
        "complex numbers",
        "Set export.strategy to dynamo, which writes Fourier transforms, or compute with the real "
        "and the imaginary part as two tensors.",
        "dynamo",
    ),
    OperatorFamily(
        r"aten::_?(linalg_\w+|eig|svd|qr|cholesky|lstsq|lu\w*|symeig|geqrf|ormqr)",
        "a matrix decomposition, which ONNX has none of",
        "Replace it in the model, or compute it outside of the model.",
    ),
    OperatorFamily(
        r"prim::Dict\w*",
        "a dict in a scripted module",
        "Return a tuple, or set export.strategy to direct or dynamo, which flatten dicts.",
        "direct",
    ),
    OperatorFamily(
        r"aten::(is_autocast\w*|is_scripting|format|str|warn|warnings)|prim::(Print|RaiseException)",
        "Python's bookkeeping in a scripted module",
        "Set export.strategy to direct or dynamo, which follow one path through the code.",
        "direct",
    ),
    OperatorFamily(
        r"(aten|prim)::(swapaxes|swapdims|moveaxis|movedim|PythonOp|CallFunction|CallMethod)",
        "hidden in a traced submodule",
        "Set export.strategy to direct: the exporter's own trace resolves it.",
        "direct",
    ),
)


def family(operator: str, *, tried: Collection[str] = ()) -> OperatorFamily | None:
    """Return the family of an operator such as `aten::stft`, if its remedy helps after `tried`."""
    matching = (candidate for candidate in _FAMILIES if re.fullmatch(candidate.pattern, operator))
    return next((candidate for candidate in matching if candidate.strategy not in tried), None)


def is_custom(operator: str) -> bool:
    """Return True for operators that no exporter of torch supports, such as `mine::hard_swish`."""
    return operator.partition("::")[0] not in _TORCH_NAMESPACES and family(operator) is None


# Source line and module of an operator, in torch's formats: scopes and source ranges of a traced or
# scripted TorchScript graph, and metadata of a `torch.export` graph.
_PYTHON_FRAME = re.compile(r'File "(.+?)", line (\d+)')

_TRACED_FRAME = re.compile(r"^(.+?)\((\d+)\): ", re.MULTILINE)

_HIERARCHY = re.compile(r"([^.()]+)\(([^()]*)\)")

_LIBRARY = "torch/"

_TORCHSCRIPT = "<--- HERE"

_TRACEBACK_HEADING = "most recent call last"

_CONTAINERS = {"ModuleList", "ModuleDict"}
"""Modules without a forward: they are in paths but not in scopes."""


def source_line(text: str) -> str | None:
    """Return the innermost `file:line` of a stack outside torch; None if there is no stack.

    text: a source range or an error of TorchScript's compiler (innermost first), or a Python
    traceback (innermost last).
    """
    frames = _TRACED_FRAME.findall(text) or _PYTHON_FRAME.findall(text)
    if _TORCHSCRIPT not in text or _TRACEBACK_HEADING in text:
        frames = frames if _TRACED_FRAME.search(text) else frames[::-1]
    locations = [source_location(file, int(line)) for file, line in frames if file[:1] != "<"]
    user_locations = [location for location in locations if not location.startswith(_LIBRARY)]
    return next(iter(user_locations or locations), None)


def node_scope(scope: str, hierarchy: str) -> str:
    """Return the scope of a TorchScript node, from its `getModuleHierarchy()` if it has none.

    The first export of a compiled module inlines it and leaves no scopes for the second.
    """
    if "/" in scope or not hierarchy:
        return scope
    parts = (part for part in _HIERARCHY.findall(hierarchy) if part[0] != "UNKNOWN_INSTANCE")
    return "/".join((scope, *(f"{kind}::{name}" for name, kind in parts)))


def module_path(scope: str, model: nn.Module) -> str:
    """Return `layer1.0.attn` for the scope `pkg.Net::/pkg.Block::layer1.0/pkg.Attn::attn`.

    Empty for the model itself. Each part of a scope is a path relative to the previous part; it may
    repeat that part, and it omits containers without a forward.
    """
    modules = dict(model.named_modules())
    path = previous = ""
    for part in scope.split("/"):
        name = part.rpartition("::")[2]
        if name:
            path = _child_path(path, name.removeprefix(f"{previous}."), modules)
            previous = name
    return path


def _child_path(path: str, name: str, modules: dict[str, nn.Module]) -> str:
    prefix = f"{path}." if path else ""
    if prefix + name in modules:
        return prefix + name
    paths = [
        candidate
        for candidate in modules
        if candidate.startswith(prefix)
        and candidate.endswith(f".{name}")
        and _only_containers(prefix, candidate.removesuffix(f".{name}"), modules)
    ]
    if len(paths) == 1:
        return paths[0]
    return name if name in modules else prefix + name


def _only_containers(prefix: str, path: str, modules: dict[str, nn.Module]) -> bool:
    """Return True if every module between `prefix` and `path` is a container."""
    parts = path.removeprefix(prefix).split(".")
    between = [modules.get(prefix + ".".join(parts[: end + 1])) for end in range(len(parts))]
    # For a scripted or traced module, the class name is `original_name`.
    kinds = {getattr(module, "original_name", type(module).__name__) for module in between}
    return kinds <= _CONTAINERS


CUSTOM_SYMBOLICS = "export.custom_symbolics: package.module:register (docs/custom-operators.md)"

_MAX_NAMES = 3


@dataclass(frozen=True)
class UnsupportedOperator:
    """One operator at one location of the model.

    path: module path, empty for the model itself, None if unknown. source: the line that calls it.
    since: the lowest opset in which this exporter supports it, None if unknown. reason: what about
    this call is unsupported, if the operator itself is supported.
    """

    name: str
    path: str | None = None
    source: str | None = None
    since: int | None = None
    reason: str | None = None

    def located(self) -> str:
        """Return the location as far as known: `layer1.0.attn (pkg/net.py:12)`."""
        where = "the model itself" if self.path == "" else self.path
        return f"{where} ({self.source})" if where and self.source else where or self.source or ""


def names(operators: Sequence[UnsupportedOperator]) -> tuple[str, ...]:
    """Return each name once, in order."""
    return tuple(dict.fromkeys(operator.name for operator in operators))


def opset_for_all(operators: Sequence[UnsupportedOperator]) -> int | None:
    """Return the lowest opset in which all of them are supported, or None."""
    since = [operator.since for operator in operators]
    opsets = [opset for opset in since if opset is not None]
    return max(opsets) if opsets and len(opsets) == len(since) else None


def remedy(operators: Sequence[UnsupportedOperator], tried: Collection[str]) -> str:
    """Return one line with the remedy for all operators after the strategies `tried` failed."""
    if opset := opset_for_all(operators):
        return f"Set export.opset to {opset} or more."
    first = {operator.name: operator for operator in operators}
    advice = {_advise(operator, tried) for operator in first.values()}
    return advice.pop() if len(advice) == 1 else _summarize(first, tried)


def _summarize(operators: Mapping[str, UnsupportedOperator], tried: Collection[str]) -> str:
    """Return one sentence with the remedies of operators that need different ones."""
    later = [name for name, operator in operators.items() if operator.since is not None]
    custom = [name for name in operators if name not in later and is_custom(name)]
    replaced = [name for name in operators if name not in later and name not in custom]
    steps = []
    if replaced:
        steps.append(f"replace {list_first(replaced)} in the model{_strategy_suggestion(tried)}")
    if custom:
        steps.append(
            f"register a symbolic function for {list_first(custom)} (docs/custom-operators.md)"
        )
    if later:
        opset = opset_for_all([operators[name] for name in later])
        steps.append(f"set export.opset to {opset} or more for {list_first(later)}")
    text = "; ".join(steps)
    return f"{text[0].upper()}{text[1:]}."


def ways_out(operators: Sequence[UnsupportedOperator], tried: Collection[str]) -> tuple[str, ...]:
    """Return the three remedies, one line each; the second is followed by details."""
    every_name = names(operators)
    since = {operator.name: operator.since for operator in operators if operator.since is not None}
    in_dynamo = ((name, family(name)) for name in every_name)
    by_dynamo = {name: match.opset for name, match in in_dynamo if match and match.opset}
    never = [name for name in every_name if name not in since and name not in by_dynamo]
    opsets = [f"{opset} has {name}" for name, opset in list(since.items())[:_MAX_NAMES]]
    opsets += [f"{opset} has {name} (strategy dynamo)" for name, opset in by_dynamo.items()]
    if never:
        opsets.append(f"none that this exporter writes has {list_first(never)}")
    families = [family(name, tried=tried) for name in every_name]
    reasons = dict.fromkeys(f"{match.why}: {match.instead}" for match in families if match)
    return (
        f"a higher export.opset: {'; '.join(opsets)}.",
        f"another form: other operators in the model{_strategy_suggestion(tried)}.",
        *(f"  {line}" for line in list(reasons)[:_MAX_NAMES]),
        f"a symbolic function of your own: {CUSTOM_SYMBOLICS}.",
    )


def _advise(operator: UnsupportedOperator, tried: Collection[str]) -> str:
    if operator.since is not None:
        return f"Set export.opset to {operator.since} or more."
    if is_custom(operator.name):
        return f"Register a symbolic function, or replace it in the model: {CUSTOM_SYMBOLICS}."
    if operator.reason is not None:
        return f"Change this call in the model{_strategy_suggestion(tried)}."
    if match := family(operator.name, tried=tried):
        return match.instead
    return f"Replace it in the model by operators that ONNX has{_strategy_suggestion(tried)}."


def _strategy_suggestion(tried: Collection[str]) -> str:
    """Suggest strategies that may succeed after those that failed; scripted rarely does."""
    left = [strategy for strategy in ("direct", "dynamo") if strategy not in tried]
    return f", or try export.strategy: {' or '.join(left)}" if left else ""


_TABLE_OPSET = 18
"""The opset of torch's table; files in lower opsets are converted afterwards."""

_OCCURRENCE = re.compile(r"@\d+$")


def untranslated(
    module: nn.Module, arguments: tuple[Any, ...], opset: int, keywords: Mapping[str, Any]
) -> tuple[UnsupportedOperator, ...]:
    """Return the operators that the dynamo exporter lacks, in order of execution.

    Subgraphs of `torch.cond` are included. The exporter stops at the first unsupported operator.
    Here the graph is captured and decomposed as the exporter does, and each operator is looked up
    in its table. A higher opset never helps: operators that torch 2.15's table has only for higher
    opsets (gelu, group_norm, rms_norm, scaled_dot_product_attention) are decomposed in lower ones.
    Raises torch's exceptions if the module can't be captured.
    """
    from torch.onnx._internal.exporter import _core, _dispatching, _dynamic_shapes

    table = keywords.get("custom_translation_table") or {}
    registry = _registry(max(opset, _TABLE_OPSET), table)
    shapes, _ = _dynamic_shapes.convert_str_to_export_dim(keywords.get("dynamic_shapes"))
    program = torch.export.export(
        module, arguments, keywords.get("kwargs"), dynamic_shapes=shapes, strict=False
    )
    decomposed = _core._prepare_exported_program_for_export(program, registry=registry)
    missing = [
        node
        for node in _call_nodes(decomposed.graph_module)
        if _dispatching.dispatch(node, registry)[0] is None
    ]
    return tuple(dict.fromkeys(_operator_of_node(node) for node in missing))


def _registry(opset: int, table: Mapping[Any, Any]) -> Any:
    from torch.onnx._internal.exporter import _registration

    registry = _registration.ONNXRegistry.from_torchlib(opset_version=opset)
    for target, function in table.items():
        registry.register_op(target, function)
    return registry


def _call_nodes(graph_module: nn.Module) -> Iterator[fx.Node]:
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                    yield node


def _operator_of_node(node: fx.Node) -> UnsupportedOperator:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    target: Any = node.target
    return UnsupportedOperator(
        target._schema.name,
        path=_OCCURRENCE.sub("", paths[-1]) if paths else None,
        source=source_line(node.meta.get("stack_trace") or ""),
    )


_MAX_SEARCHED_LENGTH = 50_000
"""Number of characters of a message that are searched."""

# Patterns of torch 2.15's messages. Other errors are described by their type and first line.
_OPERATOR = re.compile(r"operator '([\w:.]+)' to ONNX opset version (\d+)")

_SINCE_OPSET = re.compile(r"added in version (\d+)")

_CUSTOM = re.compile(r"unrecognized namespace ([\w:]+)")

_NEEDS_OPSET = re.compile(
    r"Unsupported: ONNX export of ([^\n]+?) in opset \d+\. "
    r"(?:(.+?)\. )?Please try opset version (\d+)"
)

_PARTIAL = re.compile(r"Unsupported: ONNX export of (?:operator )?([^\n]+?)\. Please feel free")

_DISPATCH = re.compile(r"No ONNX function found for <OpOverload\(op='(\w+)\.(\w+)'")

_NODE_KIND = re.compile(r"containing node has kind '([\w:]+)'")

_IDENTIFIER = re.compile(r"(\w+)(?=$|[\s,(])")


def operator_in(error: BaseException) -> UnsupportedOperator | None:
    """Return the operator that the error names, without its location; None if it names none."""
    text = _join_messages(error)
    if match := _OPERATOR.search(text):
        since = _SINCE_OPSET.search(text)
        return UnsupportedOperator(match[1], since=int(since[1]) if since else None)
    if match := _CUSTOM.search(text):
        return UnsupportedOperator(match[1])
    if match := _DISPATCH.search(text):
        return UnsupportedOperator(f"{match[1]}::{match[2]}")
    if match := _NEEDS_OPSET.search(text):
        reason = match[2] or match[1]
        return UnsupportedOperator(_aten_name(match[1]), since=int(match[3]), reason=reason)
    if match := _PARTIAL.search(text):
        return UnsupportedOperator(_aten_name(match[1]), reason=match[1])
    return None


def failure_of(error: BaseException, tried: tuple[str, ...] = ()) -> ExportFailure:
    """Return the failure of an error that does not concern a single operator."""
    text, source = _join_messages(error), where(error)
    location = f" at {source}" if source else ""
    message = shorten_message(_list_causes(error)[-1])
    for code, texts in FAILURES.items():
        if texts.pattern and (match := re.search(texts.pattern, text)):
            groups = [clipped(group or "") for group in (match[0], *match.groups())]
            return ExportFailure.from_code(code, *groups, tried=tried, at=location, brief=message)
    kind = _NODE_KIND.search(text)
    location = f" at the operator {kind[1]}" if kind else location
    return ExportFailure.from_code("unread", tried=tried, at=location, brief=message)


def where(error: BaseException) -> str | None:
    """Return the innermost line of the user's code that an error names or originates from."""
    text = _join_messages(error)
    if source := source_line(text):
        return source
    for cause in reversed(_list_causes(error)):
        frames = traceback.extract_tb(cause.__traceback__)[1:]  # without the frame that caught it
        user_frames = [frame for frame in frames if not _is_machinery(frame.filename)]
        if user_frames:
            return source_location(user_frames[-1].filename, user_frames[-1].lineno or 0)
    return None


def _list_causes(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, outermost first."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return chain


def _join_messages(error: BaseException) -> str:
    return "\n".join(str(cause) for cause in _list_causes(error))[:_MAX_SEARCHED_LENGTH]


def _aten_name(message: str) -> str:
    """Return `aten::name` for an operator's name in torch's message, which is often the ATen
    name."""
    word = _IDENTIFIER.match(message)
    return f"aten::{word[1]}" if word else message


_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

_MACHINERY = ("gate/", "torch/", "onnxscript/", "onnx_ir/", "onnx/", "sympy/")


def _is_machinery(filename: str) -> bool:
    """Return True for frames of Python, of torch's exporters, and of this package."""
    if filename.startswith("<"):
        return True
    path = Path(filename)
    if path.is_relative_to(_STANDARD_LIBRARY) and "site-packages" not in path.parts:
        return True
    return source_location(filename, 0).startswith(_MACHINERY)


_MAX_KINDS = 64

_DOMAIN = "parity_gate"

Locations = dict[UnsupportedOperator, None]
"""Operators in order of execution without duplicates."""


@dataclass(frozen=True)
class LegacyExport:
    """One way to call the exporter. `keywords` are passed to `torch.onnx.export`."""

    arguments: tuple[Any, ...]
    opset: int
    keywords: dict[str, Any]

    def error(self, module: nn.Module) -> Exception | None:
        """Return the exception that the export of `module` raises; the file is deleted."""
        fixed = {"dynamo": False, "opset_version": self.opset, "verbose": False}
        try:
            file: Any = io.BytesIO()  # works, and is left out of the annotation
            torch.onnx.export(module, self.arguments, file, **{**self.keywords, **fixed})
        except Exception as error:
            return error
        return None


def unwritten(
    export: LegacyExport, module: nn.Module, *, original: nn.Module | None = None
) -> tuple[UnsupportedOperator, ...]:
    """Return the operators that the TorchScript-based exporter lacks in `module`.

    The exporter stops at the first one. A placeholder that records its locations is registered for
    it, and the export is repeated until none is missing. Operators that the exporter's own passes
    remove or rename are not included. This takes one export per missing operator and one more, and
    another one if `original` is given: the module before tracing, for which the exporter's own
    trace has complete paths.

    A traced or scripted module has no shapes, so placeholders can stop an export early. Operators
    that it did not reach are then searched in the module's graph.
    """
    kinds: dict[str, UnsupportedOperator] = {}
    locations, error = _record_locations(export, module, kinds)
    while (missing := operator_in(error) if error is not None else None) is not None:
        if missing.name in kinds or len(kinds) == _MAX_KINDS:
            break
        if missing.reason and kinds:
            break  # a placeholder's result may itself be unsupported here
        kinds[missing.name] = missing
        locations, error = _record_locations(export, module, kinds)
    if error is not None and isinstance(module, torch.jit.ScriptModule):
        locations |= _graph_locations(module, kinds)
    better = _record_locations(export, original, kinds)[0] if original is not None and kinds else {}
    return tuple(
        operator
        for kind in kinds.values()
        for operator in _locations_of(kind, better) or _locations_of(kind, locations) or [kind]
    )


def _record_locations(
    export: LegacyExport, module: nn.Module, kinds: dict[str, UnsupportedOperator]
) -> tuple[Locations, Exception | None]:
    """Return where placeholders for `kinds` occurred in one export, and the error that stopped
    it."""
    locations: Locations = {}
    with contextlib.ExitStack() as placeholders:
        for name, kind in kinds.items():
            write = _placeholder(kind, module, locations)
            placeholders.enter_context(overriding(name, write, opset=export.opset))
        return locations, export.error(module)


def _locations_of(kind: UnsupportedOperator, locations: Locations) -> list[UnsupportedOperator]:
    return [operator for operator in locations if operator.name == kind.name]


def _placeholder(
    kind: UnsupportedOperator, module: nn.Module, locations: Locations
) -> Callable[..., Any]:
    """Return a symbolic function that adds a node of the same types and records its location."""

    def write(g: Any, *inputs: Any, **_attributes: Any) -> Any:
        node = g.original_node
        locations[_with_location(kind, node, module)] = None
        tensors = [value for value in inputs if _is_tensor(value)]
        outputs = g.op(f"{_DOMAIN}::Missing", *tensors, outputs=node.outputsSize())
        values = [outputs] if isinstance(outputs, torch._C.Value) else outputs
        for value, original in zip(values, node.outputs(), strict=True):
            value.setType(original.type())
        return outputs

    return write


def _graph_locations(
    module: torch.jit.ScriptModule, kinds: dict[str, UnsupportedOperator]
) -> Locations:
    graph: Any = module.inlined_graph
    nodes = [node for node in _nodes_within(graph) if node.kind() in kinds]
    return {_with_location(kinds[node.kind()], node, module): None for node in nodes}


def _nodes_within(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes_within(inner)


def _with_location(kind: UnsupportedOperator, node: Any, module: nn.Module) -> UnsupportedOperator:
    scope = node_scope(node.scopeName(), node.getModuleHierarchy())
    return replace(kind, path=module_path(scope, module), source=source_line(node.sourceRange()))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch._C.Value) and value.type().kind() == "TensorType"


MAX_LINES = 30
"""Largest number of lines of a failure; torch's messages have hundreds."""

_MAX_OPERATORS = 12

_MAX_LOCATIONS = 4

_MAX_NOTES = 6


@dataclass(frozen=True)
class ExportFailure:
    """A failure of the exporter with cause and remedy in one line each.

    If it failed on an operator, all operators that the strategy does not support are included.
    """

    cause: str
    remedy: str
    operators: tuple[UnsupportedOperator, ...] = ()
    tried: tuple[str, ...] = ()
    """The strategies that failed; none of them is suggested."""
    code: str | None = None
    """Key of `FAILURES`; None: the failure concerns operators."""

    @classmethod
    def from_code(
        cls, code: str, *groups: str, tried: tuple[str, ...] = (), **params: Any
    ) -> ExportFailure:
        """Return the failure with the texts of a code."""
        return cls(*failure_texts(code, *groups, **params), tried=tried, code=code)

    @classmethod
    def from_error(
        cls,
        error: BaseException,
        *,
        operators: Sequence[UnsupportedOperator] = (),
        strategy: str | None = None,
        opset: int | None = None,
    ) -> ExportFailure:
        """Return the failure of an error of an exporter, `torch.jit.trace` or `torch.jit.script`.

        operators: those found by `gate.export.failures`; the operator that the error names is added
        if missing.
        """
        operator = operator_in(error)
        all_operators = tuple(operators)
        tried = () if strategy is None else (strategy,)
        if operator is not None and operator.name not in names(all_operators):
            all_operators = (*all_operators, operator)
        if not all_operators:
            return failure_of(error, tried)
        if opset is None and (stated := _OPERATOR.search(_join_messages(error))):
            opset = int(stated[2])
        return cls(
            _explain(all_operators, opset), remedy(all_operators, tried), all_operators, tried
        )

    def for_all(self, tried: Sequence[str], *, cause: str) -> ExportFailure:
        """Return the failure with the remedy after all of `tried` failed."""
        advice = self.remedy
        if self.operators:
            advice = remedy(self.operators, tried)
        elif any(f"export.strategy to {strategy}" in advice for strategy in tried):
            advice = FAILURES["no_strategy"].remedy
        return ExportFailure(cause, advice, self.operators, tuple(tried))

    def text(self, *, notes: Sequence[str] = (), log: Path | None = None) -> str:
        """Return the full text, at most `MAX_LINES` lines, with the remedy last.

        notes: lines about earlier attempts. log: file with torch's output.
        """
        lines = [self.cause, *(clipped(note) for note in _first_items(notes, _MAX_NOTES))]
        if self.operators:
            lines += [*_operator_lines(self.operators), "Ways out:"]
            lines += [f"  {way}" for way in ways_out(self.operators, self.tried)]
        if log is not None:
            lines.append(f"The exporter's log is {log}.")
        return "\n".join(" ".join(line.splitlines()) for line in (*lines, self.remedy))


def _explain(operators: Sequence[UnsupportedOperator], opset: int | None) -> str:
    suffix = f" at opset {opset}" if opset is not None else ""
    unique = names(operators)
    if len(unique) > 1:
        return f"{len(unique)} operators can't be exported{suffix}: {list_first(unique)}"
    first = operators[0]
    if is_custom(first.name):
        return f"the operator {first.name} is not torch's own and has no ONNX form"
    reason = f": {clipped(first.reason)}" if first.reason else ""
    return f"the operator {first.name} can't be exported{suffix}{reason}"


def _operator_lines(operators: Sequence[UnsupportedOperator]) -> Iterator[str]:
    """Yield one line per operator with its locations; the last line names all others."""
    operator_names = names(operators)
    for name in operator_names[:_MAX_OPERATORS]:
        of_name = [operator for operator in operators if operator.name == name]
        locations = [clipped(location) for operator in of_name if (location := operator.located())]
        suffix = f" at {', '.join(_first_items(locations, _MAX_LOCATIONS))}" if locations else ""
        yield f"  {name}{_reason_text(of_name[0])}{suffix}"
    if rest := operator_names[_MAX_OPERATORS:]:
        yield f"  and {len(rest)} more: {', '.join(rest)}"


def _reason_text(operator: UnsupportedOperator) -> str:
    match = family(operator.name)
    reason = operator.reason or (match.why if match else None)
    if operator.since is not None:
        reason = f"since opset {operator.since}"
    return f" ({clipped(reason)})" if reason else ""


def _first_items(items: Sequence[str], most: int) -> list[str]:
    more = len(items) - most
    return [*items[:most], *([f"and {more} more"] if more > 0 else [])]


def unsupported(
    module: nn.Module,
    arguments: tuple[Any, ...],
    *,
    strategy: Strategy,
    opset: int,
    exporter_keywords: Mapping[str, Any] | None = None,
) -> tuple[UnsupportedOperator, ...]:
    """Return every operator of `module` that `strategy` does not support at `opset`, in order.

    exporter_keywords: other arguments of the failed export (`dynamic_axes`, `kwargs`, a custom
    translation table …).

    Call it under the same settings (eval mode, attention's fast path, custom symbolics). Prints
    nothing and never raises; empty if the module can't be captured.
    """
    keywords = {key: value for key, value in (exporter_keywords or {}).items() if key != "f"}
    with captured(), torch.no_grad():
        try:
            if strategy == "dynamo":
                return untranslated(module, arguments, opset, keywords)
            export = LegacyExport(arguments, opset, keywords)
            exported = _exported_module(module, export, strategy)
            return unwritten(export, exported, original=module if exported is not module else None)
        except Exception:  # any error of torch: the first error is reported anyway
            return ()


def explain_error(
    error: BaseException,
    module: nn.Module,
    arguments: tuple[Any, ...],
    *,
    strategy: Strategy,
    exporter_keywords: Mapping[str, Any],
) -> ExportFailure:
    """Explain an error of `torch.onnx.export(module, arguments, ...)`.

    Other operators are searched only if the error concerns one, because that costs an export each.
    """
    opset = int(exporter_keywords["opset_version"])
    operators: tuple[UnsupportedOperator, ...] = ()
    if operator_in(error) is not None:
        operators = unsupported(
            module, arguments, strategy=strategy, opset=opset, exporter_keywords=exporter_keywords
        )
    return ExportFailure.from_error(error, operators=operators, strategy=strategy, opset=opset)


def _exported_module(module: nn.Module, export: LegacyExport, strategy: Strategy) -> nn.Module:
    """Return what the strategy passes to the exporter."""
    if strategy == "direct" or isinstance(module, torch.jit.ScriptModule):
        return module
    if strategy == "scripted":
        scripted: nn.Module = torch.jit.script(module)
        return scripted
    traced: nn.Module = torch.jit.trace(  # type: ignore[no-untyped-call]
        module,
        export.arguments,
        example_kwarg_inputs=export.keywords.get("kwargs"),
        check_trace=False,
    )
    return traced
