"""The house keeps its shape: layers of the design, and one importer for each outside part.

A file imports only files of smaller layers, or files of its own folder whose layer is not larger.
A new file needs a line in ``_LAYERS``: choose the smallest number that its imports allow.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = _ROOT / "loft_hvd"

_LAYERS = {
    "codec.py": 0,
    "config.py": 0,
    "errors.py": 0,
    "files.py": 0,
    "toml.py": 1,
    "topology.py": 0,
    "_native.py": 1,
    "attacks/__init__.py": 4,
    "attacks/attack.py": 1,
    "attacks/optimised.py": 4,
    "attacks/trial.py": 4,
    "copies.py": 1,
    "runlog.py": 1,
    "metrics.py": 5,
    "elastic.py": 7,
    "cli.py": 9,
    "accelerated.py": 9,
    "lightning.py": 9,
    "trainer.py": 9,
    "__init__.py": 10,
    "aggregation/__init__.py": 0,
    "aggregation/inputs.py": 1,
    "aggregation/pages.py": 1,
    "aggregation/rules.py": 1,
    "aggregation/aggregate.py": 2,
    "aggregation/compute.py": 2,
    "aggregation/diagnostics.py": 2,
    "aggregation/distances.py": 2,
    "aggregation/fallback.py": 2,
    "aggregation/filling.py": 2,
    "aggregation/mixing.py": 2,
    "aggregation/ops.py": 2,
    "aggregation/reference.py": 2,
    "aggregation/row_rules.py": 1,
    "aggregation/states.py": 2,
    "aggregation/rule_text.py": 1,
    "transport/__init__.py": 0,
    "transport/addresses.py": 0,
    "transport/tcp.py": 0,
    "transport/waits.py": 0,
    "transport/base.py": 1,
    "transport/compact.py": 2,
    "transport/congestion.py": 2,
    "transport/agreement.py": 2,
    "transport/conformance.py": 2,
    "transport/groups.py": 2,
    "transport/datagram.py": 2,
    "transport/local.py": 2,
    "transport/mesh.py": 2,
    "transport/shared_memory.py": 2,
    "transport/device.py": 2,
    "transport/cuda_peers.py": 2,
    "transport/peer_memory.py": 2,
    "transport/lanes.py": 3,
    "transport/horovod.py": 3,
    "transport/horovod_private.py": 3,
    "transport/torch_distributed.py": 3,
    "transport/default.py": 4,
    "failures/__init__.py": 0,
    "failures/actions.py": 2,
    "failures/call_sites.py": 2,
    "failures/causes.py": 2,
    "failures/connections.py": 2,
    "failures/cuts.py": 2,
    "failures/diagnosis.py": 2,
    "failures/guards.py": 2,
    "failures/handshake.py": 2,
    "failures/heartbeat.py": 2,
    "failures/links.py": 2,
    "failures/observer.py": 2,
    "failures/process.py": 2,
    "failures/progress.py": 2,
    "failures/watched.py": 2,
    "balance/__init__.py": 0,
    "balance/contest.py": 1,
    "balance/explain.py": 1,
    "balance/first_sizes.py": 1,
    "balance/fit.py": 1,
    "balance/goodput.py": 0,
    "balance/interval.py": 1,
    "balance/keeping.py": 0,
    "balance/learning_rate.py": 1,
    "balance/latency.py": 1,
    "balance/plan.py": 1,
    "balance/search.py": 1,
    "balance/turns.py": 1,
    "balance/auto.py": 2,
    "balance/batches.py": 2,
    "balance/lbbsp.py": 2,
    "balance/leaving.py": 2,
    "balance/loft.py": 2,
    "balance/policies.py": 2,
    "balance/policy.py": 2,
    "balance/stopwatch.py": 2,
    "balance/meetings.py": 2,
    "balance/balancer_options.py": 3,
    "balance/controller.py": 3,
    "balance/balancer.py": 5,
    "balance/limits.py": 5,
    "balance/live.py": 5,
    "balance/memory.py": 5,
    "balance/resume.py": 5,
    "balance/room.py": 1,
    "data/__init__.py": 0,
    "data/arrow.py": 1,
    "data/contents.py": 0,
    "data/costs.py": 2,
    "data/fetches.py": 0,
    "data/flow.py": 2,
    "data/assign.py": 2,
    "data/placement.py": 2,
    "data/blocks.py": 2,
    "data/instead.py": 2,
    "data/draws.py": 2,
    "data/sampler.py": 2,
    "data/shards.py": 2,
    "data/stream.py": 2,
    "data/loader.py": 2,
    "store/__init__.py": 0,
    "store/samples.py": 1,
    "store/checks.py": 2,
    "store/gate.py": 1,
    "store/shelf.py": 1,
    "store/peers.py": 2,
    "store/homes.py": 3,
    "store/keepers.py": 3,
    "store/store.py": 5,
    "pipeline/__init__.py": 0,
    "pipeline/streams.py": 1,
    "pipeline/trace.py": 1,
    "pipeline/wire.py": 1,
    "pipeline/weights.py": 2,
    "pipeline/buckets.py": 3,
    "pipeline/counts.py": 3,
    "pipeline/gradients.py": 3,
    "pipeline/momentum.py": 3,
    "pipeline/noise.py": 4,
    "pipeline/ring.py": 3,
    "pipeline/scalers.py": 3,
    "pipeline/selection.py": 3,
    "pipeline/tolerance.py": 3,
    "pipeline/sparse.py": 4,
    "pipeline/unused.py": 4,
    "pipeline/audit.py": 4,
    "pipeline/levels.py": 4,
    "pipeline/reduction.py": 4,
    "pipeline/flights.py": 4,
    "pipeline/link_log.py": 4,
    "pipeline/exchange_log.py": 4,
    "pipeline/passes.py": 4,
    "pipeline/engine.py": 4,
    "pipeline/scatter.py": 4,
    "pipeline/allreduce.py": 6,
    "pipeline/reducer.py": 6,
    "pipeline/suspicion/__init__.py": 0,
    "pipeline/suspicion/judgement.py": 5,
    "pipeline/suspicion/finite.py": 5,
    "pipeline/suspicion/report.py": 5,
    "pipeline/suspicion/same_data.py": 5,
    "pipeline/suspicion/spread.py": 5,
    "pipeline/suspicion/tracker.py": 5,
    "pipeline/suspicion/watch.py": 5,
    "pipeline/suspicion/zeroed.py": 5,
    "optimizer/__init__.py": 0,
    "optimizer/attach.py": 7,
    "optimizer/ddp.py": 7,
    "optimizer/distributed.py": 7,
    "optimizer/fsdp.py": 7,
    "optimizer/hooks.py": 7,
    "optimizer/horovods.py": 7,
    "optimizer/options.py": 7,
    "optimizer/parameters.py": 7,
    "optimizer/replicas.py": 7,
    "optimizer/sharded.py": 7,
    "optimizer/watching.py": 7,
    "optimizer/workers.py": 7,
    "optimizer/wrapper.py": 7,
    "simulate/__init__.py": 0,
    "simulate/cluster.py": 2,
    "simulate/curves.py": 2,
    "simulate/build.py": 4,
    "simulate/scenario.py": 4,
    "simulate/stores.py": 5,
    "simulate/simulation.py": 6,
    "simulate/plots.py": 6,
    "simulate/compare.py": 7,
    "fleet/__init__.py": 0,
    "fleet/inventory.py": 8,
    "fleet/jobs.py": 8,
    "fleet/parse.py": 8,
    "fleet/rate.py": 8,
    "fleet/traffic.py": 8,
    "fleet/measured.py": 8,
    "fleet/place.py": 8,
    "fleet/run.py": 8,
    "fleet/check_log.py": 8,
    "fleet/plan_page.py": 8,
    "fleet/emit.py": 8,
    "fleet/timeline.py": 2,
    "fleet/solvers.py": 2,
    "fleet/prices.py": 2,
    "fleet/elastic.py": 2,
    "fleet/refusals.py": 2,
    "fleet/policies.py": 2,
    "fleet/speeds.py": 0,
    "fleet/demands.py": 8,
    "fleet/bounds.py": 2,
    "fleet/many.py": 8,
    "fleet/now.py": 8,
    "fleet/misfits.py": 8,
    "report/__init__.py": 0,
    "report/svg.py": 0,
    "report/html.py": 1,
    "report/entries.py": 8,
    "report/export.py": 8,
    "report/follow.py": 8,
    "report/page.py": 8,
    "report/screen.py": 8,
    "report/text.py": 8,
    "report/timeline.py": 8,
    "report/verdict.py": 8,
    "check/__init__.py": 0,
    "check/notes.py": 0,
    "check/source.py": 0,
    "check/calls.py": 1,
    "check/findings.py": 2,
    "check/run.py": 8,
    "check/watch.py": 11,
    "doctor/__init__.py": 0,
    "doctor/inspect.py": 5,
    "doctor/launch.py": 6,
    "doctor/ranks.py": 7,
    "doctor/run.py": 7,
    "bench/__init__.py": 0,
    "bench/record.py": 1,
    "bench/attacked.py": 8,
    "bench/collectives.py": 8,
    "bench/commands.py": 8,
    "bench/contestants.py": 8,
    "bench/cuda.py": 8,
    "bench/defences.py": 8,
    "bench/gate.py": 8,
    "bench/kernels.py": 8,
    "bench/models.py": 8,
    "bench/peers.py": 8,
    "bench/ranks.py": 8,
    "bench/robustness.py": 8,
    "bench/skews.py": 8,
    "bench/scopes.py": 8,
    "bench/steps.py": 8,
    "bench/traces.py": 8,
}
# The only file that may import a module or what is inside it.
_SINGLE_IMPORTERS = {
    "loft_hvd._loft": "_native.py",
    "loft_hvd._loft_datagram": "_native.py",
    # What is public of it in the first, what is not in the second.
    "horovod": "transport/horovod.py or transport/horovod_private.py",
    "matplotlib": "bench/commands.py or simulate/plots.py",
    "lightning": "lightning.py",
    "pytorch_lightning": "lightning.py",
    "transformers": "trainer.py",
    "accelerate": "accelerated.py",
    "pyarrow": "data/arrow.py",
    "xxhash": "store/shelf.py",
    "scipy": "fleet/solvers.py",
    "typer": "cli.py",
    "rich": "cli.py",
}
_ENVIRON = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _modules(tree: ast.AST) -> Iterator[str]:
    """Yield every module that a file imports anywhere, also by ``importlib`` or ``__import__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer: write the whole name"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value)


