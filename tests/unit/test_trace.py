"""The Chrome trace of a step: it loads, and its spans lie where the stages were."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.pipeline import engine as engine_module
from loft_hvd.pipeline.reduction import BucketReduction
from loft_hvd.pipeline.ring import ExchangeSpec
from loft_hvd.pipeline.trace import Trace, TraceRow, trace_of, trace_to
from loft_hvd.transport.base import Lane
from loft_hvd.transport.local import LocalTransport, run_ranks


def ticking() -> Callable[[], float]:
    """Return a clock that goes on by a second at each look."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    return look


def load(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return a file's spans, and the names of its rows."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    return [each for each in events if each["ph"] == "X"], names


def test_spans_of_a_row_follow_each_other(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "new" / "t.json", 3, clock=ticking())
    row = TraceRow(trace, "bucket 0")
    for span in ("pack", "all-to-all"):
        row.enter(span)
    row.leave()
    row.leave()  # nothing is open any more
    trace.write()
    spans, names = load(trace.path)
    assert names == {0: "bucket 0"}
    assert [(each["name"], each["ts"], each["dur"], each["pid"]) for each in spans] == [
        ("pack", 1e6, 1e6, 3),
        ("all-to-all", 2e6, 1e6, 3),
    ]


def test_a_fork_of_the_process_leaves_the_file_alone(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from loft_hvd.pipeline.trace import Trace\n"
        "trace = Trace(Path(sys.argv[1]), 0)\n"
        "if os.fork() == 0:\n"
        "    trace.write()\n"
        "    os._exit(0)\n"
        "print(os.wait()[1], Path(sys.argv[1]).exists())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "t.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0 False\n", "")


def test_a_full_trace_keeps_its_beginning_and_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = Trace(tmp_path / "t.json", 0, most_spans=2)
    for number in range(5):
        trace.add("row", f"span {number}", float(number), number + 1.0)
    with caplog.at_level(logging.WARNING):
        trace.write()
    assert [each["name"] for each in load(trace.path)[0]] == ["span 0", "span 1"]
    assert "holds the first 2 spans; 3 later ones are left out" in caplog.text


def test_stages_lie_in_order_inside_their_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [Trace(tmp_path / f"t.{rank}.json", rank) for rank in range(3)]
    monkeypatch.setattr(engine_module, "trace_of", lambda rank: traces[rank])

    def work(transport: LocalTransport) -> None:
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in (300, 200)]
        optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0),
            [("a", params[0]), ("b", params[1])],
            rule=loft.Median(),
            bucket_bytes=1200,
            transport=transport,
        )
        for _ in range(3):
            torch.autograd.backward([p.sum() for p in params])
            optimizer.step()

    run_ranks(3, work)
    for rank, trace in enumerate(traces):
        trace.write()
        spans, names = load(trace.path)
        assert set(names.values()) == {"step", "bucket 0 (b)", "bucket 1 (a)"}
        assert {each["pid"] for each in spans} == {rank}
        for row, name in names.items():
            if name == "step":
                continue
            buckets = [each for each in spans if each["tid"] == row and each["name"] == name]
            assert len(buckets) == 3
            for bucket in buckets:
                begin, end = bucket["ts"], bucket["ts"] + bucket["dur"]
                inside = [
                    each
                    for each in spans
                    if each["tid"] == row and each is not bucket and begin <= each["ts"] <= end
                ]
                stages = ["pack", "all-to-all", "aggregate", "all-gather", "unpack"]
                assert [each["name"] for each in inside] == stages
                for before, after in itertools.pairwise(inside):
                    assert before["ts"] + before["dur"] <= after["ts"] + 0.2  # a rounded tenth
                assert inside[-1]["ts"] + inside[-1]["dur"] <= end + 0.2


def test_the_parts_of_a_large_bucket_have_rows_of_their_own(tmp_path: Path) -> None:
    traces = [Trace(tmp_path / f"t.{rank}.json", rank) for rank in range(2)]

    def work(transport: LocalTransport) -> None:
        spec = ExchangeSpec(
            Lane(transport),
            name="n",
            numel=3200,
            dtype=torch.float32,
            device="cpu",
            rule=loft.Median(),
            row=TraceRow(traces[transport.rank], "bucket 0"),
        )
        reduction = BucketReduction(spec, pack=lambda values: None, part_bytes=6400)
        reduction.start()
        while not reduction.advance():
            pass

    run_ranks(2, work)
    traces[0].write()
    assert set(load(traces[0].path)[1].values()) == {"bucket 0", "bucket 0.p0", "bucket 0.p1"}


def test_a_process_can_be_told_to_trace(tmp_path: Path) -> None:
    assert trace_of(0) is None
    try:
        trace_to(tmp_path / "t.json")
        trace = trace_of(2)
        assert trace is not None
        assert trace is trace_of(2)
        assert trace.path == tmp_path / "t.2.json"
        trace.add("row", "pack", 1.0, 3.0)
        trace.add("row", "pack", 5.0, 5.5)
        assert trace.seconds() == {"pack": 2.5}
    finally:
        trace_to(None)
    assert trace_of(2) is None
