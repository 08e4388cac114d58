"""``loft-hvd check SCRIPT``: starts the script on its ranks, watched, and reads their notes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loft_hvd.check.calls import find_unfinished
from loft_hvd.check.findings import find
from loft_hvd.check.notes import CALLS, DRAFT, Finding, Notes
from loft_hvd.check.source import is_for_torchrun, own_launcher
from loft_hvd.codec import decode
from loft_hvd.config import VARIABLES
from loft_hvd.doctor.inspect import HorovodBuild
from loft_hvd.doctor.launch import launch_command, run_limited
from loft_hvd.errors import ArgumentError, DataError

__all__ = ["LAUNCHERS", "Checked", "check_script", "judge"]

LAUNCHERS = ("horovod", "torchrun")

_NOT_FOR_RANKS = ("log_dir", "trace_file")
_START_S = 400.0  # on top of the seconds: starting ranks, and reading data


@dataclass(frozen=True)
class Checked:
    """What came of a script."""

    findings: tuple[Finding, ...]
    num_steps: int  # that rank 0 has taken
    failure: str  # how the script itself failed, or why nothing could be seen; or empty
    output: str  # the end of what it printed
    unfinished: str = ""  # a call that some ranks were in, and not all, when the time was up

    @property
    def is_fine(self) -> bool:
        """Whether nothing was found, and the script did not fail."""
        return not (self.findings or self.failure)

    @property
    def verdict(self) -> str:
        """What is said of a script in which nothing was found."""
        if self.unfinished:
            return (
                f"Nothing found in {self.num_steps} steps. When the time was up, "
                f"{self.unfinished}: with a longer --seconds it is seen whether it does."
            )
        return f"Nothing found: {self.num_steps} steps, all ranks alike."


def check_script(
    script: str,
    arguments: Sequence[str] = (),
    *,
    build: HorovodBuild,
    num_ranks: int = 2,
    seconds: float = 60.0,
    launcher: str | None = None,
) -> Checked:
    """Run a script for so many seconds on ranks of this machine, and say what it forgot.

    Args:
        script: its file.
        arguments: what it is given.
        build: Horovod, as ``horovod_build`` found it.
        num_ranks: ranks on this machine, >= 2.
        seconds: how long it works, counted from its first backward pass.
        launcher: "horovod" (horovodrun, or mpirun) or "torchrun"; None takes the second where the
            script imports torch.distributed, or what stands on it, and no Horovod.

    Raises:
        ArgumentError: fewer than two ranks, no time, no such script or launcher; or no launcher
            is named, and the script imports what starts its ranks itself.
        DataError: a rank left no notes.
    """
    if not Path(script).is_file():
        raise ArgumentError(f"check: there is no file {script!r}; name a training script")
    if num_ranks < 2 or not seconds > 0:
        raise ArgumentError(
            f"check: num_ranks={num_ranks} must be >= 2 and seconds={seconds:g} > 0; ranks are "
            "compared with each other"
        )
    if launcher not in (None, *LAUNCHERS):
        raise ArgumentError(
            f"check: launcher={launcher!r} must be one of {', '.join(map(repr, LAUNCHERS))}"
        )
    if launcher is None and (own := own_launcher(script)) is not None:
        raise ArgumentError(
            f"check {script}: it imports {own}, which starts its ranks itself, not as a launcher's "
            "line does, so that none of them could be watched; put the function that they run into "
            f"a script without {own}, with torch.distributed.init_process_group() and "
            "DistributedDataParallel or hvd.init(), and check that; or name its launcher "
            "(--launcher) where it is started by one all the same"
        )
    if launcher is None:
        launcher = "torchrun" if is_for_torchrun(script) else "horovod"
    with tempfile.TemporaryDirectory(prefix="loft-check-") as folder:
        words = ("-m", "loft_hvd.check.watch", folder, str(seconds), str(num_ranks))
        command = launch_command(
            build,
            (*words, script, *arguments),
            num_ranks=num_ranks,
            controller="torchrun" if launcher == "torchrun" else None,
        )
        # A log and a trace are of the user's own runs.
        unset = [word for field in _NOT_FOR_RANKS for word in ("-u", VARIABLES[field])]
        command = ("env", *unset, *command)
        done = run_limited(command, timeout_s=seconds + _START_S)
        last = "\n".join(done.output.splitlines()[-30:])
        ranks = [_read(path) for path in Path(folder).glob("*.json")]
        drafts = list(Path(folder).glob(f"*{DRAFT}"))
        ranks += [_read_draft(path) for path in drafts if not path.with_suffix(".json").exists()]
    if len(ranks) != num_ranks:
        raise DataError(
            f"check {script}: {len(ranks)} of {num_ranks} ranks have left notes; it ended with:\n"
            f"{last}"
        )
    ranks.sort(key=lambda notes: notes.rank)
    return judge(ranks, last)


def judge(ranks: Sequence[Notes], output: str) -> Checked:
    """Say what the notes of all ranks, in their order, tell of a script that printed ``output``."""
    findings = find(ranks)
    failed = [notes for notes in ranks if notes.error is not None and not notes.error.is_ours]
    num_steps = ranks[0].num_steps or ranks[0].num_plain_steps
    failure = ""
    if failed and failed[0].error is not None:
        error = failed[0].error
        failure = (
            f"The script failed: rank {failed[0].rank} at {error.place} with {error.kind}: "
            f"{error.text}"
        )
    elif not findings and any(notes.ended == "crashed" for notes in ranks):
        crashed = ", ".join(str(notes.rank) for notes in ranks if notes.ended == "crashed")
        failure = f"The script failed: ranks {crashed} ended without a word of Python's."
    elif not findings and not num_steps:
        failure = (
            "No step was seen, so there was nothing to compare: train the model under "
            "DistributedDataParallel or fully_shard, or give the optimizer to "
            "loft.DistributedOptimizer or hvd.DistributedOptimizer, and step it; or raise "
            "--seconds where a step takes longer"
        )
    return Checked(tuple(findings), num_steps, failure, output, find_unfinished(ranks))


def _read(path: Path) -> Notes:
    return _decode(json.loads(path.read_text(encoding="utf-8")))  # it may have megabytes


def _read_draft(path: Path) -> Notes:
    """Read what a rank has left that was ended at once: in the midst of its newest call."""
    notes = json.loads(path.read_text(encoding="utf-8"))
    calls = path.with_suffix(CALLS)
    lines = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
    made = [json.loads(line) for line in lines if line.endswith("}")]  # the newest may be torn
    for call in made[:-1]:
        call["is_done"] = True
    return _decode(notes | {"calls": made})


def _decode(notes: object) -> Notes:
    return decode(
        Notes, notes, what="notes", call="check", advice="a rank has written something else"
    )
