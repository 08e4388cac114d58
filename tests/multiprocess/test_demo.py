"""The demo, judged by what it leaves behind: weights, summary, plot."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.plain import plain_lines
from tests.support.launch import ROOT, launch

sys.path.insert(0, str(ROOT / "examples"))
import demo_report
import digits_task

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that one demo wrote to."""
    out = tmp_path_factory.mktemp("demo")
    arguments = ["-W", "error", "examples/demo.py", "--out", str(out)]
    done = launch(4, arguments, timeout_s=300)
    done.succeeded()
    (out / "output.txt").write_text(done.output)
    return out


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    summary = json.loads((folder / "summary.json").read_text())
    return {(row["rule"], row["sizes"]): row for row in summary}


def weights_of(folder: Path, rule: str, sizes: str) -> list[dict[str, torch.Tensor]]:
    return [
        torch.load(folder / f"{rule}-{sizes}-rank{rank}.pt", weights_only=True) for rank in range(4)
    ]


@pytest.mark.parametrize("sizes", ["equal", "fitted"])
@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_summary_says_what_the_saved_weights_do(
    rule: str, sizes: str, folder: Path, rows: Rows
) -> None:
    row = rows[rule, sizes]
    saved = weights_of(folder, rule, sizes)
    model = digits_task.make_model()
    model.load_state_dict(saved[0])
    images, labels = digits_task.Digits.load().test.tensors
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum().item()
    assert row["test_accuracy"] == pytest.approx(right / len(labels), abs=1e-6)
    first = torch.cat([value.flatten() for value in saved[0].values()]).view(torch.int32)
    identical = all(
        torch.equal(
            torch.cat([value.flatten() for value in other.values()]).view(torch.int32), first
        )
        for other in saved[1:]
    )
    assert row["identical"] is identical is True


@pytest.mark.parametrize("sizes", ["equal", "fitted"])
def test_the_faulty_rank_spoils_the_mean_but_not_the_trimmed_mean(sizes: str, rows: Rows) -> None:
    assert rows["mean", sizes]["test_accuracy"] < 0.5
    assert rows["trimmed_mean", sizes]["test_accuracy"] >= 0.95


@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_fitted_sizes_give_the_slow_rank_less_and_shorten_the_step(rule: str, rows: Rows) -> None:
    sizes = rows[rule, "fitted"]["local_batch_sizes"]
    assert sum(sizes) == 256
    assert sizes[2] == min(sizes) < 48
    # The demo shows a quarter and more; other work on the machine may take some of it here.
    assert rows[rule, "fitted"]["step_s"] < 0.9 * rows[rule, "equal"]["step_s"]


def test_what_is_printed_repeats_no_warning_and_shows_no_launcher(folder: Path) -> None:
    lines = list(plain_lines((folder / "output.txt").read_text().splitlines(keepends=True)))
    text = "".join(lines)
    assert text.count("rank 3 stands out for") == 1
    # Two runs take turns, and a plain mean watches nobody.
    assert len(re.findall(r"trimmed_mean, (equal|fitted) sizes: rank 3 stands out for", text)) == 1
    assert text.count("trimmed_mean, both sizes") == 10  # a line each tenth
    assert "<stdout>" not in text
    assert "<stderr>" not in text


def test_a_warning_is_printed_once_and_names_the_run_it_comes_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = demo_report.Warnings()
    logger = logging.Logger("of this test")
    logger.addHandler(shown)
    for run in ("mean, equal sizes", "mean, fitted sizes"):
        with shown.of_run(run):
            logger.warning("rank %d stands out", 3)
    logger.warning("between two runs")
    expected = ["mean, equal sizes: rank 3 stands out", "between two runs"]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_plot_is_a_picture(folder: Path) -> None:
    assert (folder / "steps.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "num_ranks"), [("none", 1), ("mpi", 4)])
def test_the_same_script_runs_alone_and_under_mpirun(
    launcher: str, num_ranks: int, tmp_path: Path
) -> None:
    arguments = ["examples/demo.py", "--epochs", "1", "--out", str(tmp_path)]
    done = launch(num_ranks, arguments, launcher=launcher, timeout_s=200)
    done.succeeded()
    assert len(json.loads((tmp_path / "summary.json").read_text())) == 4


def test_torchrun_runs_it_without_horovod(tmp_path: Path) -> None:
    arguments = ["examples/demo.py", "--epochs", "1", "--out", str(tmp_path)]
    done = launch(4, arguments, launcher="torchrun", timeout_s=200)
    done.succeeded()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["identical"] for row in summary] == [True] * 4
    assert sum(summary[-1]["local_batch_sizes"]) == 256
