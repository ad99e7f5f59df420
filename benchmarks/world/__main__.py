"""Judge the second corpus, models of other projects, and print which faults were detected.

Exit code 0 only if no fault passed, no correct file was refused, every faulty file was written, and
every located layer is the right one; 1 otherwise; 2 if no entry matches the name.
"""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec

from benchmarks.corpus.__main__ import build_parser, judge_entries
from benchmarks.corpus.judge import Gate, parity_gate

REGISTRY = "benchmarks.world.registry"
NEEDED = ("timm", "transformers")


def main(arguments: list[str] | None = None, *, gate: Gate = parity_gate) -> int:
    """Judge the selected entries, print the results, and return the exit code."""
    parser = build_parser("python -m benchmarks.world", __doc__ or "")
    parser.add_argument(
        "--half", choices=("tune", "confirm"), help="the architectures of one half alone"
    )
    options = parser.parse_args(arguments)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"benchmarks.world needs {', '.join(missing)}. Install the extra: "
            "pip install -c constraints.txt -e '.[world]'"
        )
    logging.getLogger("transformers").setLevel(logging.ERROR)  # messages about the number of tokens
    from benchmarks.world.registry import select_entries

    return judge_entries(
        select_entries(options.only, options.half), options, gate=gate, registry=REGISTRY
    )


if __name__ == "__main__":
    sys.exit(main())
