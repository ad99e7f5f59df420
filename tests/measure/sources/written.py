"""Write the samples X and Y to files of all supported formats."""

import io
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.measure.sources.factories import X, Y


def fixed(array):
    """Return an array as nested fixed-size lists."""
    column = pa.array(array.reshape(-1))
    for size in array.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def ragged(array):
    """Return an array as nested lists of variable size."""
    return pa.array(array.tolist(), pa.list_(pa.list_(pa.float32())))


def tensor(array):
    """Return an array as an Arrow tensor column."""
    return pa.FixedShapeTensorArray.from_numpy_ndarray(array)


def table(make=fixed, rows=slice(None)):
    """Return a table of X and Y."""
    return pa.table({"input": make(X[rows]), "label": Y[rows]})


def parquet(path, table, **settings):
    pq.write_table(table, path, **settings)
    return path


def arrow(path, table, *, streamed=False):
    open_writer = pa.ipc.new_stream if streamed else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, open_writer(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return path


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar(path, members, *, mode="w"):
    with tarfile.open(path, mode) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def members(rows=range(11)):
    """Yield X and Y as members of a WebDataset tar, with the JSON files that its writers add."""
    for row in rows:
        yield member(f"./part/{row:04}.npy", npy(X[row]))
        yield member(f"./part/{row:04}.json", b'{"who": "somebody"}')
        yield member(f"./part/{row:04}.cls", f"{Y[row]}\n".encode())
