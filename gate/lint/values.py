"""Abstract values of four kinds: tensor, shape, Python, unknown."""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gate.lint.source import Definition, FunctionSource
from gate.records.export import LintLevel, Strategy


class Kind(Enum):
    """The kind of a value while the model runs."""

    TENSOR = "tensor"
    TENSORS = "tuple or list of tensors"
    SHAPE = "torch.Size"
    SIZE = "number of a shape"
    DICT = "dict"
    PYTHON = "anything else, the same for every input"
    UNKNOWN = "not known"


class _Nothing(Enum):
    NOTHING = "not known"


NOTHING = _Nothing.NOTHING
"""Stands for an object that is not known (None is an object)."""


_ids = itertools.count(1)


@dataclass(frozen=True)
class Rank:
    """A number of axes: `offset` more than those of an argument (`base`); base 0: than none."""

    base: int
    offset: int

    @classmethod
    def new(cls) -> Rank:
        """The rank of an argument: not known, but equal to itself."""
        return cls(next(_ids), 0)

    def plus(self, axes: int) -> Rank:
        """Return the value with this many axes more."""
        return Rank(self.base, self.offset + axes)

    def below(self, other: Rank | None) -> bool:
        """True if it is known to be smaller."""
        return other is not None and self.base == other.base and self.offset < other.offset


@dataclass(eq=False)
class Value:
    """Compared by identity: two names of one size are one value."""

    kind: Kind
    object: Any = NOTHING
    """The object itself, where the model's own attributes and globals tell it."""
    fixed: bool = False
    """A tensor that is computed from weights alone."""
    rank: Rank | None = None
    """Of a tensor."""
    unit: bool = False
    """A tensor that has an axis of size 1 by the way it was made."""
    lowered: bool = False
    """A tensor from which something was subtracted: it may be negative."""
    mask: bool = False
    """A tensor of bools."""
    truth: bool = False
    """What Python made of a tensor, by `not`, `and`, `or`, `bool`: no tensor, but True or False."""
    read: bool = False
    """A Python value that was read from a tensor."""
    flag: str | None = None
    """True only while the model is exported: the name of the function that tells."""
    loop: bool = False
    """Something to loop over whose length depends on the input's size."""
    axis: int | None = None
    """Of a size; of a shape: its first axis."""
    shape: Value | None = None
    """The shape that a size belongs to."""
    items: dict[int, Value] = field(default_factory=dict)
    """What was taken from a shape by index, or the items of a tuple, list or dict."""

    @property
    def tensor(self) -> bool:
        """True for a tensor."""
        return self.kind is Kind.TENSOR

    @property
    def elements(self) -> torch.Tensor | None:
        """The elements, where they can be read: not of a tensor on the meta device."""
        thing = self.object
        readable = isinstance(thing, torch.Tensor) and not (is_lazy(thing) or thing.is_meta)
        return thing if readable else None

    @property
    def constant(self) -> bool:
        """True for a tensor that is the same for every input: a literal, a weight, what is
        computed from these."""
        return self.fixed or isinstance(self.object, torch.Tensor)

    def with_rank(self, rank: Rank | None, *, unit: bool | None = None) -> Value:
        """The same tensor in another rank."""
        unit = self.unit if unit is None else unit
        return replace(self, object=NOTHING, rank=rank, unit=unit, items={})


def tensor(rank: Rank | None = None, **facts: Any) -> Value:
    """A tensor whose elements are not known."""
    return Value(Kind.TENSOR, rank=rank, **facts)


def python() -> Value:
    """A Python value that does not depend on the input."""
    return Value(Kind.PYTHON)


def unknown() -> Value:
    """Nothing is known, so nothing is said about it."""
    return Value(Kind.UNKNOWN)


def of_object(thing: Any) -> Value:
    """The value of an attribute, a global, a default."""
    if isinstance(thing, torch.Tensor) and is_lazy(thing):
        return Value(Kind.TENSOR, object=thing)
    if isinstance(thing, torch.Tensor):
        return Value(Kind.TENSOR, object=thing, rank=Rank(0, thing.dim()), unit=1 in thing.shape)
    if isinstance(thing, torch.Size):
        return Value(Kind.PYTHON, object=tuple(thing))
    if isinstance(thing, list | tuple) and thing and all(map(torch.is_tensor, thing)):
        return Value(Kind.TENSORS, object=thing)
    return Value(Kind.PYTHON, object=thing)


