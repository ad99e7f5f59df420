"""Edit a trust file: comments and order are kept, and only a valid trust is written."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from gate.errors import PolicyError, StorageError
from gate.signing.keys import PublicKey
from gate.signing.trust import SECTION, Role, Trust, TrustedKey
from gate.storage.files import temporary_folder, write_text

_HEAD = "# Trusted keys and their validity periods (docs/attestation.md).\n"
_SHORT = 8
"""Minimum number of digits of an abbreviated key id."""


@dataclass(frozen=True)
class KeyTerms:
    """Owner and validity period of a key, ISO 8601. None: as in the file."""

    name: str | None = None
    valid_from: str | None = None
    valid_until: str | None = None


class EditedTrust:
    """A file with a section `trust:`, or one that is the section itself."""

    def __init__(self, path: Path) -> None:
        """Read the file; a missing file is created by `save`. Raises PolicyError."""
        from ruamel.yaml import YAML

        self._path = path
        self._yaml = YAML()
        self._yaml.preserve_quotes = True
        self._yaml.width = 1 << 16
        self._document = self._read()
        is_bare = SECTION not in self._document and bool(
            self._document.keys() & Trust.model_fields.keys()
        )
        if not is_bare and not isinstance(self._document.get(SECTION), dict):
            self._document[SECTION] = {}
        self._section: Any = self._document if is_bare else self._document[SECTION]

    def trust(self, key: PublicKey, roles: Sequence[Role], terms: KeyTerms) -> None:
        """Trust a key in these roles, or update the roles and terms of a listed key."""
        from ruamel.yaml.scalarstring import LiteralScalarString

        for role in roles:
            listed = self._section.setdefault(role, [])
            entry = next((each for each in listed if _id_of(each) == key.key_id), None)
            if entry is None:
                pem = LiteralScalarString(key.public)
                entry = {"name": key.name, "key_id": key.key_id, "public": pem}
                listed.append(entry)
            fields = asdict(terms).items()
            entry.update({field: text for field, text in fields if text is not None})

    def revoke(self, key_id: str) -> str:
        """Revoke a key for all signatures; return its full id. Raises PolicyError.

        A listed key may be named by the beginning of its id.
        """
        prefix = key_id.strip().lower()
        listed = {_id_of(each) for role in get_args(Role) for each in self._section.get(role) or ()}
        is_long = len(prefix) >= _SHORT
        matches = sorted(each for each in listed if is_long and each.startswith(prefix))
        is_complete = len(prefix) == 64 and set(prefix) <= set("0123456789abcdef")
        if len(matches) != 1 and not is_complete:
            raise PolicyError(
                f"{self._path}: '{key_id}' names {len(matches)} of the listed keys, expected one, "
                f"by its id or {_SHORT} digits of it or more. See gate keys show."
                + ("" if self._path.exists() else " The file does not exist: is its name right?")
            )
        revoked = self._section.setdefault("revoked", [])
        name = matches[0] if matches else prefix
        if name not in revoked:
            revoked.append(name)
        return name

    def save(self) -> Trust:
        """Write the file if the trust is valid. Raises PolicyError, StorageError."""
        stream = io.StringIO()
        self._yaml.dump(self._document, stream)
        text = stream.getvalue().rstrip("\n") + "\n"
        text = text if self._path.exists() else _HEAD + text
        with temporary_folder() as folder:
            draft = Path(folder, self._path.name)
            draft.write_text(text, encoding="utf-8")
            try:
                trust = Trust.from_file(draft).read_from(str(self._path))
            except PolicyError as error:
                problem = str(error).replace(str(draft), str(self._path))
                first = "" if self._section.get("measurers") else " Name a measurer first."
                raise PolicyError(f"{problem}\nNothing was written.{first}") from error
        write_text(self._path, text)
        return trust

    def _read(self) -> Any:
        from ruamel.yaml.error import YAMLError

        if not self._path.exists():
            return {}
        try:
            document = self._yaml.load(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise StorageError(f"cannot read {self._path}: {error.strerror}.") from error
        except (YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise PolicyError(f"{self._path} is not valid YAML: {error}. Fix it first.") from error
        if document is not None and not isinstance(document, dict):
            raise PolicyError(
                f"{self._path} contains no settings. Pass a trust file or a new path."
            )
        return {} if document is None else document


def _id_of(listed: Any) -> str:
    """Return the key id of an entry; empty for an invalid entry, which saving rejects."""
    try:
        return TrustedKey(name="", public=str(listed["public"])).key_id
    except (ValueError, TypeError, KeyError):
        return ""
