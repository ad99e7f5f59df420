"""Small releases, and what must hold of a store at every moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gate.deploy.deploy import SlotSource, verify_slot
from gate.deploy.store import Manifest, ModelStore
from gate.golden.folder import ExpectedOutput, read_golden
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sandboxed_reading import release_within
from gate.storage.digest import Digest
from tests.golden_vectors import vectors
from tests.registry import parts
from tests.registry.releases import onnx_file, onnx_file_with_data

NAME = "digits"


OF_PARTS = 100
"""From this seed on it is a release of two files."""


def source(folder: Path, seed: int = 0) -> SlotSource:
    """A model with its golden vectors, other bytes for another seed."""
    if seed >= OF_PARTS:
        return of_parts(folder, seed)
    path, golden = vectors.made(folder / str(seed), seed=seed)
    return SlotSource.local(path, golden=golden)


def external(folder: Path) -> SlotSource:
    """A model with its weights in a file beside it."""
    weights = vectors.weights(onnx_file(folder / "single.onnx"))
    path = onnx_file_with_data(folder / "external" / "model.onnx")
    outputs = {"logits": ExpectedOutput(vectors.inputs() @ weights, vectors.TOLERANCE, 1.0)}
    vectors.golden_of(folder / "external" / "golden", path, outputs=outputs)
    return SlotSource.local(path, golden=folder / "external" / "golden")


def of_parts(folder: Path, seed: int = 0) -> SlotSource:
    """A release of two files, with its golden vectors."""
    path = parts.files(folder / f"parts-{seed}", seed=seed)
    golden = folder / f"golden-of-parts-{seed}"
    parts.golden(golden, path)
    return SlotSource.local(path, golden=golden)


def tampered(good: SlotSource, tamper: Callable[[Path], None]) -> SlotSource:
    """A source whose files are changed after they were fetched."""

    def fetch(folder: Path) -> Path:
        path = good.fetch(folder)
        tamper(path)
        return path

    return SlotSource(
        good.sha256, fetch, golden_sha256=good.golden_sha256, golden_required=good.golden_required
    )


def check_whole(store: ModelStore, name: str = NAME) -> Manifest:
    """The name points at a release whose every byte is there."""
    live = store.live(name)
    assert live is not None
    for label, slot in live.slots.items():
        assert verify_slot(store, slot) is None
        observed = store.live_link(name) / label / slot.model.name
        assert Digest.from_file(observed) == slot.model.sha256
    for earlier in live.previous:
        old = store.release(name, earlier.release)
        assert {label: slot.sha256 for label, slot in old.slots.items()} == earlier.slots
        assert all(verify_slot(store, slot) is None for slot in old.slots.values())
    return live


def check_contents(store: ModelStore) -> None:
    """Whatever is in the store is whole, and is what its folder is called."""
    for folder in (store.root / "store").iterdir() if (store.root / "store").exists() else ():
        model, of_parts = folder / "model.onnx", folder / "release.yaml"
        if of_parts.exists():
            observed = release_within(of_parts, None).subject().sha256
        else:
            observed = read_subject(model).sha256 if model.exists() else read_golden(folder).sha256
        assert observed.hex == folder.name


def check_tidy(store: ModelStore) -> None:
    """Nothing is left over: no temporary file, no release or bytes that nobody needs."""
    assert list(store.staging_folder.iterdir()) == [] if store.staging_folder.exists() else True
    needed: set[str] = set()
    for name in store.names():
        live = store.live(name)
        assert live is not None
        assert max(store.releases(name)) == live.release
        for number in store.releases(name):
            needed |= store.release(name, number).digests
    assert {path.name for path in (store.root / "store").iterdir()} == needed
    assert {path.name for path in (store.root / "live").iterdir()} == set(store.names())
