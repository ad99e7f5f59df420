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

_ENDS = (
    ast.Return | ast.Yield | ast.YieldFrom | ast.Await | ast.Break | ast.Continue | ast.Delete
    | ast.Global | ast.Nonlocal
)  # fmt: skip

_Nodes = Sequence[ast.AST]


def only_guards(body: Sequence[ast.stmt]) -> bool:
    """True if these statements raise, warn or log, and change nothing that is returned."""
    nodes = _walk(body)
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    mutates = any(isinstance(call, ast.Attribute) and _is_mutating(call.attr) for call in calls)
    changes = _ENDS | ast.Assign | ast.AugAssign | ast.AnnAssign
    return not mutates and not any(isinstance(node, changes) for node in nodes)


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
    written = _written(_walk(statements), definition)
    owner = _owner(definition)
    if written is None or written & {*_reads(_outside(definition, left_out), owner)}:
        return True
    attributes = {target.partition(".")[2] for target in written if "." in target}
    if not attributes:
        return False
    trees = _trees(kinds)
    return not trees or bool(attributes & _attributes_read(trees, left_out))


def _guarded(node: ast.If | ast.IfExp, definition: Definition) -> tuple[_Nodes, _Nodes] | None:
    """Return the statements that run only while the model is exported, or only while it is not,
    and the nodes that are no part of the rest of the function.

    None: the guarded expression is part of a statement that is more than an assignment.
    """
    if isinstance(node, ast.IfExp):
        # Outer statements come first, so the last one is the innermost.
        statements = [each for each in ast.walk(definition) if isinstance(each, ast.stmt)]
        enclosing = [each for each in statements if any(i is node for i in ast.walk(each))][-1:]
        simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr
        return (enclosing, enclosing) if enclosing and isinstance(enclosing[0], simple) else None
    block = [] if isinstance(definition, ast.Lambda) else definition.body
    if node in block and not node.orelse:
        # The statements between `if guard: return x` and the same `return x` at the end.
        *between, last = block[block.index(node) :]
        end = node.body[-1]
        if between and isinstance(end, ast.Return) and ast.dump(end) == ast.dump(last):
            return [*node.body[:-1], *between[1:]], [node, *between[1:]]
    return [*node.body, *node.orelse], [node]


class _Write(NamedTuple):
    """A name, or an attribute as `self.x`, that a node writes."""

    target: str
    in_place: bool
    """True if its object is changed: by an index, an attribute or a method."""
    sources: frozenset[str]
    """Names that it is computed from."""


def _writes(node: ast.AST, owner: str) -> Iterator[_Write]:
    targets, sources = _assignment(node)
    read = frozenset(_reads(_walk([*sources, *targets]), owner))
    in_place = isinstance(node, ast.AugAssign | ast.Call)
    for target in targets:
        for root, is_changed in _roots(target, owner, in_place):
            yield _Write(root, is_changed, read)


def _assignment(node: ast.AST) -> tuple[list[ast.expr], _Nodes]:
    """Return the targets that a node writes, and what they are computed from."""
    match node:
        case ast.Assign(targets=targets, value=source):
            return targets, [source]
        case (
            ast.AnnAssign(target=target, value=ast.expr() as source)
            | ast.AugAssign(target=target, value=source)
            | ast.NamedExpr(target=target, value=source)
            | ast.For(target=target, iter=source)
            | ast.comprehension(target=target, iter=source)
            | ast.withitem(optional_vars=ast.expr() as target, context_expr=source)
        ):
            return [target], [source]
        case ast.Call(func=ast.Attribute(value=target, attr=name)) if _changes_object(name):
            return [target], [*node.args, *node.keywords]
        case ast.FunctionDef(name=name, body=body):
            return [ast.Name(id=name)], body
    return [], []


def _changes_object(method: str) -> bool:
    return method in _MUTATORS or _is_mutating(method)


def _is_mutating(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def _roots(target: ast.expr, owner: str, in_place: bool) -> Iterator[tuple[str, bool]]:
    """Yield the names and attributes that a target writes, and whether it does so in place."""
    match target:
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            for part in parts:
                yield from _roots(part, owner, in_place)
        case ast.Starred(value=inner):
            yield from _roots(inner, owner, in_place)
        case ast.Name(id=name):
            yield name, in_place
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == owner:
            yield f"self.{attribute}", in_place
        case ast.Attribute(value=inner, attr=attribute):  # of another module, which may read it
            yield f"self.{attribute}", True
            yield from _roots(inner, owner, True)
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            yield from _roots(inner, owner, True)
        case _:
            yield _UNKNOWN, True


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


def _written(nodes: _Nodes, definition: Definition) -> set[str] | None:
    """Return the names that are written; None: the nodes may end the function, or change an object
    that it did not create."""
    if any(isinstance(node, _ENDS) for node in nodes):
        return None
    owner, function = _owner(definition), _walk([definition])
    writes = [write for node in nodes for write in _writes(node, owner)]
    written = {write.target for write in writes}
    changed = {write.target for write in writes if write.in_place}
    # An assigned value may be another name of the same object.
    bindings = [node for node in function if not isinstance(node, ast.AugAssign | ast.Call)]
    aliases = [write for node in bindings for write in _writes(node, owner)]
    while added := {s for w in aliases if w.target in changed for s in w.sources} - changed:
        changed |= added
    local_names = {write.target for node in function for write in _writes(node, owner)}
    local_names -= {node.arg for node in function if isinstance(node, ast.arg)}
    foreign = {target for target in changed if "." not in target and target not in local_names}
    return None if foreign or _UNKNOWN in written else written | changed


def _walk(nodes: Iterable[ast.AST]) -> list[ast.AST]:
    return [inner for node in nodes for inner in ast.walk(node)]


def _outside(node: ast.AST, left_out: _Nodes) -> Iterator[ast.AST]:
    """Yield a node and those inside of it, except the ones that are left out."""
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
    for node in _walk(trees):
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
                texts = [part.value for part in passed if isinstance(part, ast.Constant)]
                yield from (text for text in texts if isinstance(text, str))
