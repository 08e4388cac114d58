"""``accelerator_link`` where Accelerate shards by FSDP2, under torchrun."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import loft_hvd as loft
from tests.multiprocess.jobs.accelerate_fit import NUM_EPOCHS, SIZES, alone, train
from tests.support.training import make_data, make_model, max_difference

WHOLE = make_data(48)  # steps of one and of two passes end with an epoch


def sharding() -> Accelerator:
    """Return what ``Accelerator(fsdp_plugin=...)`` is on GPUs: on CPUs it ignores the plugin."""
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=50,
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    assert accelerator.is_fsdp2
    return accelerator


def fit(
    accelerator: Accelerator, rule: loft.Rule, num_passes: int, *, is_faulty: bool = False
) -> tuple[torch.nn.Module, loft.AcceleratorLink]:
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = num_passes
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    link = loft.accelerator_link(accelerator, SIZES, rule, seed=3)
    model, optimizer, loader = link.prepare(
        model, optimizer, DataLoader(WHOLE, batch_size=2, shuffle=True)
    )
    assert all(isinstance(each, DTensor) for each in model.parameters())
    if is_faulty:
        model.register_forward_pre_hook(lambda _, given: (given[0] * float("nan"),))
    train(model, optimizer, loader, accelerator, epochs=range(NUM_EPOCHS), num_passes=num_passes)
    whole = make_model()
    whole.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    return whole, link


def main() -> None:
    torch.set_num_threads(1)
    accelerator = sharding()
    for num_passes in (1, 2):
        apart = max_difference(
            fit(accelerator, loft.Mean(), num_passes)[0], alone(num_passes, WHOLE)
        )
        assert apart <= 1e-6, f"{num_passes} passes: {apart:g}"
    is_faulty = accelerator.process_index == 1
    model, link = fit(accelerator, loft.TrimmedMean(f=1), 1, is_faulty=is_faulty)
    assert all(each.isfinite().all() for each in model.parameters())
    assert link.report().num_steps > 0
    print(f"rank {accelerator.process_index} has finished", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
