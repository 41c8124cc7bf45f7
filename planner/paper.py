"""The stream-based model of the HybridEP paper (Yang et al., arXiv 2510.19470): Eq. 3, 4 and 10 to 12, one function each.

It covers the forward pass of one MoE block on G GPUs that are joined by one bandwidth, without latency. The planner uses
``planner.cost``, of which this is a special case; this module is for comparison with the paper.

Symbols (Table I): D ``data_bytes``, routed tokens of one GPU; P_E ``expert_bytes``, experts homed on one GPU; G ``num_gpus``;
B ``bandwidth_bytes_per_s``; p ``share``, the part of the All-to-All (A2A) partners that stay A2A; the others are reached by
All-Gather (AG) of their experts; S ``domain_size``; PE ``pre_expert_s``.
"""

from __future__ import annotations


def all_to_all_bytes(data_bytes: float, group_size: int) -> float:
    """Eq. 3: what a GPU sends in one A2A among g GPUs, D (g - 1) / g; nearly constant in g."""
    return data_bytes * (group_size - 1) / group_size


def all_gather_bytes(expert_bytes: float, group_size: int) -> float:
    """Eq. 4: what a GPU receives in an AG among g GPUs, P_E (g - 1); linear in g."""
    return expert_bytes * (group_size - 1)


def latency_s(
    share: float, *, data_bytes: float, expert_bytes: float, num_gpus: int, bandwidth_bytes_per_s: float, pre_expert_s: float
) -> float:
    """Eq. 10: max(PE, AG) + 2 A2A when every GPU uses the same p (``share``)."""
    gather, exchanges = communication_terms_s(
        share,
        data_bytes=data_bytes,
        expert_bytes=expert_bytes,
        num_gpus=num_gpus,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    return max(pre_expert_s, gather) + exchanges


def communication_terms_s(
    share: float, *, data_bytes: float, expert_bytes: float, num_gpus: int, bandwidth_bytes_per_s: float
) -> tuple[float, float]:
    """Eq. 11: (AG, 2 A2A) with AG = (1 - p) (G - 1) P_E / B and 2 A2A = 2 D (G - 1) p / (G B)."""
    gather = (1 - share) * all_gather_bytes(expert_bytes, num_gpus) / bandwidth_bytes_per_s
    exchanges = 2 * share * all_to_all_bytes(data_bytes, num_gpus) / bandwidth_bytes_per_s
    return gather, exchanges


def best_share(
    *, data_bytes: float, expert_bytes: float, num_gpus: int, bandwidth_bytes_per_s: float, pre_expert_s: float
) -> float:
    """Eq. 12: the continuous p that minimises ``latency_s``, in [0, 1].

    Where moving all experts is cheaper than moving tokens (2 D >= G P_E), or nobody is there to move to, p = 0. Otherwise as many
    experts are gathered as the pre-expert computation hides: p = 1 - B PE / (P_E (G - 1)).
    """
    if num_gpus == 1 or 2 * data_bytes >= num_gpus * expert_bytes:
        return 0.0
    return max(0.0, 1 - bandwidth_bytes_per_s * pre_expert_s / all_gather_bytes(expert_bytes, num_gpus))


def share_of_domain(num_gpus: int, domain_size: int) -> float:
    """p of a domain of S GPUs, exactly: of G - 1 partners, G - S are not in the domain."""
    return (num_gpus - domain_size) / (num_gpus - 1)


def domain_of_share(num_gpus: int, share: float) -> int:
    """The smallest domain that divides G and whose p (``share_of_domain``) is at most ``share``; the inverse on feasible p."""
    # A share that was itself computed from a domain must come back to that domain in spite of rounding.
    wanted = num_gpus - share * (num_gpus - 1) - 1e-9
    return next(size for size in range(1, num_gpus + 1) if num_gpus % size == 0 and size >= wanted)
