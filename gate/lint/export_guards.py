"""Find whether code guarded by `torch.jit.is_tracing()` and the like reaches an output (TRC014).

Only names count, and in doubt the answer is yes: a name that the guarded code writes must not be
read anywhere else in the function, nor an attribute in a function that a forward can reach.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gate.lint.source import Definition, Unreadable, parse
from gate.lint.values import parameters

_UNKNOWN = "?"
"""Stands for a target that is not a name or an attribute: it may be any of them."""

_MUTATORS = frozenset(
    {"append", "extend", "insert", "update", "add", "setdefault", "pop", "remove", "clear", "fill"}
)

_SIMPLE = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr

_ENDS = (
    ast.Return | ast.Yield | ast.YieldFrom | ast.Await | ast.Break | ast.Continue | ast.Delete
    | ast.Global | ast.Nonlocal
)  # fmt: skip

_CHANGES = (
    ast.Return | ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete | ast.Yield
    | ast.Continue | ast.Break
)  # fmt: skip


def only_guards(body: Sequence[ast.stmt]) -> bool:
    """True if these statements raise, warn or log, and change nothing that is returned."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    mutates = any(isinstance(call, ast.Attribute) and _mutates(call.attr) for call in calls)
    return not mutates and not any(isinstance(node, _CHANGES) for node in nodes)


def may_reach_output(
    node: ast.If | ast.IfExp, definition: Definition, kinds: Iterable[type]
) -> bool:
    """Return True if a value of the guarded code may reach an output of the function.

    kinds: the classes of the model's modules, which may read the attributes that are written.
    """
    guarded = _guarded(node, definition)
    if guarded is None:
        return True
    statements, left_out = guarded
    written = _written(statements, definition)
    owner = _owner(definition)
    if written is None or written & {*_reads(_outside(definition, left_out), owner)}:
        return True
    attributes = {target.partition(".")[2] for target in written if "." in target}
    trees = _trees(kinds) if attributes else []
    return bool(attributes & _attributes_read(trees, left_out) if trees else attributes)


_Nodes = tuple[ast.AST, ...]


def _guarded(node: ast.If | ast.IfExp, definition: Definition) -> tuple[_Nodes, _Nodes] | None:
    """Return the statements that run only while the model is exported, or only while it is not,
    and the nodes that are no part of the rest of the function.

    None: the guarded expression is part of a statement that is more than an assignment.
    """
    if isinstance(node, ast.IfExp):
        enclosing = [
            statement for statement in ast.walk(definition)  # outer ones first
            if isinstance(statement, ast.stmt) and any(i is node for i in ast.walk(statement))
        ]  # fmt: skip
        simple = enclosing and isinstance(enclosing[-1], _SIMPLE)
        return ((enclosing[-1],), (enclosing[-1],)) if simple else None
    block = [] if isinstance(definition, ast.Lambda) else definition.body
    if node in block and not node.orelse:
        # The statements between `if guard: return x` and the same `return x` at the end.
        *between, last = block[block.index(node) :]
        end = node.body[-1]
        if between and isinstance(end, ast.Return) and ast.dump(end) == ast.dump(last):
            return (*node.body[:-1], *between[1:]), (node, *between[1:])
    return (*node.body, *node.orelse), (node,)


class _Flow(NamedTuple):
    """Names, and attributes as `self.x`, that a node writes and reads."""

    targets: frozenset[str]
    """Written names."""
    changed: frozenset[str]
    """Targets that are changed in place: by an index, an attribute or a method."""
    sources: frozenset[str]
    """Names that the targets are computed from."""


def _flow(node: ast.AST, owner: str) -> _Flow:
    targets: list[ast.expr] = []
    sources: list[ast.AST] = []
    match node:
        case ast.Assign():
            targets, sources = node.targets, [node.value]
        case ast.AnnAssign(value=value) if value is not None:
            targets, sources = [node.target], [value]
        case ast.AugAssign() | ast.NamedExpr():
            targets, sources = [node.target], [node.value]
        case ast.For(target=target, iter=source) | ast.comprehension(target=target, iter=source):
            targets, sources = [target], [source]
        case ast.withitem(optional_vars=target) if target is not None:
            targets, sources = [target], [node.context_expr]
        case ast.Call(func=ast.Attribute(value=target, attr=name)) if _is_mutator(name):
            targets, sources = [target], [*node.args, *(each.value for each in node.keywords)]
        case ast.FunctionDef(name=name, body=body):
            targets, sources = [ast.Name(id=name)], [*body]
    written = frozenset(root for target in targets for root in _roots(target, owner))
    read = {name for source in (*sources, *targets) for name in _reads(ast.walk(source), owner)}
    if isinstance(node, ast.AugAssign):
        read |= written
    changed = written
    if not isinstance(node, ast.AugAssign | ast.Call):  # which change a tensor in place
        parts = [part for target in targets for part in ast.walk(target)]
        stores = [p for p in parts if isinstance(p, ast.expr) and _is_inner_store(p, owner)]
        changed = frozenset(root for part in stores for root in _roots(part, owner))
    return _Flow(written, changed, frozenset(read))


