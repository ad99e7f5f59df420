"""Visit the functions that a model calls, and collect findings."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import importlib
import inspect
import math
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from gate.lint import rules, torch_rules
from gate.lint.export_guards import may_reach_output, only_guards
from gate.lint.rules import RULES, Hazard
from gate.lint.source import Definition, FunctionSource, Unreadable, python_function
from gate.lint.torch_results import arithmetic, comparison, negated, torch_result
from gate.lint.torch_rules import IndexExpression
from gate.lint.values import (
    NOTHING,
    PYTHON,
    SCALAR,
    UNKNOWN,
    Arguments,
    Kind,
    Method,
    Value,
    bind,
    common_axis,
    default_values,
    from_object,
    is_text,
    item,
    join,
    parameters,
    ranks_differ,
    shift,
    tensor,
    type_hints,
)
from gate.records.export import LintFinding, LintLevel, Strategy

_MAX_NESTED = 16
"""Nested calls; the results of deeper ones are unknown."""

_NUMERIC = ("numpy", "math", "cmath", "statistics")

_READS = {
    "item": "TRC002",
    "tolist": "TRC003",
    "numpy": "TRC001",
    "__array__": "TRC001",
    "__float__": "TRC001",
    "__int__": "TRC001",
    "__index__": "TRC001",
    "__bool__": "TRC008",
    "__len__": "TRC005",
}

_TRACING: tuple[Strategy, ...] = ("traced", "direct")

_FLAGS: dict[str, tuple[Strategy, ...]] = {
    **dict.fromkeys(("is_tracing", "_is_tracing", "_get_tracing_state"), _TRACING),
    **dict.fromkeys(("is_compiling", "is_dynamo_compiling", "is_exporting"), ("dynamo",)),
    "is_scripting": ("scripted",),
    "is_in_onnx_export": (*_TRACING, "scripted", "dynamo"),
}
"""Functions of torch and torchvision, and the strategies whose exports they are true in."""

_QUERY_PREFIXES = ("is_", "are_", "get_", "has_", "set_", "_is_", "_has_", "_get_", "_log_")

_TENSOR_MODULES = (
    "torch._C",
    "torch.nn",
    "torch.functional",
    "torch._tensor",
    "torch._jit_internal",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch._linalg_utils",
    "torch._lowrank",
)
"""Modules of torch whose functions return tensors; the others may return anything."""

_TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "grad", "values", "indices"})

_PYTHON_ATTRIBUTES = frozenset(
    {"ndim", "dtype", "device", "layout", "is_cuda", "is_sparse", "is_quantized", "is_leaf",
     "requires_grad", "grad_fn", "is_meta", "is_nested", "is_mkldnn", "names", "itemsize", "nbytes"}
)  # fmt: skip

_C_ATTRIBUTES = (
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.BuiltinMethodType,
)
"""Attributes that no Python code computes."""


class ModelLinter:
    """Visits the functions that a model calls; collects findings and code without source."""

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self.strategy: Strategy = strategy
        self.findings: dict[tuple[str, str, int, int], LintFinding] = {}
        self.unread: dict[str, str] = {}
        """Names to reasons."""
        self.read: set[Any] = set()
        self.model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._results: dict[Any, Value] = {}
        self._open: set[Any] = set()
        self._walked: set[int] = set()

    def lint(self) -> None:
        """Visit the model's forward, then those of modules that it does not call."""
        for module in self.model.modules():
            if id(module) not in self._walked:
                self.call_module(module, None, None)

    def skip(self, code: Any, reason: str) -> Value:
        """Record code that cannot be read, and return an unknown value."""
        if not isinstance(code, str):
            module = getattr(code, "__module__", None) or type(code).__module__
            code = f"{module}.{getattr(code, '__qualname__', type(code).__name__)}"
        self.unread.setdefault(code, reason)
        return UNKNOWN

    def call_module(
        self, module: nn.Module, arguments: Arguments | None, caller: _ForwardVisitor | None
    ) -> Value:
        """Return the result of a module; arguments None: those that its forward declares."""
        self._walked.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            name = self._paths.get(id(module), "") or str(module.original_name)
            return self.skip(name, "it is TorchScript already: read its source as an nn.Module")
        forward = inspect.getattr_static(module, "forward", None)
        function = python_function(forward)
        if function is None or (_is_of_torch(function) and not torch_rules.is_read(module)):
            return self._torch_module(module, arguments, caller)
        if arguments is not None and not (
            inspect.ismethod(forward) or isinstance(forward, staticmethod)
        ):
            arguments = arguments.after(from_object(module))
        return self._visit_function(function, arguments, module, caller)

    def call(self, callee: Any, arguments: Arguments, caller: _ForwardVisitor) -> Value:
        """Return the result of a user's function, method or callable object."""
        while isinstance(callee, functools.partial):
            keywords = {name: from_object(value) for name, value in callee.keywords.items()}
            arguments = Arguments(
                (*map(from_object, callee.args), *arguments.positional),
                {**keywords, **arguments.keywords},
                arguments.spread,
            )
            callee = callee.func
        function = python_function(callee)
        owner = getattr(callee, "__self__", None)
        if function is None:
            function = python_function(vars(type(callee)).get("__call__"))
            owner = callee
        if function is None:
            return self.skip(callee, "it is compiled code, without Python source")
        if _is_of_torch(function):
            return tensor()
        if owner is None:
            return self._visit_function(function, arguments, caller.owner, caller)
        return self._visit_function(function, arguments.after(from_object(owner)), owner, caller)

    def call_local(self, local: _LocalFunction, arguments: Arguments) -> Value:
        """Return the result of a function that is defined inside another one."""
        outer, definition = local.scope, local.definition
        if outer.depth >= _MAX_NESTED or definition in self._open:
            return UNKNOWN
        inner = outer.inner(bind(definition, None, arguments), depth=outer.depth + 1)
        self._open.add(definition)
        try:
            return inner.result(definition)
        finally:
            self._open.discard(definition)

    def _visit_function(
        self,
        function: types.FunctionType,
        arguments: Arguments | None,
        owner: Any,
        caller: _ForwardVisitor | None,
    ) -> Value:
        depth = caller.depth + 1 if caller else 0
        key = (function, id(owner), arguments.signature if arguments else None)
        if key in self._results:
            return self._results[key]
        if key in self._open or depth > _MAX_NESTED:
            return UNKNOWN
        try:
            code = FunctionSource.from_function(function)
        except Unreadable as error:
            return self.skip(function, str(error))
        self.read.add(function)
        visitor = _ForwardVisitor(
            linter=self,
            code=code,
            path=self._paths.get(id(owner), caller.path if caller else ""),
            names=bind(code.definition, function, arguments, from_object(owner)),
            owner=owner,
            top=caller is None and owner is self.model,
            depth=depth,
        )
        self._open.add(key)
        try:
            self._results[key] = visitor.result(code.definition)
        except Exception as error:  # a model may hold anything; what stays unread is reported
            reason = f"the rules can't follow it: {type(error).__name__}: {error}"
            return self.skip(function, reason)
        finally:
            self._open.discard(key)
        return self._results[key]

    def _torch_module(
        self, module: nn.Module, arguments: Arguments | None, caller: _ForwardVisitor | None
    ) -> Value:
        """Return the result of a module of torch: that of the last child of a Sequential, a tensor
        for the others."""
        passed = None if arguments is None else arguments.get(0, "input")
        if isinstance(module, nn.Sequential) and arguments is not None:
            value = passed or UNKNOWN
            for child in module.children():
                value = self.call_module(child, arguments, caller)
                arguments = Arguments((value,))
            return value
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            return Value(Kind.TENSORS, items={0: tensor()})
        reshapes = isinstance(module, nn.Flatten | nn.Unflatten | nn.Fold | nn.Unfold)
        if passed is None or reshapes:
            return tensor()
        return tensor(shift(passed.rank, 1 if isinstance(module, nn.Embedding) else 0))


