"""Start an elastic job on host names that are all this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.launch import Finished, launch

__all__ = ["launch_elastic"]


def launch_elastic(
    folder: Path,
    arguments: Sequence[str],
    *,
    hosts: Sequence[str],
    num_ranks: int,
    min_ranks: int,
    timeout_s: float,
    gloo_timeout_s: int = 10,
    env: Mapping[str, str] | None = None,
    during: Callable[[Path], None] | None = None,
) -> Finished:
    """Run ``python ARGUMENTS`` under ``horovodrun`` with a discovery script.

    Args:
        folder: takes the discovery script and its list of hosts.
        arguments: what python is given.
        hosts: what the script finds, such as "localhost:2".
        num_ranks: ranks at first.
        min_ranks: fewest ranks that go on.
        timeout_s: after so many seconds the whole job is ended.
        gloo_timeout_s: how long Horovod waits for ranks of a broken or a new world.
        env: variables of the job besides.
        during: called with the file of hosts while the job runs; may write it anew.
    """
    found, script = folder / "hosts", folder / "discover.sh"
    found.write_text("\n".join(hosts) + "\n")
    script.write_text(f"#!/bin/sh\ncat {found}\n")
    script.chmod(0o755)
    options = ["--host-discovery-script", str(script), "--min-np", str(min_ranks)]
    options += ["--network-interfaces", "lo"]  # else horovodrun waits for a second host
    return launch(
        num_ranks,
        arguments,
        launcher="elastic",
        options=options,
        timeout_s=timeout_s,
        env={
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(gloo_timeout_s),
            "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
            **(env or {}),
        },
        during=None if during is None else lambda: during(found),
    )
