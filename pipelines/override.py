"""Settings given on a command line, written into params.yaml, where DVC and the record see them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gate.errors import PolicyError
from gate.storage import atomic
from pipelines import paths
from pipelines.params import check_all


def override(settings: Iterable[str]) -> None:
    """Write each `section.key=value`; comments stay, an empty value changes nothing.

    Raises PolicyError, and leaves the file as it is, for a key that is not there or a value that
    the section refuses.
    """
    from ruamel.yaml import YAML

    parts = [setting.partition("=") for setting in settings]
    for key, separator, _ in parts:
        if not separator:
            raise PolicyError(f"{key!r} is not a setting. Expected section.key=value.")
    given = {key: text for key, _, text in parts if text}
    if not given:
        return
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 200
    yaml.representer.add_representer(type(None), _null)
    document = yaml.load(paths.PARAMS.read_text(encoding="utf-8"))
    for key, text in given.items():
        node, leaf = _place(document, key)
        value = _value(key, text)
        if value != node[leaf]:
            print(f"{paths.PARAMS}: {key}: {node[leaf]} -> {value}", flush=True)
            node[leaf] = value
    with atomic.replacing(paths.PARAMS) as temporary:
        with temporary.open("w", encoding="utf-8") as stream:
            yaml.dump(document, stream)
        try:
            check_all(temporary)
        except PolicyError as error:
            raise PolicyError(str(error).replace(str(temporary), str(paths.PARAMS))) from error


def _null(representer: Any, _none: None) -> Any:
    """`null`, as params.yaml is written; the library leaves the place empty."""
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def _place(document: Any, key: str) -> tuple[Any, str]:
    """The mapping that holds the last part of `key`, and that part."""
    *sections, leaf = key.split(".")
    node = document
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or leaf not in node:
        raise PolicyError(f"{paths.PARAMS} has no setting '{key}'. Look there for its name.")
    return node, leaf


def _value(key: str, text: str) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML().load(text)  # a list keeps its brackets
    except YAMLError as error:
        raise PolicyError(f"{key}: {text!r} is not a YAML value. Quote it.") from error
