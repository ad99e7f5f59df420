"""What an editor of the registry can write, and what a mishap does to the files of the service."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from gate.records.layout import PREPROCESSING, SPEC
from gate.registry.interface import CHAMPION, PREVIOUS, Tag
from tests.end_to_end.proxy import PAGE
from tests.end_to_end.stack import Stack
from tests.golden_vectors.test_pictures import EPS
from tests.ledger.rows import put_pending
from tests.storage.test_foreign import DEEP, YAML_BOMB

SPEC_JSON, GOLDEN_JSON, MODEL = f"{PREPROCESSING}/{SPEC}", "golden/golden.json", "model.onnx"
GIB = 1 << 30


@dataclass(frozen=True)
class Victim:
    """A model whose version 1 serves, and whose version 2 nobody ever passed."""

    stack: Stack
    client: MlflowClient
    number: int

    @property
    def name(self) -> str:
        return self.stack.model

    @property
    def artifacts(self) -> Path:
        """Where the files of version 1 lie."""
        source = self.client.get_model_version(self.name, "1").source or ""
        (folder,) = self.stack.server.artifacts.rglob(source.rpartition("/")[2])
        return folder / "artifacts"


Spoil = Callable[[Victim], object]
"""What it gives, if that is a text, is the number of the version that `champion` is pointed at."""


def _written(name: str, data: bytes) -> Spoil:
    def spoil(victim: Victim) -> None:
        path = victim.artifacts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return spoil


def _sparse(name: str, size: int) -> Spoil:
    def spoil(victim: Victim) -> None:
        path = victim.artifacts / name
        path.touch()  # without taking room
        os.truncate(path, size)

    return spoil


def _removed(name: str) -> Spoil:
    return lambda victim: (victim.artifacts / name).unlink()


def _folder(name: str) -> Spoil:
    def spoil(victim: Victim) -> None:
        (victim.artifacts / name).unlink()
        (victim.artifacts / name / "in").mkdir(parents=True)
        (victim.artifacts / name / "in" / "file").touch()

    return spoil


def _many(victim: Victim) -> None:
    (victim.artifacts / "many").mkdir()
    for number in range(300):
        (victim.artifacts / "many" / str(number)).touch()


def _deep(victim: Victim) -> None:
    (victim.artifacts / "/".join(["d"] * 100)).mkdir(parents=True)
    (victim.artifacts / "/".join(["d"] * 100) / "file").touch()


def _golden_array(victim: Victim) -> None:
    (first, *_) = sorted((victim.artifacts / "golden").rglob("*.bin"))
    os.truncate(first, 15 * GIB)


def _tag(key: str, value: str) -> Spoil:
    return lambda v: v.client.set_model_version_tag(v.name, "1", key, value)


def _many_tags(victim: Victim) -> None:
    for number in range(50):
        victim.client.set_model_version_tag(victim.name, "1", f"t{number}", "x" * 4000)
        victim.client.set_registered_model_tag(victim.name, f"t{number}", "x" * 4000)


def _untagged(victim: Victim) -> None:
    for key in victim.client.get_model_version(victim.name, "1").tags:
        victim.client.delete_model_version_tag(victim.name, "1", key)


def _source(uri: str) -> Spoil:
    """A version whose files are elsewhere, which `champion` will point at."""

    def spoil(victim: Victim) -> str:
        return str(victim.client.create_model_version(victim.name, uri).version)

    return spoil


def _renamed(victim: Victim) -> None:
    victim.client.rename_registered_model(victim.name, f"{victim.name} elsewhere")


def _pending(text: str) -> Spoil:
    def spoil(victim: Victim) -> None:
        put_pending(victim.stack.ledger.state, text)

    return spoil


def _manifest(victim: Victim) -> None:
    link = victim.stack.store.live_link(victim.name)
    (link / "manifest.json").write_bytes(DEEP)


def _live_link(victim: Victim) -> None:
    link = victim.stack.store.live_link(victim.name)
    link.unlink()
    link.symlink_to("/etc")


SPOILS: dict[str, Spoil] = {
    # the spec of preprocessing
    "bomb for a spec": _written(SPEC_JSON, YAML_BOMB),
    "nested spec": _written(SPEC_JSON, DEEP),
    "nested objects for a spec": _written(SPEC_JSON, b'{"a":' * 20_000),
    "endless spec": _sparse(SPEC_JSON, 4 * GIB),
    "empty spec": _written(SPEC_JSON, b""),
    "folder for a spec": _folder(SPEC_JSON),
    "no spec": _removed(SPEC_JSON),
    # golden vectors
    "nested golden.json": _written(GOLDEN_JSON, DEEP),
    "bomb for a golden.json": _written(GOLDEN_JSON, YAML_BOMB),
    "endless golden.json": _sparse(GOLDEN_JSON, 4 * GIB),
    "folder for a golden.json": _folder(GOLDEN_JSON),
    "endless golden array": _golden_array,
    "program for a golden picture": _written("golden/pictures/0.png", EPS),
    # records
    "nested evidence": _written("gate/evidence.json", DEEP),
    "no evidence": _removed("gate/evidence.json"),
    "bomb for a decision": _written("gate/decision.json", YAML_BOMB),
    "endless decision": _sparse("gate/decision.json", 4 * GIB),
    # MLflow's own record, and the model
    "bomb for an MLmodel": _written("MLmodel", YAML_BOMB),
    "nested MLmodel": _written("MLmodel", DEEP),
    "endless MLmodel": _sparse("MLmodel", 4 * GIB),
    "bytes for an MLmodel": _written("MLmodel", b"\xff\0"),
    "MLmodel that leads out": _written("MLmodel", b"flavors: {onnx: {data: ../../../../etc/passwd}, python_function: {data: ../../../../etc/passwd, loader_module: mlflow.onnx}}"),
    "page for a model": _written(MODEL, PAGE),
    "empty model": _written(MODEL, b""),
    "nodes without end": _written(MODEL, b":\x02\n\0" * (5 << 20)),
    "no model": _removed(MODEL),
    # what is put beside them
    "hundreds of files": _many,
    "hundred folders deep": _deep,
    "endless file": _sparse("data", 40 * GIB),
    # tags, aliases, names
    "tag of a rollback": _tag(Tag.ROLLED_BACK, "2026: worse"),
    "tag of a revert": _tag(Tag.REVERTED, "\x1b[2J\n" * 500),
    "review in control characters": _tag(Tag.REVIEW, "\x1b]0;approved\x07\n\u202e"),
    "hundred large tags": _many_tags,
    "no tags": _untagged,
    "description without end": lambda v: v.client.update_model_version(v.name, "1", "# x\n" * 20_000),
    "alias that leads nowhere": lambda v: v.client.set_registered_model_alias(v.name, PREVIOUS, "2"),
    "no alias": lambda v: v.client.delete_registered_model_alias(v.name, CHAMPION),
    "renamed model": _renamed,
    "deleted model": lambda v: v.client.delete_registered_model(v.name),
    "deleted version": lambda v: v.client.delete_model_version(v.name, "1"),
    # where a version says that its files are
    "files of another version": _source("models:/spared/1"),
    "files of a store of somebody's": _source("s3://nobodys/models"),
    "files of no kind": _source("gopher://127.0.0.1/0"),
    # mishaps of the service's own files
    "pending moves of nobody": _pending('{"operat ion'),
    "a long pending move": _pending(DEEP.decode()),
    "nested manifest": _manifest,
    "link out of the store": _live_link,
}  # fmt: skip
DAMAGED_STORE = ("nested manifest", "link out of the store")
