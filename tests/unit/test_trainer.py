"""The callback for the Trainer on one rank; over ranks: multiprocess/test_frameworks.py."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.balance.plan import Counted
from loft_hvd.errors import ArgumentError, ArgumentTypeError, PlanError, UsageError

IGNORED = -100


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match="not installed; pip install transformers accelerate"):
        loft.trainer_callback(None)


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), float(at)), "labels": torch.tensor([at, IGNORED])}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from map(Numbers().__getitem__, range(22))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.linear(x) / 20).square().mean()}


@pytest.mark.long  # transformers alone takes 5 s and more to import
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
@pytest.mark.filterwarnings("ignore")  # what transformers has to say of torch and of Python
class TestOneRank:
    def make(self, folder: Path, *, of: str = "Trainer", data: Any = None, **options: Any) -> Any:
        library: Any = importlib.import_module("transformers")
        given = {"output_dir": str(folder), "report_to": "none", "use_cpu": True, **options}
        given = {"save_strategy": "no", "lr_scheduler_type": "constant", **given}
        own = type("OwnLoss", (library.Trainer,), {"compute_loss": lambda *_, **__: None})
        kind = library.Trainer if of == "Trainer" else own
        return kind(
            model=Model(),
            args=library.TrainingArguments(disable_tqdm=True, **given),
            train_dataset=Numbers() if data is None else data,
        )

    def test_what_it_cannot_serve_is_refused(self, tmp_path: Path) -> None:
        trainer = self.make(tmp_path)
        with pytest.raises(ArgumentTypeError, match="trainer is a Linear; give the transformers"):
            loft.trainer_callback(torch.nn.Linear(1, 1))
        with pytest.raises(ArgumentError, match="OwnLoss computes its own loss"):
            loft.trainer_callback(self.make(tmp_path, of="own"))
        with pytest.raises(PlanError, match="one size a rank"):
            loft.trainer_callback(trainer, [4, 4])
        with pytest.raises(ArgumentError, match=r"raise gradient_accumulation_steps"):
            loft.trainer_callback(trainer, loft.Balancer(8, max_batch=4, micro_batches=True))
        with pytest.raises(ArgumentError, match="auto_find_batch_size=True lowers"):
            loft.trainer_callback(self.make(tmp_path, auto_find_batch_size=True), [4])
        loft.trainer_callback(trainer, [4])
        with pytest.raises(ArgumentError, match=r"has a callback of loft_hvd already"):
            loft.trainer_callback(trainer, [4])

    def test_batches_that_a_plan_cannot_choose_are_refused(self, tmp_path: Path) -> None:
        stream = self.make(tmp_path, data=Stream(), max_steps=1)
        loft.trainer_callback(stream, [4])
        with pytest.raises(ArgumentError, match=r"use loft\.StreamLoader"):
            stream.train()
        grouped = self.make(tmp_path, train_sampling_strategy="group_by_length")
        loft.trainer_callback(grouped, [4])
        with pytest.raises(ArgumentError, match="use 'random' or 'sequential'"):
            grouped.train()

    def test_sizes_are_the_plans_else_those_of_the_arguments(self, tmp_path: Path) -> None:
        trainer = self.make(tmp_path, per_device_train_batch_size=6)
        callback = loft.trainer_callback(trainer)
        assert callback.balancer.global_batch_size == 6
        listed = loft.trainer_callback(self.make(tmp_path), [5])
        loader = listed._trainer.get_train_dataloader()
        assert len(loader) == 5  # of 22 samples
        assert [len(batch["labels"]) for batch in loader] == [5, 5, 5, 5, 2]

    @pytest.mark.parametrize("num_passes", [1, 2])
    def test_a_run_goes_on_where_it_was_saved(self, tmp_path: Path, num_passes: int) -> None:
        def train(folder: Path, resume: str | None = None, **options: Any) -> Any:
            torch.manual_seed(0)
            trainer = self.make(
                folder, num_train_epochs=2, gradient_accumulation_steps=num_passes, **options
            )
            loft.trainer_callback(trainer, [4])
            trainer.train(resume_from_checkpoint=resume)
            return trainer

        whole = train(tmp_path / "whole")
        train(tmp_path / "part", save_strategy="steps", save_steps=2, max_steps=2)
        rest = train(tmp_path / "part", str(tmp_path / "part" / "checkpoint-2"))
        assert rest.state.global_step == whole.state.global_step == 2 * (6 // num_passes)
        for got, want in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
            torch.testing.assert_close(got, want)
        bare = self.make(tmp_path / "bare", save_strategy="steps", save_steps=1, max_steps=1)
        bare.train()
        loft.trainer_callback(bare, [4])
        with pytest.raises(ArgumentError, match=r"ignore_data_skip=True\) goes on"):
            bare.train(resume_from_checkpoint=str(tmp_path / "bare" / "checkpoint-1"))
        other = self.make(tmp_path / "part", num_train_epochs=2)
        loft.trainer_callback(other, [5])
        with pytest.raises(ArgumentError, match="Give sizes that add up to 4"):
            other.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-2"))

    def test_a_loss_that_the_trainer_has_weighed_is_not_weighed_again(self, tmp_path: Path) -> None:
        trainer = self.make(tmp_path)
        callback = loft.trainer_callback(trainer, [4])
        inputs = {"labels": torch.tensor([[1, 2, IGNORED], [3, IGNORED, IGNORED]])}

        def counted(*, num_items: Any, accepts: bool, averages: bool) -> Counted | None:
            trainer.model_accepts_loss_kwargs = accepts
            trainer.args.average_tokens_across_devices = averages
            callback._count(inputs, num_items)
            return callback.balancer.take_count()

        # Divided by the tokens of all ranks, of which there is one here, or of this one.
        items = torch.tensor(12)
        weighed = Counted(3, 12.0, is_mean=False)
        assert counted(num_items=items, accepts=True, averages=True) == weighed
        assert counted(num_items=items, accepts=True, averages=False) == weighed
        # Means over a batch's labels.
        assert counted(num_items=None, accepts=True, averages=True) == Counted(3, 3.0, True)
        assert counted(num_items=items, accepts=False, averages=True) == Counted(3, 3.0, True)
        # Samples, as planned.
        inputs = {"labels": torch.zeros(2, 3)}
        assert counted(num_items=None, accepts=True, averages=True) is None
        inputs = {}
        assert counted(num_items=None, accepts=True, averages=True) is None
