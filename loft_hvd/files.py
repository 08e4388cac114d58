"""Files that are written whole, or not at all: what a full disk has taken a part of is no file."""

from __future__ import annotations

import itertools
import os
import stat
from contextlib import suppress
from pathlib import Path

from loft_hvd.errors import DataError

__all__ = ["write_whole"]


def write_whole(
    path: str | os.PathLike[str], text: str, *, what: str, makes_folder: bool = False
) -> None:
    """Write a file so that whoever reads it finds the old one or the new one, whole.

    What is no regular file, as ``/dev/stdout`` or a link, stays what it is and is written to.
    ``makes_folder`` makes the folder that it is in, if need be.

    Raises:
        DataError: it cannot be written, as on a full disk; begins with ``what`` the file is.
    """
    try:
        if makes_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        _write(Path(path), text)
    except (OSError, ValueError) as error:  # ValueError: half a surrogate pair, a null byte
        raise DataError(f"{what} {os.fspath(path)!r} cannot be written ({error})") from error


def _write(place: Path, text: str) -> None:
    is_there = place.is_symlink() or place.exists()
    if is_there and (place.is_symlink() or not place.is_file()):
        place.write_text(text, encoding="utf-8")
        return
    part = _new_file(place.parent)
    try:
        part.write_text(text, encoding="utf-8")
        if is_there:
            part.chmod(stat.S_IMODE(place.stat().st_mode))
        part.replace(place)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _new_file(folder: Path) -> Path:
    """Make a file under a name that nobody has taken, for whom the umask lets read it."""
    for count in itertools.count():
        part = folder / f".loft-{count}.part"
        with suppress(FileExistsError):
            part.touch(exist_ok=False)
            break
    return part
