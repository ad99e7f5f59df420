"""What a sample is, whatever batch it is in: the digest of its inputs.

A recording is bound by these to the samples it was made of: to each, and to their order.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from gate.runtimes.runtime import Batch
from gate.storage.digest import Digest

Rows = NDArray[np.uint8]
"""SHA-256 digests, shape (samples, 32)."""
WIDTH = 32


def row_digests(batch: Batch) -> Rows:
    """One a sample: over names, dtypes, shapes and little-endian values of all its inputs, by name.

    Law: the digests of a batch are those of its parts, one after the other.
    """
    arrays = [(name, batch[name]) for name in sorted(batch)]
    headers = [f"{name}\0{a.dtype.name}\0{list(a.shape[1:])}\0".encode() for name, a in arrays]
    digests = np.empty((len(arrays[0][1]), WIDTH), np.uint8)
    for place in range(len(digests)):
        sha256 = hashlib.sha256()
        for header, (_, array) in zip(headers, arrays, strict=True):
            row = np.ascontiguousarray(array[place], dtype=array.dtype.newbyteorder("<"))
            sha256.update(header)
            sha256.update(row.reshape(-1).view(np.uint8).data)
        digests[place] = np.frombuffer(sha256.digest(), np.uint8)
    return digests


def digest_of(rows: Rows) -> Digest:
    """Of samples in this order."""
    return Digest.of_bytes(np.ascontiguousarray(rows).tobytes())
