"""Why TorchScript can't take or return what a model does, in plain words."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from gate.export.request import Request

_BY_FIELDS = "Return a named tuple instead: its fields may be of any type."


def objection(request: Request) -> tuple[str, str] | None:
    """Cause and remedy; None: nothing speaks against it that is known beforehand.

    Asked where it failed: TorchScript's own messages tell of its inside.
    """
    for name in request.call.keyword_only:
        return (
            f"forward takes {name} by keyword only, which a trace around TorchScript can't give it",
            f"Take {name} by position, too: leave out the * before it.",
        )
    for name, hint in request.call.structured.items():
        if hint is None:
            return (
                f"forward takes {name} as a dict, list or tuple, and does not say so: TorchScript "
                "takes every argument without an annotation for a tensor",
                f"Annotate it, such as {name}: dict[str, torch.Tensor].",
            )
    with contextlib.suppress(Exception):  # then there is another reason
        mixed = _mixed(request.call(request.model, request.arguments), "what forward returns")
        if mixed is not None:
            return mixed, _BY_FIELDS
    return None


def _mixed(value: Any, place: str) -> str | None:
    """The first dict or list with values of several types in it: TorchScript has none."""
    if isinstance(value, Mapping):
        items, what = {f"{place}[{key!r}]": item for key, item in value.items()}, "dict"
    elif isinstance(value, list | tuple):
        items = {f"{place}[{number}]": item for number, item in enumerate(value)}
        what = "list" if isinstance(value, list) else ""
    else:
        return None
    kinds = sorted({_kind(item) for item in items.values()})
    if what and len(kinds) > 1:
        return (
            f"{place} is a {what} with values of several types ({', '.join(kinds)}), and "
            f"TorchScript has {what}s of one type of value only"
        )
    return next((found for at, item in items.items() if (found := _mixed(item, at))), None)


def _kind(value: Any) -> str:
    if isinstance(value, tuple):  # by its items, in their order
        return f"tuple of {', '.join(_kind(item) for item in value)}"
    return "dict" if isinstance(value, Mapping) else type(value).__name__
