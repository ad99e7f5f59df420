"""From the text that names samples to what holds them, in this process or in any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gate.errors import DataError
from gate.parity.arrays.mapped import MappedRows
from gate.parity.arrays.rows import SourceRows
from gate.parity.arrays.shards import SUFFIXES, check_kinds, open_shards, shard_files
from gate.parity.sources.files import LocalFile, RemoteFile, SourceFile, remote_files
from gate.parity.sources.named import Fields, Named
from gate.parity.sources.pictures import Pictures
from gate.preprocess.spec import PreprocessSpec
from gate.storage.redaction import redacted

TARS = (".tar",)
COLUMNS = (".parquet", ".arrow", ".feather")
KINDS = (*SUFFIXES, *COLUMNS, *TARS)


@dataclass(frozen=True)
class Opening:
    """All that another process needs in order to open the same samples."""

    inputs: str
    """As `gate check --inputs` takes it."""
    preprocessing: PreprocessSpec | None = None
    """How pictures become inputs."""

    def rows(self) -> SourceRows:
        """Open it. Raises DataError, StorageError."""
        named, pictures = Named.parse(self.inputs), Pictures(self.preprocessing)
        if named.is_factory:
            from gate.parity.sources.dataset import rows_of_factory

            return rows_of_factory(named.place, named.fields, pictures)
        files = remote_files(named.place, kinds=KINDS) if named.is_url else _local(named.place)
        origin = redacted(named.place) if named.is_url else named.place
        kind = files[0].suffix if files else ".npy"
        if kind in TARS:
            from gate.parity.sources.tar import TarRows

            return TarRows(files, named.fields, pictures, origin=origin)
        if kind in COLUMNS:
            from gate.parity.sources.columns import ColumnRows

            return ColumnRows(files, named.fields, pictures, origin=origin)
        if named.fields != Fields():
            raise DataError(
                f"{origin} has no fields to choose: a .npy is one input, and each array of a .npz. "
                "Leave away what stands behind #."
            )
        if not named.is_url:
            return MappedRows(open_shards(Path(named.place)), origin=origin)
        check_kinds([file.name for file in files], origin=origin, kinds=KINDS)
        from gate.parity.sources.copies import CopiedShard, Copies

        copies = Copies()
        found = [CopiedShard(file, copies) for file in files if isinstance(file, RemoteFile)]
        return MappedRows(found, origin=origin)


def _local(place: str) -> list[SourceFile]:
    """The files of columns and tars; none of what is mapped or strange."""
    path = Path(place)
    try:
        is_folder = path.is_dir()
    except OSError as error:  # such as a name that is too long
        raise DataError(f"cannot read {place[:200]}: {error.strerror}. Check the path.") from error
    if is_folder:
        return [LocalFile(file) for file in shard_files(path, kinds=KINDS)]
    return [LocalFile(path)] if path.suffix.lower() in (*TARS, *COLUMNS) else []
