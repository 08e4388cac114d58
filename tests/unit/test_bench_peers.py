"""Other packages' rules: called when installed, checked first, and never the end of the bench."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from loft_hvd._native import extension
from loft_hvd.bench import kernels
from loft_hvd.bench.commands import lines_of
from loft_hvd.bench.kernels import KernelBench, Timing
from loft_hvd.bench.peers import Untimed, Way, find_ways, peer_calls, peer_rows
from loft_hvd.cli import build_app


def _trimmed(rows: Tensor, f: int) -> Tensor:
    return rows.sort(dim=0).values[f : len(rows) - f].mean(dim=0)


def _median(rows: Tensor) -> Tensor:
    return torch.quantile(rows, 0.5, dim=0)


class TrMean:
    def __init__(self, f: int) -> None:
        self.f = f

    def __call__(self, rows: Tensor) -> Tensor:
        return _trimmed(rows, self.f)


def _flower_median(results: list[tuple[list[Any], int]]) -> list[Any]:
    return [np.median([layers[0] for layers, _ in results], axis=0)]


def _flower_trimmed(results: list[tuple[list[Any], int]], proportiontocut: float) -> list[Any]:
    rows = torch.tensor(np.array([layers[0] for layers, _ in results]))
    return [_trimmed(rows, int(proportiontocut * len(rows))).numpy()]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Packages of these names with rules as the real ones have them; a test may change them."""
    modules: dict[str, Any] = {
        "byzfl": SimpleNamespace(Median=lambda: _median, TrMean=TrMean),
        "krum.primitives.aggregators.median": SimpleNamespace(
            Median=SimpleNamespace(aggregate=_median)
        ),
        "krum.primitives.aggregators.trimmed_mean": SimpleNamespace(
            TrimmedMean=SimpleNamespace(aggregate=_trimmed)
        ),
        "flwr.server.strategy.aggregate": SimpleNamespace(
            aggregate_median=_flower_median, aggregate_trimmed_avg=_flower_trimmed
        ),
    }
    versions = {"byzfl": "0.1", "krum": "0.2", "flwr": "0.3"}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    return modules


def _calls(rows: int = 8) -> tuple[set[str], list[Untimed]]:
    untimed: list[Untimed] = []
    pool = torch.randn(rows, 500, generator=torch.Generator().manual_seed(0))
    calls, _ = peer_calls(find_ways(untimed.append), pool, untimed.append)
    return set(calls), untimed


OWN = {"torch.median", "torch.median again", "torch.sort", "numpy.median"}
THEIRS = {
    "byzfl 0.1 Median",
    "byzfl 0.1 TrMean f=2",
    "krum 0.2 Median",
    "krum 0.2 TrimmedMean f=2",
    "flwr 0.3 aggregate_median",
    "flwr 0.3 aggregate_trimmed_avg f=2",
}


@pytest.mark.usefixtures("installed")
def test_installed_peers_are_called_by_name_and_version() -> None:
    assert _calls() == (OWN | THEIRS, [])
    assert [line[0] for line in peer_rows([])] == [
        "peers",
        "byzfl 0.1: timed",
        "krum 0.2: timed",
        "flwr 0.3: timed",
    ]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33, 100])
def test_each_is_given_the_definitions_f(rows: int) -> None:
    names, untimed = _calls(rows)
    assert (len(names), untimed) == (len(OWN | THEIRS), [])


@pytest.mark.usefixtures("installed")
def test_a_share_that_rounds_down_still_trims_f() -> None:
    rows = torch.randn(100, 50, generator=torch.Generator().manual_seed(1))
    way = next(way for way in find_ways(print) if way.name == "flwr 0.3 aggregate_trimmed_avg")
    (found,) = cast("list[Any]", way.prepare(rows, 29)())  # int(0.29 * 100) is 28
    assert found == pytest.approx(way.wanted(rows.double().numpy(), 29), abs=1e-6)


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _calls() == (OWN, [])
    assert ["krum: not installed"] in peer_rows([])


def test_a_peer_that_does_not_import_is_reported(
    installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "byzfl", None)
    names, untimed = _calls()
    assert names == OWN | {name for name in THEIRS if not name.startswith("byzfl")}
    assert [one.contestant for one in untimed] == ["byzfl 0.1 Median", "byzfl 0.1 TrMean"]
    assert "does not import: ModuleNotFoundError" in untimed[0].reason


