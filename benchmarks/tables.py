"""Makes the tables of measurements in docs/ from the files in benchmarks/results/.

    python -m benchmarks.tables            # writes the pages anew
    python -m benchmarks.tables --check    # exit status 1 where pages and files differ

On a page such a table follows a line that ends with ``<!-- table: NAME -->``. The line says from
which files the figures are, and on which machine, at which commit, when and by which command they
were made. Line and table are both made here: ``TABLES`` has a function for each name.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from loft_hvd.bench.ranks import NOISE_LIMIT, paired_ratios

__all__ = ["PAGES", "RESULTS", "TABLES", "filled", "main"]

_HOME = Path(__file__).parents[1]
RESULTS = _HOME / "benchmarks/results"
PAGES = sorted((_HOME / "docs").glob("*.md"))
_REGION = re.compile(r"^.*<!-- table: ([\w-]+) -->\n\n(?:\|.*\n)*", re.MULTILINE)

Record = dict[str, Any]
Made = tuple[str, Sequence[str], Iterable[Sequence[str]]]
"""Where the figures are from, the table's header, its rows."""


def _record(name: str) -> Record:
    record: Record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return record


def _number(value: float) -> str:
    """Return a value with two digits behind the point, fewer where it is large."""
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 30 else 0}f}"


def _spread(values: Iterable[float]) -> str:
    found = list(values)
    return f"{_number(min(found))} to {_number(max(found))}"


def _machine(record: Record) -> str:
    machine = record["machine"]
    processor = machine["processor"].replace("(R)", "").removesuffix(" Processor")
    gpu = record.get("device")  # a word in files of steps on a CPU
    on = f"{gpu['name']}, CUDA {gpu['cuda']}, " if isinstance(gpu, dict) else ""
    return f"{on}{machine['allowed_cpus']} cores of an {processor}"


def _made(record: Record) -> str:
    """Return how a file was made and its load, where it says so."""
    command = re.sub(r" --(json|plot|trace) \S+", "", record.get("command", ""))
    command = re.sub(r"^(benchmarks/\S+\.py)", r"python \1", command)
    how = f"`{command}`" if command else str(record["how"])
    load = record["machine"].get("load_1_min")
    return how if load is None else f"{how}, load {load:.1f}"


def _origin(*names: str) -> str:
    """Say of files where they were made, at which commit, when and how; what is equal once."""
    text, before = "", ("", "")
    for name in names:
        record = _record(name)
        place = (_machine(record), f"commit {record['commit']}, {record['date']}")
        if place[0] != before[0]:
            text += f"{place[0]}: "
        text += f"{_made(record)} ("
        text += f"{place[1]}, " if place[1] != before[1] else ""
        text += f"`{name}`); "
        before = place
    return text.removesuffix("; ") + "."


def _as_it_is(name: str) -> Callable[[], Made]:
    """Return the table of a file that holds columns and rows."""

    def made() -> Made:
        record = _record(name)
        rows = [[str(cell) for cell in row] for row in record["rows"]]
        return _origin(name), record["columns"], rows

    return made


# Kernels


def _passes(record: Record, contestant: str, level: str) -> dict[int, float]:
    """Return how many passes a contestant took, by rows; "phocas" stands for every f of it."""
    return {
        timing["rows"]: timing["passes"]
        for timing in record["timings"]
        if timing["level"] == level
        and re.fullmatch(rf"{re.escape(contestant)}( f=\d+)?", timing["contestant"])
    }


def _goals(name: str) -> str:
    """Say how many goals of the kernels are met, and which are not."""
    goals = _record(name)["goals"]
    text = f"{sum(goal['verdict'] == 'met' for goal in goals)} of {len(goals)} goals met"
    for verdict in ("missed", "too noisy"):
        others = [
            f"{goal['what']} {goal['found']:.4g} of {goal['limit']:.4g}"
            for goal in goals
            if goal["verdict"] == verdict
        ]
        text += f"; {verdict}: {'; '.join(others)}" if others else ""
    return text


_RULES = ("median", "trimmed_mean", "mean_around_median", "phocas", "mean")


