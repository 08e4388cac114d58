"""Ranks' traces and Horovod's timeline on one clock, whatever state the files are in."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loft_hvd import cli
from loft_hvd.errors import DataError
from loft_hvd.pipeline.trace import Trace
from loft_hvd.report.timeline import merge_traces

# The head of a timeline that Horovod 0.28.1 has written, and an all-reduce of one tensor.
BEGAN = 1795394343503191
HEAD = """[
{"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros":BEGAN}},
{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.metric"}},
{"ph": "B", "name": "ALLREDUCE", "ts": 2000000, "pid": 1},""".replace("BEGAN", str(BEGAN))
TAIL = """{"ph": "E", "ts": 2500000, "pid": 1, "args": {"dtype": "float32", "shape": "[3]"}}]"""
TIMELINE = HEAD + TAIL


def trace(path: Path, rank: int, *, began_s: float, ended_s: float) -> str:
    """Write a trace of one span, by a clock that began at 0 in 1970, and return its file."""
    made = Trace(path / f"trace.{rank}.json", rank, clock=time.time)
    made.add("bucket 0", "pack", began_s, ended_s)
    made.write()
    return str(made.path)


def spans(text: str, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


def test_what_happened_at_once_is_drawn_at_once(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    timeline.write_text(TIMELINE)
    began_s = BEGAN / 1e6 + 2.0  # when Horovod's all-reduce begins
    files = [trace(tmp_path, rank, began_s=began_s, ended_s=began_s + 0.1) for rank in (0, 1)]
    merged = merge_traces([str(timeline), *files])
    (begin,), ours = spans(merged, "B"), spans(merged)
    assert [each["pid"] for each in ours] == [0, 1]
    for each in ours:  # to the microseconds that two looks at the clock are apart
        assert each["ts"] == pytest.approx(begin["ts"], abs=5e4)
    assert begin["pid"] not in (0, 1)
    assert min(each["ts"] for each in [begin, *ours]) == 0


def test_horovods_tensors_are_lanes_of_one_process(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    timeline.write_text(TIMELINE)
    events = json.loads(merge_traces([str(timeline)]))["traceEvents"]
    names = {each["args"]["name"] for each in events if each.get("name") == "thread_name"}
    assert names == {"allreduce.metric"}
    assert {each["tid"] for each in events if each["ph"] in "BE"} == {1}
    assert len({each["pid"] for each in events}) == 1


@pytest.mark.parametrize("lost", range(1, len(TAIL) + 2))
def test_a_timeline_that_is_cut_off_gives_what_it_has(lost: int, tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    timeline.write_text(TIMELINE[:-lost])
    assert len(spans(merge_traces([str(timeline)]), "B")) == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1, 2]", '{"traceEvents": 3}', "[" * 100_000])
def test_what_is_no_trace_is_our_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"x\.json"):
        merge_traces([str(path)])


def test_the_command_writes_one_file(tmp_path: Path) -> None:
    files = [trace(tmp_path, rank, began_s=5.0, ended_s=6.0) for rank in (0, 1)]
    out = tmp_path / "all.json"
    result = CliRunner().invoke(cli.build_app(), ["trace", *files, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert [each["dur"] for each in spans(out.read_text())] == [1e6, 1e6]


def event(text: str) -> str:
    """Return Horovod's timeline with one more event at its end."""
    return f"{TIMELINE[:-1]}, {text}]"


@pytest.mark.parametrize(
    "text",
    [
        '{"ph": "M", "name": "process_name", "args": null}',
        '{"ph": "M", "name": "process_name", "args": 3}',
        '{"ph": "B", "ts": NaN, "pid": 1}',
        '{"ph": "B", "ts": 1e999, "pid": 1}',
        '{"ph": "B", "ts": 1' + 400 * "0" + "}",
        '{"args": {"start_time_since_epoch_in_micros": 1' + 400 * "0" + "}}",
    ],
)
def test_an_event_without_a_time_is_passed_over(text: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(TIMELINE)
    plain = merge_traces([str(path)])
    path.write_text(event(text))
    assert merge_traces([str(path)]) == plain


@pytest.mark.parametrize("number", ["NaN", "1e999", "1" + 400 * "0", "1.7e308"])
@pytest.mark.parametrize("place", ["ts", "began"])
def test_a_rank_s_trace_with_such_a_time_is_our_error(
    place: str, number: str, tmp_path: Path
) -> None:
    path = Path(trace(tmp_path, 0, began_s=5.0, ended_s=6.0))
    whole = json.loads(path.read_text())
    for each in whole["traceEvents"]:
        if "ts" in each:
            each["ts"] = "here" if place == "ts" else 1.7e308
    (name,) = whole["otherData"]
    whole["otherData"][name] = "here" if place == "began" else 1.7e308
    path.write_text(json.dumps(whole).replace('"here"', number))
    with pytest.raises(DataError, match=r"trace\.0\.json"):
        merge_traces([str(path)])


def test_a_value_that_is_not_finite_is_our_error(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(event('{"ph": "E", "ts": 1, "pid": 1, "args": {"x": 1e999}}'))
    with pytest.raises(DataError, match=r"timeline\.json"):
        merge_traces([str(path)])


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with path.open("wb") as file:
        file.truncate(2**27 + 1)  # sparse
    with pytest.raises(DataError, match="more than"):
        merge_traces([str(path)])


def test_the_command_writes_over_none_of_its_inputs(tmp_path: Path) -> None:
    file = trace(tmp_path, 0, began_s=5.0, ended_s=6.0)
    before, link = Path(file).read_text(), tmp_path / "link.json"
    link.symlink_to(file)
    result = CliRunner().invoke(cli.build_app(), ["trace", file, "--out", str(link)])
    assert isinstance(result.exception, DataError)
    assert Path(file).read_text() == before
