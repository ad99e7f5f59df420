"""Small releases, and assertions on the content of a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gate import Digest
from gate.deploy.deploy import SlotSource, verify_slot
from gate.deploy.store import Manifest, ModelStore
from gate.golden.folder import ExpectedOutput, read_golden
from gate.onnx_file.reading import read_subject
from gate.onnx_file.sandboxed_reading import release_within
from tests.golden_vectors import vectors
from tests.registry import parts
from tests.registry.releases import onnx_file, onnx_file_with_data

NAME = "digits"


MULTI_FILE_SEED = 100
"""Seeds from here on make a release of two files."""


def source(folder: Path, seed: int = 0) -> SlotSource:
    """Return a model with its golden vectors; the weights depend on the seed."""
    if seed >= MULTI_FILE_SEED:
        return multi_file_source(folder, seed)
    path, golden = vectors.write_model_and_vectors(folder / str(seed), seed=seed)
    return SlotSource.local(path, golden=golden)


def external_data_source(folder: Path) -> SlotSource:
    """Return a model with its weights as external data."""
    weights = vectors.weights(onnx_file(folder / "single.onnx"))
    path = onnx_file_with_data(folder / "external" / "model.onnx")
    outputs = {"logits": ExpectedOutput(vectors.inputs() @ weights, vectors.TOLERANCE, 1.0)}
    vectors.write_model_vectors(folder / "external" / "golden", path, outputs=outputs)
    return SlotSource.local(path, golden=folder / "external" / "golden")


def multi_file_source(folder: Path, seed: int = 0) -> SlotSource:
    """Return a release of two files with its golden vectors."""
    path = parts.write_release(folder / f"parts-{seed}", seed=seed)
    golden = folder / f"golden-of-parts-{seed}"
    parts.write_vectors(golden, path)
    return SlotSource.local(path, golden=golden)


def tamper_source(original: SlotSource, tamper: Callable[[Path], None]) -> SlotSource:
    """Return a source whose files are changed after they were fetched."""

    def fetch(folder: Path) -> Path:
        path = original.fetch(folder)
        tamper(path)
        return path

    return SlotSource(
        original.sha256,
        fetch,
        golden_sha256=original.golden_sha256,
        golden_required=original.golden_required,
    )


def assert_complete(store: ModelStore, name: str = NAME) -> Manifest:
    """Assert that the deployed and the earlier releases are complete, and return the live manifest."""
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


def assert_digests_match(store: ModelStore) -> None:
    """Assert that each folder of the store has the digest in its name."""
    for folder in (store.root / "store").iterdir() if (store.root / "store").exists() else ():
        model, release_path = folder / "model.onnx", folder / "release.yaml"
        if release_path.exists():
            observed = release_within(release_path, None).subject().sha256
        else:
            observed = read_subject(model).sha256 if model.exists() else read_golden(folder).sha256
        assert observed.hex == folder.name


def assert_no_leftovers(store: ModelStore) -> None:
    """Assert that the store has no temporary files and no unreferenced releases or files."""
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