def common_axis(sizes: Iterable[Value]) -> int | None:
    """The axis that numbers of shapes come from: the batch if one of them does; None: unknown."""
    axes = {size.axis for size in sizes}
    if 0 in axes:
        return 0
    return axes.pop() if len(axes) == 1 else None


def ranks_differ(one: Value, other: Value) -> bool:
    """True for two tensors that are known to have different numbers of axes."""
    if one.rank is None or other.rank is None:
        return False
    return one.rank.below(other.rank) or other.rank.below(one.rank)


def join(values: Iterable[Value]) -> Value:
    """Return what holds for all values: after two branches, after a loop."""
    first, *others = values
    for other in others:
        first = _join(first, other)
    return first


def _join(one: Value, other: Value) -> Value:
    if one is other:
        return one
    kinds = {one.kind, other.kind}
    if kinds == {Kind.TENSOR}:
        rank = one.rank if one.rank == other.rank else None
        return tensor(rank, unit=one.unit and other.unit, mask=one.mask and other.mask,
                      lowered=one.lowered or other.lowered,
                      fixed=one.constant and other.constant)  # fmt: skip
    if len(kinds) == 1:
        same = one.object is other.object
        if one.kind is Kind.PYTHON:
            return one if same and one.object is not NOTHING else Value(
                Kind.PYTHON, read=one.read or other.read
            )  # fmt: skip
        return Value(one.kind, axis=one.axis if one.axis == other.axis else None)
    plain = one if one.kind is Kind.PYTHON else other if other.kind is Kind.PYTHON else None
    if plain is not None and (plain.object is None or isinstance(plain.object, int | float)):
        # `mask = None` or `total = 0` before it becomes a tensor.
        rest = other if plain is one else one
        return replace(rest, object=NOTHING, rank=None)
    return unknown()


_FEW = 16
"""Items of a list that are looked at."""


def item(value: Value, position: int | None) -> Value:
    """Return what unpacking, or `[position]`, takes from a value; None: any of its items."""
    if value.kind is Kind.SHAPE:
        return _size(value, position)
    if position is not None and position in value.items:
        return value.items[position]
    if position is None and value.items:
        return join(value.items.values())
    if value.object is not NOTHING and not value.tensor:
        return _item_of_object(value.object, position)
    if value.kind in (Kind.TENSOR, Kind.TENSORS):
        return tensor(fixed=value.constant)
    return unknown()


def has_items(value: Value) -> bool:
    """True for what Python takes items from, not torch."""
    listed = isinstance(value.object, list | tuple | dict | nn.ModuleList | nn.ModuleDict)
    return listed or bool(value.items) or value.kind is Kind.TENSORS


def static_items(value: Value) -> list[Value]:
    """All of them, where their number is known; else none."""
    own = value.object if isinstance(value.object, list | tuple) else ()
    return [item(value, place) for place in range(len(value.items) or len(own))]


def sequence(values: Sequence[Value], made: type[list[Any] | tuple[Any, ...]]) -> Value:
    """The list or tuple of these values."""
    items = dict(enumerate(values))
    if values and all(value.tensor for value in values):
        return Value(Kind.TENSORS, items=items)
    objects: Any = NOTHING
    if all(value.object is not NOTHING for value in values):
        objects = made(value.object for value in values)
    return Value(Kind.PYTHON, object=objects, items=items)


def keyed(owner: Value, key: Value) -> Value:
    """Return what `owner[key]` takes from anything but a tensor."""
    if isinstance(owner.object, dict | nn.ModuleDict) and isinstance(key.object, str):
        return of_object(owner.object[key.object]) if key.object in owner.object else unknown()
    return item(owner, key.object if isinstance(key.object, int) else None)


def sliced(owner: Value, bounds: Sequence[Any]) -> Value:
    """Return what `owner[start:stop:step]` takes from anything but a tensor; None: an omitted
    bound."""
    if owner.kind is Kind.SHAPE:
        start = bounds[0] if isinstance(bounds[0], int) else 0
        return Value(Kind.SHAPE, axis=start)
    plain = all(bound is None or isinstance(bound, int) for bound in bounds)
    if plain and isinstance(owner.object, list | tuple | str):
        return of_object(owner.object[slice(*bounds)])
    return Value(owner.kind)


