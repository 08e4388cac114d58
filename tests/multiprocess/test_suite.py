"""Runs the tests in ``ranks/`` under every launcher."""

from __future__ import annotations

import pytest

from tests.support.fingerprint import RULES
from tests.support.launch import launch, launcher_here
from tests.support.marks import long_first

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

RANKS = "tests/multiprocess/ranks"


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "mesh"),
    [
        ("gloo", 1, "auto"),
        pytest.param("gloo", 2, "auto", marks=pytest.mark.long),
        ("gloo", 3, "auto"),
        pytest.param("gloo", 3, "off", marks=[pytest.mark.long, pytest.mark.whole]),
        pytest.param("gloo", 4, "auto", marks=[pytest.mark.long, pytest.mark.whole]),
        ("mpi", 2, "off"),
        pytest.param("mpi", 3, "auto", marks=[pytest.mark.long, pytest.mark.whole]),
    ],
)
def test_ranks_pass_together(launcher: str, num_ranks: int, mesh: str) -> None:
    """With "auto" ranks share memory, with "off" all is Horovod's."""
    done = launch(
        num_ranks,
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", RANKS],
        launcher=launcher,
        timeout_s=390,
        env={"LOFT_HVD_TIMEOUT_S": "30", "LOFT_HVD_MESH": mesh},
    )
    done.succeeded()
    assert done.output.count(" passed") == num_ranks, done.output[-8000:]


@pytest.mark.long
@pytest.mark.parametrize("tests", long_first([f"{RANKS}/test_conformance.py", RANKS]))
def test_ranks_pass_together_over_a_mesh(tests: str) -> None:
    done = launch(
        3,
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", tests],
        timeout_s=390,
        env={"LOFT_HVD_TIMEOUT_S": "30", "LOFT_HVD_MESH": "on"},
    )
    done.succeeded()
    assert done.output.count(" passed") == 3, done.output[-8000:]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", long_first([4, 1]))
def test_mpi_ranks_conform_in_the_other_world_sizes_too(num_ranks: int) -> None:
    suite = f"{RANKS}/test_conformance.py"
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", suite]
    done = launch(num_ranks, arguments, launcher="mpi", timeout_s=300)
    done.succeeded()
    assert done.output.count(" passed") == num_ranks, done.output[-8000:]


MESH = {"mesh": "on", "memory": "auto"}
LARGER = [
    pytest.param(
        transport,
        num_ranks,
        marks=[
            pytest.mark.long,
            # Their collectives are in other tests; these have sums and orders of their own.
            *([pytest.mark.whole] if num_ranks != 8 or transport == "mpi" else []),
        ],
    )
    for transport in ("gloo", "mpi", "mesh", "memory")
    for num_ranks in (5, 6, 7, 8)
]


@pytest.mark.parametrize(("transport", "num_ranks"), LARGER)
def test_larger_worlds_give_the_bits_of_local_ranks(transport: str, num_ranks: int) -> None:
    suite = f"{RANKS}/test_conformance.py"
    arguments = ["-q", "-p", "no:cacheprovider", "--timeout=120", suite, "-k", "bits_of_local"]
    done = launch(
        num_ranks,
        ["-m", "pytest", *arguments],
        launcher="mpi" if transport == "mpi" else "gloo",
        timeout_s=380,
        env={"LOFT_HVD_TIMEOUT_S": "60", "LOFT_HVD_MESH": MESH.get(transport, "off")},
    )
    done.succeeded()
    assert done.output.count(f"{len(RULES)} passed") == num_ranks, done.output[-8000:]


@pytest.mark.skipif(not launcher_here("mpi"), reason="mpirun is not on PATH")
def test_horovod_is_built_with_mpi_where_mpirun_exists() -> None:
    import horovod.torch as hvd

    assert hvd.mpi_built(), "mpirun is on PATH, but Horovod was built without MPI: run `make setup`"
