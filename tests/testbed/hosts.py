"""A testbed as tests and benchmarks use it: hosts of one machine, jobs on them with a limit.

The tool itself is ``tool/``, and on a shell ``testbed``; README.md says what it can do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.launch import ROOT, Finished
from tests.testbed.tool.state import SBIN, TESTBED, missing_packages

__all__ = ["Testbed", "why_not"]


def why_not() -> str:
    """Say why no testbed can be had on this machine; empty where one can."""
    if os.geteuid() != 0:
        return "a testbed needs root"
    if missing := missing_packages():
        return f"a testbed needs more tools: apt-get install -y {' '.join(missing)}"
    name = f"probe-{os.getpid()}"
    ip = str(shutil.which("ip", path=SBIN))
    tried = subprocess.run([ip, "netns", "add", name], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        return f"a testbed needs network namespaces, but: {tried.stderr.strip()}"
    subprocess.run([ip, "netns", "del", name], check=True, timeout=30)
    return ""


class Testbed:
    """Hosts named ``host0``, ``host1``, ... on one machine, each with an address and a link.

    Args:
        name: keeps several testbeds of one machine apart.
    """

    __test__ = False  # pytest: this is no test class

    def __init__(self, name: str) -> None:
        self.name = name
        bin_folder = str(Path(sys.executable).parent)  # horovodrun and python, for every session
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_"))},
            "PATH": f"{bin_folder}:{SBIN}",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TESTBED_NAME": name,
        }

    def up(self, num_hosts: int, *options: str) -> None:
        """Make the hosts; where they are up with the same settings nothing happens.

        Args:
            num_hosts: how many.
            options: as ``testbed up`` takes them, such as "--rate", "200mbit".
        """
        self.tell("up", str(num_hosts), *options)

    def down(self) -> None:
        """Remove all that ``up`` made; may be called twice."""
        self.tell("down")

    def tell(self, *words: str, timeout_s: float = 120.0) -> str:
        """Run one command of the tool that ends by itself, such as ("cut", "host2").

        Returns:
            What it printed.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(
            [str(TESTBED), *words],
            env=self._env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
        if done.returncode:
            raise RuntimeError(f"testbed {' '.join(words)}: {done.stdout.strip()}")
        return done.stdout

    def run(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        during: Callable[[], None] | None = None,
    ) -> Finished:
        """Run ``python ARGUMENTS`` on the hosts, one rank each, launched from the first.

        Args:
            arguments: what python is given.
            timeout_s: after so many seconds the job is ended and the testbed taken down.
            env: variables on top of this process's; the ranks have them too.
            options: as ``testbed run`` takes them, such as "--slots", "2".
            during: called once the job has been started; here the hosts can be cut or crashed.
        """
        process = subprocess.Popen(
            [str(TESTBED), "run", *options, str(sys.executable), *arguments],
            env=self._env | dict(env or {}),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            if during is not None:
                during()
            output, _ = process.communicate(timeout=timeout_s)
            return Finished(process.returncode, output, time.time())
        except subprocess.TimeoutExpired:
            return Finished(None, self._end(process), time.time())
        finally:
            if process.poll() is None:
                self._end(process)  # `during` failed

    def _end(self, process: subprocess.Popen[str]) -> str:
        os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its ranks, on most hosts
        try:
            return process.communicate(timeout=10)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate(timeout=10)[0]
        finally:
            self.down()  # ends every process of every host
