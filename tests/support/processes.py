"""What the machine tells of a process: its arguments, its memory, and what can be read there."""

from __future__ import annotations

import base64
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["arguments_of", "num_open", "num_threads", "own_bytes", "own_sockets"]
__all__ += ["where_shown"]


def arguments_of(pid: int) -> list[str]:
    """Return what a process was started with; one that was started anew has other arguments."""
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]


def own_bytes(pid: int) -> int:
    """Return a process's memory that is not a file's."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def num_threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def num_open(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def own_sockets() -> set[str]:
    """Return the sockets of this process, each by its own number."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {each for each in found if each.startswith("socket:")}


def where_shown(secret: bytes, pid: int) -> list[str]:
    """Return where programs of other users, or of the same one, can read a secret of a process."""
    # As it is, and as it may be written; a 0 would end an argument.
    assert b"\0" not in secret
    forms = {secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()}
    forms |= {base64.urlsafe_b64encode(secret), secret.hex().upper().encode()}
    places = ("cmdline", "environ", "comm")
    content = {place: Path(f"/proc/{pid}/{place}").read_bytes() for place in places}
    return [place for place in places if any(form in content[place] for form in forms)]
