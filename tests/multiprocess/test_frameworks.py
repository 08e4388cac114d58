"""Lightning, Accelerate, the Trainer: unequal batches train as one process; losses over tokens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.launch import launch
from tests.support.pages import blocks_of, read_page

pytestmark = [pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(400)]

JOBS = "tests/multiprocess/jobs"


def needs(package: str) -> pytest.MarkDecorator:
    # Not imported here: that takes seconds, of every run that collects this file.
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed"
    )


def torchrun(num_ranks: int, *arguments: str) -> str:
    return launch(num_ranks, arguments, launcher="torchrun", timeout_s=180).succeeded()


@needs("pytorch_lightning")
def test_lightning_trains_watches_and_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    job = f"{JOBS}/lightning_fit.py"
    for num_ranks, what in ((3, "equal,begin,watched,refused"), (2, "resume")):
        output = torchrun(num_ranks, job, what, str(tmp_path))
        assert output.count(f'"finished": "{what}"') == num_ranks, output[-8000:]


@needs("pytorch_lightning")
def test_the_example_for_lightning_leaves_the_faulty_rank_out_and_goes_on(tmp_path: Path) -> None:
    example, state = "examples/lightning_ddp.py", str(tmp_path / "state.ckpt")
    first = torchrun(4, example, "--faulty", "3", "--epochs", "2", "--save-to", state)
    assert re.search(r"^ +3 +\d.* in quarantine until step \d+$", first, re.MULTILINE), first
    more = torchrun(4, example, "--epochs", "4", "--resume-from", state)
    check_losses(first + more)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [("ddp", 4), ("fsdp", 4), ("fsdp", 1), ("horovod", 4), ("attach", 4)],
)
def test_losses_over_tokens_are_counted(kind: str, num_ranks: int) -> None:
    launcher = "torchrun" if kind in ("ddp", "fsdp") else "gloo"
    done = launch(num_ranks, [f"{JOBS}/counted.py", kind], launcher=launcher, timeout_s=180)
    assert done.succeeded().count(f"{kind} has finished") == num_ranks


@needs("pytorch_lightning")
def test_script_for_lightning_trains(tmp_path: Path) -> None:
    begins = "import pytorch_lightning as pl"
    (script,) = (b for b in blocks_of(read_page("migrate.md")) if b.first_line == begins)
    file = tmp_path / "train.py"
    file.write_text(script.text)
    output = torchrun(4, str(file))
    assert len(re.findall(r"(?m)^ +\d .*%", output)) == 4, output[-8000:]


@needs("transformers")
def test_the_trainer_trains_and_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    for num_ranks, what in ((4, "fit,watched,begin"), (2, "resume")):
        output = torchrun(num_ranks, f"{JOBS}/trainer_fit.py", what, str(tmp_path))
        assert output.count(f"has finished {what}") == num_ranks, output[-8000:]


@needs("transformers")
def test_the_scripts_of_the_page_train(tmp_path: Path) -> None:
    scripts = [block.text for block in blocks_of(read_page("trainer.md"))]
    assert max(len(script.splitlines()) for script in scripts) <= 60
    for at, script in enumerate(scripts):
        file = tmp_path / f"script{at}.py"
        file.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{script}")
        output = torchrun(4, str(file))
        assert len(re.findall(r"(?m)^ *worker|^ *rank", output)) > 0, output[-8000:]


@needs("accelerate")
@pytest.mark.parametrize(
    "names",
    [
        ["test_script"],
        [
            "test_distributed_data_loop:test_data_loader",
            "test_sync:test_gradient_accumulation",
            "test_sync:test_gradient_accumulation_with_opt_and_scheduler",
            "test_ops",
        ],
        ["test_sync"],
    ],
    ids=lambda names: names[0],
)
def test_accelerates_own_tests_pass(names: list[str]) -> None:
    output = torchrun(2, f"{JOBS}/accelerates_scripts.py", *names)
    for name in names:
        assert output.count(f"{name} has passed") == 2, output[-8000:]


@needs("accelerate")
def test_accelerate_trains_and_resumes(tmp_path: Path) -> None:
    output = torchrun(3, f"{JOBS}/accelerate_fit.py", str(tmp_path / "state"))
    assert output.count("has finished") == 3, output[-8000:]


@needs("accelerate")
@pytest.mark.long
def test_accelerate_trains_with_fsdp2() -> None:
    output = torchrun(3, f"{JOBS}/accelerate_fsdp.py")
    assert output.count("has finished") == 3, output[-8000:]


@needs("accelerate")
def test_the_example_for_accelerate_leaves_the_faulty_rank_out_and_goes_on(tmp_path: Path) -> None:
    example, state = "examples/accelerate_ddp.py", str(tmp_path / "state")
    first = torchrun(4, example, "--faulty", "3", "--epochs", "2", "--save-to", state)
    assert re.search(r"^ +3 +\d.* in quarantine until step \d+$", first, re.MULTILINE), first
    more = torchrun(4, example, "--passes", "2", "--epochs", "4", "--resume-from", state)
    check_losses(first + more)


def check_losses(output: str) -> None:
    """Check the losses of four epochs that two runs print."""
    losses = [
        (int(epoch), float(loss))
        for epoch, loss in re.findall(r"epoch (\d): loss (\d+\.\d+)", output)
    ]
    assert [epoch for epoch, _ in losses] == [0, 1, 2, 3]
    assert losses[3][1] < losses[1][1] < 0.7 * losses[0][1], losses