def _file_of(module: str, files: Mapping[str, str]) -> str | None:
    """Return the file of ``loft_hvd`` that a dotted name comes from, or None for other packages."""
    parts = module.split(".")
    if parts[0] != "loft_hvd" or module in _SINGLE_IMPORTERS:
        return None
    for end in range(len(parts), 0, -1):
        inner = "/".join(parts[1:end])
        for candidate in (f"{inner}.py", f"{inner}/__init__.py".lstrip("/")):
            if candidate in files:
                return candidate
    return None


def _layer_faults(name: str, files: Mapping[str, str], layers: Mapping[str, int]) -> list[str]:
    """Say which imports of one file break the layers."""
    if name not in layers:
        return [f"{name} has no layer: add it to _LAYERS"]
    faults = []
    for module in _modules(ast.parse(files[name])):
        target = _file_of(module, files)
        if target is None or target == name or target not in layers:
            continue
        is_neighbour = Path(target).parent == Path(name).parent
        limit = layers[name] if is_neighbour else layers[name] - 1
        if layers[target] > limit:
            faults.append(f"{name} [{layers[name]}] imports {target} [{layers[target]}]")
    return faults


def _single_importer_faults(name: str, text: str) -> list[str]:
    faults = []
    for module in _modules(ast.parse(text)):
        for outside, importer in _SINGLE_IMPORTERS.items():
            if f"{module}.".startswith(f"{outside}.") and name not in importer.split(" or "):
                faults.append(f"{name} imports {module}; only {importer} may")
    return faults


