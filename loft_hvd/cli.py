"""``loft-hvd``: parsing and printing, nothing else."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import linecache
import os
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from loft_hvd.check.run import check_script
from loft_hvd.codec import printable
from loft_hvd.doctor import inspect as doctor
from loft_hvd.doctor.ranks import compare_launched, describe, to_json
from loft_hvd.doctor.run import RunResult, run_check
from loft_hvd.errors import DataError, LoftError, MissingDependencyError, UsageError
from loft_hvd.files import write_whole
from loft_hvd.report.export import ScalarFeed, prometheus_text
from loft_hvd.report.follow import LogFollower
from loft_hvd.report.page import render_page
from loft_hvd.report.screen import PARTS, RankRow, Screen, make_screen
from loft_hvd.report.text import render_text
from loft_hvd.report.timeline import merge_traces
from loft_hvd.runlog import newest_log, read_run_log

if TYPE_CHECKING:
    import typer
    from rich.console import Console, RenderableType

    from loft_hvd.fleet.jobs import Fleet, Job
    from loft_hvd.fleet.many import ManyOptions
    from loft_hvd.fleet.run import JobPlan
    from loft_hvd.fleet.timeline import PlannedJob, PlannedStretch

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
        failed = ""
        if result is not None:
            _print_run(result)
            failed = "" if result.is_right else "the all-reduce over 2 ranks failed: see above"
        print(f"\n{doctor.verdict(sections, failed=failed)}")
    return 0 if result is None or result.is_right else 1


def _doctor_ranks(*, run: bool, as_json: bool, timeout_s: float) -> int:
    """Compare the ranks that a launcher has started; rank 0 prints; return the exit status."""
    if run:
        raise UsageError(
            "doctor: --run starts ranks of its own, --ranks takes those that are there; give one"
        )
    comparison = compare_launched(timeout_s=timeout_s)
    if comparison.rank == 0:
        text = json.dumps(to_json(comparison), indent=1) if as_json else ""
        print(text or "\n".join(describe(comparison)), flush=True)
    return 0 if comparison.is_fit else 1


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


def _check(
    script: str,
    arguments: Sequence[str],
    *,
    num_ranks: int,
    seconds: float,
    launcher: str | None,
) -> int:
    """Run a script, watched, and print what it forgot; return the exit status."""
    build = doctor.horovod_build()
    print(
        f"running {printable(script)} on {num_ranks} ranks for up to {seconds:g} s ...", flush=True
    )
    checked = check_script(
        script, arguments, build=build, num_ranks=num_ranks, seconds=seconds, launcher=launcher
    )
    for finding in checked.findings:
        place, _, number = finding.place.rpartition(":")
        print(printable(f"\n{finding.place}: {finding.what}"))
        line = linecache.getline(place, int(number)) if number.isdigit() else ""
        if line.strip():
            print(printable(f"    {line.strip()}"))
        print(printable(f"  mend: {finding.mend}"))
    if checked.failure:
        print(printable(f"\n{checked.failure}\n\n{checked.output}"))
    if checked.is_fine:
        print(printable(checked.verdict))
    return 0 if checked.is_fine else 1


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
    from rich.console import Console
    from rich.progress import track

    from loft_hvd.simulate.compare import compare, summarise, summary_rows

    seeds = range(seed, seed + num_clusters)
    told = Console(stderr=True)  # what is piped or kept is the table alone
    summary = summarise(list(track(compare(seeds), "random clusters", num_clusters, console=told)))
    _print_table(summary_rows(summary))
    print(f"worst against the best policy of a cluster: +{100 * summary['worst_excess']:.1f} %")
    if json_file is not None:
        _write("--json", json_file, json.dumps(summary, indent=1) + "\n")
    return 0


def _inventory(*, from_slurm: bool, out: str | None, timeout_s: float) -> None:
    """Print the machines that are there as a file for ``plan``; of several ranks, rank 0 does."""
    from loft_hvd.fleet.inventory import cluster_text, launched_hosts, slurm_hosts

    if from_slurm:
        rank, hosts, source = 0, slurm_hosts(), "Slurm"
    else:
        rank, hosts = launched_hosts(timeout_s=timeout_s)
        source = f"the ranks of a launcher on {len(hosts)} hosts"
    if rank != 0:
        return
    text = cluster_text(hosts, source=source)
    if out is None:
        print(text, end="", flush=True)
    else:
        _write("--out", out, text)


@dataclasses.dataclass(frozen=True)
class _PlanFiles:
    """What ``plan`` is to read and write beside its two files."""

    json_file: str | None
    sizes_file: str | None
    page_file: str | None
    emit: str | None  # prints what starts the job, in place of the words
    image: str | None
    check: str | None  # a run log, which is compared in place of planning
    now: str | None  # what runs already
    is_many: bool  # whether one of the options was given that only a plan of many jobs has


def _check_plan(fleet: Fleet, job: Job, log: str, *, assume: bool) -> None:
    """Print what a run took beside what was predicted."""
    from loft_hvd.fleet.check_log import check_log, check_table, describe_check
    from loft_hvd.fleet.measured import with_logs

    check = check_log(fleet, with_logs(fleet, job, now_s=time.time(), assume=assume)[0], log)
    _print_text(printable("\n".join(describe_check(check))))
    _print_table(check_table(check), words=(1,))


def _plan(
    cluster: str, jobs: str, name: str | None, files: _PlanFiles, *, options: ManyOptions
) -> None:
    """Print where a job should run, or what starts it there; without a name, when all jobs run."""
    from loft_hvd.fleet.parse import read_cluster, read_jobs
    from loft_hvd.fleet.run import plan_job

    fleet = read_cluster(cluster)
    known = read_jobs(jobs, fleet)
    if name is not None and name not in known:
        raise UsageError(f"plan: --job {name!r} is none of {sorted(known)} in {jobs}")
    read = [cluster, jobs, *([] if files.now is None else [files.now])]
    if files.is_many or (name is None and len(known) > 1):
        found = _plan_many(fleet, known, name, files, read=read, options=options)
        if found is not None:
            _show_place(found[0], files, read=read, stretches=found[1].stretches)
        return
    chosen = next(iter(known)) if name is None else name
    if files.check is not None:
        _check_plan(fleet, known[chosen], files.check, assume=options.assume)
        return
    if len(known) > 1:
        sys.stderr.write(
            f"plan: {chosen} as if alone; --policy price plans it beside the others of {jobs}\n"
        )
    plan = plan_job(fleet, known[chosen], simulates=options.simulates, assume=options.assume)
    _show_place(plan, files, read=read)


def _show_place(
    plan: JobPlan,
    files: _PlanFiles,
    *,
    read: Sequence[str],
    stretches: Sequence[PlannedStretch] = (),
) -> None:
    """Print where one job runs, or what starts it there; of one that moves, where it starts."""
    from loft_hvd.fleet.emit import emit, first_sizes
    from loft_hvd.fleet.plan_page import plan_page
    from loft_hvd.fleet.run import describe, plan_table, to_dict

    if files.sizes_file is not None:
        _write("--sizes", files.sizes_file, first_sizes(plan), inputs=read)
    if files.json_file is not None:
        text = json.dumps(to_dict(plan), indent=1) + "\n"
        _write("--json", files.json_file, text, inputs=read)
    if files.page_file is not None:
        _write("--page", files.page_file, plan_page(plan), inputs=read)
    if files.emit is not None:
        path = None if files.sizes_file is None else os.path.abspath(files.sizes_file)
        line = emit(plan, files.emit, sizes=path, image=files.image, stretches=stretches)
        print(line, end="")
        return
    head, *rest = describe(plan)
    print(printable(head))
    _print_table(plan_table(plan), words=(0, 1, 2))
    _print_text(printable("\n".join(rest)))


def _plan_many(
    fleet: Fleet,
    jobs: dict[str, Job],
    name: str | None,
    files: _PlanFiles,
    *,
    read: Sequence[str],
    options: ManyOptions,
) -> tuple[JobPlan, PlannedJob] | None:
    """Return the first place of the job that is named beside the others, and all of its hosts.

    Without a name print which jobs run when and where, and which are not admitted.
    """
    from loft_hvd.fleet.many import describe_many, many_table, many_to_dict, plan_many
    from loft_hvd.fleet.now import read_now
    from loft_hvd.fleet.plan_page import jobs_page
    from loft_hvd.fleet.run import say_changes, show_time

    if files.check is not None:
        raise UsageError(
            "plan: --check is of one job; name it with --job, and leave away --policy, "
            "--model, --slot, --horizon, --now and --prices"
        )
    of_one = {"--emit": files.emit, "--sizes": files.sizes_file}
    asked = [option for option, value in of_one.items() if value is not None]
    if asked and name is None:
        raise UsageError(
            f"plan: {' and '.join(asked)} {'is' if len(asked) == 1 else 'are'} of one job, but all "
            f"of {sorted(jobs)} are planned; name one with --job"
        )
    now = None if files.now is None else read_now(files.now)
    plan = plan_many(fleet, jobs, options, now=now)
    if name is not None:
        place, planned = plan.place_of(name)
        start_s = planned.start_s or 0.0
        sys.stderr.write(f"plan: {name} starts at {show_time(start_s)} of the plan\n")
        if planned.changes:
            sys.stderr.write(
                f"plan: {name} changes its hosts: {say_changes(planned)}; what is said of a place "
                "is said of the first one\n"
            )
        return place, planned
    if files.json_file is not None:
        text = json.dumps(many_to_dict(plan), indent=1) + "\n"
        _write("--json", files.json_file, text, inputs=read)
    if files.page_file is not None:
        text = jobs_page(plan.planned, title=f"plan of {Path(read[1]).name}")
        _write("--page", files.page_file, text, inputs=read)
    head, rest = describe_many(plan)
    _print_text(printable(head))
    _print_table(many_table(plan), words=(0, 6))
    _print_text(printable("\n".join(rest)))
    return None


def _report(log: str, *, html_file: str | None) -> None:
    """Print what a run log, or the newest of a folder, holds, or write it as a page."""
    path = newest_log(log)
    entries = read_run_log(path)
    if html_file is not None:
        _write("--html", html_file, render_page(entries, title=path.name), inputs=[str(path)])
        print(f"written to {html_file}")
        return
    newest = "" if path == Path(log) else f"{printable(str(path))}, the newest of its folder\n\n"
    _print_text(newest + render_text(entries))


def _print_text(text: str) -> None:
    """Print lines, which a narrow terminal gets broken between words: no figure is cut in two."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if console.is_terminal:
        console.print(Text(text))
    else:
        print(text)


