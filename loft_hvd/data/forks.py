"""Loader processes that really start, though native threads run beside the fork.

Before Python 3.12 a forked child waits for ever when, at the moment of the fork, a native thread
was making or dropping its Python thread state: the child needs a lock that nobody will release.
Horovod's background thread does so whenever it lets go of a tensor. Here the child says that it
runs, and one that does not is ended and forked again.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import context, popen_fork, process
from typing import Any

from loft_hvd.errors import DataError

__all__ = ["sure_fork"]

_log = logging.getLogger(__name__)

_START_LIMIT_S = 10.0  # a child takes milliseconds, on a crowded machine a second
_TRIES = 4


class _Popen(popen_fork.Popen):
    """A forked child that has told its parent that it runs."""

    def _launch(self, process_obj: Any) -> None:
        for tries in range(1, _TRIES + 1):
            said, says = multiprocessing.Pipe(duplex=False)
            process_obj._bootstrap = functools.partial(_tell_and_run, says, process_obj._bootstrap)
            try:
                super()._launch(process_obj)  # type: ignore[misc]  # not in typeshed
            finally:
                del process_obj._bootstrap
                says.close()
            is_running = said.poll(_START_LIMIT_S)  # true also when the child has already ended
            said.close()
            if is_running:
                return
            _log.warning("loader process %d did not start (try %d); again", self.pid, tries)
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            finalizer: Any = self.finalizer
            finalizer()  # closes this child's pipes
        raise DataError(
            f"a loader process did not start within {_START_LIMIT_S:g} s, {_TRIES} times; use "
            'num_workers=0, or multiprocessing_context="forkserver" with a script that keeps its '
            'work under if __name__ == "__main__"'
        )


def _tell_and_run(says: Any, run: Callable[..., int], **arguments: Any) -> int:
    says.send_bytes(b"runs")
    says.close()
    return run(**arguments)


class _ForkProcess(process.BaseProcess):
    _start_method = "fork"

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 - multiprocessing's own name
        return _Popen(process_obj)


class _ForkContext(context.ForkContext):
    Process = _ForkProcess  # type: ignore[assignment]


def sure_fork(wanted: Any, *, num_workers: int) -> Any:
    """Return the start method for loader processes: ``wanted``, made sure where it forks.

    Args:
        wanted: a name, a context, or None for the platform's default.
        num_workers: loader processes; without any there is nothing to start.
    """
    if num_workers == 0 or not (wanted is None or wanted == "fork"):
        return wanted
    default = multiprocessing.get_start_method(allow_none=True)  # asking must not settle it
    method = wanted or default or multiprocessing.get_all_start_methods()[0]
    return _ForkContext() if method == "fork" else wanted