def _environment_faults(name: str, text: str) -> list[str]:
    if name == "config.py":
        return []
    faults = []
    for node in ast.walk(ast.parse(text)):
        used = node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            used = next((a.name for a in node.names if a.name in _ENVIRON), "")
        if used in _ENVIRON:
            faults.append(
                f"{name}:{getattr(node, 'lineno', 0)} reads os.{used}; only config.py may"
            )
    return faults


def _late_faults(name: str, text: str) -> list[str]:
    """Say which optional modules a file imports as soon as it is imported itself."""
    top = ast.Module(
        [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)], []
    )
    return [
        f"{name} imports {module} at its top; import it where it is used"
        for module in _modules(top)
        if module.split(".")[0] in {outside.split(".")[0] for outside in _SINGLE_IMPORTERS}
        and module.split(".")[0] != "loft_hvd"
    ]


_FILES = {
    path.relative_to(_PACKAGE).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(_PACKAGE.rglob("*.py"))
}


@pytest.mark.parametrize("name", sorted(_FILES))
def test_file_imports_only_smaller_layers(name: str) -> None:
    assert _layer_faults(name, _FILES, _LAYERS) == []


def test_layer_table_names_no_file_that_is_gone() -> None:
    assert sorted(set(_LAYERS) - set(_FILES)) == []


