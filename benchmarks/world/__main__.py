"""Judge the second corpus, models of other projects, and print which faults were detected.

Exit code 0 only if nothing escaped, nothing correct was blocked, every fault has its file, and
every layer that was named is the right one; 1 otherwise; 2 if no entry has such a name.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec

from benchmarks.corpus.__main__ import judged, parser_of
from benchmarks.corpus.judge import Gate, parity_gate

REGISTRY = "benchmarks.world.registry"
NEEDED = ("timm", "transformers")


def main(arguments: list[str] | None = None, *, gate: Gate = parity_gate) -> int:
    """Judge, print, and return the exit code."""
    parser = parser_of("python -m benchmarks.world", __doc__ or "")
    parser.add_argument(
        "--half", choices=("tune", "confirm"), help="the architectures of one half alone"
    )
    asked = parser.parse_args(arguments)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"benchmarks.world judges models of others, and {', '.join(missing)} is not "
            "installed. Install the extra: pip install -c constraints.txt -e '.[world]'"
        )
    logging.getLogger("transformers").setLevel(logging.ERROR)  # what it says of token numbers
    from benchmarks.world.registry import chosen

    return judged(chosen(asked.only, asked.half), asked, gate=gate, registry=REGISTRY)


if __name__ == "__main__":
    sys.exit(main())
