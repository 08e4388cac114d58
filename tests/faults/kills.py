"""Kill ranks of small jobs, and look for false names.

    python -m tests.faults.kills 200             # trials 0 to 199
    python -m tests.faults.kills 50 --first 150  # 150 to 199

Each trial starts three ranks with a balancer and a run log, kills one or two of them at a random
step by SIGKILL, and reads what the others have said. Wrong is an honest rank that is named as the
one that has ended or failed or ran out of memory, a ``cap`` line in the run log, a killed rank that
nobody names (of those that die together with rank 0, rank 0 alone has to be), and a job that ends
as if all were well, or takes longer than it may. The seed of a trial is its number, so one that
went wrong can be run again.
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from loft_hvd.balance.memory import logged_caps
from tests.support.launch import launch

__all__ = ["Outcome", "run_trial"]

JOB = "tests/multiprocess/jobs/killed.py"
NUM_RANKS, NUM_STEPS = 3, 12
# Who is accused, in all the words that errors, notes and logs have for it.
_ACCUSATIONS = (
    r"rank (\d+) \(process \d+ on [^)]+\) "
    r"(?:has (?:ended|been silent|failed)|is (?:gone|frozen|cut off)|runs, but its Python)",
    r"rank (\d+) ran out of memory",
    r"ranks \[([\d, ]+)\] have (?:ended their scripts|not come to it)",
    r"(?:ranks take other steps:|differs on) ranks \[([\d, ]+)\]",
)
LIMIT_S = 8.0  # from the kill until the job has ended, on idle cores


@dataclass(frozen=True)
class Outcome:
    """How a trial went."""

    seed: int
    rule: str
    killed: tuple[int, ...]
    named: frozenset[int]
    num_caps: int
    seconds: float  # from the kill to the end of the job
    returncode: int | None  # of the launcher; None where it had to be ended
    output: str

    @property
    def has_run(self) -> bool:
        """Whether the job came to its fault within its limit."""
        return not math.isnan(self.seconds)

    @property
    def is_right(self) -> bool:
        # Links lead to rank 0: who dies together with it is not seen by the others.
        wanted = frozenset([0]) if 0 in self.killed else frozenset(self.killed)
        is_named = wanted <= self.named <= frozenset(self.killed)
        return is_named and self.num_caps == 0 and self.returncode not in (0, None)

    @property
    def is_late(self) -> bool:
        """Whether it took longer than it may on idle cores."""
        return not self.seconds <= LIMIT_S

    def __str__(self) -> str:
        verdict = "ok" if self.is_right else "WRONG" if self.has_run else "NOT RUN"
        verdict += " LATE" * (self.has_run and self.is_late)
        return (
            f"{self.seed:>5} {self.rule:<7} {self.killed!s:<8} {sorted(self.named)!s:<10} "
            f"{self.num_caps:>4} {self.seconds:>6.1f} {verdict}"
        )


def accused(output: str) -> frozenset[int]:
    """Return every rank that an output names as one that has ended, failed or had no memory."""
    found = [match for pattern in _ACCUSATIONS for match in re.findall(pattern, output)]
    return frozenset(int(rank) for ranks in found for rank in ranks.split(","))


def run_trial(seed: int, *, timeout_s: float = 120.0) -> Outcome:
    """Run one trial."""
    draw = random.Random(seed)
    rule = draw.choice(("mean", "median"))
    killed = tuple(sorted(draw.sample(range(NUM_RANKS), draw.choice((1, 1, 2)))))
    step = draw.randrange(1, NUM_STEPS)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [JOB, rule, str(step), ",".join(map(str, killed))]
        done = launch(NUM_RANKS, arguments, timeout_s=timeout_s, env={"LOFT_HVD_LOG_DIR": folder})
        ended_at, num_caps = time.time(), len(logged_caps(Path(folder)))
    fault = re.search(r"fault at ([\d.]+)", done.output)
    seconds = ended_at - float(fault[1]) if fault else float("nan")
    named, code = accused(done.output), done.returncode
    return Outcome(seed, rule, killed, named, num_caps, seconds, code, done.output)


def main(num_trials: int, first: int) -> int:
    print(f"{'seed':>5} {'rule':<7} {'killed':<8} {'named':<10} {'caps':>4} {'s':>6}")
    outcomes = []
    for seed in range(first, first + num_trials):
        outcomes.append(run_trial(seed))
        print(outcomes[-1], flush=True)
    wrong = [outcome for outcome in outcomes if not outcome.is_right or outcome.is_late]
    false_names = sum(len(outcome.named - set(outcome.killed)) for outcome in outcomes)
    slowest = max((each.seconds for each in outcomes if each.has_run), default=math.nan)
    num_not_run = sum(not outcome.has_run for outcome in outcomes)
    unnamed = sum(
        len(set(outcome.killed) - outcome.named) for outcome in outcomes if outcome.has_run
    )
    print(
        f"{num_trials - num_not_run} kills: {false_names} false names, {unnamed} ranks not named, "
        f"{sum(outcome.num_caps for outcome in outcomes)} cap lines, "
        f"{slowest:.1f} s at most; {num_not_run} did not start"
    )
    for outcome in wrong:
        print(f"---- seed {outcome.seed}\n{outcome.output[-4000:]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("number", nargs="?", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first trial")
    options = parser.parse_args()
    sys.exit(main(options.number, options.first))
