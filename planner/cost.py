"""The closed-form cost of one training step: what the planner minimises.

A step is a sum over layers, micro-batches and operations, with the overlaps that the runtime has (``planner.layer_times``); then
the sum of dense gradients, the optimizer, and the weights that it has updated.

With a prefetch depth copies set out ahead of their blocks and give way to tokens: then the chain of computation and
tokens counts, and of copies what ``planner.ahead`` finds to show.

With forward only, one level, no latency, top-1 routing and one expert per GPU it is Eq. 10 of the HybridEP paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs
from hybridep.coding import Coding, copy_coding, dense_coding, speed_of, token_coding
from hybridep.gating import Gating
from hybridep.gpus import Gpu
from hybridep.placement import Placement
from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.recompute import Recompute
from hybridep.topology import Cluster
from hybridep.traffic import (
    SHARED,
    TOKENS,
    Op,
    OpLevel,
    Traffic,
    copy_traffic,
    dense_traffic,
    expected_rows,
    gathers_and_returns,
    served_copies,
    token_traffic,
    wan_bytes,
)
from hybridep.workload import Workload
from planner.ahead import Block, Transfer, block_transfers, exposed_s
from planner.compute import Compute, compute_of_ranks, shared_s
from planner.exchange import ExchangeTimes
from planner.layer_times import CODING, HEAD, OPTIMIZER, BlockTimes, LayerTimes, layer_times, timed_block
from planner.price import egress_usd, step_usd


@dataclass(frozen=True, kw_only=True)
class Cost(LayerTimes):
    """Seconds, and the bytes behind them; they add up too."""

    link_bytes: FloatArray
    """Per entry of ``Cluster.link_table``."""
    wan_bytes: float
    """Over the outermost level, all ranks together."""
    compute_s: FloatArray
    """Of each rank by itself (any shape): computation alone."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one optimizer step is expected to take."""

    step_s: float
    parts_s: dict[str, float]
    """Seconds by kind of operation; they add up to ``step_s``."""
    hidden_s: dict[str, float]
    """By kind, seconds of transfers that computation hides, and of computation that transfers hide."""
    bound_s: float
    """No schedule of this plan is faster: the busiest link's bytes over its bandwidth, or computation alone, without coding."""
    bound_by: str
    """Name of the busiest link, or ``computation``."""
    compute_s: float
    """Computation alone, of the rank that has most, and coding, in each operation of the rank that codes most."""
    link_bytes: FloatArray
    """Per entry of ``Cluster.link_table``."""
    link_s: FloatArray
    """Those bytes over each link's bandwidth."""
    wan_bytes: float
    """Between sites; between pods of one site not counted."""
    egress_usd: float
    """Of the same."""
    rent_usd_per_s: float
    """Of all ranks."""

    @property
    def step_usd(self) -> float:
        """What the step costs; zero where nothing has a price."""
        return step_usd(self.rent_usd_per_s, self.egress_usd, self.step_s)


def layer_traffic(
    placement: Placement, workload: Workload, gating: Gating, codecs: Sequence[Codecs] = (), chunks: int = 1
) -> Traffic:
    """Expected bytes of one layer: the token exchanges of one micro-batch, in ``chunks`` parts, and one gather and return of
    copies. ``codecs`` per level, exact ones when left out."""
    rows = expected_rows(placement, gating)
    return token_traffic(placement, workload, rows, codecs, chunks=chunks) | copy_traffic(placement, workload, codecs)


def layer_coding(
    gpu: Gpu, placement: Placement, workload: Workload, gating: Gating, codecs: Sequence[Codecs]
) -> dict[OpLevel, tuple[float, float]]:
    """Seconds before and after each exchange of one layer (see ``layer_traffic``) in which ranks code and decode."""
    if gpu.coding is None or not any(one.coded for one in codecs):
        return {}
    rows = expected_rows(placement, gating)
    coding = token_coding(placement, workload, rows, codecs, gating) | copy_coding(placement, workload, codecs)
    return coded_s(gpu, coding, codecs)


def coded_s(gpu: Gpu, coding: Coding, codecs: Sequence[Codecs]) -> dict[OpLevel, tuple[float, float]]:
    """(seconds to encode, seconds to decode) by operation, until the last rank is done; those that take no time are left out."""
    return {key: (float(one.max()), float(other.max())) for key, (one, other) in coded_ranks_s(gpu, coding, codecs).items()}


