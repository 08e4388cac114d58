"""The README's tables hold Python that parses, with names that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import loft_hvd as loft

README = (Path(__file__).parents[2] / "README.md").read_text()
ROOTS = {"loft": loft, "balancer": loft.Balancer}


def code_in_tables() -> list[str]:
    cells = [line.split("|")[2] for line in README.splitlines() if line.startswith("| ")]
    found = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
    return [code for code in found if "(" in code or "=" in code]


def dotted(node: ast.expr) -> list[str]:
    """The names of ``a.b.c``, from the left; none where the left end is not a name."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return [*owner, node.attr]
    return []


def missing(code: str) -> list[str]:
    tree = ast.parse(code.replace(": ...", ": pass"))
    chains = [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    faults = []
    for root, *names in filter(None, chains):
        owner = ROOTS.get(root)
        for name in names if owner is not None else []:
            if not hasattr(owner, name):
                faults.append(".".join([root, *names]))
                break
            owner = getattr(owner, name)
    return faults


@pytest.mark.parametrize("code", code_in_tables())
def test_code_in_the_tables_is_python_with_names_that_exist(code: str) -> None:
    assert missing(code) == []


def test_a_wrong_name_is_found() -> None:
    assert missing("loft.attacks.SignFlop(scale=10)") == ["loft.attacks.SignFlop"]
    assert missing("with balancer.stepp(n): ...") == ["balancer.stepp"]
