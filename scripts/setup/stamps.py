"""Stamps: what was done, keyed by the content that it was made from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["digest", "read_stamp", "write_stamp"]


def digest(parts: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Return 16 hex digits that change when a part, a file's name or a file's content changes."""
    total = hashlib.sha256()
    for part in parts:
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
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)
