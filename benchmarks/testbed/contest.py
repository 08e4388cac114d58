"""Contestants train by turns on one data set: what each host of a contest runs.

    testbed run python -m benchmarks.testbed.contest FOLDER

``FOLDER/contest.json`` says who takes part; ``FOLDER/result.json`` takes what rank 0 knows at the
end, and ``FOLDER/epochs_done`` how many epochs all have trained. Everyone trains an epoch before
the next one begins, each time in the other order: what else the machine does meets all alike. All
see the same samples in the same steps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import loft_hvd as loft
from benchmarks.testbed.shares import (
    RECORD_BYTES,
    Digits,
    Holders,
    SpreadDigits,
    enlarge,
    load_digits,
    opened,
    spread,
)

__all__ = [
    "GLOBAL_BATCH",
    "Contest",
    "Contestant",
    "Training",
    "accuracy",
    "make_model",
    "tell_epochs_done",
]

# Samples of all ranks in a step. So many that what a step costs besides, on hosts with a quarter of
# a core some 60 ms, is a small part of it.
GLOBAL_BATCH = 96
_KEPT_BYTES = RECORD_BYTES + 512  # of a sample in a store, with what describes it
_ATTACK = loft.attacks.SignFlip(scale=10)


@dataclass(frozen=True)
class Contestant:
    """One way to train."""

    name: str
    policy: str | list[int]  # of the balancer
    budget: float | None = None  # share of all samples that a rank's store may keep; None: no store
    rule: str = "mean"  # as ``loft.parse_rule`` reads it
    is_attacked: bool = False  # the last rank sends its gradients turned round, ten times as long


@dataclass(frozen=True)
class Contest:
    """Who trains, on what, for how long."""

    contestants: list[Contestant]
    shares: list[float]  # of all samples that each host has, as ``spread`` takes them
    epochs: int
    copies: int = 1  # hosts that have a sample
    num_workers: int = 0  # loader processes of a rank
    interval: int = 5  # steps between two exchanges of times
    num_samples: int | None = None  # to train on; None for all digits but those to test with

    def save(self, folder: Path) -> None:
        """Write it where the hosts look for it."""
        (folder / "contest.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> Contest:
        """Read what ``save`` wrote."""
        told = json.loads((folder / "contest.json").read_text())
        return cls(**told | {"contestants": [Contestant(**each) for each in told["contestants"]]})

    def data(self) -> tuple[Digits, Digits, Holders]:
        """Return the digits to train on, those to test with, and who has the former."""
        train, test = load_digits()
        train = Digits(train.images[: self.num_samples], train.labels[: self.num_samples])
        return train, test, spread(len(train.labels), self.shares, copies=self.copies)


def make_model() -> nn.Sequential:
    """Return a small network for large images, with the same first weights on every rank.

    Its 63 kB of gradients travel fast even over slow links. Normalisation is by sample, so that a
    result does not depend on who computes which.
    """
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 12, 7, stride=2), nn.GroupNorm(1, 12), nn.ReLU(),  # [batch, 12, 80, 80]
        nn.Conv2d(12, 12, 5, padding=2), nn.GroupNorm(1, 12), nn.ReLU(),  # the same
        nn.Conv2d(12, 12, 5, stride=2), nn.GroupNorm(1, 12), nn.ReLU(),  # [batch, 12, 38, 38]
        nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(12 * 8 * 8, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, test: Digits) -> float:
    """Return the share of the test digits that a model names rightly."""
    with torch.no_grad():
        found = [model(enlarge(part)).argmax(dim=1) for part in test.images.split(64)]
    return float((torch.cat(found) == test.labels).float().mean())


@dataclass(frozen=True)
class Epoch:
    """What an epoch was like; lists are [world_size] where nothing else is said.

    Of batches at the end of the epoch ``local`` samples were at hand and fetching and computing
    them took ``fetch_s`` and ``compute_s``, on average over the last interval that was measured.
    """

    step_s: list[float]  # of each step, by rank 0's clock, [num_steps]
    held: list[float]  # share of all samples that a rank had at hand when it began
    sizes: list[int]  # of the last step
    local: list[float]
    fetch_s: list[float]
    compute_s: list[float]


class Training:
    """A contestant's training.

    Args:
        contest: what all have in common.
        contestant: what is special.
        data: the samples.
        placement: which ranks have which samples; None where ranks may be lost.
    """

    def __init__(
        self,
        contest: Contest,
        contestant: Contestant,
        data: SpreadDigits,
        *,
        placement: loft.Placement | None,
    ) -> None:
        self.contestant, self.epochs, self._data = contestant, list[Epoch](), data
        policy = contestant.policy
        # As an object, its models can be asked afterwards.
        self.policy: str | list[int] | loft.Loft = loft.Loft() if policy == "loft" else policy
        self.balancer = loft.Balancer(
            GLOBAL_BATCH, self.policy, interval=contest.interval, max_batch=GLOBAL_BATCH
        )
        self.store: loft.SampleStore | None = None
        if contestant.budget is not None:
            num_bytes = int(contestant.budget * len(data) * _KEPT_BYTES)
            self.store = loft.SampleStore(data, memory_bytes=num_bytes)
        self.loader = loft.DataLoader(
            data if self.store is None else self.store,
            self.balancer,
            placement=placement,
            seed=3,
            drop_last=True,
            num_workers=contest.num_workers,
            persistent_workers=contest.num_workers > 0,
        )
        self.model = make_model()
        self.optimizer = loft.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.04, momentum=0.9),
            named_parameters=self.model.named_parameters(),
            rule=loft.parse_rule(contestant.rule),
            balancer=self.balancer,
        )
        if contestant.is_attacked:
            loft.attacks.attach(self.optimizer, _ATTACK, ranks=[hvd.size() - 1])

    def run_epoch(self, epoch: int, on_step: Callable[[], None] = lambda: None) -> None:
        """Train on every sample once; ``on_step`` is called after each step."""
        num_kept = 0 if self.store is None else self.store.num_kept
        held = torch.tensor([(self._data.num_held + num_kept) / len(self._data)])
        everyone = hvd.allgather(held, name="held")
        self.loader.set_epoch(epoch)
        ends = [time.monotonic()]
        for images, labels in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            ends.append(time.monotonic())
            on_step()
        times = self.balancer.times
        self.epochs.append(
            Epoch(
                step_s=np.diff(ends).tolist(),
                held=everyone.tolist(),
                sizes=list(self.loader.step_sizes.sizes),
                local=[each.local for each in times],
                fetch_s=[each.fetch_s for each in times],
                compute_s=[each.compute_s for each in times],
            )
        )

    def predict(self, sizes: Sequence[int], held: Sequence[float]) -> float | None:
        """Return what the models say of a step with other sizes and budgets, in seconds.

        Known on rank 0 alone, with the policy "loft", once times were measured.

        Args:
            sizes: samples of each rank, [world_size].
            held: share of all samples that each rank has at hand, [world_size].
        """
        self.balancer.explain()  # waits for what is worked out beside training
        fit = self.policy.fit if isinstance(self.policy, loft.Loft) else None
        if fit is None:
            return None
        hits = GLOBAL_BATCH * np.array(held)
        model = replace(fit.model, hits=hits, hit_share=np.ones_like(hits))
        return replace(fit, model=model).gain(sizes, sizes).now_s

    def result(self, test: Digits) -> dict[str, Any]:
        """Return all that is known of it, for JSON."""
        return {
            **asdict(self.contestant),
            "accuracy": accuracy(self.model, test),
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "explain": self.balancer.explain().splitlines(),
        }


def _results(trainings: Sequence[Training], test: Digits) -> list[dict[str, Any]]:
    """Return everyone's result, with what the first one's models say of the others' last steps."""
    results = []
    for training in trainings:
        last = training.epochs[-1]
        predicted_s = trainings[0].predict(last.sizes, last.held)
        results.append(training.result(test) | {"predicted_s": predicted_s})
    return results


