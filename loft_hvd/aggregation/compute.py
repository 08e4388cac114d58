"""Run a rule on rows that were already checked: the extension, or plain torch without it."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from loft_hvd._native import explain_missing, extension
from loft_hvd.aggregation import fallback
from loft_hvd.aggregation.distances import distance_sums, finish_table, precision_of
from loft_hvd.aggregation.fallback import BLOCK, Found, Judged
from loft_hvd.aggregation.inputs import Row, address
from loft_hvd.aggregation.mixing import Floats, MixedRule, mix_of
from loft_hvd.aggregation.row_rules import ROW_RULES, RowRule, check_is_ours
from loft_hvd.aggregation.rules import Rule
from loft_hvd.config import config
from loft_hvd.errors import ArgumentTypeError
from loft_hvd.topology import allowed_cpus

__all__ = [
    "NO_CUDA",
    "aggregate_rows",
    "as_tensor",
    "decide",
    "fill_rows",
    "measure_rows",
    "num_threads",
    "queue_distances",
    "reduce_weights",
    "tell_autograd",
    "warn_once",
]

_MOST_THREADS = 2**31 - 1  # bound from C's int
_DTYPES = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}  # as in csrc/rules.h
NO_CUDA = (
    "gradients lie on a GPU, but loft_hvd._loft was built without CUDA kernels; build it again "
    "with LOFT_HVD_CUDA=1 and nvcc 12.1 or newer on PATH"
)


@functools.cache
def warn_once(reason: str = "") -> None:
    """Warn, once a process and reason, that rules run in plain torch; by default why they do."""
    warnings.warn(
        f"{reason or explain_missing()}. Until then rules run in plain torch, several times slower",
        RuntimeWarning,
        stacklevel=2,
    )


def num_threads() -> int:
    """Return the CPU threads of one call: LOFT_HVD_THREADS, else this rank's share of the CPUs.

    The share is the allowed CPUs divided by the ranks on this node, and no more than torch uses.
    """
    # Ranks of a node aggregate at the same time: more threads than CPUs would wait for each other.
    settings = config()
    if settings.threads is not None:
        return min(settings.threads, _MOST_THREADS)
    share = allowed_cpus() // settings.local_ranks
    return max(1, min(share, torch.get_num_threads()))


def aggregate_rows(
    rows: Sequence[Row],
    rule: Rule,
    *,
    weights: Sequence[int] | None,
    out: Row,
    diagnose_every: int = 0,
) -> Found | Judged | None:
    """Aggregate into ``out`` the rows that count.

    Args:
        rows: 1-D with unit stride, one dtype, one device, as ``Rows`` holds them; none absent.
        rule: any rule but ``Custom``, already checked against the rows.
        weights: a weight above 0 for each row, or None.
        out: like a row, overlapping none.
        diagnose_every: look at one block in so many; 0 looks at none.

    Returns:
        None, or, with ``diagnose_every``, what ``fallback.diagnose_rows`` returns, and the verdicts
        of a rule that sees rows.
    """
    if out.shape[0] == 0 and not diagnose_every:
        return None
    weights = reduce_weights(weights)
    if isinstance(rule, RowRule | MixedRule):
        return _aggregate_mixed(rows, rule, weights, out, diagnose_every)
    check_is_ours(rule)
    module = _extension_for(out)
    if module is None:
        tensors, target = [as_tensor(row) for row in rows], as_tensor(out)
        fallback.aggregate_rows(tensors, rule, weights=weights, out=target)
        if not diagnose_every:
            return None
        return fallback.diagnose_rows(
            tensors, rule, weights=weights, out=target, every=diagnose_every
        )
    # csrc/bindings.cpp takes addresses: `rows` and `out` keep the memory alive during the call.
    job = (
        *_job_of(rows),
        rule.code,
        rule.kind_code,
        rule.f,
        weights or [],
        address(out),
    )
    found: Found | None
    if isinstance(out, Tensor) and out.is_cuda:
        call = functools.partial(module.aggregate_cuda, *job)
        found = _run_cuda(call, len(rows), out, diagnose_every, has_window=True)
    else:
        found = module.aggregate_cpu(*job, num_threads(), config().isa or "", diagnose_every)
    tell_autograd(out)
    return found


def fill_rows(
    rows: Sequence[Tensor],
    missing: Tensor,
    rule: Rule,
    *,
    block_numel: int,
    least: int,
    weights: Sequence[int] | None,
) -> int | None:
    """Fill blocks that are missing in place, by a rule on the rows that came there.

    Args:
        rows: on the CPU, 1-D with unit stride, one dtype; none absent.
        missing: contiguous uint8, [rows, blocks of block_numel], not 0 where a block is missing.
        rule: a coordinate-wise one that fits ``least`` rows.
        block_numel: values of a block.
        least: rows that must have come of a block with a hole.
        weights: a weight above 0 for each row, or None.

    Returns:
        None, or the first block of which fewer came; nothing is filled then.
    """
    weights = reduce_weights(weights)
    module = _extension_for(rows[0])
    if module is not None and hasattr(module, "fill_cpu"):
        short = module.fill_cpu(
            *_job_of(rows),
            rule.code,
            rule.kind_code,
            rule.f,
            weights or [],
            missing.data_ptr(),
            block_numel,
            least,
            num_threads(),
            config().isa or "",
        )
        for row in rows:
            tell_autograd(row)
        return None if short < 0 else int(short)
    num_missing = torch.count_nonzero(missing, dim=0)
    for block in (num_missing > len(rows) - least).nonzero().flatten().tolist():
        if num_missing[block]:
            return int(block)
    for block in missing.any(dim=0).nonzero().flatten().tolist():
        span = slice(block * block_numel, (block + 1) * block_numel)
        is_gap = missing[:, block].bool().tolist()
        came = [row for row, is_missing in enumerate(is_gap) if not is_missing]
        gaps = [row[span] for row, is_missing in zip(rows, is_gap, strict=True) if is_missing]
        fallback.aggregate_rows(
            [rows[row][span] for row in came],
            rule,
            weights=reduce_weights(None if weights is None else [weights[row] for row in came]),
            out=gaps[0],
        )
        for gap in gaps[1:]:
            gap.copy_(gaps[0])
    return None


def measure_rows(rows: Sequence[Row]) -> Floats:
    """Return how far rows are apart, as ``distances.distance_sums`` does; [n + 1, n + 1].

    Rows are as in ``aggregate_rows``.
    """
    row = rows[0]
    module = _extension_for(row)
    if module is None:
        return distance_sums([as_tensor(row) for row in rows])
    if isinstance(row, Tensor) and row.is_cuda:
        # Waits for the device once: what follows from the table is found on the host.
        found: Floats = queue_distances(module, rows, row.device).cpu().numpy()
        return found
    sums = np.zeros((len(rows) + 1, len(rows) + 1))
    if row.shape[0]:
        module.distances_cpu(*_job_of(rows), sums.ctypes.data, num_threads(), config().isa or "")
    return sums


def queue_distances(module: ModuleType, rows: Sequence[Row], device: torch.device) -> Tensor:
    """Queue ``measure_rows`` on a CUDA device; return what will be its result, there."""
    side, job = len(rows) + 1, _job_of(rows)
    table = torch.zeros(side, side, dtype=torch.float64, device=device)
    room = torch.empty(module.distance_cells(len(rows), *job[1:]), dtype=table.dtype, device=device)
    module.distances_cuda(*job, room.data_ptr(), table.data_ptr(), *_place_of(table))
    return table


def decide(
    rule: RowRule,
    sums: Floats,
    weights: Sequence[int] | None,
    *,
    precision: torch.dtype,
) -> MixedRule:
    """Return what a rule makes of rows, already checked, from the sums of ``measure_rows``.

    The same on every machine. ``weights`` are above 0, one for each row, or None; ``precision`` is
    ``precision_of`` the rows, the lowest if they differ.
    """
    if ROW_RULES.get(rule.name) is not type(rule):
        raise ArgumentTypeError(f"{rule} has no law; use Custom(fn) for rules from elsewhere")
    mix = mix_of(rule, finish_table(sums), reduce_weights(weights), precision=precision)
    return MixedRule(rule, mix._replace(weights=reduce_weights(mix.weights)))


def _aggregate_mixed(
    rows: Sequence[Row],
    rule: RowRule | MixedRule,
    weights: list[int] | None,
    out: Row,
    diagnose_every: int,
) -> Judged | None:
    """Aggregate by a rule that sees rows: their distances, its weights, one weighted pass."""
    if isinstance(rule, MixedRule):
        decided = rule
    else:
        is_exact = str(rows[0].dtype).endswith("float64")  # torch's, or NumPy's
        precision = torch.float64 if is_exact else torch.float32
        decided = decide(rule, measure_rows(rows), weights, precision=precision)
    mix, module = decided.mix, _extension_for(out)
    # Of few rows Bulyan keeps less than half around the median, for which there is no kernel.
    if module is not None and 2 * mix.rule.f < len(mix.matrix):
        found: Found | None
        job = (
            *_job_of(rows),
            mix.scales.tolist(),
            mix.matrix.ravel().tolist(),
            len(mix.matrix),
            mix.rule.code,
            mix.rule.kind_code,
            mix.rule.f,
            mix.weights or [],
            address(out),
        )
        if isinstance(out, Tensor) and out.is_cuda:
            cells = module.mix_cells(len(rows), len(mix.matrix))
            room = torch.empty(cells, dtype=torch.float64, device=out.device)
            call = functools.partial(module.mix_cuda, *job, room.data_ptr())
            found = _run_cuda(call, len(rows), out, diagnose_every, has_window=False)
        else:
            found = module.mix_cpu(*job, num_threads(), config().isa or "", diagnose_every)
        tell_autograd(out)
        return None if found is None else (*found, decided.verdicts)
    tensors, target = [as_tensor(row) for row in rows], as_tensor(out)
    fallback.aggregate_mixed(tensors, mix, out=target)
    if not diagnose_every:
        return None
    found = fallback.diagnose_rows(tensors, rule, weights=weights, out=target, every=diagnose_every)
    return (*found, decided.verdicts)


def _job_of(rows: Sequence[Row]) -> tuple[list[int], int, int]:
    """Return what every kernel takes of rows: their addresses, their length, their dtype's code."""
    dtype = str(rows[0].dtype).removeprefix("torch.")
    return [address(row) for row in rows], rows[0].shape[0], _DTYPES[dtype]


