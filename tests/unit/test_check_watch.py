"""What one rank notes of a script: a real one, run as ``loft-hvd check`` runs it, alone."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

from loft_hvd.check.findings import find
from loft_hvd.check.notes import DRAFT, STEP, LoaderNote, Notes
from loft_hvd.check.run import _read_draft
from loft_hvd.check.watch import ScriptWatch, _is_mean_of_one, _is_script, _members
from loft_hvd.codec import decode

SCRIPT = """
import os
import sys

import horovod.torch as hvd
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import Sampler, TensorDataset

import loft_hvd as loft


class Shuffled(Sampler):  # keeps its epoch under another name
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.randperm(8, generator=torch.Generator().manual_seed(self.key)).tolist())

    def set_epoch(self, epoch):
        self.key = epoch


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(16, 4))


def train(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


hvd.init()
assert sys.path[0] == os.path.dirname(__file__)
assert os.getcwd() not in sys.path or os.getcwd() in os.environ.get("PYTHONPATH", "")
data = TensorDataset(torch.randn(8, 4))
model, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
start = model.weight.detach().clone()

kept = hvd.DistributedOptimizer(  # mark: kept
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
)
hvd.broadcast_optimizer_state(kept, root_rank=0)  # takes a step of its own
torch_state = hvd.elastic.TorchState(model, kept)
torch_state.sync()
inner = hvd.DistributedOptimizer(
    torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), other.named_parameters()
)
balancer = loft.Balancer(4, policy="report")
wrapped = loft.DistributedOptimizer(inner, balancer=balancer)  # mark: wrapped
hvd.broadcast_optimizer_state(wrapped, root_rank=0)
assert torch.equal(model.weight, start)

held = DataLoader(data, batch_size=3)  # mark: held, an evaluation
held_batches = iter(held)
assert len(held_batches) == 3
source = DataLoader(Stream(), batch_size=None)  # mark: source
next(held_batches)
for at, x in enumerate(loft.StreamLoader(source, balancer)):
    train(other, wrapped, x)
    if at == 2:
        next(held_batches)

own = DataLoader(data, batch_size=4, sampler=Shuffled())  # mark: own
for epoch in range(2):
    own.sampler.set_epoch(epoch)
    for (x,) in own:
        train(model, kept, x)
nested = DataLoader(  # mark: nested
    data, batch_sampler=BatchSampler(DistributedSampler(data, 1, 0), 4, drop_last=False)
)
next(iter(nested))  # a look at the first batch
for epoch in range(2):
    for (x,) in nested:
        train(model, kept, x)
ordered = DataLoader(  # mark: ordered
    data, batch_sampler=loft.BatchSampler(data, loft.Balancer(4, policy="report"), shuffle=False)
)
for epoch in range(2):
    for (x,) in ordered:
        train(model, kept, x)

