"""What CUDA's inter-process memory and events give the ranks of one host.

A buffer is described by plain bytes and numbers of a fixed layout, which another process maps;
nothing that a process sends is ever unpickled. torch counts, in shared memory, who maps a buffer:
its memory is used for nothing else before all have let go of it. One description is for one rank.

Memory is mapped for this rank's own GPU, over which peers' is reached, so that tensors there are
this GPU's for torch, and a kernel takes them beside its own.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import torch
from torch import Tensor

from loft_hvd.errors import TransportError
from loft_hvd.transport.agreement import digest

__all__ = ["DESCRIPTION_BYTES", "EVENT_BYTES", "CudaPeers", "decode", "encode"]

EVENT_BYTES = 64  # bound from CUDA: a cudaIpcEventHandle_t
# Bytes of the storage, its place in the block that cudaMalloc gave, the place of its counter;
# length and bytes of the block's handle, and of the name of the memory where the counter is.
_LAYOUT = struct.Struct("<qqqB66sB63s")
DESCRIPTION_BYTES = -(-_LAYOUT.size // 8) * 8
# A cudaIpcMemHandle_t; from torch 2.5 on there are two bytes before it, a version and what follows.
_HANDLE_BYTES = 64
_OF_CUDA_MALLOC = b"c"
_COUNTER_NAME = re.compile(rb"/torch_\w+")


def encode(shared: tuple[Any, ...]) -> bytes:
    """Return what ``UntypedStorage._share_cuda_`` has given, in a fixed layout.

    Raises:
        TransportError: the memory is not of cudaMalloc, which alone is mapped by a handle.
    """
    _, handle, num_bytes, place, counter, counter_place, _, _ = shared
    is_plain = len(handle) == _HANDLE_BYTES or (
        len(handle) == _HANDLE_BYTES + 2 and handle[1:2] == _OF_CUDA_MALLOC
    )
    if not is_plain:
        raise TransportError(
            "torch's expandable segments are on, whose memory has no handle of a fixed length; "
            "leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"
        )
    if len(counter) > 63:
        raise TransportError(
            f"the name of torch's counter has {len(counter)} bytes, not 63 or less"
        )
    fields = (num_bytes, place, counter_place, len(handle), handle, len(counter), counter)
    return _LAYOUT.pack(*fields).ljust(DESCRIPTION_BYTES, b"\0")


def decode(description: bytes) -> tuple[bytes, int, int, bytes, int]:
    """Return a buffer's handle, bytes and place, and its counter's name and place.

    Raises:
        TransportError: it is none that ``encode`` makes.
    """
    fields = _LAYOUT.unpack(description[: _LAYOUT.size])
    num_bytes, place, counter_place, handle_bytes, handle, name_bytes, name = fields
    handle, name = handle[:handle_bytes], name[:name_bytes]
    is_right = handle_bytes in (_HANDLE_BYTES, _HANDLE_BYTES + 2) and name_bytes <= 63
    is_right &= min(place, counter_place) >= 0 and num_bytes > 0
    if not is_right or _COUNTER_NAME.fullmatch(name) is None:
        raise TransportError("a rank describes its memory in other words than this version's")
    return handle, num_bytes, place, name, counter_place


class CudaPeers:
    """This rank's GPU, as ranks in other processes reach it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._counters: dict[int, Tensor] = {}  # by address of what they are counted into

    @property
    def identity(self) -> int:
        """A number that no other GPU has."""
        return _identity(self.device.index)

    def unreachable(self, identity: int) -> str:
        """Say why another rank's GPU is out of reach, "" where it may be within."""
        # A GPU that this process does not see is tried: CUDA maps its memory, too.
        for other in range(torch.cuda.device_count()):
            is_it = other != self.device.index and _identity(other) == identity
            if is_it and not torch.cuda.can_device_access_peer(self.device, other):
                return f"{self.device} cannot read the memory of cuda:{other}"
        return ""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer, [numel], zeros."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def share(self, values: Tensor) -> bytes:
        """Describe a whole buffer for one rank, which maps it once."""
        with torch.cuda.device(self.device):
            return encode(values.untyped_storage()._share_cuda_())

    def map(self, description: bytes) -> Tensor:
        """Return another rank's buffer, as bytes; its memory is kept as long as this."""
        handle, num_bytes, place, name, counter_place = decode(description)
        # Its values are waited for by an event of ours, so not by torch's.
        storage = torch.UntypedStorage._new_shared_cuda(
            self.device.index, handle, num_bytes, place, name, counter_place, bytes(64), False
        )
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def make_event(self) -> tuple[Any, bytes]:
        """Return an event of this rank's, and what another process opens it by."""
        with torch.cuda.device(self.device):
            event = torch.cuda.Event(interprocess=True)
            return event, bytes(event.ipc_handle())

    def open_event(self, handle: bytes) -> Any:
        """Return another rank's event."""
        return torch.cuda.Event.from_ipc_handle(self.device, handle)

    def record(self, event: Any) -> None:
        """Have an event come after all that is queued by now on the current stream."""
        event.record(torch.cuda.current_stream(self.device))

    def wait(self, event: Any) -> None:
        """Let what is queued from here on come after what an event was recorded after last."""
        event.wait(torch.cuda.current_stream(self.device))

    # Counting into the host's memory, in the order of what is queued.

    def count_into(self, words: Tensor) -> None:
        """Be ready to count into int64 words of the host's memory, zeros."""
        # Else each count would have the host wait for the device.
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(words.data_ptr(), words.nbytes, 0)
        if int(code):
            raise TransportError(f"cudaHostRegister of memory that ranks share: error {int(code)}")
        counter = torch.zeros(words.numel(), dtype=words.dtype, device=self.device)
        self._counters[words.data_ptr()] = counter

    def count(self, words: Tensor) -> None:
        """Add 1 to each word, once all that is queued by now is done."""
        counter = self._counters[words.data_ptr()].add_(1)
        words.copy_(counter, non_blocking=True)

    def end_count(self, words: Tensor) -> None:
        """Count there no more."""
        del self._counters[words.data_ptr()]
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(words.data_ptr())


def _identity(index: int) -> int:
    return digest(str(torch.cuda.get_device_properties(index).uuid))
