"""Draw docs/caught-fault.svg: what `gate check` prints on a file with one fault in it.

After `make repro`, from the root of the repository:

    .venv/bin/python docs/caught_fault.py

The fault is real and hard to see: the weights of one layer of the trained model went through
half precision (fp16) and back. Every answer stays the same; the numbers don't.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from rich.console import Console
from torch import nn

from gate import cli
from gate.model.loading import torchvision_model

ROOT = Path(__file__).resolve().parents[1]
MODEL, CHECKPOINT = ROOT / "models/model.onnx", ROOT / "models/model.safetensors"
IMAGES, PICTURE = ROOT / "data/eval_images.npy", ROOT / "docs/caught-fault.svg"
COLUMNS = 112

POLICY = """
runtimes:
  ort-cpu: {required: always, bounds: &bounds {
    max_abs_diff: 1.0e-4, scaled_diff: 1.0e-4, confidence_diff: 1.0e-4,
    top1_agreement: 1.0, top1_lower_bound: 0.99}}
  ort-cpu-optimized: {required: always, bounds: *bounds}
"""


def resnet18() -> nn.Module:
    """The model of params.yaml."""
    return torchvision_model("resnet18", weights=None, num_classes=10)


def damage(source: Path, target: Path) -> None:
    """Copy the ONNX file with the weights of its largest layer rounded to fp16."""
    model = onnx.load(source)
    largest = max(model.graph.initializer, key=lambda tensor: np.prod(tensor.dims))
    rounded = numpy_helper.to_array(largest).astype(np.float16).astype(np.float32)
    largest.CopyFrom(numpy_helper.from_array(rounded, largest.name))
    onnx.save(model, target)


def main() -> int:
    """Run the command as it is, on a console that records."""
    recorder = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True,
                       markup=False, highlight=False)  # fmt: skip
    cli.console = lambda _stream: recorder
    sys.modules.setdefault("caught_fault", sys.modules[__name__])
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        damage(MODEL, Path("faulty.onnx"))
        Path("policy.yaml").write_text(POLICY)
        code = cli.main(
            ["check", "faulty.onnx", "--reference", "caught_fault:resnet18", "--checkpoint",
             str(CHECKPOINT), "--inputs", str(IMAGES), "--policy", "policy.yaml"]
        )  # fmt: skip
    drawn = recorder.export_svg(title="gate check faulty.onnx …", unique_id="gate")
    # The font is asked for by name only: a picture should load nothing from elsewhere.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
    print(f"exit code {code}; wrote {PICTURE.name}, {PICTURE.stat().st_size} bytes")
    return 0 if code == 1 else 2


if __name__ == "__main__":
    sys.exit(main())
