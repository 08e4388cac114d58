"""Models of devices from run logs are those of the devices; what a log does not tell is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loft_hvd.balance.limits import own_device
from loft_hvd.errors import PlanError
from loft_hvd.fleet.check_log import check_log, check_table, describe_check
from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job
from loft_hvd.fleet.measured import layout_of, read_log, usual_longest, with_logs
from loft_hvd.fleet.rate import predict
from loft_hvd.fleet.run import describe, plan_job, show_time
from loft_hvd.fleet.traffic import HostRanks, Layout
from loft_hvd.transport.local import LocalTransport, run_ranks
from tests.support.live import SECONDS, Run

FLEET = Fleet([Host("quick.lab", {"A": 1}, 1e9), Host("slow", {"B": 1}, 1e9)])
JOB = Job("job", ["python"], 4.0, 64, steps=100)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the lines of a run whose second rank takes three times as long a sample."""
    folder = tmp_path_factory.mktemp("runs")

    def work(transport: LocalTransport) -> None:
        run = Run(transport, log_dir=folder if transport.rank == 0 else None)
        for _ in range(120):
            run.step()
        run.balancer._live.settle()

    run_ranks(2, work)
    (path,) = folder.glob("*.jsonl")
    host = own_device()[0]
    text = path.read_text()
    assert f'"{host}/0 ' in text
    text = text.replace(f'"{host}/0 ', '"quick/0 ').replace(f'"{host}/1 ', '"slow/0 ')
    assert '"nodes": [0, 0]' in text
    return text.replace('"nodes": [0, 0]', '"nodes": [0, 1]')


def changed(text: str, kind: str, change: Callable[[dict[str, Any]], None]) -> str:
    """Return a log with each line of a kind changed."""
    entries = [json.loads(line) for line in text.splitlines()]
    for entry in entries:
        if entry["kind"] == kind:
            change(entry)
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def job_of(tmp_path: Path, text: str, **given: Any) -> Job:
    path = tmp_path / "loft-x.jsonl"
    path.write_text(text)
    return replace(JOB, logs=[str(path)], **given)


def test_models_are_those_of_the_devices(tmp_path: Path, log: str) -> None:
    job, origins = with_logs(FLEET, job_of(tmp_path, log), now_s=read_time(log) + 3 * 86400)
    assert job.models["A"].compute_s == pytest.approx(SECONDS[0], rel=0.02)
    assert job.models["B"].compute_s == pytest.approx(SECONDS[1], rel=0.02)
    text = origins["A"].text
    assert text.startswith("measured 3 days ago on ranks 0, ")
    assert "batches in the newest interval of loft-x.jsonl" in text
    assert origins["A"].error == pytest.approx(0.0, abs=0.05)
    found = predict(FLEET, job, layout_of(FLEET, job, read_log(job.logs[0]))[0])
    assert found.sizes == (48, 16)
    assert found.longest_s == pytest.approx(0.48, rel=0.02)


def read_time(text: str) -> float:
    times = [json.loads(line) for line in text.splitlines() if '"kind": "times"' in line]
    return float(times[-1]["time_s"])


def test_a_typed_model_goes_first(tmp_path: Path, log: str) -> None:
    typed = DeviceModel(1.0)
    job, origins = with_logs(FLEET, job_of(tmp_path, log, models={"A": typed}), now_s=0.0)
    assert job.models["A"] == typed
    assert origins["A"].text == "typed in the file of jobs"
    assert origins["B"].error is not None


def test_classes_are_found_by_the_names_of_devices_on_other_hosts(tmp_path: Path, log: str) -> None:
    fleet = Fleet([Host("n1", {"CPU": 1}, 1e9), Host("n2", {"T4": 1}, 1e9)])

    def rename(entry: dict[str, Any]) -> None:
        entry["devices"] = ["away/0 CPU AMD EPYC", "away/1 Tesla T4"]

    job, _ = with_logs(fleet, job_of(tmp_path, changed(log, "run", rename)), now_s=0.0)
    assert job.models["T4"].compute_s == pytest.approx(SECONDS[1], rel=0.02)

    def unknown(entry: dict[str, Any]) -> None:
        entry["devices"][1] = "away/0 NVIDIA H100"

    with pytest.raises(PlanError, match=r"rank 1 ran on 'away' with the device 'NVIDIA H100'"):
        with_logs(fleet, job_of(tmp_path, changed(log, "run", unknown)), now_s=0.0)