def _top(log: str, *, every_s: float, once: bool) -> None:
    """Show a run while its log is written, until Ctrl-C; ``once`` shows it as it is."""
    from rich.console import Console
    from rich.live import Live

    console, follower = Console(), LogFollower(log)
    if once or not console.is_terminal:
        follower.look(is_needed=True)
        console.print(_screen(follower, log, console))
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                follower.look()
                drawn = _screen(follower, log, console, height=console.height)
                live.update(drawn, refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:  # how one leaves it; the shell's own line comes below
        console.print(_screen(follower, log, console, height=console.height - 1))
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> NoReturn:
    """End on a signal by an exception, so that the terminal gets its own screen back."""
    raise SystemExit(128 + number)


_PART_COLOURS = {
    "stall": "blue",
    "compute": "red",
    "queued": "green",
    "wait": "yellow",
    "other": "cyan",
}
_MOST_ON_SCREEN = 32  # ranks: more are in no log
_FEWEST_ROWS = 3  # a choice: the worst ranks, before what is trained and where
_BAR = 24  # characters of the longest bar, where there is room
_COLUMNS, _COLUMNS_WATCHED = 70, 81  # of numbers of usual lengths, and two between them


def _screen(
    follower: LogFollower, log: str, console: Console, *, height: int | None = None
) -> RenderableType:
    """Return one look at a log as rich draws it, in at most ``height`` lines; None for any."""
    from rich.text import Text

    if follower.path is None:
        return Text(f"no run log in {printable(log)} yet")
    path, make = str(follower.path), partial(make_screen, follower.lines, now_s=time.time())
    if height is None:
        return _drawn(make(), path, width=console.width)

    def num_lines(drawn: RenderableType) -> int:
        return len(console.render_lines(drawn, pad=False))

    # Rows go before sentences, but for the worst ones; where even that is not enough, what is
    # trained and where goes too. More rows never take fewer lines: so the most that fit are found
    # by halving.
    for said, shown in ((3, path), (1, "")):
        draw = partial(_drawn, path=shown, width=console.width)
        sizes = range(_MOST_ON_SCREEN + 1)
        num_rows = bisect_right(
            sizes, height, key=lambda n: num_lines(draw(make(most_rows=n, most_said=said)))
        )
        if num_rows > _FEWEST_ROWS:
            break
    return draw(make(most_rows=max(num_rows - 1, 0), most_said=said))


def _drawn(screen: Screen, path: str, *, width: int) -> RenderableType:
    """Return a screen as rich draws it; an empty ``path`` leaves it and what is trained out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    said = [Text(printable(text), style="bold") for text in screen.verdict]
    facts = screen.facts if path else ""
    about = [Text(printable(text)) for text in (screen.state, facts, path, screen.note) if text]
    if not screen.rows:
        return Group(*said, *about)
    is_watched = any(row.suspicion is not None for row in screen.rows)
    room = width - (_COLUMNS_WATCHED if is_watched else _COLUMNS)
    about[-1] = Text(f"{screen.note}, parts in ms:")
    if room < 0:
        words = [_rank_words(row) for row in screen.rows]
        return Group(*said, *about, *map(Text, words))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "samples", *PARTS, "samples/s", *(["suspicion"] if is_watched else [])):
        table.add_column(name, justify="right", style=_PART_COLOURS.get(name), no_wrap=True)
    table.add_column("of a step" if room >= _BAR else "", no_wrap=True)
    longest_s = max(sum(row.seconds) for row in screen.rows) or 1.0
    for row in screen.rows:
        bar = Text()
        for part, seconds in zip(PARTS, row.seconds, strict=True):
            length = round(min(room, _BAR) * seconds / longest_s)
            bar.append("#" * length, style=_PART_COLOURS[part])
        table.add_row(
            str(row.rank),
            f"{row.samples:.4g}",
            *(f"{1e3 * seconds:.1f}" for seconds in row.seconds),
            f"{row.samples_per_s:.0f}",
            *([_doubt(row)] if is_watched else []),
            bar,
        )
    return Group(*said, *about, table)


def _rank_words(row: RankRow) -> str:
    """Return a row for a terminal that is too narrow for the table."""
    parts = ", ".join(
        f"{part} {1e3 * seconds:.1f}" for part, seconds in zip(PARTS, row.seconds, strict=True)
    )
    doubt = "" if row.suspicion is None else f", suspicion {_doubt(row)}"
    return f"rank {row.rank}: {row.samples:.4g} samples, {parts}{doubt}"


def _doubt(row: RankRow) -> str:
    return "-" if row.suspicion is None else f"{row.suspicion:.2f}"


def _export(
    log: str, *, prometheus: str | None, tensorboard: str | None, follow: bool, every_s: float
) -> None:
    """Write a log's numbers for other tools, once or until Ctrl-C."""
    follower = LogFollower(log)
    writer = None if tensorboard is None else _summary_writer(tensorboard)
    feed = None if writer is None else ScalarFeed(log, writer)
    try:
        while True:
            follower.look(is_needed=not follow)
            if prometheus is not None and follower.lines:
                text = prometheus_text(follower.lines)
                _write("--prometheus", prometheus, text, inputs=[str(follower.path)])
            count = 0 if feed is None else feed.update()
            if writer is not None:
                writer.flush()
            if not follow:
                break
            time.sleep(every_s)
    except KeyboardInterrupt:
        return
    finally:
        if writer is not None:
            writer.close()
    if prometheus is not None:
        print(f"written to {prometheus}")
    if tensorboard is not None:
        print(f"{count} numbers written to {tensorboard}")


def _summary_writer(folder: str) -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)
    except ImportError as error:
        raise MissingDependencyError(
            f"--tensorboard needs TensorBoard ({error}): pip install tensorboard"
        ) from error


