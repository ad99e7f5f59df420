"""What `--inputs` names: a place or a factory, and which fields of it are what.

Without anything heavy, so that a command can look at it before any child is started.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl

from gate.errors import DataError
from gate.storage.redaction import redacted

LABEL = "label"
_FACTORY = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_FIELDS = re.compile(r"(?P<place>.+)#(?P<fields>(?:inputs|label)=[^#]*)", re.DOTALL)


@dataclass(frozen=True)
class Fields:
    """Which fields of a record are inputs, and which one is the label."""

    inputs: tuple[str, ...] | None = None
    """In this order. None: all but the label."""
    label: str | None = None
    """Empty: none. None: `label`, where it is one integer a sample and no input."""

    def of(self, names: list[str]) -> tuple[tuple[str, ...], str | None]:
        """The inputs among these names, and the label. Raises DataError for one that is absent."""
        label = LABEL if self.label is None and LABEL in names else self.label or None
        if self.inputs is not None and self.label is None and LABEL in self.inputs:
            label = None
        inputs = self.inputs or tuple(name for name in names if name != label)
        absent = [name for name in (*inputs, label) if name is not None and name not in names]
        if absent:
            raise DataError(
                f"there is no field {absent[0]!r}. There are: {', '.join(names)}. Name them as "
                "#inputs=FIELD,FIELD&label=FIELD behind the source."
            )
        return inputs, label


@dataclass(frozen=True)
class Named:
    """The parts of the text."""

    place: str
    """Path, URL, or `package.module:factory`."""
    fields: Fields

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of `PLACE` or `PLACE#inputs=a,b&label=c`. A path that is there is a path, whatever its
        name. Raises DataError."""
        found = None if _is_there(text) else _FIELDS.fullmatch(text)
        if found is None:
            return cls(text, Fields())
        pairs = parse_qsl(found["fields"], keep_blank_values=True)
        given = dict(pairs)
        if len(given) < len(pairs) or given.keys() - {"inputs", "label"}:
            raise DataError(
                f"cannot read the fields of {redacted(text)!r}: expected #inputs=FIELD,FIELD, "
                "&label=FIELD, or both, each once."
            )
        inputs = tuple(filter(None, given.get("inputs", "").split(","))) or None
        return cls(found["place"], Fields(inputs, given.get("label")))

    @property
    def is_url(self) -> bool:
        """Whether it names a place by a scheme."""
        return "://" in self.place

    @property
    def is_factory(self) -> bool:
        """Whether it is `package.module:factory`, and no file of that name."""
        return bool(_FACTORY.fullmatch(self.place)) and not _is_there(self.place)


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # such as a name that is too long
        return False