handle = hvd.allreduce_async_(model.weight.grad, None, "by its place")
hvd.synchronize(handle)
hvd.barrier()
open_file = open(sys.argv[1], "w")
open_file.write("not flushed")
hvd.shutdown()
"""


@dataclass
class Watched:
    notes: Notes
    script: Path
    text: str  # what was in a file that the script has left open

    def line(self, mark: str) -> str:
        """Return the file:line that has a mark."""
        lines = self.script.read_text().splitlines()
        (number,) = (n for n, line in enumerate(lines, 1) if f"# mark: {mark}" in line)
        return f"{self.script}:{number}"

    def loader(self, mark: str) -> LoaderNote:
        (found,) = (each for each in self.notes.loaders if each.made == self.line(mark))
        return found


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    script, notes, file = folder / "train.py", folder / "notes", folder / "open.txt"
    script.write_text(SCRIPT)
    notes.mkdir()
    words = (str(notes), "60", "1", str(script), str(file))
    done = subprocess.run(
        (sys.executable, "-m", "loft_hvd.check.watch", *words),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    (written,) = notes.glob("*.json")
    found = decode(Notes, json.loads(written.read_text()), what="notes", call="check")
    assert found.ended == "done", done.stderr
    return Watched(found, script, file.read_text())


def test_a_step_inside_broadcast_optimizer_state_is_none(watched: Watched) -> None:
    assert watched.notes.num_steps == 4 + 3 * 4  # of the stream, and of two epochs of each loader
    assert watched.notes.num_backward == watched.notes.num_steps


def test_an_optimizer_that_is_wrapped_steps_as_the_outer_one(watched: Watched) -> None:
    made = [each.made for each in watched.notes.optimizers]
    first, second = watched.line("wrapped"), watched.line("kept").rpartition(":")[0]
    assert made[0] == first
    assert made[1].startswith(second)
    assert len(made) == 2


def test_the_source_of_a_stream_and_a_held_evaluation_are_not_trained_on(watched: Watched) -> None:
    assert watched.loader("source").rounds == []
    (held,) = watched.loader("held").rounds
    assert (held.num_batches, held.is_trained) == (2, False)


def test_epochs_are_read_where_samplers_keep_them(watched: Watched) -> None:
    assert [each.epoch for each in watched.loader("own").rounds] == [None, None]
    nested = watched.loader("nested")
    assert [(each.epoch, each.is_trained) for each in nested.rounds] == [
        (0, False),
        (0, True),
        (0, True),
    ]
    assert nested.shuffles
    assert not watched.loader("ordered").shuffles
    # All in all: the one that the script did forget.
    (finding,) = find([watched.notes])
    assert finding.place == watched.line("nested")
    assert finding.what == "missing set_epoch: 2 epochs had the same order"


def test_a_name_is_read_by_its_place(watched: Watched) -> None:
    (named,) = (each for each in watched.notes.calls if each.what == "hvd.allreduce_async_")
    assert (named.name, named.is_ordered) == ("by its place", False)
    assert all(each.is_done for each in watched.notes.calls)


def test_the_rank_is_kept_over_shutdown(watched: Watched) -> None:
    assert watched.notes.rank == 0


def test_what_a_script_has_not_flushed_is_written(watched: Watched) -> None:
    assert watched.text == "not flushed"


@pytest.mark.parametrize(("is_asked", "ended"), [(False, "error"), (True, "stopped")])
def test_an_error_after_all_were_asked_to_end_is_a_consequence(
    is_asked: bool, ended: str, tmp_path: Path
) -> None:
    script, notes = tmp_path / "train.py", tmp_path / "notes"
    script.write_text("pass\n")
    notes.mkdir()
    asking, failing = ScriptWatch(notes, script), ScriptWatch(notes, script)
    if is_asked:
        asking.end_others()
    failing.write("error", RuntimeError("rank 1 has gone"))
    (written,) = notes.glob("*.json")
    found = decode(Notes, json.loads(written.read_text()), what="notes", call="check")
    assert found.ended == ended
    assert (found.error is None) == is_asked


def test_packages_of_the_user_are_no_part_of_the_script() -> None:
    file = Path(site.getusersitepackages(), "horovod", "torch", "mpi_ops.py")
    assert not _is_script(str(file))
    assert _is_script(str(Path.cwd() / "train.py"))


def test_a_call_has_the_ranks_of_its_process_set() -> None:
    assert _members(hvd.ProcessSet([2, 0])) == [0, 2]
    assert _members(hvd.global_process_set) is None
    assert _members(None) is None


@pytest.mark.parametrize(
    ("what", "given", "is_mean"),
    [
        ("hvd.allreduce", {"tensor": torch.tensor(0.5)}, True),
        ("hvd.allreduce", {"tensor": torch.tensor(0.5), "op": hvd.Average}, True),
        ("hvd.allreduce", {"tensor": torch.tensor(0.5), "op": hvd.Sum}, False),
        ("hvd.allreduce", {"tensor": torch.tensor(0.5), "average": False}, False),
        ("hvd.allreduce", {"tensor": torch.tensor(1)}, False),  # a flag, or a count
        ("hvd.allreduce_", {"tensor": torch.zeros(1)}, False),  # a parameter of size 1
        ("hvd.broadcast", {"tensor": torch.tensor(0.5)}, False),
    ],
)
def test_a_mean_is_of_one_floating_point_number(
    what: str, given: dict[str, object], is_mean: bool
) -> None:
    assert _is_mean_of_one(what, given) is is_mean


ABORTED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
dist.all_reduce(torch.ones(1))  # mark: alone
os.abort()  # as Gloo does where collectives of two kinds meet
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)"])
def test_what_a_script_leaves_behind_is_not_waited_for(end: str, tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "notes"
    lines = ("import time, weakref", "left = {1}", "weakref.finalize(left, time.sleep, 3600)", end)
    script.write_text("\n".join((*lines, "")))
    folder.mkdir()
    words = (str(folder), "60", "1", str(script))
    subprocess.run((sys.executable, "-m", "loft_hvd.check.watch", *words), timeout=100, check=True)
    (written,) = folder.glob("*.json")
    assert json.loads(written.read_text())["ended"] == "done"


def test_a_rank_that_is_ended_at_once_leaves_what_it_has_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "notes"
    script.write_text(ABORTED)
    folder.mkdir()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    words = (str(folder), "60", "1", str(script))
    subprocess.run(
        (sys.executable, "-m", "loft_hvd.check.watch", *words),
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert not list(folder.glob("*.json"))
    (draft,) = folder.glob(f"*{DRAFT}")
    notes = _read_draft(draft)
    assert (notes.ended, notes.is_torchrun, notes.has_reducer) == ("crashed", True, True)
    assert [call.what for call in notes.calls] == [STEP] * 3 + ["dist.all_reduce"]
    assert [call.is_done for call in notes.calls] == [True] * 3 + [False]
    assert notes.calls[-1].place == f"{script}:13"
    (optimizer,) = notes.optimizers
    assert optimizer.options["lr of group 0"] == "0.01"
