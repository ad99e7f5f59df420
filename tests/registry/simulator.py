"""A registry in memory, and wrappers that crash, interfere or corrupt at a chosen call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gate import Digest
from gate.errors import DigestMismatch, ResourceGone
from gate.ledger.database import StateDatabase
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.registry.interface import Alias, Draft, Tag, Version

APPROVED = LedgerEntry(
    action="passed", registry="simulator", model="", reason="", sha256=Digest.from_bytes(b"")
)
"""An entry that approves a version whose file is empty."""


class Crash(BaseException):
    """A simulated kill of the process, which no `except Exception` catches."""


@dataclass
class Stored:
    data: bytes
    tags: dict[str, str]
    run_id: str
    description: str
    extra_files: dict[str, bytes] = field(default_factory=dict)
    made_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    name: str = "model.onnx"


@dataclass
class Simulator:
    """An in-memory `gate.registry.interface.Registry`. `corrupt` changes the bytes at upload."""

    identity: str = "simulator"
    versions: list[Stored] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    corrupt: Callable[[bytes], bytes] = bytes

    def ensure_model(self, name: str) -> None:
        pass

    def has_model(self, name: str) -> bool:
        return True

    def find(self, name: str, sha256: Digest) -> tuple[Version, ...]:
        numbers = range(len(self.versions), 0, -1)
        matches = [self.version(name, str(number)) for number in numbers]
        return tuple(v for v in matches if v.tags.get(Tag.SHA256) == sha256.hex)

    def create_version(self, name: str, draft: Draft) -> str:
        data = self.corrupt(draft.path.read_bytes())
        extra_files = {
            f"{location}/{path.relative_to(source).as_posix()}": path.read_bytes()
            for location, source in draft.folders.items()
            for path in source.rglob("*")
            if path.is_file()
        }
        stored = Stored(data, dict(draft.tags), draft.run_id, draft.description, extra_files)
        if draft.subject.parts:
            stored.name = draft.path.name
            for file in draft.subject.external_data:
                extra_files[file] = (draft.path.parent / file).read_bytes()
        self.versions.append(stored)
        return str(len(self.versions))

    def version(self, name: str, number: str) -> Version:
        if int(number) > len(self.versions):
            raise ResourceGone(f"there is no version {number} of {name}")
        stored = self.versions[int(number) - 1]
        tags = dict(stored.tags)
        return Version(number, stored.run_id, tags, stored.description, stored.made_at)

    def download(self, name: str, number: str, folder: Path, **_: object) -> Path:
        stored = self.versions[int(number) - 1]
        path = folder / stored.name
        path.write_bytes(stored.data)
        for location, data in stored.extra_files.items():
            (folder / location).parent.mkdir(parents=True, exist_ok=True)
            (folder / location).write_bytes(data)
        return path

    def fetch(self, name: str, number: str, folder: Path, *, most_bytes: Mapping[str, int]) -> None:
        stored = self.versions[int(number) - 1]
        for path, most in most_bytes.items():
            data = stored.extra_files.get(path)
            if data is None:
                continue
            if len(data) > most:
                raise DigestMismatch(f"{path} has {len(data)} bytes")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    def alias(self, name: str, alias: Alias) -> str | None:
        return self.aliases.get(alias)

    def set_alias(self, name: str, alias: Alias, number: str) -> None:
        self.aliases[alias] = number

    def delete_alias(self, name: str, alias: Alias) -> None:
        self.aliases.pop(alias, None)

    def set_tag(self, name: str, number: str, *, key: str, value: str) -> None:
        self.versions[int(number) - 1].tags[key] = value

    def set_description(self, name: str, number: str, text: str) -> None:
        self.versions[int(number) - 1].description = text


class Watched:
    """Forward calls to a registry, record their names, and run hooks before and after each."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.before: Callable[[str, int], None] = lambda call, index: None
        self.after: Callable[[str, int], None] = lambda call, index: None

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.inner, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **options: Any) -> Any:
            alias = arguments[1] if name in ("alias", "set_alias") else ""
            label, index = f"{name} {alias}".strip(), len(self.calls)
            self.calls.append(label)
            self.before(label, index)
            result = member(*arguments, **options)
            self.after(label, index)
            return result

        return call


class CrashingLedger(Ledger):
    """A ledger that crashes before or after it writes its next entry."""

    def __init__(self, database: Path | StateDatabase, moment: str) -> None:
        super().__init__(database)
        self.moment = moment

    def append(self, entry: LedgerEntry) -> LedgerEntry:
        if self.moment == "before":
            raise Crash
        super().append(entry)
        raise Crash
