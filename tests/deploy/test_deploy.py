"""deploy and rollback_deployment: only verified files are served, and the name always resolves."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest

from gate import Digest
from gate.deploy import deploy as staging
from gate.deploy.deploy import (
    Deployment,
    SlotSource,
    deploy,
    is_serving,
    rollback_deployment,
)
from gate.deploy.store import EXACT, ModelStore
from gate.errors import DigestMismatch, OnnxFileError, RegistryUnavailable, StorageError, TooLarge
from gate.golden import verify
from gate.golden.folder import GOLDEN_JSON, ExpectedOutput, read_golden
from tests.deploy import models
from tests.deploy.models import NAME, assert_complete, assert_no_leftovers
from tests.golden_vectors import vectors
from tests.registry.releases import onnx_file


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "srv")


def _deploy(store: ModelStore, tmp_path: Path, *seeds: int) -> Deployment:
    for seed in seeds:
        last = deploy(store, NAME, {"exact": models.source(tmp_path, seed)})
        assert last.outcome in ("deployed", "unchanged"), last.reason
    return last


def test_deployed_model_is_found_under_its_name(store: ModelStore, tmp_path: Path) -> None:
    source = models.source(tmp_path)
    result = deploy(store, NAME, {"exact": source})
    assert result.outcome == "deployed"
    live = assert_complete(store)
    assert live == result.manifest
    assert live.release == 1
    slot = live.slots["exact"]
    assert slot.sha256 == slot.model.sha256 == source.sha256
    assert slot.model.url == f"sha256/{source.sha256.hex}/model.onnx"
    assert slot.golden is not None
    assert slot.golden.sha256 == source.golden_sha256
    assert read_golden(store.content(slot.golden.sha256)).sha256 == source.golden_sha256
    assert store.names() == (NAME,)
    assert_no_leftovers(store)
    assert not os.access(store.live_link(NAME) / EXACT / "model.onnx", os.W_OK) or os.getuid() == 0


def test_external_data_is_deployed(store: ModelStore, tmp_path: Path) -> None:
    source = models.external_data_source(tmp_path)
    assert deploy(store, NAME, {"exact": source}).outcome == "deployed"
    slot = assert_complete(store).slots["exact"]
    assert [entry.name for entry in slot.files] == ["model.onnx", "weights.data"]
    assert slot.sha256 != slot.model.sha256
    assert (store.live_link(NAME) / EXACT / "weights.data").stat().st_size > 0
    assert deploy(store, NAME, {"exact": source}).outcome == "unchanged"


def test_deploying_the_same_file_changes_nothing(store: ModelStore, tmp_path: Path) -> None:
    _deploy(store, tmp_path, 1)

    def times() -> dict[Path, int]:
        ignored = {"locks", "tmp"}
        paths = (p for p in store.root.rglob("*") if not ignored & set(p.parts))
        return {p: p.lstat().st_mtime_ns for p in paths}

    before = times()
    assert _deploy(store, tmp_path, 1).outcome == "unchanged"
    assert times() == before


def test_slots_are_replaced_together(store: ModelStore, tmp_path: Path) -> None:
    first = {"exact": models.source(tmp_path, 1), "quantized": models.source(tmp_path, 2)}
    assert deploy(store, NAME, first).outcome == "deployed"
    assert set(assert_complete(store).slots) == {"exact", "quantized"}
    # One invalid slot also blocks the other slot.
    bad = models.tamper_source(models.source(tmp_path, 4), lambda path: path.write_bytes(b"x"))
    refused = deploy(store, NAME, {"exact": models.source(tmp_path, 3), "quantized": bad})
    assert refused.outcome == "refused"
    live = assert_complete(store)
    assert live.slots["exact"].sha256 == first["exact"].sha256
    assert deploy(store, NAME, {"exact": first["exact"]}).outcome == "deployed"
    assert set(assert_complete(store).slots) == {"exact"}
    assert rollback_deployment(store, NAME).outcome == "rolled_back"
    assert set(assert_complete(store).slots) == {"exact", "quantized"}
    assert_no_leftovers(store)


def test_only_the_configured_number_of_releases_is_kept(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "srv", keep=2)
    _deploy(store, tmp_path, 1, 2, 3, 4, 5)
    live = assert_complete(store)
    assert [earlier.release for earlier in live.previous] == [4, 3]
    assert list(store.releases(NAME)) == [3, 4, 5]
    assert_no_leftovers(store)


def test_repeated_rollback_goes_further_back(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "srv", keep=2)
    assert rollback_deployment(store, NAME).outcome == "refused"
    _deploy(store, tmp_path, 1, 2, 3)
    digests = {seed: models.source(tmp_path, seed).sha256 for seed in (1, 2, 3)}
    for seed, number in ((2, 4), (1, 5)):
        back = rollback_deployment(store, NAME)
        assert back.outcome == "rolled_back"
        live = assert_complete(store)
        assert (live.slots["exact"].sha256, live.release) == (digests[seed], number)
        assert live.rolled_back_to == seed
    assert list(store.releases(NAME)) == [3, 4, 5]
    end = rollback_deployment(store, NAME)
    assert end.outcome == "refused"
    assert assert_complete(store).release == 5
    assert_no_leftovers(store)
    assert _deploy(store, tmp_path, 3).outcome == "deployed"
    assert rollback_deployment(store, NAME).outcome == "rolled_back"
    assert assert_complete(store).slots["exact"].sha256 == digests[1]


def test_models_share_content_and_keep_separate_releases(store: ModelStore, tmp_path: Path) -> None:
    _deploy(store, tmp_path, 1)
    assert deploy(store, "other", {"exact": models.source(tmp_path, 1)}).outcome == "deployed"
    _deploy(store, tmp_path, 2, 3, 4, 5, 6)
    assert assert_complete(store, "other").release == 1
    assert_no_leftovers(store)


# Refused deployments.


def _append_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _replace_model(path: Path) -> None:
    onnx_file(path, seed=77)


def _write_wrong_outputs(path: Path) -> None:
    """Write valid golden vectors of this file with wrong outputs."""
    logits = vectors.inputs() @ vectors.weights(path) + 1
    vectors.write_model_vectors(
        path.parent / "golden", path, outputs={"logits": ExpectedOutput(logits, 1e-4)}
    )


def _zero_golden_array(path: Path) -> None:
    array = path.parent / "golden" / read_golden(path.parent / "golden").golden.outputs[0].file
    array.write_bytes(bytes(array.stat().st_size))


def _remove_golden_vectors(path: Path) -> None:
    (path.parent / "golden" / GOLDEN_JSON).unlink()


def _replace_by_symlink(path: Path) -> None:
    path.rename(path.parent / "real.onnx")
    path.symlink_to("real.onnx")


def _loosen_tolerance(path: Path) -> None:
    """Write valid vectors of this file that differ from the promoted ones."""
    logits = vectors.inputs() @ vectors.weights(path)
    vectors.write_model_vectors(
        path.parent / "golden", path, outputs={"logits": ExpectedOutput(logits, 1e9)}
    )


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (_append_a_byte, "not an ONNX model|has digest|not a valid"),
        (_replace_model, "has digest"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.unlink(), "is missing"),
        (_replace_by_symlink, "is a link"),
        (_write_wrong_outputs, r"golden\.json has digest"),
        (_loosen_tolerance, r"golden\.json has digest"),
        (_zero_golden_array, "not the bytes|has digest"),
        (_remove_golden_vectors, "no golden vectors"),
    ],
)
def test_tampered_files_are_refused(store: ModelStore, tmp_path: Path, tamper, reason: str) -> None:
    source = models.tamper_source(models.source(tmp_path, 2), tamper)
    refused = deploy(store, NAME, {"exact": source})
    assert refused.outcome == "refused"
    assert refused.manifest is None
    assert store.live(NAME) is None
    _deploy(store, tmp_path, 1)
    refused = deploy(store, NAME, {"exact": source})
    assert refused.outcome == "refused"
    assert re.search(reason, refused.reason), refused.reason
    assert assert_complete(store).release == 1
    assert_no_leftovers(store)


@pytest.mark.parametrize(
    ("tamper", "reason"), [(_write_wrong_outputs, "max_abs_diff"), (_zero_golden_array, "digest")]
)
def test_golden_vectors_without_a_pinned_digest_are_verified(
    store, tmp_path, tamper, reason
) -> None:
    good = models.source(tmp_path)
    bad = models.tamper_source(SlotSource(good.sha256, good.fetch), tamper)
    refused = deploy(store, NAME, {"exact": bad})
    assert refused.outcome == "refused"
    assert reason in refused.reason


def test_golden_vectors_of_another_file_are_refused(store: ModelStore, tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "model.onnx", seed=5)
    _, golden = vectors.write_model_and_vectors(tmp_path / "other", seed=6)
    refused = deploy(store, NAME, {"exact": SlotSource.local(path, golden=golden)})
    assert refused.outcome == "refused"
    assert "has digest" in refused.reason


@pytest.mark.parametrize(
    ("wanted", "answer"),
    [((1, 2), True), ((1, 3), False), ((3, 2), False), ((1,), False), ((2, 1), False)],
)
def test_serves_compares_every_slot(
    store: ModelStore, tmp_path: Path, wanted, answer: bool
) -> None:
    def slots(*seeds: int) -> dict[str, SlotSource]:
        labels = ("exact", "quantized")
        return {
            label: models.source(tmp_path, seed) for label, seed in zip(labels, seeds, strict=False)
        }

    assert not is_serving(store, NAME, slots(*wanted))
    deploy(store, NAME, slots(1, 2))
    assert is_serving(store, NAME, slots(*wanted)) is answer
    assert is_serving(store, NAME, slots(*wanted), thoroughly=False) is answer
    result = deploy(store, NAME, slots(*wanted))
    assert result.outcome == ("unchanged" if answer else "deployed")


def test_model_without_golden_vectors_must_load(store: ModelStore, tmp_path: Path) -> None:
    path = onnx_file(tmp_path / "model.onnx")
    result = deploy(store, NAME, {"exact": SlotSource.local(path)})
    assert result.outcome == "deployed"
    assert "without golden vectors: exact" in result.reason
    assert assert_complete(store).slots["exact"].golden is None
    strict = SlotSource(SlotSource.local(path).sha256, SlotSource.local(path).fetch)
    refused = deploy(store, NAME, {"exact": strict})
    assert refused.outcome == "refused"
    assert "no golden vectors" in refused.reason
    assert deploy(store, NAME, {"exact": models.source(tmp_path)}).outcome == "deployed"
    assert assert_complete(store).slots["exact"].golden is not None


def test_model_that_onnx_runtime_cannot_load_is_refused(store, tmp_path, monkeypatch) -> None:
    def raise_error(model: object) -> None:
        raise RuntimeError("no kernel for this operator\nand more")

    monkeypatch.setattr(verify, "open_on_cpu", raise_error)
    source = SlotSource.local(onnx_file(tmp_path / "model.onnx"))
    refused = deploy(store, NAME, {"exact": source})
    assert refused.outcome == "refused"
    assert refused.reason.endswith("RuntimeError: no kernel for this operator")


@pytest.mark.parametrize("error", [DigestMismatch("gone"), TooLarge("too much")])
def test_fetch_refusal_refuses_the_deployment(store: ModelStore, tmp_path: Path, error) -> None:
    def fetch(folder: Path) -> Path:
        raise error

    digest = models.source(tmp_path).sha256
    assert deploy(store, NAME, {"exact": SlotSource(digest, fetch)}).outcome == "refused"


@pytest.mark.parametrize("error", [RegistryUnavailable("down"), OSError(errno.ENOSPC, "full")])
def test_fetch_failure_is_an_error(store: ModelStore, tmp_path: Path, error) -> None:
    _deploy(store, tmp_path, 1)

    def fetch(folder: Path) -> Path:
        (folder / "half").write_bytes(b"half")
        raise error

    with pytest.raises((RegistryUnavailable, StorageError)):
        deploy(store, NAME, {"exact": SlotSource(models.source(tmp_path, 2).sha256, fetch)})
    assert assert_complete(store).release == 1
    assert_no_leftovers(store)


def test_file_outside_the_staging_folder_is_refused(store: ModelStore, tmp_path: Path) -> None:
    path, _ = vectors.write_model_and_vectors(tmp_path)
    source = SlotSource(Digest.from_file(path), lambda folder: path, golden_required=False)
    refused = deploy(store, NAME, {"exact": source})
    assert refused.outcome == "refused"
    assert path.exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a b", "ä", "x" * 101])
def test_invalid_names_are_refused(store: ModelStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(StorageError, match="can't be the name"):
        deploy(store, name, {"exact": models.source(tmp_path)})
    with pytest.raises(StorageError, match="can't be the name"):
        deploy(store, NAME, {"exact": models.source(tmp_path), name: models.source(tmp_path)})
    with pytest.raises(StorageError):
        rollback_deployment(store, name)


def test_slot_exact_is_required(store: ModelStore, tmp_path: Path) -> None:
    for slots in ({}, {"quantized": models.source(tmp_path)}):
        with pytest.raises(StorageError, match="needs the slot 'exact'"):
            deploy(store, NAME, slots)


# Damage in the store.


def _damage_stored_model(store: ModelStore, release: int | None = None) -> Path:
    live = store.live(NAME) if release is None else store.release(NAME, release)
    assert live is not None
    slot = live.slots["exact"]
    path = store.file(slot.sha256, slot.model)
    path.chmod(0o644)
    path.write_bytes(b"spoiled")
    return path


def test_redeploying_repairs_golden_vectors(store: ModelStore, tmp_path: Path) -> None:
    live = _deploy(store, tmp_path, 1).manifest
    assert live is not None
    golden = live.slots["exact"].golden
    assert golden is not None
    for path in store.content(golden.sha256).glob("*.bin"):
        path.unlink()
    assert _deploy(store, tmp_path, 1).outcome == "deployed"
    assert_complete(store)


def test_rollback_to_a_damaged_release_is_refused(store: ModelStore, tmp_path: Path) -> None:
    _deploy(store, tmp_path, 1, 2)
    _damage_stored_model(store, release=1)
    refused = rollback_deployment(store, NAME)
    assert refused.outcome == "refused"
    assert "release 1 can't serve again" in refused.reason
    live = store.live(NAME)
    assert live is not None
    assert live.release == 2


def test_rollback_verifies_golden_vectors_again(
    store: ModelStore, tmp_path: Path, monkeypatch
) -> None:
    _deploy(store, tmp_path, 1, 2)

    def refuse(path: Path, golden: Path | None, limits: object) -> None:
        raise staging.NotDeployed("this machine computes something else")

    monkeypatch.setattr(staging, "_run", refuse)
    assert rollback_deployment(store, NAME).outcome == "refused"
    assert assert_complete(store).release == 2


def test_full_disk_leaves_the_old_release(store: ModelStore, tmp_path: Path, monkeypatch) -> None:
    _deploy(store, tmp_path, 1)

    def raise_disk_full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(staging, "fsync_tree", raise_disk_full)
    with pytest.raises(StorageError, match="No space left"):
        _deploy(store, tmp_path, 2)
    monkeypatch.undo()
    assert assert_complete(store).release == 1
    assert _deploy(store, tmp_path, 2).outcome == "deployed"
    assert_no_leftovers(store)


# Concurrent deployments and readers.


def test_concurrent_deployments_are_serialized(store: ModelStore, tmp_path: Path) -> None:
    running, max_running = [0], [0]

    def slow_source(source: SlotSource) -> SlotSource:
        def fetch(folder: Path) -> Path:
            running[0] += 1
            max_running[0] = max(max_running[0], running[0])
            path = source.fetch(folder)
            threading.Event().wait(0.1)
            running[0] -= 1
            return path

        return SlotSource(source.sha256, fetch, source.golden_sha256)

    outcomes: list[str] = []

    def run(seed: int) -> None:
        source = slow_source(models.source(tmp_path, seed))
        outcomes.append(deploy(store, NAME, {"exact": source}).outcome)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["deployed"] * 3
    assert max_running == [1]
    assert assert_complete(store).release == 3


def test_waiting_for_the_deployment_lock_times_out(store: ModelStore, tmp_path: Path) -> None:
    with (
        store.locked(),
        pytest.raises(StorageError, match="another deployment"),
        store.locked(timeout_s=0.1),
    ):
        pass
    with store.locked():
        pass


DIGEST = Digest.from_bytes(b"")


def test_size_limit_covers_all_files_of_a_source(tmp_path: Path) -> None:
    path, golden = vectors.write_model_and_vectors(tmp_path)
    total = path.stat().st_size + sum(file.stat().st_size for file in golden.iterdir())
    store = ModelStore(tmp_path / "srv")
    too_small = SlotSource.local(path, golden=golden, max_bytes=total - 1)
    refused = deploy(store, NAME, {"exact": too_small})
    assert refused.outcome == "refused"
    assert "larger than the limit" in refused.reason
    enough = SlotSource.local(path, golden=golden, max_bytes=total)
    assert deploy(store, NAME, {"exact": enough}).outcome == "deployed"


def test_fetched_files_are_limited(tmp_path: Path) -> None:
    def write_large_file(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(bytes(1001))
        return folder / "model.onnx"

    source = SlotSource(DIGEST, write_large_file, max_bytes=1000)
    assert deploy(ModelStore(tmp_path / "srv"), NAME, {"exact": source}).outcome == "refused"


def test_local_file_must_match_its_digest(tmp_path: Path) -> None:
    path, golden = vectors.write_model_and_vectors(tmp_path)
    store = ModelStore(tmp_path / "srv")
    refused = deploy(store, NAME, {"exact": SlotSource.local(path, golden=golden, sha256=DIGEST)})
    assert refused.outcome == "refused"
    assert "expected" in refused.reason
    with pytest.raises(OnnxFileError):
        SlotSource.local(tmp_path / "nothing.onnx")
    next(golden.glob("*.bin")).write_bytes(b"")
    with pytest.raises(DigestMismatch):
        SlotSource.local(path, golden=golden)
