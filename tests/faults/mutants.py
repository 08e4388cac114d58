"""Would the tests notice? One-line changes of the core, each of which some test has to catch.

    python -m tests.faults.mutants            # all of them, some 5 minutes of one core
    python -m tests.faults.mutants momentum   # those whose file or law has one of these texts

Each mutant breaks one law, in a copy of the working tree. It is caught if one of its tests fails
there, which passes without it. Who shortens the tests runs this before and after: no fewer may be
caught. Where a line has changed, the table below has to follow; ``test_mutants.py`` says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant"]

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 900.0  # of a mutant's tests; a choice
_MOST_FAILING = 4  # tests that fail anyway, before it is given up; a choice


@dataclass(frozen=True)
class Mutant:
    """A change of one place, and who has to notice.

    Attributes:
        law: what it breaks.
        path: the file, below ``loft_hvd``.
        old: text that is there once.
        new: what takes its place.
        tests: files below ``tests``, of which one has to fail.
    """

    law: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """Return the file's text with the change; a ValueError unless its place is there once."""
        text = (root / "loft_hvd" / self.path).read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.law!r}: loft_hvd/{self.path} has its text {count} times, not once: "
                f"{self.old!r}; give it the line that holds this law now"
            )
        return text.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "a median survives less than half of the weight",
        "aggregation/rules.py",
        "return (sum(counting) - 1) // 2",
        "return sum(counting) // 2",
        ("unit/test_rules.py",),
    ),
    Mutant(
        "the upper middle value has more than half of the weight below it",
        "aggregation/reference.py",
        "(2 * up_to > up_to[-1])",
        "(2 * up_to >= up_to[-1])",
        ("unit/test_reference.py", "unit/test_known_answers.py", "property/test_aggregation.py"),
    ),
    Mutant(
        "the call of a kernel hands weights on to rules that see rows",
        "aggregation/compute.py",
        "decide(rule, measure_rows(rows), weights, precision=precision)",
        "decide(rule, measure_rows(rows), None, precision=precision)",
        ("unit/test_compute.py", "unit/test_mixing.py", "property/test_mixing.py"),
    ),
    Mutant(
        "nearest-neighbour mixing takes rows - f rows",
        "aggregation/mixing.py",
        'kind="stable")[:, : num_rows - f]',
        'kind="stable")[:, : num_rows - f + 1]',
        ("unit/test_mixing.py", "unit/test_known_answers.py", "property/test_mixing.py"),
    ),
    Mutant(
        "diagnostics tell each row what itself did",
        "aggregation/diagnostics.py",
        "row: (seen, outside[i],",
        "row: (seen, outside[0],",
        ("unit/test_diagnostics.py",),
    ),
    Mutant(
        "no rank weighs more than twice the mean",
        "pipeline/weights.py",
        "2 * total) for size in sizes",
        "3 * total) for size in sizes",
        ("unit/test_weights.py",),
    ),
    Mutant(
        "a rank that sat a pass out sends a row of the others' size",
        "pipeline/weights.py",
        "row_scale=len(passes) / num_real",
        "row_scale=len(passes) / len(passes)",
        ("unit/test_weights.py",),
    ),
    Mutant(
        "momentum: an average that was told weighs no more than it can",
        "pipeline/momentum.py",
        "most = most_samples / (1 - self.beta)",
        "most = float(_MOST_SAMPLES)",
        ("unit/test_momentum.py",),
    ),
    Mutant(
        "momentum: what an average weighs fades",
        "pipeline/momentum.py",
        "self.beta * weight + count for weight, count in pairs",
        "weight + count for weight, count in pairs",
        ("unit/test_momentum.py",),
    ),
    Mutant(
        "rank 0's order of gradients is refused unless it is one",
        "pipeline/buckets.py",
        "if sorted(order) != list(range(num_parameters)):",
        "if len(order) != num_parameters:",
        ("unit/test_buckets.py",),
    ),
    Mutant(
        "rules that see rows go to shard owners, of two ranks too",
        "pipeline/ring.py",
        "== 2 and not (is_sum or rule.sees_rows or lane.lends or lane.loses)",
        "== 2 and not (is_sum or lane.lends or lane.loses)",
        ("unit/test_ring.py", "unit/test_reduction.py", "unit/test_selection.py"),
    ),
    Mutant(
        "a parameter of two optimizers lives in neither's bucket",
        "pipeline/gradients.py",
        "return len(_holders()[id(self._parameters[index])]) > 1",
        "return len(_holders()[id(self._parameters[index])]) > 2",
        ("unit/test_gradients.py", "unit/test_reducer.py", "unit/test_wrapper.py"),
    ),
    Mutant(
        "a model of float32 and float64 is judged in float32",
        "pipeline/selection.py",
        "is_exact = all(part",
        "is_exact = any(part",
        ("unit/test_selection.py",),
    ),
    Mutant(
        "nobody audits itself",
        "pipeline/audit.py",
        "shift = 1 + int(draws.random() * (size - 1))",
        "shift = int(draws.random() * size)",
        ("unit/test_audit.py",),
    ),
    Mutant(
        "half of the owners cannot accuse a worker alone",
        "pipeline/suspicion/tracker.py",
        "np.sort(values)[(len(values) - 1) // 2]",
        "np.sort(values)[len(values) // 2]",
        ("unit/test_tracker.py",),
    ),
    Mutant(
        "chance is taken off how far ranks lie apart",
        "pipeline/suspicion/spread.py",
        "by_chance = error + _MEDIAN_EFFICIENCY",
        "by_chance = _MEDIAN_EFFICIENCY",
        ("unit/test_spread.py",),
    ),
    Mutant(
        "of two values equally common the lowest rank's is right",
        "transport/agreement.py",
        "(values.count(value), -values.index(value)))",
        "(values.count(value), values.index(value)))",
        ("unit/test_agreement.py",),
    ),
    Mutant(
        "messages of the same name and another dtype never meet",
        "transport/mesh.py",
        'f"{name} {values.nbytes} {values.dtype}"',
        'f"{name} {values.nbytes}"',
        ("unit/test_mesh.py",),
    ),
    Mutant(
        "a series of exchanges in shared memory is new on every rank",
        "transport/shared_memory.py",
        "1 + int(channel.allgather_rows(row).max())",
        "1 + int(channel.allgather_rows(row).min())",
        ("unit/test_shared_memory.py",),
    ),
    Mutant(
        "a lost link alone ends nobody",
        "failures/diagnosis.py",
        "or (has_lost_it and self._has_engine_failed)",
        "or has_lost_it",
        ("unit/test_diagnosis.py",),
    ),
    Mutant(
        "floors are rounded up to whole grains",
        "balance/plan.py",
        "low = -(-self.floor // self.grain)",
        "low = self.floor // self.grain",
        ("unit/test_plan.py", "unit/test_search.py", "property/test_balance.py"),
    ),
    Mutant(
        "no rank is taken below its floor while samples move",
        "balance/search.py",
        "sizes[giver] - step >= bounds.floor[giver]",
        "sizes[giver] - step >= 0",
        ("unit/test_search.py", "property/test_balance.py"),
    ),
    Mutant(
        "errors that both sides of a gain share cancel",
        "balance/fit.py",
        "np.square(before - after)",
        "np.square(before + after)",
        ("unit/test_fit.py", "unit/test_loft.py"),
    ),
    Mutant(
        "nobody was busy for longer than the step took",
        "balance/interval.py",
        "counts | (busy > limit_s) |",
        "counts |",
        ("unit/test_interval.py", "unit/test_live_lies.py"),
    ),
    Mutant(
        "a plan starts behind what any loader may draw",
        "balance/batches.py",
        "max(self._lookahead, self._depth)",
        "self._lookahead",
        ("unit/test_balancer.py", "unit/test_live_loaders.py"),
    ),
    Mutant(
        "True is no number in a saved state",
        "codec.py",
        " or (isinstance(value, bool) and kind is not bool)",
        "",
        ("unit/test_codec.py",),
    ),
    Mutant(
        "samples are assigned anew where another plan comes into force",
        "data/draws.py",
        "            if plan.sizes != likely:",
        "            if likely is None:",
        ("unit/test_draws.py", "unit/test_sampler.py", "property/test_sampler.py"),
    ),
    Mutant(
        "what was consumed in an older order stays consumed in a second resume",
        "data/sampler.py",
        "mask[settings.order(self.epoch, done=self._done)[:position]]",
        "mask[settings.order(self.epoch)[:position]]",
        ("unit/test_sampler.py", "unit/test_loader.py", "property/test_sampler.py"),
    ),
    Mutant(
        "a sample that lies where another one should is not handed out",
        "store/shelf.py",
        "if found is None or found[0] != sample:",
        "if found is None:",
        ("unit/test_shelf.py",),
    ),
    Mutant(
        "a run log of lines that must stay is thinned less and less often",
        "runlog.py",
        "max(self._max_bytes, 2 * self._num_bytes)",
        "self._max_bytes",
        ("unit/test_runlog.py",),
    ),
)


