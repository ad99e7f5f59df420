"""`gate runtimes install`: what a runtime needs beside packages of Python."""

from __future__ import annotations

import click

from gate.commands.outcome import Outcome, machine_options
from gate.commands.progress import spinner
from gate.commands.status import Status


@click.command("install")
@click.argument("name")
@machine_options
def command(name: str) -> Outcome:
    """Bring what the runtime NAME needs beside packages of Python; what is here already stays.

    browser-wasm: onnxruntime-web by npm, of the version that the gate pins with its digests, into
    ~/.cache/parity-gate/runtimes, or GATE_RUNTIMES. browser-webgpu uses the same.

    \b
    Examples:
      gate runtimes install browser-wasm
      GATE_RUNTIMES=/opt/runtimes gate runtimes install browser-wasm
    """
    from gate.errors import PolicyError
    from gate.runtimes import registry

    entry = registry.find(name, registry.entries())
    if not entry.builtin:
        raise PolicyError(
            f"{name} comes with {entry.package}, which installs what it needs. See why it is "
            "absent: gate runtimes."
        )
    with spinner(f"installing {name}"):
        brought = registry.runtime_at(entry.place).install()
    words = "installed" if brought else "was installed before"
    return Outcome(
        Status.DONE,
        {"runtime": name, "installed": brought},
        lambda console: console.print(f"{name} {words}."),
    )