def _kernels_cpu() -> Made:
    name = "kernels-cpu.json"
    record = _record(name)
    diagnosed = ("trimmed_mean, sampled diagnostics", "trimmed_mean diagnosed 1/16")
    wanted = [
        (f"{label}, {level}", contestant, level)
        for level in ("avx512", "avx2")
        for label, contestant in (*((rule, rule) for rule in _RULES), diagnosed)
    ]
    wanted += [
        ("median of bfloat16 rows, avx512", "median bfloat16", "avx512"),
        ("trimmed_mean with weights, avx512", "trimmed_mean weighted", "avx512"),
        ("torch.median", "torch.median", ""),
    ]
    lines = [(label, _passes(record, contestant, level)) for label, contestant, level in wanted]
    rows = list(lines[0][1])
    body = [[label, *(_number(found[count]) for count in rows)] for label, found in lines]
    return f"{_origin(name)} {_goals(name)}.", ["rows", *map(str, rows)], body


def _kernels_mixing() -> Made:
    """Return what rules that see rows take: distances, and rows mixed and aggregated."""
    name, alike = "kernels-cpu-mixing.json", "kernels-cpu-alike.json"
    levels = ("avx512", "avx2")
    wanted = {
        "distances": "distances",
        "mixing and the trimmed mean, rows left out at random": "mixed trimmed_mean",
    }
    record = _record(name)
    body = [
        [label, *(_number(x) for level in levels for x in _passes(record, one, level).values())]
        for label, one in wanted.items()
    ]
    passes = _record(alike)["passes"]
    cells = [f"{took:.1f}" for level in levels for took in passes[level]]
    body.append(["the same, honest rows leave out the same f", *cells])
    header = [f"{level}, {rows}" for level in levels for rows in _passes(record, "mean", level)]
    origin = f"{_origin(name)} {_goals(name)}. The last line: {_origin(alike)}"
    return origin, ["rows", *header], body


def _kernels_gpu() -> Made:
    names = {"H200": "kernels-cuda-h200.json", "H100": "kernels-cuda.json"}
    wanted = [
        *((rule, rule) for rule in _RULES),
        ("median of bfloat16 rows, by a copy of these", "median bfloat16"),
        ("distances", "distances"),
        ("rows mixed as `NNM` does, and their trimmed mean", "mixed trimmed_mean"),
        ("torch.median, a million coordinates", "torch.median"),
    ]
    records = [_record(name) for name in names.values()]
    body = [
        [label, *(_number(took) for r in records for took in _passes(r, contestant, "").values())]
        for label, contestant in wanted
    ]
    header = [
        f"{gpu}, {rows}"
        for gpu, name in names.items()
        for rows in _passes(_record(name), "mean", "")
    ]
    goals = "; ".join(f"{gpu}: {_goals(name)}" for gpu, name in names.items())
    return f"{_origin(*names.values())} {goals}.", ["rows", *header], body


# All-reduces and steps


def _shown(contestants: Record, start: str) -> Record:
    """Return a contestant by the beginning of its name, {} where it took no part."""
    return next((value for name, value in contestants.items() if name.startswith(start)), {})


_MODELS = ("resnet18", "transformer")
_WATCHED = ("mean", "median", "trimmed_mean")


def _measured(record: Record) -> dict[str, Record]:
    """Return what a file of ``loft-hvd bench`` has measured, by what it was: a size or a step."""
    sizes: dict[str, Record] = record.get("allreduce", {})
    return sizes | {f"step, {model}": record[model] for model in _MODELS if model in record}


def _engine(record: Record) -> str:
    return "MPI" if "--controller mpi" in record["command"] else "Gloo"


_ALLREDUCE = [
    f"allreduce-{name}.json"
    for name in (
        *("2-gloo", "2-gloo-25mb", "2-mpi", "2-mpi-4mb"),
        *("4-gloo", "4-gloo-25mb", "4-gloo-large", "4-mpi"),
    )
]
_PEERS = [f"peer-2-{engine}.json" for engine in ("gloo", "mpi")]
_STEPS = [f"step-{model}-4-{engine}.json" for model in _MODELS for engine in ("gloo", "mpi")]


