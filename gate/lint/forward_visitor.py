"""The walk through a model: every forward, and every function of the user that it reaches."""

from __future__ import annotations

import ast
import functools
import inspect
from typing import Any

import torch
from torch import nn

from gate.lint import arguments as binding
from gate.lint.expressions import evaluate
from gate.lint.flow import run
from gate.lint.outputs import Guarded, attributes_read
from gate.lint.rewritten import READ_ON
from gate.lint.rulebook import RULES
from gate.lint.scope import Arguments, FunctionScope, Local
from gate.lint.source import Code, Definition, Unreadable, python_function, trees_of
from gate.lint.value import Kind, StaticValue, join, of_object, tensor, unknown
from gate.records.lint import LintFinding
from gate.records.strategy import Strategy

_DEEP = 16
"""Calls in calls: deeper ones are taken as not known."""
_TRUSTED = "torch"
"""Modules and functions of torch itself are written to be exported; not torchvision's."""


class ModelWalk:
    """Reads what the model runs; collects findings and what can't be read."""

    def __init__(self, model: nn.Module, strategy: Strategy) -> None:
        self.strategy: Strategy = strategy
        self.findings: dict[tuple[str, str, int, int], LintFinding] = {}
        self.not_read: dict[str, str] = {}
        self.read: set[Any] = set()
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._results: dict[Any, StaticValue] = {}
        self._open: set[Any] = set()
        self._walked: set[int] = set()

    def whole(self) -> None:
        """The model's own forward first, then those that it was not seen to call."""
        for module in self._model.modules():
            if id(module) not in self._walked:
                self.call_module(module, None, None)

    # --- what the flow asks -------------------------------------------------------------------

    def call_module(
        self, module: nn.Module, arguments: Arguments | None, scope: FunctionScope | None
    ) -> StaticValue:
        """See `Walk`. `arguments` None: as the forward declares them."""
        self._walked.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            self.unread(self._paths.get(id(module), "") or str(module.original_name),
                        "it is TorchScript already: read its source as an nn.Module")  # fmt: skip
            return unknown()
        forward = inspect.getattr_static(module, "forward", None)
        function = python_function(forward)
        if function is None or (_of_torch(function) and type(module) not in READ_ON):
            return self._torch_module(module, arguments, scope)
        owner = None if inspect.ismethod(forward) or isinstance(forward, staticmethod) else module
        given = arguments
        if arguments is not None and owner is not None:
            given = arguments.after(of_object(owner))
        return self._function(function, given, (module, scope))

    def follow(self, function: Any, arguments: Arguments, scope: FunctionScope) -> StaticValue:
        """See `Walk`."""
        arguments = _with_partial(function, arguments)
        owner = getattr(function, "__self__", None)
        if owner is not None:
            arguments = arguments.after(of_object(owner))
        found = python_function(function)
        if found is None:
            self.unread(function, "it has no Python source")
            return unknown()
        if _of_torch(found):
            return tensor()
        owner = owner if owner is not None else scope.owner
        return self._function(found, arguments, (owner, scope))

    def call_local(self, local: Local, arguments: Arguments) -> StaticValue:
        """See `Walk`."""
        outer, definition = local.scope, local.definition
        if outer.depth >= _DEEP or definition in self._open:
            return unknown()
        names = binding.bound(definition, None, arguments)
        scope = FunctionScope(outer.code, self, outer.path, names, outer.owner, outer,
                      depth=outer.depth + 1)  # fmt: skip
        self._open.add(definition)
        try:
            return _result(definition, scope)
        finally:
            self._open.discard(definition)

    def tell(
        self, scope: FunctionScope, node: ast.expr | ast.stmt, code: str, **instead: str
    ) -> None:
        """See `Walk`."""
        rule = RULES[code]
        if self.strategy not in rule.strategies:
            return
        place = (code, scope.code.path, node.lineno, node.col_offset)
        if place in self.findings:
            return
        fields: dict[str, Any] = {
            "level": rule.level, "message": rule.message, "rewrite": rule.rewrite, **instead
        }  # fmt: skip
        self.findings[place] = LintFinding(
            code=code,
            path=scope.code.path,
            line=node.lineno,
            module=scope.path,
            expression=scope.code.text(node),
            suppressed=scope.code.silences(code, node),
            **fields,
        )

    def unread(self, thing: Any, reason: str) -> None:
        """See `Walk`."""
        name = thing if isinstance(thing, str) else _name(thing)
        self.not_read.setdefault(name, reason)

    def reaches(self, node: ast.If | ast.IfExp, scope: FunctionScope) -> bool:
        """See `Walk`."""
        guarded = Guarded.of(node, scope.code.definition)
        written = guarded.written() if guarded is not None else None
        if guarded is None or written is None:
            return True
        attributes = {place.partition(".")[2] for place in written if "." in place}
        if not attributes and not written & guarded.reaching():
            return False
        trees = trees_of(type(module) for module in self._model.modules())
        elsewhere = attributes_read(trees, left_out=guarded.left_out) if trees else attributes
        return bool(written & guarded.reaching() or attributes & elsewhere)

    # --- functions ----------------------------------------------------------------------------

    def _function(
        self, function: Any, arguments: Arguments | None, place: tuple[Any, FunctionScope | None]
    ) -> StaticValue:
        owner, caller = place
        depth = caller.depth + 1 if caller else 0
        key = (function, id(owner), arguments.signature if arguments else None)
        if key in self._results:
            return self._results[key]
        if key in self._open or depth > _DEEP:
            return unknown()
        try:
            code = Code.of(function)
        except Unreadable as error:
            self.unread(function, str(error))
            return unknown()
        self.read.add(function)
        path = self._paths.get(id(owner), caller.path if caller else "")
        top = caller is None and owner is self._model
        names = self._names(code, arguments, owner)
        scope = FunctionScope(code, self, path, names, owner, top=top, depth=depth)
        if top:
            _inputs(scope)
        self._open.add(key)
        try:
            self._results[key] = _result(code.definition, scope)
        except Exception as error:  # a model may hold anything; what stays unread is told
            self.unread(function, f"the rules can't follow it: {type(error).__name__}: {error}")
            return unknown()
        finally:
            self._open.discard(key)
        return self._results[key]

    def _names(self, code: Code, arguments: Arguments | None, owner: Any) -> dict[str, StaticValue]:
        if arguments is not None:
            return binding.bound(code.definition, code.function, arguments)
        return binding.declared(code.definition, code.function, of_object(owner))

    def _torch_module(
        self, module: nn.Module, arguments: Arguments | None, scope: FunctionScope | None
    ) -> StaticValue:
        """torch's own: containers are gone through, the others return tensors."""
        if not isinstance(module, nn.Sequential) or arguments is None or scope is None:
            return _from_torch(module, arguments)
        value = None
        for child in module.children():
            value = self.call_module(child, arguments, scope)
            arguments = Arguments((value,))
        return value or next(iter(arguments.positional), unknown())


