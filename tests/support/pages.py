"""The fenced blocks of the docs' pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "Block", "blocks_of", "read_page"]

_HOME = Path(__file__).parents[2]
_FILES = {path.name: path for path in [_HOME / "README.md", *sorted((_HOME / "docs").glob("*.md"))]}
PAGES = tuple(_FILES)
"""Names of the README and of every page in docs/."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    heading: str
    kind: str  # its language
    text: str
    is_shown_once: bool  # the paragraph before it says so: no test runs it

    @property
    def first_line(self) -> str:
        """What it begins with, which names it."""
        return self.text.partition("\n")[0]


def read_page(name: str) -> str:
    """Return the text of a page in ``PAGES``."""
    return _FILES[name].read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page's text, in their order."""
    found = []
    for part in re.split(r"(?m)^(?=## )", page):
        heading = part.splitlines()[0].removeprefix("## ") if part.startswith("## ") else ""
        for match in re.finditer(r"(?ms)^```(\w*)\n(.*?)^```$", part):
            before = part[: match.start()].rstrip().rpartition("\n\n")[2]
            found.append(Block(heading, match[1], match[2], before.startswith("Shown once")))
    return found
