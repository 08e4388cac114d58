"""What docs/troubleshooting.md quotes is what the package says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.pages import read_page

_PACKAGE = Path(__file__).parents[2] / "loft_hvd"
_ROWS = re.findall(r"(?m)^\| (?!you see|---)(.*?) \|", read_page("troubleshooting.md"))
_QUOTED = [quote for row in _ROWS for quote in re.findall(r"`([^`]+)`", row)]


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a literal of the source, with a mark for each value that stands in it."""
    if isinstance(node, ast.Constant):
        return re.sub(r"%[-+ 0-9.]*[a-z]", "\0", str(node.value))
    return "".join(
        str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values
    )


@functools.cache
def _said() -> tuple[str, ...]:
    """Return all texts of the package."""
    texts = []
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                texts.append(_text(node))
    return tuple(texts)


def _has(text: str, parts: list[str]) -> bool:
    """Say whether a text has these parts in their order, with a value between any two."""
    at = 0
    for number, part in enumerate(parts):
        found = text.find(part, at)
        if found < 0 or (number and "\0" not in text[at:found]):
            return False
        at = found + len(part)
    return True


def _is_said(quote: str) -> bool:
    parts = [part.strip() for part in quote.split("...") if part.strip()]
    return any(_has(text, parts) for text in _said())


@pytest.mark.parametrize("quote", _QUOTED)
def test_a_quoted_error_is_one_of_the_package(quote: str) -> None:
    assert _is_said(quote), f"no text of loft_hvd has {quote!r}"


def test_what_nobody_says_is_found() -> None:
    assert len(_QUOTED) > 30
    assert not _is_said("global_batch_size=... is larger than world_size=")
