"""Whole models from clients into one: what a federated server does with a round's replies.

A state is what ``model.state_dict()`` returns. Rules that look at coordinates one by one go through
it tensor by tensor, each in its own dtype; for those that see rows a state is one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loft_hvd.aggregation.aggregate import aggregate
from loft_hvd.aggregation.diagnostics import Diagnostics, diagnose
from loft_hvd.aggregation.inputs import Weights, counting_rows, read_weights
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import AggregationError, ArgumentError, ArgumentTypeError

__all__ = ["aggregate_states", "diagnose_states"]

State = Mapping[str, Tensor]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_COUNTER = "num_batches_tracked"  # of torch's batch norms


def aggregate_states(
    states: Sequence[State],
    rule: Rule,
    *,
    weights: Weights | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """Aggregate the states of clients as a federated server does; it needs no ranks.

    Floating-point entries go through the rule and keep their dtype. An integer or bool becomes the
    value that more than half of the clients that count hold; where there is none that is an error.
    A batch norm's ``num_batches_tracked``, in which clients differ, becomes the lower median.

    Weights are what clients say of themselves, unless you know better. Rules that count weight
    (``Median``, ``GeometricMedian``) follow whoever holds half of it, so they refuse such weights.
    The others survive ``f`` clients of any weight.

    Args:
        states: one a client, names to tensors, as ``model.state_dict()`` returns; all on one
            device.
        rule: any rule; one that sees rows judges a client by its whole state.
        weights: sample count of each client, [clients], whole numbers; one of weight 0 does not
            count.
        names: what errors call the clients, [clients]; without, 0, 1 and so on.

    Returns:
        New tensors under the names of the first state, in its order.

    Raises:
        AggregationError: too few clients count for the rule; one holds so much weight that the rule
            does not survive it; or an integer has no majority. It names the client.
        ArgumentError: a state has other entries, shapes or devices than most; it is named.
        ArgumentTypeError: an entry is no tensor, or of a dtype that is neither aggregated nor
            voted on.
    """
    return _aggregate(states, rule, weights=weights, names=names, every=0)[0]


def diagnose_states(
    states: Sequence[State],
    rule: Rule,
    *,
    weights: Weights | None = None,
    names: Sequence[str] | None = None,
    every: int = 1,
) -> tuple[dict[str, Tensor], Diagnostics]:
    """Aggregate as ``aggregate_states`` does, and find out what each client did.

    Args:
        states: this and the next three as in ``aggregate_states``.
        rule: any rule.
        weights: sample count of each client, [clients].
        names: what errors call the clients, [clients].
        every: look at one block in so many, as in ``diagnose``; at all by default.

    Returns:
        The same state, and what each client did in its floating-point entries, [clients].

    Raises:
        LoftError: as ``aggregate_states`` and ``diagnose``.
    """
    if every == 0:
        raise ArgumentError("diagnose_states: every=0 must be >= 1, which looks at all blocks")
    return _aggregate(states, rule, weights=weights, names=names, every=every)


def _aggregate(
    states: Sequence[State],
    rule: Rule,
    *,
    weights: Weights | None,
    names: Sequence[str] | None,
    every: int,
) -> tuple[dict[str, Tensor], Diagnostics]:
    """Aggregate, and diagnose one block in ``every``; none with 0."""
    called = _read_names(states, names)
    _check_alike(states, called)
    counts = None if weights is None else read_weights(weights, len(states))
    if counts is not None:
        _check_shares(rule, counts, called)
    first, result = states[0], dict(states[0])
    floats = [key for key, value in first.items() if value.dtype in _FLOATS]
    found = Diagnostics.empty(len(states))
    for keys in [floats] if rule.sees_rows and floats else [[key] for key in floats]:
        rows = [_row(state, keys) for state in states]
        if every:
            row, seen = diagnose(rows, rule, weights=counts, every=every)
            found += seen
        else:
            row = aggregate(rows, rule, weights=counts)
        pieces = row.split([first[key].numel() for key in keys])
        for key, piece in zip(keys, pieces, strict=True):
            like = first[key]
            # Of one row for all entries a piece is no tensor of its own: saving it would save all.
            own = piece.to(like.dtype, copy=len(keys) > 1)
            result[key] = own.reshape(like.shape)
    counting = counting_rows(len(states), counts, None)
    for key in first.keys() - set(floats):
        result[key] = _vote(key, [states[i][key] for i in counting], [called[i] for i in counting])
    return result, found


def _row(state: State, keys: Sequence[str]) -> Tensor:
    """Return entries as one row; of several dtypes in one that holds the values of all."""
    parts = [state[key].detach().reshape(-1) for key in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _vote(key: str, values: Sequence[Tensor], names: Sequence[str]) -> Tensor:
    """Return the integers that more than half of the clients hold, of a counter the lower median.

    What more than half hold is in the middle of any order.
    """
    rows = torch.stack([value.detach().to(torch.int64) for value in values])  # [clients, ...]
    middle = rows.sort(dim=0).values[(len(rows) - 1) // 2]
    is_outvoted = 2 * (rows == middle).sum(dim=0) <= len(rows)
    if key.rpartition(".")[2] != _COUNTER and is_outvoted.any():
        at = int(is_outvoted.reshape(-1).nonzero()[0])
        held = rows.reshape(len(rows), -1)[:, at].tolist()
        says = ", ".join(f"{name}: {value}" for name, value in zip(names, held, strict=True))
        raise AggregationError(
            f"aggregate_states: value {at} of {key!r} ({values[0].dtype}) has no majority among "
            f"clients ({says}), and integers are not averaged; leave the entry out of all states, "
            "and give it the value that you want"
        )
    return middle.to(values[0].dtype)


def _check_shares(rule: Rule, counts: Sequence[int], names: Sequence[str]) -> None:
    """Raise where clients hold so much weight that a rule that counts weight follows them."""
    if not rule.counts_weight or not any(counts):
        return
    wanted, survived = max(rule.f, 1), rule.tolerance(counts).rows
    if survived < wanted:
        order = sorted(range(len(counts)), key=lambda client: -counts[client])[: survived + 1]
        share = sum(counts[client] for client in order) / sum(counts)
        who = f"client{'s' if survived else ''} {', '.join(names[client] for client in order)}"
        raise AggregationError(
            f"aggregate_states: {who} hold{'' if survived else 's'} {share:.1%} of the weight, and "
            f"{rule} counts weight: it survives {survived} wrong clients with these weights, but "
            f"{wanted} may be wrong; use a rule that counts clients, such as "
            f"NNM(TrimmedMean(f={wanted})), or leave weights= out"
        )


def _read_names(states: Sequence[State], names: Sequence[str] | None) -> list[str]:
    """Return what clients are called; raise unless there is one state for each."""
    if isinstance(states, Mapping):
        raise ArgumentTypeError(
            "aggregate_states: states is a mapping; give list(states.values()), and "
            "names=list(states)"
        )
    if not isinstance(states, Sequence):
        raise ArgumentTypeError(
            f"aggregate_states: states is of type {type(states).__name__}, but must be a list of "
            "state dicts, one a client"
        )
    if not states:
        raise AggregationError("aggregate_states: there are no states; give one a client")
    called = [str(name) for name in (range(len(states)) if names is None else names)]
    if len(called) != len(states):
        raise ArgumentError(
            f"aggregate_states: names has {len(called)} values, but there are {len(states)} "
            "states; give one a client"
        )
    return called


def _check_alike(states: Sequence[State], names: Sequence[str]) -> None:
    """Raise unless all states have the same entries, and say which client's are not as most."""
    forms = [_form(state, name) for state, name in zip(states, names, strict=True)]
    most = dict(Counter(tuple(form.items()) for form in forms).most_common(1)[0][0])
    for name, form in zip(names, forms, strict=True):
        for key in [*most, *form]:
            if form.get(key) != most.get(key):
                raise ArgumentError(
                    f"aggregate_states: {key!r} is {form.get(key, 'missing')} in the state of "
                    f"client {name}, but {most.get(key, 'missing')} in most; leave that client "
                    "out, or have it send the state of the same model"
                )
    devices = sorted({form.partition(" on ")[2] for form in most.values()})
    if len(devices) > 1:
        raise ArgumentError(
            f"aggregate_states: entries lie on {', '.join(devices)}; move all to one device"
        )


def _form(state: State, name: str) -> dict[str, str]:
    """Say of each entry, by name in order, what all clients must have alike."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"aggregate_states: the state of client {name} is of type {type(state).__name__}; give "
            "what model.state_dict() returns"
        )
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(
                f"aggregate_states: {key!r} of client {name} is of type {type(value).__name__}, no "
                "tensor; leave it out, or give torch.as_tensor(value)"
            )
        dtype = value.dtype
        is_counted = not (dtype.is_floating_point or dtype.is_complex or value.is_quantized)
        if not (dtype in _FLOATS or is_counted) or value.layout != torch.strided:
            raise ArgumentTypeError(
                f"aggregate_states: {key!r} of client {name} is {dtype}, {value.layout}; it takes "
                "dense float64, float32, float16, bfloat16, integers and bool"
            )
    return {
        key: f"{state[key].dtype} {list(state[key].shape)} on {state[key].device}"
        for key in sorted(state)
    }