def _trace(files: Sequence[str], *, out: str) -> None:
    """Lay traces and Horovod's timeline over each other in one file."""
    _write("--out", out, merge_traces(files), inputs=files)
    print(f"written to {out}: open it in https://ui.perfetto.dev or chrome://tracing")


def _write(option: str, path: str, text: str, *, inputs: Sequence[str] = ()) -> None:
    """Write a file, unless it is one of those that the text was made of."""
    try:
        is_input = os.path.exists(path) and any(os.path.samefile(path, each) for each in inputs)
    except (OSError, ValueError) as error:  # ValueError: half a surrogate pair
        raise DataError(f"{option} {path!r} cannot be written ({error})") from error
    if is_input:
        raise DataError(f"{option} {path!r} is what is read; name another file")
    write_whole(path, text, what=option)


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
        ranks: bool = typer.Option(
            False, "--ranks", help="Compare the ranks of the launcher that starts this command."
        ),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
        timeout_s: float = typer.Option(120.0, min=1.0, help="Longest run in seconds."),
    ) -> None:
        """Say what is installed, built and allowed here; --run and --ranks do more than look."""
        look = _doctor_ranks if ranks else _doctor
        raise typer.Exit(look(run=run, as_json=as_json, timeout_s=timeout_s))

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

    arguments_argument = typer.Argument(None, metavar="ARGUMENTS", help="What it is given.")

    @app.command(
        "check", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
    )
    def _check_command(
        script: str = typer.Argument(..., help="A training script for Horovod or torchrun."),
        arguments: list[str] = arguments_argument,
        num_ranks: int = typer.Option(2, "-np", "--ranks", min=2, help="Ranks on this machine."),
        seconds: float = typer.Option(60.0, min=1.0, help="How long it works, once started."),
        launcher: str = typer.Option(
            None, help="horovod or torchrun; without, by what the script imports."
        ),
    ) -> None:
        """Run a script for a minute and say what its conversion forgot, with line and mend."""
        code = _check(
            script, arguments or (), num_ranks=num_ranks, seconds=seconds, launcher=launcher
        )
        raise typer.Exit(code)

    _add_report_commands(app)
    _add_fleet_commands(app)
    app.add_typer(_bench_app(), name="bench")
    return app