def coded_ranks_s(gpu: Gpu, coding: Coding, codecs: Sequence[Codecs]) -> dict[OpLevel, tuple[FloatArray, FloatArray]]:
    """The same of each rank, shaped as ``coding`` is."""
    found = {}
    for key, coded in coding.items():
        speed = speed_of(gpu.coding, codecs, key) if gpu.coding is not None else None
        if speed is not None:
            both = coded.encoded / speed.encode, coded.decoded / speed.decode
            found[key] = shared_s(both[0], gpu.sharing), shared_s(both[1], gpu.sharing)
    return found


def by_op(coding_s: Mapping[OpLevel, tuple[float, float]]) -> dict[Op, float]:
    """Both together, over all levels."""
    total: dict[Op, float] = {}
    for key, seconds in coding_s.items():
        total[key.op] = total.get(key.op, 0.0) + sum(seconds)
    return total


def block_times(
    network: ExchangeTimes,
    workload: Workload,
    placement: Placement,
    gating: Gating,
    traffic: Traffic,
    coding_s: Mapping[OpLevel, tuple[float, float]] | None = None,
    chunks: int = 1,
    recompute: Recompute = Recompute.NOTHING,
) -> BlockTimes:
    """Times of one MoE layer's operations, given ``layer_traffic`` in as many parts, and ``layer_coding``."""
    served, held = served_copies(placement, gating).sum(axis=1), placement.holds.sum(axis=1)
    exchanges = dict.fromkeys(Op, 0.0)
    for key, sent in traffic.items():
        parts = chunks if key.op in TOKENS else 1
        exchanges[key.op] += parts * network.exchange_s(key, sent / parts)
    compute = compute_of_ranks(network.cluster, workload)
    return timed_block(compute, served, held, exchanges, by_op(coding_s or {}), chunks, recompute)


def layer_cost(
    network: ExchangeTimes, workload: Workload, block: BlockTimes, traffic: Traffic, residency: Residency, schedule: Schedule
) -> Cost:
    """``layer_times`` with the bytes on every link."""
    batches = workload.training.micro_batches
    times = layer_times(block, batches, residency, schedule)
    gathers, returns = gathers_and_returns(residency, batches)
    counts = {Op.EXPERT_GATHER: gathers, Op.GRADIENT_RETURN: returns} | dict.fromkeys(SHARED, 1)
    per_step = {key: sent * counts.get(key.op, batches) for key, sent in traffic.items()}
    return Cost(
        parts_s=times.parts_s,
        hidden_s=times.hidden_s,
        link_bytes=network.loads_bytes(per_step),
        wan_bytes=wan_bytes(per_step),
        compute_s=batches * block.compute_s,
    )


def fixed_cost(
    network: ExchangeTimes,
    workload: Workload,
    placement: Placement,
    home_experts: IntArray,
    codecs: Sequence[Codecs] = (),
    recompute: Recompute = Recompute.NOTHING,
) -> Cost:
    """What does not depend on the placement of copies: head and dense layers, which ``recompute``, dense all-reduce, optimizer.
    ``home_experts`` [G]: experts at home on each rank, all layers together."""
    traffic = dense_traffic(placement, workload, codecs)
    parts, compute_s = fixed_computation(compute_of_ranks(network.cluster, workload), home_experts, recompute)
    parts |= dict.fromkeys((Op.DENSE_REDUCE_SCATTER.value, Op.DENSE_ALL_GATHER.value), 0.0)
    for key, sent in traffic.items():
        parts[key.op.value] += network.exchange_s(key, sent)
    parts |= dense_coding_part(network.cluster, workload, codecs)
    return Cost(
        parts_s=parts,
        hidden_s={},
        link_bytes=network.loads_bytes(traffic),
        wan_bytes=wan_bytes(traffic),
        compute_s=compute_s,
    )


def fixed_computation(compute: Compute, home_experts: IntArray, recompute: Recompute) -> tuple[dict[str, float], FloatArray]:
    """Head and optimizer of the slowest rank, by kind, and both together of each; layers without experts ``recompute``."""
    heads_s, optimizer_s = compute.heads_s(recompute), compute.optimizer_s(home_experts)
    return {HEAD: float(heads_s.max()), OPTIMIZER: float(optimizer_s.max())}, heads_s + optimizer_s


def dense_coding_part(cluster: Cluster, workload: Workload, codecs: Sequence[Codecs]) -> dict[str, float]:
    """What coding the dense gradients takes, as a part of the step; empty where it takes no time."""
    if cluster.gpu.coding is None or not any("gradients" in one.coded for one in codecs):
        return {}
    seconds = by_op(coded_s(cluster.gpu, dense_coding(cluster.sizes, workload, codecs), codecs))
    return {CODING: sum(seconds.values())} if seconds else {}


