from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import loft_hvd
from loft_hvd import cli
from loft_hvd.doctor import inspect as doctor
from loft_hvd.doctor.inspect import DoctorFinding, HorovodBuild, Section
from loft_hvd.doctor.run import RunResult
from loft_hvd.errors import ArgumentError, LoftError, MissingDependencyError
from loft_hvd.fleet.solvers import PACKING_SOLVERS, Packing, fill
from loft_hvd.fleet.timeline import Ints
from loft_hvd.simulate.scenario import read_scenario, shipped_scenarios
from tests.support.pages import blocks_of, read_page

_SECTIONS = (
    Section(
        "Versions",
        (DoctorFinding("torch", "2.13.0"), DoctorFinding("matplotlib", "none", "pip install x")),
    ),
)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(doctor, "inspect_all", lambda build: _SECTIONS)
    monkeypatch.setattr(doctor, "horovod_build", lambda: HorovodBuild("0.28.1"))
    return cli.build_app()


def _runs(monkeypatch: pytest.MonkeyPatch, *, is_right: bool) -> list[float]:
    limits: list[float] = []

    def run_check(build: HorovodBuild, *, timeout_s: float) -> RunResult:
        limits.append(timeout_s)
        return RunResult(is_right, ("horovodrun", "-np", "2"), 1.5, "the end of it")

    monkeypatch.setattr(cli, "run_check", run_check)
    return limits


