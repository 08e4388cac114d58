"""Whatever names and commands files have: refused, or in an output as what they are alone."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loft_hvd.errors import LoftError
from loft_hvd.fleet.emit import emit, first_sizes
from loft_hvd.fleet.jobs import DataSet, DeviceModel, Fleet, Host, Job, JobList, Rack
from loft_hvd.fleet.measured import Origin
from loft_hvd.fleet.place import Choice
from loft_hvd.fleet.plan_page import plan_page
from loft_hvd.fleet.rate import predict
from loft_hvd.fleet.run import JobPlan, describe, to_dict
from loft_hvd.fleet.traffic import HostRanks, Layout
from tests.support.schema import faults, read_schema

MPIJOB = read_schema(Path(__file__).parents[1] / "unit/schemas/mpijob.json")
HOST = r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
HOSTS = rf"{HOST}:\d+(,{HOST}:\d+)*"
# What shells, batch scripts, TOML, JSON, HTML and terminals take for more than a letter.
_LETTERS = "aZ09-._+ ,:;=$`'\"\\|&<>()[]{}*?~!#%/\n\r\t\0\x1b\x7f\u2028\u202e\u00e9\ufeff"
_HOSTILE = (
    "a;touch /tmp/owned",
    "$(id)",
    "a\n#SBATCH --uid=0",
    "a --exclusive",
    "<script>alert(1)</script>",
    '"><img src=x>',
    "-oProxyCommand=id",
    "a,b:9",
    "../../etc/passwd",
    "\x1b[2J",
)
names = st.one_of(
    st.text(st.sampled_from(_LETTERS), max_size=12),
    st.sampled_from(_HOSTILE),
    st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True),  # of which most are taken
)


class Tags(HTMLParser):
    """The elements of a page, and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {tag, *(name for name, _ in attrs)}


def plan_of(
    words: list[str],
    *,
    host: str = "n1",
    rack: str = "left",
    device: str = "T4",
    data: str = "photos",
    name: str = "job",
) -> JobPlan:
    """Return a plan of two hosts with these names; a LoftError where one is refused."""
    hosts = [Host(host, {device: 2}, 1e9, rack=rack), Host("other", {device: 2}, 1e9, rack=rack)]
    fleet = Fleet(hosts, [Rack(rack, 1e9)], [DataSet(data, 1000, 1e3, {host: 5e5})])
    job = Job(name, words, 4e6, 32, {device: DeviceModel(1e-3)}, steps=10, data=data)
    JobList([job])
    best = predict(fleet, job, Layout.of([HostRanks(each, device, 1) for each in hosts]))
    origins = {device: Origin(f"measured in {data}.jsonl")}
    return JobPlan(fleet, job, Choice(best, (best,), (), {}), None, origins)


TAGS = Tags(plan_page(plan_of(["python"]))).found


def check(plan: JobPlan) -> None:
    """Raise where something that a name may hold has become more than a part of a value."""
    job, hosts = plan.job, [host.name for host in plan.fleet.hosts]
    for kind in ("horovodrun", "mpirun"):
        text = emit(plan, kind, sizes="sizes.json")
        words = shlex.split(text)
        assert text.count("\n") == 1
        assert words[-len(job.command) :] == job.command
        assert re.fullmatch(HOSTS, words[words.index("-H") + 1])
    script = emit(plan, "sbatch").splitlines()
    options = [line for line in script if line.startswith("#")]
    assert all(re.fullmatch(r"#SBATCH [-a-zA-Z0-9=:,.%]+|#!/bin/bash", line) for line in options)
    assert script[len(options)] == "set -euo pipefail"
    assert shlex.split(script[-1])[-len(job.command) :] == job.command
    assert len(script) == len(options) + 3
    assert set(json.loads(first_sizes(plan))["hosts"]) == set(hosts)
    assert {rank["host"] for rank in json.loads(json.dumps(to_dict(plan)))["ranks"]} == set(hosts)
    page = plan_page(plan)
    assert Tags(page).found <= TAGS
    assert all(letter.isprintable() or letter == "\n" for letter in page)
    assert all(line.isprintable() for line in describe(plan))


@settings(max_examples=60)
@given(names, names, names, names, names, st.lists(names, min_size=1, max_size=3))
def test_names_are_refused_or_stay_names(
    host: str, rack: str, device: str, data: str, name: str, words: list[str]
) -> None:
    try:
        plan = plan_of(words, host=host, rack=rack, device=device, data=data, name=name)
    except LoftError:
        return
    check(plan)


@given(st.sampled_from(["host", "rack", "device", "data", "name", "words"]), names)
def test_one_hostile_name_among_good_ones_is_refused_or_stays_a_name(at: str, value: str) -> None:
    words, named = ["python", *([value] if at == "words" else [])], {at: value}
    named.pop("words", None)
    try:
        plan = plan_of(words, **named)
    except LoftError:
        return
    check(plan)
    try:
        manifest = json.loads(emit(plan, "mpijob", image=value))
    except LoftError:
        return
    assert list(faults(manifest, MPIJOB, MPIJOB)) == []


@pytest.mark.parametrize("value", _HOSTILE)
@pytest.mark.parametrize("at", ["host", "name"])
def test_hostile_hosts_and_jobs_are_refused(value: str, at: str) -> None:
    with pytest.raises(LoftError):
        plan_of(["python"], **{at: value})


@pytest.mark.parametrize("value", [each for each in _HOSTILE if each != "a --exclusive"])
@pytest.mark.parametrize("at", ["rack", "device", "data"])
def test_hostile_racks_devices_and_data_are_refused(value: str, at: str) -> None:
    """They may hold spaces: no line to paste names them."""
    with pytest.raises(LoftError):
        plan_of(["python"], **{at: value})


@pytest.mark.parametrize("word", ["a\nb", "a\x1b[2J", "\u202egpj.exe", ""])
def test_words_with_control_characters_are_refused(word: str) -> None:
    with pytest.raises(LoftError, match="must be words"):
        plan_of([word])
