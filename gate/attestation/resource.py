"""What a verdict is for: a model in a registry, by one address, so that a verdict on one is none on
another with the same bytes.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from gate.storage.digest import Digest

_MODELS = "#/models/"


def resource_of(registry: str, model: str) -> str:
    """The address of a registered model: `<registry>#/models/<name>`. `registry`: its identity as
    `gate.ledger.addresses.plain` writes it."""
    return f"{registry}{_MODELS}{quote(model, safe='')}"


def file_resource(sha256: Digest) -> str:
    """Of a file that is meant for no registry yet."""
    return f"urn:sha256:{sha256.hex}"


def registered(resource: str) -> tuple[str, str] | None:
    """Registry and name of a registered model; None for another resource."""
    registry, found, name = resource.rpartition(_MODELS)
    return (registry, unquote(name)) if found else None