def test_doctor_prints_findings_and_advice_and_starts_nothing(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = _runs(monkeypatch, is_right=True)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "2.13.0" in result.output
    assert "-> pip install x" in result.output
    last = result.output.splitlines()[-1]
    assert last == "Verdict: mend matplotlib first: pip install x."
    assert limits == []


def test_doctor_json_is_json_and_nothing_else(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(result.stdout)["Versions"][1] == {
        "name": "matplotlib",
        "value": "none",
        "advice": "pip install x",
    }


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_doctor_run_exits_0_only_when_the_result_is_right(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, is_right: bool, extra: list[str]
) -> None:
    limits = _runs(monkeypatch, is_right=is_right)
    result = CliRunner().invoke(app, ["doctor", "--run", "--timeout-s", "7", *extra])
    assert result.exit_code == (0 if is_right else 1)
    assert limits == [7.0]
    assert ("the end of it" in result.output) is (not is_right or bool(extra))


@pytest.mark.parametrize("sections", [(), _SECTIONS], ids=["nothing to mend", "advice"])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_last_line_of_doctor_run_agrees_with_the_exit_status(
    app: typer.Typer,
    monkeypatch: pytest.MonkeyPatch,
    is_right: bool,
    sections: tuple[Section, ...],
) -> None:
    monkeypatch.setattr(doctor, "inspect_all", lambda build: sections)
    _runs(monkeypatch, is_right=is_right)
    last = CliRunner().invoke(app, ["doctor", "--run"]).output.splitlines()[-1]
    failed = "Verdict: NOT ready, the all-reduce over 2 ranks failed: see above"
    assert last.startswith(failed) is not is_right
    assert ("mend matplotlib first" in last) is bool(sections)
    assert (last == "Verdict: ready.") is (is_right and not sections)


def _main(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["loft-hvd", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert _main(monkeypatch, "doctor") == 1
    captured = capsys.readouterr()
    assert "pip install 'loft-hvd[cli]'" in captured.err
    assert captured.out == ""


def test_error_on_purpose_is_one_line_and_no_traceback(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_check(build: HorovodBuild, *, timeout_s: float) -> RunResult:
        raise MissingDependencyError("doctor --run needs horovodrun: run `make setup`")

    monkeypatch.setattr(cli, "run_check", run_check)
    assert _main(monkeypatch, "doctor", "--run") == 1
    assert capsys.readouterr().err == (
        "loft-hvd: doctor --run needs horovodrun: run `make setup`\n"
    )


def test_version_is_that_of_the_package(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"loft-hvd {loft_hvd.__version__}\n")


@pytest.mark.parametrize("words", [["frob"], ["doctor", "--timeout-s", "soon"]])
def test_wrong_words_are_a_usage_error(app: typer.Typer, words: list[str]) -> None:
    assert CliRunner().invoke(app, words).exit_code == 2


_SCENARIO = """
name = "one slow rank"
world_size = 4
global_batch_size = 64
steps = 40
policies = ["uniform", "loft"]
[ranks]
compute_s = [0.001, 0.001, 0.004, 0.001]
"""


def test_simulate_prints_every_policy_and_writes_json_and_plot(
    app: typer.Typer, tmp_path: Path
) -> None:
    scenario, found = tmp_path / "slow.toml", tmp_path / "found.json"
    picture = tmp_path / "found.png"
    scenario.write_text(_SCENARIO)
    options = ["--json", str(found), "--plot", str(picture)]
    result = CliRunner().invoke(app, ["simulate", str(scenario), *options])
    assert result.exit_code == 0, result.output
    policies = json.loads(found.read_text())["policies"]
    assert set(policies) == {"uniform", "loft", "oracle"}
    for name, one in policies.items():
        assert f"{one['mean_step_s']:.4f}" in result.output
        assert name in result.output
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_simulate_compares_policies_over_random_clusters(app: typer.Typer, tmp_path: Path) -> None:
    found = tmp_path / "gains.json"
    result = CliRunner().invoke(
        app, ["simulate", "--random", "2", "--seed", "5", "--json", str(found)]
    )
    assert result.exit_code == 0, result.output
    assert "random clusters" in result.stderr
    assert "random clusters" not in result.stdout
    summary = json.loads(found.read_text())
    assert [cluster["seed"] for cluster in summary["clusters"]] == [5, 6]
    for rival, gains in summary["gain"].items():
        assert gains == sorted(gains)
        assert f"{100 * gains[0]:.1f}" in result.output, rival
        means = [cluster["mean_step_s"] for cluster in summary["clusters"]]
        assert gains[-1] == max(1 - mean["loft"] / mean[rival] for mean in means)


@pytest.mark.parametrize(
    "words", [["a.toml", "--random", "2"], ["--json", "a"], ["--random", "2", "--plot", "a"]]
)
def test_simulate_refuses_options_that_do_not_fit(app: typer.Typer, words: list[str]) -> None:
    assert CliRunner().invoke(app, ["simulate", *words]).exit_code == 2


def test_simulate_lists_the_shipped_scenarios_and_takes_their_names(app: typer.Typer) -> None:
    listed = CliRunner().invoke(app, ["simulate"])
    assert listed.exit_code == 0, listed.output
    for name, path in shipped_scenarios().items():
        assert name in listed.output
        assert read_scenario(name) == read_scenario(path)
    assert len(shipped_scenarios()) >= 20


@pytest.mark.parametrize("columns", [80, 30])
def test_no_figure_is_lost_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    row = ("uniform", "0.12345678", "9.87654321", "-3.21 %")
    cli._print_table([("policy", "mean step", "p95", "saved"), row])
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert all(value in text for value in row)
    assert max(map(len, lines)) <= columns


def test_report_takes_the_newest_log_of_a_folder(app: typer.Typer, tmp_path: Path) -> None:
    for name, changed_s in (("loft-20260101-000000-0.jsonl", 2e9), ("loft-20270101-0.jsonl", 1e9)):
        path = tmp_path / name
        path.write_text('{"kind": "fault", "step": 7, "error": "rank 1", "text": ""}\n')
        os.utime(path, (changed_s, changed_s))
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].endswith(
        "loft-20260101-000000-0.jsonl, the newest of its folder"
    )
    assert CliRunner().invoke(app, ["report", str(tmp_path / "none")]).exit_code == 1


@pytest.mark.parametrize("columns", [60, 41])
def test_a_report_in_a_narrow_terminal_is_broken_between_words(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    log = str(Path(__file__).parent / "logs/faulty_worker.jsonl")
    piped = CliRunner().invoke(app, ["report", log]).stdout
    assert max(map(len, piped.splitlines())) > 100  # a file's lines are left alone
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what it writes to for a terminal then
    shown = CliRunner().invoke(app, ["report", log]).stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert shown.split() == piped.split()


@pytest.mark.parametrize("command", [("report",), ("top", "--once")])
def test_an_empty_file_is_no_run_log(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    empty = tmp_path / "loft-1.jsonl"
    empty.touch()
    assert _main(monkeypatch, *command, str(empty)) == 1
    assert "it has no line" in capsys.readouterr().err


def test_check_says_that_the_script_is_not_there(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, "check", "trian.py") == 1
    assert "there is no file 'trian.py'" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["0", "4,-1", "nan", "inf"])
def test_bench_refuses_a_size_that_is_none_before_it_starts_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sizes: str
) -> None:
    assert _main(monkeypatch, "bench", "allreduce", "--mb", sizes) == 1
    error = capsys.readouterr().err
    assert error.startswith("loft-hvd: bench allreduce: sizes of")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("bench", ["allreduce", "step"])
@pytest.mark.parametrize(
    ("device", "said"),
    [("tpu", "device='tpu' is not one of cpu, cuda"), ("cuda", "torch finds none")],
)
def test_bench_refuses_a_device_that_is_not_here_before_it_starts_ranks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    bench: str,
    device: str,
    said: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert _main(monkeypatch, "bench", bench, "--device", device) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"loft-hvd: bench {bench}")
    assert said in error


def test_bench_refuses_half_a_row(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", "--rows", "3,2.5"])
    assert result.exit_code == 2
    assert "--rows '3,2.5'" in result.output


def test_report_says_that_a_folder_has_no_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _main(monkeypatch, "report", str(tmp_path)) == 1
    assert "no run log (loft-*.jsonl) in this folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "cannot be read"), ("speed = 3", "['speed']"), ("name = ", "slow.toml")],
)
def test_simulate_says_what_is_wrong_with_a_scenario(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: str | None,
    says: str,
) -> None:
    scenario = tmp_path / "slow.toml"
    if text is not None:
        scenario.write_text(text)
    assert _main(monkeypatch, "simulate", str(scenario)) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "file"), [("--json", "none/found.json"), ("--plot", "none/a.png"), ("--plot", "a.x")]
)
def test_simulate_names_a_file_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
    file: str,
) -> None:
    scenario = tmp_path / "slow.toml"
    scenario.write_text(_SCENARIO)
    path = str(tmp_path / file)
    assert _main(monkeypatch, "simulate", str(scenario), option, path) == 1
    assert f"{option} {path!r} cannot be written" in capsys.readouterr().err


