"""Load a YAML section into a pydantic model; errors carry line numbers."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from gate.errors import PolicyError
from gate.storage.untrusted_files import ITEM_LIMIT


def insert_entry(
    text: str, key: tuple[str, str], lines: Sequence[str], *, path: Path
) -> str | None:
    """Return the text of a YAML file with an entry added; None if an entry has this name.

    key: section, and name of the entry. lines: the entry without indentation, beginning with its
    name. path: for errors. Raises PolicyError with the lines to add by hand if the section has
    another form.
    """
    section, name = key
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
        row, indent = len(rows), "  "
    elif isinstance(entries, dict) and entries and not entries.fa.flow_style():  # type: ignore[attr-defined]
        row = document.lc.key(section)[0] + 1
        indent = " " * entries.lc.key(next(iter(entries)))[1]  # type: ignore[attr-defined]
    else:
        raise _manual_edit_error(path, section, lines)
    entry = [f"{indent}{line}".rstrip() + newline for line in lines]
    changed = "".join([*rows[:row], *entry, *rows[row:]])
    if not _is_single_addition(document, _parsed(changed, path), key):
        raise _manual_edit_error(path, section, lines)
    return changed


def _is_single_addition(before: Any, after: Any, added: tuple[str, str]) -> bool:
    section, name = added
    entries = after.get(section, {})
    expected = {**before, section: {**before.get(section, {}), name: entries.get(name)}}
    return name in entries and {**after} == expected


def _parsed(text: str, path: Path) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import YAMLError

    try:
        document = YAML().load(text)
    except YAMLError as error:
        raise PolicyError(f"{path} is not valid YAML: {error}. Fix it first.") from error
    document = CommentedMap() if document is None else document
    if not isinstance(document, dict):
        raise PolicyError(f"{path}: expected a mapping, with sections by name. Fix it first.")
    return document


def _manual_edit_error(path: Path, section: str, lines: Sequence[str]) -> PolicyError:
    shown = "\n".join(f"  {line}" for line in lines)
    return PolicyError(
        f"{path}: expected '{section}:' with each entry on separate lines below it. "
        f"Add this by hand:\n{section}:\n{shown}"
    )


# YAML 1.2 with ruamel.yaml, the parser of DVC, so that both read the same values (`1e-4` is a
# number, `no` is a string).
Model = TypeVar("Model", bound=BaseModel)

_LIMIT = 1 << 20
"""Maximum size of a settings file, in bytes."""


def load_section(
    model: type[Model],
    path: Path,
    section: str | None,
    *,
    complete: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    misplaced: Mapping[str, str] = MappingProxyType({}),
) -> Model:
    """Read `section` (None: the whole file) of the YAML file `path` into `model`, strictly.

    complete: adds defaults that depend on other settings. misplaced: hints, by the name of a
    misplaced field. Raises PolicyError with one line for each wrong field: file, line, dotted path,
    actual value and what was expected.
    """
    document = _parse(path)
    part = document if section is None else _section(document, path, section)
    try:
        plain = _plain(part, iter(range(ITEM_LIMIT)))
        if complete is not None and isinstance(plain, dict):
            if not plain:
                raise PolicyError(f"{path} is empty. Add at least one setting: task: auto.")
            plain = complete(plain)
        return model.model_validate_json(json.dumps(plain))
    except OverflowError as error:
        raise PolicyError(f"{path}: {error}. Replace the aliases by their values.") from error
    except ValidationError as error:
        prefix = () if section is None else (section,)
        lines = [
            _describe(problem, document, path, prefix)
            + (_misplaced_hint(problem, misplaced) or _nearest_hint(problem, model))
            for problem in error.errors()
        ]
        raise PolicyError("\n".join(lines)) from error


def first_problem(error: ValidationError) -> str:
    """Describe the first wrong field of settings that do not come from a file."""
    first = error.errors()[0]
    path = ".".join(map(str, first["loc"])) or "the settings"
    value = first["input"]
    shown = "" if isinstance(value, dict | list) else f" (seen: {value!r})"
    return f"{path}: {first['msg'].removeprefix('Value error, ')}{shown}."


def value_of(text: str, *, label: str) -> Any:
    """Parse one YAML value: `2`, `null`, `[0.5]`. `label`: its name in the error.

    Raises PolicyError.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return _plain(YAML(typ="safe", pure=True).load(text), iter(range(ITEM_LIMIT)))
    except (YAMLError, OverflowError, RecursionError) as error:
        raise PolicyError(f"{label}: {text!r} is not a YAML value. Quote it.") from error


def has_section(path: Path, section: str) -> bool:
    """Return whether the YAML file has this top-level key. Raises PolicyError if it is invalid."""
    return section in _parse(path)


def lines_of(path: Path, section: str | None) -> dict[tuple[str, ...], int]:
    """Return the line (1-based) of every key of `section` (None: the whole file), by its path.

    Keys repeated by an alias have the lines of the anchor. Raises PolicyError.
    """
    document = _parse(path)
    part = document if section is None else _section(document, path, section)
    return dict(_lines(part, (), iter(range(ITEM_LIMIT))))


