"""A job whose ranks have connections of their own, and end the engine: ``meshes.py``."""

from __future__ import annotations

import sys
import time

import horovod.torch as hvd
import torch
from horovod.torch import shutdown  # as scripts may import it

import loft_hvd as loft
from loft_hvd.errors import TransportError
from loft_hvd.transport.lanes import _worlds
from loft_hvd.transport.mesh import Mesh
from tests.support.processes import own_sockets


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    engines = own_sockets()
    loft.allreduce(torch.ones(6), loft.Median(), name="x")
    ((mesh,),) = [world.by_kind.values() for world in _worlds().values()]
    assert isinstance(mesh, Mesh)
    opened = own_sockets() - engines
    rank = hvd.rank()
    hvd.barrier()  # another rank may count while this one shuts down
    shutdown()
    until = time.monotonic() + 10
    while opened & own_sockets() and time.monotonic() < until:
        time.sleep(0.01)
    left = len(opened & own_sockets())
    try:
        mesh.allgather(torch.ones(1), torch.ones(mesh.world_size), name="y")
        said = "nothing"
    except TransportError as error:
        said = str(error)
    sys.stdout.write(f"rank {rank}: opened {len(opened)}, left {left}, {_worlds()}, {said}\n")


if __name__ == "__main__":
    main()