def test_bench_robustness_prints_a_matrix_and_writes_it(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn", reason="the digits ship inside scikit-learn")
    monkeypatch.setenv("LOFT_HVD_THREADS", "1")
    file = tmp_path / "found.json"
    options = ["--rules", "robust;mean", "--attacks", "none,mimic", "--skews", "sorted"]
    options += ["--workers", "4:1", "--seeds", "1", "--steps", "2", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "robustness", *options])
    assert result.exit_code == 0, result.output
    assert "mlp, n=4 f=1" in result.stdout
    assert "5 of 5 runs" in result.stderr  # and what clean is, by which goals are judged
    found = json.loads(file.read_text())
    assert {(cell["defence"], cell["attack"]) for cell in found["cells"]} == {
        (rule, attack) for rule in ("robust", "mean") for attack in ("none", "mimic")
    }
    wrong = CliRunner().invoke(app, ["bench", "robustness", "--workers", "8"])
    assert wrong.exit_code == 2
    assert "--workers '8'" in wrong.output


def _plan_files(folder: Path) -> list[str]:
    """Write the two files of docs/plan.md, with a second job; return their names."""
    blocks = [each for each in blocks_of(read_page("plan.md")) if each.kind == "toml"]
    cluster, jobs = (block.text for block in blocks[:2])
    (folder / "cluster.toml").write_text(cluster)
    (folder / "jobs.toml").write_text(jobs + jobs.replace('"resnet"', '"other"', 1))
    return [str(folder / name) for name in ("cluster.toml", "jobs.toml")]


