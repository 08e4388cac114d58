"""What a machine says of itself: the levels of the CPU kernels, and what others use of it."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import pytest

from loft_hvd import topology
from loft_hvd._native import extension
from loft_hvd.topology import LoadMeter, QueueMeter, cpu_flags, vector_levels

_AVX2 = frozenset({"sse2", "avx2", "popcnt", "bmi2", "f16c", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (frozenset(), ["baseline"]),
        (_AVX2, ["baseline", "avx2"]),
        *((_AVX2 - {name}, ["baseline"]) for name in ("avx2", "popcnt", "bmi2", "f16c", "fma")),
        (_AVX512, ["baseline", "avx2", "avx512"]),
        (_AVX512 - {"avx512vl"}, ["baseline", "avx2"]),
        (_AVX512 - {"fma"}, ["baseline"]),
    ],
)
def test_a_level_needs_all_of_its_instructions(flags: frozenset[str], levels: list[str]) -> None:
    assert vector_levels(flags) == levels


def test_levels_are_those_of_the_extension() -> None:
    module = extension()
    flags = cpu_flags()
    if module is None or not flags:
        pytest.skip("needs the C++ extension, and Linux to name the processor's features")
    built = list(module.built_levels)  # LOFT_HVD_LEVELS; the others are not there to run
    assert [level for level in vector_levels(flags) if level in built] == list(module.isa_levels())


TICKS = "cpu  {busy} 0 100 {idle} 40 0 0 0 0 0\n" + 300 * "cpu7 0 0 0 0 0 0 0 0 0 0\n"


def test_others_use_what_cpus_were_busy_without_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = [3.0, 3.0 + 100 / os.sysconf("SC_CLK_TCK")]  # 100 ticks
    stat = tmp_path / "stat"
    monkeypatch.setattr(topology, "_STAT", stat)
    monkeypatch.setattr("time.process_time", lambda: own.pop(0))
    stat.write_text(TICKS.format(busy=1000, idle=5000))
    meter = LoadMeter()
    stat.write_text(TICKS.format(busy=1300, idle=5500))  # 300 busy of 800, 100 of them its own
    assert meter.cpu_use() == pytest.approx(0.25)


def test_a_cpu_that_does_not_tell_is_used_by_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(topology, "_STAT", tmp_path / "none")
    assert LoadMeter().cpu_use() == 0.0


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\nBuffers: 1 kB\n", 0.6),
        ("MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 400 kB\n", 0.0),  # Linux before 3.14
        ("MemTotal: 0 kB\nMemFree: 0 kB\nMemAvailable: 0 kB\n", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_memory_that_is_not_available_is_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, use: float
) -> None:
    monkeypatch.setattr(topology, "_MEMINFO", tmp_path / "meminfo")
    if text is not None:
        (tmp_path / "meminfo").write_text(text)
    assert LoadMeter.memory_use() == pytest.approx(use)


def test_each_thread_is_told_its_own_queue_and_closes_its_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    told: list[float] = []
    threads = [
        threading.Thread(target=lambda: told.append(topology.run_queue_s())) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(told) == 20
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # this thread's own, perhaps
    assert topology.run_queue_s() == pytest.approx(_main_queue_s(), abs=0.5)


def _main_queue_s() -> float:
    return topology.thread_times()[os.getpid()][1]


def test_threads_are_told_with_what_they_have_had() -> None:
    own = topology.thread_times()[os.getpid()]
    assert own[0] == pytest.approx(time.thread_time(), rel=0.2, abs=0.1)
    assert len(topology.thread_times()) == len(os.listdir("/proc/self/task"))


def test_threads_have_the_names_that_the_system_has_for_them() -> None:
    own = Path("/proc/self/comm").read_text()
    assert own == f"{topology.thread_name(os.getpid())}\n"
    assert topology.thread_name(2**22 + 1) == ""  # beyond all numbers of threads


def test_queues_are_those_since_the_last_reading_of_threads_that_compute_or_carry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = os.getpid()
    names = {1: "gloo_tcp_loop", 2: "pt_gloo_runloop", 3: "OpenMP", 4: "pin", 5: "OpenMP"}
    readings = [
        {main: (5.0, 1.0), 1: (0.1, 1.0), 2: (0.1, 2.0), 3: (3.0, 3.0), 4: (0.1, 4.0)},
        # The main thread has 4 s more, which a fifth of others' is not; thread 5 is new.
        {
            main: (9.0, 9.0),
            1: (0.2, 1.5),
            2: (3.1, 2.75),
            3: (5.0, 4.0),
            4: (0.9, 9.0),
            5: (9.0, 9.0),
        },
        {main: (9.0, 9.0), 3: (5.0, 4.0), 5: (9.5, 11.0)},  # others have ended
    ]
    monkeypatch.setattr(topology, "thread_times", lambda: readings.pop(0))
    monkeypatch.setattr(topology, "thread_name", names.__getitem__)
    meter = QueueMeter()
    assert meter.longest_s() == (1.0, 0.75)
    assert meter.longest_s() == (2.0, 0.0)


def test_a_name_that_is_cut_inside_a_character_is_read() -> None:
    named = threading.Event(), threading.Event()
    numbers = []

    def work() -> None:
        ctypes.CDLL(None).prctl(15, ("x" * 14 + "ü").encode(), 0, 0, 0)  # PR_SET_NAME
        numbers.append(threading.get_native_id())
        named[0].set()
        named[1].wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    named[0].wait(60)
    assert topology.thread_name(numbers[0]).startswith("x" * 14)
    named[1].set()
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_reads_its_own_queue() -> None:
    topology.run_queue_s()
    parent = topology._own_file(os.getpid())
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        topology.run_queue_s()
        os.write(writer, b"1" if topology._own_file(os.getpid()) is not parent else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
