"""``python3 -m scripts.gpu_check``: all that is to be shown on a GPU, in one go, in one archive.

The steps, in this order, each with a limit and a log of its own:

    machine     what is here: GPU, driver, toolkit, torch, commit
    build       the extension with CUDA kernels for this GPU, with what ptxas says of each
    tests       tests/gpu, spread over the cores, one thread each
    memory      of these what fills the GPU's memory, alone
    memcheck    each kernel once under compute-sanitizer, which looks for accesses out of bounds
    racecheck   the same, for threads that share memory and do not wait for each other
    bench       loft-hvd bench kernels --device cuda
    bench-ddp   loft-hvd bench step --engine ddp --device cuda, 4 ranks of torchrun
    peers       the peer lane by 4 ranks, which may share a GPU: bits of the CPU's lanes
    peers-memcheck
                the same for fewer values under compute-sanitizer
    peers-bound TrimmedMean(1) of 100 MB by 4 ranks on the first GPU, at most 1.5 times two copies
    nccl        the device lane on NCCL by one rank of torchrun: bits of the CPU's lanes
    nccl-horovod
                the same for a rank of Horovod's, by a group beside it
    ddp         DistributedDataParallel on 3 ranks, which may share a GPU: Gloo's collectives
    ddp-nccl    the same on NCCL, a rank on each GPU
    horovod     Horovod on 3 ranks, as it was built
    nccl-build  Horovod with NCCL
    horovod-nccl
                Horovod on NCCL, a rank on each GPU

All of it ends within ``--minutes``; ``--steps build,tests`` runs those alone. The lanes of GPUs
are shown in ten minutes, by ``--minutes 10`` and
``--steps build,peers,peers-memcheck,peers-bound,nccl,nccl-horovod,bench-ddp,ddp``.
A step for which something is missing is skipped, and the reason is printed and kept. Without a GPU
the kernels are built where there is nvcc, the tests run in part, on the CPU's kernels, and ranks
train on the CPU.
The build replaces the extension of this checkout, and nccl-build the Horovod of its environment,
until `make setup` next runs. What all steps printed is in ``--folder``, and in an archive beside
it, also after a failure or Ctrl-C; the last lines of a step that failed are printed. Where
commands have a limit, call it for some steps at a time, with ``--minutes`` below that limit. The
exit status is 0 when all steps passed, 1 when one failed, and 2 when none failed and some did not
run or not wholly.

Standard library only, but what it starts needs the environment of `make setup`, with a torch that
has CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from scripts.setup.runner import output_of, say

__all__ = ["Finding", "Machine", "Step", "check", "look_around", "main", "steps_for"]

_ROOT = Path(__file__).resolve().parents[1]
_VENV_PYTHON = _ROOT / ".venv" / "bin" / "python"
_NO_GPU_ARCH = "90"  # what is compiled for where no GPU says what it is
_GRACE_S = 10.0  # between asking a step to end and killing it
_SHOWN_LINES = 40  # of the log of a step that failed; a choice


@dataclass(frozen=True)
class Machine:
    """What is here; each "" where it is missing.

    Attributes:
        python: the interpreter that steps run with.
        gpu: the first GPU's name.
        arch: its compute capability without the dot, such as "90".
        nvcc: the compiler's path.
        sanitizer: compute-sanitizer's path.
        torch_cuda: the CUDA that torch was built with, such as "13.0".
        num_gpus: how many there are.
        nccl: the folder with NCCL's ``include`` and ``lib``.
        horovodrun: Horovod's launcher beside the interpreter.
        is_venv: whether the interpreter is that of `make setup`, whose Horovod may be replaced.
    """

    python: str
    gpu: str
    arch: str
    nvcc: str
    sanitizer: str
    torch_cuda: str
    num_gpus: int = 0
    nccl: str = ""
    horovodrun: str = ""
    is_venv: bool = False


_NOTHING = Machine("python", "", "", "", "", "")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the step and its log.
        command: what is run in the repository's root.
        limit_s: it is ended after so long.
        missing: why it cannot run here, "" where it can.
        lacks: why it runs in part only, "" where it runs wholly.
        environ: variables on top of ours.
        after: the step without which it has nothing to do.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    missing: str = ""
    lacks: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    after: str = ""


@dataclass(frozen=True)
class Finding:
    """How a step ended.

    Attributes:
        name: the step's.
        result: "passed", "passed in part", "failed" or "skipped".
        reason: why it did not pass wholly, "" where it did.
        seconds: how long it ran.
        command: what was run.
    """

    name: str
    result: str
    reason: str
    seconds: float
    command: str


def look_around(python: str) -> Machine:
    """Return what is on this machine."""
    asked = output_of(["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"])
    gpus = asked.splitlines()
    gpu, _, arch = (gpus or [""])[0].rpartition(",")
    nvcc = shutil.which("nvcc") or ""
    # nvcc on the PATH may be a script or a link; the sanitizer lies beside the real one.
    beside = [Path(os.path.realpath(nvcc)).parent] if nvcc else []
    folders = [*beside, *sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, folders)])
    horovodrun = Path(python).parent / "horovodrun"
    code = "import torch; print(torch.version.cuda or '')"
    return Machine(
        python=python,
        gpu=gpu.strip(),
        arch=arch.strip().replace(".", ""),
        nvcc=shutil.which("nvcc", path=path) or "",
        sanitizer=shutil.which("compute-sanitizer", path=path) or "",
        torch_cuda=output_of([python, "-c", code]),
        num_gpus=len(gpus),
        nccl=_find_nccl(python),
        horovodrun=str(horovodrun) if horovodrun.exists() else "",
        is_venv=python == str(_VENV_PYTHON),
    )


def _find_nccl(python: str) -> str:
    """Return the folder of NCCL's header and library: Debian's, or what torch came with."""
    asked = output_of([python, "-c", "import nvidia.nccl as n; print(list(n.__path__)[0])"])
    for folder in filter(None, ["/usr", asked]):
        if Path(folder, "include", "nccl.h").exists():
            return folder
    return ""


def steps_for(machine: Machine, folder: Path) -> list[Step]:
    """Return the steps, in order, with what each lacks on this machine."""
    python = machine.python
    no_gpu = "" if machine.gpu else "no GPU here: nvidia-smi names none"
    no_torch = "" if machine.torch_cuda else "torch was built without CUDA"
    on_device = "; ".join(filter(None, (no_gpu, no_torch)))
    no_sanitizer = "" if machine.sanitizer else "no compute-sanitizer beside nvcc or on PATH"
    pytest = [python, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    # Tests of kernels that were not built would all be skipped, and that passes.
    expected = {**_ONE_THREAD, **({} if on_device else {"EXPECT_CUDA": "1"})}
    each = [python, "-m", "tests.gpu.each_kernel"]
    sanitized = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # or it would know torch's blocks only
    sanitizer = [machine.sanitizer or "compute-sanitizer", "--error-exitcode", "9"]
    bench = ["bench", "kernels", "--device", "cuda", "--rows", "4,8,16,32,64,128"]
    ranks = ["-m", "tests.gpu.ranks"]
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node"]
    horovodrun = [machine.horovodrun or "horovodrun", "--gloo", "-np"]
    no_horovod = "" if machine.horovodrun else "no horovodrun beside python"
    num_gpus = str(max(machine.num_gpus, 1))
    lanes = ["-m", "tests.gpu.lanes"]
    by_peers = [*lanes, "bits", "--lane", "peer-memory"]
    by_nccl = [*lanes, "bits", "--lane", "device"]
    one_gpu = {**_ONE_THREAD, "CUDA_VISIBLE_DEVICES": "0"}
    no_nccl = "" if machine.nccl else "no nccl.h, neither Debian's nor beside torch"
    no_venv = "" if machine.is_venv else "only in .venv is Horovod built anew: make setup first"
    return [
        Step("machine", [python, "-c", _DESCRIBE], 120),
        Step(
            "build",
            [python, "setup.py", "build_ext", "--inplace"],
            1800,
            missing="" if machine.nvcc else "no nvcc on PATH or in /usr/local/cuda*",
            environ={
                **({"CUDACXX": machine.nvcc} if machine.nvcc else {}),
                "LOFT_HVD_CUDA": "1",
                "LOFT_HVD_CUDA_ARCHS": f"{machine.arch or _NO_GPU_ARCH}-real",
                "NVCC_APPEND_FLAGS": "-Xptxas=-v",
            },
        ),
        # Most of the time of tests is the plain form's on the CPU, which they compare with.
        Step(
            "tests",
            [*pytest, "tests/gpu", f"--ignore={_FILLS_MEMORY}", *_SPREAD],
            900,
            lacks=on_device,
            environ=expected,
        ),
        Step("memory", [*pytest, _FILLS_MEMORY], 180, missing=on_device, environ=expected),
        *(
            Step(
                tool,
                [*sanitizer, "--tool", tool, *each],
                600,
                missing="; ".join(filter(None, (on_device, no_sanitizer))),
                environ=sanitized,
                after="build",
            )
            for tool in ("memcheck", "racecheck")
        ),
        Step(
            "bench",
            [python, "-m", "loft_hvd.cli", *bench, "--json", str(folder / "kernels-cuda.json")],
            900,
            missing=on_device,
            after="build",
        ),
        Step(
            "bench-ddp",
            [
                *(python, "-m", "loft_hvd.cli", "bench", "step", "--engine", "ddp"),
                *("--controller", "torchrun", "--batch", "32", "--device", "cuda", "--gate"),
                *("--json", str(folder / "step-ddp-cuda.json")),
            ],
            300,
            missing=on_device,
            environ={**_ONE_THREAD, "LOFT_HVD_LANE": "peer-memory"},
            after="build",
        ),
        Step(
            "peers",
            [*torchrun, "4", *by_peers],
            180,
            missing=on_device,
            environ=_ONE_THREAD,
            after="build",
        ),
        # With torch's own memory: only its blocks can be mapped by other processes.
        Step(
            "peers-memcheck",
            [*sanitizer, "--target-processes", "all", *torchrun, "4", *by_peers, "--few"],
            240,
            missing="; ".join(filter(None, (on_device, no_sanitizer))),
            environ=one_gpu,
            after="build",
        ),
        Step(
            "peers-bound",
            [
                *(*torchrun, "4", *lanes, "bound", "--lane", "peer-memory"),
                *("--json", str(folder / "peers-bound.json")),
            ],
            120,
            missing=on_device,
            environ=one_gpu,
            after="build",
        ),
        Step(
            "nccl",
            [*torchrun, "1", *by_nccl],
            120,
            missing=on_device,
            environ=one_gpu,
            after="build",
        ),
        Step(
            "nccl-horovod",
            [*horovodrun, "1", python, *by_nccl, "--horovod"],
            120,
            missing="; ".join(filter(None, (on_device, no_horovod))),
            environ=one_gpu,
            after="build",
        ),
        Step("ddp", [*torchrun, "3", *ranks, "ddp"], 180, lacks=on_device, environ=_ONE_THREAD),
        Step(
            "ddp-nccl",
            [*torchrun, num_gpus, *ranks, "ddp-nccl"],
            180,
            missing=on_device,
            environ=_ONE_THREAD,
        ),
        Step(
            "horovod",
            [*horovodrun, "3", python, *ranks, "horovod"],
            180,
            missing=no_horovod,
            lacks=on_device,
            environ=_ONE_THREAD,
        ),
        Step(
            "nccl-build",
            ["sh", "-euc", _BUILD_WITH_NCCL, "sh", python, machine.nccl, str(folder / "nccl")],
            900,
            missing="; ".join(filter(None, (on_device, no_nccl, no_venv))),
            environ={
                "HOROVOD_GPU_OPERATIONS": "NCCL",
                "HOROVOD_NCCL_HOME": str(folder / "nccl"),
                "HOROVOD_NCCL_LINK": "SHARED",
            },
        ),
        Step(
            "horovod-nccl",
            [*horovodrun, num_gpus, python, *ranks, "horovod"],
            180,
            missing="; ".join(filter(None, (on_device, no_nccl, no_horovod))),
            environ={**_ONE_THREAD, "EXPECT_NCCL": "1"},
            after="nccl-build",
        ),
    ]


_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # ranks and tests share the cores
_FILLS_MEMORY = "tests/gpu/test_device_memory.py"
_SPREAD = ("-n", "auto", "--maxprocesses=12", "--dist", "worksteal")  # 12 share a GPU's memory
# torch brings NCCL without the name that linkers look for.
_BUILD_WITH_NCCL = """
mkdir -p "$3/lib"
ln -sfn "$2/include" "$3/include"
for library in "$2"/lib/libnccl.so* "$2"/lib/*/libnccl.so*; do
  if [ -e "$library" ]; then ln -sf "$library" "$3/lib/libnccl.so"; fi
done
exec "$1" -m scripts.setup
"""
_DESCRIBE = """
import platform, shutil, subprocess, sys, torch
print("python", sys.version.split()[0], "on", platform.platform())
print("torch", torch.__version__, "CUDA", torch.version.cuda)
print("torch finds", torch.cuda.device_count(), "CUDA devices")
for command in (["git", "rev-parse", "HEAD"], ["git", "status", "--short"], ["nvidia-smi"],
                ["nvcc", "--version"]):
    if shutil.which(command[0]) is None:
        print(command[0], "is not here")
    else:
        sys.stdout.flush()
        subprocess.run(command, check=False)
"""


def _run(step: Step, log: Path) -> str:
    """Run a step into its log; return why it failed, "" where it passed."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environ}
    with open(log, "wb") as output:
        try:
            process = subprocess.Popen(
                list(step.command),
                cwd=_ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its children end with it
            )
        except OSError as error:
            return f"it did not start: {error}"
        try:
            status = process.wait(step.limit_s)
            return f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"not done after {step.limit_s:.0f} s"
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a step and what it has started to end, and kill what does not."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # all gone
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def check(
    steps: Sequence[Step],
    folder: Path,
    *,
    run: Callable[[Step, Path], str],
    limit_s: float = math.inf,
) -> list[Finding]:
    """Run steps in order, each unless it lacks something or the step that it needs has not passed.

    All end within ``limit_s``. What is found is in ``folder/summary.json`` after every step.
    """
    findings: list[Finding] = []
    end = time.monotonic() + limit_s
    for number, step in enumerate(steps):
        needed = next((one for one in findings if one.name == step.after), None)
        missing = step.missing
        if needed is not None and needed.result != "passed":
            missing = "; ".join(filter(None, (missing, f"{needed.name} has not passed")))
        left_s = end - time.monotonic()
        if not missing and left_s <= 0:
            missing = "no time left"
        step = replace(step, limit_s=min(step.limit_s, max(left_s, 0.0)))
        command, begin, reason = " ".join(step.command), time.monotonic(), missing
        result = "skipped"
        if not missing:
            say(f"gpu_check: {step.name}, at most {step.limit_s:.0f} s")
            log = folder / f"{number}-{step.name}.log"
            reason = run(step, log)
            if reason and log.exists():  # where the archive cannot be fetched, this can be read
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                say("\n".join(lines[-_SHOWN_LINES:]))
            result = "failed" if reason else "passed in part" if step.lacks else "passed"
            reason = reason or step.lacks
        seconds = time.monotonic() - begin
        say(f"gpu_check: {step.name} {result}{', ' if reason else ''}{reason} ({seconds:.0f} s)")
        findings.append(Finding(step.name, result, reason, seconds, command))
        text = json.dumps([asdict(one) for one in findings], indent=1)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    return findings


def _archive(folder: Path) -> Path:
    """Pack the folder beside itself."""
    path = folder.with_name(folder.name + ".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    return path


def main(
    arguments: Sequence[str],
    *,
    look: Callable[[str], Machine] = look_around,
    run: Callable[[Step, Path], str] = _run,
) -> int:
    """Run all steps and pack what they found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "gpu-check")
    parser.add_argument("--minutes", type=float, default=40.0, help="all ends within so long")
    parser.add_argument("--steps", default="", help="names, such as build,tests; all by default")
    options = parser.parse_args(arguments)
    folder: Path = options.folder.resolve()
    chosen = list(filter(None, options.steps.split(",")))
    if unknown := set(chosen) - {step.name for step in steps_for(_NOTHING, folder)}:
        names = ", ".join(step.name for step in steps_for(_NOTHING, folder))
        parser.error(f"--steps {options.steps}: no step {', '.join(sorted(unknown))}; of {names}")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / "summary.json").exists():
            parser.error(f"--folder {folder}: it holds something else; give a new or empty folder")
        shutil.rmtree(folder)  # an earlier check's
    folder.mkdir(parents=True, exist_ok=True)
    # A .venv that a set-up has left half made has no torch.
    has_torch = output_of([str(_VENV_PYTHON), "-c", "import torch; print('torch')"]) == "torch"
    machine = look(str(_VENV_PYTHON) if has_torch else sys.executable)
    say(f"gpu_check: {machine.gpu or 'no GPU'}, torch with CUDA {machine.torch_cuda or 'none'}")
    # Asked to end it ends the step and packs, as after Ctrl-C: a step has a session of its own.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        steps = [step for step in steps_for(machine, folder) if step.name in chosen or not chosen]
        findings = check(steps, folder, run=run, limit_s=60 * options.minutes)
    finally:
        signal.signal(signal.SIGTERM, before)
        say(f"gpu_check: all of it is in {_archive(folder)}")
    results = {finding.result for finding in findings}
    return 1 if "failed" in results else int(results != {"passed"}) * 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