def tell_epochs_done(folder: Path, num_epochs: int) -> None:
    """Say on rank 0, to whoever watches the folder, how many epochs are over."""
    if hvd.rank() == 0:
        (folder / "part").write_text(str(num_epochs))
        (folder / "part").rename(folder / "epochs_done")


def main(folder: Path) -> None:
    """Train all contestants, and leave the result."""
    torch.set_num_threads(1)
    contest = Contest.load(folder)
    digits, test, holders = contest.data()
    with opened(digits, holders) as data:
        hvd.init()
        placement = loft.Placement.from_function(
            lambda index: np.flatnonzero(holders[index]).tolist(), len(data)
        )
        trainings = [
            Training(contest, each, data, placement=placement) for each in contest.contestants
        ]
        for epoch in range(contest.epochs):
            for training in trainings[::-1] if epoch % 2 else trainings:
                training.run_epoch(epoch)
                if hvd.rank() == 0:
                    step_s = np.median(training.epochs[-1].step_s)
                    sys.stdout.write(
                        f"epoch {epoch + 1} {training.contestant.name}: {1e3 * step_s:.0f} ms a "
                        f"step, sizes {training.epochs[-1].sizes}\n"
                    )
                    sys.stdout.flush()
            tell_epochs_done(folder, epoch + 1)
        if hvd.rank() == 0:
            result = json.dumps({"contestants": _results(trainings, test)})
            (folder / "result.json").write_text(result)
        hvd.barrier()  # until then peers may read from this host
        for training in trainings:
            if training.store is not None:
                training.store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