def _against_horovod() -> Made:
    """Return a line for ranks and engine, a column for what was measured."""
    columns = ["1 MB", "4 MB", "25 MB", "100 MB", "120 MB", *(f"step, {m}" for m in _MODELS)]
    table: dict[str, dict[str, str]] = {}
    noisy = []
    for name in (*_ALLREDUCE, *_PEERS, *_STEPS):
        record = _record(name)
        ranks = f"{record['ranks']}, {_engine(record)}"
        for what, found in _measured(record).items():
            if found["noise"] > NOISE_LIMIT:
                noisy.append(f"{ranks}, {what} in {found['rounds']} rounds ({found['noise']:.2f})")
                continue
            contestants = found["contestants"]
            ratios = [f"{_shown(contestants, rule)['ratio']:.2f}" for rule in _WATCHED]
            cell = f"{', '.join(ratios)} of {1000 * contestants['horovod']['seconds']:.1f} ms"
            if "against_peer" in found:
                cell += f"; torch's {found['against_peer']['ratio']:.1f} times ours"
            table.setdefault(ranks, {})[what] = cell
    body = [[ranks, *(cells.get(what, "") for what in columns)] for ranks, cells in table.items()]
    origin = f"Too noisy to count: {'; '.join(noisy)}. {_origin(*_ALLREDUCE, *_PEERS, *_STEPS)}"
    return origin, ["ranks", *columns], body


def _on_a_gpu() -> Made:
    steps = [f"step-resnet18-{ranks}-gloo-cuda.json" for ranks in (4, 2)]
    names = [*steps, "allreduce-4-gloo-cuda.json"]
    starts = [*_WATCHED, "robust, in shards", "robust, whole model"]
    body = []
    for name in names:
        record = _record(name)
        for what, found in _measured(record).items():
            shown = [_shown(found["contestants"], start) for start in starts]
            ratios = [
                (f"{one['ratio']:.2f}" + ", missed" * (one.get("verdict") == "missed"))
                if one
                else ""
                for one in shown
            ]
            horovod = f"{1000 * found['contestants']['horovod']['seconds']:.1f} ms"
            ranks = f"{record['ranks']}, {_engine(record)}"
            body.append([ranks, what, horovod, f"{found['noise']:.2f}", *ratios])
    header = ["ranks", "what", "Horovod", "noise", "`Mean`", "`Median`", "`TrimmedMean`, goal 1.10"]
    return _origin(*names), [*header, "`Robust`, in shards", "`Robust`, whole model"], body


def _over_horovod(record: Record, contestant: str) -> float:
    if "seconds" in record:  # of each round
        samples = record["seconds"]
        return paired_ratios(samples, baseline="horovod", again="horovod again")[contestant].ratio
    return float(record["resnet18"]["contestants"][contestant]["ratio"])


def _robust_steps() -> Made:
    """Return what ``Robust`` costs in a step, a column for each job."""
    jobs = {
        "one host, Gloo": "step-scopes-4-gloo.json",
        "one host, MPI": "step-scopes-4-mpi.json",
        "4 hosts, 1 Gb/s, Gloo": "scopes-4-1gbit-gloo.json",
        "4 hosts, 1 Gb/s, MPI": "scopes-4-1gbit-mpi.json",
    }
    records = [_record(name) for name in jobs.values()]

    def left(key: str) -> list[str]:
        return [f"{1000 * record['scopes'][key]:.1f} ms" for record in records]

    def ratios(of: Callable[[Record], float]) -> list[str]:
        return [_number(of(record)) for record in records]

    in_shards = ratios(lambda r: r["scopes"]["over_trimmed_mean"])
    over_formula = ratios(lambda r: r["scopes"]["exposed_s"] / r["scopes"]["exposed_formula_s"])
    whole_step = ratios(lambda r: _over_horovod(r, "robust, whole model"))
    noise = ratios(lambda r: abs(_over_horovod(r, "horovod again") - 1))
    body = [
        ["a step of `Robust(1)` in shards over one of `TrimmedMean(1)`", *in_shards, "1.10"],
        ["in shards: left after the backward pass", *left("shards_exposed_s"), ""],
        ['`scope="model"`: the same', *left("exposed_s"), ""],
        ["by the formula", *left("exposed_formula_s"), ""],
        ['`scope="model"` over the formula', *over_formula, "1.15"],
        ['a step with `scope="model"` over one of Horovod', *whole_step, ""],
        ["noise", *noise, f"{NOISE_LIMIT:.2f}"],
    ]
    return _origin(*jobs.values()), ["4 ranks, ResNet-18", *jobs, "at most"], body