Names = dict[str, Value]


@dataclass(eq=False)
class _ForwardVisitor(ast.NodeVisitor):
    """Visitor of one function, or of a function or comprehension inside of it.

    `visit` returns the Value of an expression and never raises for valid syntax; of a statement it
    returns True if the end is never reached (return, raise, continue, break).
    """

    linter: ModelLinter
    code: FunctionSource
    path: str
    """Dotted path of the module."""
    names: Names
    owner: Any = None
    """Its `self`."""
    outer: _ForwardVisitor | None = None
    top: bool = False
    """True for the forward of the model itself."""
    depth: int = 0
    returned: list[Value] = field(default_factory=list)

    def inner(self, names: Names, *, depth: int) -> _ForwardVisitor:
        """Return the visitor of a function or comprehension inside of this one."""
        return _ForwardVisitor(
            self.linter, self.code, self.path, names, self.owner, outer=self, depth=depth
        )

    def result(self, definition: Definition) -> Value:
        """Read the function and return what it returns."""
        if self.top:
            self._report_inputs(definition)
        if isinstance(definition, ast.Lambda):
            return self._value(definition.body)
        self._run(definition.body)
        return join(self.returned) if self.returned else from_object(None)

    def report(self, node: ast.expr | ast.stmt, *hazards: Hazard) -> None:
        """Add findings, except those that the strategy is not affected by or the line has."""
        for hazard in hazards:
            rule = RULES[hazard.code]
            key = (hazard.code, self.code.path, node.lineno, node.col_offset)
            if self.linter.strategy not in rule.strategies or key in self.linter.findings:
                continue
            self.linter.findings[key] = LintFinding(
                code=hazard.code,
                path=self.code.path,
                line=node.lineno,
                module=self.path,
                expression=self.code.text(node),
                suppressed=self.code.silences(hazard.code, node),
                level=hazard.level or rule.level,
                message=hazard.message or rule.message,
                rewrite=hazard.rewrite or rule.rewrite,
            )

    def _report_inputs(self, definition: Definition) -> None:
        hints, defaults = type_hints(self.code.function), default_values(self.code.function)
        for parameter in parameters(definition)[1:]:
            name = parameter.arg
            node = ast.copy_location(ast.Name(id=name), parameter)
            if is_text(hints.get(name)) or isinstance(defaults.get(name), str):
                self.report(node, rules.INPUT_IS_TEXT)
            elif self.names[name].kind is Kind.DICT:
                self.report(node, rules.INPUT_IS_DICT)

    # --- statements -------------------------------------------------------------------------------

    def _run(self, body: Sequence[ast.stmt]) -> bool:
        """Visit statements. True if the end is never reached."""
        return any(self.visit(statement) for statement in body)

    def generic_visit(self, node: ast.AST) -> Value | None:
        if not isinstance(node, ast.expr):
            return None
        self._visit_children(node)
        return PYTHON if isinstance(node, ast.JoinedStr | ast.FormattedValue) else UNKNOWN

    def _visit_children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.visit(child)

    def _value(self, node: ast.expr) -> Value:
        value: Value = self.visit(node)
        return value

    def visit_Expr(self, node: ast.Expr) -> None:
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._assign(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, self._value(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        before, by = self._value(node.target), self._value(node.value)
        value = self._operate(node, before, by)
        if before.kind is Kind.SIZE and self._is_shared(before, node.target):
            self.report(node, Hazard("TRC007"))
        self._assign(node.target, value)

    def _is_shared(self, size: Value, target: ast.expr) -> bool:
        """True if another name, a tuple, or its shape holds this very size."""
        target_name = target.id if isinstance(target, ast.Name) else None
        return any(
            (name != target_name and (value is size or value is size.shape))
            or any(each is size for each in value.items.values())
            for name, value in self.names.items()
        )

    def _assign(self, target: ast.expr, value: Value) -> None:
        """Bind names, unpack tuples, and check writes through an index."""
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Starred(value=inner):
                self._assign(inner, UNKNOWN)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for position, part in enumerate(parts):
                    self._assign(part, item(value, position))
            case ast.Subscript(value=inner):
                indexed, index = self._value(inner), self._index(target.slice)
                if indexed.tensor:
                    self.report(target, *torch_rules.write_hazards(indexed, index, value))
            case ast.Attribute(value=inner, attr=attribute):
                owner = self._value(inner)
                if attribute == "data" and owner.tensor:
                    self.report(target, Hazard("TRC006"))
                elif isinstance(owner.object, nn.Module):
                    self.names[ast.unparse(target)] = value  # `self.last` is no other name

    def visit_If(self, node: ast.If) -> bool:
        test = self._test(node.test)
        if test.decided is not None:
            return self._run(node.body if test.decided else node.orelse)
        same = [ast.dump(s) for s in node.body] == [ast.dump(s) for s in node.orelse]
        guard = only_guards([*node.body, *node.orelse]) and not test.flag
        self._report_condition(test, node, changes=not same, guard=guard)
        start = len(self.returned)
        then, otherwise = self._branches(node.body, node.orelse)
        if test.tensor or test.read:
            for name in then.names:
                if name in otherwise.names and ranks_differ(
                    then.names[name], otherwise.names[name]
                ):
                    self.report(node.test, rules.RANK_OF_NAME.format(name))
            returned = self.returned[start : then.returned], self.returned[then.returned :]
            if any(ranks_differ(left, right) for left in returned[0] for right in returned[1]):
                self.report(node.test, rules.RANK_OF_RESULT)
        return then.ended and otherwise.ended

    def _branches(self, *bodies: Sequence[ast.stmt]) -> list[_Branch]:
        """Visit alternatives, and join the names of those whose end is reached."""
        before = self.names
        branches = []
        for body in bodies:
            self.names = dict(before)
            ended = self._run(body)
            branches.append(_Branch(ended, self.names, len(self.returned)))
        reached = [branch.names for branch in branches if not branch.ended]
        self.names = _join_names(reached or [before])
        return branches

    def _report_condition(
        self, value: Value, node: ast.If | ast.IfExp, *, changes: bool, guard: bool = False
    ) -> None:
        """Report a condition that is not the same for every input.

        changes: the result depends on it. guard: it only raises or warns.
        """
        if value.flag:
            kinds = map(type, self.linter.model.modules())
            if changes and not guard and may_reach_output(node, self.code.definition, kinds):
                level: LintLevel = "warning" if value.flag == "is_in_onnx_export" else "error"
                hazard = rules.OTHER_WHILE_EXPORTED.format(value.flag)
                self.report(node.test, hazard._replace(level=level))
        elif guard and value.computed:
            self.report(node.test, rules.UNCHECKED)
        elif changes and not guard:
            self._report_decision(value, node.test)

    def _report_decision(self, value: Value, test: ast.expr) -> None:
        """Report a condition on a tensor or a size."""
        if value.computed:
            self.report(test, Hazard("TRC008"))
        elif value.sized:
            self.report(test, Hazard("TRC016"))

    def visit_For(self, node: ast.For) -> bool:
        turn = self._iterate(node.iter)
        return self._loop(node, lambda: self._assign(node.target, turn))

    def visit_While(self, node: ast.While) -> bool:
        def test() -> None:
            value = self._test(node.test)
            if value.decided is None:
                self._report_decision(value, node.test)

        return self._loop(node, test)

    def _loop(self, node: ast.For | ast.While, start: Callable[[], None]) -> bool:
        """Visit the body twice, with the names that the first visit binds."""
        for _ in range(2):
            before = dict(self.names)
            start()
            self._run(node.body)
            self.names = _join_names([before, self.names])
        return self._run(node.orelse)

    def _iterate(self, node: ast.expr) -> Value:
        """Return the item of an iteration over this expression; report iteration over tensors."""
        value = self._value(node)
        if value.computed:
            self.report(node, rules.LOOP_OVER_ROWS)
        elif value.loop:
            self.report(node, rules.LOOP_OVER_SIZE)
        return value.items[0] if value.loop and value.items else item(value, None)

    def visit_With(self, node: ast.With) -> bool:
        for part in node.items:
            value = self._value(part.context_expr)
            if part.optional_vars is not None:
                self._assign(part.optional_vars, value if value.tensor else UNKNOWN)
        return self._run(node.body)

    def visit_Try(self, node: ast.Try) -> bool:
        handlers = [handler.body for handler in node.handlers]
        branches = self._branches([*node.body, *node.orelse], *handlers)
        return self._run(node.finalbody) or all(branch.ended for branch in branches)

    def visit_Match(self, node: ast.Match) -> None:
        subject = self._value(node.subject)
        if not subject.flag:
            self._report_decision(subject, node.subject)
        self._branches([], *(case.body for case in node.cases))

    def visit_Return(self, node: ast.Return) -> bool:
        value = from_object(None) if node.value is None else self._value(node.value)
        self.returned.append(value)
        if self.top and value.kind is Kind.DICT:
            self.report(node, rules.OUTPUT_IS_DICT)
        if self.top and any(isinstance(v.object, str) for v in (value, *value.items.values())):
            self.report(node, rules.OUTPUT_IS_TEXT)
        return True

    def _end(self, node: ast.stmt) -> bool:
        self._visit_children(node)
        return True

    visit_Raise = visit_Continue = visit_Break = _end  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> None:
        value = self._test(node.test)
        if value.computed and not value.flag:
            self.report(node.test, rules.UNCHECKED)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names[node.name] = from_object(_LocalFunction(node, self))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self.names[alias.asname or name] = from_object(sys.modules.get(name, NOTHING))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        package = self.code.function.__globals__.get("__package__") or ""
        try:
            name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        except ImportError:
            name = ""
        module = sys.modules.get(name)
        for alias in node.names:
            value = from_object(getattr(module, alias.name, NOTHING))
            self.names[alias.asname or alias.name] = value

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names.pop(target.id, None)

    # --- expressions ------------------------------------------------------------------------------

    def visit_Name(self, node: ast.Name) -> Value:
        return self._resolve(node.id)

    def _resolve(self, name: str) -> Value:
        """Return the value of a name: local, of the enclosing functions, global, built in."""
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer._resolve(name)
        function = self.code.function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name in cells:
            try:
                return from_object(cells[name].cell_contents)
            except ValueError:  # not filled yet
                return UNKNOWN
        built_in = getattr(builtins, name, NOTHING)
        return from_object(function.__globals__.get(name, built_in))

    def visit_Constant(self, node: ast.Constant) -> Value:
        return from_object(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> Value:
        return from_object(_LocalFunction(node, self))

    def visit_Starred(self, node: ast.Starred) -> Value:
        return self._value(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self._value(node.value)
        self._assign(node.target, value)
        return value

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = [self._value(part) for part in node.elts]
        if any(isinstance(part, ast.Starred) for part in node.elts):
            tensors = all(value.kind in (Kind.TENSOR, Kind.TENSORS) for value in values)
            return Value(Kind.TENSORS if tensors else Kind.UNKNOWN)
        items = dict(enumerate(values))
        if values and all(value.tensor for value in values):
            return Value(Kind.TENSORS, items=items)
        objects = [value.object for value in values]
        if any(each is NOTHING for each in objects):
            return Value(Kind.PYTHON, items=items)
        sequence = tuple(objects) if isinstance(node, ast.Tuple) else objects
        return Value(Kind.PYTHON, object=sequence, items=items)

    visit_Tuple = visit_List = visit_Set = _sequence  # noqa: N815

    def visit_Dict(self, node: ast.Dict) -> Value:
        for key in node.keys:
            if key is not None:
                self.visit(key)
        values = [self._value(value) for value in node.values]
        return Value(Kind.DICT, items=dict(enumerate(values)))

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Value:
        inner = self.inner({}, depth=self.depth)
        for part in node.generators:
            inner._assign(part.target, inner._iterate(part.iter))
            for test in part.ifs:
                value = inner._test(test)
                if not value.flag:
                    inner._report_decision(value, test)
        if isinstance(node, ast.DictComp):
            inner.visit(node.key)
            inner.visit(node.value)
            return Value(Kind.DICT)
        kinds = {Kind.TENSOR: Kind.TENSORS, Kind.UNKNOWN: Kind.UNKNOWN}
        return Value(kinds.get(inner._value(node.elt).kind, Kind.PYTHON))

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = (  # noqa: N815
        _comprehension
    )

    def _test(self, node: ast.expr) -> Value:
        """Return the value of a condition, which the caller reports."""
        if isinstance(node, ast.BoolOp):
            return _all_or_any(node, self._parts(node, self._test))
        return self._value(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> Value:
        parts = self._parts(node, self._value)
        if any(part.computed for part in parts[:-1]) and any(map(_is_chosen, parts)):
            # A value is chosen by a tensor. Where all are truths, the condition that they stand in
            # reports them.
            self.report(node, Hazard("TRC008"))
        return _all_or_any(node, parts)

    def _parts(self, node: ast.BoolOp, read: Callable[[ast.expr], Value]) -> list[Value]:
        """Return the parts up to the first that decides the result."""
        parts: list[Value] = []
        for part in node.values:
            parts.append(read(part))
            if parts[-1].decided is isinstance(node.op, ast.Or):
                break
        return parts

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Value:
        if not isinstance(node.op, ast.Not):
            return negated(self._value(node.operand), minus=isinstance(node.op, ast.USub))
        value = self._test(node.operand)
        if value.decided is not None:
            return from_object(not value.decided)
        return tensor(mask=True, truth=not value.constant) if value.tensor else value

    def visit_BinOp(self, node: ast.BinOp) -> Value:
        left, right = self._value(node.left), self._value(node.right)
        for part, value in ((node.left, left), (node.right, right)):
            if value.truth:
                self.report(part, rules.TRUTH_AS_NUMBER)
        return self._operate(node, left, right)

    def _operate(self, node: ast.BinOp | ast.AugAssign, left: Value, right: Value) -> Value:
        if isinstance(node.op, ast.FloorDiv) and (left.computed or right.computed):
            self._report_call(node, "floor_divide", Arguments((left, right)))
        return arithmetic(node.op, left, right)

    def visit_Compare(self, node: ast.Compare) -> Value:
        values = [self._value(part) for part in (node.left, *node.comparators)]
        results = list(map(comparison, node.ops, values, values[1:]))
        if len(results) == 1:
            return results[0]
        truths = [value.decided for value in results]
        if False in truths or None not in truths:
            return from_object(False not in truths)
        return _all_of(results)

    def visit_IfExp(self, node: ast.IfExp) -> Value:
        test = self._test(node.test)
        if test.decided is not None:
            return self._value(node.body if test.decided else node.orelse)
        same = ast.dump(node.body) == ast.dump(node.orelse)
        self._report_condition(test, node, changes=not same)
        then_value, else_value = self._value(node.body), self._value(node.orelse)
        if test.tensor and ranks_differ(then_value, else_value):
            self.report(node, Hazard("TRC015"))
        return join([then_value, else_value])

    def visit_Subscript(self, node: ast.Subscript) -> Value:
        owner = self._value(node.value)
        if owner.tensor:
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                self.report(node, rules.ITEM_OF_DICT)
                return tensor()
            index = self._index(node.slice)
            self.report(node, *torch_rules.read_hazards(index))
            return index.select(owner)
        if isinstance(node.slice, ast.Slice):
            return self._sliced(owner, node.slice)
        key = self._value(node.slice)
        listed = isinstance(owner.object, list | tuple | dict | nn.ModuleList | nn.ModuleDict)
        if key.computed and (listed or owner.items or owner.kind is Kind.TENSORS):
            self.report(node.slice, rules.SELECTED_ITEM)
        if isinstance(owner.object, dict | nn.ModuleDict) and isinstance(key.object, str):
            container = owner.object  # its class may define how an item is read
            return from_object(container[key.object]) if key.object in container else UNKNOWN
        return item(owner, key.object if isinstance(key.object, int) else None)

    def _sliced(self, owner: Value, bounds: ast.Slice) -> Value:
        ends = (bounds.lower, bounds.upper, bounds.step)
        numbers = [self._value(end).object if end else None for end in ends]
        if owner.kind is Kind.SHAPE:
            return Value(Kind.SHAPE, axis=numbers[0] if isinstance(numbers[0], int) else 0)
        plain = all(number is None or isinstance(number, int) for number in numbers)
        if plain and isinstance(owner.object, list | tuple | str):
            return from_object(owner.object[slice(*numbers)])
        return Value(owner.kind)

    def _index(self, node: ast.expr) -> IndexExpression:
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return IndexExpression(tuple(map(self._index_part, parts)))

    def _index_part(self, node: ast.expr) -> Value | str:
        if isinstance(node, ast.Slice):
            lower = from_object(0) if node.lower is None else self._value(node.lower)
            upper = None if node.upper is None else self._value(node.upper)
            if node.step is not None:
                self.visit(node.step)
            if not isinstance(lower.object, int):
                return torch_rules.SLICE
            stop = lower.object + 1 or None
            unit = stop is None if upper is None else upper.object == lower.object + 1
            return torch_rules.UNIT if unit else torch_rules.SLICE
        value = self._value(node)
        if value.object is Ellipsis:
            return torch_rules.ELLIPSIS
        return torch_rules.NEW if value.object is None else value

    # --- attributes -------------------------------------------------------------------------------

    def visit_Attribute(self, node: ast.Attribute) -> Value:
        owner, name = self._value(node.value), node.attr
        obj = owner.object
        if owner.tensor:
            if name == "data":
                self.report(node, Hazard("TRC006", "warning" if owner.constant else None))
            return _tensor_attribute(owner, name)
        if owner.sized:
            return from_object(Method(owner, name))
        if obj is NOTHING:
            return UNKNOWN
        if isinstance(obj, nn.Module):
            written = self.names.get(ast.unparse(node))
            return written or self._module_attribute(obj, name)
        read = _super_attribute if type(obj) is super else _object_attribute
        return read(obj, name)

    def _module_attribute(self, module: nn.Module, name: str) -> Value:
        if name == "training":
            return from_object(False)  # exports are made in eval mode
        for attributes in (module.__dict__, module._parameters, module._buffers, module._modules):
            if name in attributes:
                return from_object(attributes[name])
        attribute = inspect.getattr_static(type(module), name, NOTHING)
        if isinstance(attribute, property) and attribute.fget is not None:
            return self.linter.call(attribute.fget, Arguments((from_object(module),)), self)
        return _bind(attribute, module)

    # --- calls ------------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> Value:
        callee = self._value(node.func).object
        arguments = self._arguments(node)
        if callee is NOTHING or callee is None:
            return UNKNOWN
        if isinstance(callee, Method):
            return self._call_method(node, callee, arguments)
        if isinstance(callee, _LocalFunction):
            return self.linter.call_local(callee, arguments)
        if isinstance(callee, nn.Module):
            return self.linter.call_module(callee, arguments, self)
        plain = isinstance(callee, type | types.FunctionType | types.BuiltinFunctionType)
        if plain and callee in _BUILTINS:
            return _BUILTINS[callee](self, node, arguments)
        return self._call_function(node, callee, arguments)

    def _arguments(self, node: ast.Call) -> Arguments:
        positional: list[Value] = []
        spread = any(keyword.arg is None for keyword in node.keywords)
        sure = True
        for part in node.args:
            value = self._value(part)
            if isinstance(part, ast.Starred):
                static = value.object if isinstance(value.object, list | tuple) else ()
                count = len(value.items) or len(static)
                if sure and count:
                    positional += [item(value, position) for position in range(count)]
                    continue
                sure, value = False, item(value, None)
            positional.append(value)
        values = [(keyword.arg, self._value(keyword.value)) for keyword in node.keywords]
        keywords = {name: value for name, value in values if name is not None}
        return Arguments(tuple(positional), keywords, spread or not sure)

    def _super(self, arguments: Arguments) -> Value:
        if arguments.positional:
            after = arguments.first.object
            fits = isinstance(after, type) and isinstance(self.owner, after)
            return from_object(super(after, self.owner)) if fits else UNKNOWN
        function = self.code.function
        for cls in type(self.owner).__mro__:
            if python_function(vars(cls).get(function.__name__)) is function:
                return from_object(super(cls, self.owner))
        return UNKNOWN

    def _call_function(self, node: ast.Call, callee: Any, arguments: Arguments) -> Value:
        if isinstance(callee, type):
            return self._super(arguments) if callee is super else _instance(callee, arguments)
        package = _module_of(python_function(callee) or callee).partition(".")[0]
        name = str(getattr(callee, "__name__", ""))
        strategies = _FLAGS.get(name) if package in ("torch", "torchvision") else None
        if strategies is not None:
            active = self.linter.strategy in strategies
            return Value(Kind.PYTHON, flag=name) if active else from_object(False)
        if package == "torch":
            return self._call_torch(node, callee, arguments)
        if package in _NUMERIC and callee is not math.prod:
            return self._number(node, arguments, f"{package}.{name}")
        if package in sys.stdlib_module_names:
            return UNKNOWN
        return self.linter.call(callee, arguments, self)

    def _call_torch(self, node: ast.Call, callee: Any, arguments: Arguments) -> Value:
        name = callee.__name__
        owner = getattr(callee, "__self__", None)
        if isinstance(owner, nn.Module):
            return _module_method(owner, name)
        self.report(node, *torch_rules.dropout_hazards(callee, arguments))
        self._report_call(node, name, arguments)
        if name == "tensor":
            self._report_copy(node, arguments.get(0, "data") or PYTHON)
        if name == "is_nonzero":
            return tensor(mask=True)
        if name.startswith(_QUERY_PREFIXES):
            return PYTHON
        module = str(getattr(callee, "__module__", None) or "torch")
        computes = module == "torch" or module.startswith(_TENSOR_MODULES)
        return torch_result(name, arguments) if computes else UNKNOWN

    def _report_call(self, node: ast.expr | ast.stmt, name: str, arguments: Arguments) -> None:
        self.report(node, *torch_rules.call_hazards(name, arguments, self.linter.strategy))

    def _report_copy(self, node: ast.Call, data: Value) -> None:
        """Report numbers that `torch.tensor` copies into the file."""
        leaves = list(_leaves(data))
        if any(leaf.computed or leaf.kind is Kind.TENSORS for leaf in leaves):
            self.report(node, rules.COPIED_TENSOR)
        sizes = [leaf for leaf in leaves if leaf.sized]
        self._report_sizes(node, sizes, rewrite="use torch.as_tensor, or the size as it is")

    def _call_method(self, node: ast.Call, method: Method, arguments: Arguments) -> Value:
        owner, name = method.owner, method.name
        if not owner.tensor:
            if name in ("numel", "item", "__int__", "__float__", "__index__"):
                self._report_sizes(node, [owner])
                return PYTHON
            return UNKNOWN
        if name in _READS:
            if not owner.constant:
                self.report(node, Hazard(_READS[name]))
            return Value(Kind.PYTHON, read=True)
        if name in ("size", "numel", "nelement"):
            return PYTHON if owner.constant else _size(name, arguments)
        if name in ("index_put", "index_put_"):
            indices = arguments.get(0, "indices")
            items = list(indices.items.values()) if indices is not None else []
            wide = [i.rank for i in items if i.rank and i.rank.base == 0 and i.rank.offset > 1]
            if wide and items[0].object is None:
                self.report(node, Hazard("TRC010"))
        all_arguments = arguments.after(owner)
        if not owner.constant or name in ("index_add", "index_add_"):  # of zeros, mostly
            self._report_call(node, name, all_arguments)
        return torch_result(name, all_arguments)

    def _number(self, node: ast.Call, arguments: Arguments, name: str) -> Value:
        """Return the result of a function of this name that computes outside of torch."""
        if any(value.kind is Kind.TENSORS or value.computed for value in arguments.all):
            self.report(node, rules.NUMBER_OF_TENSOR.format(name))
            return Value(Kind.PYTHON, read=True)
        self._report_sizes(node, [value for value in arguments.all if value.sized])
        return PYTHON

    def _report_sizes(
        self, node: ast.Call, sizes: Sequence[Value], *, rewrite: str | None = None
    ) -> None:
        """Report sizes of the example that become constants: an error for the batch axis, which is
        dynamic."""
        if sizes:
            hazard = Hazard("TRC004") if common_axis(sizes) == 0 else rules.NUMBER_OF_SIZE
            self.report(node, hazard._replace(rewrite=rewrite))

    # --- Python's own functions -------------------------------------------------------------------

    def _call_number(self, node: ast.Call, arguments: Arguments) -> Value:
        if isinstance(arguments.first.object, int | float):
            return PYTHON
        return self._number(node, arguments, ast.unparse(node.func))

    def _call_bool(self, _node: ast.Call, arguments: Arguments) -> Value:
        # The condition that it stands in reports it, where it matters.
        value = arguments.first
        if value.tensor:
            return PYTHON if value.constant else tensor(mask=True, truth=True)
        return Value(value.kind, flag=value.flag)

    def _call_len(self, node: ast.Call, arguments: Arguments) -> Value:
        value = arguments.first
        if value.computed:
            self.report(node, Hazard("TRC005"))
        elif isinstance(value.object, list | tuple | dict | str | nn.ModuleList | nn.Sequential):
            return from_object(len(value.object))
        return PYTHON

    def _call_range(self, node: ast.Call, arguments: Arguments) -> Value:
        values = arguments.positional
        if any(value.tensor for value in values):
            self.report(node, rules.LOOP_OVER_RANGE)
            return Value(Kind.PYTHON, read=True)
        bounds = [value.object for value in values]
        if bounds and all(isinstance(bound, int) for bound in bounds):
            return from_object(range(*bounds))
        return Value(Kind.PYTHON, loop=any(value.kind is Kind.SIZE for value in values))

    def _call_iterating(self, node: ast.Call, arguments: Arguments) -> Value:
        """Report a function that iterates over a tensor."""
        name = ast.unparse(node.func)
        if any(value.computed for value in arguments.positional):
            self.report(node, rules.ITERATING_FUNCTION.format(name))
            return tensor() if name in ("sum", "min", "max") else Value(Kind.TENSORS)
        return UNKNOWN

    def _call_list(self, node: ast.Call, arguments: Arguments) -> Value:
        value = arguments.first
        if value.tensor:
            return self._call_iterating(node, arguments)
        return Value(value.kind, object=value.object, axis=value.axis, items=value.items,
                     loop=value.loop)  # fmt: skip

    def _call_extreme(self, node: ast.Call, arguments: Arguments) -> Value:
        """Report `min` and `max` of sizes or tensors, which the example decides."""
        name, values = ast.unparse(node.func), arguments.positional
        sizes = [value for value in values if value.sized]
        if sizes:
            self.report(node, rules.EXTREME_OF_SIZES.format(name))
            return Value(Kind.SIZE, axis=common_axis(sizes))
        if len(values) > 1 and any(value.computed for value in values):
            self.report(node, rules.EXTREME_OF_TENSORS.format(name))
            return tensor()
        numbers = [value.object for value in values]
        if len(values) > 1 and all(isinstance(number, int | float) for number in numbers):
            return from_object(min(numbers) if name == "min" else max(numbers))
        return self._call_iterating(node, arguments)

    def _call_round(self, node: ast.Call, arguments: Arguments) -> Value:
        value = arguments.first
        if value.kind is Kind.SIZE:
            self._report_sizes(node, [value])
        return value if value.tensor else PYTHON

    def _call_zip(self, node: ast.Call, arguments: Arguments) -> Value:
        """Return an iterable of tuples, with one item of each argument."""
        self._call_iterating(node, arguments)
        values = arguments.positional
        return Value(
            Kind.UNKNOWN,
            loop=any(value.loop for value in values),
            items={0: Value(Kind.UNKNOWN, items=dict(enumerate(map(_first_item, values))))},
        )

    def _call_enumerate(self, node: ast.Call, arguments: Arguments) -> Value:
        return self._call_zip(node, Arguments((PYTHON, *arguments.positional[:1])))

    def _call_isinstance(self, _node: ast.Call, arguments: Arguments) -> Value:
        value, against = arguments.first, arguments.get(1, "") or UNKNOWN
        classes = against.object if isinstance(against.object, tuple) else (against.object,)
        if not all(isinstance(cls, type) for cls in classes):
            return PYTHON
        if value.tensor:
            return from_object(issubclass(torch.Tensor, classes))
        has_object = value.kind is Kind.PYTHON and value.object is not NOTHING
        return from_object(isinstance(value.object, classes)) if has_object else PYTHON

    def _call_hasattr(self, _node: ast.Call, arguments: Arguments) -> Value:
        obj, name = arguments.first.object, arguments.get(1, "") or UNKNOWN
        if isinstance(obj, nn.Module) and isinstance(name.object, str):
            return from_object(hasattr(obj, name.object))
        return PYTHON


_BUILTINS: dict[Any, Callable[[_ForwardVisitor, ast.Call, Arguments], Value]] = {
    **dict.fromkeys((int, float, complex), _ForwardVisitor._call_number),
    bool: _ForwardVisitor._call_bool,
    len: _ForwardVisitor._call_len,
    range: _ForwardVisitor._call_range,
    **dict.fromkeys((list, tuple, reversed, iter), _ForwardVisitor._call_list),
    **dict.fromkeys((sorted, set, sum, any, all), _ForwardVisitor._call_iterating),
    **dict.fromkeys((min, max), _ForwardVisitor._call_extreme),
    round: _ForwardVisitor._call_round,
    enumerate: _ForwardVisitor._call_enumerate,
    zip: _ForwardVisitor._call_zip,
    isinstance: _ForwardVisitor._call_isinstance,
    hasattr: _ForwardVisitor._call_hasattr,
    **dict.fromkeys((getattr, importlib.import_module), lambda *_: UNKNOWN),
    **dict.fromkeys((print, warnings.warn), lambda *_: from_object(None)),
    **dict.fromkeys(
        (typing.cast, copy.copy),
        lambda _visitor, _node, arguments: next(iter(arguments.positional[-1:]), UNKNOWN),
    ),
}
"""Python's own functions."""


@dataclass(frozen=True)
class _LocalFunction:
    """A function defined inside another function."""

    definition: Definition
    scope: _ForwardVisitor


class _Branch(NamedTuple):
    """The state after an alternative of `if`, `try` or `match`."""

    ended: bool
    """True if its end is never reached."""
    names: Names
    returned: int
    """Number of values that the function returned until then."""


def _join_names(branches: Sequence[Names]) -> Names:
    names = dict.fromkeys(name for branch in branches for name in branch)
    return {name: join([b[name] for b in branches if name in b]) for name in names}


def _all_or_any(node: ast.BoolOp, parts: Sequence[Value]) -> Value:
    """Return the condition `and` or `or` makes of its parts, up to the one that decides."""
    undecided = [part for part in parts if part.decided is None]
    if not undecided:
        return from_object(parts[-1].decided)
    stops = parts[-1].decided is isinstance(node.op, ast.Or)
    return _all_of([*undecided, parts[-1]] if stops else undecided)


def _all_of(values: Sequence[Value]) -> Value:
    """Return the part of a condition that has the most severe finding."""
    flags = [part for part in values if part.flag]
    kinds = (Kind.TENSOR, Kind.SIZE, Kind.UNKNOWN)
    severe = [*flags, *(part for kind in kinds for part in values if part.kind is kind)]
    read = any(value.read for value in values)
    return severe[0] if severe else Value(Kind.PYTHON, read=read)


def _is_chosen(value: Value) -> bool:
    """True for a value other than True or False."""
    if value.tensor:
        return not value.mask and value.rank not in (None, SCALAR)
    number = isinstance(value.object, int | float | str) and not isinstance(value.object, bool)
    return number or value.kind is Kind.TENSORS


def _first_item(value: Value) -> Value:
    if value.kind in (Kind.TENSOR, Kind.TENSORS):
        return tensor()
    if value.object is not NOTHING:
        return item(value, 0)
    return PYTHON if value.kind is Kind.PYTHON and not value.items else UNKNOWN


def _leaves(value: Value) -> Iterator[Value]:
    """Yield the items of a value, and of its items; the value itself where it has none."""
    if value.items and not (value.sized or value.tensor or value.kind is Kind.TENSORS):
        for each in value.items.values():
            yield from _leaves(each)
    else:
        yield value


def _size(name: str, arguments: Arguments) -> Value:
    axis = arguments.get(0, "dim")
    if axis is None:
        return Value(Kind.SHAPE if name == "size" else Kind.SIZE, axis=0)
    return Value(Kind.SIZE, axis=axis.object if isinstance(axis.object, int) else None)


def _tensor_attribute(owner: Value, name: str) -> Value:
    if name == "shape":
        if not owner.constant:
            return Value(Kind.SHAPE, axis=0)
        stored = isinstance(owner.object, torch.Tensor)
        return from_object(tuple(owner.object.shape)) if stored else PYTHON
    if name == "data":
        return tensor(owner.rank, unit=owner.unit)
    if name in _PYTHON_ATTRIBUTES:
        return PYTHON
    return tensor() if name in _TENSOR_ATTRIBUTES else from_object(Method(owner, name))


def _object_attribute(owner: Any, name: str) -> Value:
    if isinstance(owner, types.ModuleType | type):
        try:
            return from_object(getattr(owner, name))
        except Exception:  # modules may load what is missing
            return UNKNOWN
    attribute = inspect.getattr_static(owner, name, NOTHING)
    if isinstance(attribute, _C_ATTRIBUTES):
        return from_object(getattr(owner, name, None))
    return PYTHON if isinstance(attribute, property) else _bind(attribute, owner)


def _super_attribute(parent: Any, name: str) -> Value:
    classes = type(parent.__self__).__mro__
    after = classes[classes.index(parent.__thisclass__) + 1 :]
    attributes = (vars(cls)[name] for cls in after if name in vars(cls))
    return _bind(next(attributes, NOTHING), parent.__self__)


def _bind(attribute: Any, owner: Any) -> Value:
    """Bind an attribute of a class to an object."""
    if isinstance(attribute, types.FunctionType | staticmethod | classmethod):
        return from_object(attribute.__get__(owner, type(owner)))
    if python_function(attribute) is not None:
        return from_object(types.MethodType(attribute, owner))
    return from_object(attribute) if not hasattr(type(attribute), "__get__") else UNKNOWN


def _instance(cls: type, arguments: Arguments) -> Value:
    if issubclass(cls, dict):
        return Value(Kind.DICT)
    if issubclass(cls, torch.Size):
        return Value(Kind.SHAPE)
    if issubclass(cls, torch.Tensor):
        return torch_result(cls.__name__, arguments)
    if cls.__module__.split(".")[0] == "torch":
        return tensor() if issubclass(cls, torch.autograd.Function) else PYTHON
    return UNKNOWN


def _module_method(owner: nn.Module, name: str) -> Value:
    """Return the result of a method that torch gives every module."""
    if name in ("forward", "__call__"):
        return tensor()
    if name in ("values", "children", "modules"):
        return from_object(owner)  # to loop over
    if name in ("items", "named_children", "named_modules"):
        child = next(map(from_object, owner.children()), UNKNOWN)
        turn = Value(Kind.UNKNOWN, items={0: PYTHON, 1: child})
        return Value(Kind.UNKNOWN, items={0: turn})
    return UNKNOWN


def _module_of(function: Any) -> str:
    """Return the module that a function belongs to, `torch` for torch's builtins."""
    if isinstance(function, torch.jit.ScriptFunction):
        return "torch"
    module = getattr(function, "__module__", None)
    if module is None:
        if getattr(torch, str(getattr(function, "__name__", "")), None) is function:
            return "torch"
        owner = getattr(function, "__self__", None)
        module = getattr(owner, "__name__", None) or type(owner).__module__
    return str(module)


def _is_of_torch(function: Any) -> bool:
    """True for torch's own code, which is written to be exported; not for torchvision's."""
    return str(function.__module__).partition(".")[0] == "torch"
