"""A multi-file release is deployed as one, so that no reader gets parts of two releases."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx
import pytest
from onnx import helper

from gate import Digest
from gate.deploy.deploy import SlotSource, deploy
from gate.deploy.store import EXACT, QUANTIZED, Manifest, ModelStore, Slot
from tests.deploy import models
from tests.deploy.models import NAME, assert_complete, assert_no_leftovers
from tests.deploy.servers import serve_store
from tests.registry import parts


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "srv")


def test_manifest_lists_all_parts(store: ModelStore, tmp_path: Path) -> None:
    source = models.multi_file_source(tmp_path, 1)
    result = deploy(store, NAME, {EXACT: source})
    assert result.outcome == "deployed", result.reason
    slot = assert_complete(store).slots[EXACT]
    assert slot.sha256 == source.sha256
    assert slot.model.name == "release.yaml"
    assert {name: file.name for name, file in slot.parts.items()} == {
        "encoder": "encoder.onnx",
        "head": "head.onnx",
    }
    for name, file in slot.parts.items():
        path = tmp_path / "parts-1" / f"{name}.onnx"
        assert file.sha256 == Digest.from_file(path)
        assert file.size_bytes == path.stat().st_size
        assert file.url == f"sha256/{slot.sha256.hex}/{name}.onnx"
    assert deploy(store, NAME, {EXACT: source}).outcome == "unchanged"
    assert_no_leftovers(store)


def test_single_file_and_multi_file_releases_replace_each_other(
    store: ModelStore, tmp_path: Path
) -> None:
    single = models.source(tmp_path, 1)
    for source in (single, models.multi_file_source(tmp_path, 1), single):
        assert deploy(store, NAME, {EXACT: source}).outcome == "deployed"
        assert assert_complete(store).slots[EXACT].sha256 == source.sha256
    assert not assert_complete(store).slots[EXACT].parts


def _remove_part(path: Path) -> None:
    path.with_name("head.onnx").unlink()


def _replace_part(path: Path) -> None:
    path.with_name("head.onnx").write_bytes(path.with_name("encoder.onnx").read_bytes())


def _swap_parts(path: Path) -> None:
    text = path.read_text().replace("encoder.onnx", "?").replace("head.onnx", "encoder.onnx")
    path.write_text(text.replace("?", "head.onnx"))


def _symlink_part(path: Path) -> None:
    head = path.with_name("head.onnx")
    head.rename(path.parents[1] / "elsewhere.onnx")
    head.symlink_to(path.parents[1] / "elsewhere.onnx")


def _move_part_above_the_folder(path: Path) -> None:
    path.with_name("head.onnx").rename(path.parents[1] / "head.onnx")
    path.write_text(path.read_text().replace("head.onnx", "../head.onnx"))


def _nest_release_file(path: Path) -> None:
    path.with_name("inner.yaml").write_text(path.read_text())
    path.write_text(path.read_text().replace("head.onnx", "inner.yaml"))


def _invalidate_release_file(path: Path) -> None:
    path.write_bytes(b"\x08\x08")


@pytest.mark.parametrize(
    ("tamper", "wanted"),
    [
        (_remove_part, "the part head is missing"),
        (_replace_part, "has digest"),
        (_swap_parts, "has digest"),
        (_symlink_part, "is a link, expected a file"),
        (_move_part_above_the_folder, "expected a file in the folder"),
        (_nest_release_file, "expected an ONNX file"),
        (_invalidate_release_file, "release.yaml"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_tampered_multi_file_release_is_refused(
    store: ModelStore, tmp_path: Path, tamper: Callable[[Path], None], wanted: str
) -> None:
    assert deploy(store, NAME, {EXACT: models.multi_file_source(tmp_path, 1)}).outcome == "deployed"
    bad = models.tamper_source(models.multi_file_source(tmp_path, 2), tamper)
    result = deploy(store, NAME, {EXACT: bad})
    assert result.outcome == "refused"
    assert wanted in result.reason
    assert assert_complete(store).release == 1


def test_part_with_wrong_outputs_is_refused(store: ModelStore, tmp_path: Path) -> None:
    """The file is valid and has the right digest; the golden vectors have wrong outputs."""
    path = parts.write_release(tmp_path / "parts")
    golden = tmp_path / "golden"
    parts.write_vectors(golden, path)
    record = golden / "golden.json"
    outputs = [file for file in golden.iterdir() if "part-1-output" in file.name]
    data = outputs[0].read_bytes()
    changed = data[4:] + data[:4]
    outputs[0].write_bytes(changed)
    text = record.read_text()
    record.write_text(text.replace(Digest.from_bytes(data).hex, Digest.from_bytes(changed).hex))
    result = deploy(store, NAME, {EXACT: SlotSource.local(path, golden=golden)})
    assert result.outcome == "refused"
    assert "part head: output 'logits': max_abs_diff" in result.reason


def test_each_part_must_load_without_golden_vectors(store: ModelStore, tmp_path: Path) -> None:
    path = parts.write_release(tmp_path / "parts")
    assert deploy(store, NAME, {EXACT: SlotSource.local(path)}).outcome == "deployed"
    second = parts.write_release(tmp_path / "other", seed=1)
    model = onnx.load(str(second.with_name("head.onnx")))
    model.graph.node[0].op_type, model.graph.node[0].domain = "Unheard", "of"
    model.opset_import.append(helper.make_opsetid("of", 1))
    second.with_name("head.onnx").write_bytes(model.SerializeToString())
    result = deploy(store, NAME, {EXACT: SlotSource.local(second)})
    assert result.outcome == "refused"
    assert "can't load the part head" in result.reason


def _source_with_one_part(folder: Path) -> SlotSource:
    path = parts.write_release(folder / "one-part")
    path.write_text(path.read_text().replace("  head: {file: head.onnx}\n", ""))
    return SlotSource.local(path)


@pytest.mark.parametrize(
    ("exact", "twin", "wanted"),
    [
        (
            models.multi_file_source,
            models.source,
            "slot quantized has one file, the slot exact the parts",
        ),
        (
            models.source,
            models.multi_file_source,
            "quantized has the parts encoder, head, .* one file",
        ),
        (
            models.multi_file_source,
            _source_with_one_part,
            "quantized has the parts encoder, the .* encoder, head",
        ),
    ],
    ids=["twin of a file", "twin of a release", "other parts"],
)
def test_slots_with_different_parts_are_refused(
    store: ModelStore,
    tmp_path: Path,
    exact: Callable[[Path], SlotSource],
    twin: Callable[[Path], SlotSource],
    wanted: str,
) -> None:
    result = deploy(store, NAME, {EXACT: exact(tmp_path), QUANTIZED: twin(tmp_path / "twin")})
    assert result.outcome == "refused"
    assert re.search(wanted, result.reason), result.reason
    assert store.live(NAME) is None


def test_parts_are_served_by_digest_only(store: ModelStore, tmp_path: Path) -> None:
    """Without digests a client could download parts of two releases."""
    twin = models.multi_file_source(tmp_path / "twin", 2)
    deploy(store, NAME, {EXACT: models.multi_file_source(tmp_path, 1), QUANTIZED: twin})
    with serve_store(store) as client:
        slots = Manifest.from_json(client.get(f"{NAME}/manifest.json").content).slots
        assert client.get(f"{NAME}/model.onnx").status_code == 404
        for label in (EXACT, QUANTIZED):
            for file in ("encoder.onnx", "release.yaml"):
                assert client.get(f"{NAME}/{label}/{file}").status_code == 404
            slot = slots[label]
            assert slot.golden is not None
            for entry in (*slot.files, *slot.parts.values(), slot.golden):
                response = client.get(f"{NAME}/{entry.url}")
                assert Digest.from_bytes(response.content) == entry.sha256


def test_manifest_must_contain_each_named_part(store: ModelStore, tmp_path: Path) -> None:
    result = deploy(store, NAME, {EXACT: models.multi_file_source(tmp_path, 1)})
    assert result.manifest is not None
    slot = result.manifest.slots[EXACT]
    incomplete = slot.model_copy(update={"external_data": slot.external_data[:1]})
    with pytest.raises(Exception, match="the file of the part head is not in external_data"):
        Slot.from_json(incomplete.to_json())


@pytest.mark.proof
def test_no_reader_gets_parts_of_two_releases(tmp_path: Path) -> None:
    """Read from the disk and over HTTP while releases replace each other."""
    store = ModelStore(tmp_path / "srv", keep=2)
    sources = [models.multi_file_source(tmp_path, seed) for seed in (1, 2)]
    deploy(store, NAME, {EXACT: sources[0]})
    ended = threading.Event()

    def read_from_disk() -> bytes | None:
        folder = (store.live_link(NAME) / EXACT).resolve()
        try:
            return _read_parts(folder)
        except FileNotFoundError:
            return None

    def read_over_http() -> bytes | None:
        slot = Manifest.from_json(client.get(f"{NAME}/manifest.json").content).slots[EXACT]
        responses = [client.get(f"{NAME}/{slot.parts[name].url}") for name in parts.NAMES]
        if any(response.status_code == 404 for response in responses):
            return None
        return b"".join(response.content for response in responses)

    def read_until_the_end(read: Callable[[], bytes | None]) -> set[bytes | None]:
        results = set()
        while not ended.is_set():
            results.add(read())
        return results - {None}  # None: the release was pruned during the read

    with serve_store(store) as client, ThreadPoolExecutor(2) as pool:
        readers = pool.map(read_until_the_end, (read_from_disk, read_over_http))
        try:
            for turn in range(12):
                result = deploy(store, NAME, {EXACT: sources[(turn + 1) % 2]})
                assert result.outcome == "deployed", result.reason
        finally:
            ended.set()
        expected = {_read_parts(tmp_path / f"parts-{seed}") for seed in (1, 2)}
        assert set().union(*readers) == expected


def _read_parts(folder: Path) -> bytes:
    return b"".join((folder / f"{name}.onnx").read_bytes() for name in parts.NAMES)
