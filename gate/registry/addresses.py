"""Which addresses are one registry: version numbers mean nothing without the registry.

A server and the database behind it, or a server's old and new name, are the same registry under two
identities. Whoever knows says so once (`gate serve --same-registry`); it is kept beside the ledger,
so that promotions, rollbacks and the service agree.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from gate.errors import EvidenceError, StorageError
from gate.registry.ledger import Ledger
from gate.storage.atomic import write_text
from gate.storage.redaction import redacted

_PORTS = {"http": 80, "https": 443}


@functools.lru_cache(maxsize=256)
def plain(address: str) -> str:
    """An identity without what makes no difference: user, trailing slash, case of the host."""
    text = redacted(address).rstrip("/")
    parts = urlsplit(text)
    if parts.scheme not in _PORTS or not parts.hostname:
        return text
    port = f":{parts.port}" if parts.port not in (None, _PORTS[parts.scheme]) else ""
    return f"{parts.scheme}://{parts.hostname.lower()}{port}{parts.path}"


def same(ledger: Ledger, identity: str) -> frozenset[str]:
    """All identities of this registry, as `plain` writes them. Raises EvidenceError."""
    name = plain(identity)
    groups = [group for group in _read(ledger) if name in group]
    return frozenset({name}.union(*groups))


def declare(ledger: Ledger, identity: str, others: Iterable[str]) -> None:
    """Keep that these are the same registry. Raises EvidenceError, StorageError."""
    names = same(ledger, identity)
    wanted = names | {plain(other) for other in others}
    if wanted == names:
        return
    kept = [group for group in _read(ledger) if not group & wanted]
    joined = wanted.union(*(group for group in _read(ledger) if group & wanted))
    lines = sorted(sorted(group) for group in [*kept, joined])
    write_text(_path(ledger), json.dumps(lines, indent=1) + "\n")


def _path(ledger: Ledger) -> Path:
    return ledger.path.with_name(f"{ledger.path.name}.same.json")


def _read(ledger: Ledger) -> list[frozenset[str]]:
    path = _path(ledger)
    try:
        return [frozenset(map(str, group)) for group in json.loads(path.read_text("utf-8"))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}. Fix its permissions.") from error
    except (ValueError, TypeError) as error:
        raise EvidenceError(
            f"{path} is damaged: {error}. Remove it; say --same-registry again where it is needed."
        ) from error
