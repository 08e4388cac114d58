"""Rules from text: ``parse_rule`` reads what ``str`` of a rule writes."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any

from loft_hvd.aggregation.row_rules import ROW_RULES
from loft_hvd.aggregation.rules import RULES, Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError

__all__ = ["parse_rule"]

# Options that have no default.
_MEANINGS = {
    "f": "the Byzantine rows to expect",
    "norm": "the greatest length of a row",
    "size": "the rows of a bucket",
}


def parse_rule(text: str) -> Rule:
    """Read a rule from text such as ``"median:kind=lower"`` or ``"arc+nnm+trimmed_mean:f=2"``.

    Args:
        text: a name, then optionally a colon and ``key=value`` pairs separated by commas. Rules
            that stand around another one go before it, with a plus sign, the outermost first.

    Returns:
        The rule; ``parse_rule(str(rule)) == rule`` for every rule but ``Custom``.

    Raises:
        ArgumentError: a name or an option is unknown, missing or has a wrong value.
        ArgumentTypeError: no text.
    """
    if not isinstance(text, str):
        raise ArgumentTypeError(f"parse_rule takes text such as 'trimmed_mean:f=1', not {text!r}")
    # A plus sign goes before a name: that of norm=1e+30 goes before a digit.
    pieces = re.split(r"\+(?=\s*[A-Za-z_]|\s*$)", text)
    rule: Rule | None = None
    for piece in reversed(pieces):  # the innermost first
        rule = _parse_one(piece.strip(), text, inner=rule)
    assert rule is not None  # a split gives one piece at least
    return rule


def _parse_one(piece: str, text: str, *, inner: Rule | None) -> Rule:
    """Read one rule of ``text``, which stands around ``inner``."""
    name, _, tail = (part.strip() for part in piece.partition(":"))
    kinds: dict[str, type[Rule]] = {**RULES, **ROW_RULES}
    kind = kinds.get(name)
    if kind is None:
        raise ArgumentError(f"rule {text!r} is unknown; the names are {', '.join(sorted(kinds))}")
    # A rule's options are the fields that its constructor takes.
    known = _options_of(kind)
    options: dict[str, Any] = {}
    if "rule" in known:
        known.remove("rule")
        if inner is None:
            raise ArgumentError(
                f"rule {text!r}: {name} stands around another rule; put one behind it, such as "
                f"'{piece}+trimmed_mean:f=1'"
            )
        options["rule"] = inner
    elif inner is not None:
        raise ArgumentError(
            f"rule {text!r}: {name} stands around no other rule; before a plus sign go "
            f"{', '.join(sorted(name for name in ROW_RULES if 'rule' in _options_of(kinds[name])))}"
        )
    given = _read_options(tail, text, name, known)
    for key in _MEANINGS:
        if key in known and key not in given:
            behind = "" if inner is None else f"+{inner}"
            raise ArgumentError(
                f"rule {text!r} needs {key}, {_MEANINGS[key]}: '{name}:{key}=1{behind}'"
            )
    return kind(**options, **given)


def _options_of(kind: type[Rule]) -> list[str]:
    assert is_dataclass(kind)  # all that have a name in text are
    return [item.name for item in fields(kind) if item.init]


def _read_options(tail: str, text: str, name: str, known: list[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs, each of a key that is known and given once."""
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in tail.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in known or key in options:
            takes = ", ".join(known) or "no options"
            raise ArgumentError(f"rule {text!r}: cannot use {part!r}; {name} takes {takes}, once")
        options[key] = _parse_option(text, key, value)
    return options


def _parse_option(rule: str, key: str, text: str) -> bool | float | str:
    """Read one option's value by its name."""
    if key in ("f", "size", "norm"):
        try:
            return float(text) if key == "norm" else int(text)
        except ValueError:
            kind = "a number" if key == "norm" else "a whole number"
            raise ArgumentError(f"rule {rule!r}: {key}={text!r} must be {kind}") from None
    if key in ("reproducible", "lengthens"):
        if text.lower() not in ("true", "false"):
            raise ArgumentError(f"rule {rule!r}: {key}={text!r} must be true or false")
        return text.lower() == "true"
    return text
