"""MLflow workspaces: names of models in them, and identities of registries.

A server with `--enable-workspaces` has registered models per workspace. The workspace `default`
corresponds to a server without workspaces: its names and identities have no workspace.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Self

from gate.errors import StorageError
from gate.storage.safe_text import check_model_name, make_printable

DEFAULT = "default"

VARIABLE = "MLFLOW_WORKSPACE"
"""The environment variable in which MLflow clients set the workspace."""

_WORKSPACE_MARK = "#/workspaces/"

SEPARATOR = ":"
"""MLflow does not allow it in names of models and workspaces."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,61}[a-z0-9]")
"""MLflow's rule for workspaces."""


class ModelKey(NamedTuple):
    """A registered model of a server, written `NAME` or `WORKSPACE:NAME`."""

    workspace: str | None
    """None: `default`."""
    name: str

    @classmethod
    def parse(cls, text: str, *, workspace: str | None = None) -> Self:
        """Parse a key. `workspace`: used for a name without one. Raises StorageError."""
        before, mark, name = text.rpartition(SEPARATOR)
        return cls(check_workspace(before) if mark else workspace, check_model_name(name))

    def __str__(self) -> str:
        return self.name if self.workspace is None else f"{self.workspace}{SEPARATOR}{self.name}"


def check_workspace(name: str) -> str | None:
    """Return the workspace, None for `default`. Raises StorageError if MLflow forbids the name."""
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"{make_printable(name)[:120]!r} is not a valid workspace. Use 2 to 63 lowercase "
            "letters, digits and '-', as in team-a:digits."
        )
    return None if name == DEFAULT else name


def current_workspace() -> str | None:
    """Return the workspace in MLFLOW_WORKSPACE, None for `default`. Raises StorageError."""
    name = os.environ.get(VARIABLE, "").strip()
    return check_workspace(name) if name else None


class working_in:  # noqa: N801 - used as a function
    """Set MLFLOW_WORKSPACE while the context is open.

    Not a generator: an unfinished one would restore the variable when it is garbage-collected.
    """

    def __init__(self, workspace: str | None) -> None:
        self._workspace = workspace
        self._previous: str | None = None

    def __enter__(self) -> None:
        self._previous = os.environ.get(VARIABLE)
        _set(self._workspace)

    def __exit__(self, *_: object) -> None:
        _set(self._previous)


def _set(name: str | None) -> None:
    if name is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = name


def page_address(path: str) -> str:
    """Return the URL fragment of a page in MLflow's user interface, in the current workspace."""
    workspace = current_workspace()
    return f"#/{path}" if workspace is None else f"#/{path}?workspace={workspace}"


def in_workspace(address: str, workspace: str | None) -> str:
    """Return the identity of a workspace's registry: `<address>#/workspaces/<workspace>`, or the
    address for the workspace `default`."""
    return address if workspace is None else f"{address}{_WORKSPACE_MARK}{workspace}"


def key_in(registry: str, name: str) -> str:
    """Return the key of a registered model in the registry with this identity, as text."""
    return str(ModelKey(split_identity(registry)[1], name))


def split_identity(identity: str) -> tuple[str, str | None]:
    """Split the identity of a registry into its address and its workspace."""
    address, mark, name = identity.rpartition(_WORKSPACE_MARK)
    if not mark or not _NAME.fullmatch(name) or name == DEFAULT:
        return identity, None
    return address, name
