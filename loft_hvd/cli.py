"""``loft-hvd``: parsing and printing, nothing else."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from loft_hvd.codec import printable
from loft_hvd.doctor import inspect as doctor
from loft_hvd.doctor.run import RunResult, run_check
from loft_hvd.errors import DataError, LoftError, MissingDependencyError
from loft_hvd.report.page import render_page
from loft_hvd.report.text import render_text
from loft_hvd.runlog import newest_log, read_run_log

if TYPE_CHECKING:
    import typer

__all__ = ["build_app", "main"]


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
        print(f"\n{doctor.verdict(sections)}")
    return 0 if result is None or result.is_right else 1


def _print_sections(sections: tuple[doctor.Section, ...]) -> None:
    # rich and typer are an extra, so all of them are imported where they are used.
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
            # As Text: what a system says of itself may look like rich's markup, as "[X] MPI" does.
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


def _simulate(scenario: str | None, *, json_file: str | None, plot_file: str | None) -> int:
    """Run a scenario and print its policies, or list the shipped ones; return the exit status."""
    from loft_hvd.simulate.simulation import rows, run_file

    if scenario is None:
        return _list_scenarios()
    try:
        results = run_file(scenario)
    except OSError as error:
        raise DataError(
            f"scenario {scenario!r} cannot be read ({error}); name a file, or one of those that "
            "`loft-hvd simulate` lists"
        ) from error
    print(printable(results.scenario.description or results.scenario.name))
    _print_table(rows(results))
    if json_file is not None:
        _write("--json", json_file, json.dumps(results.to_dict(), indent=1) + "\n")
    if plot_file is not None:
        try:
            importlib.import_module("loft_hvd.simulate.plots").plot(results, plot_file)
        except (OSError, ValueError) as error:  # ValueError: no format of that name
            raise DataError(f"--plot {plot_file!r} cannot be written ({error})") from error
    return 0


def _list_scenarios() -> int:
    """Print the shipped scenarios; return the exit status."""
    from loft_hvd.simulate.scenario import read_scenario, shipped_scenarios

    found = {name: read_scenario(path) for name, path in shipped_scenarios().items()}
    lines = [(name, str(one.world_size), one.description) for name, one in found.items()]
    _print_table([("scenario", "ranks", "what it shows"), *lines], words=(0, 2))
    print("\nRun one: loft-hvd simulate NAME, or a TOML file of your own (docs/simulate.md).")
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
        _write("--json", json_file, json.dumps(summary, indent=1) + "\n")
    return 0


def _report(log: str, *, html_file: str | None) -> None:
    """Print what a run log, or the newest of a folder, holds, or write it as a page."""
    path = newest_log(log)
    entries = read_run_log(path)
    if html_file is not None:
        _write("--html", html_file, render_page(entries, title=path.name))
        print(f"written to {html_file}")
        return
    if path != Path(log):
        print(f"{printable(str(path))}, the newest of its folder\n")
    print(render_text(entries))


def _write(option: str, path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{option} {path!r} cannot be written ({error})") from error


def _print_table(rows: Sequence[Sequence[str]], *, words: Collection[int] = (0,)) -> None:
    """Print a header and rows; columns ``words`` hold text, which wraps, the others numbers.

    Where not even the numbers find room beside each other, each row is printed as lines of its own.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, name in enumerate(rows[0]):
        is_text = place in words
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    cells = [[printable(cell) for cell in row] for row in rows[1:]]
    for row in cells:
        table.add_row(*map(Text, row))
    columns = [[name, *column] for name, *column in zip(rows[0], *cells, strict=True)]
    widths = [
        max(len(part) for cell in column for part in (cell.split() if place in words else [cell]))
        for place, column in enumerate(columns)
    ]
    if sum(widths) + 2 * (len(widths) - 1) <= console.width:  # rich pads between columns by 2
        console.print(table)
        return
    for first, *others in cells:
        console.print(Text(first, style="bold"))
        for name, cell in zip(rows[0][1:], others, strict=True):
            console.print(Text(f"  {name}: {cell}"))


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
            f"loft-hvd needs typer and rich ({error}): pip install 'loft-hvd[cli]', or '.[cli]' "
            "in a checkout"
        ) from error
    app = typer.Typer(
        help="Train with Horovod across unequal machines and unreliable workers.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,  # errors on purpose are one line, others a plain traceback
    )

    def _show(asked: bool) -> None:
        if asked:
            print(f"loft-hvd {importlib.metadata.version('loft-hvd')}")
            raise typer.Exit

    @app.callback()
    def _root(
        version: bool = typer.Option(False, "--version", callback=_show, help="Print the version."),
    ) -> None:
        """Keep subcommands subcommands, however many there are."""
        # Without a callback typer makes a single command the whole program.

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
        scenario: str = typer.Argument(
            None, help="A TOML file, or a shipped scenario; none lists them."
        ),
        clusters: int = typer.Option(0, "--random", min=0, help="Compare on N made-up clusters."),
        seed: int = typer.Option(0, min=0, help="Of the first made-up cluster."),
        json_file: str = typer.Option(None, "--json", metavar="FILE", help="Write all of it."),
        plot_file: str = typer.Option(None, "--plot", metavar="FILE", help="Draw it, as a PNG."),
    ) -> None:
        """Run balancing policies on made-up clusters, beside the best sizes there are."""
        if clusters and (scenario is not None or plot_file):
            raise typer.BadParameter("name a scenario, or ask for --random N (which has no plot)")
        if not clusters and scenario is None and (json_file or plot_file):
            raise typer.BadParameter("--json, --plot: name the scenario that is to be run")
        if clusters:
            raise typer.Exit(_compare(clusters, seed=seed, json_file=json_file))
        raise typer.Exit(_simulate(scenario, json_file=json_file, plot_file=plot_file))

    @app.command("report")
    def _report_command(
        log: str = typer.Argument(
            ..., metavar="LOG", help="A run log, or a folder, of which the newest is taken."
        ),
        html_file: str = typer.Option(None, "--html", metavar="OUT", help="Write a page instead."),
    ) -> None:
        """Say what a run log (log_dir=, LOFT_HVD_LOG_DIR) holds: who is slow, who is off."""
        _report(log, html_file=html_file)

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

    from loft_hvd.aggregation.compute import num_threads
    from loft_hvd.bench import commands
    from loft_hvd.bench.attacked import ATTACKS
    from loft_hvd.bench.collectives import AllreduceBench
    from loft_hvd.bench.defences import ALL_DEFENCES, QUICK_DEFENCES
    from loft_hvd.bench.kernels import KernelBench
    from loft_hvd.bench.ranks import BenchJob
    from loft_hvd.bench.robustness import RobustnessBench
    from loft_hvd.bench.skews import SKEWS
    from loft_hvd.bench.steps import StepBench

    app = typer.Typer(no_args_is_help=True, help="Measure speed, and accuracy under attack.")
    ranks_option = typer.Option(4, "--ranks", min=2, help="Ranks on this machine.")
    controller_option = typer.Option("gloo", help="gloo (horovodrun) or mpi (mpirun).")
    rounds_option = typer.Option(15, min=3, help="Samples of each contestant.")
    json_option = typer.Option(None, "--json", metavar="FILE", help="Write all of it.")

    @app.command("kernels")
    def _kernels_command(
        rows: str = typer.Option("3,4,8,16,32,33,64", help="Row counts."),
        numel: int = typer.Option(10_000_000, min=1024, help="Coordinates of a row."),
        threads: int = typer.Option(1, min=1, help="CPU threads."),
        levels: str = typer.Option("", help="Of baseline,avx2,avx512; all that run here."),
        repeats: int = typer.Option(5, min=1, help="Rounds at least; the fastest counts."),
        seconds: float = typer.Option(0, max=3600, help="CPU: rounds of a set go on so long."),
        device: str = typer.Option("cpu", help="cpu, or cuda against a copy on the GPU."),
        gate: bool = typer.Option(False, help="Exit 1 when a goal is missed by 15 %, 2 if noisy."),
        json_file: str = json_option,
        plot_file: str = typer.Option(None, "--plot", metavar="FILE", help="Draw it, as a PNG."),
    ) -> None:
        """Time the rules' kernels against a pass over the same memory, and peers.

        Some 10 minutes as it stands, half of them at the baseline; --levels avx2,avx512 skips it.
        """
        if device not in ("cpu", "cuda"):
            raise typer.BadParameter(f"--device {device!r}: cpu or cuda")
        chosen = tuple(level for level in levels.split(",") if level)
        counts = tuple(int(count) for count in _numbers(rows, "--rows"))
        bench = KernelBench(counts, numel, threads, repeats, seconds, levels=chosen)
        files = (json_file, plot_file)
        code = commands.bench_kernels(bench, device, files=files, gate=gate, show=_print_table)
        raise typer.Exit(code)

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
        bench = AllreduceBench(tuple(sizes), rounds, peer)
        job = BenchJob(ranks, controller)
        code = commands.bench_allreduce(bench, job=job, json_file=json_file, show=_print_table)
        raise typer.Exit(code)

    @app.command("step")
    def _step_command(
        model: str = typer.Option("resnet18", help="resnet18 or transformer."),
        batch: int = typer.Option(4, min=1, help="Samples of a rank."),
        ranks: int = ranks_option,
        controller: str = controller_option,
        rounds: int = rounds_option,
        trace: str = typer.Option(None, "--trace", metavar="FILE", help="Also a Chrome trace."),
        scopes: bool = typer.Option(False, "--scopes", help="Also Robust, in both scopes."),
        json_file: str = json_option,
    ) -> None:
        """Time training steps against hvd.DistributedOptimizer."""
        bench = StepBench(model, batch, rounds, trace, scopes)
        job = BenchJob(ranks, controller)
        code = commands.bench_step(bench, job=job, json_file=json_file, show=_print_table)
        raise typer.Exit(code)

    @app.command("robustness")
    def _robustness_command(
        rules: str = typer.Option("", help="Names, separated by ';'; all of ours and ByzFL's."),
        models: str = typer.Option("mlp", help="Of mlp,cnn."),
        attacks: str = typer.Option("", help="Names, separated by ','; all."),
        skews: str = typer.Option("", help="Of shuffled,capped,dirichlet,sorted; all."),
        workers: str = typer.Option("8:2,16:3", help="Workers and f of each size."),
        seeds: int = typer.Option(5, min=1, help="Runs of a cell."),
        steps: int = typer.Option(400, min=1, help="Training steps of a run."),
        quick: bool = typer.Option(False, "--quick", help="8:2, one seed, 100 steps, few rules."),
        json_file: str = json_option,
        kept_file: str = typer.Option(
            None, "--keep", metavar="FILE", help="Go on from the runs in it, and add to them."
        ),
    ) -> None:
        """Train digits under attack: rule x attack x skew of the data x f, simulated.

        Needs scikit-learn, which brings the digits; ByzFL's rules are run where it is installed.
        As many processes as LOFT_HVD_THREADS says, by default one a CPU.
        """
        chosen = RobustnessBench(
            models=_names(models) or ("mlp",),
            defences=_names(rules, ";") or (QUICK_DEFENCES if quick else ALL_DEFENCES),
            attacks=_names(attacks) or ATTACKS,
            skews=_names(skews) or SKEWS,
            counts=((8, 2),) if quick else tuple(_workers_and_f(each) for each in _names(workers)),
            seeds=1 if quick else seeds,
            steps=100 if quick else steps,
            jobs=num_threads(),
        )
        code = commands.bench_robustness(
            chosen, files=(json_file, kept_file), show=_print_table, progress=_print_progress
        )
        raise typer.Exit(code)

    return app


def _names(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(separator) if name.strip())


def _workers_and_f(text: str) -> tuple[int, int]:
    import typer

    try:
        workers, f = (int(part) for part in text.split(":"))
    except ValueError as error:
        raise typer.BadParameter(f"--workers {text!r}: give workers:f like 8:2") from error
    return workers, f


def _print_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done} of {total} runs", end=end, file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line; errors raised on purpose are one line and exit status 1."""
    try:
        build_app()()
    except LoftError as error:
        print(f"loft-hvd: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
