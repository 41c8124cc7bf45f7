"""The planning problem between sites, as arrays over sites instead of ranks.

All ranks of a site are alike in what they send to other sites, so one serving table ``serve[d, e]`` and one choice for each
level inside decide a layer. At such a level either every worker holds what the worker above holds (``Inside.ALL``), or each
expert is with one (``Inside.ONE``, at its home's place).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import product

import numpy as np
from scipy.sparse import csr_array

from hybridep.arrays import FloatArray, IntArray
from hybridep.codecs import Codecs, Wire, level_codecs, wires
from hybridep.gating import gating
from hybridep.placement import LevelChoice, home_blocks
from hybridep.plan import Residency, Schedule
from hybridep.recompute import Recompute
from hybridep.shares import alike_ranks
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.compute import Compute, compute_of_sites
from planner.constraints import Constraints, Permissions, binding
from planner.exchange import window_s_per_byte
from planner.goal import FASTEST, Goal
from planner.sites.least_hit import least_hit


class Inside(Enum):
    """Who holds a worker's experts at the level below it."""

    ALL = "all"
    """Every worker: no token travels at this level, computation is even."""
    ONE = "one"
    """One worker each: least memory."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is chosen beside the serving table."""

    inside: tuple[Inside, ...]
    """Of each level below the sites, outermost first."""
    residency: Residency


