"""What it costs to fill the blocks of rows that did not come, and to look at rows that were filled.

    OMP_NUM_THREADS=1 python benchmarks/filling.py --json FILE

Rows of a shard that rank 0 owns. Of each other row a share of the wire blocks did not come; a block
of which more were lost than the rule can spare has come from all. By turns: the rule alone, holes
filled and the rule, the rule with a look at one block in 32, and that with holes. Each call takes
other rows, so that no cache holds them. Medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.diagnostics import diagnose, diagnose_filled
from loft_hvd.aggregation.filling import Holes, fill_holes
from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import Rule
from loft_hvd.bench.record import write_record

BLOCK_NUMEL = 320  # float32 values of a wire block
NUM_SETS = 5  # of rows


def draw_holes(num_rows: int, numel: int, share: float, rule: Rule) -> Holes:
    """Draw which blocks did not come; of blocks of which too few did, all have."""
    source = np.random.default_rng(0)
    missing = source.random((num_rows, -(-numel // BLOCK_NUMEL))) < share
    missing[0] = False
    missing[:, (~missing).sum(axis=0) < rule.min_rows] = False
    return Holes(torch.from_numpy(missing.astype(np.uint8)), BLOCK_NUMEL)


def measure(rule: Rule, sets: list[Tensor], holes: Holes, rounds: int) -> dict[str, float]:
    """Return the median of each call in ms."""
    out, turn = torch.empty(sets[0].shape[1]), itertools.count()

    def fill_and_run(rows: Tensor) -> None:
        fill_holes(rows, holes, rule, own=0)
        aggregate(rows, rule, out=out)

    calls: dict[str, Callable[[Tensor], Any]] = {
        "rule_ms": lambda rows: aggregate(rows, rule, out=out),
        "fill_and_rule_ms": fill_and_run,
        "look_ms": lambda rows: diagnose(rows, rule, out=out, every=32),
        "look_with_holes_ms": lambda rows: diagnose_filled(rows, rule, holes, out=out, every=32),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            rows = sets[next(turn) % len(sets)]
            begin = time.perf_counter()
            call(rows)
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Measure every rule at every share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--numel", type=int, default=1_000_000)
    parser.add_argument("--shares", default="0.02,0.1")
    parser.add_argument("--rules", default="trimmed_mean:f=1,median,robust:f=1")
    parser.add_argument("--rounds", type=int, default=61)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    sets = [torch.randn(given.rows, given.numel) for _ in range(NUM_SETS)]
    found = []
    for share, text in itertools.product(given.shares.split(","), given.rules.split(",")):
        rule = parse_rule(text)
        holes = draw_holes(given.rows, given.numel, float(share), rule)
        line: dict[str, Any] = {
            "rule": text,
            "share": float(share),
            "blocks_with_holes": int(holes.missing.any(dim=0).sum()),
            **measure(rule, sets, holes, given.rounds),
        }
        line["ratio"] = line["fill_and_rule_ms"] / line["rule_ms"]
        said = ", ".join(f"{name} {line[name]:.2f}" for name in list(line)[3:])
        print(f"{text:18} {float(share):5.0%} lost: {said}")  # noqa: T201 - a script that reports
        found.append(line)
    if given.json:
        results = {"rows": given.rows, "numel": given.numel, "results": found}
        write_record(given.json, results, command=sys.argv)


if __name__ == "__main__":
    main()
