"""`gate runtimes`, `gate runtimes install`."""

from __future__ import annotations

from pathlib import Path

import click

from gate.commands.options import policy_option
from gate.commands.progress import spinner
from gate.commands.result import (
    CommandResult,
    Dispatch,
    ExitCode,
    machine_options,
    table_result,
    text_result,
)
from gate.errors import PolicyError

_STYLES = {"ok": "green", "broken": "bold red", "absent": "yellow", "by options": "cyan"}


@click.command(
    "runtimes",
    cls=Dispatch,
    subcommands={"install": "gate.commands.runtimes:runtimes_install_command"},
    short_help="List the runtimes on this machine.",
)
@policy_option("List only the runtimes of this policy.")
@machine_options
def command(policy: Path | None) -> CommandResult:
    """List built-in runtimes and those of installed packages, available or not, with the reason
    (docs/runtimes.md).

    gate runtimes install NAME installs dependencies of a runtime that are not Python packages. Exit
    code 0: no runtime is broken (installed, but does not load); 2: at least one is.

    \b
    Examples:
      gate runtimes
      gate runtimes --json
      gate runtimes --policy params.yaml
      gate runtimes install browser-wasm
    """
    from gate.policy.policy import Policy
    from gate.runtimes.selection import runtime_statuses

    listed_policy = Policy.from_file(policy) if policy else None
    with spinner("loading the runtimes"):
        rows = runtime_statuses(listed_policy)
    broken = any(row.state == "broken" for row in rows)
    return table_result(
        {"runtimes": [row.to_plain() for row in rows]},
        ("runtime", "state", "runs on", "versions", "package"),
        [
            (
                row.name if row.name == row.kind else f"{row.name} ({row.kind})",
                row.state,
                row.provider,
                ", ".join(f"{name} {version}" for name, version in row.versions.items()),
                row.package or "parity-gate",
            )
            for row in rows
        ],
        *(f"{row.name}: {row.reason}" for row in rows if row.reason),
        status=ExitCode.NOT_JUDGED if broken else ExitCode.DONE,
        styles=_STYLES,
    )


@click.command("install")
@click.argument("name")
@machine_options
def runtimes_install_command(name: str) -> CommandResult:
    """Install the dependencies of the runtime NAME that are not Python packages.

    browser-wasm and browser-webgpu: onnxruntime-web from npm, in the version and with the digests
    that parity-gate pins, into ~/.cache/parity-gate/runtimes or GATE_RUNTIMES.

    \b
    Examples:
      gate runtimes install browser-wasm
      GATE_RUNTIMES=/opt/runtimes gate runtimes install browser-wasm
    """
    from gate.runtimes import runtime, selection

    entry = selection.find_runtime(name, selection.entries())
    if not entry.builtin:
        raise PolicyError(
            f"{name} belongs to the package {entry.package}, which installs its dependencies. gate "
            "runtimes shows why the runtime is absent."
        )
    with spinner(f"installing {name}"):
        is_new = runtime.load_runtime(entry.class_path).install()
    words = "installed" if is_new else "was already installed"
    return text_result({"runtime": name, "installed": is_new}, f"{name} {words}.")
