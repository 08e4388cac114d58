"""A training that meets one fault after another, and ends with the bits of one that met none.

    python -m tests.faults.chaos --steps 5000 --seed 1     # some minutes; 50,000 steps: an hour

Three ranks over Gloo train by plans that are replayed, under an attack, and save a checkpoint now
and then. Their script (``chaos_job.py``) is started again and again, each time with another fault
that is drawn from the seed: a rank that is killed or stopped, raises, leaves, falls silent for a
while, holds its interpreter, or whose disk is full; in every other job strangers come to the
heartbeat's port. Each job must end in time, must name the rank at fault and no other, and must
leave no process behind. Training goes on from the last checkpoint that is whole. At its end all
ranks have the bits of a training without any fault, in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from loft_hvd.balance.memory import logged_caps
from loft_hvd.transport.local import run_ranks
from tests.faults.chaos_job import NUM_RANKS, Fault, train, write_plans
from tests.faults.kills import accused
from tests.support.launch import ROOT, launch

__all__ = ["Life", "chaos"]

# How each fault that ends a job is told; the rank follows.
LETHAL = {
    "kill": r"rank {} \(.*\) has ended without a word",
    "segv": r"rank {} \(.*\) has ended without a word",
    "freeze": r"rank {} \(.*\) is frozen",
    "raise": r"rank {} .* has failed: RuntimeError: chaos",
    "out-of-memory": r"rank {} (ran out of memory|.* has failed: .*out of memory)",
    "exit": r"ranks \[{}\] have ended their scripts",
    "leave": r"rank {} \(.*\) has ended without a word",
}
# What a job gets over: a pause or a stop of some seconds, an interpreter held, a full disk.
HARMLESS = ("pause", "stop", "hold", "disk")
MOST_S = 20.0  # from a fault to the end of its job; 15 on idle cores


@dataclass(frozen=True)
class Life:
    """One job: how it was met, and what came of it."""

    number: int
    begins_at: int  # step
    fault: Fault
    seconds: float  # from the fault to the job's end; 0 where it went on
    wrong: str  # or ""

    def __str__(self) -> str:
        fault = f"{self.fault.kind} of rank {self.fault.rank} at step {self.fault.step}"
        return (
            f"{self.number:>4} from {self.begins_at:>6}: {fault:<40} {self.seconds:>5.1f} s "
            f"{self.wrong or 'ok'}"
        )


def draw_fault(draw: random.Random, begins_at: int, *, life_steps: int) -> Fault:
    kind = draw.choice([*LETHAL, *HARMLESS])
    step = begins_at + draw.randrange(1, life_steps)
    return Fault(kind, draw.randrange(NUM_RANKS), step, seconds=draw.uniform(0.5, 1.5))


def run_life(folder: Path, number: int, fault: Fault, *, num_steps: int, floods: bool) -> Life:
    """Run one job, from the last checkpoint on, and look at what it leaves behind."""
    begins_at = saved_step(folder)
    (folder / "fault.json").write_text(json.dumps(asdict(fault)))
    place = folder / "place"
    place.unlink(missing_ok=True)
    strangers = None
    if floods:
        flood = [sys.executable, "tests/multiprocess/jobs/flood.py", str(folder), "500", "1"]
        strangers = subprocess.Popen(flood, cwd=ROOT)
    log_dir = folder / f"logs-{number}"
    try:
        done = launch(
            NUM_RANKS,
            ["-m", "tests.faults.chaos_job", str(folder), str(num_steps)],
            timeout_s=600,
            env={"LOFT_HVD_LOG_DIR": str(log_dir)},
        )
    finally:
        ended_at = time.time()
        if strangers is not None:
            strangers.terminate()
            strangers.wait(timeout=30)
    output = done.output
    met = re.search(r"fault at ([\d.]+)", output)
    is_lethal = met is not None and fault.kind in LETHAL
    seconds = ended_at - float(met[1]) if met is not None and is_lethal else 0.0
    wrong = []
    if done.returncode is None:
        wrong.append("did not end")
    elif (done.returncode == 0) == is_lethal:
        wrong.append(f"ended with status {done.returncode}")
    if is_lethal and not re.search(LETHAL[fault.kind].format(fault.rank), output):
        wrong.append("nobody names the rank")
    if others := accused(output) - ({fault.rank} if is_lethal else set()):
        wrong.append(f"names ranks {sorted(others)}")
    if seconds > MOST_S:
        wrong.append("too late")
    if (caps := logged_caps(log_dir)) and fault.kind != "out-of-memory":
        wrong.append(f"caps {caps}")
    if left := processes_of(folder):
        wrong.append(f"processes {left} are left")
        for process in left:
            os.kill(process, signal.SIGKILL)
    if wrong:
        (folder / f"output-{number}.txt").write_text(output)
        wrong.append(output[-3000:])
    return Life(number, begins_at, fault, seconds, "; ".join(wrong))


def saved_step(folder: Path) -> int:
    path = folder / "step"
    return int(path.read_text()) if path.exists() else 0


def processes_of(folder: Path) -> list[int]:
    """Return the processes whose command names the folder: ranks, and what they have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if str(folder) in words:
            found.append(int(path.parent.name))
    return found


def chaos(folder: Path, *, num_steps: int, seed: int, life_steps: int) -> list[Life]:
    """Train to the end through one fault after another."""
    draw = random.Random(seed)
    write_plans(folder, num_steps)
    lives: list[Life] = []
    # A job that goes on to its end has got over its fault; one more than can be needed otherwise.
    for number in range(8 + 4 * num_steps // life_steps):
        begins_at = saved_step(folder)
        fault = draw_fault(draw, begins_at, life_steps=life_steps)
        # A job that meets no lethal fault is ended by its script, so that the next one has a turn.
        until = num_steps if fault.kind in LETHAL else min(num_steps, begins_at + 2 * life_steps)
        lives.append(run_life(folder, number, fault, num_steps=until, floods=draw.random() < 0.5))
        print(lives[-1], flush=True)
        if lives[-1].wrong or saved_step(folder) >= num_steps:
            break
    return lives


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--life", type=int, default=0, help="steps a job, about; a 20th by default")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        life_steps = options.life or max(100, options.steps // 20)
        lives = chaos(folder, num_steps=options.steps, seed=options.seed, life_steps=life_steps)
        wrong = [life for life in lives if life.wrong]
        if saved_step(folder) >= options.steps:
            torch.set_num_threads(1)
            wanted = run_ranks(
                NUM_RANKS,
                lambda transport: train(transport, folder, options.steps, is_calm=True),
                timeout_s=3600,
            )
            found = set(json.loads((folder / "digests").read_text()))
            is_same = found == set(wanted) and len(found) == 1
        else:
            is_same = False
    kinds = Counter(
        life.fault.kind for life in lives if life.seconds or life.fault.kind in HARMLESS
    )
    slowest = max(life.seconds for life in lives)
    print(
        f"seed {options.seed}: {options.steps} steps in {len(lives)} jobs, {dict(kinds)}, "
        f"{len(wrong)} wrong, {slowest:.1f} s at most from a fault to the end, "
        f"{'the same bits as' if is_same else 'OTHER BITS THAN'} a calm training, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0 if is_same and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
