from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from loft_hvd.config import VARIABLES, Config, has_dynamic_process_sets, unknown_variables
from loft_hvd.errors import ArgumentError


@pytest.mark.parametrize(
    ("environ", "is_patient"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "HOROVOD_SIZE": "3"}, False),  # horovodrun under mpirun
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_oob_tcp_keepalive_time": "5"}, False),
    ],
)
def test_an_mpirun_that_waits_for_lost_hosts_is_known(
    environ: dict[str, str], is_patient: bool
) -> None:
    assert Config.from_environ(environ).is_mpirun_patient == is_patient


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({}, ""),
        ({"HOROVOD_GLOO_IFACE": "eth1", "GLOO_SOCKET_IFNAME": "eth2"}, "eth1"),
        ({"HOROVOD_GLOO_IFACE": "", "OMPI_MCA_btl_tcp_if_include": "ib0"}, "ib0"),
    ],
)
def test_the_interface_of_the_engine_is_known(environ: dict[str, str], interface: str) -> None:
    assert Config.from_environ(environ).interface == interface


@pytest.mark.parametrize(
    ("environ", "ranks", "is_torchrun"),
    [
        ({}, 1, False),
        ({"SLURM_NTASKS": "4"}, 1, False),  # a batch script: nothing has been started yet
        ({"SLURM_STEP_NUM_TASKS": "4"}, 4, False),  # srun
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "8"}, 8, False),  # mpirun's daemons
        (
            {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "7"},
            8,
            True,
        ),
        ({"TORCHELASTIC_RUN_ID": "7", "HOROVOD_SIZE": "3"}, 3, False),
    ],
)
def test_the_launcher_is_known_also_inside_a_slurm_job(
    environ: dict[str, str], ranks: int, is_torchrun: bool
) -> None:
    told = Config.from_environ(environ)
    assert (told.ranks, told.is_torchrun) == (ranks, is_torchrun)


@pytest.mark.parametrize(
    ("text", "is_dynamic"),
    [("1", True), (" 02", True), ("-1", True), ("0", False), ("", False), ("true", False)],
)
def test_process_sets_are_dynamic_where_horovod_says_so(
    text: str, is_dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_DYNAMIC_PROCESS_SETS", raising=False)
    assert not has_dynamic_process_sets()
    monkeypatch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", text)  # as hvd.init may, meanwhile
    assert has_dynamic_process_sets() == is_dynamic


def test_every_variable_of_ours_sets_its_field() -> None:
    words = {"isa": "avx2", "lane": "mesh", "mesh": "off", "compact": "off", "copies": "ignore"}
    words["links"] = "bbr"
    for field, variable in VARIABLES.items():
        assert Config.from_environ({variable: words.get(field, "7")}) != Config()
    # By launchers.
    told = {"is_elastic", "local_ranks", "ranks", "rank", "launcher", "interface"}
    told |= {"is_torchrun", "is_mpirun", "is_mpirun_patient"}
    assert {field.name for field in dataclasses.fields(Config)} == VARIABLES.keys() | told


def test_only_what_nothing_reads_is_unknown() -> None:
    root = Path(__file__).parents[2]
    files = [
        root / "setup.py",
        root / "cmake/horovod/standard.cmake",
        *root.glob("scripts/**/*.py"),
    ]
    read = {name for file in files for name in re.findall(r"LOFT_HVD_[A-Z_]+", file.read_text())}
    assert "LOFT_HVD_JOBS" in read
    assert unknown_variables(dict.fromkeys((*read, *VARIABLES.values()), "1")) == {}
    assert unknown_variables({"LOFT_HVD_ISO": "avx2", "LOFT_HVD_COLOUR": "red", "HOME": "/"}) == {
        "LOFT_HVD_COLOUR": "",
        "LOFT_HVD_ISO": "LOFT_HVD_ISA",
    }


def test_empty_environment_gives_the_defaults() -> None:
    assert Config.from_environ({}) == Config()
    assert Config.from_environ({"LOFT_HVD_THREADS": "  ", "HOROVOD_CYCLE_TIME": "x"}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LOFT_HVD_THREADS", "3", "threads", 3),
        ("LOFT_HVD_ISA", "avx2", "isa", "avx2"),
        ("LOFT_HVD_TIMEOUT_S", " 2.5 ", "timeout_s", 2.5),
        ("LOFT_HVD_BUCKET_BYTES", "1048576", "bucket_bytes", 1048576),
        ("LOFT_HVD_LOG_DIR", "runs/a b", "log_dir", "runs/a b"),
        ("LOFT_HVD_FIRST_SIZES", "sizes.json", "first_sizes", "sizes.json"),
        ("LOFT_HVD_TRACE", "runs/trace.json", "trace_file", "runs/trace.json"),
        ("LOFT_HVD_HEARTBEAT_S", "0", "heartbeat_s", 0.0),
        ("LOFT_HVD_HEARTBEAT_TIMEOUT_S", "60", "heartbeat_timeout_s", 60.0),
        ("LOFT_HVD_LEAVE_S", "1.5", "leave_s", 1.5),
        ("HOROVOD_ELASTIC", "1", "is_elastic", True),
    ],
)
def test_variable_sets_its_field_and_no_other(
    variable: str, text: str, field: str, value: object
) -> None:
    found = dataclasses.asdict(Config.from_environ({variable: text}))
    assert found.pop(field) == value
    defaults = dataclasses.asdict(Config())
    assert found == {name: default for name, default in defaults.items() if name != field}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LOFT_HVD_THREADS", "0"),
        ("LOFT_HVD_THREADS", "-1"),
        ("LOFT_HVD_THREADS", "1.5"),
        ("LOFT_HVD_THREADS", "many"),
        ("LOFT_HVD_ISA", "sse"),
        ("LOFT_HVD_TIMEOUT_S", "0"),
        ("LOFT_HVD_TIMEOUT_S", "nan"),
        ("LOFT_HVD_TIMEOUT_S", "-3"),
        ("LOFT_HVD_BUCKET_BYTES", "32MB"),
        ("LOFT_HVD_HEARTBEAT_S", "-0.5"),
        ("LOFT_HVD_HEARTBEAT_S", "inf"),
        ("LOFT_HVD_HEARTBEAT_TIMEOUT_S", "0"),
        ("LOFT_HVD_LEAVE_S", "never"),
    ],
)
def test_wrong_value_names_variable_value_and_what_it_takes(variable: str, text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Config.from_environ({variable: text})
    assert variable in str(error.value)
    assert text in str(error.value)
    assert "it takes" in str(error.value)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, -1),
        ({"HOROVOD_RANK": "2"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"HOROVOD_RANK": "-1", "SLURM_PROCID": "1"}, 1),  # not placed yet, in an elastic job
    ],
)
def test_the_rank_is_what_the_launcher_tells(environ: dict[str, str], rank: int) -> None:
    assert Config.from_environ(environ).rank == rank