def _against(baseline: str, jobs: dict[str, str]) -> Callable[[], Made]:
    """Return how to tell of steps over those of torch's own in the same round, job by job.

    ``jobs``: what each measured, by the end of its file's name.
    """

    def made() -> Made:
        files = [f"step-{baseline}-{job}.json" for job in jobs]
        judged = [_record(file)[job.split("-")[0]] for file, job in zip(files, jobs, strict=True)]
        body = []
        for name, first in judged[0]["contestants"].items():
            cells = []
            for each in judged:
                found = each["contestants"][name]
                ms = f"{1000 * found['seconds']:.0f} ms"
                missed = ", missed" if found.get("verdict") == "missed" else ""
                cells += [ms if name == baseline else f"{_number(found['ratio'])}{missed}"]
            goal = first.get("goal")
            body.append([name, *cells, "" if goal is None else _number(goal)])
        header = ["4 ranks, Gloo", *jobs.values(), "at most"]
        return _origin(*files), header, body

    return made


_DDP_JOBS = {
    "mlp-4-gloo": "MLP of 12.6 M, one host",
    "resnet18-4-gloo": "ResNet-18, one host",
    "resnet18-4x1-1gbit": "ResNet-18, 4 hosts, 1 Gb/s",
}
_FSDP_JOBS = {"mlp-4-gloo": "MLP of 12.6 M, one host"}


# Links


def _links() -> Made:
    names = [f"links-4-{link}-{mb}mb.json" for link in ("1gbit", "200mbit") for mb in (25, 100)]
    body = []
    for name in names:
        record = _record(name)
        found = {result["contestant"]: result for result in record["results"]}
        horovod, own = found["hvd.allreduce"], found["trimmed_mean float32"]
        halves = [found[f"trimmed_mean {dtype}"] for dtype in ("bfloat16", "float16")]
        sent = [f"{one['host_bytes'] / 1e6:.1f}" for one in (horovod, own, *halves)]
        body.append(
            [
                f"{record['bits_per_s'] / 1e6:.0f} Mb/s, {horovod['megabytes']:.0f} MB",
                *(
                    f"{1000 * x['seconds']:.0f} ms, {100 * x['of_line_rate']:.1f} %"
                    for x in (horovod, own)
                ),
                _number(own["over_horovod"]),
                ", ".join(_number(half["over_float32"]) for half in halves),
                f"{', '.join(sent)} MB",
            ]
        )
    header = ["links, tensor", "`hvd.allreduce`, of the line rate", "`TrimmedMean(1)` of float32"]
    header += ["that over `hvd.allreduce`", "bfloat16, float16 over float32"]
    header += ["out of a host: `hvd.allreduce`, float32, bfloat16, float16"]
    return _origin(*names), header, body


def _compact() -> Made:
    name = "compact.json"
    shares: dict[str, list[str]] = {}
    speeds = []
    for result in _record(name)["results"]:
        if "share" in result:
            shares.setdefault(result["values"], []).append(f"{100 * result['share']:.0f} %")
        else:
            speed = result["bytes_per_s"]
            speeds.append(f"{speed['write'] / 1e9:.0f}, {speed['read'] / 1e9:.0f} GB/s")
    body = [[values, *cells] for values, cells in shares.items()]
    body.append(["written and read by one core", *speeds])
    header = ["a message, of its values' bytes", "float32", "bfloat16", "float16"]
    return _origin(name), header, body


# The store, and training over several hosts


def _store() -> Made:
    name = "store-rates.json"
    body = []
    for goal in _record(name)["goals"]:
        limit = f"at {'most' if goal['is_most'] else 'least'} {goal['limit']:g} {goal['unit']}"
        body.append([goal["what"], limit, f"{goal['value']:.1f} {goal['unit']}"])
    return _origin(name), ["what", "goal", "measured"], body


