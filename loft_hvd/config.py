"""Settings from the environment: the only reader of ``os.environ``.

Every variable of ours is called ``LOFT_HVD_*``, is read once a process, and has a default that
suits most users. A wrong value is an error that names the variable, its value and what it takes.
Launchers set a few more for their ranks.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from loft_hvd.errors import ArgumentError

__all__ = [
    "KEEPALIVE_OPTIONS",
    "LANES",
    "MOST_CONNECTIONS",
    "SSH_OPTIONS",
    "VARIABLES",
    "Config",
    "config",
    "has_dynamic_process_sets",
    "unknown_variables",
]

# With them mpirun notices a host that is gone 9 s after its last sign; without, after minutes.
_KEEPALIVE_S = {"time": 5, "intvl": 2, "probes": 2}  # 5 s of silence, then 2 probes 2 s apart
KEEPALIVE_OPTIONS = " ".join(f"--mca oob_tcp_keepalive_{k} {v}" for k, v in _KEEPALIVE_S.items())

# With them the ssh that horovodrun starts a rank by ends 6 s after a host's last sign.
SSH_OPTIONS = "ServerAliveInterval 3, ServerAliveCountMax 2"

VARIABLES = {  # of each field that a user sets
    "threads": "LOFT_HVD_THREADS",
    "isa": "LOFT_HVD_ISA",
    "timeout_s": "LOFT_HVD_TIMEOUT_S",
    "bucket_bytes": "LOFT_HVD_BUCKET_BYTES",
    "log_dir": "LOFT_HVD_LOG_DIR",
    "first_sizes": "LOFT_HVD_FIRST_SIZES",
    "trace_file": "LOFT_HVD_TRACE",
    "heartbeat_s": "LOFT_HVD_HEARTBEAT_S",
    "heartbeat_timeout_s": "LOFT_HVD_HEARTBEAT_TIMEOUT_S",
    "leave_s": "LOFT_HVD_LEAVE_S",
    "lane": "LOFT_HVD_LANE",
    "mesh": "LOFT_HVD_MESH",
    "compact": "LOFT_HVD_COMPACT",
    "links": "LOFT_HVD_LINKS",
    "datagram_ports": "LOFT_HVD_DATAGRAM_PORT",
    "copies": "LOFT_HVD_COPIES",
}

MOST_CONNECTIONS = 64  # between two ranks; a choice: more than four times what was tried
# As in transport/lanes.py.
LANES = ("shared-memory", "datagram", "mesh", "peer-memory", "device", "engine")
_LAST_PORT = 2**16 - 1

_OF_THE_BUILD = (  # what setup.py and `make setup` read: no misspelt setting either
    "LOFT_HVD_CACHE",
    "LOFT_HVD_CUDA",
    "LOFT_HVD_CUDA_ARCHS",
    "LOFT_HVD_DATAGRAM",
    "LOFT_HVD_HOROVOD_CUDA",
    "LOFT_HVD_JOBS",
    "LOFT_HVD_LEVELS",
    "LOFT_HVD_WERROR",
)
_T = TypeVar("_T")
_LOCAL_RANKS = (  # horovodrun, Open MPI, MPICH and Intel MPI, torchrun
    "HOROVOD_LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "LOCAL_WORLD_SIZE",
)
# The network interface of the engine: horovodrun, torch.distributed, Open MPI.
_INTERFACES = ("HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
_KEEPALIVE = "OMPI_MCA_oob_tcp_keepalive_time"  # of Open MPI; also what --mca makes for ranks
# What tells the number of ranks, and who tells it. srun, last, tells every process of a job step,
# and what it starts may be mpirun or torchrun.
_RANKS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "WORLD_SIZE": "torchrun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Config:
    """What the environment says; ``VARIABLES`` has the names of what a user sets."""

    # CPU threads of the aggregation kernels; None: the allowed CPUs divided by the local ranks.
    threads: int | None = None
    # Instruction set of the CPU kernels, "baseline", "avx2" or "avx512"; None: the best one here.
    isa: str | None = None
    timeout_s: float = 300.0  # longest wait for other ranks; a choice
    bucket_bytes: int = 32 * 1024 * 1024  # most bytes of gradients sent together
    log_dir: str | None = None  # folder of the run log; None: no log
    first_sizes: str | None = None  # file with the sizes that adaptive ones start from; None: equal
    # File of a Chrome trace of every bucket's stages, with the rank's number before its suffix.
    trace_file: str | None = None
    heartbeat_s: float = 1.0  # between two heartbeats of a rank; 0: none
    # Silence that ends the waits of others, for a rank whose process none of them can look at.
    heartbeat_timeout_s: float = 10.0
    leave_s: float = 5.0  # after an error, until a process is left whose engine does not come down
    # How values move between ranks (transport/lanes.py): "auto", or a lane by its name, which is
    # taken by all values for which ranks can open it. Else they take the engine's collectives.
    lane: str = "auto"
    # What values of CPUs take instead of the engine's collectives where ``lane`` is "auto": "auto"
    # memory that ranks of one node share (transport/shared_memory.py), and where Gloo's ranks are
    # on several nodes connections of our own (transport/mesh.py); "on" these alone, also on one
    # node; or "off", nothing.
    mesh: str = "auto"
    # Whether floats travel in fewer bytes on these connections (transport/compact.py): "auto" where
    # links are slow, "on" where all ranks say so, "off" where any does.
    compact: str = "auto"
    # Which congestion control connections between ranks have (transport/congestion.py): "auto" BBR
    # where links are long or lossy, or where that is refused several connections between two ranks;
    # "bbr" everywhere, "off" what the host takes. Or a number: of connections between two ranks.
    links: str = "auto"
    # UDP ports of which a rank takes the first that is free, for gather=LossTolerant(); 0 for any.
    datagram_ports: tuple[int, int] = (0, 0)
    # Whether ranks "compare" their copies of the parameters and the optimizer's state, or "ignore"
    # what differs: in a script whose ranks differ on purpose.
    copies: str = "compare"
    # What launchers tell.
    is_elastic: bool = False  # whether Horovod runs elastically
    local_ranks: int = 1  # on this node; 1 where nothing is told
    ranks: int = 1  # of the whole job
    launcher: str = "a launcher"  # who tells that number
    rank: int = -1  # of this process; -1 where nothing is told
    interface: str = ""  # the network interface that the engine uses; "" where nothing is told
    is_torchrun: bool = False  # whether torchrun has started this
    is_mpirun: bool = False  # whether Open MPI has started this
    # Whether it has done so without being told to notice hosts that are gone.
    is_mpirun_patient: bool = False

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Read the ``LOFT_HVD_*`` variables of ``environ``.

        Raises:
            ArgumentError: a variable has a value that it does not take.
        """

        def read(
            name: str, parse: Callable[[str], _T], default: _T, *, takes: str, floor: float = 0
        ) -> _T:
            text = environ.get(f"LOFT_HVD_{name}", "").strip()
            if not text:
                return default
            try:
                value = parse(text)
            except ValueError:
                value = None
            # ``not >`` and not ``<=``: NaN is refused too.
            if value is None or (isinstance(value, int | float) and not value > floor):
                raise ArgumentError(f"LOFT_HVD_{name}={text!r}: it takes {takes}; mend or unset it")
            return value

        def one_of(*words: str) -> Callable[[str], str]:
            def parse(text: str) -> str:
                if text not in words:
                    raise ValueError(text)
                return text

            return parse

        def seconds(text: str) -> float:
            value = float(text)
            if not 0 <= value < float("inf"):
                raise ValueError(text)
            return value

        def ports(text: str) -> tuple[int, int]:
            first, _, last = text.partition("-")
            found = int(first), int(last or first)
            if not 1 <= found[0] <= found[1] <= _LAST_PORT:
                raise ValueError(text)
            return found

        # A job of horovodrun's may itself be started by a script that runs under mpirun.
        is_mpirun = "OMPI_COMM_WORLD_SIZE" in environ and "HOROVOD_SIZE" not in environ
        is_torchrun = _TORCHRUN in environ and "HOROVOD_SIZE" not in environ
        # mpirun, or srun by PMI, may start a torchrun on each host.
        told = ("WORLD_SIZE", *_RANKS) if is_torchrun else tuple(_RANKS)
        threads: int | None = None
        level: str | None = None
        no_file: str | None = None
        count = "a whole number above 0"
        return cls(
            threads=read("THREADS", int, threads, takes=count),
            isa=read(
                "ISA",
                one_of("baseline", "avx2", "avx512"),
                level,
                takes="baseline, avx2 or avx512",
            ),
            timeout_s=read("TIMEOUT_S", float, cls.timeout_s, takes="seconds above 0"),
            bucket_bytes=read("BUCKET_BYTES", int, cls.bucket_bytes, takes=count),
            log_dir=read("LOG_DIR", str, no_file, takes="a folder"),
            first_sizes=read("FIRST_SIZES", str, no_file, takes="a file name"),
            trace_file=read("TRACE", str, no_file, takes="a file name"),
            heartbeat_s=read(
                "HEARTBEAT_S", seconds, cls.heartbeat_s, takes="seconds, 0 for none", floor=-1
            ),
            heartbeat_timeout_s=read(
                "HEARTBEAT_TIMEOUT_S", float, cls.heartbeat_timeout_s, takes="seconds above 0"
            ),
            leave_s=read("LEAVE_S", float, cls.leave_s, takes="seconds above 0"),
            lane=read(
                "LANE", one_of("auto", *LANES), cls.lane, takes=f"auto or one of {', '.join(LANES)}"
            ),
            mesh=read("MESH", one_of("auto", "on", "off"), cls.mesh, takes="auto, on or off"),
            compact=read(
                "COMPACT", one_of("auto", "on", "off"), cls.compact, takes="auto, on or off"
            ),
            links=read(
                "LINKS",
                one_of("auto", "bbr", "off", *map(str, range(1, MOST_CONNECTIONS + 1))),
                cls.links,
                takes=f"auto, bbr, off, or a number of connections up to {MOST_CONNECTIONS}",
            ),
            datagram_ports=read(
                "DATAGRAM_PORT",
                ports,
                cls.datagram_ports,
                takes="a UDP port or a range such as 5100-5107, from 1 to 65535",
            ),
            copies=read(
                "COPIES", one_of("compare", "ignore"), cls.copies, takes="compare or ignore"
            ),
            is_elastic=environ.get("HOROVOD_ELASTIC", "") == "1",
            local_ranks=_first_count(environ, _LOCAL_RANKS),
            ranks=_first_count(environ, told),
            launcher=_RANKS.get(_first_counting(environ, told), cls.launcher),
            rank=next((int(environ[n]) for n in _RANK if environ.get(n, "").isdecimal()), -1),
            interface=next((environ[name] for name in _INTERFACES if environ.get(name)), ""),
            is_torchrun=is_torchrun and not is_mpirun,
            is_mpirun=is_mpirun,
            is_mpirun_patient=is_mpirun and _KEEPALIVE not in environ,
        )


