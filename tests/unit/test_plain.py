"""The demo's output without the launcher's prefixes."""

from __future__ import annotations

import sys

import pytest

from scripts.plain import main, plain_lines


def test_prefixes_go_and_what_follows_them_stays_as_it_is() -> None:
    lines = ["[0]<stdout>:  a table\n", "[1,0]<stdout>:[1]<stdout>: said\n", "launcher\n"]
    assert list(plain_lines(lines)) == ["  a table\n", "[1]<stdout>: said\n", "launcher\n"]


def test_warning_of_all_ranks_is_printed_once() -> None:
    lines = [f"[{rank}]<stderr>:x.py:1: UserWarning: why\n" for rank in range(4)]
    assert list(plain_lines(lines)) == ["x.py:1: UserWarning: why\n"]


def test_result_of_several_ranks_and_repetition_of_one_rank_stay() -> None:
    results = ["[0]<stdout>:done\n", "[1]<stdout>:done\n"]
    assert list(plain_lines(results)) == ["done\n", "done\n"]
    traceback = ["[2]<stderr>:  in f\n", "[2]<stderr>:\n", "[2]<stderr>:  in f\n"]
    assert list(plain_lines(traceback)) == ["  in f\n", "\n", "  in f\n"]


def test_torchruns_prefixes_go_too() -> None:
    lines = ["[default0]:  a table\n", "[default0]:UserWarning: why\n"]
    lines += [f"[default{rank}]:UserWarning: why\n" for rank in (1, 2)]
    assert list(plain_lines(lines)) == ["  a table\n", "UserWarning: why\n"]


def test_exit_status_is_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('[0]<stdout>:text'); sys.exit(3)"
    assert main([sys.executable, "-c", code]) == 3
    assert capfd.readouterr().out == "text\n"
