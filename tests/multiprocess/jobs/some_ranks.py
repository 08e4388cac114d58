"""Training over a process set of some ranks: ``some_ranks.py``, on 3 ranks.

Ranks outside of a set make fewer calls without a name, and Horovod numbers those on each rank by
itself. So everything here has a name, and no other test shares this world.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor

import loft_hvd as loft
from tests.support.training import OPTIMIZERS, make_data, make_model, max_difference

MEMBERS, NUM_STEPS = [0, 2], 4


def backward(model: torch.nn.Module) -> None:
    """Compute the gradients of this rank's own part of the data."""
    x, y = make_data(24).tensors
    mine = slice(hvd.rank(), None, hvd.size())
    F.mse_loss(model(x[mine]), y[mine]).backward()


def gradients_of(model: torch.nn.Module) -> Tensor:
    """Return a copy of all gradients, [numel]."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check(some: hvd.ProcessSet, rule: loft.Rule, *, kind: str, num_passes: int) -> None:
    """Compare ``hvd.DistributedOptimizer`` over a set, wrapped, with the direct form."""
    options = {"process_set": some, "backward_passes_per_step": num_passes}
    inner, plain = make_model(), make_model()
    horovods = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](inner.parameters()), inner.named_parameters(), **options
    )
    wrapped = loft.DistributedOptimizer(horovods, rule=rule)
    direct = loft.DistributedOptimizer(
        OPTIMIZERS[kind](plain.parameters()), plain.named_parameters(), rule=rule, **options
    )
    is_member = hvd.rank() in MEMBERS
    assert wrapped.world_size == direct.world_size == (len(MEMBERS) if is_member else 0)
    alone = make_model()
    for step in range(NUM_STEPS):
        alone.load_state_dict(inner.state_dict())
        alone.zero_grad()
        for _ in range(num_passes):
            backward(alone)
        row = gradients_of(alone).view(1, -1)
        # [world_size, numel]: each rank's own.
        rows = hvd.allgather(row, name=f"rows.{rule}.{num_passes}.{step}")
        wanted = rows[MEMBERS].mean(dim=0) if is_member else rows[hvd.rank()]
        assert max(float((each - wanted).abs().max()) for each in rows) > 1e-3
        for model, optimizer in ((inner, wrapped), (plain, direct)):
            optimizer.zero_grad()
            for _ in range(num_passes):
                backward(model)
            assert not horovods._handles  # one reduction a step: Horovod's own has not begun
            optimizer.step()
        torch.testing.assert_close(gradients_of(inner), wanted, rtol=0, atol=1e-6)
    assert max_difference(inner, plain) <= 1e-6
    # Members have one model, and the rank outside another.
    weights = torch.cat([value.detach().flatten() for value in inner.parameters()])
    everyone = hvd.allgather(weights.view(1, -1), name=f"weights.{rule}.{num_passes}")
    assert torch.equal(everyone[0], everyone[2])
    assert not torch.equal(everyone[0], everyone[1])


def main() -> None:
    some = hvd.ProcessSet(MEMBERS)
    hvd.init(process_sets=[some])
    torch.set_num_threads(1)
    # Of two rows a median is their mean.
    for rule in (loft.Mean(), loft.Median()):
        check(some, rule, kind="sgd", num_passes=1)
    check(some, loft.Mean(), kind="adam", num_passes=2)
    print(f"rank {hvd.rank()} has finished", flush=True)


if __name__ == "__main__":
    main()