def _add_fleet_commands(app: typer.Typer) -> None:
    """Add what looks at a cluster: its machines, and where a job should run."""
    import typer

    @app.command("inventory")
    def _inventory_command(
        slurm: bool = typer.Option(False, "--slurm", help="Ask Slurm, not the launcher's ranks."),
        out: str = typer.Option(None, metavar="FILE", help="Write it there."),
        timeout_s: float = typer.Option(120.0, min=1.0, help="Longest run in seconds."),
    ) -> None:
        """Write the machines that are there, as the first file of `plan`; under a launcher."""
        _inventory(from_slurm=slurm, out=out, timeout_s=timeout_s)

    @app.command("plan")
    def _plan_command(  # noqa: PLR0913 - a command's options
        cluster: str = typer.Argument(..., help="The machines, a TOML file (docs/plan.md)."),
        jobs: str = typer.Argument(..., help="The jobs, a TOML file."),
        job: str = typer.Option(
            None,
            help="Plan this one, as if alone; with an option of many jobs, beside the others.",
        ),
        emit: str = typer.Option(
            None, metavar="KIND", help="Print what starts it: horovodrun, mpirun, sbatch, mpijob."
        ),
        sizes: str = typer.Option(
            None, metavar="FILE", help="Write first sizes, which the line then names."
        ),
        json_file: str = typer.Option(None, "--json", metavar="FILE", help="Write all of it."),
        page: str = typer.Option(None, metavar="FILE", help="Write it as a page of HTML."),
        image: str = typer.Option(None, help="The container of an MPIJob."),
        simulate: bool = typer.Option(True, help="Try the plan in the simulator."),
        check: str = typer.Option(
            None, metavar="LOG", help="Compare a run with its prediction, in place of planning."
        ),
        assume: bool = typer.Option(
            False, "--assume", help="Take what run logs do not tell apart as it is."
        ),
        policy: str = typer.Option(
            None, help="Of many jobs: price (the default), fifo, drf, dorm, oasis or las."
        ),
        model: str = typer.Option(
            None, help="Speeds of many jobs: ours (the default), ps or ring."
        ),
        slot_s: float = typer.Option(None, "--slot", help="Seconds of a slot of time."),
        horizon_s: float = typer.Option(None, "--horizon", help="Seconds to look ahead."),
        now: str = typer.Option(
            None, metavar="FILE", help="What runs already, a TOML file; it is not moved."
        ),
        prices: str = typer.Option(
            None,
            metavar="NAME=LOW:HIGH,...",
            help="Prices by the hour of slots, cpus or memory_bytes; others follow from the jobs.",
        ),
    ) -> None:
        """Say which hosts a job should take, with what sizes; of several jobs, which run when."""
        from loft_hvd.fleet.many import ManyOptions, read_prices

        given = (policy, model, slot_s, horizon_s, now, prices)
        is_many = any(each is not None for each in given)
        files = _PlanFiles(json_file, sizes, page, emit, image, check, now, is_many)
        options = ManyOptions(
            policy or "price",
            model or "ours",
            slot_s,
            horizon_s,
            simulates=simulate,
            assume=assume,
            prices={} if prices is None else read_prices(prices),
        )
        _plan(cluster, jobs, job, files, options=options)


