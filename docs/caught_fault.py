"""Draw docs/caught-fault.svg: what `gate check` prints on a file with one fault in it.

From the root of the repository:

    .venv/bin/python docs/caught_fault.py

The fault is real and hard to see: the weights of one layer of a small network, trained on
handwritten digits, went through half precision (fp16) and back. Every answer stays the same; the
numbers don't.
"""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PICTURE = ROOT / "docs/caught-fault.svg"
COLUMNS = 104
COMMAND = (
    "check", "half.onnx", "--reference", "digits:network", "--checkpoint", "second.safetensors",
    "--inputs", "samples.npy", "--labels", "labels.npy", "--policy", "policy.yaml",
)  # fmt: skip


def main() -> int:
    """Run the command as it is, and draw what it prints."""
    from benchmarks.screens.workbench import write_files

    with tempfile.TemporaryDirectory() as scratch:
        write_files(Path(scratch))
        code, printed = _on_a_terminal([sys.executable, "-m", "gate", *COMMAND], Path(scratch))
    recorder = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    recorder.print(Text.from_ansi(printed))
    drawn = recorder.export_svg(title="gate check half.onnx …", unique_id="gate")
    # The font is asked for by name only: a picture should load nothing from elsewhere.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
    print(f"exit code {code}; wrote {PICTURE.name}, {PICTURE.stat().st_size} bytes")
    return 0 if code == 1 else 2


def _on_a_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """What a command prints where it may use colors, and its exit code."""
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"
    }  # fmt: skip
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    printed = bytearray()
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while part := os.read(ours, 1 << 16):
            printed += part
    os.close(ours)
    return process.wait(), printed.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    sys.exit(main())
