"""`gate`, reading foreign files in its own process: of a table's hundreds of looks each would take
four children. What reads bombs in children is tried in `test_spoiled`."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

    from gate.cli import run
    from tests.sandbox.here import always_read_here

    always_read_here()
    run()
