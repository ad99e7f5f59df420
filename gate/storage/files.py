"""Files that somebody else names: read only where they are plain files inside of a known folder.

A record from outside could name `/dev/zero`, a pipe, or any other file of this machine.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path, PurePosixPath

NAME_LIMIT = 255
"""Bytes of a relative name, as most file systems bound a file's own."""


def wrong_name(name: str) -> str | None:
    """Why `name` can't name a file below a folder, on any system, or None."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name:
        return "is no path inside of a folder"
    if "\0" in name:
        return "holds a zero byte"
    if len(name.encode(errors="replace")) > NAME_LIMIT:
        return f"has more than {NAME_LIMIT} bytes"
    return None


def is_inside(folder: Path, name: str) -> bool:
    """Whether `name` below `folder` is there, links followed, without leaving the folder.

    Raises OSError or RuntimeError where links can't be followed.
    """
    root = folder.resolve()
    return (root / name).resolve().is_relative_to(root)


def open_inside(folder: Path, name: str) -> io.FileIO:
    """Open the plain file `name` below `folder`, no link followed from there on.

    Raises OSError, also where a link or anything but folders and a plain file is on the way.
    """
    wrong = wrong_name(name)
    if wrong is not None:
        raise OSError(errno.EINVAL, wrong, name)
    *folders, last = PurePosixPath(name).parts
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = inner
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(last, flags, dir_fd=place)
    finally:
        os.close(place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ELOOP, "is no plain file", name)
    return io.FileIO(descriptor)


def open_plain(path: Path) -> io.BufferedReader:
    """Open a plain file for reading, links followed. Raises OSError, for any other kind too.

    Nothing waits for the other end of a pipe meanwhile.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except ValueError as error:  # a zero byte in the name
        raise OSError(f"{str(path)!r} is no file's name") from error
    stream = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        stream.close()
        raise OSError(f"{path} is no plain file")
    return stream
