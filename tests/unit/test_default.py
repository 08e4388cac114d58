"""Which ranks a call takes when a script names none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import loft_hvd as loft
from loft_hvd.config import Config
from loft_hvd.errors import UsageError
from loft_hvd.transport import default
from loft_hvd.transport.torch_distributed import TorchDistributedTransport
from tests.support.worlds import environment


@pytest.mark.parametrize(
    ("told", "message"),
    [({"HOROVOD_SIZE": "4"}, "one of 4 ranks"), ({"HOROVOD_ELASTIC": "1"}, "an elastic rank")],
)
def test_one_of_several_ranks_never_trains_alone(told: dict[str, str], message: str) -> None:
    with (
        environment(**told),
        pytest.raises(UsageError, match=f"{message}.*call one of them before"),
    ):
        loft.Balancer(8)


def test_ranks_on_another_backend_have_one_gloo_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps each group that it made: one for every ddp_hook would add up."""
    made: list[object] = []

    def new_group(ranks: list[int], *, backend: str) -> object:
        made.append((ranks, backend))
        return object()

    fake = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        group=SimpleNamespace(WORLD=object()),
        Backend=SimpleNamespace(GLOO="gloo"),
        get_backend=lambda _: "nccl",
        get_process_group_ranks=lambda _: [0, 1],
        get_rank=lambda _: 0,
        get_world_size=lambda: 1,  # a launcher has told of all
        new_group=new_group,
    )
    monkeypatch.setattr("loft_hvd.transport.torch_distributed.dist", fake)
    for _ in range(3):
        TorchDistributedTransport()
    assert made == [([0, 1], "gloo")]


STARTED = {
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "3"},
    "mpiexec": {"PMI_SIZE": "3"},
    "torchrun": {"WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "none"},
    "srun": {"SLURM_STEP_NUM_TASKS": "3"},
    "horovodrun": {"HOROVOD_SIZE": "3"},
}


def with_horovod(monkeypatch: pytest.MonkeyPatch, *, size: int, **built: bool) -> None:
    facts = {"mpi_built": True, "mpi_enabled": True} | built
    told = {name: (lambda value=value: value) for name, value in facts.items()}
    hvd = SimpleNamespace(size=lambda: size, **told)
    monkeypatch.setattr(default, "horovod_if_initialized", lambda: hvd)
    monkeypatch.setattr(default, "HorovodTransport", lambda _: "Horovod's ranks")


@pytest.mark.parametrize("launcher", STARTED)
@pytest.mark.parametrize(
    ("built", "says"),
    [
        ({"mpi_built": False, "mpi_enabled": False}, "Gloo alone, without MPI"),
        ({"mpi_enabled": False}, "HOROVOD_CONTROLLER"),
        ({}, "another MPI"),
    ],
)
def test_a_launchers_ranks_that_horovod_has_not_found_are_told(
    launcher: str, built: dict[str, bool], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_horovod(monkeypatch, size=1, **built)
    says = "reads nothing of torchrun's" if launcher == "torchrun" else says
    with (
        environment(**STARTED[launcher]),
        pytest.raises(
            UsageError,
            match=f"^{launcher} has started .* one of 3 ranks, but Horovod connects 1: .*{says}.*"
            "horovodrun -np 3",
        ),
    ):
        default.default_transport()


@pytest.mark.parametrize(
    "told",
    [
        {},  # python alone
        {"OMPI_COMM_WORLD_SIZE": "3"},
        {"OMPI_COMM_WORLD_SIZE": "1", "HOROVOD_SIZE": "3"},  # horovodrun inside mpirun
        {"SLURM_STEP_NUM_TASKS": "2", "HOROVOD_SIZE": "3"},  # and one task a node of srun
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},  # one process in an allocation
        {"HOROVOD_SIZE": "2", "HOROVOD_ELASTIC": "1"},  # ranks have come since
        {"OMPI_COMM_WORLD_SIZE": "8"},  # some of them, by hvd.init(comm=[...])
        {"WORLD_SIZE": "2"},  # hosts, as some templates have it
    ],
    ids=str,
)
def test_ranks_that_are_all_there_are_taken(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_horovod(monkeypatch, size=3)
    with environment(**told):
        assert str(default.default_transport()) == "Horovod's ranks"
        assert str(default.default_transport(SimpleNamespace())) == "Horovod's ranks"  # some


def test_a_torch_world_of_one_under_a_launcher_of_three_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 1
    )
    monkeypatch.setattr(default, "dist", fake)
    with (
        environment(SLURM_STEP_NUM_TASKS="3"),
        pytest.raises(UsageError, match=r"srun has started .* torch.distributed connects 1"),
    ):
        loft.ddp_hook(loft.Median())


@pytest.mark.parametrize(
    ("told", "ranks", "launcher"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"},
            16,
            "torchrun",
        ),
        ({"PMI_SIZE": "2", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"}, 16, "torchrun"),
        ({"PMI_SIZE": "none", "SLURM_STEP_NUM_TASKS": "3"}, 3, "srun"),
        ({"HOROVOD_SIZE": "4", "WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x"}, 4, "horovodrun"),
        ({}, 1, "a launcher"),
    ],
    ids=str,
)
def test_the_innermost_launcher_tells_the_ranks(
    told: dict[str, str], ranks: int, launcher: str
) -> None:
    found = Config.from_environ(told)
    assert (found.ranks, found.launcher) == (ranks, launcher)