def _size(shape: Value, position: int | None) -> Value:
    """One and the same value for one axis, so that its names are known to share it."""
    if position is None:
        return Value(Kind.SIZE, axis=shape.axis, shape=shape)
    if position not in shape.items:
        axis = None if shape.axis is None else position + shape.axis
        shape.items[position] = Value(Kind.SIZE, axis=axis, shape=shape)
    return shape.items[position]


def _item_of_object(container: Any, position: int | None) -> Value:
    if isinstance(container, nn.Module):
        container = list(container.children())
        position = position or 0  # each child is read by itself, too
    if isinstance(container, list | tuple) and container:
        if position is not None and -len(container) <= position < len(container):
            return of_object(container[position])
        return join([of_object(one) for one in container[:_FEW]])
    return unknown() if isinstance(container, list | tuple) else python()


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call.

    `spread`: `*items` or `**items` are among them, so positions are unsure.
    """

    positional: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    spread: bool = False

    @property
    def all(self) -> tuple[Value, ...]:
        """Positional ones, then keywords."""
        return (*self.positional, *self.keywords.values())

    @property
    def signature(self) -> tuple[Any, ...]:
        """Return what two calls must share to be equal for the rules."""
        named = [*enumerate(self.positional), *sorted(self.keywords.items())]
        return (self.spread, *((name, *_facts(value)) for name, value in named))

    def after(self, *values: Value) -> Arguments:
        """The same behind these."""
        return replace(self, positional=(*values, *self.positional))

    def get(self, position: int, name: str) -> Value | None:
        """Return an argument by name or position; None if it was not passed, or may not be."""
        if name in self.keywords:
            return self.keywords[name]
        given = position < len(self.positional) and not self.spread
        return self.positional[position] if given else None


def _facts(value: Value) -> Iterator[Any]:
    yield value.kind
    with contextlib.suppress(Exception):
        thing = value.object
        plain = isinstance(thing, bool | int | float | str | type(None))
        yield thing if plain else id(thing)
    yield value.rank
    yield tuple(item.kind for item in value.items.values())


@dataclass(frozen=True)
class TensorMethod:
    """`x.sum`, before it is called."""

    tensor: Value
    name: str


@dataclass(frozen=True)
class ShapeMethod:
    """`x.shape.numel`, before it is called."""

    shape: Value
    name: str


@dataclass(frozen=True)
class Local:
    """A function that is defined inside of another one."""

    definition: Definition
    scope: Frame


@dataclass(frozen=True)
class Super:
    """`super()` behind the class `after`."""

    owner: Any
    after: type


class Walk(Protocol):
    """Goes through the functions that the model reaches."""

    strategy: Strategy

    def follow(self, function: Any, arguments: Arguments, scope: Frame) -> Value:
        """Return the result of a user's function; its source is read on the way."""

    def call_module(self, module: nn.Module, arguments: Arguments, scope: Frame) -> Value:
        """Return the result of a module."""

    def call_local(self, local: Local, arguments: Arguments) -> Value:
        """Return the result of a function that is defined inside another one."""

    def tell(self, scope: Frame, node: ast.expr | ast.stmt, code: str, **instead: str) -> None:
        """A rule is broken. `instead`: level, message, rewrite, where they are not the rule's."""

    def unread(self, thing: Any, reason: str) -> None:
        """Code that the model reaches and that can't be read."""

    def reaches(self, node: ast.If | ast.IfExp, scope: Frame) -> bool:
        """Whether a value of the code that this guards may reach an output."""