_CASES = {
    "serial": "all policies, and `loft` with a store; a batch is fetched, then computed",
    "prefetch": "the same with a loader process on each rank, which starts in the first epoch",
    "cold": "first epochs, in eight jobs",
    "control": "equal hosts that have all samples: nothing to win",
    "unseen": "predictions for sizes and budgets that the models never had, and the steps measured",
    "faulty": "a rank sends its gradients turned round, ten times as long",
    "degrading": "the link of a fast host becomes slow half-way",
    "dying": "a host dies in an elastic job whose samples are on two hosts each",
}


def _testbed_goals() -> Made:
    body = []
    for case, what in _CASES.items():
        goals = [
            f"{goal['what']} {goal['value']:.3g} of {goal['limit']:g}"
            + " (missed)" * (goal["value"] > goal["limit"])
            for goal in _record(f"testbed-{case}.json")["goals"]
        ]
        body.append([f"`{case}`", what, "; ".join(goals)])
    header = ["case", "what is compared", "found, of at most"]
    return _origin(*(f"testbed-{case}.json" for case in _CASES)), header, body


def _testbed_serial() -> Made:
    name = "testbed-serial.json"
    body = []
    for result in _record(name)["results"]:
        first, *later = result["epochs"]
        steps = [step for epoch in later for step in epoch["step_s"]]
        cold, median = statistics.mean(first["step_s"]), statistics.median(steps)
        at_hand = sum(later[-1]["local"]) / sum(later[-1]["sizes"])
        cells = [f"{1000 * cold:.0f} ms", f"{1000 * median:.0f} ms", f"{100 * at_hand:.0f} %"]
        body.append([f"`{result['name']}`", *cells, f"{100 * result['accuracy']:.1f} %"])
    header = ["", "first epoch, mean step", "later ones, median step"]
    return _origin(name), [*header, "samples at hand in the last", "test accuracy"], body


# The published claim


def _published_claim() -> Made:
    name = "published-claim.json"
    record = _record(name)
    clusters = [f"{kind}, {way}" for kind in ("xavier", "orin") for way in ("serial", "prefetch")]
    compared = {
        "LOFT against equal sizes": "LOFT, against uniform",
        "LOFT against LB-BSP that looks for local samples, as here": "LOFT, against LB-BSP",
        "LOFT against LB-BSP that does not, as published": "LOFT, against LB-BSP, blind",
        "LOFT against LB-BSP on the whole step (`lbbsp-cpu:busy`)": "LOFT, against LB-BSP:busy",
        "LOFT with a store against LB-BSP, as published": "LOFT, store, against LB-BSP, blind",
        "LOFT with a store against LOFT without": "LOFT, store, against LOFT",
    }

    def line(label: str, key: str, exchange: str) -> list[str]:
        found = [record[cluster]["saved_percent"][key][exchange] for cluster in clusters]
        return [label, *(f"{saved['median']:.1f}, {saved['largest']:.1f}" for saved in found)]

    body = [line(label, key, "without exchange") for label, key in compared.items()]
    published = "LOFT against LB-BSP, as published, with the exchange of gradients"
    body.append(line(published, "LOFT, against LB-BSP, blind", "with exchange"))
    return _origin(name), ["saved, %: median, largest", *clusters], body


def _published_loss() -> Made:
    name = "published-loss.json"
    clusters = [found for key, found in _record(name).items() if key.startswith(("xavier", "orin"))]
    rules = ("mean", "TrimmedMean(1)", "Robust(1)")
    faults = {
        "no fault": "small batch only",
        "a worker that sends zeros": "faulty worker: zeros",
        "noise of 0.1": "faulty worker: noise 0.1",
        "turned labels": "faulty worker: label flip",
        "gradients turned round": "faulty worker: sign flip",
        "the same, ten times as long": "faulty worker: sign flip x10",
        "ALIE": "faulty worker: ALIE z=1",
    }

    def cell(fault: str, contestant: str) -> str:
        found = [cluster[fault][contestant]["lower_percent"] for cluster in clusters]
        return ", ".join("learns nothing" if one is None else f"{one:.1f}" for one in found)

    body = [
        [label, *(cell(fault, f"LOFT, {rule}, equal time") for rule in rules)]
        for label, fault in faults.items()
    ]
    no_exchange = cell("small batch only", "LOFT, mean, equal time without the exchange")
    body[0][1] += f" (exchange not counted {no_exchange})"
    header = [
        "less loss than LB-BSP with the mean, %",
        "mean",
        *(f"`{rule}`" for rule in rules[1:]),
    ]
    return _origin(name), header, body