def copied_tree(target: Path) -> None:
    """Copy what git knows of the working tree, and the extension, which it ignores."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "loft_hvd").glob("*.so")]
    for name in names:
        if (ROOT / name).is_file():  # one that is deleted and not committed is listed too
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def failing_test(tree: Path, tests: Iterable[str], *, but: Iterable[str] = ()) -> str | None:
    """Run tests of ``make test`` until one fails; return that, or None where all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not long", *(f"--deselect={name}" for name in but), *tests]
    # A file's compiled form is known by its size and second: a mutant's may be those of the file.
    for cache in (tree / "loft_hvd").rglob("__pycache__"):
        shutil.rmtree(cache)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"a limit of {_LIMIT_S:g} s"
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)(?: - |$)", done.stdout, re.MULTILINE)
    if (done.returncode == 0) != (found is None):
        raise RuntimeError(f"{' '.join(command)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return None if found is None else found[1]


def catch(mutant: Mutant, tree: Path) -> str:
    """Return the test that catches a mutant in a copy of the tree, or that none does."""
    path, fail_anyway = tree / "loft_hvd" / mutant.path, list[str]()
    original, changed = path.read_text(encoding="utf-8"), mutant.applied(tree)
    while len(fail_anyway) < _MOST_FAILING:
        path.write_text(changed, encoding="utf-8")
        found = failing_test(tree, [f"tests/{name}" for name in mutant.tests], but=fail_anyway)
        path.write_text(original, encoding="utf-8")
        if found is None:
            return "NOT CAUGHT"
        if "::" not in found or failing_test(tree, [found]) is None:
            return f"caught by {found}"
        fail_anyway.append(found)  # a limit on a crowded machine, say
    return f"NOT KNOWN: without it, too, these fail: {', '.join(fail_anyway)}"


def main(*wanted: str) -> None:
    mutants = [
        each for each in MUTANTS if any(word in each.path + each.law for word in wanted or [""])
    ]
    num_caught = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copied_tree(tree)
        for mutant in mutants:
            began = time.monotonic()
            said = catch(mutant, tree)
            num_caught += said.startswith("caught")
            print(f"{time.monotonic() - began:4.0f} s  {mutant.law}: {said}", flush=True)
    print(f"caught {num_caught} of {len(mutants)}")
    raise SystemExit(num_caught < len(mutants))


if __name__ == "__main__":
    main(*sys.argv[1:])