def test_terms_that_a_log_does_not_tell_are_refused_by_name(tmp_path: Path, log: str) -> None:
    def blur(entry: dict[str, Any]) -> None:
        entry["ranks"][1]["unclear"] = ["compute_fixed_s", "compute_s"]

    job = job_of(tmp_path, changed(log, "fit", blur))
    with pytest.raises(PlanError, match="compute_s of class 'B' cannot be told apart on ranks"):
        with_logs(FLEET, job, now_s=0.0)
    assert with_logs(FLEET, job, now_s=0.0, assume=True)[0].models.keys() == {"A", "B"}


def test_times_that_fit_no_model_are_refused(tmp_path: Path, log: str) -> None:
    def spoil(entry: dict[str, Any]) -> None:
        entry["ranks"][0]["is_poor"] = True

    job = job_of(tmp_path, changed(log, "fit", spoil))
    with pytest.raises(PlanError, match=r"times of ranks \[0\], of class 'A', fit no model"):
        with_logs(FLEET, job, now_s=0.0)
    one_class = Fleet([Host("quick", {"A": 1}, 1e9), Host("slow", {"A": 1}, 1e9)])
    found = with_logs(one_class, job, now_s=0.0)[0].models["A"]  # the other rank tells
    assert found.compute_s == pytest.approx(SECONDS[1], rel=0.02)


def test_a_log_without_times_says_what_it_lacks(tmp_path: Path, log: str) -> None:
    head = "".join(line + "\n" for line in log.splitlines() if '"kind": "run"' in line)
    with pytest.raises(PlanError, match="has no times or fit, from which models come"):
        with_logs(FLEET, job_of(tmp_path, head), now_s=0.0)


def test_caps_and_what_a_remote_sample_costs_beside_its_bytes(tmp_path: Path, log: str) -> None:
    def cap(entry: dict[str, Any]) -> None:
        entry["caps"] = [48, None]

    def fetch(entry: dict[str, Any]) -> None:
        entry["ranks"][0] |= {"remote_s": 3e-3, "unclear": []}

    def read(entry: dict[str, Any]) -> None:
        entry["ranks"][0] |= {"remote": 5.0}

    text = log
    for kind, change in (("run", cap), ("fit", fetch), ("times", read)):
        text = changed(text, kind, change)
    fleet = replace(FLEET, data=[DataSet("d", 1000, 1e6)])  # 1 ms a sample on a link of 1 GB/s
    found = with_logs(fleet, job_of(tmp_path, text, data="d"), now_s=0.0)[0].models
    assert found["A"].max_batch == 48
    assert found["B"].max_batch is None
    assert found["A"].remote_s == pytest.approx(2e-3)


def test_ranks_of_containers_on_a_node_share_its_link(tmp_path: Path, log: str) -> None:
    def share(entry: dict[str, Any]) -> None:
        entry["nodes"] = [0, 0]

    def fetch(entry: dict[str, Any]) -> None:
        entry["ranks"][0] |= {"remote_s": 3e-3, "unclear": []}

    def read(entry: dict[str, Any]) -> None:
        entry["ranks"][0] |= {"remote": 5.0}

    text = changed(changed(log, "fit", fetch), "times", read)
    fleet = replace(FLEET, data=[DataSet("d", 1000, 1e6)])
    job = job_of(tmp_path, changed(text, "run", share), data="d")
    # 2 ms of a sample's 3 are its bytes on a link of 1 GB/s that two ranks share.
    assert with_logs(fleet, job, now_s=0.0)[0].models["A"].remote_s == pytest.approx(1e-3)


def test_a_time_is_known_less_well_far_from_the_batches_measured(tmp_path: Path, log: str) -> None:
    def doubt(entry: dict[str, Any]) -> None:
        for rank in entry["ranks"]:
            rank |= {"error_s": 0.01 * rank["predicted_s"], "errors": {"compute_s": 1e-4}}

    job = job_of(tmp_path, changed(log, "fit", doubt), model_bytes=4.0)
    origin = with_logs(FLEET, job, now_s=0.0)[1]["A"]
    assert origin.samples == pytest.approx(48, abs=1)
    assert origin.error_at(origin.samples, 0.48) == pytest.approx(0.01)
    # 48 samples more of 0.1 ms are 4.8 ms, of 960 a half percent.
    far = origin.error_at(origin.samples + 48, 0.96)
    assert far == pytest.approx((0.01**2 + 0.005**2) ** 0.5)

    def lose(entry: dict[str, Any]) -> None:  # a number that was not finite
        doubt(entry)
        entry["ranks"][0]["errors"]["compute_s"] = None

    path = tmp_path / "lost"
    path.mkdir()
    assert with_logs(FLEET, job_of(path, changed(log, "fit", lose)), now_s=0.0)[1]["A"].slope_s == 0
    plan = plan_job(FLEET, job, simulates=False)
    assert plan.error == pytest.approx(0.01, abs=1e-3)
    ends = f"{show_time(plan.p05_s)} to {show_time(plan.p95_s)} in 9 of 10 cases"
    assert any(ends in line for line in describe(plan))
    assert plan.p05_s + plan.p95_s == pytest.approx(2 * plan.total_s)


