"""Training that goes on when a host dies: what each host of such a job runs.

    testbed run --min-np 3 --np 4 --max-np 4 python -m benchmarks.testbed.survivors FOLDER

``FOLDER/contest.json`` names one contestant; ``FOLDER/result.json`` takes what rank 0 knows at the
end. Where hosts may be lost a ``Placement`` cannot name ranks, so none is given, and each sample
has to be on two hosts. The state is committed after each step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import loft_hvd as loft
from benchmarks.testbed.contest import Contest, Training, accuracy, tell_epochs_done
from benchmarks.testbed.shares import opened


def main(folder: Path) -> None:
    """Train, whoever is lost, and leave the result."""
    torch.set_num_threads(1)
    contest = Contest.load(folder)
    digits, test, holders = contest.data()
    with opened(digits, holders) as data:
        hvd.init()
        training = Training(contest, contest.contestants[0], data, placement=None)
        state = loft.elastic.State(
            training.model,
            training.optimizer,
            balancer=training.balancer,
            loader=training.loader,
            epoch=0,
        )
        ends: list[tuple[float, int]] = []  # of steps: when, and of how many ranks

        def on_step() -> None:
            state.commit()
            ends.append((time.monotonic(), hvd.size()))

        @hvd.elastic.run  # type: ignore[untyped-decorator]  # Horovod has no types
        def train(state: Any) -> None:
            while state.epoch < contest.epochs:
                training.run_epoch(state.epoch, on_step)
                state.epoch += 1
                tell_epochs_done(folder, state.epoch)

        train(state)
        if hvd.rank() == 0:
            result = {
                "accuracy": accuracy(training.model, test),
                "ends": ends,
                "sizes": [list(plan.sizes) for plan in training.balancer.history],
            }
            (folder / "result.json").write_text(json.dumps(result))
        hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
