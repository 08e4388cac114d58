"""Scenario files: TOML in, a checked scenario out; a wrong key is an error."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from loft_hvd.errors import ArgumentError, MissingDependencyError
from loft_hvd.simulate.scenario import Event, Ranks, Scenario

__all__ = ["read_scenario", "scenario_from_dict"]


def read_scenario(path: str | os.PathLike[str]) -> Scenario:
    """Read a scenario file.

    Raises:
        ArgumentError: the file is not TOML, or a key or value is not one of the schema.
        MissingDependencyError: Python 3.10 without the tomli package.
    """
    toml = _toml_reader()
    with open(path, "rb") as file:
        try:
            content = toml.load(file)
        except ValueError as error:  # TOMLDecodeError is one
            raise ArgumentError(f"scenario {os.fspath(path)}: not TOML: {error}") from error
    return scenario_from_dict(content, where=os.fspath(path))


def _toml_reader() -> Any:
    for name in ("tomllib", "tomli"):  # in Python from 3.11 on; a package before
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingDependencyError(
        "reading a scenario needs Python 3.11, or the tomli package: pip install tomli"
    )


def scenario_from_dict(content: Mapping[str, Any], *, where: str = "scenario") -> Scenario:
    """Build a scenario from the tables of a scenario file; a wrong key is an error."""
    values = dict(content)
    sources = _tables(values, "sources", where)
    for source in sources:
        _check_keys(source, {"name", "bytes_per_s"}, f"{where}: [[sources]]", least=2)
    ranks = values.pop("ranks", {})
    if not isinstance(ranks, Mapping):
        raise ArgumentError(f"{where}: ranks={ranks!r} must be a table, [ranks]")
    _check_keys(ranks, {item.name for item in fields(Ranks)}, f"{where}: [ranks]")
    events = _tables(values, "events", where)
    for event in events:
        _check_keys(event, {item.name for item in fields(Event)}, f"{where}: [[events]]")
        if not {"kind", "ranks"} <= set(event):
            raise ArgumentError(f"{where}: [[events]] {event} needs kind and ranks")
        if not isinstance(event["ranks"], list):
            raise ArgumentError(
                f"{where}: [[events]] ranks={event['ranks']!r} must be a list, such as [0, 3]"
            )
        event["ranks"] = tuple(event["ranks"])
    known = {item.name for item in fields(Scenario)} - {"ranks", "sources", "events"}
    _check_keys(values, known, where)
    needed = [
        item.name for item in fields(Scenario) if item.default is item.default_factory is MISSING
    ]
    needed = [name for name in needed if name not in values and name in known]
    if needed:
        raise ArgumentError(f"{where}: {needed} must be given")
    if "policies" in values:
        values["policies"] = _policies(values["policies"], where)
    return Scenario(
        **values,
        ranks=Ranks(**ranks),
        sources={source["name"]: source["bytes_per_s"] for source in sources},
        events=tuple(Event(**event) for event in events),
    )


def _tables(values: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    tables = values.pop(key, [])
    if not isinstance(tables, list) or not all(isinstance(entry, Mapping) for entry in tables):
        raise ArgumentError(f"{where}: {key}={tables!r} must be tables, [[{key}]]")
    return [dict(entry) for entry in tables]


def _policies(given: object, where: str) -> tuple[str | tuple[int, ...], ...]:
    found: list[str | tuple[int, ...]] = []
    for item in given if isinstance(given, list) else [None]:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and all(type(size) is int for size in item):
            found.append(tuple(item))
        else:
            raise ArgumentError(
                f"{where}: policies={given!r} must be a list of names and of lists with every "
                'rank\'s samples, such as ["loft", [32, 16]]'
            )
    return tuple(found)


def _check_keys(table: Mapping[str, Any], known: set[str], where: str, *, least: int = 0) -> None:
    unknown = sorted(set(table) - known)
    if unknown or len(table) < least:
        raise ArgumentError(f"{where}: {unknown or 'a key is missing'}; keys are {sorted(known)}")
