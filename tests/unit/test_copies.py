"""What is connected to other ranks is not copied in silence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import loft_hvd as loft
from loft_hvd.errors import UsageError
from loft_hvd.transport.local import LocalWorld

WAYS_OUT = {
    "optimizer": "copy its state_dict(), or wrap an optimizer of a copied model",
    "balancer": "its state_dict() can be, or make another Balancer",
    "loader": "its state_dict() can be, or make another one",
    "stream": "its state_dict() can be, or make another one",
    "sampler": "its state_dict() can be, or make another one",
    "hook": "make another one by loft.ddp_hook()",
}


def made(what: str) -> Any:
    end = LocalWorld(1).transport(0)
    balancer = loft.Balancer(8, "report", transport=end)
    parameters = torch.nn.Linear(2, 1).parameters()
    if what == "optimizer":
        return loft.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), transport=end)
    if what == "hook":
        return loft.ddp_hook(loft.Mean(), transport=end)
    return {
        "balancer": balancer,
        "loader": loft.DataLoader(TensorDataset(torch.zeros(80, 2)), balancer),
        "stream": loft.StreamLoader(iter([]), balancer),
        "sampler": loft.BatchSampler(80, balancer),
    }[what]


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
@pytest.mark.parametrize("what", WAYS_OUT)
def test_a_copy_is_refused_with_the_way_out(what: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match="cannot be copied or pickled") as caught:
        call(made(what))
    assert WAYS_OUT[what] in str(caught.value)