@dataclass(frozen=True, kw_only=True, eq=False)
class SiteProblem:
    """Sites, their links and the work, as numbers."""

    cluster: Cluster
    workload: Workload
    schedule: Schedule
    up_bytes_per_s: FloatArray
    """[D]."""
    down_bytes_per_s: FloatArray
    """[D]."""
    pair_bytes_per_s: FloatArray | None
    """[D, D] from row to column, infinite on the diagonal; None where only access links limit."""
    latency_s: FloatArray
    """[D, D] one way, zero on the diagonal."""
    home: IntArray
    """[E] global ranks."""
    constraints: Constraints | None = None
    """Rules that plans keep."""
    goal: Goal = FASTEST
    codecs: tuple[Codecs, ...] = ()
    """Per level; exact ones where left out."""
    most_chunks: int = 1
    """Parts in which tokens may travel: bounds hold for any number up to this, or to the schedule's."""
    recompute: Recompute = Recompute.NOTHING
    """In all layers. Bounds hold for any."""
    least_hit: FloatArray | None = None
    """[E + 1], for bounds only: where a number of experts does not decide, the ``hit`` that holds for any n of them."""
    by_popularity: bool = False
    """For bounds only: experts are not equally popular."""

    @cached_property
    def num_sites(self) -> int:
        """D."""
        return self.cluster.sizes[0]

    @cached_property
    def num_inside(self) -> int:
        """n, ranks of one site."""
        return self.cluster.ranks_per_site

    @cached_property
    def num_experts(self) -> int:
        """E."""
        return self.workload.model.num_experts

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.workload.model.num_moe_layers

    @cached_property
    def permissions(self) -> Permissions | None:
        """What rules leave possible; None without rules that forbid anything. Raises InfeasibleError for rules that clash."""
        return binding(self.cluster, self.num_experts, self.constraints, self.home)

    @cached_property
    def home_site(self) -> IntArray:
        """[E]."""
        return self.home // self.num_inside

    @cached_property
    def home_inside(self) -> IntArray:
        """[E]: the home's place inside its site."""
        return self.home % self.num_inside

    @cached_property
    def experts_by_place(self) -> IntArray:
        """[E]: experts in the order of ``home_inside``."""
        return np.argsort(self.home_inside, kind="stable")

    @cached_property
    def at_home(self) -> IntArray:
        """[D, n]: how many experts live on each rank."""
        return np.bincount(self.home, minlength=self.cluster.num_gpus).reshape(self.num_sites, -1).astype(np.int64)

    @cached_property
    def homes(self) -> IntArray:
        """[D]: how many experts live at each site."""
        return np.bincount(self.home_site, minlength=self.num_sites).astype(np.int64)

    @cached_property
    def slower_bytes_per_s(self) -> FloatArray:
        """[D]: of each site's access links the rate of the slower one."""
        return np.minimum(self.up_bytes_per_s, self.down_bytes_per_s)

    @cached_property
    def fastest_first(self) -> IntArray:
        """[D]: sites by the slower of their links."""
        return np.argsort(-self.slower_bytes_per_s, kind="stable")

    @cached_property
    def inner_sizes(self) -> tuple[int, ...]:
        """Of the levels below the sites; n is their product."""
        return self.cluster.sizes[1:]

    @cached_property
    def inner_links(self) -> tuple[tuple[int, float], ...]:
        """Of the levels below the sites: (workers of one site, bytes per second of the up link, and of the down link, of each).
        Empty where the site is one rank: its link is the site's."""
        workers = np.cumprod(self.inner_sizes)
        return tuple((int(number), level.bandwidth) for number, level in zip(workers, self.cluster.levels[1:], strict=True))

    @cached_property
    def inside_bytes_per_s(self) -> float:
        """All that a site's workers of one level can send together, or receive: at the level where that is least."""
        return min((number * rate for number, rate in self.inner_links), default=float("inf"))

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """Bytes of payloads by level."""
        return wires(self.workload, self.codecs, len(self.cluster.sizes))

    @property
    def codecs_by_level(self) -> dict[str, Codecs]:
        """As plans give them: level name -> codecs, where they are not exact."""
        return {level.name: one for level, one in zip(self.cluster.levels, self.codecs, strict=False) if one.coded}

    @property
    def wire(self) -> Wire:
        """Bytes of payloads between sites."""
        return self.wires[0]

    @cached_property
    def egress_usd_per_byte(self) -> FloatArray | None:
        """[D, D] from row to column; None where bytes cost nothing."""
        return self.cluster.egress_usd_per_byte if self.cluster.has_egress_prices else None

    @cached_property
    def trunk_s_per_byte(self) -> csr_array:
        """[trunks, D x D]: seconds that a byte of each ordered pair of sites takes on each trunk."""
        rates = np.array([trunk.bandwidth for trunk in self.cluster.trunks])
        return csr_array(self.cluster.trunk_shares.multiply(1 / rates[:, None]))

    @cached_property
    def hit(self) -> FloatArray:
        """[E + 1]: probability that a token needs at least one of n experts; where it matters which, of n neighbouring ones."""
        if self.least_hit is not None:
            return self.least_hit
        chosen = gating(self.workload)
        if chosen.counts_decide:
            return chosen.hit_by_count
        return chosen.hit(np.tri(self.num_experts + 1, self.num_experts, -1, dtype=np.bool_))

    @cached_property
    def for_bounds(self) -> SiteProblem:
        """With the ``hit`` of any n experts, and as fast as nothing that computes again."""
        chosen, kept = gating(self.workload), self if not self.recompute else replace(self, recompute=Recompute.NOTHING)
        if chosen.counts_decide or self.least_hit is not None:
            return kept
        return replace(kept, least_hit=least_hit(chosen, np.arange(self.num_experts)))

    @cached_property
    def group_of(self) -> IntArray | None:
        """[E]: of which group of experts each is, where tokens choose from some of them only."""
        model = self.workload.model
        return np.arange(self.num_experts) // (self.num_experts // model.expert_groups) if model.limits_groups else None

    @cached_property
    def tokens(self) -> FloatArray:
        """[D]: of one rank in one micro-batch."""
        return self.compute.share[:, 0] * self.workload.training.tokens

    @cached_property
    def rows_per_choice(self) -> FloatArray:
        """[D]: rows that an expert computes for the tokens of one rank of each site: T K / E without a capacity."""
        return self.compute.share[:, 0] * (self.workload.training.micro_batch_size * float(gating(self.workload).rows[0]))

    @cached_property
    def window_s_per_byte(self) -> tuple[FloatArray, ...]:
        """``planner.exchange.window_s_per_byte`` by level."""
        levels = range(len(self.cluster.levels))
        return tuple(window_s_per_byte(self.cluster, level, self.schedule.streams) for level in levels)

    @cached_property
    def path_bytes_per_s(self) -> FloatArray | None:
        """[D, D]: no more goes from site to site, by the link of the pair and the windows of all ranks; None where there are no
        links per pair."""
        if self.pair_bytes_per_s is None or not self.window_s_per_byte[0].any():
            return self.pair_bytes_per_s
        with np.errstate(divide="ignore"):
            return np.minimum(self.pair_bytes_per_s, self.num_inside / self.window_s_per_byte[0])

    @cached_property
    def alike_paths(self) -> bool:
        """All pairs of sites are joined alike: what one sends to another meets its own and the other's access link only."""
        return self.pair_bytes_per_s is None and self.one_latency_s is not None

    @cached_property
    def equal_sites(self) -> bool:
        """All have the same links, GPUs and shares of the batch."""
        access = np.ptp(self.up_bytes_per_s) == 0 and np.ptp(self.down_bytes_per_s) == 0
        alike = access and alike_ranks(self.cluster, self.workload)
        return bool(alike and self.pair_bytes_per_s is None and not self.cluster.trunks)

    @cached_property
    def one_latency_s(self) -> float | None:
        """Between any two sites; None where pairs have latencies of their own."""
        return None if self.cluster.links else self.cluster.levels[0].latency

    @cached_property
    def median_latency_s(self) -> float:
        """Between sites."""
        return float(np.median(self.latency_s)) if self.one_latency_s is None else self.one_latency_s

    @cached_property
    def beside_s(self) -> float:
        """What a gather can hide under in forward."""
        return self.block_s if self.schedule.overlap else 0.0

    @cached_property
    def beside_backward_s(self) -> float:
        """And a return in backward; for bounds twice ``beside_s``."""
        return self.block_backward_s if self.schedule.overlap else 0.0

    @cached_property
    def block_s(self) -> float:
        """Forward of one layer and micro-batch on the slowest rank, without routed experts."""
        return float(self.compute.others_s.max())

    @cached_property
    def block_backward_s(self) -> float:
        """Backward of the same."""
        return float((2 * self.compute.others_s + self.compute.again_s(self.recompute)).max())

    @property
    def in_parts(self) -> bool:
        """Tokens may travel in parts: then their exchanges may hide what experts compute."""
        return max(self.most_chunks, self.schedule.chunks) > 1

    @cached_property
    def expert_s_per_choice(self) -> FloatArray:
        """[D]: seconds one rank of a site computes at least for each of n experts that it serves for any rank's tokens, forward.
        For bounds, so what ranks that share processors wait for each other is left out, and so is all that may be hidden."""
        if self.in_parts or self.by_popularity:
            return np.zeros(self.num_sites)
        return float(self.rows_per_choice.min()) * self.compute.expert_s_per_row[:, 0] / self.compute.sharing

    @cached_property
    def least_expert_s(self) -> float:
        """``computed_s``, or nothing where that may be hidden."""
        return 0.0 if self.in_parts else self.computed_s

    @cached_property
    def computed_s(self) -> float:
        """Seconds the last rank computes at least, forward, whoever serves what: all would be done at once. With a capacity,
        popular experts drop more, so nothing where experts are not equally popular."""
        if self.by_popularity and gating(self.workload).capacity is not None:
            return 0.0
        rates = self.compute.sharing / self.compute.expert_s_per_row
        return self.num_experts * float(self.rows_per_choice.sum() / rates.sum())

    @cached_property
    def compute(self) -> Compute:
        """Of ranks, [D, 1]."""
        return compute_of_sites(self.cluster, self.workload)

    def choices(self, inside: tuple[Inside, ...]) -> dict[str, LevelChoice]:
        """Of the levels below the sites, as plans give them."""
        return {
            level.name: LevelChoice(domain_size=level.size if one is Inside.ALL else 1)
            for level, one in zip(self.cluster.levels[1:], inside, strict=True)
        }

    def everywhere(self, inside: Inside) -> tuple[Inside, ...]:
        """The same choice at all levels below the sites; ``Inside`` matters only where a level has more than one worker."""
        return tuple(inside if size > 1 else Inside.ALL for size in self.inner_sizes)

    @property
    def residencies(self) -> tuple[Residency, ...]:
        """Of copies: where changes are coded, those that stay."""
        return (Residency.STEP,) if any(one.experts.is_change for one in self.codecs) else tuple(Residency)

    def configurations(self) -> tuple[Configuration, ...]:
        """All of them."""
        inside = tuple(product(*(tuple(Inside) if size > 1 else (Inside.ALL,) for size in self.inner_sizes)))
        return tuple(Configuration(inside=one, residency=residency) for residency in self.residencies for one in inside)


def site_problem(
    cluster: Cluster,
    workload: Workload,
    schedule: Schedule | None = None,
    constraints: Constraints | None = None,
    *,
    goal: Goal = FASTEST,
    codecs: Mapping[str, Codecs] | None = None,
    most_chunks: int = 1,
    recompute: Recompute = Recompute.NOTHING,
    home: IntArray | None = None,
) -> SiteProblem:
    """``home``: [E] ranks, in their order, in place of the cluster's own. Raises InfeasibleError for rules that clash."""
    up, down = cluster.access_bytes_per_s
    made = SiteProblem(
        cluster=cluster,
        workload=workload,
        schedule=schedule or Schedule(),
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        pair_bytes_per_s=cluster.pair_bytes_per_s,
        latency_s=cluster.site_latency_s,
        home=home_blocks(cluster, workload.model.num_experts) if home is None else home,
        constraints=constraints,
        goal=goal,
        codecs=level_codecs([level.name for level in cluster.levels], codecs or {}),
        most_chunks=most_chunks,
        recompute=recompute,
    )
    _ = made.permissions
    return made
