"""What the arguments of a function are: as a call gives them, else as annotations and defaults
say, else tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from gate.lint.scope import Arguments
from gate.lint.source import Definition
from gate.lint.value import NOTHING, Kind, Rank, StaticValue, join, of_object, tensor, unknown

_WORDS = {
    "Tensor": Kind.TENSOR,
    "FloatTensor": Kind.TENSOR,
    "LongTensor": Kind.TENSOR,
    "int": Kind.PYTHON,
    "float": Kind.PYTHON,
    "bool": Kind.PYTHON,
    "str": Kind.PYTHON,
    "Size": Kind.SHAPE,
    "dict": Kind.DICT,
    "Dict": Kind.DICT,
    "Mapping": Kind.DICT,
    "OrderedDict": Kind.DICT,
}
_SEQUENCES = frozenset({"list", "List", "tuple", "Tuple", "Sequence", "Iterable"})
_EITHER = frozenset({"Optional", "Union", "Annotated", "Final"})


def bound(
    definition: Definition, function: FunctionType | None, given: Arguments
) -> dict[str, StaticValue]:
    """Names to values for a call. What is not given has its default."""
    names = {}
    for position, argument in enumerate(_positional(definition)):
        value = given.get(position, argument.arg)
        names[argument.arg] = value or _left_out(argument, function, given)
    for argument in definition.args.kwonlyargs:
        value = given.keywords.get(argument.arg)
        names[argument.arg] = value or _left_out(argument, function, given)
    names.update(_rest(definition, given))
    return names


def declared(
    definition: Definition, function: FunctionType | None, owner: StaticValue | None
) -> dict[str, StaticValue]:
    """Names to values of a forward that nobody was seen to call."""
    names = {}
    arguments = [*_positional(definition), *definition.args.kwonlyargs]
    for position, argument in enumerate(arguments):
        if position == 0 and owner is not None:
            names[argument.arg] = owner
        else:
            names[argument.arg] = _declared(argument, function)
    if definition.args.vararg:
        names[definition.args.vararg.arg] = StaticValue(Kind.TENSORS)
    if definition.args.kwarg:
        names[definition.args.kwarg.arg] = unknown()
    return names


def annotated(node: ast.expr | None) -> StaticValue | None:
    """What an annotation promises; None where it says nothing that is known."""
    if isinstance(node, ast.Constant):
        return of_object(None) if node.value is None else annotated(_parsed(node.value))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _either([annotated(node.left), annotated(node.right)])
    if isinstance(node, ast.Subscript):
        return _generic(node)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if name in _WORDS:
        kind = _WORDS[name]
        return tensor(Rank.new()) if kind is Kind.TENSOR else StaticValue(kind)
    return unknown() if name and name != "Any" else None


def is_text(node: ast.expr | None) -> bool:
    """True for an annotation that is `str`, or a choice of texts."""
    text = "" if node is None else ast.unparse(node)
    return text == "str" or text.startswith(("Literal['", "str |", "Optional[str"))


def _generic(node: ast.Subscript) -> StaticValue | None:
    base = node.value
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    parts = [annotated(part) for part in inner]
    if name in _EITHER:
        return _either([*parts, *([of_object(None)] if name == "Optional" else [])])
    if name in _SEQUENCES:
        tensors = any(part is not None and part.tensor for part in parts)
        return StaticValue(Kind.TENSORS) if tensors else StaticValue(Kind.PYTHON)
    if name == "Literal":
        return StaticValue(Kind.PYTHON)
    return annotated(base)


def _either(parts: list[StaticValue | None]) -> StaticValue | None:
    """Of several types; a tensor or None is a tensor that may be missing: nothing is known."""
    present = [part for part in parts if part is not None and part.object is not None]
    if not present:
        return None
    found = join(present)
    optional = any(part is not None and part.object is None for part in parts)
    return unknown() if optional and not found.tensor else found


def _parsed(text: object) -> ast.expr | None:
    """An annotation in quotes."""
    try:
        return ast.parse(str(text), mode="eval").body
    except SyntaxError:
        return None


def _positional(definition: Definition) -> list[ast.arg]:
    return [*definition.args.posonlyargs, *definition.args.args]


def _left_out(argument: ast.arg, function: FunctionType | None, given: Arguments) -> StaticValue:
    default = _default(argument, function)
    if given.spread or default is NOTHING:
        return annotated(argument.annotation) or unknown()
    return of_object(default)


def _declared(argument: ast.arg, function: FunctionType | None) -> StaticValue:
    promised = annotated(argument.annotation)
    if promised is not None:
        return promised
    default = _default(argument, function)
    if default is NOTHING:
        return tensor(Rank.new())
    # A default of None may stand for a tensor or for a number: nothing is known.
    return unknown() if default is None else StaticValue(of_object(default).kind)


def _default(argument: ast.arg, function: FunctionType | None) -> Any:
    if function is None:
        return NOTHING
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    if argument.arg in names:
        behind = names.index(argument.arg) - (len(names) - len(defaults))
        return defaults[behind] if behind >= 0 else NOTHING
    return (function.__kwdefaults__ or {}).get(argument.arg, NOTHING)


def _rest(definition: Definition, given: Arguments) -> Iterator[tuple[str, StaticValue]]:
    if definition.args.vararg:
        more = given.positional[len(_positional(definition)) :]
        tensors = bool(more) and all(value.tensor for value in more)
        kind = Kind.TENSORS if tensors else Kind.UNKNOWN
        yield definition.args.vararg.arg, StaticValue(kind, items=dict(enumerate(more)))
    if definition.args.kwarg:
        yield definition.args.kwarg.arg, unknown()
