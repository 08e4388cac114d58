"""Every fault under every controller: ``python -m tests.faults.table [--fault F]``.

A trial starts some ranks of ``jobs/faulty.py``, lets rank 0 or 1 meet a fault, and waits until no
process of the job is left. It is right when

- the rank at fault is named, by the other ranks or by the launcher, and they name no other rank;
- a ``cap`` line is written where memory was full, and nowhere else;
- the job has ended, or an elastic one trains again, within ``LIMITS_S``, and leaves no process.

Limits are for idle cores. Elastic jobs, cut links and crashed hosts run on hosts of the testbed, a
rank each, with the settings that ``docs/failures.md`` tells users to make.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loft_hvd.balance.memory import logged_caps
from tests.faults.kills import accused
from tests.support.launch import Finished, launch
from tests.testbed.hosts import Testbed, why_not

__all__ = ["CONTROLLERS", "FAULTS", "Outcome", "run_trial"]

JOB = "tests/faults/jobs/faulty.py"
CONTROLLERS = ("gloo", "mpi", "elastic")
# What happens to the rank: its process ends, or it falls silent.
FAULTS = {
    "kill": "ends",
    "term": "ends",
    "segv": "ends",
    "exit": "ends",
    "_exit": "ends",
    "forward": "ends",
    "backward": "ends",
    "hook": "ends",
    "loader": "ends",
    "loader-kill": "ends",
    "memory": "ends",
    "cuda-memory": "ends",
    "freeze": "silent",
    "cut": "silent",
    "crash": "silent",
}
FROM_OUTSIDE = ("cut", "crash")
LIMITS_S = {"ends": 8.0, "silent": 15.0, "elastic": 15.0}
MOST_S = 60.0  # of a trial after its fault; then its processes are ended
START_S = 90.0  # until all ranks train, on a loaded machine
KEEPALIVE = ("time", "5", "intvl", "2", "probes", "2")
# Who has ended first, in the words of launchers.
_BY_LAUNCHER = (
    r"process rank (\d+) with PID \d+ on node \S+ exited on signal",
    r"Process name: \[\[\d+,\d+\],(\d+)\]",
    r"(?m)^Process name: (\d+)$",
)


@dataclass(frozen=True)
class Trial:
    """What is tried."""

    fault: str
    controller: str
    rank: int
    is_attached: bool = False  # with Horovod's own optimizer
    num_ranks: int = 3

    def __str__(self) -> str:
        return f"{self.fault}{self.rank}-{self.controller}{'-attached' * self.is_attached}"

    @property
    def limit_s(self) -> float:
        return LIMITS_S["elastic" if self.controller == "elastic" else FAULTS[self.fault]]

    @property
    def num_caps(self) -> int:
        return int("memory" in self.fault)


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    trial: Trial
    named: frozenset[int]  # by the ranks
    by_launcher: frozenset[int]
    seconds: float  # from the fault until no process was left, or until training went on
    num_caps: int
    left: tuple[str, ...]  # processes that did not end, or ended too late
    returncode: int | None  # of the launcher; None where it had to be ended
    has_recovered: bool
    output: str

    def faults(self) -> list[str]:
        """Say what is wrong."""
        trial, rank = self.trial, self.trial.rank
        wrong = [f"false names {sorted(false)}"] if (false := self.named - {rank}) else []
        if rank not in self.named | self.by_launcher:
            wrong.append("not named")
        if not self.seconds <= trial.limit_s:
            wrong.append("late")
        if self.num_caps != trial.num_caps:
            wrong.append(f"{self.num_caps} caps")
        if self.left:
            wrong.append(f"left {len(self.left)}")
        # A job that has recovered ends well, the others as one that has failed.
        if self.returncode is None or (self.returncode == 0) != self.has_recovered:
            wrong.append(f"ended with {self.returncode}")
        return wrong

    def __str__(self) -> str:
        trial = self.trial
        who = "ranks" if trial.rank in self.named else "launcher"
        who = who if trial.rank in self.named | self.by_launcher else "nobody"
        return (
            f"{trial.fault:<12} {trial.controller:<8} {trial.rank:>4} {who:<9} "
            f"{self.seconds:>6.1f} {self.num_caps:>4} {len(self.left):>4}  "
            f"{', '.join(self.faults()) or 'ok'}"
        )


HEADER = f"{'fault':<12} {'':<8} {'rank':>4} {'named by':<9} {'s':>6} {'caps':>4} {'left':>4}"


def processes_of(mark: str) -> dict[int, str]:
    """Return the processes whose environment holds a mark: id and command."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended
                if mark.encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    found[int(folder.name)] = " ".join(words)[:200]
    found.pop(os.getpid(), None)
    return found