def test_plan_writes_what_is_asked(app: typer.Typer, tmp_path: Path) -> None:
    files = _plan_files(tmp_path)
    written = [str(tmp_path / name) for name in ("plan.json", "sizes.json")]
    words = ["--job", "other", "--no-simulate", "--json", written[0], "--sizes", written[1]]
    words += ["--page", str(tmp_path / "plan.html")]
    result = CliRunner().invoke(app, ["plan", *files, *words])
    assert result.exit_code == 0, result.output
    assert "job other: 8 ranks on 2 of 4 hosts" in result.output
    assert "simulated" not in result.output
    plan, sizes = (json.loads(Path(file).read_text()) for file in written)
    assert plan["simulated_step_s"] is None
    assert "<h1>job other: 8 ranks on 2 of 4 hosts" in (tmp_path / "plan.html").read_text()
    assert sizes["hosts"] == {"a1": [128] * 4, "a2": [128] * 4}
    line = CliRunner().invoke(app, ["plan", *files, *words, "--emit", "mpirun"]).output
    assert line.startswith("mpirun -np 8 -H a1:4,a2:4 ")
    assert f"LOFT_HVD_FIRST_SIZES={written[1]}" in line


def test_plan_without_a_name_plans_all_jobs(app: typer.Typer, tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    words = ["--no-simulate", "--json", file, "--policy", "fifo"]
    words += ["--page", str(tmp_path / "plan.html")]
    result = CliRunner().invoke(app, ["plan", *_plan_files(tmp_path), *words])
    assert result.exit_code == 0, result.output
    assert "2 of 2 jobs admitted, worth 2; policy fifo" in result.output
    plan = json.loads(Path(file).read_text())
    assert [job["name"] for job in plan["jobs"]] == ["resnet", "other"]
    assert plan["jobs"][1]["start_s"] >= plan["jobs"][0]["end_s"]  # both want all A100
    page = (tmp_path / "plan.html").read_text()
    assert "<title>plan of jobs.toml</title>" in page
    assert "other: waits, 0 to" in page


def test_bench_plan_prints_all_policies_and_keeps_a_record(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scipy", reason="the bound is a linear program")
    file = tmp_path / "plan.json"
    asked: list[Packing] = []

    def solver(packing: Packing) -> Ints | None:
        asked.append(packing)
        return fill(packing)

    monkeypatch.setitem(PACKING_SOLVERS, "round", solver)
    words = ["--settings", "20x4-50", "--policies", "price,fifo", "--seeds", "1"]
    words += ["--solver", "round"]
    page = tmp_path / "plan.html"
    words += ["--json", str(file), "--page", str(page)]
    result = CliRunner().invoke(app, ["bench", "plan", *words])
    assert result.exit_code == 0, result.output
    assert "price/it" in result.output
    assert page.read_text().count("<svg") == 2
    assert "<h2>20x4-50, 1 draws</h2>" in page.read_text()
    found = json.loads(file.read_text())
    assert asked
    assert found["bench"]["solver"] == "round"
    summary = found["summary"]["20x4-50"]
    assert 1.0 >= summary["price"]["share"] > summary["fifo"]["share"] > 0.0


def test_bench_plan_tells_of_an_optimum_that_was_not_proven(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="the bound is a linear program")
    real = optimize.milp

    def late(*args: Any, integrality: Any, **options: Any) -> Any:
        if integrality.any():
            return optimize.OptimizeResult(status=1, x=None, fun=None)
        return real(*args, integrality=integrality, **options)

    monkeypatch.setattr(optimize, "milp", late)
    files = {key: tmp_path / f"plan.{key}" for key in ("json", "page")}
    words = ["--settings", "gadget-small", "--policies", "fifo", "--seeds", "1"]
    words += [word for key, file in files.items() for word in (f"--{key}", str(file))]
    result = CliRunner().invoke(app, ["bench", "plan", *words])
    assert result.exit_code == 0, result.output
    told = "a bound on worth: HiGHS proved no answer within 60 s, and what it had by then is not"
    assert f"gadget-small, 1 times: {told}" in result.stderr
    assert f"1 times: {told}" in files["page"].read_text()
    (row,) = json.loads(files["json"].read_text())["runs"]["gadget-small"]
    assert row["optimum"] is None
    assert list(row["warnings"].values()) == [1]


def test_bench_plan_refuses_a_solver_that_is_none(app: typer.Typer) -> None:
    with pytest.raises(ArgumentError, match=r"solver 'x' is none of \['fill', 'milp', 'round'\]"):
        CliRunner().invoke(app, ["bench", "plan", "--solver", "x"], catch_exceptions=False)


def test_a_job_beside_others_starts_where_their_plan_has_it(
    app: typer.Typer, tmp_path: Path
) -> None:
    files = _plan_files(tmp_path)
    words = ["plan", *files, "--no-simulate"]
    file = tmp_path / "plan.json"
    result = CliRunner().invoke(app, [*words, "--policy", "price", "--json", str(file)])
    assert result.exit_code == 0, result.output
    for planned in json.loads(file.read_text())["jobs"]:
        hosts = ",".join(f"{name}:{count}" for name, count in planned["hosts"].items())
        only = ["--job", planned["name"], "--emit", "horovodrun"]
        result = CliRunner().invoke(app, [*words, "--policy", "price", *only])
        assert result.exit_code == 0, result.output
        assert f" -H {hosts} " in result.stdout
        assert f"{planned['name']} starts at " in result.stderr
    alone = CliRunner().invoke(app, [*words, "--job", "resnet", "--emit", "horovodrun"])
    assert "resnet as if alone" in alone.stderr


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--policy", "price", "--check", "log"], "--check is of one job"),
        (
            ["--policy", "las", "--job", "resnet", "--emit", "mpirun"],
            "no place that was worked out",
        ),
        (
            ["--emit", "mpirun"],
            r"of one job, but all of \['other', 'resnet'\] are planned; name one",
        ),
        (["--policy", "luck"], "--policy 'luck' must be one of price"),
        (["--job", "third"], r"--job 'third' is none of \['other', 'resnet'\]"),
        (["--job", "other", "--emit", "ray"], "--emit 'ray' must be one of horovodrun"),
        (["--job", "other", "--sizes", "."], "--sizes '.'"),
    ],
)
def test_plan_says_what_it_cannot_do(
    app: typer.Typer, tmp_path: Path, words: list[str], match: str
) -> None:
    files = _plan_files(tmp_path)
    with pytest.raises(LoftError, match=match):
        CliRunner().invoke(app, ["plan", *files, "--no-simulate", *words], catch_exceptions=False)


def test_plan_compares_a_run_with_its_prediction(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        '[[hosts]]\nname = "vm"\nslots = { CPU = 3 }\nlink_bytes_per_s = 1e9\n'
    )
    (tmp_path / "jobs.toml").write_text(
        '[[jobs]]\nname = "a"\ncommand = ["x"]\nmodel_bytes = 4\nglobal_batch_size = 36\n'
        "steps = 9\nmodels.CPU.compute_s = 3e-3\n"
    )
    log = Path(__file__).parent / "logs/slow_cpu.jsonl"
    files = [str(tmp_path / name) for name in ("cluster.toml", "jobs.toml")]
    result = CliRunner().invoke(app, ["plan", *files, "--check", str(log)])
    assert result.exit_code == 0, result.output
    assert "slow_cpu.jsonl: a step took 90" in result.output
    assert "MORE THAN 10 % APART" in result.output
    assert [line.split()[:2] for line in result.output.splitlines()[-3:]] == [
        [str(rank), "vm"] for rank in range(3)
    ]
