"""``cluster.toml`` and ``jobs.toml``: read, checked, and checked against each other."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from loft_hvd.codec import decode
from loft_hvd.errors import ArgumentError, DataError
from loft_hvd.fleet.jobs import Fleet, Job, JobList
from loft_hvd.toml import read_toml

__all__ = ["read_cluster", "read_jobs"]

T = TypeVar("T")
_ADVICE = "docs/plan.md lists the keys"


def read_cluster(path: str | os.PathLike[str]) -> Fleet:
    """Read the machines.

    Raises:
        ArgumentError: it is not TOML, or not of the schema; names file, key, value and limit.
    """
    return _read(path, Fleet, "cluster")


def read_jobs(path: str | os.PathLike[str], fleet: Fleet) -> dict[str, Job]:
    """Read the jobs, by name, which must be able to run on the cluster.

    Raises:
        ArgumentError: as for ``read_cluster``; or a job names data that the cluster has not.
    """
    # Logs are named from where the file is.
    home = Path(path).parent
    found = {
        job.name: replace(job, logs=[str(home / log) for log in job.logs])
        for job in _read(path, JobList, "jobs").jobs
    }
    for job in found.values():
        try:
            fleet.data_of(job)
        except ArgumentError as error:
            raise ArgumentError(f"{os.fspath(path)}: {error}") from error
    return found


def _read(path: str | os.PathLike[str], kind: type[T], what: str) -> T:
    try:
        content = read_toml(path, what=what)
    except OSError as error:
        raise DataError(f"{what} file {os.fspath(path)!r} cannot be read ({error})") from error
    return decode(kind, content, what=what, call=os.fspath(path), advice=_ADVICE)
