"""``loft-hvd``: parsing and printing, nothing else."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loft_hvd import doctor
from loft_hvd.doctor_run import RunResult, run_check
from loft_hvd.errors import DataError, LoftError, MissingDependencyError
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.runlog import read_run_log

if TYPE_CHECKING:
    import typer

    from loft_hvd.bench.kernels import KernelBench
    from loft_hvd.bench.ranks import Job
    from loft_hvd.bench.steps import StepBench

__all__ = ["build_app", "main"]


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Who takes part in a benchmark, and how many samples each contestant gives."""

    job: Job
    rounds: int


def _doctor(*, run: bool, as_json: bool, timeout_s: float) -> int:
    """Print what is here; return the exit status."""
    build = doctor.horovod_build()
    sections = doctor.inspect_all(build)
    result = run_check(build, timeout_s=timeout_s) if run else None
    if as_json:
        found: dict[str, object] = {
            section.title: [dataclasses.asdict(finding) for finding in section.findings]
            for section in sections
        }
        if result is not None:
            found["Run"] = dataclasses.asdict(result)
        print(json.dumps(found, indent=1))
    else:
        _print_sections(sections)
        if result is not None:
            _print_run(result)
    return 0 if result is None or result.is_right else 1


def _print_sections(sections: tuple[doctor.Section, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in sections:
        table.add_row(Text(section.title, style="bold cyan"), "")
        for finding in section.findings:
            table.add_row(f"  {finding.name}", Text(finding.value))
            if finding.advice:
                table.add_row("", Text(f"-> {finding.advice}", style="yellow"))
    console.print(table)


def _print_run(result: RunResult) -> None:
    print(f"Run  {' '.join(result.command)}")
    if not result.is_right:
        print(result.output)
    verdict = "right" if result.is_right else "NOT right"
    print(f"  a robust all-reduce over 2 ranks is {verdict} ({result.seconds:.1f} s)")


def _simulate(scenario: str, *, json_file: str | None, plot_file: str | None) -> int:
    """Run a scenario and print its policies; return the exit status."""
    from loft_hvd.simulate.run import rows, run_file

    try:
        results = run_file(scenario)
    except OSError as error:
        raise DataError(f"scenario {scenario!r} cannot be read ({error}); name a file") from error
    print(results.scenario.description or results.scenario.name)
    _print_table(rows(results))
    if json_file is not None:
        _write_json(json_file, results.to_dict())
    if plot_file is not None:
        try:
            importlib.import_module("loft_hvd.simulate.plots").plot(results, plot_file)
        except (OSError, ValueError) as error:  # ValueError: no format of that name
            raise DataError(f"--plot {plot_file!r} cannot be written ({error})") from error
    return 0


def _compare(num_clusters: int, *, seed: int, json_file: str | None) -> int:
    """Run all policies on random clusters, print what LOFT gains; return the exit status."""
    from rich.progress import track

    from loft_hvd.simulate.compare import compare, summarise, summary_rows

    seeds = range(seed, seed + num_clusters)
    summary = summarise(list(track(compare(seeds), "random clusters", num_clusters)))
    _print_table(summary_rows(summary))
    print(f"worst against the best policy of a cluster: +{100 * summary['worst_excess']:.1f} %")
    if json_file is not None:
        _write_json(json_file, summary)
    return 0


def _write_json(path: str, content: Mapping[str, object]) -> None:
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"--json {path!r} cannot be written ({error})") from error


def _bench_allreduce(
    megabytes: Sequence[float], *, ranks: _Ranks, peer: bool, json_file: str | None
) -> int:
    """Time robust all-reduces against Horovod's; return the exit status."""
    from loft_hvd.bench.ranks import allreduce_goal, judge, judge_peer, run_bench, table

    options = {"megabytes": list(megabytes), "rounds": ranks.rounds, "has_peer": peer}
    found = run_bench("allreduce", options, ranks.job)
    judged = {}
    for size, samples in found.items():
        goals = {name: allreduce_goal(name, float(size), ranks.job) for name in samples}
        judged[f"{size} MB"] = judge(samples, goals)
        _print_table(table(f"{size} MB, {ranks.job}", judged[f"{size} MB"]))
        if peer:
            found_peer = judged[f"{size} MB"]["against_peer"] = judge_peer(samples, ranks.job)
            print(
                f"Median: {found_peer['ratio']:.1f} times as fast as a blocking exchange with "
                f"torch.median, goal {found_peer['goal']}: {found_peer['verdict']}"
            )
    return _finish_bench({"ranks": ranks.job.num_ranks, "allreduce": judged}, json_file)


def _bench_step(bench: StepBench, *, job: Job, json_file: str | None) -> int:
    """Time whole training steps against Horovod's optimizer; return the exit status."""
    from loft_hvd.bench.ranks import judge, run_bench, step_goal, table

    found = run_bench("step", dataclasses.asdict(bench), job)
    samples = found.pop(bench.model)
    judged = judge(samples, {name: step_goal(name) for name in samples})
    _print_table(table(f"{bench.model}, {job}", judged))
    if "stages" in found:
        stages = [[name, f"{1e3 * spent:.2f}"] for name, spent in found["stages"].items()]
        _print_table([["stage, TrimmedMean, rank 0", "ms a step"], *stages])
    return _finish_bench({"ranks": job.num_ranks, **found, bench.model: judged}, json_file)


def _bench_kernels(
    bench: KernelBench, device: str, *, files: tuple[str | None, str | None], gate: bool
) -> int:
    """Time the kernels, print, judge; return 1 for a goal far missed, 2 for too much noise."""
    from loft_hvd.bench.cuda import judge_cuda, measure_cuda, require_cuda
    from loft_hvd.bench.gate import goal_rows, judge_kernels, timing_rows
    from loft_hvd.bench.kernels import measure_kernels, peers

    on_cuda = device == "cuda"
    judge = judge_cuda if on_cuda else judge_kernels
    timings, goals = [], []
    for found in measure_cuda(bench, require_cuda()) if on_cuda else measure_kernels(bench):
        _print_table(timing_rows(found))
        timings += found
        goals += judge(found)
    _print_table(goal_rows(goals))
    results: dict[str, object] = {
        "peers": peers(),
        "timings": [dataclasses.asdict(timing) for timing in timings],
        "goals": [{**dataclasses.asdict(goal), "verdict": goal.verdict} for goal in goals],
    }
    if files[1] is not None:
        importlib.import_module("loft_hvd.bench.plots").plot_kernels(timings, files[1])
    _finish_bench(results, files[0])
    if gate and any(goal.is_far for goal in goals):
        return 1
    return 2 if gate and not all(goal.is_judged for goal in goals) else 0


def _finish_bench(results: dict[str, object], json_file: str | None) -> int:
    from loft_hvd.bench.record import write_record

    if json_file is not None:
        write_record(json_file, results, command=["loft-hvd", *sys.argv[1:]])
    return 0


def _write_page(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"report --html {path!r}: cannot be written ({error})") from error
    print(f"written to {path}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a header and rows; the first column holds names, the others numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def build_app() -> typer.Typer:
    """Return the command line.

    Raises:
        MissingDependencyError: typer or rich is not installed; says how to install them.
    """
    try:
        import typer

        importlib.import_module("rich")
    except ImportError as error:
        raise MissingDependencyError(
            f"loft-hvd needs typer and rich ({error}): pip install 'loft-hvd[cli]'"
        ) from error
    app = typer.Typer(
        help="Train with Horovod across unequal machines and unreliable workers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _root() -> None:
        """Keep subcommands subcommands, however many there are."""

    @app.command("doctor")
    def _doctor_command(
        run: bool = typer.Option(False, "--run", help="Also do a robust all-reduce on 2 ranks."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        timeout_s: float = typer.Option(120.0, min=1.0, help="Longest run in seconds."),
    ) -> None:
        """Say what is installed, built and allowed here; inspects only, unless --run is given."""
        raise typer.Exit(_doctor(run=run, as_json=as_json, timeout_s=timeout_s))

    @app.command("simulate")
    def _simulate_command(
        scenario: str = typer.Argument(None, help="A scenario, a TOML file."),
        clusters: int = typer.Option(0, "--random", min=0, help="Compare on N made-up clusters."),
        seed: int = typer.Option(0, min=0, help="Of the first made-up cluster."),
        json_file: str = typer.Option(None, "--json", metavar="FILE", help="Write all of it."),
        plot_file: str = typer.Option(None, "--plot", metavar="FILE", help="Draw it, as a PNG."),
    ) -> None:
        """Run balancing policies on made-up clusters, beside the best sizes there are."""
        if (scenario is None) == (clusters == 0) or (clusters and plot_file):
            raise typer.BadParameter("name a scenario, or ask for --random N (which has no plot)")
        if clusters:
            raise typer.Exit(_compare(clusters, seed=seed, json_file=json_file))
        raise typer.Exit(_simulate(scenario, json_file=json_file, plot_file=plot_file))

    @app.command("report")
    def _report_command(
        log: str = typer.Argument(..., metavar="FILE", help="A run log."),
        html_file: str = typer.Option(None, "--html", metavar="OUT", help="Write a page instead."),
    ) -> None:
        """Say what a run log (log_dir=, LOFT_HVD_LOG_DIR) holds: who is slow, who is off."""
        entries = read_run_log(log)
        if html_file is None:
            print(render_text(entries))
        else:
            _write_page(html_file, render_page(entries, title=Path(log).name))

    app.add_typer(_bench_app(), name="bench")
    return app


def _numbers(text: str, option: str) -> list[float]:
    import typer

    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text!r}: give numbers like 1,25") from error


def _bench_app() -> typer.Typer:
    """Return the benchmarks' commands."""
    import typer

    from loft_hvd.bench.kernels import KernelBench
    from loft_hvd.bench.ranks import Job
    from loft_hvd.bench.steps import StepBench

    app = typer.Typer(no_args_is_help=True, help="Measure speed, contestants in turn.")
    ranks_option = typer.Option(4, "--ranks", min=2, help="Ranks on this machine.")
    controller_option = typer.Option("gloo", help="gloo (horovodrun) or mpi (mpirun).")
    rounds_option = typer.Option(15, min=3, help="Samples of each contestant.")
    json_option = typer.Option(None, "--json", metavar="FILE", help="Write all of it.")

    @app.command("kernels")
    def _kernels_command(
        rows: str = typer.Option("3,4,8,16,32,33,64", help="Row counts."),
        numel: int = typer.Option(10_000_000, min=1024, help="Coordinates of a row."),
        threads: int = typer.Option(1, min=1, help="CPU threads."),
        levels: str = typer.Option("", help="Of baseline,avx2,avx512; the best here."),
        repeats: int = typer.Option(5, min=1, help="Rounds; the fastest counts."),
        device: str = typer.Option("cpu", help="cpu, or cuda against a copy on the GPU."),
        gate: bool = typer.Option(False, help="Exit 1 when a goal is missed by 15 %, 2 if noisy."),
        json_file: str = json_option,
        plot_file: str = typer.Option(None, "--plot", metavar="FILE", help="Draw it, as a PNG."),
    ) -> None:
        """Time the rules' kernels against a pass over the same memory, and peers."""
        if device not in ("cpu", "cuda"):
            raise typer.BadParameter(f"--device {device!r}: cpu or cuda")
        chosen = tuple(level for level in levels.split(",") if level)
        counts = tuple(int(count) for count in _numbers(rows, "--rows"))
        bench = KernelBench(counts, numel, threads, repeats, chosen)
        raise typer.Exit(_bench_kernels(bench, device, files=(json_file, plot_file), gate=gate))

    @app.command("allreduce")
    def _allreduce_command(
        megabytes: str = typer.Option("1,4,25,100", "--mb", help="Sizes, float32."),
        ranks: int = ranks_option,
        controller: str = controller_option,
        rounds: int = rounds_option,
        peer: bool = typer.Option(False, "--peer", help="Also a blocking exchange as in research."),
        json_file: str = json_option,
    ) -> None:
        """Time robust all-reduces against Horovod's own."""
        sizes = _numbers(megabytes, "--mb")
        chosen = _Ranks(Job(ranks, controller), rounds)
        raise typer.Exit(_bench_allreduce(sizes, ranks=chosen, peer=peer, json_file=json_file))

    @app.command("step")
    def _step_command(
        model: str = typer.Option("resnet18", help="resnet18 or transformer."),
        batch: int = typer.Option(4, min=1, help="Samples of a rank."),
        ranks: int = ranks_option,
        controller: str = controller_option,
        rounds: int = rounds_option,
        trace: str = typer.Option(None, "--trace", metavar="FILE", help="Also a Chrome trace."),
        json_file: str = json_option,
    ) -> None:
        """Time training steps against hvd.DistributedOptimizer."""
        bench = StepBench(model, batch, rounds, trace)
        raise typer.Exit(_bench_step(bench, job=Job(ranks, controller), json_file=json_file))

    return app


def main() -> None:
    """Run the command line; errors raised on purpose are one line and exit status 1."""
    try:
        build_app()()
    except LoftError as error:
        print(f"loft-hvd: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