@dataclass(frozen=True)
class Job:
    """A job that runs: where it leaves word, and what its processes have in their environment."""

    trial: Trial
    folder: Path
    mark: str
    testbed: Testbed | None

    def start(self) -> Finished:
        """Run it; takes until it ends."""
        trial = self.trial
        arguments = [JOB, str(self.folder), trial.fault, str(trial.rank)]
        arguments += ["attached"] * trial.is_attached
        name, _, value = self.mark.partition("=")
        env = {name: value, "LOFT_HVD_LOG_DIR": str(self.folder / "caps")}
        limit_s = START_S + MOST_S + 30
        if self.testbed is None:
            return launch(
                trial.num_ranks, arguments, launcher=trial.controller, timeout_s=limit_s, env=env
            )
        options = ["--launcher", "mpirun" if trial.controller == "mpi" else "gloo"]
        if trial.controller == "elastic":
            # Launched from a host of its own, without ranks.
            script = self.folder / "discover"
            hosts = "".join(f"host{rank}:1\\n" for rank in range(1, trial.num_ranks + 1))
            script.write_text(f"#!/bin/sh\nprintf '{hosts}'\n")
            script.chmod(0o755)
            options += ["--np", str(trial.num_ranks), "--min-np", str(trial.num_ranks - 1)]
            options += ["--max-np", str(trial.num_ranks), "--discovery", str(script)]
            env |= {"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"}
        return self.testbed.run(arguments, timeout_s=limit_s, env=env, options=options)

    def wait(self, is_there: Callable[[], bool], *, until: float) -> bool:
        """Wait for something, as long as the job runs; say whether it has come."""
        while not is_there():
            if time.time() > until or not processes_of(self.mark):
                return is_there()
            time.sleep(0.2)  # looking costs: it reads the environment of every process
        return True

    def meet_fault(self) -> float:
        """Let the fault happen; returns when that was."""
        until = time.time() + START_S
        places = [self.folder / f"rank{rank}" for rank in range(self.trial.num_ranks)]
        if self.trial.fault in FROM_OUTSIDE:
            assert self.testbed is not None
            assert self.wait(lambda: all(p.exists() for p in places), until=until), "no start"
            host, at = places[self.trial.rank].read_text(), time.time()
            (self.folder / "fault").write_text(str(at))
            self.testbed.tell(self.trial.fault, host)
            return at
        assert self.wait((self.folder / "fault").exists, until=until), "no start"
        return float((self.folder / "fault").read_text() or time.time())

    def wait_end(self, fault_at: float) -> tuple[float, tuple[str, ...]]:
        """Return when it ended, or trained again, and the processes that were left."""
        until, recovered = fault_at + MOST_S, self.folder / "recovered"
        is_over = self.wait(lambda: not processes_of(self.mark), until=until)
        ended_at = time.time()
        left = () if is_over else tuple(processes_of(self.mark).values())
        for process in processes_of(self.mark):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        return float(recovered.read_text()) if recovered.exists() else ended_at, left


def run_trial(trial: Trial, testbed: Callable[[], Testbed]) -> Outcome:
    """Run one trial; ``testbed`` makes a testbed where one is needed."""
    mark = f"LOFT_TRIAL={uuid.uuid4().hex}"
    hosts = None
    if trial.controller == "elastic" or trial.fault in FROM_OUTSIDE:
        hosts = testbed()
        alive = ["--ssh-alive", "3"] if trial.controller == "elastic" else []
        hosts.up(trial.num_ranks + (trial.controller == "elastic"), *alive)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as starter:
        folder = Path(name)
        job = Job(trial, folder, mark, hosts)
        running = starter.submit(job.start)
        while not (processes_of(mark) or running.done()):
            time.sleep(0.1)
        fault_at, ended_at, trouble = time.time(), float("nan"), ""
        left: tuple[str, ...] = ()
        try:
            fault_at = job.meet_fault()
            ended_at, left = job.wait_end(fault_at)
        except AssertionError as error:
            trouble = f"\n{error}"
            for process in processes_of(mark):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        done = running.result()
        output = done.output + trouble
        # Not of the rank itself: one that is cut off may blame the others.
        for rank in set(range(trial.num_ranks)) - {trial.rank}:
            if (log := folder / f"log{rank}.txt").exists():
                output += f"\n---- {log.name}\n{log.read_text(errors='replace')}"
        num_caps = len(logged_caps(folder / "caps"))
        has_recovered = (folder / "recovered").exists()
    if hosts is not None and trial.fault in FROM_OUTSIDE:
        hosts.down()
    by_launcher = {int(rank) for pattern in _BY_LAUNCHER for rank in re.findall(pattern, output)}
    return Outcome(
        trial,
        accused(output),
        frozenset(by_launcher),
        ended_at - fault_at,
        num_caps,
        left,
        done.returncode,
        has_recovered,
        output,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table")
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--controller", choices=CONTROLLERS, action="append")
    parser.add_argument("--rank", type=int, choices=(0, 1), action="append")
    parser.add_argument("--ranks", type=int, choices=(2, 3), default=3)
    parser.add_argument("--output", type=Path, help="a folder for what jobs have printed")
    help_text = "with Horovod's own optimizer and loft.attach"
    parser.add_argument("--attached", action="store_true", help=help_text)
    given = parser.parse_args(arguments)
    testbed = Testbed(f"table{os.getpid()}")
    trials = [
        Trial(fault, controller, rank, given.attached, given.ranks)
        for controller in given.controller or CONTROLLERS
        for fault in given.fault or FAULTS
        for rank in given.rank or (1, 0)
    ]
    if reason := why_not():
        print(f"without elastic jobs, cut links and crashed hosts: {reason}")
        trials = [t for t in trials if t.controller != "elastic" and t.fault not in FROM_OUTSIDE]
    print(HEADER)
    outcomes = []
    try:
        for trial in trials:
            outcomes.append(run_trial(trial, lambda: testbed))
            print(outcomes[-1], flush=True)
            if given.output is not None:
                given.output.mkdir(parents=True, exist_ok=True)
                text = "\n".join([str(outcomes[-1]), *outcomes[-1].left, outcomes[-1].output])
                (given.output / f"{trial}.log").write_text(text)
    finally:
        testbed.down()
    wrong = [outcome for outcome in outcomes if outcome.faults()]
    print(f"{len(outcomes)} trials, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