def _first_count(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Return how many ranks the launcher says it started; 1 where it does not say."""
    return int(environ.get(_first_counting(environ, names), "1"))


def _first_counting(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first variable that tells a number of ranks; "" where none does."""
    # The first: one launcher may have started another.
    counts = (n for n in names if environ.get(n, "").isdecimal() and int(environ[n]) > 0)
    return next(counts, "")


@functools.cache
def config() -> Config:
    """Return the settings of this process, read from the environment at the first call."""
    return Config.from_environ(os.environ)


def has_dynamic_process_sets() -> bool:
    """Say whether Horovod's process sets are "dynamic"."""
    # Read anew each time: ``hvd.init(process_sets="dynamic")`` sets it. As Horovod reads it, that
    # is a number other than 0.
    text = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "")
    return re.match(r"\s*[+-]?0*[1-9]", text) is not None


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what is called ``LOFT_HVD_*`` and nothing reads, each with its nearest real name.

    The nearest name is "" where none is near.
    """
    known = (*VARIABLES.values(), *_OF_THE_BUILD)
    unknown = sorted(name for name in environ if name.startswith("LOFT_HVD_"))
    # At 0.8 "LOFT_HVD_THREAD" finds LOFT_HVD_THREADS, and "LOFT_HVD_COLOUR" nothing.
    return {
        name: "".join(difflib.get_close_matches(name, known, n=1, cutoff=0.8))
        for name in unknown
        if name not in known
    }