def _is_inner_store(part: ast.AST, owner: str) -> bool:
    """True for `x[0]` and `x.y`, but not for `self.y`, which rebinds a name."""
    match part:
        case ast.Attribute(value=ast.Name(id=name)) if name == owner:
            return False
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
            return True
    return False


def _mutates(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def _is_mutator(method: str) -> bool:
    return method in _MUTATORS or _mutates(method)


def _roots(target: ast.expr, owner: str) -> Iterator[str]:
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _roots(part, owner)
        case ast.Name(id=name):
            yield name
        case ast.Attribute(value=inner, attr=attribute):
            yield f"self.{attribute}"
            if not (isinstance(inner, ast.Name) and inner.id == owner):
                yield from _roots(inner, owner)  # another module, which may read it
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Call(func=inner):
            yield from _roots(inner, owner)
        case _:
            yield _UNKNOWN


def _reads(nodes: Iterable[ast.AST], owner: str) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()):
                if name == owner:
                    yield f"self.{attribute}"
            case ast.Name(id=name, ctx=ast.Load()) if name != owner:
                yield name


def _owner(definition: Definition) -> str:
    """Return the name of `self` in a function."""
    return next((parameter.arg for parameter in parameters(definition)), "")


def _written(statements: _Nodes, definition: Definition) -> set[str] | None:
    """Return the names that are written; None: the statements may end the function, or change an
    object that it did not create."""
    owner = _owner(definition)
    nodes = [node for statement in statements for node in ast.walk(statement)]
    if any(isinstance(node, _ENDS) for node in nodes):
        return None
    flows = [_flow(node, owner) for node in nodes]
    targets = {target for flow in flows for target in flow.targets}
    changed = {target for flow in flows for target in flow.changed}
    all_nodes = list(ast.walk(definition))
    bindings = [n for n in all_nodes if not isinstance(n, ast.AugAssign | ast.Call)]
    # An assigned value may be another name of the same object.
    changed = _closure(changed, [_flow(node, owner) for node in bindings])
    local_names = {target for node in all_nodes for target in _flow(node, owner).targets}
    local_names -= {node.arg for node in all_nodes if isinstance(node, ast.arg)}
    foreign = {target for target in changed if "." not in target and target not in local_names}
    return None if foreign or _UNKNOWN in targets else targets | changed


def _closure(names: set[str], flows: list[_Flow]) -> set[str]:
    """Return these names and all names that they are computed from."""
    while added := {s for flow in flows if names & flow.targets for s in flow.sources} - names:
        names = names | added
    return names


def _outside(node: ast.AST, left_out: _Nodes) -> Iterator[ast.AST]:
    if any(node is each for each in left_out):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside(child, left_out)


# --- attributes -----------------------------------------------------------------------------------


def _trees(module_classes: Iterable[type]) -> list[ast.Module]:
    """Return the syntax trees of the files of classes and their bases, except torch's; none if one
    of them cannot be read."""
    classes = {base for cls in module_classes for base in cls.__mro__}
    skipped = ("torch", "builtins")
    try:
        files = {inspect.getsourcefile(cls) or "" for cls in classes
                 if cls.__module__.split(".")[0] not in skipped}  # fmt: skip
        texts = ["".join(linecache.getlines(file)) for file in sorted(files)]
        return [parse(text) for text in texts] if all(texts) else []
    except (OSError, TypeError, Unreadable):
        return []


def _attributes_read(trees: Iterable[ast.Module], left_out: _Nodes) -> set[str]:
    """Return the attributes that are read by functions which a `forward` may call."""
    bodies: dict[str, list[ast.AST]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bodies.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Lambda):  # it may be called by any name
                bodies.setdefault("forward", []).append(node)
    attributes: set[str] = set()
    pending = ["forward", "__call__"]
    while pending:
        for body in bodies.pop(pending.pop(), ()):
            nodes = list(_outside(body, left_out))
            read = set(_attributes(nodes))
            attributes |= read
            pending += [*read, *(node.id for node in nodes if isinstance(node, ast.Name))]
    return attributes


def _attributes(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield attributes that are read, and texts that are passed to calls such as `getattr`."""
    for node in nodes:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.Call(args=passed):
                for part in passed:
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value
