"""Run a stage: its status or error determines the exit code (`gate.commands.result`)."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from gate.commands.result import ExitCode
from gate.errors import GateError
from gate.storage.safe_text import Redaction
from pipelines.stage_results import record_stage


class Stopped(BaseException):
    """Raised on SIGTERM. Like KeyboardInterrupt, it lets `finally` blocks close runs and files."""


def run(main: Callable[[], int]) -> NoReturn:
    """Run a stage and exit with its code; expected errors are shown without a traceback."""
    signal.signal(signal.SIGTERM, _stop)
    code = exit_code(main)
    record_stage(code)
    sys.exit(code)


def exit_code(main: Callable[[], int]) -> int:
    """Return the exit code of `main()`; errors are printed on stderr."""
    try:
        return main()
    except GateError as error:
        _print_error(str(error))
    except KeyboardInterrupt:
        _print_error("interrupted; nothing half-written is kept. Run dvc repro to go on.")
        return ExitCode.INTERRUPTED
    except Stopped:
        _print_error("stopped; nothing half-written is kept. Run dvc repro to go on.")
        return 128 + signal.SIGTERM
    except OSError as error:
        if error.errno != errno.ENOSPC:
            _print_traceback()
        _print_error(f"{error}. Free space or fix permissions, then run dvc repro to go on.")
    except Exception:
        # Python's exit code for an exception is 1, which means "rejected" here.
        _print_traceback()
        _print_error("unexpected failure, nothing was judged.")
    return ExitCode.NOT_JUDGED


def _print_error(text: str) -> None:
    print(f"error: {Redaction().clean(text)}", file=sys.stderr, flush=True)


def _print_traceback() -> None:
    print(Redaction().clean(traceback.format_exc()), end="", file=sys.stderr)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise Stopped
