"""MLflow workspaces: names of models in them, and identities of registries.

A server with `--enable-workspaces` has registered models per workspace. The workspace `default` is
what a server without workspaces has, so its names and identities are those without any.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Self

from gate.errors import StorageError
from gate.storage.safe_text import check_model_name, make_printable

DEFAULT = "default"

VARIABLE = "MLFLOW_WORKSPACE"
"""By which every MLflow client names its workspace."""

_MARK = "#/workspaces/"

SEPARATOR = ":"
"""MLflow allows it in no name of a model or a workspace."""

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,61}[a-z0-9]")
"""MLflow's rule."""


class ModelKey(NamedTuple):
    """A registered model of a server. As text: `NAME`, or `WORKSPACE:NAME`."""

    workspace: str | None
    """None: `default`."""
    name: str

    @classmethod
    def parse(cls, text: str, *, workspace: str | None = None) -> Self:
        """Read the text of a key. `workspace`: of a name without one. Raises StorageError."""
        before, mark, name = text.rpartition(SEPARATOR)
        return cls(check_workspace(before) if mark else workspace, check_model_name(name))

    def __str__(self) -> str:
        return self.name if self.workspace is None else f"{self.workspace}{SEPARATOR}{self.name}"


def check_workspace(name: str) -> str | None:
    """The workspace, None for `default`. Raises StorageError where MLflow allows no such name."""
    if not _NAME.fullmatch(name):
        raise StorageError(
            f"{make_printable(name)[:120]!r} is not a valid workspace. Use 2 to 63 lowercase "
            "letters, digits and '-', as in team-a:digits."
        )
    return None if name == DEFAULT else name


def current_workspace() -> str | None:
    """The workspace that MLFLOW_WORKSPACE names; None: `default`. Raises StorageError."""
    name = os.environ.get(VARIABLE, "").strip()
    return check_workspace(name) if name else None


class working_in:  # noqa: N801 - used as a function
    """Have MLFLOW_WORKSPACE name a workspace meanwhile.

    No generator: one that a failed command leaves behind would restore the variable whenever it is
    collected.
    """

    def __init__(self, workspace: str | None) -> None:
        self._workspace = workspace
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before = os.environ.get(VARIABLE)
        _set(self._workspace)

    def __exit__(self, *_: object) -> None:
        _set(self._before)


def _set(name: str | None) -> None:
    if name is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = name


def page_address(path: str) -> str:
    """The address of a page within MLflow's user interface, in the current workspace."""
    workspace = current_workspace()
    return f"#/{path}" if workspace is None else f"#/{path}?workspace={workspace}"


def in_workspace(address: str, workspace: str | None) -> str:
    """The identity of a workspace's registry: `<address>#/workspaces/<workspace>`, or the address
    for the workspace `default`."""
    return address if workspace is None else f"{address}{_MARK}{workspace}"


def key_in(registry: str, name: str) -> str:
    """The registered model of this name in the registry of this identity, as commands take it."""
    return str(ModelKey(split_identity(registry)[1], name))


def split_identity(identity: str) -> tuple[str, str | None]:
    """The address and the workspace of a registry."""
    address, mark, name = identity.rpartition(_MARK)
    if not mark or not _NAME.fullmatch(name) or name == DEFAULT:
        return identity, None
    return address, name
