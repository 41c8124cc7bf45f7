"""Activation recomputation: what layers compute again in backward and need not keep (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

from enum import Flag, auto
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from hybridep.workload import Workload


class Recompute(Flag):
    """What of a layer keeps nothing but its input and computes again in backward: the same results from less memory."""

    NOTHING = 0
    ATTENTION = auto()
    """All before the routed experts: norms, attention, gate and shared experts. The layer's input is kept. Where the first layer
    with experts does so, layers without experts keep no more, too."""
    EXPERTS = auto()
    """Routed experts, which keep the rows that arrived, and shared ones."""

    @property
    def names(self) -> list[str]:
        """As plan files have them."""
        return [str(one.name).lower() for one in self]

    @property
    def phrase(self) -> str:
        """``attention and experts compute again in backward``; empty where nothing does."""
        verb = "computes" if self is Recompute.ATTENTION else "compute"
        return f"{' and '.join(self.names)} {verb} again in backward" if self else ""

    @property
    def backward_cost(self) -> int:
        """What the routed experts' backward takes, in forwards of theirs: one more where they compute again."""
        return 3 if Recompute.EXPERTS in self else 2


ALL = Recompute.ATTENTION | Recompute.EXPERTS


def _parsed(value: Any) -> Recompute:
    if isinstance(value, Recompute):
        return value
    if isinstance(value, bool):  # as plan files had it when only experts did
        return Recompute.EXPERTS if value else Recompute.NOTHING
    if not isinstance(value, list | tuple) or not all(name in ALL.names for name in value):
        raise ValueError(f"{value!r} is no list of {' and '.join(ALL.names)}")
    made = Recompute.NOTHING
    for name in value:
        made |= Recompute[name.upper()]
    return made


RecomputeNames = Annotated[Recompute, PlainValidator(_parsed), PlainSerializer(lambda value: value.names)]
"""In files a list of names."""


def again_flops(workload: Workload, recompute: Recompute) -> float:
    """What backward computes a second time of one layer with experts, one micro-batch, but of routed experts. Not a shared
    expert's last product, whose result nothing keeps, unless there is a gate."""
    if not recompute:
        return 0.0
    model, tokens = workload.model, workload.training.tokens
    last = 2.0 * tokens * model.hidden_size * model.shared_ffn_size * (not model.shared_expert_gate)
    if Recompute.ATTENTION in recompute:
        return workload.pre_expert_flops - last
    return 2.0 * tokens * model.ffn.num_matrices * model.hidden_size * model.shared_ffn_size - last


def dense_again_flops(workload: Workload, recompute: Recompute) -> float:
    """And of layers without experts, all together: all but their last product."""
    if Recompute.ATTENTION not in recompute:
        return 0.0
    model = workload.model
    last = 2.0 * workload.training.tokens * model.num_dense_layers * model.hidden_size * model.dense_ffn_size
    return workload.dense_layers_flops - last


def cheapest_first(workload: Workload) -> tuple[Recompute, ...]:
    """Ways to compute again, those with the fewest FLOPs first: attention and experts by themselves, then both."""
    return tuple(sorted((*ALL, ALL), key=lambda one: all_again_flops(workload, one)))


def all_again_flops(workload: Workload, recompute: Recompute) -> float:
    """What backward computes a second time of one layer and micro-batch of a rank with the mean number of tokens, routed experts
    and all."""
    routed = workload.training.tokens * workload.model.top_k * workload.expert_flops_per_row
    return again_flops(workload, recompute) + routed * (Recompute.EXPERTS in recompute)