def _add_report_commands(app: typer.Typer) -> None:
    """Add what looks at a run: its log, and its traces."""
    import typer

    @app.command("report")
    def _report_command(
        log: str = typer.Argument(
            ..., metavar="LOG", help="A run log, or a folder, of which the newest is taken."
        ),
        html_file: str = typer.Option(None, "--html", metavar="OUT", help="Write a page instead."),
    ) -> None:
        """Say what a run log (log_dir=, LOFT_HVD_LOG_DIR) holds: who is slow, who is off."""
        _report(log, html_file=html_file)

    def _seconds(value: float) -> float:
        if not 0.1 <= value <= 86_400:  # a range lets nan in
            raise typer.BadParameter(f"{value} s: give 0.1 to 86400")
        return value

    every_option = typer.Option(
        1.0, "--every", callback=_seconds, help="Seconds between two looks."
    )

    @app.command("top")
    def _top_command(
        log: str = typer.Argument(..., metavar="LOG", help="A run log, or a folder of some."),
        every: float = every_option,
        once: bool = typer.Option(False, "--once", help="Print it as it is now, and end."),
    ) -> None:
        """Show a run in the terminal while it trains: who is slow, who is off; Ctrl-C ends it."""
        _top(log, every_s=every, once=once)

    @app.command("export")
    def _export_command(
        log: str = typer.Argument(..., metavar="LOG", help="A run log, or a folder of some."),
        prometheus: str = typer.Option(
            None,
            "--prometheus",
            metavar="FILE",
            help="Text for node_exporter's textfile collector.",
        ),
        tensorboard: str = typer.Option(
            None, "--tensorboard", metavar="FOLDER", help="Scalars; needs tensorboard installed."
        ),
        follow: bool = typer.Option(False, "--follow", help="Go on while the log is written."),
        every: float = every_option,
    ) -> None:
        """Write a run's numbers for other tools."""
        if prometheus is None and tensorboard is None:
            raise typer.BadParameter("say what to write: --prometheus FILE, --tensorboard FOLDER")
        _export(log, prometheus=prometheus, tensorboard=tensorboard, follow=follow, every_s=every)

    files_argument = typer.Argument(
        ..., metavar="FILES", help="Of LOFT_HVD_TRACE, and of HOROVOD_TIMELINE."
    )

    @app.command("trace")
    def _trace_command(
        files: list[str] = files_argument,
        out: str = typer.Option(..., "--out", metavar="FILE", help="One trace of them all."),
    ) -> None:
        """Lay ranks' traces and Horovod's timeline over each other, on one clock."""
        _trace(files, out=out)


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
    from loft_hvd.bench.traces import TraceBench
    from loft_hvd.fleet.policies import POLICIES
    from loft_hvd.fleet.prices import RESERVE

    app = typer.Typer(no_args_is_help=True, help="Measure speed, and accuracy under attack.")
    ranks_option = typer.Option(4, "--ranks", min=2, help="Ranks on this machine.")
    controller_option = typer.Option(
        "gloo", help="gloo (horovodrun), mpi (mpirun); torchrun: --engine ddp or fsdp."
    )
    gate_option = typer.Option(
        False, "--gate", help="Exit 1 when a goal is missed by 15 %, 2 if noisy."
    )
    rounds_option = typer.Option(15, min=3, help="Samples of each contestant.")
    device_option = typer.Option("cpu", "--device", help="cpu, or cuda: ranks share the GPUs here.")
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
        gate: bool = gate_option,
        json_file: str = json_option,
        plot_file: str = typer.Option(None, "--plot", metavar="FILE", help="Draw it, as a PNG."),
    ) -> None:
        """Time the rules' kernels against a pass over the same memory, and peers.

        Some 10 minutes as it stands, half of them at the baseline; --levels avx2,avx512 skips it.
        """
        if device not in ("cpu", "cuda"):
            raise typer.BadParameter(f"--device {device!r}: cpu or cuda")
        chosen = tuple(level for level in levels.split(",") if level)
        found = _numbers(rows, "--rows")
        if not all(count.is_integer() for count in found):
            raise typer.BadParameter(f"--rows {rows!r}: give whole numbers like 3,64")
        counts = tuple(map(int, found))
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
        device: str = device_option,
        json_file: str = json_option,
    ) -> None:
        """Time robust all-reduces against Horovod's own."""
        sizes = _numbers(megabytes, "--mb")
        bench = AllreduceBench(tuple(sizes), rounds, peer, device)
        job = BenchJob(ranks, controller)
        code = commands.bench_allreduce(bench, job=job, json_file=json_file, show=_print_table)
        raise typer.Exit(code)

    @app.command("step")
    def _step_command(  # noqa: PLR0913 - a command's options
        model: str = typer.Option("resnet18", help="resnet18, transformer or mlp."),
        engine: str = typer.Option(
            "horovod",
            help="What steps are compared with: horovod (hvd.DistributedOptimizer), ddp "
            "(DistributedDataParallel; Horovod's and ours by turns with it, five steps each) or "
            "fsdp (FSDP2, and ours by turns with it).",
        ),
        batch: int = typer.Option(4, min=1, help="Samples of a rank."),
        ranks: int = ranks_option,
        controller: str = controller_option,
        rounds: int = rounds_option,
        trace: str = typer.Option(None, "--trace", metavar="FILE", help="Also a Chrome trace."),
        scopes: bool = typer.Option(
            False, "--scopes", help="Also Robust, in both scopes; on the CPU its parts."
        ),
        device: str = device_option,
        gate: bool = gate_option,
        json_file: str = json_option,
    ) -> None:
        """Time training steps against hvd.DistributedOptimizer's, or plain DDP's."""
        bench = StepBench(model, batch, rounds, trace, scopes, device, engine)
        job = BenchJob(ranks, controller)
        code = commands.bench_step(
            bench, job=job, json_file=json_file, gate=gate, show=_print_table
        )
        raise typer.Exit(code)

    @app.command("robustness")
    def _robustness_command(
        rules: str = typer.Option("", help="Names, separated by ';'; all of ours and ByzFL's."),
        models: str = typer.Option("mlp", help="Of mlp,cnn,mlp20 (20 classes)."),
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

    @app.command("plan")
    def _traces_command(
        settings: str = typer.Option(
            "20x4-50,20x4-100,20x4-50-links,20x4-100-links,gadget", help="Clusters and jobs."
        ),
        seeds: int = typer.Option(20, min=1, help="Draws of each."),
        policies: str = typer.Option("", help="Of price,fifo,drf,dorm,oasis,las; all."),
        reserve: float = typer.Option(RESERVE, min=0.0, help="How high lowest prices are."),
        scale: float = typer.Option(1.0, min=1e-6, help="What prices are multiplied by."),
        solver: str = typer.Option("fill", help="Of workers and servers: fill, milp or round."),
        json_file: str = json_option,
        page: str = typer.Option(None, metavar="FILE", help="Write a page with plots."),
    ) -> None:
        """Plan made-up jobs that arrive at a cluster, by all policies, beside a bound on worth."""
        names = _names(policies) or tuple(POLICIES)
        chosen = TraceBench(_names(settings), seeds, names, reserve, scale, solver)
        raise typer.Exit(commands.bench_plan(chosen, files=(json_file, page), show=_print_table))

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
