"""The benchmark of a global batch that follows the noise."""

from __future__ import annotations

import pytest
import torch

from benchmarks.auto_batch import TASKS, Job, load_text, time_to


@pytest.mark.long
def test_a_job_of_the_text_trains_and_lets_its_global_batch_grow() -> None:
    found = time_to(Job("auto", 0, task="text", most_ms=1.0))  # to the end of an epoch
    assert found.batches[0] == (0, 16)
    assert found.batches[-1][1] > 32
    assert found.goal_ms == float("inf")
    assert -2.6 < found.best < -2.3  # guessing: 2.77


def test_two_characters_tell_the_next_and_one_tells_little() -> None:
    shown, wanted, *_ = load_text()
    assert torch.equal(shown[:, 1:], wanted[:, :-1])
    letters = 16
    pairs = letters * shown[:, :-1] + shown[:, 1:]

    def loss(known: torch.Tensor, num: int) -> float:
        counts = torch.zeros(num, letters)
        counts.index_put_(
            (known.flatten(), wanted[:, 1:].flatten()), torch.tensor(1.0), accumulate=True
        )
        odds = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        share = counts / counts.sum()
        return float(-(share * odds.clamp(min=1e-9).log()).sum())

    assert loss(shown[:, 1:], letters) > 2.4
    assert loss(pairs, letters**2) < 1.7 < -TASKS["text"].goal
