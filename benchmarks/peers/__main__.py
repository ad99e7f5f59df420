"""Print the cost of each tool and, with --corpus, the faults that each tool misses."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from gate.installation import onnx_runtimes
from gate.storage import files

if TYPE_CHECKING:
    from benchmarks.corpus.entry import Entry
    from benchmarks.peers.case import Judge

REQUIRED = ("polygraphy", "onnx_ir", "onnxscript")
DISTRIBUTIONS = ("torch", "polygraphy", "onnxscript", "onnx-ir", "numpy")
THREADS = 2


def main() -> None:
    arguments = _arguments()
    require_extra()
    console = Console(width=None if sys.stdout.isatty() else 140)
    results: dict[str, Any] = {"conditions": conditions()}
    console.print(results["conditions"])
    if arguments.rounds:
        results["race"] = run_race(arguments.rounds, console)
    if arguments.corpus:
        from benchmarks.corpus.registry import select_entries

        results["corpus"] = judge_corpus(select_entries(arguments.only), arguments.peer, console)
    if arguments.world:
        from benchmarks.world.registry import select_entries as select_world_entries

        entries = select_world_entries(arguments.only, arguments.world)
        results["world"] = judge_corpus(entries, arguments.peer, console)
    if arguments.json:
        files.write_text(arguments.json, json.dumps(results, indent=1) + "\n")


def require_extra() -> None:
    """Exit with the install command if the extra is not installed."""
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"benchmarks.peers compares with other tools, and {', '.join(missing)} is not "
            "installed. Install the extra: pip install -c constraints.txt -e '.[peers]'"
        )


def conditions() -> dict[str, Any]:
    """Return the versions and settings on which the numbers depend."""
    versions = {name: version(name) for name in DISTRIBUTIONS} | onnx_runtimes()
    return {
        "versions": versions,
        "threads": THREADS,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
    }


def run_race(rounds: int, console: Console) -> list[dict[str, Any]]:
    import torch

    from benchmarks.peers import race

    torch.set_num_threads(THREADS)
    standings = race.run(rounds=rounds)
    table = Table(
        title=f"{race.ARCHITECTURE}, {race.IMAGES} images in batches of {race.BATCH_SIZE}, "
        f"{rounds} rounds after one that warms up"
    )
    for heading in ("by", "seconds", "ratio to the loop", "least", "most"):
        table.add_column(heading, justify="left" if heading == "by" else "right")
    for standing in standings:
        numbers = (standing.seconds, standing.ratio, standing.least, standing.most)
        table.add_row(standing.name, *(f"{number:.2f}" for number in numbers))
    console.print(table)
    return [asdict(standing) for standing in standings]


def judge_corpus(
    entries: Sequence[Entry], names: Sequence[str], console: Console
) -> dict[str, Any]:
    """Return the results of all judges, or only of the peers in `names`, on a corpus."""
    import torch

    from benchmarks.corpus.judge import parity_gate
    from benchmarks.peers import verdicts
    from gate.commands.progress import progress_bar

    # The layers of the corpus are small, so several threads would mostly wait for each other.
    torch.set_num_threads(1)
    with progress_bar("corpus") as advance, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if names:
            peers = select_peers(names)
            results = verdicts.run(entries, None, peers=peers, advance=advance)
        else:
            results = verdicts.run(entries, lambda pair: parity_gate(pair).passed, advance=advance)
    console.print(verdicts.rates_table(results))
    return verdicts.summarize(results)


def select_peers(names: Sequence[str]) -> dict[str, Judge]:
    """Return the peers with these names. Exits with the valid names if one is unknown."""
    from benchmarks.peers import verdicts

    if unknown := [name for name in names if name not in verdicts.PEERS]:
        sys.exit(f"--peer {unknown[0]}: expected one of {', '.join(verdicts.PEERS)}")
    return {name: verdicts.PEERS[name] for name in names}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of the race; 0: none")
    parser.add_argument("--corpus", action="store_true", help="judge the corpus too")
    parser.add_argument("--only", metavar="GLOB", help="entries of the corpora, by name")
    parser.add_argument(
        "--world",
        choices=("tune", "confirm"),
        help="judge a half of the second corpus too (needs the extra world)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME",
        help="judge by this peer alone; may be repeated",
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
