"""What ``fsdp_hook`` refuses before it meets other ranks; with ranks: multiprocess/test_fsdp.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.transport.local import LocalWorld


class DeepSpeedEngine(torch.nn.Module):
    """Stands for DeepSpeed's, which is told by its name."""


class FullyShardedDataParallel(torch.nn.Module):
    """Stands for FSDP1's, which is told by its name."""


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("median", {}, r"rule='median' is of type str; pass one such as"),
        (loft.Mean(), {"scope": "auto"}, r'scope="auto" is not offered, as it would hold'),
        (loft.Median(), {"scope": "model"}, r'scope="model" is for rules that judge rows by their'),
        (loft.Mean(), {"quarantine": True}, r"quarantine= needs a robust rule"),
        (
            loft.Mean(),
            {},
            r"fsdp_hook: no module of the model is sharded; call torch's fully_shard",
        ),
    ],
)
def test_fsdp_hook_checks_what_it_is_given(rule: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=said):
        loft.fsdp_hook(torch.nn.Linear(2, 2), rule, **options)


def test_micro_batches_are_refused_as_ranks_gather_in_each_pass() -> None:
    ends = LocalWorld(1).transport(0)
    balancer = loft.Balancer(8, micro_batches=True, max_batch=2, transport=ends)
    with pytest.raises(ArgumentError, match=r"ranks make different numbers of backward passes"):
        loft.fsdp_hook(torch.nn.Linear(2, 2), balancer=balancer)


@pytest.mark.parametrize("kind", [DeepSpeedEngine, FullyShardedDataParallel])
def test_other_ways_to_shard_are_refused_with_the_line_for_exact_weights(
    kind: type[torch.nn.Module],
) -> None:
    said = rf"the model comes from {kind.__name__}: .*balancer\.weigh\(loss\)\.backward\(\) gives"
    for model in (kind(), torch.nn.Sequential(kind())):
        with pytest.raises(ArgumentTypeError, match=said):
            loft.fsdp_hook(model)


def test_a_torch_without_these_parts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule")
    with pytest.raises(UsageError, match=r"fsdp_hook: FSDP2 of torch 2.* use torch 2\.13"):
        loft.fsdp_hook(torch.nn.Linear(2, 2))


def test_a_model_is_a_module() -> None:
    with pytest.raises(ArgumentTypeError, match=r"model=\[\] is of type list; give the module"):
        loft.fsdp_hook([])  # type: ignore[arg-type]  # that is the point
