"""The levels of the CPU kernels that a machine runs."""

from __future__ import annotations

import pytest

from loft_hvd._native import extension
from loft_hvd.topology import cpu_flags, vector_levels

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
