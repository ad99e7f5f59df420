"""Where an expression stands: the function, its names, whose `self` it has, who is told."""

from __future__ import annotations

import ast
import builtins
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from gate.lint.source import Code, Definition
from gate.lint.value import StaticValue, of_object, unknown
from gate.records.lint import LintLevel
from gate.records.strategy import Strategy


@dataclass(frozen=True)
class Arguments:
    """What a call gives. `spread`: `*items` or `**items` are among them, so places are unsure."""

    positional: tuple[StaticValue, ...] = ()
    keywords: dict[str, StaticValue] = field(default_factory=dict)
    spread: bool = False

    @property
    def all(self) -> tuple[StaticValue, ...]:
        """Positional ones, then keywords."""
        return (*self.positional, *self.keywords.values())

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two calls must have in common to be the same for the rules."""
        named = [*enumerate(self.positional), *sorted(self.keywords.items())]
        return (self.spread, *((name, *_facts(value)) for name, value in named))

    def after(self, *values: StaticValue) -> Arguments:
        """The same behind these."""
        return replace(self, positional=(*values, *self.positional))

    def get(self, position: int, name: str) -> StaticValue | None:
        """By name or position; None if it is not given, or not known to be."""
        if name in self.keywords:
            return self.keywords[name]
        given = position < len(self.positional) and not self.spread
        return self.positional[position] if given else None


def _facts(value: StaticValue) -> Iterator[Any]:
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

    tensor: StaticValue
    name: str


@dataclass(frozen=True)
class ShapeMethod:
    """`x.shape.numel`, before it is called."""

    shape: StaticValue
    name: str


@dataclass(frozen=True)
class Local:
    """A function that is defined inside of another one."""

    definition: Definition
    scope: FunctionScope


@dataclass(frozen=True)
class Super:
    """`super()` behind the class `after`."""

    owner: Any
    after: type


class Walk(Protocol):
    """Goes through the functions that the model reaches."""

    strategy: Strategy

    def follow(self, function: Any, arguments: Arguments, scope: FunctionScope) -> StaticValue:
        """What a function of the user returns; its source is read on the way."""

    def call_module(
        self, module: nn.Module, arguments: Arguments, scope: FunctionScope
    ) -> StaticValue:
        """What a module returns."""

    def call_local(self, local: Local, arguments: Arguments) -> StaticValue:
        """What a function that is defined inside of another one returns."""

    def tell(
        self, scope: FunctionScope, node: ast.expr | ast.stmt, code: str, **instead: str
    ) -> None:
        """A rule is broken. `instead`: level, message, rewrite, where they are not the rule's."""

    def unread(self, thing: Any, reason: str) -> None:
        """Code that the model reaches and that can't be read."""

    def reaches(self, node: ast.If | ast.IfExp, scope: FunctionScope) -> bool:
        """Whether a value of the code that this guards may reach an output."""


@dataclass(eq=False)
class FunctionScope:
    """One run through a function."""

    code: Code
    walk: Walk
    path: str
    """Dotted path of the module."""
    names: dict[str, StaticValue]
    owner: Any = None
    """Its `self`."""
    outer: FunctionScope | None = None
    top: bool = False
    """It is the forward of the model itself."""
    depth: int = 0
    returned: list[StaticValue] = field(default_factory=list)

    def look_up(self, name: str) -> StaticValue:
        """The value of a name: local, of the enclosing functions, global, built in."""
        if name in self.names:
            return self.names[name]
        if self.outer is not None:
            return self.outer.look_up(name)
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