def _in_short() -> Made:
    kernels = _record("kernels-cpu.json")
    passes = [
        took
        for rule in ("median", "trimmed_mean")
        for level in ("avx2", "avx512")
        for rows, took in _passes(kernels, rule, level).items()
        if rows <= 16
    ]

    def ratios(names: Sequence[str], what: str) -> str:
        found: dict[str, list[float]] = {"Gloo": [], "MPI": []}
        for record in map(_record, names):
            for measured, result in _measured(record).items():
                if measured.startswith(what) and result["noise"] <= NOISE_LIMIT:
                    shown = [_shown(result["contestants"], rule) for rule in _WATCHED[1:]]
                    found[_engine(record)] += [contestant["ratio"] for contestant in shown]
        return ", ".join(f"{engine} {_spread(values)}" for engine, values in found.items())

    idle, contended, *_ = [row[2] for row in _record("plans-emulated.json")["rows"]]
    plans = f"{idle} (where ranks compete for cores {contended})"
    rows = {
        "median, trimmed mean of 3 to 16 rows, CPU": (_spread(passes), "a pass over their memory"),
        "robust all-reduce of 25 MB, one host": (ratios(_ALLREDUCE, "25 MB"), "`hvd.allreduce`"),
        "step of 4 ranks with a robust rule, one host": (ratios(_STEPS, "step"), "Horovod's step"),
        "step with fitted sizes, one of four ranks slowed": (plans, "the best fixed sizes' step"),
    }
    body = [[what, *cells] for what, cells in rows.items()]
    return "In short, from the tables below:", ["what", "takes so many times", "the time of"], body


TABLES: dict[str, Callable[[], Made]] = {
    "in-short": _in_short,
    "kernels-cpu": _kernels_cpu,
    "kernels-mixing": _kernels_mixing,
    "kernels-gpu": _kernels_gpu,
    "on-a-gpu": _on_a_gpu,
    "against-horovod": _against_horovod,
    "against-ddp": _against("ddp", _DDP_JOBS),
    "against-fsdp": _against("fsdp", _FSDP_JOBS),
    "robust-steps": _robust_steps,
    "momentum": _as_it_is("step-momentum.json"),
    "one-host": _as_it_is("exchanges-one-host.json"),
    "buckets-last": _as_it_is("buckets-last.json"),
    "links": _links,
    "links-ways": _as_it_is("links-ways.json"),
    "compact": _compact,
    "plans": _as_it_is("plans-emulated.json"),
    "contest": _as_it_is("contest.json"),
    "store": _store,
    "testbed-serial": _testbed_serial,
    "testbed-goals": _testbed_goals,
    "published-claim": _published_claim,
    "published-loss": _published_loss,
    "epoch-cost": _as_it_is("epoch-cost.json"),
}


def filled(page: str) -> str:
    """Return a page's text with every such table, and the line above it, made anew."""

    def anew(region: re.Match[str]) -> str:
        origin, header, rows = TABLES[region[1]]()
        lines = [" | ".join(line) for line in (header, ["---"] * len(header), *rows)]
        table = "".join(re.sub(" +", " ", f"| {line} |\n") for line in lines)
        return f"{origin} <!-- table: {region[1]} -->\n\n{table}"

    return _REGION.sub(anew, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    options = parser.parse_args(arguments)
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    changed = {path: anew for path, text in texts.items() if (anew := filled(text)) != text}
    if options.check:
        return int(bool(changed))
    for path, anew in changed.items():
        path.write_text(anew, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