@pytest.mark.parametrize("name", sorted(_FILES))
def test_outside_parts_have_one_importer_and_come_late(name: str) -> None:
    text = _FILES[name]
    assert _single_importer_faults(name, text) == []
    assert _late_faults(name, text) == []


@pytest.mark.parametrize(("module", "importers"), sorted(_SINGLE_IMPORTERS.items()))
def test_a_single_importer_is_there_and_imports(module: str, importers: str) -> None:
    for name in importers.split(" or "):
        imported = {
            each.split(".")[: module.count(".") + 1] == module.split(".")
            for each in _modules(ast.parse(_FILES[name]))
        }
        assert any(imported), f"{name} does not import {module}: take it out of the rule"


@pytest.mark.parametrize("name", sorted(_FILES))
def test_only_config_reads_the_environment(name: str) -> None:
    assert _environment_faults(name, _FILES[name]) == []


def test_no_class_name_stands_twice() -> None:
    """One name, one thing; ``_Reader`` and ``Reader`` are one name."""
    places: dict[str, list[str]] = {}
    for name, text in _FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


_CXX_FILES = {
    path.relative_to(_ROOT / "csrc").as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.h", "*.cpp", "*.cu")
    for path in (_ROOT / "csrc").rglob(pattern)
    if "generated" not in path.parts
}
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)

# What knows Python: each room's binding, and what they share.
_BINDINGS = {
    "bindings.h",
    "bindings.cpp",
    "datagram/bind_datagram.cpp",
    "process/bind_frames.cpp",
    "process/bind_process.cpp",
    "shares/bind_shares.cpp",
    "wire/bind_wire.cpp",
}
# Whose headers a room's files may include, "" for those of csrc itself.
_CXX_ROOMS = {
    "": {""},
    "checks": {"", "checks", "cpu", "cuda", "datagram", "process", "wire"},
    "cpu": {"", "cpu"},
    "cuda": {"", "cuda"},
    "datagram": {"", "datagram", "process"},
    "process": {"process"},
    "shares": {"shares"},
    "wire": {"", "cpu", "wire"},
    "levels.cpp": {"", "cpu", "wire"},  # what each level has, of both
}


def _binding_faults(name: str, included: list[str]) -> list[str]:
    banned = ["torch/", "ATen/", "c10/", "mpi.h", "horovod", "gloo/"]
    if name not in _BINDINGS:
        banned += ["pybind11/", "Python.h", "frameobject.h", "bindings.h"]
    return [each for each in included if each.startswith(tuple(banned))]


def _room(name: str) -> str:
    return name.rpartition("/")[0]


def _room_faults(name: str, included: list[str]) -> list[str]:
    rooms = _CXX_ROOMS.get(name) or _CXX_ROOMS[_room(name)]
    files = _CXX_FILES.keys() | {"networks.h", "windows.h"}  # the build makes these
    return [each for each in included if each not in files or _room(each) not in rooms]


@pytest.mark.parametrize("name", sorted(_CXX_FILES))
def test_kernels_know_nothing_of_python_torch_or_ranks(name: str) -> None:
    assert _binding_faults(name, re.findall(_INCLUDE, _CXX_FILES[name])) == []


