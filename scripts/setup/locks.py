"""One set-up at a time: file locks that the kernel frees when their holder dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.setup.console import SetupError, say

__all__ = ["exclusive"]

_POLL_S = 0.2


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
