"""Run a command with long output: show one progress line, write everything to a log.

    python pipelines/one_line.py LOG COMMAND …

Runs before anything is installed, so it needs nothing but Python. On a terminal the line changes
in place; elsewhere nothing is printed while it goes well.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SHOWN_LINES = 15
"""Number of the log's last lines that are shown if the command fails."""
_PROGRESS_PREFIXES = (
    "Collecting ",
    "Resolved ",
    "Downloading ",
    "Prepared ",
    "Installing ",
    "Installed ",
    "Building ",
    "Preparing ",
    "Creating ",
    "* ",
)
"""Beginnings of lines that describe the current step."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. After a failure, print the end and the path of the
    log."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    log, command = Path(arguments[0]), arguments[1:]
    log.parent.mkdir(parents=True, exist_ok=True)
    code = run(command, log)
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
        print(f"Failed with exit code {code}. All that it printed: {log}", file=sys.stderr)
    return code


def run(command: Sequence[str], log: Path) -> int:
    """Run the command with all output in `log`; show progress on stderr."""
    started = time.monotonic()
    shown = sys.stderr.isatty()
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            if shown and line.lstrip().startswith(_PROGRESS_PREFIXES):
                _show(f"{time.monotonic() - started:4.0f} s  {line.strip()}")
        code = process.wait()
    if shown:
        _show("")
    return code


def _show(text: str) -> None:
    """Replace the progress line, in ASCII and no wider than the terminal."""
    width = shutil.get_terminal_size().columns - 1
    plain = "".join(char if " " <= char <= "~" else "?" for char in text)
    sys.stderr.write(f"\r{plain[:width].ljust(width)}\r{plain[:width]}")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
