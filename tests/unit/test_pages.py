"""What readers see: the README is short, links lead somewhere, tables hold Python that parses."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import loft_hvd as loft
from tests.support.converted import DIFFS

HOME = Path(__file__).parents[2]
README = (HOME / "README.md").read_text(encoding="utf-8")
USAGE = (HOME / "docs/usage.md").read_text(encoding="utf-8")
MIGRATE = (HOME / "docs/migrate.md").read_text(encoding="utf-8")
PAGES = sorted([HOME / "README.md", HOME / "CONTRIBUTING.md", *(HOME / "docs").glob("*.md")])
ROOTS = {"loft": loft, "balancer": loft.Balancer}


def code_in_tables() -> list[str]:
    lines = README.splitlines() + USAGE.splitlines() + MIGRATE.splitlines()
    cells = [line.split("|")[2] for line in lines if line.startswith("| ")]
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


@pytest.mark.parametrize("code", sorted(set(code_in_tables())))
def test_code_in_the_tables_is_python_with_names_that_exist(code: str) -> None:
    assert missing(code) == []


def test_a_wrong_name_is_found() -> None:
    assert missing("loft.attacks.SignFlop(scale=10)") == ["loft.attacks.SignFlop"]
    assert missing("with balancer.stepp(n): ...") == ["balancer.stepp"]


def test_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120] == []


def test_readme_says_how_many_wrong_ranks_a_rule_takes() -> None:
    ranks, most, advised = (
        [int(cell) for cell in line.split("|")[2:-1]]
        for line in README.splitlines()
        if line.startswith(("| ranks |", "| most `f`", "| advised `f`"))
    )
    for num_ranks, f, quarter in zip(ranks, most, advised, strict=True):
        assert quarter == num_ranks // 4
        for rule in (loft.TrimmedMean, loft.Phocas, loft.Robust):
            rule(f=f).check(num_ranks)
            with pytest.raises(loft.LoftError):
                rule(f=f + 1).check(num_ranks)


def test_index_lists_every_page_of_the_docs() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (HOME / "docs/index.md").read_text("utf-8")))
    assert listed == {path.name for path in (HOME / "docs").glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_source_files_that_pages_name_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`([\w/.-]+/[\w.-]+\.(?:py|h|cpp|cu|toml|md))`", text)
    places = (HOME, HOME / "loft_hvd")  # pages say balance/fit.py for loft_hvd/balance/fit.py
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert [name for name in missing if name not in DIFFS] == []  # Horovod's examples


# Lines that are new in each of Horovod's examples; the elastic one last.
MOST_LINES = {
    "pytorch_mnist.py": 12,
    "pytorch_synthetic_benchmark.py": 12,
    "pytorch_imagenet_resnet50.py": 14,
    "pytorch_mnist_elastic.py": 10,
}


def test_few_lines_convert_horovods_examples() -> None:
    found = {
        Path(path).name: sum(line.startswith("+") for line in diff.splitlines())
        for path, diff in DIFFS.items()
    }
    assert found.keys() == MOST_LINES.keys()
    assert all(found[name] <= most for name, most in MOST_LINES.items()), found
    for name, count in found.items():
        assert f"{name}`, {count} lines." in MIGRATE


def test_who_begins_finds_a_whole_script_of_at_most_60_lines() -> None:
    index = (HOME / "docs/index.md").read_text(encoding="utf-8").partition("\n\n| not served")[0]
    rows = [line.split("|")[1:4] for line in index.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for what, pages, script in rows:
        if name := re.search(r"`(.*)`", script):
            assert len((HOME / name[1]).read_text().splitlines()) <= 60, name[1]
        elif "on the page" in script:
            page = HOME / "docs" / re.findall(r"\(([\w.]+\.md)", pages)[0]
            scripts = re.findall(r"(?ms)^```(?:python|toml)\n(.*?)^```$", page.read_text())
            assert 10 < max(len(each.splitlines()) for each in scripts) <= 60, page.name
        else:
            assert script.strip() == "one line", what