def test_a_knee_is_that_of_the_log(tmp_path: Path, log: str) -> None:
    def bend(entry: dict[str, Any]) -> None:
        entry["ranks"][0]["knee"] = 20.0

    models = with_logs(FLEET, job_of(tmp_path, changed(log, "fit", bend)), now_s=0.0)[0].models
    assert (models["A"].knee, models["B"].knee) == (20.0, 0.0)
    assert models["A"].plateau_s == pytest.approx(20 * SECONDS[0], rel=0.02)


def test_logs_of_an_earlier_version_are_read(tmp_path: Path, log: str) -> None:
    def of_then(entry: dict[str, Any]) -> None:
        entry.pop("nodes", None)
        for rank in entry.get("ranks", []):
            rank.pop("errors", None)
            rank.pop("knee", None)

    text = changed(changed(log, "run", of_then), "fit", of_then)
    older, newer = (with_logs(FLEET, job_of(tmp_path, each), now_s=0.0) for each in (text, log))
    assert older[0].models == newer[0].models
    assert older[1]["A"].error == newer[1]["A"].error


def test_what_backward_passes_hide_follows_from_what_steps_took(tmp_path: Path, log: str) -> None:
    """Steps that are no longer than the ranks' work hide all of an exchange of a quarter second."""
    job = job_of(tmp_path, log, model_bytes=250e6)
    assert with_logs(FLEET, job, now_s=0.0)[0].hidden_share == pytest.approx(1.0, abs=0.05)

    def wait(entry: dict[str, Any]) -> None:
        for rank in entry["ranks"]:
            rank["typical_wall_s"] += 0.125

    job = job_of(tmp_path, changed(log, "times", wait), model_bytes=250e6)
    sent_s = 250e6 * 1514 / 1448 / 1e9
    expected = 1.0 - 0.125 / sent_s
    found, _ = with_logs(FLEET, job, now_s=0.0)
    assert found.hidden_share == pytest.approx(expected, abs=0.05)
    assert found.rest_s == 0.0


@pytest.mark.parametrize("model_bytes", [25e6, 4e3])
def test_what_steps_take_beyond_work_and_exchange_counts_everywhere(
    tmp_path: Path, log: str, model_bytes: float
) -> None:
    def wait(entry: dict[str, Any]) -> None:
        for rank in entry["ranks"]:
            rank["typical_wall_s"] += 0.2

    job = job_of(tmp_path, log, model_bytes=model_bytes)
    before = with_logs(FLEET, job, now_s=0.0)[0]
    job = job_of(tmp_path, changed(log, "times", wait), model_bytes=model_bytes)
    found = with_logs(FLEET, job, now_s=0.0)[0]
    sent_s = model_bytes * 1514 / 1448 / 1e9
    told = model_bytes > 1e6  # more than 2 % of a step
    hidden_s = (before.hidden_share or 0.0) * sent_s if told else 0.0
    assert found.hidden_share == 0.0
    more_s = 0.2 - hidden_s - (0.0 if told else sent_s)
    assert found.rest_s is not None
    assert found.rest_s - (before.rest_s or 0.0) == pytest.approx(more_s, abs=2e-3)
    layout = Layout.of([HostRanks(host, "A", 1) for host in FLEET.hosts if "A" in host.slots])
    typed = replace(found, rest_s=0.0)
    assert predict(FLEET, found, layout).step_s == pytest.approx(
        predict(FLEET, typed, layout).step_s + found.rest_s
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"hidden_share": 0.5},
        {"hidden_share": 0.5, "model_bytes": 4e3},
        {"scope": "model", "rule": "geometric_median:f=0"},
        {"scope": "model", "rule": "geometric_median:f=0", "hidden_share": 1.0},
    ],
)
@pytest.mark.parametrize("more_s", [0.02, 0.2])
def test_a_plan_predicts_the_step_of_the_log_it_is_made_from(
    tmp_path: Path, log: str, given: dict[str, Any], more_s: float
) -> None:
    def wait(entry: dict[str, Any]) -> None:
        for rank in entry["ranks"]:
            rank["typical_wall_s"] = 0.48 + more_s

    text = changed(log, "times", wait)
    job = job_of(tmp_path, text, **({"model_bytes": 25e6} | given))
    run = read_log(job.logs[0])
    found = with_logs(FLEET, job, now_s=0.0)[0]
    assert found.hidden_share == given.get("hidden_share", found.hidden_share)
    predicted = predict(FLEET, found, layout_of(FLEET, job, run)[0])
    assert predicted.exchange.exposed_s == pytest.approx(0.48 + more_s - usual_longest(run))