def _fail(*arguments: object) -> Any:
    raise RuntimeError("input tensor is too large\nand more")


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (_fail, "does not run: RuntimeError: input tensor is too large"),
        (lambda rows: rows.mean(dim=0), "differs from the definition by "),
        (lambda rows: rows[0, :7], "does not run: ValueError: returns the shape (7,)"),
        (lambda rows: _median(rows) * torch.nan, "differs from the definition by inf"),
        (lambda rows: _fail() if rows.shape[1] == 500 else _median(rows), "does not run: Runtime"),
    ],
)
def test_a_peer_that_fails_is_reported_and_the_rest_is_timed(
    installed: dict[str, Any], rule: Any, reason: str
) -> None:
    installed["byzfl"].Median = lambda: rule
    names, (untimed,) = _calls()
    assert names == (OWN | THEIRS) - {"byzfl 0.1 Median"}
    assert untimed.contestant == "byzfl 0.1 Median"
    assert untimed.rows == 8
    assert untimed.reason.startswith(reason)
    assert [f"byzfl 0.1 Median, 8 rows: {untimed.reason}"] in peer_rows([untimed])


def test_a_package_without_the_rule_is_reported(installed: dict[str, Any]) -> None:
    del installed["flwr.server.strategy.aggregate"].aggregate_median
    _, (untimed,) = _calls()
    assert untimed.contestant == "flwr 0.3 aggregate_median"
    assert "aggregate_median" in untimed.reason.removeprefix("does not run: AttributeError: ")


def test_peers_get_no_more_values_than_a_quantile_takes() -> None:
    seen: list[int] = []

    def prepare(rows: Tensor, f: int) -> Callable[[], Tensor]:
        def call() -> Tensor:
            seen.append(rows.numel())
            return rows[0]

        return call

    way = Way("seen", prepare, lambda values, f: values[0])
    pool = torch.zeros(1, 200_000).expand(128, -1)
    untimed: list[Untimed] = []
    _, numel = peer_calls([way], pool, untimed.append)
    assert not untimed
    assert numel == 125_000
    assert max(seen) == 16_000_000


@pytest.mark.skipif(extension() is None, reason="the extension is not built here")
@pytest.mark.parametrize("threads", [1, 3])
def test_torch_has_as_many_threads_as_the_kernels(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look(rows: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return rows[0]

    way = Way("seen", lambda rows, f: lambda: look(rows), lambda values, f: values[0])
    monkeypatch.setattr(kernels, "find_ways", lambda report: [way])
    before = torch.get_num_threads()
    bench = KernelBench(rows=(2,), numel=1024, threads=threads, repeats=1, levels=("baseline",))
    list(kernels.measure_kernels(bench, report=print))
    assert set(seen) == {threads}
    assert torch.get_num_threads() == before


@pytest.mark.skipif(extension() is None, reason="the extension is not built here")
def test_command_lists_peers_in_table_and_json(installed: dict[str, Any], tmp_path: Path) -> None:
    installed["krum.primitives.aggregators.median"].Median.aggregate = _fail
    found = tmp_path / "found.json"
    options = ["--rows", "3", "--numel", "2048", "--repeats", "1", "--json", str(found)]
    result = CliRunner().invoke(build_app(), ["bench", "kernels", *options])
    assert result.exit_code == 0, result.output
    assert "krum 0.2 Median, 3 rows: does not run: RuntimeError" in result.output
    record = json.loads(found.read_text())
    assert record["peers"] == {"byzfl": "0.1", "krum": "0.2", "flwr": "0.3"}
    assert [one["contestant"] for one in record["untimed"]] == ["krum 0.2 Median"]
    timed = {timing["contestant"] for timing in record["timings"]}
    assert "flwr 0.3 aggregate_trimmed_avg f=1" in timed
    assert "krum 0.2 Median" not in timed


def test_the_picture_shows_rules_and_peers_and_nothing_else() -> None:
    names = [
        ("median", "avx2"),
        ("mean", "avx2"),
        ("phocas f=2", "avx2"),
        ("median bfloat16", "avx2"),
        ("trimmed_mean weighted", "avx2"),
        ("trimmed_mean diagnosed 1/16", "avx2"),
        ("called: trimmed_mean, equal weights", "avx2"),
        ("one thread: median", "avx2"),
        ("torch.median", ""),
        ("torch.median again", ""),
        ("memcpy of one row", ""),
        ("byzfl 0.1 Median", ""),
        ("flwr 0.3 aggregate_trimmed_avg f=2", ""),
    ]
    lines = lines_of([Timing(name, level, 8, 1000, 1.0, 2.0, 1) for name, level in names])
    assert set(lines) == {
        ("median", "avx2"),
        ("mean", "avx2"),
        ("phocas", "avx2"),
        ("torch.median", ""),
        ("byzfl 0.1 Median", ""),
        ("flwr 0.3 aggregate_trimmed_avg", ""),
    }
