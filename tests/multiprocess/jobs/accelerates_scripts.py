"""Accelerate's own tests with our loader and hook: ``accelerates_scripts.py NAME...``.

Its ``Accelerator.prepare`` becomes that of a link. Sizes are unequal where a test bears that: most
gather batches of one size.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader

import loft_hvd as loft

_FOLDER = "accelerate.test_utils.scripts"


def prepare_by_links(*, is_equal: bool) -> list[int]:
    """Let ``Accelerator.prepare`` go by links; return how many models and loaders they had."""
    theirs: Any = accelerate.Accelerator.prepare
    links: dict[int, tuple[Any, Any]] = {}
    done = [0, 0]

    def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
        models = [each for each in objects if isinstance(each, torch.nn.Module)]
        loaders = [each for each in objects if isinstance(each, DataLoader)]
        is_inner = id(accelerator) in links and links[id(accelerator)][1]
        if is_inner or not (models or loaders) or len(loaders) > 1:
            return theirs(accelerator, *objects, **options)
        num_ranks = accelerator.num_processes
        total = num_ranks * (int(loaders[0].batch_size or 1) if loaders else 8)
        if accelerator.split_batches:
            total //= num_ranks
        larger = total // 2 if is_equal else 3 * total // 4
        link = loft.accelerator_link(accelerator, [larger, total - larger])
        links[id(accelerator)] = accelerator, True
        try:
            made = link.prepare(*objects)
        finally:
            links[id(accelerator)] = accelerator, False
        done[0] += len(models)
        done[1] += len(loaders)
        return made

    accelerate.Accelerator.prepare = prepare
    return done


# What is not run, and why.
LISTED = {
    "test_distributed_data_loop:test_default_ensures_even_batch_sizes": "repeats samples",
    "test_distributed_data_loop:test_can_disable_even_batches": "ranks make unequally many steps",
    "test_distributed_data_loop:test_can_join_uneven_inputs": "ranks make unequally many steps",
    "test_distributed_data_loop:test_join_can_override_even_batches": "repeats samples",
    "test_distributed_data_loop:test_join_can_override_for_mixed_type_dataloaders": "the same",
    "test_distributed_data_loop:test_pickle_accelerator": "a link is connected to other ranks",
    "test_distributed_data_loop:test_stateful_dataloader": "torchdata",
    "test_distributed_data_loop:test_stateful_dataloader_save_state": "torchdata",
    "test_ddp_comm_hook": "DDP takes one hook, and it brings its own",
    "test_merge_weights": "FSDP",
    "test_cli": "no training",
    "test_notebook": "no training",
}


def in_order(train_set: Any, _: Any, batch_size: int, __: bool = False) -> DataLoader[Any]:
    """Return the loader of a test's baseline: torch shuffles by another order than ours."""
    return DataLoader(train_set, batch_size=batch_size)


def every_sample_once(module: Any) -> None:
    """Call the test of loaders with those of its main that a plan can take over."""
    accelerator = module.create_accelerator()
    for is_shuffled in (False, True):
        loader: Any = DataLoader(
            module.DummyDataset(), shuffle=is_shuffled, batch_size=module.BATCH_SIZE, num_workers=1
        )
        module.test_data_loader(loader, accelerator)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"  # else each rank is one of one
    done = prepare_by_links(is_equal=names != ["test_script"])
    for name in names:
        module_name, _, function = name.partition(":")
        module: Any = importlib.import_module(f"{_FOLDER}.{module_name}")
        if module_name == "test_script":
            module.generate_baseline_dataloader = in_order
        if function == "test_data_loader":
            every_sample_once(module)
        else:
            getattr(module, function or "main")()
        print(f"{name} has passed, with {done[0]} models and {done[1]} loaders", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
