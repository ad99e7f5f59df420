"""Entry point of the command `gate` and of `python -m gate`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line. Ctrl-C ends it with one line and exit code 130, also during imports."""
    try:
        from gate import cli

        cli.run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