def _place_of(tensor: Tensor) -> tuple[int, int]:
    """Return a CUDA tensor's device and the current stream there."""
    return tensor.device.index, torch.cuda.current_stream(tensor.device).cuda_stream


def reduce_weights(weights: Sequence[int] | None) -> list[int] | None:
    """Divide weights, all above 0, by their common divisor; equal ones are None: same bits."""
    # 3 3 3 weighs as no weights do, and the kernels without weights are 1.2 (4 rows) to 4 times (32
    # rows) as fast (docs/benchmarks.md).
    if weights is None or min(weights) == max(weights):
        return None
    divisor = functools.reduce(math.gcd, weights)
    return [weight // divisor for weight in weights]


def _extension_for(row: Row) -> ModuleType | None:
    """Return the extension where it has kernels for the device of ``row``; else say why not."""
    module = extension()
    if module is None:
        warn_once()
        return None
    if isinstance(row, Tensor) and row.is_cuda and not module.has_cuda:
        warn_once(NO_CUDA)
        return None
    is_known = not isinstance(row, Tensor) or row.device.type in ("cpu", "cuda")
    return module if is_known else None


def _run_cuda(
    call: Callable[..., None], num_rows: int, out: Tensor, diagnose_every: int, *, has_window: bool
) -> Found | None:
    """Queue a job on the current stream; with diagnostics, wait for them once, at the end.

    ``call`` takes the device and the stream, and how often and where it diagnoses. Without a
    window, that of mixed rows, no value is outside.
    """
    if not diagnose_every:
        call(*_place_of(out), 0, 0, 0, 0)
        return None
    # The kernels leave low and high of each sampled block behind, in the precision of their
    # arithmetic; a short kernel compares the rows with them and adds up once a block and row.
    num_blocks = -(-out.numel() // (BLOCK * diagnose_every))
    windows = torch.empty(2, num_blocks * BLOCK, dtype=precision_of(out.dtype), device=out.device)
    low, high = windows
    if not has_window:
        low.fill_(-math.inf)
        high.fill_(math.nan)  # which orders above all
    sums = torch.empty(3, num_rows, num_blocks, dtype=torch.float64, device=out.device)
    buffers = (low.data_ptr(), high.data_ptr(), sums.data_ptr())
    call(*_place_of(out), diagnose_every, *buffers)
    return fallback.read_tally(sums.sum(dim=2), out.numel(), diagnose_every)


def tell_autograd(out: Row) -> None:
    """Say that the extension wrote ``out``, so that a backward pass that saved it raises."""
    # It wrote through an address, so torch has not seen it. An inference tensor has no
    # version to count, and nothing that is saved for a backward pass.
    if isinstance(out, Tensor) and not out.is_inference():
        torch.autograd.graph.increment_version(out)


def as_tensor(row: Row) -> Tensor:
    """Return the row as a tensor over the same memory, or a copy where that is read-only."""
    if isinstance(row, Tensor):
        return row
    return torch.from_numpy(row if row.flags.writeable else np.array(row))