@dataclass(eq=False)
class Frame:
    """One run through a function."""

    code: FunctionSource
    walk: Walk
    path: str
    """Dotted path of the module."""
    names: dict[str, Value]
    owner: Any = None
    """Its `self`."""
    outer: Frame | None = None
    top: bool = False
    """It is the forward of the model itself."""
    depth: int = 0
    returned: list[Value] = field(default_factory=list)

    def resolve(self, name: str) -> Value:
        """The value of a name: local, of the enclosing functions, global, built in."""
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer.resolve(name)
        function = self.code.function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name in cells:
            try:
                return of_object(cells[name].cell_contents)
            except ValueError:  # not filled yet
                return unknown()
        if name in function.__globals__:
            return of_object(function.__globals__[name])
        return of_object(getattr(builtins, name)) if hasattr(builtins, name) else unknown()

    def tell(
        self,
        code: str,
        node: ast.expr | ast.stmt,
        *,
        level: LintLevel | None = None,
        message: str | None = None,
        rewrite: str | None = None,
    ) -> None:
        """Say that a rule is broken here."""
        instead = {"level": level, "message": message, "rewrite": rewrite}
        self.walk.tell(self, node, code, **{k: v for k, v in instead.items() if v is not None})


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
) -> dict[str, Value]:
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
    definition: Definition, function: FunctionType | None, owner: Value | None
) -> dict[str, Value]:
    """Names to values of a forward that nobody was seen to call."""
    names = {}
    arguments = [*_positional(definition), *definition.args.kwonlyargs]
    for position, argument in enumerate(arguments):
        if position == 0 and owner is not None:
            names[argument.arg] = owner
        else:
            names[argument.arg] = _declared(argument, function)
    if definition.args.vararg:
        names[definition.args.vararg.arg] = Value(Kind.TENSORS)
    if definition.args.kwarg:
        names[definition.args.kwarg.arg] = unknown()
    return names


def annotated(node: ast.expr | None) -> Value | None:
    """Return the value that an annotation promises; None if it states nothing usable."""
    if isinstance(node, ast.Constant):
        return of_object(None) if node.value is None else annotated(_parsed(node.value))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _either([annotated(node.left), annotated(node.right)])
    if isinstance(node, ast.Subscript):
        return _generic(node)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    if name in _WORDS:
        kind = _WORDS[name]
        return tensor(Rank.new()) if kind is Kind.TENSOR else Value(kind)
    return unknown() if name and name != "Any" else None


def is_text(node: ast.expr | None) -> bool:
    """True for an annotation that is `str`, or a choice of texts."""
    text = "" if node is None else ast.unparse(node)
    return text == "str" or text.startswith(("Literal['", "str |", "Optional[str"))


def _generic(node: ast.Subscript) -> Value | None:
    base = node.value
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    parts = [annotated(part) for part in inner]
    if name in _EITHER:
        return _either([*parts, *([of_object(None)] if name == "Optional" else [])])
    if name in _SEQUENCES:
        tensors = any(part is not None and part.tensor for part in parts)
        return Value(Kind.TENSORS) if tensors else Value(Kind.PYTHON)
    if name == "Literal":
        return Value(Kind.PYTHON)
    return annotated(base)


def _either(parts: list[Value | None]) -> Value | None:
    """Return the value of a union of types; a union of a tensor and None may lack the tensor."""
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


def _left_out(argument: ast.arg, function: FunctionType | None, given: Arguments) -> Value:
    default = _default(argument, function)
    if given.spread or default is NOTHING:
        return annotated(argument.annotation) or unknown()
    return of_object(default)


def _declared(argument: ast.arg, function: FunctionType | None) -> Value:
    promised = annotated(argument.annotation)
    if promised is not None:
        return promised
    default = _default(argument, function)
    if default is NOTHING:
        return tensor(Rank.new())
    # A default of None may stand for a tensor or for a number: nothing is known.
    return unknown() if default is None else Value(of_object(default).kind)


def _default(argument: ast.arg, function: FunctionType | None) -> Any:
    if function is None:
        return NOTHING
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    if argument.arg in names:
        behind = names.index(argument.arg) - (len(names) - len(defaults))
        return defaults[behind] if behind >= 0 else NOTHING
    return (function.__kwdefaults__ or {}).get(argument.arg, NOTHING)


def _rest(definition: Definition, given: Arguments) -> Iterator[tuple[str, Value]]:
    if definition.args.vararg:
        more = given.positional[len(_positional(definition)) :]
        tensors = bool(more) and all(value.tensor for value in more)
        kind = Kind.TENSORS if tensors else Kind.UNKNOWN
        yield definition.args.vararg.arg, Value(kind, items=dict(enumerate(more)))
    if definition.args.kwarg:
        yield definition.args.kwarg.arg, unknown()
