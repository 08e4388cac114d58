"""The Trainer of transformers with the callback, under torchrun: ``trainer_fit.py WHAT FOLDER``."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import loft_hvd as loft
from loft_hvd.transport.local import LocalWorld

SIZES = {1: [21], 2: [9, 12], 3: [4, 2, 15], 4: [2, 2, 2, 15]}
NUM_EPOCHS = 2
BATCHES = 7  # of an epoch, the last of which has 8 samples
EPSILON = 1e-3  # a key's bias has the gradient 0 but for rounding, and Adam divides by that
LENGTH, VOCABULARY, IGNORED = 12, 50, -100
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Made texts, of which a random part is to be learnt; notes which were asked for."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(3)
        shape = (21 * (BATCHES - 1) + 8, LENGTH)
        self.ids = torch.randint(0, VOCABULARY, shape, generator=random)
        kept = torch.rand(len(self.ids), 1, generator=random) ** 3
        self.labels = self.ids.masked_fill(
            torch.rand(shape, generator=random) > kept + 0.02, IGNORED
        )
        self.labels[:, 0] = IGNORED  # never predicted; of GPT-2 transformers 5.24 counts it
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        self.asked.append(at)
        return {"input_ids": self.ids[at], "labels": self.labels[at]}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def counted(labels: torch.Tensor) -> int:
    return int((labels[..., 1:] != IGNORED).sum())


def alone(num_passes: int) -> torch.nn.Module:
    """Train in this process on the same global batches, each step on the mean over its tokens."""
    model: Any = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON, weight_decay=0.0)
    loader = loft.DataLoader(
        Texts(), loft.Balancer(21, transport=LocalWorld(1).transport(0)), seed=42
    )
    for epoch in range(NUM_EPOCHS):
        loader.set_epoch(epoch)
        batches = list(loader)
        for first in range(0, BATCHES, num_passes):
            step = batches[first : first + num_passes]
            total = sum(counted(batch["labels"]) for batch in step)
            optimizer.zero_grad()
            for batch in step:
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
                (
                    torch.nn.functional.cross_entropy(
                        logits,
                        batch["labels"][:, 1:].flatten(),
                        ignore_index=IGNORED,
                        reduction="sum",
                    )
                    / total
                ).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    trained: torch.nn.Module = model
    return trained


def fit(
    folder: Path,
    *,
    num_passes: int = 1,
    resume: str | None = None,
    rule: Any = None,
    sizes: Any = SIZES[WORLD],
    faulty: int | None = None,
    **options: Any,
) -> tuple[Any, Any, Texts]:
    """Train as a user's script does, and return trainer, callback and data."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": NUM_EPOCHS,
        "gradient_accumulation_steps": num_passes,
        "learning_rate": 1e-2,
        "adam_epsilon": EPSILON,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **options,
    }
    texts, model = Texts(), make_model()
    trainer = Trainer(
        model=model, args=TrainingArguments(**given), train_dataset=texts, eval_dataset=texts
    )
    callback = loft.trainer_callback(trainer, sizes, rule)
    if faulty == RANK:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: -1e6 * gradient)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback, texts


def apart(trainer: Any, wanted: torch.nn.Module) -> float:
    pairs = zip(trainer.model.parameters(), wanted.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def check_fit(folder: Path) -> None:
    for num_passes in (1, 2):
        wanted = alone(num_passes)
        for averages in (True, False):
            trainer, _, _ = fit(
                folder, num_passes=num_passes, average_tokens_across_devices=averages
            )
            found = apart(trainer, wanted)
            print(f"{num_passes} passes, average_tokens={averages}: {found:.1e}", flush=True)
            assert found <= 1e-5, found


def check_watched(folder: Path) -> None:
    """Let sizes follow the ranks, and a rule bear a rank that sends garbage."""
    trainer, callback, _ = fit(
        folder, sizes=None, per_device_train_batch_size=5, rule=loft.TrimmedMean(1), faulty=1
    )
    assert callback.balancer.global_batch_size == 5 * WORLD
    assert len(callback.report().workers) == WORLD
    found = apart(trainer, make_model())
    assert 0 < found < 1, found


def check_begin(folder: Path) -> None:
    """Leave in the middle of the first epoch, with a checkpoint; evaluate on the way."""
    trainer, _, _ = fit(
        folder,
        save_strategy="steps",
        save_steps=3,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=2,
    )
    assert trainer.state.global_step == 3
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    assert "loft_hvd" in state["stateful_callbacks"]


def check_resume(folder: Path) -> None:
    """Go on with another number of ranks: every sample once, and the same weights."""
    checkpoint = str(folder / "checkpoint-3")
    trainer, _, texts = fit(folder, resume=checkpoint)
    assert trainer.state.global_step == NUM_EPOCHS * BATCHES
    found = apart(trainer, alone(1))
    print(f"resumed: {found:.1e}", flush=True)
    assert found <= 1e-5, found
    rows: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(rows, texts.asked)
    # What is left of the first epoch, 4 of 7 batches, and the second one: each sample once.
    times = Counter(at for row in rows for at in row)
    assert sorted(times) == list(range(len(texts)))
    assert Counter(times.values()) == {2: 3 * 21 + 8, 1: 3 * 21}, Counter(times.values())


def main(what: str, folder: str) -> None:
    torch.set_num_threads(1)
    checks = {
        "fit": check_fit,
        "watched": check_watched,
        "begin": check_begin,
        "resume": check_resume,
    }
    for each in what.split(","):
        checks[each](Path(folder))
    print(f"rank {RANK} has finished {what}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
