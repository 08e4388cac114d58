"""Which parameters an optimizer reduces: their names, groups and rules, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.rule_text import parse_rule
from loft_hvd.aggregation.rules import Rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.pipeline.buckets import ParameterSpec
from loft_hvd.transport.agreement import digest

__all__ = [
    "ReducedParameters",
    "RuleChoice",
    "check_none_thawed",
    "check_whole",
    "collect_parameters",
    "parameters_by_name",
    "parts_error",
]

_SHOWN = 8  # names in an error

RuleChoice = Rule | Mapping[str, Rule | str]
"""A rule for all parameters, or one for each pattern of their names; the first that fits counts."""


@dataclass(frozen=True)
class ReducedParameters:
    """The parameters of an optimizer that take gradients, in the order of its groups."""

    parameters: tuple[torch.nn.Parameter, ...]
    specs: tuple[ParameterSpec, ...]  # what each of them is, [len(parameters)]
    rules: tuple[Rule, ...]  # which ``specs`` refer to by index

    @property
    def are_on_cpu(self) -> bool:
        return all(parameter.device.type == "cpu" for parameter in self.parameters)

    @property
    def name(self) -> str:
        """Stem of the operations' names: equal where the parameters' names are."""
        # 24 bits: two optimizers of one process meet by chance once in 16 million times.
        return f"loft.{digest(' '.join(spec.name for spec in self.specs)) & 0xFFFFFF:06x}"

    def fields(self, *, mixes_devices: bool) -> dict[str, str]:
        """Return what must be equal on every rank, by name.

        With ``mixes_devices`` a parameter may be on a CPU on one rank and on a GPU on another.
        """
        # Buckets hold one device each. So it counts which parameters share one, not its number:
        # ranks of a node have the GPUs 0, 1, 2, ...
        numbers: dict[str, int] = {}
        # A field for each property of each parameter, so that an error names the one that differs.
        fields = {"order of the parameters": " ".join(spec.name for spec in self.specs)}
        for spec in self.specs:
            fields[f"parameter {spec.name}"] = f"shape {list(spec.shape)}, {spec.dtype}"
            fields[f"rule= of parameter {spec.name}"] = str(self.rules[spec.rule])
            fields[f"groups= of parameter {spec.name}"] = str(spec.group)
            kind = "device" if mixes_devices else torch.device(spec.device).type
            number = numbers.setdefault(spec.device, len(numbers))
            fields[f"device of parameter {spec.name}"] = f"{kind}, number {number} of the model"
        return fields


def parameters_by_name(
    param_groups: Sequence[dict[str, Any]],
    pairs: Sequence[tuple[str, torch.nn.Parameter]] | None,
    num_named_groups: int,
) -> dict[str, torch.nn.Parameter]:
    """Return every parameter by name, frozen or not; arguments as in ``collect_parameters``."""
    names = _names(param_groups, pairs, num_named_groups)
    return {names[id(parameter)]: parameter for _, _, parameter in _places(param_groups)}


def collect_parameters(
    param_groups: Sequence[dict[str, Any]],
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None,
    *,
    rule: RuleChoice,
    groups: int | Sequence[Sequence[Tensor]] | None,
    num_named_groups: int,
) -> ReducedParameters:
    """Find the parameters that take gradients, and say of each what it is called and ruled by.

    A parameter group's ``"rule"`` (a rule or its text) goes before ``rule``, which may be one of
    each pattern of names. Groups from ``num_named_groups`` on were added later: nobody has named
    their parameters.
    """
    names = _names(param_groups, named_parameters, num_named_groups)
    whole = [parameter for _, _, parameter in _places(param_groups)]
    check_whole(names, whole, what="DistributedOptimizer")
    if isinstance(rule, Mapping):
        _check_patterns(rule, [names[id(each)] for _, _, each in _places(param_groups)])
    rules: list[Rule] = []
    taken: list[tuple[torch.nn.Parameter, int]] = []  # and the index of its rule
    for param_group in param_groups:
        for parameter in param_group["params"]:
            if not parameter.requires_grad:
                continue
            own = param_group.get("rule", rule)
            if isinstance(own, Mapping):
                own = _rule_by_name(own, names[id(parameter)])
            own = parse_rule(own) if isinstance(own, str) else own
            if not isinstance(own, Rule):
                raise ArgumentTypeError(
                    f"rule={own!r} is not a rule; give one such as loft.Median(), "
                    "loft.TrimmedMean(f=1), or loft.Custom(fn) for a function of yours"
                )
            if own not in rules:
                rules.append(own)
            taken.append((parameter, rules.index(own)))
    if not taken:
        raise ArgumentError("DistributedOptimizer: no parameter requires a gradient")
    parameters = tuple(parameter for parameter, _ in taken)
    group_of = _group_of(parameters, groups)
    for parameter in parameters:
        if not parameter.dtype.is_floating_point:
            raise ArgumentTypeError(
                f"parameter {names[id(parameter)]!r} is {parameter.dtype}; gradients are "
                "aggregated as floating point values"
            )
    specs = tuple(
        ParameterSpec(
            names[id(parameter)],
            tuple(parameter.shape),
            parameter.dtype,
            device=str(parameter.device),
            rule=rule_index,
            group=group_of.get(id(parameter)),
        )
        for parameter, rule_index in taken
    )
    return ReducedParameters(parameters, specs, tuple(rules))


def _rule_by_name(rule: Mapping[str, Rule | str], name: str) -> Rule | str:
    """Return the rule of the first pattern that a parameter's name matches."""
    for pattern, each in rule.items():
        if fnmatchcase(name, pattern):
            return each
    raise ArgumentError(
        f"rule= has no pattern for parameter {name!r}, only {', '.join(map(repr, rule))}; end it "
        'with one for all others: "*": loft.Mean(), or a robust rule'
    )


