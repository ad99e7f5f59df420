"""Address: how people name the database of the gate; apart from opening it, so that settings and
commands can say early what is none."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import sqlalchemy as sa

DEFAULT = "sqlite:///.gate/state.db"
_EXPECTED = "the state is sqlite:///FILE, postgresql://USER@HOST/DATABASE, or the path of a FILE"


def state_url(text: str) -> str:
    """The URL that is meant: itself; of a path without a scheme, that of the SQLite file there.
    Raises ValueError where the ledger and the inbox can't be in such a database."""
    if "://" not in text:
        if not text.strip() or text == ":memory:" or Path(text).is_dir():
            raise ValueError(_EXPECTED)
        return sa.URL.create("sqlite", database=text).render_as_string()
    parts = urlsplit(text)
    scheme = parts.scheme.partition("+")[0]
    if scheme not in ("sqlite", "postgresql"):
        raise ValueError(_EXPECTED)
    if scheme == "sqlite" and parts.path.strip("/") in ("", ":memory:"):
        raise ValueError("a database in memory is forgotten in a crash: name a file")
    return text
