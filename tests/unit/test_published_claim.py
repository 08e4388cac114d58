"""The published claim, simulated: its profiles, and what its savings are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import published_claim
from benchmarks.published_claim import (
    CLUSTERS,
    CONTESTANTS,
    EXCHANGE,
    Case,
    Contestant,
    epoch_seconds,
    saved,
    simulate_case,
)

STEPS = 200  # eight epochs of the simulation; the last four count


def contestants(*names: str) -> list[Contestant]:
    return [each for each in CONTESTANTS if each.name in names]


def test_times_of_a_case_follow_from_its_profile_by_hand() -> None:
    case = Case("resnet50", "imagenet", "serial", "xavier")
    scenario = case.scenario(CONTESTANTS[:1], steps=STEPS)
    # Three passes of 4.089e9 multiply-adds, two operations each, at 30 % of a Nano's 236 GFLOP/s
    # and of an AGX Xavier's 1,410.
    assert scenario.values("compute_s")[[0, 7]] == pytest.approx([0.3465, 0.0580], rel=1e-3)
    assert scenario.values("remote_bytes_per_s").tolist() == [125e6] * 4 + [25e6] * 4
    assert scenario.sample_bytes == pytest.approx(147_897_477_120 / 1_281_167, rel=1e-3)
    # 102.2 MB, of which 2 * 7 / 8 pass a link of 25 MB/s.
    assert case.exchange_s == pytest.approx(7.156, rel=1e-3)
    assert case.steps_per_epoch == pytest.approx(1_281_167 / 256)


def test_peaks_are_two_operations_a_core_and_clock() -> None:
    cores_mhz = {
        "xavier": [(128, 921), (256, 1300), (384, 1100), (512, 1377)],
        "orin": [(1024, 625), (1024, 918), (1792, 930), (2048, 1300)],
    }
    for name, nodes in CLUSTERS.items():
        peaks = [2 * cores * mhz * 1e6 for cores, mhz in cores_mhz[name]]
        assert [node.peak_flops for node in nodes] == pytest.approx(2 * peaks, rel=5e-3)


def test_a_uniform_step_takes_what_the_slowest_node_computes() -> None:
    case = Case("vgg16", "cifar10", "serial", "orin")  # fetching is nothing there
    (run,) = simulate_case(case, steps=STEPS, contestants=contestants("uniform")).values()
    slowest_s = 32 * max(case.scenario(CONTESTANTS[:1], steps=STEPS).values("compute_s"))
    assert slowest_s < run.settled_s < 1.06 * slowest_s  # two Nanos, 5 % noise


def test_loft_and_the_store_win_where_fetching_takes_long() -> None:
    case = Case("shufflenet_v2_x1_0", "imagenet", "serial", "xavier")
    epoch = epoch_seconds(case, steps=STEPS)
    assert epoch["LOFT"] < 0.75 * epoch["LB-BSP"] < 0.75 * epoch["uniform"]
    assert epoch["LB-BSP"] < epoch["LB-BSP, blind"]
    assert epoch["LOFT, store"] < epoch["LOFT"]
    assert epoch["LB-BSP, store"] < epoch["LB-BSP"]
    assert epoch[EXCHANGE] == pytest.approx(case.exchange_s * case.steps_per_epoch, abs=1e-3)


def test_loft_and_lbbsp_are_equal_where_fetching_takes_no_time() -> None:
    case = Case("vgg16", "cifar10", "serial", "orin")
    runs = simulate_case(case, steps=STEPS, contestants=contestants("LB-BSP", "LOFT"))
    assert runs["LOFT"].settled_s == pytest.approx(runs["LB-BSP"].settled_s, rel=0.02)


def test_savings_are_summed_up_without_and_with_the_exchange() -> None:
    epochs = {
        "a/x": {"LOFT": 50.0, "LB-BSP": 100.0, EXCHANGE: 100.0},
        "b/x": {"LOFT": 90.0, "LB-BSP": 100.0, EXCHANGE: 0.0},
        "c/x": {"LOFT": 110.0, "LB-BSP": 100.0, EXCHANGE: 900.0},
    }
    without = saved(epochs, "LOFT", "LB-BSP", counts_exchange=False)
    assert (without.median, without.largest, without.least) == (10.0, 50.0, -10.0)
    assert without.largest_case == "a/x"
    whole = saved(epochs, "LOFT", "LB-BSP", counts_exchange=True)
    assert (whole.median, whole.largest, whole.least) == (10.0, 25.0, -1.0)
    against = saved(epochs, "LB-BSP", "LOFT", counts_exchange=False)
    assert against.largest == 9.1  # 100 instead of 110: a saving is a share of the rival's time


def test_a_run_prints_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "claim.json"
    arguments = "--models squeezenet1_1 --datasets food101 --loaders serial --clusters orin"
    monkeypatch.setattr(
        sys, "argv", ["claim", *arguments.split(), "--steps", "40", "--json", str(file)]
    )
    published_claim.main()
    out = capsys.readouterr().out
    assert "simulation" in out
    assert "up to 46" in out
    kept = json.loads(file.read_text())
    assert "simulation" in kept["what"]
    assert kept["command"].startswith("python -m benchmarks.published_claim --models")
    epoch = kept["orin, serial"]["epoch_s"]["squeezenet1_1/food101"]
    assert f"{epoch['LOFT']:,.1f}" in out
    found = kept["orin, serial"]["saved_percent"]["LOFT, against LB-BSP"]["without exchange"]
    assert found["median"] == pytest.approx(100 * (1 - epoch["LOFT"] / epoch["LB-BSP"]), abs=0.06)


def test_an_unknown_model_is_an_error_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["claim", "--models", "vgg16,vgg99"])
    with pytest.raises(SystemExit):
        published_claim.main()
    assert "no vgg99; there are alexnet, vgg16" in capsys.readouterr().err
