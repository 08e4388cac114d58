"""What rules that see rows ask of them: how far they are apart, and a weighted pass. Plain torch.

This is the definition, which the kernels repeat bit for bit, and what runs without the extension.

Distances. Differences of two values are taken and squared in the precision of the arithmetic
(float32; float64 for float64), so a part that all rows have in common costs nothing. Lane l, of 16,
adds the squares of coordinates l, l + 16, ... of a tile of 256 in that precision; tiles of a block
of 16,384 are added lane by lane in float64; lanes and then blocks follow in order. So the sum of
one block errs by less than 2e-6 of itself, and depends on no thread and no instruction set.

Squares overflow: a row with values above about 1e18 in float32 is not measured, as one with NaN or
an infinity is not. Differences below 1e-22 are none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loft_hvd.aggregation.mixing import Floats, Mix

__all__ = ["BLOCK", "distance_sums", "distances", "finish_table", "mixed_rows", "precision_of"]

BLOCK = 16 * 1024  # coordinates that sums, and diagnostics, take together; the kernels' own
_LANES, _TILE = 16, 256  # coordinates; csrc/rules.h likewise
# Blocks at a time: 8 rows of them are 16 MiB of float32, about what the caches of a machine hold.
_BLOCKS = 32


def precision_of(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the arithmetic on values of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def distances(rows: Sequence[Tensor]) -> Floats:
    """Return the table of rows [numel] each, as ``mixing.py`` describes it; [n + 1, n + 1]."""
    return finish_table(distance_sums(rows))


def distance_sums(rows: Sequence[Tensor]) -> Floats:
    """Return the part of the table above its diagonal, as summed up; NaN and infinities stay.

    Those of blocks of coordinates add up to that of all.
    """
    num_rows, numel = len(rows), rows[0].numel()
    device = rows[0].device
    sums = torch.zeros(num_rows + 1, num_rows + 1, dtype=torch.float64, device=device)
    for begin in range(0, numel, _BLOCKS * BLOCK):
        part = torch.stack([row[begin : begin + _BLOCKS * BLOCK] for row in rows])
        values = part.to(precision_of(part.dtype))
        padded = -(-values.shape[1] // BLOCK) * BLOCK
        # Zeros behind the rows add nothing, and one row of zeros below them is the zero vector.
        values = torch.nn.functional.pad(values, (0, padded - values.shape[1], 0, 1))
        for row in range(num_rows):
            for block in _block_sums((values[row + 1 :] - values[row]).square()):
                sums[row, row + 1 :] += block
    found: Floats = sums.cpu().numpy()
    return found


def _block_sums(squares: Tensor) -> list[Tensor]:
    """Add up the squares of [rows, blocks * BLOCK], in the order of the module's head."""
    # [rows, blocks, tiles, steps, lanes]
    steps = squares.view(len(squares), -1, BLOCK // _TILE, _TILE // _LANES, _LANES).unbind(3)
    tiles = steps[0]
    for step in steps[1:]:
        tiles = tiles + step
    lanes = torch.zeros_like(tiles[:, :, 0], dtype=torch.float64)  # [rows, blocks, lanes]
    for tile in tiles.double().unbind(2):
        lanes = lanes + tile
    blocks = torch.zeros_like(lanes[..., 0])  # [rows, blocks]
    for lane in lanes.unbind(2):
        blocks = blocks + lane
    return list(blocks.unbind(1))


def finish_table(sums: Floats) -> Floats:
    """Return the whole table from the sums above its diagonal, [n + 1, n + 1]."""
    upper = np.triu(sums, 1)
    table: Floats = upper + upper.T
    lost = np.append(~np.isfinite(table[-1, :-1]), False)
    table[~np.isfinite(table)] = np.inf
    # A row that is not measured lies infinitely far away from itself, too.
    table[lost] = np.inf
    table[:, lost] = np.inf
    return table


def mixed_rows(rows: Sequence[Tensor], mix: Mix) -> list[Tensor]:
    """Return the mixed rows, each added up in the order of the rows.

    In the precision of the arithmetic, to which scales and weights are rounded first. A row whose
    scale or weight is 0 then is not read. Where all other weights of a mixed row are the same, its
    sum is multiplied once, at the end.
    """
    precision = precision_of(rows[0].dtype)
    scales = torch.from_numpy(mix.scales).to(precision).tolist()
    wide = [
        row.to(precision) if scale in (0, 1) else row.to(precision) * scale
        for row, scale in zip(rows, scales, strict=True)
    ]
    mixed = []
    for line in torch.from_numpy(mix.matrix).to(precision).tolist():
        parts = [
            (row, weight)
            for row, weight, scale in zip(wide, line, scales, strict=True)
            if weight != 0 and scale != 0
        ]
        is_common = len({weight for _, weight in parts}) == 1
        terms = [row if is_common else row * weight for row, weight in parts]
        total = functools.reduce(torch.add, terms) if terms else torch.zeros_like(wide[0])
        mixed.append(total * parts[0][1] if is_common else total)
    return mixed
