"""``python -m scripts.plain COMMAND...``: run a launcher and print what its ranks print, plainly.

horovodrun puts ``[1]<stdout>:`` before each line of each rank, torchrun ``[default1]:``, and a
warning that concerns all ranks appears once for each. Here the rank is left out, and a line of
standard error that another rank has printed is not printed again; torchrun does not tell it from
standard output. Standard library only.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["main", "plain_lines"]

_PREFIX = re.compile(
    r"^\[(?:(?P<rank>[^\]]*)\]<(?P<stream>stdout|stderr)>|default(?P<local>\d+)\]):"
)


def plain_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` without the launcher's prefixes and without other ranks' repetitions.

    What one rank prints twice stays: the lines of a traceback repeat each other.
    """
    first_rank: dict[str, str] = {}  # of each line of standard error
    for line in lines:
        prefix = _PREFIX.match(line)
        if prefix is None:  # the launcher itself, or a launcher without prefixes
            yield line
            continue
        text = line[prefix.end() :]
        rank = prefix["rank"] or prefix["local"]
        is_warning = prefix["stream"] != "stdout" and text.strip() != ""
        if not is_warning or first_rank.setdefault(text, rank) == rank:
            yield text


def main(command: Sequence[str]) -> int:
    """Run ``command``; return its exit status."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for line in plain_lines(process.stdout):
                print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:  # the launcher has got it too, and ends its ranks
            process.wait()
            return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
