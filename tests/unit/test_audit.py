"""Audits of shard owners: liars are named, honest ranks never; who audits whom nobody can know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import loft_hvd as loft
from loft_hvd.errors import AuditError, LoftError, MismatchError
from loft_hvd.pipeline import selection
from loft_hvd.pipeline.audit import Audit
from loft_hvd.transport.base import Channel
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.passes import Sizes
from tests.support.recording import RecordingTransport
from tests.support.wrapped import give_gradients, make_parameters, make_reducer, wrap
from tests.unit.test_reducer import backward

SHAPES = [(30, 40), (7,), (0,), (5000,), (2, 3, 4)]
RULES: list[loft.Rule] = [loft.TrimmedMean(1), loft.Median(), loft.Robust(1), loft.MultiKrum(1)]
SEES_ROWS = [rule for rule in RULES if rule.sees_rows]


def some_row(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(end: LocalTransport, rule: loft.Rule, *, num_steps: int, **settings: Any) -> Audit:
    """Take some steps, all of them audited unless ``audit`` tells else."""
    params = make_parameters(SHAPES)
    settings = {"bucket_bytes": 9000, "audit": end.world_size, **settings}
    reducer = make_reducer(params, end, rule, **settings)
    assert reducer.audit is not None
    for step in range(num_steps):
        for parameter in params:
            parameter.grad = None
        backward(params, some_row(end.rank, step))
        reducer.synchronize()
    reducer.detach()
    return reducer.audit


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize(
    ("rule", "scope"),
    [*((rule, "shard") for rule in RULES), *((rule, "model") for rule in SEES_ROWS)],
    ids=str,
)
def test_honest_owners_pass_every_audit(rule: loft.Rule, scope: str, world_size: int) -> None:
    def work(end: LocalTransport) -> tuple[int, int]:
        audit = train(end, rule, num_steps=8, scope=scope)
        return audit.num_audited, audit.num_steps

    assert run_ranks(world_size, work) == [(8, 8)] * world_size


@pytest.mark.parametrize("wire", [loft.Compression.bf16, loft.Compression.fp16])
@pytest.mark.parametrize("rule", [loft.TrimmedMean(1), loft.Robust(1)], ids=str)
def test_what_travels_in_16_bits_is_audited_in_16_bits(
    rule: loft.Rule, wire: loft.Compression
) -> None:
    run_ranks(4, lambda end: train(end, rule, num_steps=4, wire=wire))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_each_rank_is_drawn_to_be_audited_by_another_and_every_other_comes(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(Audit, "_audit", lambda audit, draw, *_: drawn.append(draw.shift))

    def work(end: LocalTransport) -> None:
        audit = Audit(world_size)
        audit.lay_out(Channel(end, "loft", 30.0), [])
        for _ in range(80):
            audit.step_reduced()

    run_ranks(world_size, work)
    assert set(drawn) == set(range(1, world_size))


class Liar(RecordingTransport):
    """A rank that sends something else than it should in operations of some names."""

    liar = 2

    def __init__(
        self, end: LocalTransport, ending: str, lie: Callable[[Tensor], None], *, first: int = 0
    ) -> None:
        super().__init__(end)
        self.ending, self.lie, self.first = ending, lie, first
        self.num_seen = 0

    def _changed(self, send: Tensor, name: str) -> Tensor:
        if self.rank != self.liar or not name.endswith(self.ending):
            return send
        self.num_seen += 1
        if self.num_seen <= self.first:
            return send
        changed = send.clone()
        self.lie(changed)
        return changed

    def allgather(self, send: Tensor, recv: Tensor, *, name: str) -> Any:
        return super().allgather(self._changed(send, name), recv, name=name)

    def alltoall(self, send: Tensor, recv: Tensor, *, name: str, skips_own: bool = False) -> Any:
        changed = self._changed(send, name)
        return super().alltoall(changed, recv, name=name, skips_own=skips_own)


def one_bit_more(values: Tensor) -> None:
    """Change the last bit of one value in each slice of a shard."""
    bits = values.view(torch.int32)
    for at in range(selection.NUM_SLICES):
        span = selection.slice_of(len(bits), at)
        if span.stop > span.start:
            bits[span.start] ^= 1


def accused(errors: list[BaseException]) -> str:
    """Return what all ranks say, which is one text."""
    assert {type(error) for error in errors} == {AuditError}
    (said,) = {str(error) for error in errors}
    return said


def errors_of(work: Callable[[LocalTransport], object], world_size: int) -> list[BaseException]:
    """Return what work raises on each rank."""

    def caught(end: LocalTransport) -> BaseException:
        with pytest.raises(LoftError) as error:
            work(end)
        return error.value

    return run_ranks(world_size, caught)


@pytest.mark.parametrize("scope", ["shard", "model"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_owner_that_changes_bits_of_its_result_is_named(rule: loft.Rule, scope: str) -> None:
    scope = scope if rule.sees_rows else "shard"

    def work(end: LocalTransport) -> None:
        train(Liar(end, ".ag", one_bit_more), rule, num_steps=20, scope=scope)

    said = accused(errors_of(work, 4))
    assert "another result than rank 2, the owner" in said
    assert said.count("is wrong") == 1
    assert "audit of step 1:" in said


@pytest.mark.parametrize("rule", SEES_ROWS, ids=str)
def test_an_owner_that_tells_another_table_is_named(rule: loft.Rule) -> None:
    def lie(row: Tensor) -> None:
        row[4] *= 1.5

    def work(end: LocalTransport) -> None:
        train(Liar(end, ".tables", lie), rule, num_steps=20, scope="model")

    said = accused(errors_of(work, 4))
    assert "tables of distances other than those that were published than rank 2" in said


@pytest.mark.parametrize("scope", ["shard", "model"])
@pytest.mark.parametrize("rule", SEES_ROWS, ids=str)
def test_an_owner_that_measures_falsely_in_every_slice_is_named(
    rule: loft.Rule, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = selection.SelectionPart.measure

    def lying(self: selection.SelectionPart, rows: Tensor, weights: Any) -> None:
        honest(self, rows, weights)
        if self.selection._lane.rank == 2:  # a lie that all it does agrees with
            self.sums[:, 4] *= 1.5

    monkeypatch.setattr(selection.SelectionPart, "measure", lying)
    said = accused(errors_of(lambda end: train(end, rule, num_steps=20, scope=scope), 4))
    assert "another table of distances than rank 2, the owner" in said


def test_an_owner_that_lies_in_one_place_is_met_after_a_while() -> None:
    def lie(values: Tensor) -> None:
        values[5] += 1.0

    def work(end: LocalTransport) -> None:
        train(Liar(end, ".ag", lie, first=40), loft.TrimmedMean(1), num_steps=600)

    assert "another result than rank 2, the owner" in accused(errors_of(work, 3))


def test_an_owner_that_tells_the_auditor_other_tables_than_it_published_is_named() -> None:
    def lie(sent: Tensor) -> None:
        sent.view(4, -1)[:, -3:] ^= 1

    def work(end: LocalTransport) -> None:
        train(Liar(end, ".rows", lie), loft.Robust(1), num_steps=2)

    assert "those that were published than rank 2" in accused(errors_of(work, 4))


def test_a_rank_that_sends_auditors_other_values_is_named_too() -> None:
    def lie(sent: Tensor) -> None:
        sent.fill_(7)

    def work(end: LocalTransport) -> None:
        train(Liar(end, ".rows", lie), loft.Median(), num_steps=2)

    said = accused(errors_of(work, 3))
    assert "or ranks [2], whose values reached them with other bits" in said


def test_a_rank_that_chooses_its_number_late_is_named() -> None:
    def lie(number: Tensor) -> None:
        number[0] ^= 1

    errors = errors_of(lambda end: train(Liar(end, ".numbers", lie), loft.Median(), num_steps=2), 3)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert all("ranks [2] tell other numbers than they had drawn" in str(e) for e in errors)


def test_audits_come_as_often_as_asked_for() -> None:
    def work(end: LocalTransport) -> tuple[int, int]:
        audit = train(end, loft.Median(), num_steps=300, audit=0.9)
        return audit.num_audited, audit.num_steps

    (num_audited, num_steps), *others = run_ranks(3, work)
    assert others == [(num_audited, num_steps)] * 2
    # 0.9 audits a step are 0.3 times three: 90 steps of 300, with a deviation of 8.
    assert 50 <= num_audited <= 130


def test_an_audit_moves_a_thirty_second_of_an_n_th_of_a_step() -> None:
    def work(end: LocalTransport) -> tuple[int, int]:
        transport = RecordingTransport(end)
        train(transport, loft.TrimmedMean(1), num_steps=1, audit=1e-9)
        before, transport.sent_bytes = transport.sent_bytes, 0
        train(transport, loft.TrimmedMean(1), num_steps=1)
        return before, transport.sent_bytes - before

    for step_bytes, audit_bytes in run_ranks(4, work):
        # n audits: n times 1 / (32 (n - 1)) of a step, or less; digests and findings beside.
        beside = 3 * (32 + 8 * (3 + 2 * 4))
        assert audit_bytes <= 4 / (32 * 3) * step_bytes + beside


@pytest.mark.parametrize("world_size", [3, 5])
def test_an_audit_of_a_rule_that_sees_rows_moves_the_tables_too(world_size: int) -> None:
    num_tables: list[int] = []

    def work(end: LocalTransport) -> int:
        transport = RecordingTransport(end)
        sent = []
        for rule in (loft.TrimmedMean(1), loft.Robust(1)):
            audit = train(transport, rule, num_steps=1)
            sent.append(transport.sent_bytes)
            transport.sent_bytes = 0
        num_tables.append(sum(record.spec.selection is not None for record in audit._records))
        return sent[1] - sent[0]

    found = run_ranks(world_size, work)
    assert min(num_tables) >= 2
    # 16 slices of a table of n (n + 1) / 2 float64 a bucket, to each other rank.
    tables = 64 * (world_size - 1) * world_size * (world_size + 1) * num_tables[0]
    assert found == [tables] * world_size


def test_weights_and_absent_ranks_are_known_to_auditors() -> None:
    sizes = [(40, 1, 3, 0, 2)] * 40

    def work(end: LocalTransport) -> int:
        params = make_parameters(SHAPES)
        optimizer = wrap(params, end, rule=loft.Robust(1), audit=1.0, balancer=Sizes(list(sizes)))
        for step in range(len(sizes)):
            optimizer.zero_grad()
            backward(params, some_row(end.rank, step))
            optimizer.step()
        return int(optimizer._world._reducer.audit.num_audited)

    num_audited, *others = run_ranks(5, work)
    assert others == [num_audited] * 4
    assert num_audited > 0  # of 40 steps one in five: none in one run of 7,000


def test_nothing_is_kept_or_sent_without_audits() -> None:
    def work(end: LocalTransport) -> list[str]:
        transport = RecordingTransport(end)
        params = make_parameters()
        optimizer = wrap(params, transport, rule=loft.Median())
        give_gradients(params)
        optimizer.synchronize()
        return [name for name in transport.names if ".audit." in name]

    assert run_ranks(3, work) == [[]] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"audit": 1.5}, r"audit=1.5 must be >= 0 and <= 1"),
        ({"audit": True}, r"audit=True must be a number"),
        ({"audit": 0.1, "rule": loft.Mean()}, r"which mean does not promise"),
        ({"audit": 0.1, "rule": loft.Custom(torch.Tensor.sum)}, r"does not promise"),
        ({"audit": 0.1, "over": [[0]]}, r"audit= does not go with over="),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    def work(end: LocalTransport) -> None:
        with pytest.raises(LoftError, match=message):
            wrap(make_parameters(), end, **{"rule": loft.Median(), **options})

    run_ranks(1, work)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.whole
@pytest.mark.parametrize("scope", ["shard", "model"])
def test_honest_ranks_pass_two_thousand_audits(scope: str) -> None:
    rule = loft.Robust(1)
    audits = run_ranks(4, lambda end: train(end, rule, num_steps=2000, scope=scope), timeout_s=550)
    assert [audit.num_audited for audit in audits] == [2000] * 4
