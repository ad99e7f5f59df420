"""What a file says of itself: how and from what it was exported, and nothing of this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import onnx

from gate.onnxfile.walk import nodes_of
from gate.records.evidence import Source

PREFIX = "parity_gate."
_STACK_TRACE = "pkg.torch.onnx.stack_trace"
_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][^/\\\s:'\"()]+)+[/\\]")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def described(
    *, strategy: str, opset_asked: int | str, rungs: Iterable[str], source: Source | None
) -> dict[str, str]:
    """The metadata of a file. What is not known is left out."""
    facts = {
        "strategy": strategy,
        "opset_asked": str(opset_asked),
        "rungs": "\n".join(rungs),
        "factory": source.factory if source else None,
        "checkpoint_sha256": source.checkpoint_sha256 if source else None,
        "preprocess_sha256": source.preprocess_sha256 if source else None,
    }
    return {PREFIX + key: str(value) for key, value in facts.items() if value}


def impersonal(text: str) -> str:
    """`text` in one line, without folders and memory addresses: the same on every machine."""
    return _ADDRESS.sub("0x", _FOLDERS.sub("", " ".join(text.split())))


def stamp(model: onnx.ModelProto, metadata: dict[str, str]) -> None:
    """Give `model` the metadata, and take from it what names files of this machine."""
    kept = [(p.key, p.value) for p in model.metadata_props if not p.key.startswith(PREFIX)]
    del model.metadata_props[:]
    for key, value in (*kept, *metadata.items()):
        model.metadata_props.add(key=key, value=value)
    for node in nodes_of(model):
        node.ClearField("doc_string")
        properties = [(p.key, p.value) for p in node.metadata_props if p.key != _STACK_TRACE]
        del node.metadata_props[:]
        for key, value in properties:
            node.metadata_props.add(key=key, value=value)


def stamp_file(path: Path, metadata: dict[str, str]) -> None:
    """The same for the single file `path`, in place. Raises OSError."""
    model = onnx.ModelProto.FromString(path.read_bytes())
    stamp(model, metadata)
    path.write_bytes(model.SerializeToString(deterministic=True))
