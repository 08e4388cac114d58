"""Every fenced block of the docs and the README is run by a test, or marked as shown once.

The Python blocks of most pages are run here, in their order, one script a page. Blocks take things
as given that a reader has, such as a model: what stands for them comes before each block.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.launch import ROOT, launch
from tests.support.pages import PAGES, blocks_of, read_page

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]

_HEAD = """
import horovod.torch as hvd
import torch
from torch.utils.data import TensorDataset
import loft_hvd as loft
torch.manual_seed(0)
torch.set_num_threads(1)
"""
_JOB = """
hvd.init()
dataset = TensorDataset(torch.randn(600, 8), torch.randint(0, 3, (600,)))
model, loss_fn, epochs = torch.nn.Linear(8, 3), torch.nn.CrossEntropyLoss(), 2
def wrapped(**options):
    global model  # a new one: its hooks would tell the optimizer before of each pass
    model = torch.nn.Linear(8, 3)
    return loft.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        **options,
    )
def total(count):
    return int(hvd.allreduce(torch.tensor(count), op=hvd.Sum))
"""


@dataclass(frozen=True)
class Script:
    """How the Python blocks of a page are run."""

    around: dict[str, tuple[str, str]]  # by a block's first line: what stands before, what checks
    num_ranks: int = 1
    head: str = _HEAD + _JOB
    as_here: dict[str, str] = field(default_factory=dict)  # words of a page: what they are here


_TRAINED = "assert total(sum(len(y) for x, y in loader)) == 600\n"
_TOML = next(block for block in blocks_of(read_page("simulate.md")) if block.kind == "toml")
_SCENARIO = f"from pathlib import Path\nPath('scenario.toml').write_text({_TOML.text!r})\n"
_SCRIPTS = {
    "global-batch.md": Script(
        num_ranks=4,
        around={
            'balancer = loft.Balancer("auto", min_global=64, max_global=1024)': (
                "",
                "optimizer, count = wrapped(balancer=balancer), 0\n"
                "loader = loft.DataLoader(dataset, balancer)\n"
                "for epoch in range(8):\n"
                "    loader.set_epoch(epoch)\n"
                "    for x, y in loader:\n"
                "        optimizer.zero_grad()\n"
                "        loss_fn(model(x), y).backward()\n"
                "        optimizer.step()\n"
                "        count += 0 if loader.is_padding else len(y)\n"
                "assert total(count) == 8 * 600\n"
                "assert balancer.noise.num_steps >= 30\n"
                "assert optimizer.param_groups[0]['lr'] == 0.1\n",
            ),
        },
    ),
    "attacks.md": Script(
        num_ranks=8,
        around={
            "handle = loft.attacks.attach(optimizer, loft.attacks.SignFlip(scale=10), ranks=[3])": (
                "rule = loft.TrimmedMean(f=2)\noptimizer = wrapped(rule=rule)\n",
                "loss_fn(model(dataset[:8][0]), dataset[:8][1]).backward()\noptimizer.step()\n"
                "assert model.weight.isfinite().all()\n",
            ),
        },
    ),
    "data.md": Script(
        num_ranks=4,  # as many as the page's caps are for
        around={
            "balancer = loft.Balancer(global_batch_size=256)": (
                "",
                _TRAINED,
            ),
            "balancer = loft.Balancer(256, max_batch=[96, 96, 48, 16], micro_batches=True)": (
                "",
                "assert (len(micro_batches) > 1) is (hvd.rank() == 3)  # 22 samples, at most 16\n",
            ),
            "balancer = loft.Balancer(256, min_batch=0)": (
                "model = torch.nn.Linear(8, 3)\n",  # without hooks of another optimizer
                "assert balancer.next_step == 3\n",
            ),
            "balancer = loft.Balancer(256, micro_batches=8)": (
                "lengths = torch.arange(1, 601)\n"
                "texts = [torch.ones(int(length)) for length in lengths]\n"
                "pad = torch.nn.utils.rnn.pad_sequence\n",
                "assert total(sum(x.shape[1] for parts in loader for x in parts)) == 600\n",
            ),
            "weights = (1 / labels.bincount())[labels]  # one for each sample": (
                "labels = dataset.tensors[1]\nbalancer = loft.Balancer(256)\n",
                _TRAINED,
            ),
            "test_loader = loft.DataLoader(test_set, balancer, train=False)": (
                "test_set = TensorDataset(*dataset[:100])\nbalancer = loft.Balancer(256)\n",
                "assert total(count) == 100\nassert 0 <= accuracy <= 1\n",
            ),
            "torch.save(": (
                "path, epoch = f'loader-{hvd.rank()}.pt', 1\n"
                "balancer = loft.Balancer(256)\n"
                "loader = loft.DataLoader(dataset, balancer)\n"
                "optimizer = wrapped(balancer=balancer)\n"
                "loader.set_epoch(epoch)\n"
                "for x, y in loader:\n"
                "    optimizer.zero_grad()\n"
                "    loss_fn(model(x), y).backward()\n"
                "    optimizer.step()\n"
                "    break\n",
                "assert total(sum(len(y) for x, y in loader)) == 600 - 256\n",
            ),
            "batches = iter(loader)": (
                "balancer = loft.Balancer(256, [96, 96, 48, 16])\n"
                "loader = loft.DataLoader(dataset, balancer)\n"
                "optimizer = wrapped(balancer=balancer)\n",
                "assert balancer.next_step == 3\n",
            ),
            "from glob import glob": (
                "import io, tarfile\n"
                "if hvd.rank() == 0:\n"
                "    for place in range(6):\n"
                "        with tarfile.open(f'train-{place}.tar', 'w') as tar:\n"
                "            for i in range(100 * place, 100 * place + 100):\n"
                "                for end, value in zip(('x', 'y'), dataset[i]):\n"
                "                    info = tarfile.TarInfo(f'{i:06d}.{end}')\n"
                "                    data = value.numpy().tobytes()\n"
                "                    info.size = len(data)\n"
                "                    tar.addfile(info, io.BytesIO(data))\n"
                "hvd.barrier()\n"
                "def decode(sample):\n"
                "    x = torch.frombuffer(bytearray(sample['x']), dtype=torch.float32)\n"
                "    return x, int.from_bytes(sample['y'], 'little')\n"
                "balancer = loft.Balancer(256)\n",
                _TRAINED,
            ),
            "home = {path: rank % hvd.size() for rank, path in enumerate(shards.paths)}": (
                "",
                "loader = loft.DataLoader(shards, loft.Balancer(256), placement=placement)\n"
                + _TRAINED,
            ),
            "sampler = loft.BatchSampler(dataset, balancer, placement=placement)": (
                "placement = loft.Placement.sharded(600, hvd.size())\n"
                "balancer = loft.Balancer(256)\n",
                _TRAINED,
            ),
            "loft.Placement.replicated(n)  # the default: every rank holds everything": (
                "import json\n"
                "from pathlib import Path\n"
                "n, node_of_rank, locate = 8, [0, 0, 1, 1], lambda i: [i % 4, 'shared:nfs']\n"
                "runs = [{'count': 8, 'homes': [0, 'shared:nfs']}]\n"
                "text = json.dumps({'nodes': None, 'runs': runs})\n"
                "hvd.rank() or Path('placement.json').write_text(text)\n"
                "hvd.barrier()\n",
                "",
            ),
            "placement = loft.Placement.sharded(n, hvd.size()).with_strata(labels, cap=1.5)": (
                "n, labels = 600, dataset.tensors[1].numpy()\n",
                "loader = loft.DataLoader(dataset, loft.Balancer(256), placement=placement)\n"
                + _TRAINED,
            ),
            "from loft_hvd.data.assign import count_local, count_rows": (
                "world_size, global_batch_size, sizes = 4, 200, [80, 60, 40, 20]\n"
                "placement = loft.Placement.sharded(600, 4)\n",
                "assert local.shape == (3, 4)\nassert (local <= sizes).all()\n",
            ),
        },
        as_here={
            "for micro_batches in loader:": "optimizer = wrapped(balancer=balancer)\n"
            "for micro_batches in loader:"
        },
    ),
    "failures.md": Script(
        around={
            "state = loft.elastic.State(model, optimizer, balancer=balancer, loader=loader, "
            "epoch=0)": (
                "balancer = loft.Balancer(256)\n"
                "loader = loft.DataLoader(dataset, balancer)\n"
                "optimizer = wrapped(balancer=balancer)\n",
                "assert state.epoch == epochs\n",
            ),
            "from loft_hvd.transport.local import Faults, run_ranks": ("", ""),
        },
        as_here={
            "            ...\n": "            optimizer.zero_grad()\n"
            "            loss_fn(model(x), y).backward()\n"
        },
    ),
    "links.md": Script(
        num_ranks=4,
        around={
            "optimizer = loft.DistributedOptimizer(": (
                "model = torch.nn.Linear(8, 3)\n"
                "sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n",
                "loss_fn(model(dataset[:8][0]), dataset[:8][1]).backward()\noptimizer.step()\n"
                "assert model.weight.isfinite().all()\n",
            ),
        },
    ),
    "losses.md": Script(
        num_ranks=4,
        around={
            "balancer = loft.Balancer(256, [96, 96, 48, 16], max_count=16)  # a sample has at most "
            "16 labels": (
                "model = torch.nn.Linear(8, 3)\n"
                "labels = torch.randint(0, 3, (600, 16)).masked_fill(torch.rand(16) < 0.5, -100)\n"
                "dataset = TensorDataset(torch.randn(600, 16, 8), labels)\n",
                "assert model.weight.isfinite().all()\n",
            ),
        },
    ),
    "report.md": Script(
        around={
            'loft.watch(model, log_dir="runs")  # on every rank, behind fully_shard or '
            "torch.compile": (
                "plain = torch.optim.SGD(model.parameters(), lr=0.1)\n",
                "for at in range(0, 60, 20):\n"
                "    loss_fn(model(dataset[at:at + 20][0]), dataset[at:at + 20][1]).backward()\n"
                "    plain.step()\n"
                "from pathlib import Path\n"
                "(log,) = Path('runs').glob('*.jsonl')\n"
                'assert \'"policy": "watch"\' in log.read_text()\n'
                "log.unlink()\n",
            ),
            "optimizer.log_scalars(loss=loss, lr=0.1)  # or balancer.log_scalars(...)": (
                "from pathlib import Path\n"
                "optimizer, loss = wrapped(log_dir='runs'), torch.tensor(0.5)\n",
                "(log,) = Path('runs').glob('*.jsonl')\nassert '\"lr\": 0.1' in log.read_text()\n",
            ),
        },
    ),
    "rules.md": Script(
        around={
            "import torch": ("", "assert out.isfinite().all()\n"),
            "optimizer = loft.DistributedOptimizer(": (
                "class Model(torch.nn.Module):\n"
                "    def __init__(self):\n"
                "        super().__init__()\n"
                "        self.table, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)\n"
                "model = Model()\n",
                "",
            ),
            "def median_of_touching(gradients: torch.Tensor) -> torch.Tensor:": (
                "",
                "rows = torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 5.0]])\n"
                "assert loft.aggregate(rows, rule['table.*']).tolist() == [2.0, 3.0]\n",
            ),
        },
        as_here={"TrimmedMean(f=1)},\n)": "TrimmedMean(f=0)},\n)"},  # one rank bears no wrong one
    ),
    "simulate.md": Script(
        head=_HEAD,
        around={
            "from loft_hvd.simulate.simulation import rows, run_file": (
                _SCENARIO,
                "named = results.to_dict()['policies']\n"
                "mean_s = {name: named[name]['mean_step_s'] for name in named}\n"
                "assert mean_s['loft'] < 0.7 * mean_s['uniform']\n"
                "assert mean_s['oracle'] < mean_s['loft'] < mean_s['[96, 96, 32, 32]']\n",
            ),
        },
    ),
    "federated.md": Script(
        around={
            "model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))": (
                "",
                "assert all(torch.allclose(state[key], states[0][key]) for key in states[0])\n",
            ),
        },
    ),
    "store.md": Script(
        around={
            "store = loft.SampleStore(dataset, memory_bytes=8 * 2**30)": (
                "",
                _TRAINED + "assert store.counters\nstore.close()\n",
            ),
        },
    ),
}
"""By page."""
# Where the blocks are run that are not run here, by the block's first line.
_ELSEWHERE = {
    "federated.md": {
        "from flwr.app import ArrayRecord": (
            "../property/test_flower.py::test_rounds_of_flower_survive_the_client_with_most_samples"
        ),
    },
    "README.md": {
        'loft.attach(optimizer, loft.Balancer(64 * hvd.size(), "report", log_dir="runs"))': (
            "test_readme.py::test_the_two_lines_report_on_plain_horovod"
        ),
        " import horovod.torch as hvd": "test_readme.py::test_script_of_the_diff_trains",
    },
    "levels.md": {
        "optimizer = loft.DistributedOptimizer(": "test_page_blocks.py::test_two_levels_train",
        "nodes = [list(range(4 * node, 4 * node + 4)) for node in range(3)]": (
            "test_page_blocks.py::test_two_levels_train"
        ),
    },
    "simulate.md": {"# scenario.toml": "test_page_blocks.py::test_the_python_of_pages_runs"},
    "trainer.md": {
        "import torch": "test_frameworks.py::test_the_scripts_of_the_page_train",
    },
    "migrate.md": {
        "balancer = loft.Balancer(64 * hvd.size())": "test_readme.py::test_the_converted_loop",
        "import horovod": "test_readme.py::test_the_notebooks_cell_trains",
        "import pytorch_lightning as pl": "test_frameworks.py::test_script_for_lightning_trains",
        "@@": "test_horovods_examples.py::test_",  # all diffs: `DIFFS` in tests/support
    },
    "plan.md": dict.fromkeys(
        (
            "# cluster.toml",
            "# jobs.toml",
            "loft-hvd plan cluster.toml jobs.toml",
            "job resnet: 8 ranks on 2 of 4 hosts, trimmed_mean:f=1 over ranks",
            "# team.toml",
            "loft-hvd plan cluster.toml team.toml --no-simulate",
            "2 of 3 jobs admitted, worth 6; policy price, speeds ours, 200 time slots of 73 s",
            "# now.toml",
            "loft-hvd plan cluster.toml team.toml --no-simulate --now now.toml",
            "2 of 3 jobs admitted, worth 6; policy price, speeds ours, 200 time slots of 73.2 s",
            "loft-hvd plan cluster.toml jobs.toml --sizes sizes.json --emit horovodrun",
            "env LOFT_HVD_FIRST_SIZES=/home/me/sizes.json horovodrun -np 8 -H a1:4,a2:4 --gloo "
            "python train.py --epochs 3",
        ),
        "test_page_blocks.py::test_the_plan_of_two_racks_is_what_the_page_shows",
    ),
}


def _python_of(page: str) -> dict[str, str]:
    blocks = blocks_of(read_page(page))
    return {b.first_line: b.text for b in blocks if b.kind == "python" and not b.is_shown_once}


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_marked(page: str) -> None:
    text = read_page(page)
    blocks = blocks_of(text)
    assert len(blocks) == len(re.findall(r"(?m)^```", text)) / 2
    left = [block for block in blocks if not block.is_shown_once]
    if page == "recipes.md":  # its own test runs all of them, by their headings
        assert {block.kind for block in left} == {"python", "bash"}
        return
    known = {**(_SCRIPTS[page].around if page in _SCRIPTS else {}), **_ELSEWHERE.get(page, {})}
    assert {block.first_line for block in left} == known.keys()
    for place in _ELSEWHERE.get(page, {}).values():
        file, _, test = place.partition("::")
        assert f"def {test}" in (ROOT / "tests/multiprocess" / file).read_text(), place


@pytest.mark.parametrize("page", PAGES)
def test_python_stands_in_fences(page: str) -> None:
    outside = re.sub(r"(?ms)^```.*?^```$", "", read_page(page))
    code = r"^    (?:(?:import|from|def|class|for|with) .*|\w+ = .*|@?(?:loft|hvd|torch)\..*)$"
    assert re.findall(code, outside, re.MULTILINE) == []


def test_a_mark_is_for_the_next_block_alone() -> None:
    text = "Shown once:\n\n```bash\nfrob\n```\n\nText.\n\n```bash\nfrob\n```\n"
    assert [block.is_shown_once for block in blocks_of(text)] == [True, False]


def _write_script(page: str, folder: Path) -> Path:
    """Write what runs a page's Python blocks, in a folder of their own."""
    script, blocks = _SCRIPTS[page], _python_of(page)
    file = folder / page.replace(".md", ".py")
    own = file.with_suffix("")
    own.mkdir()
    parts = [f"import os\nos.chdir({str(own)!r})\n", script.head]
    for first_line, (before, check) in script.around.items():
        parts += [before, blocks[first_line], check]
    body = "\n".join(parts)
    for words, here in script.as_here.items():
        assert words in body, words
        body = body.replace(words, here)
    file.write_text(f"{body}\nprint('the page is through')\n")
    return file


