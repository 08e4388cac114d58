"""The script that tries each Python, without setting anything up."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.pythons import VERSIONS, Result, environ_for, find_pythons, main, report


def _interpreter(path: Path, says: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\n")
    path.chmod(0o755)
    return str(path)


def test_all_pythons_that_the_setup_accepts_are_tried() -> None:
    assert VERSIONS == ("3.10", "3.11", "3.12", "3.13")


def test_interpreters_come_from_the_path_and_from_pyenv_if_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = _interpreter(tmp_path / "bin" / "python3.10", "3.10")
    _interpreter(tmp_path / "bin" / "python3.12", "pyenv: version is not active")
    pyenv = _interpreter(tmp_path / "pyenv" / "3.12.1" / "bin" / "python", "3.12")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    found = find_pythons(["3.10", "3.12", "3.99"], pyenv=tmp_path / "pyenv")
    assert found == {"3.10": on_path, "3.12": pyenv}


def test_build_of_torch_is_chosen_by_what_pip_is_told() -> None:
    environ = {"PIP_FIND_LINKS": "/wheels", "VENV": "active", "PIP_CERT": "x"}
    assert environ_for(environ, torch="any", python="p") == {
        "PIP_FIND_LINKS": "/wheels",
        "PIP_CERT": "x",
        "PYTHON": "p",
    }
    cuda = environ_for(environ, torch="cuda", python="p")
    assert cuda == {"PIP_CERT": "x", "PYTHON": "p", "PIP_CONFIG_FILE": "/dev/null"}
    # Where CPU builds are is pip's to know.
    cpu = environ_for(environ, torch="cpu", python="p")
    assert cpu == environ_for(environ, torch="any", python="p")


def test_report_names_what_failed_what_is_missing_and_another_torch_than_asked() -> None:
    results = [
        Result("3.12", "2.13.0, CUDA 13.0", 400.0, 90.0, ""),
        Result("3.13", "", 12.0, 0.0, "make setup-all failed"),
    ]
    text = report(results, torch="cpu", missing=["3.10"])
    assert "3.12    2.13.0, CUDA 13.0" in text
    assert "make setup-all failed" in text
    assert "3.12: asked for torch's cpu build, got 2.13.0, CUDA 13.0" in text
    assert "not here: Python 3.10" in text


@pytest.mark.parametrize(
    ("fault", "torch", "status"),
    [("", "any", 0), ("make unit failed", "any", 1), ("", "cpu", 1), ("", "cuda", 0)],
)
def test_one_failure_or_another_torch_fails_the_whole(
    fault: str, torch: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _interpreter(tmp_path / "bin" / "python3.11", "3.11")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")

    def attempt(version: str, python: str, **options: object) -> Result:
        return Result(version, "2.13.0", 1.0, 1.0, fault)

    words = ["--versions", "3.11", "--folder", str(tmp_path), "--torch", torch]
    assert main(words, attempt=attempt) == status