def _lines(
    node: Any, path: tuple[str, ...], budget: Iterator[int]
) -> Iterator[tuple[tuple[str, ...], int]]:
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if next(budget, None) is None:
            return
        yield (*path, str(key)), _line_of_key(node, key)
        yield from _lines(value, (*path, str(key)), budget)


def _line_of_key(node: Any, key: Any) -> int:
    """Return the line of a key; one that was merged in (`<<`) has the line of its mapping."""
    lines = node.lc.data or {}  # None: all keys were merged in.
    return int(lines[key][0] if key in lines else node.lc.line) + 1


def _parse(path: Path) -> Any:
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        with path.open("rb") as stream:
            data = stream.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise PolicyError(
                f"{path} has more than {_LIMIT} bytes. Name a settings file, or shorten it."
            )
        document = _document(data)
    except OSError as error:
        raise PolicyError(
            f"cannot read {path}: {error.strerror}. Name an existing file."
        ) from error
    except RecursionError as error:
        raise PolicyError(f"{path} is nested too deeply. Name a settings file.") from error
    except UnicodeDecodeError as error:
        raise PolicyError(f"{path} is not UTF-8 text: {error.reason}. Save it as UTF-8.") from error
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise PolicyError(
            f"{path}:{line}: not valid YAML: {error.problem}. Fix the line."
        ) from error
    except YAMLError as error:
        raise PolicyError(f"{path}: not valid YAML: {error}. Fix the file.") from error
    if not isinstance(document, dict):
        raise PolicyError(
            f"{path}: expected a mapping of settings, but the file is empty or a list."
        )
    return document


@functools.lru_cache(maxsize=8)
def _document(data: bytes) -> Any:
    """Return the parsed document, which callers must not change. Cached, because parsing takes 0.1
    s, and a stage reads the same settings several times."""
    from ruamel.yaml import YAML

    return YAML().load(data.decode())


def _section(document: Any, path: Path, section: str) -> Any:
    if not document.get(section):
        raise PolicyError(
            f"{path}: the section '{section}:' is missing or empty. "
            "An empty section would let everything pass: add its settings (README.md)."
        )
    return document[section]


def _plain(value: Any, budget: Iterator[int]) -> Any:
    """Return the value with its aliases expanded. `budget`: limits the number of values, which
    aliases may multiply."""
    if next(budget, None) is None:
        raise OverflowError(f"its aliases expand to more than {ITEM_LIMIT} values")
    if isinstance(value, dict):
        return {str(key): _plain(item, budget) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, budget) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return str(value)


def _describe(problem: Any, document: Any, path: Path, prefix: tuple[str, ...]) -> str:
    keys = (*prefix, *problem["loc"])
    line = _line_of(document, keys)
    value = problem["input"]
    shown = "" if isinstance(value, dict | list) else f" (seen: {value!r})"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message, shown = "unknown setting", ""
    if problem["type"] == "string_pattern_mismatch" and keys[-1] == "[key]":
        message, shown = "use lowercase letters, digits, '.' and '-' in names", ""
        keys = keys[:-1]
    where = ".".join(map(str, keys))
    return f"{path}:{line}: {where + ': ' if where else ''}{message}{shown}"


def _nearest_hint(problem: Any, model: type[BaseModel]) -> str:
    """Return a hint with the setting that resembles an unknown one, or an empty text."""
    if problem["type"] != "extra_forbidden":
        return ""
    *parents, name = problem["loc"]
    matches = difflib.get_close_matches(str(name), _settings_in(model, parents), n=1)
    return f". Did you mean {matches[0]}?" if matches else ""


def _misplaced_hint(problem: Any, misplaced: Mapping[str, str]) -> str:
    """Return a hint on where a misplaced field belongs, or an empty text."""
    name = str(problem["loc"][-1]) if problem["type"] == "extra_forbidden" else ""
    return f". {misplaced[name]}" if name in misplaced else ""


def _settings_in(model: type[BaseModel], parents: Sequence[int | str]) -> set[str]:
    """Return the names of the settings below `parents`: field names, mixed with mapping keys,
    indices and union tags, which are skipped."""
    models = {model}
    for step in parents:
        fields = [each.model_fields[str(step)] for each in models if str(step) in each.model_fields]
        if fields:
            models = {each for field in fields for each in _models_in(field.annotation)}
    return {name for each in models for name in each.model_fields}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in `dict[str, A]`, `A | None`, `Annotated[A | B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _line_of(document: Any, keys: tuple[Any, ...]) -> int:
    """Return the line (1-based) of the last of the nested `keys` that is in the document."""
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    line, node = 1, document
    for part in keys:
        if isinstance(node, CommentedMap) and part in node:
            line = _line_of_key(node, part)
        elif isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node):
            line = node.lc.item(part)[0] + 1
        else:
            break
        node = node[part]
    return line