# One job goes through all pages for its number of ranks: torch's import is most of what one takes.
_TOGETHER = [
    [page for page, script in _SCRIPTS.items() if script.num_ranks == num_ranks]
    for num_ranks in sorted({script.num_ranks for script in _SCRIPTS.values()})
]


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param(
            pages, marks=pytest.mark.long if _SCRIPTS[pages[0]].num_ranks > 4 else (), id=pages[0]
        )
        for pages in _TOGETHER
    ],
)
def test_the_python_of_pages_runs(pages: list[str], tmp_path: Path) -> None:
    files = [str(_write_script(page, tmp_path)) for page in pages]
    num_ranks = _SCRIPTS[pages[0]].num_ranks
    run = f"import runpy\nfor each in {files}: runpy.run_path(each, run_name='__main__')"
    launcher = "none" if num_ranks == 1 else "gloo"
    file = tmp_path / "pages.py"
    file.write_text(run)
    done = launch(num_ranks, [str(file)], launcher=launcher, timeout_s=150)
    done.succeeded()
    assert done.output.count("the page is through") == len(pages) * num_ranks


def test_the_plan_of_two_racks_is_what_the_page_shows(tmp_path: Path) -> None:
    blocks = blocks_of(read_page("plan.md"))
    for block in (each for each in blocks if each.kind == "toml"):
        (tmp_path / block.first_line.removeprefix("# ")).write_text(block.text)
    commands = [block.text for block in blocks if block.kind == "bash"]
    shown = [block.text for block in blocks if block.kind == "text"]
    environment = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    for command, text in zip(commands, shown, strict=True):
        done = subprocess.run(
            [sys.executable, "-m", "loft_hvd.cli", *command.split()[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        told = done.stdout.replace(str(tmp_path.resolve()), "/home/me")
        # What the simulator finds follows the policy, whose last digits may change.
        left = [
            [
                line.rstrip()
                for line in t.splitlines()
                if "simulated" not in line and "whole training" not in line
            ]
            for t in (told, text)
        ]
        assert left[0] == left[1]
    assert (tmp_path / "sizes.json").exists()


@pytest.mark.long
def test_two_levels_train_as_the_page_sets_them_up(tmp_path: Path) -> None:
    optimizer, sets = _python_of("levels.md").values()
    # All ranks are on one host here: the page's own list, in place of host names.
    grouped = optimizer.replace('over="nodes"', "over=nodes")
    assert grouped != optimizer
    job = _JOB.replace("hvd.init()", sets)
    step = "loss_fn(model(dataset[:8][0]), dataset[:8][1]).backward()\noptimizer.step()\n"
    end = f"{step}print('the page is through')\n"
    file = tmp_path / "page.py"
    file.write_text("\n".join([_HEAD, job, grouped, end]))
    done = launch(12, [str(file)], timeout_s=180)
    done.succeeded()
    assert done.output.count("the page is through") == 12