def _check_patterns(rule: Mapping[str, Rule | str], names: Sequence[str]) -> None:
    """Refuse a pattern that no parameter's name matches: it is misspelt, or there are no names."""
    for pattern in rule:
        if not isinstance(pattern, str):
            raise ArgumentTypeError(f"rule=: pattern {pattern!r} must be a text such as 'table.*'")
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join(map(repr, names[:_SHOWN])) + ", ..." * (len(names) > _SHOWN)
            raise ArgumentError(
                f"rule=: no parameter's name matches {pattern!r}; names are {shown} (those of "
                "named_parameters=model.named_parameters())"
            )


def check_none_thawed(
    param_groups: Sequence[dict[str, Any]], reduced: Sequence[torch.nn.Parameter]
) -> None:
    """Refuse a step with a gradient that is not reduced: it would part the ranks' models."""
    # By id: tensors compare by value, and are not hashed by it.
    known = {id(parameter) for parameter in reduced}
    for i, j, parameter in _places(param_groups):
        has_gradient = parameter.requires_grad and parameter.grad is not None
        if has_gradient and id(parameter) not in known:
            raise UsageError(
                f"parameter {j} of group {i}, of shape {list(parameter.shape)}, has a "
                "gradient, but was frozen when DistributedOptimizer was made, so ranks do not "
                "share it; make the optimizer anew after requires_grad_(True), on every rank"
            )


def check_whole(names: Mapping[int, str], parameters: Sequence[Tensor], *, what: str) -> None:
    """Refuse parameters of which this rank holds a part; ``what`` was asked to reduce them.

    Raises:
        ArgumentTypeError: one is a DTensor (FSDP2) or a flat parameter (FSDP1).
    """
    for parameter in parameters:
        # By name: torch's modules of both take long to import, and nobody here needs them.
        is_dtensor = any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__)
        if is_dtensor or getattr(parameter, "_is_flat_param", False):
            name, shape = names.get(id(parameter), ""), list(parameter.shape)
            made_by = "FSDP2 (fully_shard)" if is_dtensor else "FullyShardedDataParallel"
            raise parts_error(f"{what}: parameter {name!r} of shape {shape} comes", made_by=made_by)


