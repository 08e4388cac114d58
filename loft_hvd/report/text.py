"""A run log in plain text: the verdict, what happened, and what was known last."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from loft_hvd.balance.explain import describe
from loft_hvd.codec import printable
from loft_hvd.pipeline.suspicion.report import SuspicionReport
from loft_hvd.report.entries import (
    Explain,
    Fault,
    Line,
    LinksLine,
    NoiseLine,
    PassCounts,
    Plans,
    Run,
    SpreadLine,
    SuspicionLine,
    Thinned,
    Times,
    newest_of,
    of_kind,
    read_lines,
)
from loft_hvd.report.verdict import (
    in_steps_of_log,
    judge,
    newest_world,
    when_measured,
    worlds,
)
from loft_hvd.transport.datagram import LinkLosses

__all__ = ["LINK_COLUMNS", "link_cells", "links_line", "render_text"]


def render_text(entries: Sequence[dict[str, Any]]) -> str:
    """Say what a run log holds, the entries of ``read_run_log``; a DataError where it is none."""
    return say(read_lines(entries))


def say(lines: Sequence[Line]) -> str:
    """Say what the lines of a run log hold, in characters that a terminal only shows.

    The verdict comes first.
    """
    return printable("\n".join([*judge(lines), "", *_history(lines), *_newest(lines)]))


def _history(lines: Sequence[Line]) -> Iterator[str]:
    """Say what happened, in the order in which it did."""
    for world in worlds(lines):
        passes = PassCounts(world)
        for line in world:
            if isinstance(line, Run):
                yield ", ".join(line.facts)
            elif isinstance(line, Plans):
                first_step = passes.in_steps(line).first_step
                yield f"plan {line.plan_id} from step {first_step}: sizes {line.sizes}"
            elif isinstance(line, Fault):
                yield str(line)


def _newest(lines: Sequence[Line]) -> Iterator[str]:
    """Say what was known last of times, models, gradients and workers."""
    yield from map(str, of_kind(Thinned, lines)[-1:])  # of the whole log
    world = newest_world(lines)  # ranks of an earlier one are gone, or have other numbers
    last = {type(line): line for line in world}  # later lines replace earlier ones
    times = last.get(Times)
    if isinstance(times, Times):
        yield f"times up to step {times.step}{times.which}:"
        yield describe(times.ranks, times.crowd, times.turns)
    else:
        yield f"no times: {when_measured(world)}"
    links = last.get(LinksLine)
    if isinstance(links, LinksLine):
        yield links_line(links, of_kind(LinksLine, world))
        yield from _link_rows(links)
    for line in (last.get(kind) for kind in (Explain, NoiseLine, SpreadLine, SuspicionLine)):
        if isinstance(line, Explain):
            yield line.text
        elif isinstance(line, NoiseLine) and (plan := newest_of(Plans, world)) is not None:
            yield line.noise.describe(sum(plan.sizes))
        elif isinstance(line, SpreadLine):
            yield spread_line(line)
        elif isinstance(line, SuspicionLine):
            yield f"workers {SuspicionReport(line.num_steps, tuple(in_steps_of_log(line)))}"


def links_line(newest: LinksLine, all_lines: Sequence[LinksLine]) -> str:
    """Say how much of what rank 0 has aggregated was filled in, and of what the table is."""
    blocks, filled = (
        sum(getattr(link, name) for line in all_lines for link in line.links)
        for name in ("blocks", "blocks_filled")
    )
    few = newest.num_links not in (None, len(newest.links))
    which = f", the {len(newest.links)} of {newest.num_links} that lost most" if few else ""
    lasted = f", {newest.seconds:.0f} s" if math.isfinite(newest.seconds) else ""
    return (
        f"of the values that came to rank {newest.rank} by datagrams {filled / max(1, blocks):.2%} "
        f"were filled in from other rows; its links up to step {newest.step}{lasted}{which}:"
    )


LINK_COLUMNS = ("round trip ms", "Mb/s", "packets", "lost", "sent again", "filled in", "rows early")
"""Of a table of links."""


def link_cells(link: LinkLosses) -> tuple[str, ...]:
    """Return what a table of links has of one, under ``LINK_COLUMNS``."""
    return (
        f"{1e3 * link.round_trip_s:.1f}",
        f"{8e-6 * link.bytes_per_s:.0f}",
        str(link.packets_sent),
        f"{link.lost_share:.2%}",
        str(link.blocks_sent_again),
        f"{link.filled_share:.2%}",
        str(link.rows_closed_early),
    )


def _link_rows(line: LinksLine) -> Iterator[str]:
    yield "peer" + "".join(f"{column:>15s}" for column in LINK_COLUMNS)
    for link in line.links:
        cells = "".join(f"{cell:>15s}" for cell in link_cells(link))
        yield f"{link.peer:4d}{cells}{'  waits for whole rows' if link.waits else ''}"


def spread_line(line: SpreadLine) -> str:
    """Say how much ranks' gradients differ."""
    ratios = ", ".join("unknown" if ratio is None else f"{ratio:.2f}" for ratio in line.ratios)
    return (
        f"lasting difference of each rank's gradients in the first {line.step} steps, over "
        f"their noise from step to step, 0 for ranks alike: {ratios}"
    )
