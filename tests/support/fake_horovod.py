"""Horovod's operations as ``horovod.torch.mpi_ops`` keeps them, without Horovod."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

# As Horovod's functions keep what they have started.
OPS = """
def init():
    global _handle_map
    _handle_map = {}

def allreduce_async_(tensor, name=None, op=None, process_set=None):
    handle = next(handles)
    _handle_map[handle] = (tensor, tensor)
    return handle

def synchronize(handle):
    mpi_lib.horovod_torch_wait_and_clear(handle)
    return _handle_map.pop(handle)[-1]

def join(device=-1):
    handle = next(handles)
    _handle_map[handle] = (None, device)
    return synchronize(handle)

init()
"""
SOME, ALL = SimpleNamespace(process_set_id=3), SimpleNamespace(process_set_id=0)


def basics(**private: Any) -> SimpleNamespace:
    """Return the part of Horovod that holds its library, whose table of process sets is free."""
    library = SimpleNamespace(horovod_number_of_process_sets=int)
    return SimpleNamespace(MPI_LIB_CTYPES=library, **private)


def fake_operations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put operations that end at once in the place of Horovod's, and return them."""
    made = ModuleType("horovod.torch.mpi_ops")
    vars(made).update(
        handles=itertools.count(),
        Sum="sum",
        global_process_set=ALL,
        _basics=basics(),
        mpi_lib=SimpleNamespace(horovod_torch_wait_and_clear=lambda handle: None),
    )
    exec(OPS, vars(made))
    monkeypatch.setattr("loft_hvd.transport.horovod.horovod_module", lambda: made)
    monkeypatch.setitem(sys.modules, "horovod.torch.mpi_ops", made)
    return made
