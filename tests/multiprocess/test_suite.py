"""Runs the tests in ``ranks/`` under every launcher."""

from __future__ import annotations

import pytest

from tests.support.fingerprint import RULES
from tests.support.launch import launch, launcher_here

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(400)]

RANKS = "tests/multiprocess/ranks"
CONFORM = f"{RANKS}/test_conformance.py"
long, whole = pytest.mark.long, pytest.mark.whole


@pytest.mark.parametrize(
    ("launcher", "num_ranks", "mesh", "tests"),
    [
        ("gloo", 1, "auto", CONFORM),
        pytest.param("gloo", 1, "auto", RANKS, marks=long),
        pytest.param("gloo", 2, "auto", CONFORM, marks=long),
        pytest.param("gloo", 2, "auto", RANKS, marks=whole),  # two ranks, all of it: mpi
        ("gloo", 3, "auto", RANKS),
        pytest.param("gloo", 3, "off", RANKS, marks=whole),
        pytest.param("gloo", 3, "on", CONFORM, marks=long),
        ("gloo", 3, "device", CONFORM),
        pytest.param("gloo", 3, "device", RANKS, marks=whole),
        pytest.param("gloo", 3, "on", RANKS, marks=whole),
        pytest.param("gloo", 4, "auto", RANKS, marks=whole),
        pytest.param("mpi", 1, "auto", CONFORM, marks=whole),
        ("mpi", 2, "off", CONFORM),
        pytest.param("mpi", 2, "off", RANKS, marks=long),
        pytest.param("mpi", 3, "auto", RANKS, marks=whole),
        pytest.param("mpi", 4, "auto", CONFORM, marks=whole),
    ],
)
def test_ranks_pass_together(launcher: str, num_ranks: int, mesh: str, tests: str) -> None:
    """With "auto" ranks share memory, with "on" they have a mesh, with "off" all is Horovod's.

    With "device" they have a process group of torch's beside Horovod, as on GPUs.
    """
    lane = {"LOFT_HVD_LANE": mesh} if mesh == "device" else {"LOFT_HVD_MESH": mesh}
    done = launch(
        num_ranks,
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=60", tests],
        launcher=launcher,
        timeout_s=390,
        env={"LOFT_HVD_TIMEOUT_S": "30", **lane},
    )
    output = done.succeeded()
    assert output.count(" passed") == num_ranks, output[-8000:]


MESH = {"mesh": "on", "memory": "auto"}
LARGEST_OF_ALL = [("mesh", 6), ("memory", 8)]  # that make test-all runs
LARGER = [
    pytest.param(
        transport,
        num_ranks,
        marks=[
            long,
            # Their collectives are in other tests; these have sums and orders of their own.
            *([pytest.mark.whole] if (transport, num_ranks) not in LARGEST_OF_ALL else []),
        ],
    )
    for transport in ("gloo", "mpi", "mesh", "memory")
    for num_ranks in (5, 6, 7, 8)
]


@pytest.mark.parametrize(("transport", "num_ranks"), LARGER)
def test_larger_worlds_give_the_bits_of_local_ranks(transport: str, num_ranks: int) -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "--timeout=120", CONFORM, "-k", "bits_of_local"]
    done = launch(
        num_ranks,
        ["-m", "pytest", *arguments],
        launcher="mpi" if transport == "mpi" else "gloo",
        timeout_s=380,
        env={"LOFT_HVD_TIMEOUT_S": "60", "LOFT_HVD_MESH": MESH.get(transport, "off")},
    )
    done.succeeded()
    assert done.output.count(f"{len(RULES)} passed") == num_ranks, done.output[-8000:]


@pytest.mark.skipif(not launcher_here("mpi"), reason="there is no mpirun")
def test_horovod_is_built_with_mpi_where_mpirun_exists() -> None:
    import horovod.torch as hvd

    assert hvd.mpi_built(), "mpirun is here, but Horovod was built without MPI: run `make setup`"
