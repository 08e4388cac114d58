"""Files are written whole or not at all, whoever writes them, and a full disk is our error."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loft_hvd.balance.controller import Decision, write_decisions
from loft_hvd.bench.record import write_record
from loft_hvd.data.shards import TarShards
from loft_hvd.errors import DataError
from loft_hvd.files import write_whole
from loft_hvd.pipeline.trace import Trace
from tests.unit.test_shards import tars


def test_a_file_is_written_beside_files_of_others(tmp_path: Path) -> None:
    out, others = tmp_path / "a", [tmp_path / "a.part", tmp_path / ".loft-0.part"]
    for each in (out, *others):
        each.write_text("theirs")
    out.chmod(0o640)
    write_whole(out, "ours", what="a file")
    assert out.read_text() == "ours"
    assert out.stat().st_mode & 0o777 == 0o640
    assert [each.read_text() for each in others] == ["theirs", "theirs"]
    assert len([*tmp_path.iterdir()]) == 3


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, "ours", what="a file")
    assert link.is_symlink()
    assert target.read_text() == "ours"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "ours", what="a file")
    assert os.read(reader, 100) == b"ours"
    os.close(reader)


@contextmanager
def full_disk(num_free: int = 30) -> Iterator[None]:
    """Let no file of this process have more than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_trace(path: Path) -> None:
    trace = Trace(path, 0)
    trace.add("bucket 0", "pack", 0.0, 1.0)
    trace.write()


_WRITERS: dict[str, Callable[[Path], None]] = {
    "text": lambda path: write_whole(path, "x" * 100, what="a file"),
    "trace": write_trace,
    "plans": lambda path: write_decisions(path, [Decision(0, 0, (32, 32), "the first")]),
    "record": lambda path: write_record(path, {"times": [1.0] * 9}, command=["loft-hvd", "bench"]),
}


@pytest.mark.parametrize("writer", _WRITERS.values(), ids=_WRITERS)
def test_a_full_disk_is_our_error_and_what_was_there_stays(
    tmp_path: Path, writer: Callable[[Path], None]
) -> None:
    path = tmp_path / "new" / "file.json"
    path.parent.mkdir()
    with full_disk(), pytest.raises(DataError, match=r"file.json' cannot be written \(.*File too"):
        writer(path)
    assert list(path.parent.iterdir()) == []
    writer(path)
    before = path.read_bytes()
    assert len(before) > 30
    with full_disk(), pytest.raises(DataError, match=r"file.json' cannot be written"):
        writer(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("writer", _WRITERS.values(), ids=_WRITERS)
def test_a_device_that_is_full_is_our_error(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"full' cannot be written .*No space left on device"):
        writer(tmp_path / "full")


def test_a_training_that_is_done_does_not_fail_for_its_trace(tmp_path: Path) -> None:
    script = (
        "from loft_hvd.pipeline.trace import trace_of, trace_to\n"
        f"trace_to({str(tmp_path / 'no' / 'trace.json')!r})\n"
        "trace_of(0).add('bucket 0', 'pack', 0.0, 1.0)\n"
    )
    (tmp_path / "no").symlink_to("/dev/full")  # no folder can be made there
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "trace.0.json' cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_index_that_a_full_disk_has_taken_in_part_is_not_left_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths, folder = tars(tmp_path, 20), tmp_path / "indexes"
    with full_disk(100):
        assert len(TarShards(paths, folder=folder)) == 20
    assert "is not kept" in caplog.text
    assert list(folder.iterdir()) == []