def test_binding_files_are_there_and_know_python() -> None:
    for name in _BINDINGS - {"bindings.h"}:
        assert '#include "bindings.h"' in _CXX_FILES[name]
    assert "#include <pybind11/pybind11.h>" in _CXX_FILES["bindings.h"]


@pytest.mark.parametrize("name", sorted(_CXX_FILES))
def test_cxx_file_includes_only_rooms_that_it_may_know(name: str) -> None:
    quoted = re.findall(r'^\s*#\s*include\s*"([^"]+)"', _CXX_FILES[name], re.MULTILINE)
    assert _room_faults(name, list({*quoted} - {"bindings.h"})) == []


# The checks themselves must be able to fail: small houses with one fault each.
_HOUSE = {"errors.py": "", "a.py": "", "b.py": "", "room/__init__.py": "", "room/c.py": ""}
_HOUSE_LAYERS = {"errors.py": 0, "a.py": 1, "b.py": 2, "room/__init__.py": 0, "room/c.py": 2}


@pytest.mark.parametrize(
    ("name", "text", "is_fault"),
    [
        ("b.py", "import loft_hvd.a", False),
        ("a.py", "from loft_hvd.b import x", True),
        ("a.py", "from loft_hvd import b", True),
        ("a.py", "import importlib\nimportlib.import_module('loft_hvd.b')", True),
        ("a.py", "def f():\n    from loft_hvd.room.c import x", True),
        ("b.py", "from loft_hvd.room.c import x", True),  # the same layer in another folder
        ("room/c.py", "from loft_hvd.room import x", False),
        ("room/c.py", "from loft_hvd.errors import LoftError", False),
        ("new.py", "", True),
    ],
)
def test_layer_check_finds_an_upward_import(name: str, text: str, is_fault: bool) -> None:
    assert bool(_layer_faults(name, {**_HOUSE, name: text}, _HOUSE_LAYERS)) is is_fault


@pytest.mark.parametrize(
    ("name", "text", "is_fault"),
    [
        ("optimizer.py", "import horovod.torch as hvd", True),
        ("optimizer.py", "from horovod import torch", True),
        ("optimizer.py", "import importlib\nimportlib.import_module('horovod.torch')", True),
        ("optimizer.py", "import horovodish", False),
        ("transport/horovod.py", "import horovod.torch", False),
        ("transport/horovod_private.py", "import horovod.torch.mpi_ops", False),
        ("cli.py", "import rich.table", False),
        ("aggregation/compute.py", "from loft_hvd import _loft", True),
    ],
)
def test_single_importer_check_finds_a_second_one(name: str, text: str, is_fault: bool) -> None:
    assert bool(_single_importer_faults(name, text)) is is_fault


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("import os\nos.environ['A']", True),
        ("import os\nos.getenv('A')", True),
        ("from os import environ", True),
        ("import os\nos.getpid()", False),
    ],
)
def test_environment_check_finds_a_reader(text: str, is_fault: bool) -> None:
    assert bool(_environment_faults("optimizer.py", text)) is is_fault


def test_late_check_finds_an_import_at_the_top() -> None:
    assert _late_faults("cli.py", "import typer") != []
    assert _late_faults("cli.py", "def f():\n    import typer") == []


@pytest.mark.parametrize(
    ("name", "included", "is_fault"),
    [
        ("bindings.h", "pybind11/stl.h", False),
        ("wire/bind_wire.cpp", "bindings.h", False),
        ("wire/messages.cpp", "bindings.h", True),
        ("cpu/aggregate.cpp", "pybind11/pybind11.h", True),
        ("bindings.cpp", "torch/extension.h", True),
    ],
)
def test_binding_check_finds_another_file(name: str, included: str, is_fault: bool) -> None:
    assert bool(_binding_faults(name, [included])) is is_fault


@pytest.mark.parametrize(
    ("name", "included", "is_fault"),
    [
        ("cpu/absorb.cpp", "cpu/vectors.h", False),
        ("levels.cpp", "wire/compact.h", False),
        ("cpu/aggregate.cpp", "wire/compact.h", True),
        ("process/grace.h", "rules.h", True),
        ("process/grace.h", "leave.h", True),  # not from csrc on
    ],
)
def test_room_check_finds_another_room(name: str, included: str, is_fault: bool) -> None:
    assert bool(_room_faults(name, [included])) is is_fault