@pytest.mark.parametrize(("hidden_share", "rest_s"), [(0.0, None), (None, 0.0), (0.0, 0.0)])
def test_a_share_or_rest_of_nothing_that_is_typed_counts(
    tmp_path: Path, log: str, hidden_share: float | None, rest_s: float | None
) -> None:
    job = job_of(tmp_path, log, model_bytes=250e6)
    told = with_logs(FLEET, job, now_s=0.0)[0]
    assert (told.hidden_share or 0.0) > 0.1
    typed = replace(job, hidden_share=hidden_share, rest_s=rest_s)
    found = with_logs(FLEET, typed, now_s=0.0)[0]
    assert found.hidden_share == (told.hidden_share if hidden_share is None else 0.0)
    assert rest_s is None or found.rest_s == 0.0


def test_a_later_log_that_does_not_tell_leaves_what_an_earlier_one_told(
    tmp_path: Path, log: str
) -> None:
    def wait(entry: dict[str, Any]) -> None:
        for rank in entry["ranks"]:
            rank["typical_wall_s"] += 0.125

    def lose(entry: dict[str, Any]) -> None:  # times of a rank that the log leaves out
        entry["num_ranks"] = 3

    told = with_logs(
        FLEET, job_of(tmp_path, changed(log, "times", wait), model_bytes=250e6), now_s=0.0
    )[0]
    assert (told.hidden_share or 0.0) > 0.1
    later = tmp_path / "later.jsonl"
    later.write_text(changed(log, "times", lose))
    both = replace(told, models={}, hidden_share=None, rest_s=None, logs=[*told.logs, str(later)])
    found = with_logs(FLEET, both, now_s=0.0)[0]
    assert (found.hidden_share, found.rest_s) == (told.hidden_share, told.rest_s)


def test_a_host_that_is_none_of_the_clusters_is_named(tmp_path: Path, log: str) -> None:
    fleet = Fleet([Host("quick", {"A": 1}, 1e9)])
    job = job_of(tmp_path, log)
    with pytest.raises(PlanError, match="host 'slow' is none of the cluster's"):
        layout_of(fleet, job, read_log(job.logs[0]))


def test_a_run_stands_beside_its_prediction(tmp_path: Path, log: str) -> None:
    """Hosts in another order than the log's ranks; the slow one's model is a third too fast."""
    quick, slow_host = FLEET.hosts
    fleet = Fleet([replace(quick, rack="z"), replace(slow_host, rack="a")])
    job = job_of(tmp_path, log)
    typed = replace(job, logs=[], models={"A": DeviceModel(SECONDS[0]), "B": DeviceModel(2e-2)})
    check = check_log(fleet, typed, job.logs[0])
    assert check.order == [1, 0]
    assert check.predicted.sizes == (16, 48)
    assert check.step_s == pytest.approx(0.48, rel=0.02)
    assert not check.is_apart  # the quick rank takes as long
    rows = check_table(check)
    assert [row[:3] for row in rows[1:]] == [["0", "quick", "48"], ["1", "slow", "16"]]
    assert [row[-2:] for row in rows[1:]] == [["480.0", "480.0"], ["480.0", "320.0"]]
    sent = {"kind": "exchange", "time_s": 1.0, "step": 100, "lane": "mesh", "num_steps": 20}
    sent |= {"whole_s": 0.02, "waited_s": 0.01, "bytes_per_s": 117e6}
    Path(job.logs[0]).write_text(log + json.dumps(sent) + "\n")
    *_, whole, links = describe_check(check_log(fleet, typed, job.logs[0]))
    assert "20 ms on rank 0" in whole
    assert links.startswith("the slowest rank sent 936 Mb/s")
    assert links.endswith("the slowest link of these hosts is said to carry 8 Gb/s")
    slow = replace(typed, models={"A": DeviceModel(0.5e-2), "B": DeviceModel(2e-2)})
    check = check_log(fleet, slow, job.logs[0])
    assert check.is_apart
    assert "predicted 320 ms (-33.3%); MORE THAN 10 % APART" in describe_check(check)[0]
