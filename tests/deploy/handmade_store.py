"""Stores with one file of any size, with the layout of a deployment."""

from __future__ import annotations

from pathlib import Path

from gate import Digest
from gate.deploy.store import EXACT, MANIFEST, Manifest, ModelStore, Slot, StoredFile, url_of


def make_store(root: Path, data: bytes, *, name: str = "digits") -> tuple[ModelStore, Path]:
    """Return a store that serves `data` as a model, and the path of its file."""
    digest, store = Digest.from_bytes(data), ModelStore(root)
    path = store.content(digest) / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    file = StoredFile(
        name=path.name, sha256=digest, size_bytes=len(data), url=url_of(digest, path.name)
    )
    slot = Slot(sha256=digest, size_bytes=len(data), model=file)
    release = root / "releases" / name / f"1-{digest.short}"
    release.mkdir(parents=True)
    created = Manifest(
        name=name, release=1, slots={EXACT: slot}, deployed_at="2026-01-02T03:04:05Z"
    )
    created.save(release / MANIFEST)
    (root / "live").mkdir()
    (root / "live" / name).symlink_to(f"../releases/{name}/{release.name}")
    return store, path
