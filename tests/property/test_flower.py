"""The strategy of docs/federated.md in Flower's own rounds. ``make test-all`` brings Flower along.

Flower's network is replaced by calls: its strategy, its messages and its records are the real ones.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loft_hvd as loft
from loft_hvd.errors import AggregationError
from tests.support.pages import blocks_of, read_page

if importlib.util.find_spec("flwr") is None:
    pytest.skip("no flwr here; make test-all brings it", allow_module_level=True)

_FIRST_LINE = "from flwr.app import ArrayRecord"
_SAMPLES = [517, 200, 150, 80, 47, 6]
_WRONG = 0  # the client with more than half of the samples
app: Any = importlib.import_module("flwr.app")
grids: Any = importlib.import_module("flwr.serverapp")


def _page() -> dict[str, Any]:
    """Run the page's block and return its names."""
    block = next(b for b in blocks_of(read_page("federated.md")) if b.first_line == _FIRST_LINE)
    found: dict[str, Any] = {}
    exec(block.text, found)
    return found


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def _data(client: int, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(client))
    return x, (x.sum(1) > 0).long()


class _Clients(grids.Grid):  # type: ignore[misc]  # importlib gives no types
    """A grid whose nodes train at once, in this process."""

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    @property
    def run(self) -> object:
        raise NotImplementedError

    def create_message(self, *_: object, **__: object) -> object:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return range(len(_SAMPLES))

    def send_and_receive(
        self, messages: Iterable[Any], *, timeout: float | None = None
    ) -> Iterable[Any]:
        return [self._train(message) for message in messages]

    def _train(self, message: Any) -> Any:
        client = message.metadata.dst_node_id
        model = _model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        x, y = _data(client, max(_SAMPLES[client], 12))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for xs, ys in zip(x.split(12), y.split(12), strict=True):
            if len(xs) > 1:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(xs), ys).backward()
                optimizer.step()
        state = copy.deepcopy(model.state_dict())
        if client == _WRONG:
            for value in state.values():
                value *= -1000  # a right model times 1,000 decides as it did
        content = {
            "arrays": app.ArrayRecord(state),
            "metrics": app.MetricRecord({"num-examples": _SAMPLES[client], "loss": 0.5}),
        }
        return app.Message(app.RecordDict(content), reply_to=message)


def _accuracy(arrays: Any) -> float:
    model = _model()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = _data(99, 500)
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


@pytest.fixture(autouse=True)
def _run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be the server of a run, as Flower's launcher does."""
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    logging.getLogger("flwr").setLevel(logging.ERROR)


def _start(strategy: Any) -> Any:
    start = app.ArrayRecord(_model().state_dict())
    return strategy.start(_Clients(), initial_arrays=start, num_rounds=3)


def test_rounds_of_flower_survive_the_client_with_most_samples() -> None:
    page = _page()
    result = _start(page["strategy"])
    assert _accuracy(result.arrays) > 0.9
    assert _accuracy(_start(page["FedAvg"](fraction_evaluate=0.0)).arrays) < 0.8
    model = _model().state_dict()
    for key, value in result.arrays.to_torch_state_dict().items():
        assert (value.dtype, value.shape) == (model[key].dtype, model[key].shape)
    assert result.train_metrics_clientapp[3]["loss"] == pytest.approx(0.5)


def test_shares_that_the_rule_cannot_defend_end_the_round_and_name_the_node() -> None:
    with pytest.raises(AggregationError, match=r"client 0 holds 51\.7% of the weight"):
        _start(_page()["FedRobust"](loft.Median(), fraction_evaluate=0.0))
