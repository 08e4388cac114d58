"""What a machine says of itself: the levels of the CPU kernels, and what others use of it."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest

from loft_hvd._native import extension
from loft_hvd.topology import LoadMeter, cpu_flags, vector_levels

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


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems do not tell")
def test_the_memory_that_is_not_available_is_in_use() -> None:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name: int(size) for name, size, *_ in lines}
    used = 1.0 - sizes["MemAvailable:"] / sizes["MemTotal:"]
    assert LoadMeter.memory_use() == pytest.approx(used, abs=0.05)


@pytest.mark.skipif(platform.system() != "Linux", reason="other systems do not tell")
def test_what_this_process_computes_is_no_use_by_others() -> None:
    meter = LoadMeter()
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        sum(range(10_000))
    busy, total, own = (
        after - before for before, after in zip(meter._last, meter._read(), strict=True)
    )
    assert own > 0.1
    assert meter.cpu_use() == pytest.approx(max(0.0, busy - own) / total, abs=0.1)
