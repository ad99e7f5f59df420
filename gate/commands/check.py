"""`gate check`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gate.commands.ci_files import VerdictCommand
from gate.commands.evaluate import evaluate, policy_from_options, select_workers
from gate.commands.options import CHECK_OPTIONS, CheckRequest, with_options, with_unique_names
from gate.commands.result import CommandResult, within_limits
from gate.errors import StorageError
from gate.storage import files as atomic

NAME = "release.yaml"


def release_file(
    model: Path | None, parts: tuple[tuple[str, Path], ...], chain: str | None
) -> Path:
    """Return the file to judge: `model`, or a release file that lists the parts.

    The release file is written into the common parent folder of the parts. Raises UsageError for
    conflicting options, StorageError if a different release file exists there.
    """
    if not parts and chain is None:
        if model is None:
            raise click.UsageError("Missing argument 'MODEL', or --part NAME=FILE with --chain.")
        return model
    if model is not None:
        raise click.UsageError(f"use either {model}, or --part with --chain.")
    if not parts or chain is None:
        raise click.UsageError("--part and --chain go together: the chain runs the parts.")
    named = with_unique_names(parts, "--part")
    # `resolve` would follow links, and model hub caches consist of links.
    absolute = {name: Path(os.path.abspath(file)) for name, file in named.items()}  # noqa: PTH100
    folder = Path(os.path.commonpath([file.parent for file in absolute.values()]))
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    files = {name: file.relative_to(folder.absolute()) for name, file in absolute.items()}
    from gate.onnx_file.release_file import PartEntry, ReleaseFile, release_text

    path = folder / NAME
    text = release_text(chain, {name: PartEntry(file=str(file)) for name, file in files.items()})
    if path.exists() and path.read_text(errors="replace") != text:
        raise StorageError(
            f"{path} exists and differs from --part and --chain. Check it (gate check {path}) or "
            "remove it."
        )
    atomic.write_text(path, text)
    ReleaseFile.load(path)
    return path


@click.command(
    "check", cls=VerdictCommand, short_help="Judge an ONNX file against its PyTorch model."
)
@with_options(CHECK_OPTIONS)
@within_limits
def command(**options: Any) -> CommandResult:
    """Judge MODEL.onnx against the PyTorch model that it was exported from.

    Exit code 0: within every bound; 1: rejected; 2: not judged. gate init writes a policy, gate
    policy explain NAME explains a bound, gate locate finds the layer that differs.

    \b
    Examples:
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy
      gate check model.onnx --reference mypackage.models:build --checkpoint model.safetensors \\
          --inputs samples.npz --labels labels.npy --policy params.yaml --report report
      gate check optimized.onnx --reference model.onnx --inputs samples.npy
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --set runtimes.ort-cpu.bounds.noise_ratio=2
      gate check fp16.onnx --reference mypackage.models:build --inputs samples.npy \\
          --precision reduced
      gate check clip.onnx --reference mypackage.models:clip --inputs pairs.npz \\
          --role image_embeds=embedding --role logits_per_image=scores
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --labels labels.npy --policy params.yaml --against digits --report report
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --report report --track --tracking-uri http://127.0.0.1:5000
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --report report --name digits --key /etc/gate/ci.pem
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --recorded phone=recordings/phone
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --server http://127.0.0.1:8000/v2/models/digits
      gate check model.onnx --reference mypackage.models:build --inputs mypackage.data:eval_set \\
          --preprocessing preprocessing.yaml --decode-workers 2
      gate check model.onnx --reference mypackage.models:build \\
          --inputs 's3://bucket/eval.parquet#inputs=pixels&label=digit'
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --engine ray --address auto --workers 16
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy \\
          --summary summary.md --junit junit.xml --metrics-file metrics.txt
      gate check --part encoder=encoder.onnx --part head=head.onnx --chain mypackage.detector:run \\
          --reference mypackage.models:build --inputs samples.npy
      gate check model.onnx --reference mypackage.models:build --inputs samples.npy --json
    """
    options["model"] = release_file(options["model"], options["parts"], options["chain"])
    request = CheckRequest(**options)
    return evaluate(request, policy_from_options(**options), select_workers(request))