def _from_torch(module: nn.Module, arguments: Arguments | None) -> StaticValue:
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return StaticValue(Kind.TENSORS, items={0: tensor()})
    given = arguments.get(0, "input") if arguments is not None else None
    rank = given.rank if given is not None and given.tensor else None
    if isinstance(module, nn.Embedding):
        rank = rank.plus(1) if rank else None
    elif isinstance(module, nn.Flatten | nn.Unflatten | nn.Fold | nn.Unfold):
        rank = None
    return tensor(rank)


def _result(definition: Definition, scope: FunctionScope) -> StaticValue:
    if isinstance(definition, ast.Lambda):
        return evaluate(definition.body, scope)
    run(definition.body, scope)
    return join(scope.returned) if scope.returned else of_object(None)


def _inputs(scope: FunctionScope) -> None:
    """What the model itself takes becomes the inputs of the file."""
    definition = scope.code.definition
    for argument in (*definition.args.posonlyargs, *definition.args.args)[1:]:
        value = scope.names.get(argument.arg)
        if value is None or not isinstance(argument, ast.arg):
            continue
        if binding.is_text(argument.annotation) or _text_default(scope, argument.arg):
            _tell_input(scope, argument, "an input is text: the file has the example's in it",
                        "put the choice that it makes into __init__")  # fmt: skip
        elif value.kind is Kind.DICT:
            _tell_input(scope, argument, "an input is a dict: the file takes its tensors by "
                        "position, in the order of the example's keys", "take the tensors one by "
                        "one: forward(self, image, mask)")  # fmt: skip


def _tell_input(scope: FunctionScope, argument: ast.arg, message: str, rewrite: str) -> None:
    node = ast.copy_location(ast.Name(id=argument.arg), argument)
    node.end_lineno, node.end_col_offset = argument.end_lineno, argument.end_col_offset
    scope.tell("TRC012", node, message=message, rewrite=rewrite)


def _text_default(scope: FunctionScope, name: str) -> bool:
    parameters = inspect.signature(scope.code.function).parameters
    return name in parameters and isinstance(parameters[name].default, str)


def _with_partial(function: Any, arguments: Arguments) -> Arguments:
    while isinstance(function, functools.partial):
        arguments = Arguments(
            (*map(of_object, function.args), *arguments.positional),
            {**{k: of_object(v) for k, v in function.keywords.items()}, **arguments.keywords},
            arguments.spread,
        )
        function = function.func
    return arguments


def _of_torch(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == _TRUSTED


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return f"{module}.{getattr(thing, '__qualname__', type(thing).__name__)}"
