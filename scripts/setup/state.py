"""What one set-up leaves for the next: stamps of what was done, and a lock while it is done."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from scripts.setup.runner import SetupError, say

__all__ = ["digest", "exclusive", "read_stamp", "write_stamp"]

_POLL_S = 0.2  # a set-up takes seconds at least, so nobody notices this much


def digest(parts: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Return 16 hex digits that change when a part, a file's name or a file's content changes."""
    total = hashlib.sha256()
    for part in parts:
        # With its length, or ["ab", "c"] and ["a", "bc"] would be the same.
        total.update(f"{len(part)}:{part}".encode())
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.name}:{content}".encode())
    return total.hexdigest()[:16]


def read_stamp(path: Path) -> str:
    """Return the stamp's text, or "" when there is none."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def write_stamp(path: Path, text: str) -> None:
    """Write a stamp in one piece: after an interruption it is the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place: a reader sees the whole old text or the whole new one.
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


@contextlib.contextmanager
def exclusive(
    path: Path,
    *,
    timeout_s: float,
    alive_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[int]:
    """Hold the lock file ``path`` while the block runs; a killed holder leaves no lock behind.

    Yields:
        The descriptor that holds the lock. A command that inherits it keeps the lock until it ends
        too, so what a killed set-up had started is never met half-way.

    Raises:
        SetupError: another process still holds it after ``timeout_s`` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        start_s = clock()
        said_s = start_s - alive_s
        while not _try_lock(file.fileno()):
            now_s = clock()
            holder = path.read_text(encoding="utf-8").strip() or "unknown"
            if now_s - start_s >= timeout_s:
                raise SetupError(
                    f"another set-up (process {holder}) has held {path} for {timeout_s:.0f} s; "
                    "wait for it or end it, then run the same command again"
                )
            if now_s - said_s >= alive_s:
                said_s = now_s
                say(
                    f"setup: waiting for another set-up (process {holder}), {now_s - start_s:.0f} s"
                )
            pause(_POLL_S)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()  # closing it frees the lock; the file stays, so all lock the same one


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
            return False
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            return True  # a file system without locks: results are still renamed into place whole
        raise
    return True
