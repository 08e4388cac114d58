from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import loft_hvd

_ROOT = Path(loft_hvd.__file__).parent
_MODULES = sorted(
    ".".join(("loft_hvd", *path.relative_to(_ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in _ROOT.rglob("*.py")
)
# Heavy or optional: `import loft_hvd` must work without them and not pay for them.
_OPTIONAL = ("horovod", "matplotlib", "typer", "rich", "scipy", "sklearn", "tensorboard")


@pytest.mark.parametrize("name", _MODULES)
def test_module_exports_only_what_it_defines(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert [one for one in exported if not hasattr(module, one)] == []
    assert len(set(exported)) == len(exported)


@pytest.mark.parametrize("name", loft_hvd.__all__)
def test_public_name_has_a_docstring(name: str) -> None:
    value = getattr(loft_hvd, name)
    assert inspect.getdoc(value), f"loft_hvd.{name} has no docstring"


def _public_methods() -> list[tuple[str, str]]:
    found = []
    for name in loft_hvd.__all__:
        value = getattr(loft_hvd, name)
        if inspect.isclass(value):
            for method, member in vars(value).items():
                if not method.startswith("_") and (
                    inspect.isfunction(member) or isinstance(member, property)
                ):
                    found.append((name, method))
    return found


@pytest.mark.parametrize(("name", "method"), _public_methods())
def test_public_method_has_a_docstring(name: str, method: str) -> None:
    member = inspect.getattr_static(getattr(loft_hvd, name), method)
    assert inspect.getdoc(member), f"loft_hvd.{name}.{method} has no docstring"


def test_import_is_silent_and_needs_nothing_optional() -> None:
    script = (
        "import sys\n"
        f"for name in {_OPTIONAL!r}: sys.modules[name] = None\n"
        "import loft_hvd\n"
        "import torch\n"
        "assert loft_hvd.aggregate(torch.ones(3, 2), loft_hvd.Mean()).tolist() == [1.0, 1.0]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
