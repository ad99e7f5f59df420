"""A new entry in a section of somebody else's YAML file, which stays as it is, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gate.errors import PolicyError


def with_entry(
    text: str, place: tuple[str, str], lines: Sequence[str], *, path: Path
) -> str | None:
    """The text of a YAML file with an entry more; None if it has one of this name.

    `place`: section, and name of the entry in it; `lines`: the entry without indentation, its name
    in the first one. `path`: of the file, for errors. Raises PolicyError where there is no room for
    it, with the lines to add by hand.
    """
    section, name = place
    document = _parsed(text, path)
    entries = document.get(section)
    if isinstance(entries, dict) and name in entries:
        return None
    newline = "\r\n" if "\r\n" in text else "\n"
    rows = text.splitlines(keepends=True)
    if section not in document:
        if rows and not rows[-1].endswith("\n"):
            rows[-1] += newline
        rows += [newline] * bool(rows) + [f"{section}:{newline}"]
        at, indent = len(rows), "  "
    elif isinstance(entries, dict) and entries and not entries.fa.flow_style():  # type: ignore[attr-defined]
        at = document.lc.key(section)[0] + 1
        indent = " " * entries.lc.key(next(iter(entries)))[1]  # type: ignore[attr-defined]
    else:
        raise _no_room(path, section, lines)
    entry = [f"{indent}{line}".rstrip() + newline for line in lines]
    changed = "".join([*rows[:at], *entry, *rows[at:]])
    if not _is_one_more(document, _parsed(changed, path), place):
        raise _no_room(path, section, lines)
    return changed


def _is_one_more(before: Any, after: Any, place: tuple[str, str]) -> bool:
    section, name = place
    entries = {key: value for key, value in after.get(section, {}).items() if key != name}
    whole = {**after, section: entries} if section in before else {**after}
    if section not in before:
        whole.pop(section, None)
    return bool(name in after.get(section, {}) and whole == before)


def _parsed(text: str, path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import YAMLError

    try:
        document = YAML().load(text)
    except YAMLError as error:
        raise PolicyError(f"{path} is not valid YAML: {error}. Mend it first.") from error
    document = CommentedMap() if document is None else document
    if not isinstance(document, dict):
        raise PolicyError(f"{path}: expected a mapping, with sections by name. Mend it first.")
    return document


def _no_room(path: Path, section: str, lines: Sequence[str]) -> PolicyError:
    shown = "\n".join(f"  {line}" for line in lines)
    return PolicyError(
        f"{path}: expected '{section}:' with its entries in lines of their own below it. "
        f"Add this by hand:\n{section}:\n{shown}"
    )