def combine(network: ExchangeTimes, fixed: Cost, layers: Sequence[tuple[int, Cost]]) -> StepCost:
    """The step of ``fixed`` and (number of layers, cost of one) groups."""
    parts, hidden = dict(fixed.parts_s), dict(fixed.hidden_s)
    loads, wan, each_s = fixed.link_bytes.copy(), fixed.wan_bytes, fixed.compute_s
    for count, cost in layers:
        for total, values in ((parts, cost.parts_s), (hidden, cost.hidden_s)):
            for name, seconds in values.items():
                total[name] = total.get(name, 0.0) + count * seconds
        loads += count * cost.link_bytes
        wan += count * cost.wan_bytes
        each_s = each_s + count * cost.compute_s
    wan -= float(loads[network.cluster.pair_links][network.cluster.pairs_in_one_site].sum())
    # The bound leaves coding out: its slowest rank may be another one in each operation.
    compute = float(each_s.max())
    link_s = loads / network.bandwidths_bytes_per_s
    busiest = int(link_s.argmax())
    by_link = float(link_s[busiest]) > compute
    return StepCost(
        step_s=sum(parts.values()),
        parts_s=parts,
        hidden_s=hidden,
        bound_s=max(float(link_s[busiest]), compute),
        bound_by=network.cluster.link_table[busiest].name if by_link else "computation",
        compute_s=compute + parts.get(CODING, 0.0),
        link_bytes=loads,
        link_s=link_s,
        wan_bytes=wan,
        egress_usd=egress_usd(network.cluster, loads),
        rent_usd_per_s=network.cluster.rent_usd_per_s,
    )


def step_cost(plan: Plan) -> StepCost:
    """The predicted cost of any plan, whoever made it."""
    return step_costs(plan, (plan.schedule.prefetch,))[0]


def step_costs(plan: Plan, depths: Sequence[int]) -> list[StepCost]:
    """With these prefetch depths in place of the plan's own."""
    network = ExchangeTimes(cluster=plan.cluster, streams=plan.schedule.streams)
    groups: list[tuple[int, Cost]] = []
    blocks: list[Block] = []
    for _, num_layers, group, placement, gating in plan.placed:
        traffic = layer_traffic(placement, plan.workload, gating, plan.level_codecs, plan.schedule.chunks)
        coding_s = layer_coding(plan.cluster.gpu, placement, plan.workload, gating, plan.level_codecs)
        times = block_times(network, plan.workload, placement, gating, traffic, coding_s, plan.schedule.chunks, group.recompute)
        groups.append((num_layers, layer_cost(network, plan.workload, times, traffic, group.residency, plan.schedule)))
        if any(depths):
            blocks += [_block(group, times, block_transfers(network, traffic, coding_s))] * num_layers
    home, dense = plan.home_experts, plan.dense_recompute
    cost = combine(network, fixed_cost(network, plan.workload, plan.placements[0], home, plan.level_codecs, dense), groups)
    return [_ahead(plan, cost, blocks, depth) if depth else cost for depth in depths]


def _block(group: LayerGroup, times: BlockTimes, transfers: dict[OpLevel, Transfer]) -> Block:
    return Block(
        residency=group.residency,
        pre_expert_s=times.pre_expert_s + times.overhead_s,
        pre_expert_backward_s=2 * (times.pre_expert_s + times.overhead_s) + times.again_s,
        expert_s=times.expert_s,
        expert_backward_s=times.backward_cost * times.expert_s,
        transfers=transfers,
        gather_coding_s=times.coding_s.get(Op.EXPERT_GATHER, 0.0),
        return_coding_s=times.coding_s.get(Op.GRADIENT_RETURN, 0.0),
    )


def _ahead(plan: Plan, cost: StepCost, blocks: Sequence[Block], depth: int) -> StepCost:
    """The same step with copies that set out ahead: of them counts only what shows."""
    workload, compute = plan.workload, compute_of_ranks(plan.cluster, plan.workload)
    shown = exposed_s(
        blocks,
        depth=depth,
        micro_batches=workload.training.micro_batches,
        head_s=float((compute.head_s + compute.pass_overhead_s).max()),
        head_again_s=float(compute.head_again_s(plan.dense_recompute).max()),
    )
    parts, hidden = dict(cost.parts_s), dict(cost.hidden_s)
    for op, seconds in shown.items():
        total = parts.get(op.value, 0.0) + hidden.get(op.value, 0.0)
        parts[op.value], hidden[op.value] = seconds, max(total - seconds, 0.0)
    return replace(cost, step_s=sum(parts.values()), parts_s=parts, hidden_s=hidden)
