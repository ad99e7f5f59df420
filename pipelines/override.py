"""Write settings from a command line into params.yaml, where DVC and the records read them.

Only the value's text is replaced: comments, quotes, anchors and line endings stay unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gate.errors import PolicyError
from gate.storage import files
from pipelines import paths
from pipelines.params import check_all

_PROPERTIES = re.compile(r"(?:[&!]\S*[ \t]+)+")
"""An anchor and a tag before a value, which are preserved."""


def override(settings: Iterable[str]) -> None:
    """Write each `section.key=value`; an empty value changes nothing.

    Raises PolicyError without changing the file for an unknown key, an invalid value, or a location
    where more than this value would change.
    """
    parts = [setting.partition("=") for setting in settings]
    for key, separator, _ in parts:
        if not separator:
            raise PolicyError(f"{key!r} is not a setting. Expected section.key=value.")
    values = {key: text.strip() for key, _, text in parts if text.strip()}
    if not values:
        return
    original = text = paths.PARAMS.read_bytes().decode()
    for key, value in values.items():
        text = replace_value(text, key, value)
    if text == original:
        return
    with files.replacing(paths.PARAMS) as temporary:
        temporary.write_bytes(text.encode())
        try:
            check_all(temporary)
        except PolicyError as error:
            raise PolicyError(str(error).replace(str(temporary), str(paths.PARAMS))) from error


def replace_value(text: str, key: str, value: str) -> str:
    """Return the text with the value at the dotted `key` replaced, and print the change.

    Raises PolicyError.
    """
    span, new = _ValueSpan.from_text(text, key), _parse_value(key, value)
    document = _load_yaml(text)
    old = _replace(document, key, new)
    if _is_same(old, new):
        return text
    for candidate in span.candidates(value, new):
        changed = text[: span.start] + candidate + text[span.end :]
        if _parses_to(changed, document):
            print(f"{paths.PARAMS}: {key}: {_to_text(old)} -> {_to_text(new)}", flush=True)
            return changed
    raise PolicyError(
        f"{key}: {value!r} can't be written at {paths.PARAMS}:{span.line} without changing more "
        "than this setting. Edit the file."
    )


@dataclass(frozen=True)
class _ValueSpan:
    """The location of a value in the text."""

    start: int
    end: int
    line: int
    quote: str

    @classmethod
    def from_text(cls, text: str, key: str) -> _ValueSpan:
        from ruamel.yaml import YAML
        from ruamel.yaml.nodes import MappingNode, ScalarNode

        node, key_end = YAML(pure=True).compose(text), 0
        for name in key.split("."):
            pairs = node.value if isinstance(node, MappingNode) else ()
            pair = next(((k, v) for k, v in pairs if k.value == name), None)
            if pair is None:
                raise PolicyError(
                    f"{paths.PARAMS} has no setting '{key}'. Look there for its name."
                )
            key_end, node = pair[0].end_mark.index, pair[1]
            if node.start_mark.index < key_end:
                raise PolicyError(
                    f"{paths.PARAMS}:{pair[0].start_mark.line + 1}: '{name}' of '{key}' is an "
                    "alias: another value would change others, too. Edit the file."
                )
        style = getattr(node, "style", None)
        is_flow = not isinstance(node, ScalarNode) and node.flow_style
        if (isinstance(node, ScalarNode) and style in ("|", ">")) or not (
            isinstance(node, ScalarNode) or is_flow
        ):
            raise PolicyError(
                f"{paths.PARAMS}:{node.start_mark.line + 1}: '{key}' is written on several lines. "
                "Edit the file."
            )
        quote = style if isinstance(node, ScalarNode) and style in ("'", '"') else ""
        start, end = node.start_mark.index, node.end_mark.index
        if start == end:  # the value is empty, and the mark is at the next token
            start = end = text.index(":", key_end) + 1
        properties = _PROPERTIES.match(text, start, end)
        start = properties.end() if properties else start
        return cls(start, end, text.count("\n", 0, start) + 1, quote)

    def candidates(self, text: str, value: Any) -> list[str]:
        """Return ways to write the new text, best first: with the old quotes, as passed, quoted."""
        quoted = {"'": "'" + text.replace("'", "''") + "'", '"': json.dumps(text)}
        is_plain = isinstance(value, str) and value == text
        candidates = [quoted[self.quote]] if self.quote and is_plain else []
        candidates.append(text if self.end > self.start else f" {text}")
        return [*candidates, quoted['"']] if is_plain else candidates


def _load_yaml(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


def _parse_value(key: str, text: str) -> Any:
    from ruamel.yaml.error import YAMLError

    try:
        return _load_yaml(text)
    except YAMLError as error:
        raise PolicyError(f"{key}: {text!r} is not a YAML value. Quote it.") from error


def _replace(document: Any, key: str, value: Any) -> Any:
    """Set the value and return the old one."""
    *sections, leaf = key.split(".")
    for section in sections:
        document = document[section]
    old, document[leaf] = document[leaf], value
    return old


def _is_same(first: Any, second: Any) -> bool:
    """Return whether values have the same type and value: 1 is neither true nor 1.0, NaN equals
    NaN."""
    return repr(first) == repr(second)


def _parses_to(text: str, document: Any) -> bool:
    from ruamel.yaml.error import YAMLError

    try:
        return _is_same(_load_yaml(text), document)
    except YAMLError:
        return False


def _to_text(value: Any) -> str:
    return json.dumps(value, default=str)
