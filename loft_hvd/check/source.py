"""What stands around a line of a script: its loops, and the branches that it is in."""

from __future__ import annotations

import ast
import functools
import linecache

__all__ = [
    "branches_around",
    "is_for_torchrun",
    "is_inside",
    "is_looped",
    "loop_around",
    "own_launcher",
]

# Packages that connect ranks by torch.distributed.
_ON_TORCH = {"accelerate", "lightning", "pytorch_lightning", "transformers"}
_OWN_LAUNCHERS = ("ray.train", "horovod.ray", "horovod.spark")  # they start ranks themselves


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _imported(script: str) -> set[str]:
    """Return the modules that a script itself imports, and the names that it takes of them."""
    nodes = list(ast.walk(_tree(script)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def own_launcher(script: str) -> str | None:
    """Return the module that a script imports to start its ranks by itself, if any."""
    names = " ".join(f"{name}." for name in sorted(_imported(script)))
    return next((each for each in _OWN_LAUNCHERS if f" {each}." in f" {names}"), None)


def is_for_torchrun(script: str) -> bool:
    """Say whether a script imports what torchrun starts, and no Horovod, by itself."""
    names = _imported(script)
    tops = {name.partition(".")[0] for name in names}
    uses_torch = any(name.startswith(("torch.distributed", "torch.nn.parallel")) for name in names)
    return "horovod" not in tops and (uses_torch or bool(tops & _ON_TORCH))


def _split(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line) if line.isdigit() else 0


def _lines(nodes: list[ast.stmt]) -> range:
    if not nodes:
        return range(0)
    return range(nodes[0].lineno, (nodes[-1].end_lineno or nodes[-1].lineno) + 1)


def _loops(place: str) -> list[range]:
    """Return the lines of the loops around a line."""
    file, line = _split(place)
    loops = [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.For | ast.While | ast.AsyncFor)
    ]
    return [each for each in loops if line in each]


def loop_around(place: str) -> range | None:
    """Return the lines of the innermost loop around file:line, if any."""
    return min(_loops(place), key=len, default=None)


def is_inside(lines: range, place: str, other: str) -> bool:
    """Say whether file:line lies in these lines of another one's file."""
    file, line = _split(place)
    return file == _split(other)[0] and line in lines


def is_looped(stack: list[str]) -> bool:
    """Say whether a loop that begins at ``stack[0]`` is begun in a loop, here or by its callers."""
    return any(
        line != loop.start or at
        for at, place in enumerate(stack)
        for line in (_split(place)[1],)
        for loop in _loops(place)
    )


def branches_around(stack: list[str]) -> frozenset[tuple[str, int, int]]:
    """Return the branches of ``if`` that a call is in: file, and first and last line of each."""
    found = set()
    for place in stack:
        file, line = _split(place)
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.If):
                parts = _lines(node.body), _lines(node.orelse)
            elif isinstance(node, ast.IfExp):
                parts = range(node.lineno, (node.end_lineno or node.lineno) + 1), range(0)
            else:
                continue
            found |= {(file, each.start, each.stop) for each in parts if line in each}
    return frozenset(found)
