"""Every mutant still has its line, and its tests."""

from __future__ import annotations

import ast

import pytest

from tests.faults.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.path)
def test_a_mutant_changes_one_place_of_a_file_and_names_tests_that_exist(mutant: Mutant) -> None:
    ast.parse(mutant.applied(ROOT))
    assert all((ROOT / "tests" / name).is_file() for name in mutant.tests)
