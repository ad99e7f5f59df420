"""The same samples in all kinds of files."""

import io
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.measure.sources.factories import X, Y


def fixed(array):
    """Nested fixed-size lists."""
    column = pa.array(array.reshape(-1))
    for size in array.shape[:0:-1]:
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def ragged(array):
    """Nested lists without a size of their own."""
    return pa.array(array.tolist(), pa.list_(pa.list_(pa.float32())))


def tensor(array):
    """Arrow's own tensors."""
    return pa.FixedShapeTensorArray.from_numpy_ndarray(array)


def table(make=fixed, rows=slice(None)):
    """Of X and Y."""
    return pa.table({"input": make(X[rows]), "label": Y[rows]})


def parquet(path, made, **settings):
    pq.write_table(made, path, **settings)
    return path


def arrow(path, made, *, streamed=False):
    new = pa.ipc.new_stream if streamed else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, made.schema) as writer:
        writer.write_table(made, max_chunksize=4)
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
    """Of X and Y, with what WebDataset's writers put beside them."""
    for row in rows:
        yield member(f"./part/{row:04}.npy", npy(X[row]))
        yield member(f"./part/{row:04}.json", b'{"who": "somebody"}')
        yield member(f"./part/{row:04}.cls", f"{Y[row]}\n".encode())
