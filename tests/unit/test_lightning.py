"""The callback for Lightning on one device; over ranks: multiprocess/test_frameworks.py."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loft_hvd as loft
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from tests.support.training import make_data, make_model

DATA = make_data(20)


def make(**options: Any) -> tuple[loft.LoftCallback, Any]:
    callback = loft.lightning_callback(lambda: loft.Balancer(8, policy="report"), **options)
    return callback, callback.loader(lambda balancer: loft.DataLoader(DATA, balancer, seed=3))


def test_without_lightning_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"not installed; pip install 'loft-hvd\[lightning\]'"):
        make()


lightning_only = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_lightning") is None, reason="it is not installed"
)


@lightning_only
@pytest.mark.parametrize(
    "given", [{}, {"scope": "model", "worker_momentum": 0.5, "timeout_s": 3.0}], ids=str
)
def test_the_hook_gets_what_the_callback_was_given(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: dict[str, Any] = {}
    monkeypatch.setattr("loft_hvd.lightning.ddp_hook", lambda *_, **options: got.update(options))
    callback, _ = make(**given)
    callback._make_hook(loft.Balancer(8, policy="report"), names=[], scaler=None)
    # None for what suits the rule, as with the hook itself.
    wanted = {"scope": None, "worker_momentum": None, "timeout_s": None, **given}
    assert {name: got[name] for name in wanted} == wanted


@lightning_only
@pytest.mark.filterwarnings("ignore")  # what Lightning has to say of small runs and of torch
class TestOneDevice:
    def fit(self, folder: Path, callback: loft.LoftCallback, loader: Any, **options: Any) -> Any:
        pl: Any = importlib.import_module("pytorch_lightning")

        class Module(pl.LightningModule):  # type: ignore[misc]  # Any, for mypy
            def __init__(self) -> None:
                super().__init__()
                self.model = make_model()
                self.epochs: list[list[float]] = []

            def on_train_epoch_start(self) -> None:
                self.epochs.append([])

            def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
                self.epochs[-1] += batch[0][:, 0].tolist()
                return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=0.05)

        module = Module()
        usual = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
        }
        ckpt_path = options.pop("ckpt_path", None)
        trainer = pl.Trainer(callbacks=[callback], **(usual | options))
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        return module

    def test_each_epoch_has_every_sample_in_an_order_of_its_own(self, tmp_path: Path) -> None:
        callback, loader = make()
        first, second = self.fit(tmp_path, callback, loader).epochs
        wanted = sorted(DATA.tensors[0][:, 0].tolist())
        assert (sorted(first), sorted(second)) == (wanted, wanted)
        assert first != second
        assert "no ranks have trained" in str(callback.report())

    def test_a_second_fit_tells_nothing_again(self, tmp_path: Path) -> None:
        loggers: Any = importlib.import_module("pytorch_lightning.loggers")
        callback, loader = make()
        told = []
        for name in ("first", "second"):
            logger = loggers.CSVLogger(tmp_path, name=name)
            self.fit(tmp_path, callback, loader, logger=logger)
            told.append((Path(logger.log_dir) / "metrics.csv").exists())
        assert told == [True, False]  # the first plan; nothing has come to it

    @pytest.mark.parametrize(
        ("damage", "says"),
        [
            (lambda state: {"elsewhere": state["balancer"]}, r"needs keys \['balancer'\], but got"),
            (lambda state: {**state, "loader": {}}, r"needs keys \['balancer'\], but got"),
            (lambda state: [state], r"LoftCallback needs a dict, but got"),
            (lambda state: {"balancer": 7}, r"Balancer needs a dict, but got 7"),
            (
                lambda state: {"balancer": {**state["balancer"], "num_steps": "4"}},
                r"num_steps .*'4'",
            ),
        ],
    )
    def test_a_damaged_checkpoint_is_refused_whole(
        self, damage: Callable[[Any], Any], says: str, tmp_path: Path
    ) -> None:
        callback, loader = make()
        path = tmp_path / "saved.ckpt"
        self.fit(tmp_path, callback, loader, max_epochs=1).trainer.save_checkpoint(path)
        checkpoint = torch.load(path, weights_only=False)
        states = checkpoint["callbacks"]
        states["loft_hvd"] = damage(states["loft_hvd"])
        torch.save(checkpoint, path)
        callback, loader = make()
        with pytest.raises(
            ArgumentError, match=f"load_state_dict: .*{says}.*; give what state_dict"
        ):
            self.fit(tmp_path, callback, loader, ckpt_path=path)
        assert callback.balancer.next_step == 0

    def test_batches_that_the_plan_does_not_know_are_refused(self, tmp_path: Path) -> None:
        callback, _ = make()
        with pytest.raises(ArgumentTypeError, match=r"come from a DataLoader, .* callback\.loader"):
            self.fit(tmp_path, callback, torch.utils.data.DataLoader(DATA))
        _, others = make()
        with pytest.raises(UsageError, match="has not started yet, or lacks this callback"):
            self.fit(tmp_path, callback, others)

    def test_a_loader_without_a_length_is_refused(self, tmp_path: Path) -> None:
        callback, _ = make()

        def stream(balancer: loft.Balancer) -> Any:
            return loft.StreamLoader(range(20), balancer)

        made = callback.loader(stream)
        with pytest.raises(ArgumentTypeError, match=r"a StreamLoader was made; .* a batch ahead"):
            self.fit(tmp_path, callback, made)

    def test_the_balancer_is_asked_for_too_early(self) -> None:
        _, loader = make()
        with pytest.raises(UsageError, match=r"has not started yet.*Trainer\(callbacks="):
            len(loader)
