"""Parse, call the command, print; map errors to exit codes."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from gate.commands.options import warn_of_passwords
from gate.commands.result import (
    CommandResult,
    ExitCode,
    Line,
    Printed,
    as_json,
    console,
    decode,
    stdout_to_stderr,
)
from gate.errors import GateError
from gate.installation import keep_freed_memory, limit_openmp_spinning
from gate.storage.workspace import VARIABLE, working_in

# Importing this module must not load pydantic, numpy or torch: commands import what they need.


_BROKEN_PIPE = 141

_COMPLETE = "_GATE_COMPLETE"
"""The environment variable with which a shell requests completions from click."""

_MISSING_SUBCOMMAND = getattr(click.exceptions, "NoArgsIsHelpError", ())  # since click 8.2
"""A missing subcommand prints help on stderr and exits with 2, so that a script with an empty
variable fails."""

_JSON_VERSION = 1
"""`schema_version` of `--json` (docs/json.md); a record has its own instead."""

_TARGETS = {
    "check": "gate.commands.check:command",
    "plan": "gate.commands.distribute:plan_command",
    "measure": "gate.commands.distribute:measure_command",
    "merge": "gate.commands.distribute:merge_command",
    "locate": "gate.commands.locate:command",
    "reproduce": "gate.commands.reproduce:command",
    "report": "gate.commands.report:command",
    "lint": "gate.commands.lint:command",
    "export": "gate.commands.export:command",
    "mend": "gate.commands.mend:command",
    "preprocess": "gate.commands.preprocess:command",
    "quantize": "gate.commands.export:quantize_command",
    "promote": "gate.commands.promote:command",
    "approve": "gate.commands.review:approve_command",
    "reject": "gate.commands.review:reject_command",
    "rollback": "gate.commands.promote:rollback_command",
    "history": "gate.commands.history:command",
    "verify-release": "gate.commands.verify:verify_release_command",
    "verify-verdict": "gate.commands.verify:verify_verdict_command",
    "keys": "gate.commands.keys:command",
    "deploy": "gate.commands.deploy:command",
    "deployed": "gate.commands.deploy:deployed_command",
    "serve": "gate.commands.service:serve_command",
    "webhooks": "gate.commands.service:webhooks_command",
    "reconcile": "gate.commands.service:reconcile_command",
    "accept-ledger": "gate.commands.history:accept_ledger_command",
    "override": "gate.commands.history:override_command",
    "init": "gate.commands.init:command",
    "policy": "gate.commands.policy:command",
    "schema": "gate.commands.schema:command",
    "runtimes": "gate.commands.runtimes:command",
    "samples": "gate.commands.recordings:samples_command",
    "record": "gate.commands.recordings:record_command",
    "doctor": "gate.commands.doctor:command",
}
"""Name of a command to its module and function."""

COMMANDS = tuple(_TARGETS)


class _Commands(click.Group):
    """Imports commands on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, name = _TARGETS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command as click does; for a name close to an existing one, suggest that one."""
        name = args[0]
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        if near and name not in COMMANDS:
            ctx.fail(f"No such command '{name}'. Did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from gate.installation import version_text

        click.echo(f"gate {version_text()}")
        ctx.exit(0)


@click.command(
    cls=_Commands,
    epilog="Exit codes: 0 passed or done, 1 rejected by the policy, 2 not judged.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Print the version, and its commit if known.",
)  # fmt: skip
def gate() -> None:
    """Judge ONNX files against their PyTorch models, and promote exactly the bytes that passed.

    \b
    Examples:
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy
      gate locate model.onnx --reference mypackage.models:build --inputs samples.npy
      gate doctor
    """


def run() -> None:
    """Entry point of the command `gate`."""
    limit_openmp_spinning()
    keep_freed_memory()
    os.umask(os.umask(0o077) | 0o002)  # with umask 0, any user could replace a deployed file
    _open_closed_streams()
    _print_in_any_locale()
    _require_parity_gate_package()
    # Shells request completions without arguments. With arguments a command must run whatever the
    # environment is: click would print completions instead and exit with 0.
    if sys.argv[1:]:
        os.environ.pop(_COMPLETE, None)
    elif _COMPLETE in os.environ:
        gate.main(args=[], prog_name="gate", complete_var=_COMPLETE)
    sys.exit(main(sys.argv[1:], child=True))


def _require_parity_gate_package() -> None:
    """Exit with 2 if the package `gate` of another distribution shadows this one."""
    import gate as package

    if "EvaluationResult" in getattr(package, "__all__", ()):
        return
    print(
        f"error: the package 'gate' at {package.__file__} is not parity-gate's: another "
        "distribution installs a package of this name. Uninstall it, then install parity-gate "
        "again: pip install --force-reinstall --no-deps parity-gate",
        file=sys.stderr,
    )
    sys.exit(ExitCode.NOT_JUDGED)


def in_child(
    command: str, options: Mapping[str, Any], stated: Sequence[str], arguments: Sequence[str]
) -> dict[str, Any]:
    """Run a command in the child process of `gate.commands.result.run_with_limits`.

    Return the exit code and the text of `--json`. `options`: values from `encode`. `stated`:
    names of the options on the command line.
    """
    _print_in_any_locale()

    def call() -> Any:
        parent = click.Context(gate, info_name="gate", obj=Line(tuple(arguments), child=False))
        click_command = gate.get_command(parent, command)
        assert click_command is not None
        context = click.Context(click_command, info_name=command, parent=parent)
        context.params = {name: decode(value) for name, value in options.items()}
        for name in stated:
            context.set_parameter_source(name, ParameterSource.COMMANDLINE)
        with parent, context:
            return click_command.invoke(context)

    if "--json" not in arguments:
        return {"code": _exit_code(call, arguments), "json": ""}
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = _exit_code(call, arguments)
    return {"code": code, "json": text.getvalue()}


def main(arguments: Sequence[str], *, child: bool = False) -> int:
    """Run one command line and return its exit code.

    Never raises, and never prints a traceback without `--debug`. `child`: run commands that judge
    untrusted files in a child process, within limits.
    """
    line = Line(tuple(arguments), child=child)
    warn_of_passwords(arguments)
    return _exit_code(
        lambda: gate.main(args=list(arguments), prog_name="gate", standalone_mode=False, obj=line),
        arguments,
    )


def _exit_code(call: Callable[[], Any], arguments: Sequence[str]) -> int:
    """Call a command, print what it returns or raises, and return the exit code."""
    machine = "--json" in arguments
    streams = sys.stdout, sys.stderr
    try:
        with (
            stdout_to_stderr() if machine else contextlib.nullcontext(),
            working_in(os.environ.get(VARIABLE)),  # click does not restore it after a usage error
        ):
            outcome = call()
        if isinstance(outcome, int):  # --help and --version, which have printed already
            return outcome
        finish = outcome.finish if isinstance(outcome, CommandResult) else str
        if machine:  # the printed JSON includes the result of `finish`
            finish()
        try:
            code = _print_outcome(outcome, machine=machine)
        finally:
            if not machine and (text := finish()):
                click.echo(text)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    except BaseException as error:  # user code may call sys.exit(0), or raise anything
        # On a broken pipe, click wraps both streams and exits with 1.
        covered = isinstance(error, SystemExit) and (sys.stdout, sys.stderr) != streams
        if covered or isinstance(error, BrokenPipeError):
            sys.stdout, sys.stderr = streams
            _discard_stdout()
            return _BROKEN_PIPE
        if isinstance(error, OSError) and _is_raised_by_echo(error):  # --help, --version
            with contextlib.suppress(OSError):
                click.echo(f"error: the output can't be printed: {error.strerror}.", err=True)
            _discard_stdout()
            return ExitCode.NOT_JUDGED
        _print_error(error, arguments, machine=machine)
        return ExitCode.NOT_JUDGED
    return code


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed.

    Otherwise the next opened file would get its descriptor, and output would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _print_outcome(outcome: CommandResult | Printed, *, machine: bool) -> int:
    """Print the outcome; return the exit code, or 2 if printing fails. Raises BrokenPipeError."""
    code = outcome.code if isinstance(outcome, Printed) else int(outcome.status)
    try:
        if isinstance(outcome, Printed):
            click.echo(outcome.json, nl=False)
        elif machine:
            click.echo(_text({**outcome.plain, "exit_code": code}))
        else:
            outcome.show(console(sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        click.echo(
            f"error: the result can't be printed: {error.strerror}. The command is complete with "
            f"exit code {code}, and its changes remain. Do not repeat it; see gate history or the "
            "report.",
            err=True,
        )
        _discard_stdout()
        return ExitCode.NOT_JUDGED
    return code


def _print_in_any_locale() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # for encodings without '≤'
        sys.stdout.reconfigure(errors="backslashreplace")


def _text(plain: Mapping[str, Any]) -> str:
    return as_json({"schema_version": _JSON_VERSION, **plain})


def _print_error(error: BaseException, arguments: Sequence[str], *, machine: bool) -> None:
    from gate.storage.safe_text import Redaction, replace_controls

    clean = Redaction(addresses=arguments).clean
    kind, message = type(error).__name__, clean(str(error))
    text = f"error: {message}"
    if isinstance(error, click.ClickException):
        message = clean(error.format_message())
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        text = f"error: {message}" + (f"\nSee {path} --help for examples." if path else "")
        if isinstance(error, _MISSING_SUBCOMMAND):
            text = message
    elif not isinstance(error, GateError):
        text = (
            f"error: unexpected {kind}: {message}\n"
            "Nothing was decided. Repeat with --debug for the traceback."
        )
    text = "\n".join([text, *getattr(error, "__notes__", ())])
    if "--debug" in arguments:
        import traceback

        text = clean("".join(traceback.format_exception(error))) + text
    # Names in the judged file may contain terminal control characters.
    try:
        click.echo(replace_controls(text, keep="\n"), err=True)
        if machine:
            click.echo(_text({"error": {"type": kind, "message": message}}))
    except OSError:
        _discard_stdout()


def _is_raised_by_echo(error: OSError) -> bool:
    """Return whether a stream could not be written, instead of a file of the command."""
    import traceback

    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_code is click.echo.__code__


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":  # `python -m gate.cli check …` must not end with 0 without judging
    run()