def parts_error(what: str, *, made_by: str) -> ArgumentTypeError:
    """Return the error for a model that is cut up over ranks."""
    if made_by.startswith("FSDP2"):
        way_out = (
            "after fully_shard(model), hook = loft.fsdp_hook(model, rule, balancer) brings rules "
            "and exact weights there, and the optimizer stays torch's own"
        )
    else:
        way_out = (
            "balancer.weigh(loss).backward() gives exact weights for unequal batches there; for a "
            "rule use torch's fully_shard(model) with loft.fsdp_hook(model, rule, balancer), or "
            "DistributedDataParallel with model.register_comm_hook(None, loft.ddp_hook(rule, "
            "balancer))"
        )
    return ArgumentTypeError(
        f"{what} from {made_by}: each rank has a part of the model, and gradients are summed as "
        f"they are cut up, so no rank's own gradient is there for a rule or a weight; {way_out}"
    )


def _places(
    param_groups: Sequence[dict[str, Any]],
) -> Iterator[tuple[int, int, torch.nn.Parameter]]:
    """Yield every parameter, frozen or not, behind its group's number and its own in there."""
    for i, group in enumerate(param_groups):
        for j, parameter in enumerate(group["params"]):
            yield i, j, parameter


def _names(
    param_groups: Sequence[dict[str, Any]],
    pairs: Sequence[tuple[str, torch.nn.Parameter]] | None,
    num_named_groups: int,
) -> dict[int, str]:
    """Map each parameter's id to its name."""
    if pairs is None:  # as Horovod names them
        return {id(parameter): f"noname.{i}.{j}" for i, j, parameter in _places(param_groups)}
    if not pairs:
        raise ArgumentError(
            "named_parameters is empty; a generator gives its items only once, so call "
            "model.named_parameters() anew for each optimizer"
        )
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ArgumentError(
            "named_parameters must be a sequence of (name, parameter) tuples, such as "
            "model.named_parameters()"
        )
    # One name twice would be one operation in flight twice.
    counts = Counter(name for name, _ in pairs)
    if doubled := sorted(name for name, count in counts.items() if count > 1):
        raise ArgumentError(
            f"named_parameters holds {doubled} more than once; names tell gradients apart on the "
            "wire, so each must be unique (prefix them when you join several models)"
        )
    names = {id(parameter): name for name, parameter in pairs}
    for i, j, parameter in _places(param_groups):
        if id(parameter) in names:
            continue
        if i < num_named_groups:
            raise ArgumentError(
                f"named_parameters does not name parameter {j} of group {i}, of shape "
                f"{list(parameter.shape)}; name every parameter of the optimizer, or pass none"
            )
        names[id(parameter)] = f"added.{i}.{j}"
    return names


def _group_of(
    parameters: Sequence[torch.nn.Parameter], groups: int | Sequence[Sequence[Tensor]] | None
) -> dict[int, int]:
    """Map the id of each parameter in a group to the group's index."""
    if groups is None or groups == 0:
        return {}
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentError(f"groups={groups} must be >= 0")
        # Equal runs of the order: 5 parameters in 2 groups are 0 0 0 1 1.
        num_groups = min(groups, len(parameters))
        return {id(p): at * num_groups // len(parameters) for at, p in enumerate(parameters)}
    found: dict[int, int] = {}
    for index, members in enumerate(groups):
        for parameter in members:
            if id(parameter) in found:
                raise ArgumentError(
                    f"groups: a parameter of shape {list(parameter.shape)} is in groups "
                    f"{found[id(parameter)]} and {index}; a parameter is in one group at most"
                )
            found[id(parameter)] = index
    return found
