"""Which parameters an optimizer reduces: their names, groups and rules, checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loft_hvd.aggregation.rules import Rule, parse_rule
from loft_hvd.errors import ArgumentError, ArgumentTypeError, UsageError
from loft_hvd.pipeline.buckets import ParameterSpec
from loft_hvd.transport.agreement import digest

__all__ = ["ReducedParameters", "check_none_thawed", "collect_parameters"]


@dataclass(frozen=True)
class ReducedParameters:
    """The parameters of an optimizer that take gradients, in the order of its groups.

    Attributes:
        parameters: the parameters.
        specs: what each of them is, [len(parameters)].
        rules: the rules that ``specs`` refer to by index.
    """

    parameters: tuple[torch.nn.Parameter, ...]
    specs: tuple[ParameterSpec, ...]
    rules: tuple[Rule, ...]

    @property
    def are_on_cpu(self) -> bool:
        """Whether all parameters are on a CPU."""
        return all(parameter.device.type == "cpu" for parameter in self.parameters)

    @property
    def name(self) -> str:
        """Stem of the operations' names: equal where the parameters' names are."""
        return f"loft.{digest(' '.join(spec.name for spec in self.specs)) & 0xFFFFFF:06x}"

    def fields(self) -> dict[str, str]:
        """Return what must be equal on every rank, by name."""
        fields = {"order of the parameters": " ".join(spec.name for spec in self.specs)}
        for spec in self.specs:
            fields[f"parameter {spec.name}"] = f"shape {list(spec.shape)}, {spec.dtype}"
            fields[f"rule= of parameter {spec.name}"] = str(self.rules[spec.rule])
            fields[f"groups= of parameter {spec.name}"] = str(spec.group)
        return fields


def collect_parameters(
    param_groups: Sequence[dict[str, Any]],
    named_parameters: Sequence[tuple[str, torch.nn.Parameter]] | None,
    *,
    rule: Rule,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    num_named_groups: int | None = None,
) -> ReducedParameters:
    """Find the parameters that take gradients, and say of each what it is called and ruled by.

    Args:
        param_groups: an optimizer's parameter groups; a group's ``"rule"`` (a rule or its text)
            goes before ``rule``.
        named_parameters: names for the parameters, or None for names by place.
        rule: the rule of groups that name none.
        groups: a number of groups or lists of parameters that stay together.
        num_named_groups: parameter groups from this one on were added later, and may hold
            parameters that ``named_parameters`` does not name; None for no such groups.

    Raises:
        ArgumentError: names that are missing, doubled or not (name, parameter) pairs.
        ArgumentTypeError: a parameter that is not floating point.
    """
    names = _names(param_groups, named_parameters, num_named_groups)
    parameters: list[torch.nn.Parameter] = []
    rules: list[Rule] = []
    rule_of: list[int] = []
    for group in param_groups:
        own = group.get("rule", rule)
        own = parse_rule(own) if isinstance(own, str) else own
        if not isinstance(own, Rule):
            raise ArgumentTypeError(
                f"rule={own!r} is not a rule; give one such as loft.Median(), "
                "loft.TrimmedMean(f=1), or loft.Custom(fn) for a function of yours"
            )
        if own not in rules:
            rules.append(own)
        taken = [p for p in group["params"] if p.requires_grad]
        parameters += taken
        rule_of += [rules.index(own)] * len(taken)
    group_of = _group_of(parameters, groups)
    specs = []
    for at, parameter in enumerate(parameters):
        if not parameter.dtype.is_floating_point:
            raise ArgumentTypeError(
                f"parameter {names[id(parameter)]!r} is {parameter.dtype}; gradients are "
                "aggregated as floating point values"
            )
        specs.append(
            ParameterSpec(
                names[id(parameter)],
                tuple(parameter.shape),
                parameter.dtype,
                device=str(parameter.device),
                rule=rule_of[at],
                group=group_of.get(id(parameter)),
            )
        )
    if not specs:
        raise ArgumentError("DistributedOptimizer: no parameter requires a gradient")
    return ReducedParameters(tuple(parameters), tuple(specs), tuple(rules))


def check_none_thawed(
    param_groups: Sequence[dict[str, Any]], reduced: Sequence[torch.nn.Parameter]
) -> None:
    """Refuse a step with a gradient that is not reduced: it would part the ranks' models.

    Raises:
        UsageError: a parameter was frozen when the optimizer was made, and is not any more.
    """
    known = {id(parameter) for parameter in reduced}
    for i, group in enumerate(param_groups):
        for j, parameter in enumerate(group["params"]):
            if (
                parameter.requires_grad
                and parameter.grad is not None
                and id(parameter) not in known
            ):
                raise UsageError(
                    f"parameter {j} of group {i}, of shape {list(parameter.shape)}, has a "
                    "gradient, but was frozen when DistributedOptimizer was made, so ranks do not "
                    "share it; make the optimizer anew after requires_grad_(True), on every rank"
                )


def _names(
    param_groups: Sequence[dict[str, Any]],
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
    num_named_groups: int | None,
) -> dict[int, str]:
    """Map each parameter's id to its name."""
    if named_parameters is None:
        return {
            id(parameter): f"noname.{i}.{j}"
            for i, group in enumerate(param_groups)
            for j, parameter in enumerate(group["params"])
        }
    pairs = list(named_parameters)
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
    doubled = sorted(
        name for name, count in Counter(name for name, _ in pairs).items() if count > 1
    )
    if doubled:
        raise ArgumentError(
            f"named_parameters holds {doubled} more than once; names tell gradients apart on the "
            "wire, so each must be unique (prefix them when you join several models)"
        )
    names = {id(parameter): name for name, parameter in pairs}
    for i, group in enumerate(param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) in names:
                continue
            if num_named_groups is not None and i >= num_named_groups:
                names[id(parameter)] = f"added.{i}.{j}"
            else:
                raise ArgumentError(
                    f"named_parameters does not name parameter {j} of group {i}, of shape "
                    f"{list(parameter.shape)}; name every parameter of the optimizer, or pass none"
                )
    return names


def _group_of(
    parameters: Sequence[torch.nn.Parameter], groups: int | Sequence[Sequence[Tensor]] | None
) -> dict[int, int]:
    """Map the id of each parameter in a group to the group's index."""
    if groups is None:
        return {}
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentError(f"groups={groups} must be >= 0")
        num_groups = min(groups, len(parameters))
        return {
            id(parameter): at * num_groups // len(parameters)
            for at, parameter in enumerate(parameters)
            if num_groups
        }
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
