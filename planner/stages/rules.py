"""Rules that pipelines keep: between the sites of each stage as without stages, and along the ways between stages. And sites at
which no experts live are no stage by themselves.

Every stage computes all tokens, so no pipeline can keep some sites' tokens there; a link that neither tokens nor copies may cross
carries no activations either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hybridep.arrays import BoolArray
from hybridep.errors import InfeasibleError
from hybridep.pipeline import PipelinePlan
from hybridep.plan import LayerGroup
from hybridep.serving import serving_groups
from hybridep.topology import Cluster, by_themselves
from planner.constraints import Constraints, Kind, Permissions, narrowed, permissions, require_possible, rule_masks
from planner.sites.grouping import Groups

_MOST_TRIES = 2000
"""Sites that change stages to make one possible, for each one that does."""


class StageRules:
    """Rules over a cluster, told to each stage in terms of its own sites."""

    def __init__(self, cluster: Cluster, num_experts: int, constraints: Constraints | None) -> None:
        """Raises InfeasibleError for rules that no stages can keep, and what ``planner.constraints`` raises."""
        self.cluster, self.num_experts = cluster, num_experts
        self._rules = constraints.rules if constraints is not None else ()
        self._sites = [rule_masks(cluster, rule) for rule in self._rules]
        size, self._homes = cluster.sizes[0], cluster.home_weights
        self.apart: BoolArray = np.zeros((size, size), dtype=np.bool_)
        """[D, D]: no activations may pass between them."""
        for rule, (chosen, others) in zip(self._rules, self._sites, strict=True):
            if rule.kind is Kind.KEEP_TOKENS and not chosen.all():
                raise InfeasibleError(
                    f"rule {rule.name!r} cannot be kept in stages: it keeps tokens of some sites there, and every stage computes "
                    "all tokens; leave out --stages or the rule"
                )
            if rule.kind is Kind.NO_LINK:
                self.apart |= chosen[:, None] & others[None, :] | others[:, None] & chosen[None, :]
        np.fill_diagonal(self.apart, False)
        self._number = {name: site for site, name in enumerate(cluster.site_names)}
        self._known: dict[tuple[int, ...], tuple[Constraints | None, Permissions | None]] = {}
        if self._rules:
            # Names and numbers of experts are read here, whatever stages there will be.
            permissions(cluster, num_experts, self._rules)

    @property
    def of_links(self) -> list[str]:
        """Names of rules that keep sites apart."""
        return [rule.name for rule in self._rules if rule.kind is Kind.NO_LINK]

    def inside(self, stage: Cluster) -> Constraints | None:
        """The rules among a stage's sites by themselves; None where they bar nothing there."""
        return self._of(self._places(stage))[0]

    def permitted(self, stage: Cluster) -> Permissions | None:
        """What the rules leave possible among a stage's sites; None where they bar nothing."""
        return self._of(self._places(stage))[1]

    def among(self, stage: Cluster) -> str:
        """A text that is equal for stages of as many sites exactly where the rules permit the same in both."""
        allowed = self.permitted(stage)
        return "" if allowed is None else f"{allowed.serve.tobytes()!r} {allowed.hold.tobytes()!r}"

    def possible(self, group: Sequence[int]) -> bool:
        """Whether the rules let these sites be a stage."""
        return self._lack(group) == 0

    def why_not(self, group: Sequence[int]) -> str:
        """What says why these sites may not be a stage. Raises ValueError where they may."""
        names = [self.cluster.site_name(site) for site in sorted(group)]
        if not self._homes[list(group)].any():
            return f"no experts live at {', '.join(names)} (sites.*.experts), which would be a stage"
        rules = self._of(group)[0]
        assert rules is not None
        try:
            require_possible(by_themselves(self.cluster, names), self.num_experts, rules)
        except InfeasibleError as error:
            return f"in a stage of {', '.join(names)}, {error}"
        raise ValueError("these sites may be a stage")

    def mended(self, groups: Groups) -> Groups | None:
        """The groups with as few sites as need be in others, so that each may be a stage; None where that is not found."""
        lacks = [self._lack(group) for group in groups]
        tries = 0
        while any(lacks):
            place = int(np.argmax(np.array(lacks) > 0))
            for other, group, rest in _changes(groups, place):
                tries += 1
                both = self._lack(group), self._lack(rest)
                if sum(both) < lacks[place] + lacks[other]:
                    made = list(groups)
                    made[place], made[other] = group, rest
                    groups, (lacks[place], lacks[other]), tries = tuple(made), both, 0
                    break
                if tries > _MOST_TRIES:
                    return None
            else:
                return None
        return groups

    def passes(self, plan: PipelinePlan) -> bool:
        """Whether no activations pass between sites that are kept apart."""
        if not self.apart.any():
            return True
        inside = self.cluster.ranks_per_site
        every = [plan.ways(stage) for stage in range(len(plan.stages) - 1)]
        return not any(self.apart[ways.source // inside, ways.destination // inside].any() for ways in every)

    def kept(self, plan: PipelinePlan) -> bool:
        """Whether a pipeline, of any origin, keeps the rules inside its stages and between them."""
        if not self._rules:
            return True
        for stage in plan.plans:
            allowed = self.permitted(stage.cluster)
            if allowed is not None and not all(allowed.keeps(one.serve[0]) for one in stage.placements):
                return False
        return self.passes(plan)

    def _lack(self, group: Sequence[int]) -> int:
        """Experts that can be computed nowhere, counted for each site of the stage; all of them where none live."""
        if not self._homes[list(group)].any():
            return self.num_experts
        allowed = self._of(group)[1]
        return 0 if allowed is None else int((allowed.fallback < 0).sum())

    def _places(self, stage: Cluster) -> list[int]:
        return [self._number[name] for name in stage.site_names] if self._rules else []

    def _of(self, group: Iterable[int]) -> tuple[Constraints | None, Permissions | None]:
        if not self._rules:
            return None, None
        sites = tuple(sorted(group))
        if sites not in self._known:
            self._known[sites] = self._restricted(sites)
        return self._known[sites]

    def _restricted(self, sites: tuple[int, ...]) -> tuple[Constraints | None, Permissions | None]:
        names = [self.cluster.site_name(site) for site in sites]
        rules = narrowed(self._rules, self._sites, sites, names)
        if not rules:
            return None, None
        allowed = permissions(by_themselves(self.cluster, names), self.num_experts, rules)
        return (None, None) if allowed.forbid_nothing else (Constraints(rules=rules), allowed)


def permitted_group(group: LayerGroup, cluster: Cluster, num_experts: int, allowed: Permissions) -> LayerGroup:
    """The placement with every expert that breaks a rule at its home, or else where it may be."""
    placement = group.placement(cluster, num_experts)
    table = allowed.repaired(placement.serve[0], placement.home // cluster.ranks_per_site)
    if table is placement.serve[0]:
        return group
    outer = cluster.levels[0].name
    domains, migration = ({name: one for name, one in of.items() if name != outer} for of in (group.domains, group.migration))
    return group.model_copy(update={"domains": domains, "migration": migration, "serving": serving_groups(cluster, table)})


def _changes(groups: Groups, place: int) -> Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(other stage, this stage's sites, the other's): pairs of sites that change places, then sites that come or go."""
    mine = groups[place]
    for other, theirs in enumerate(groups):
        if other != place:
            for site in theirs:
                for own in mine:
                    yield other, _with(mine, site, own), _with(theirs, own, site)
    for other, theirs in enumerate(groups):
        if other != place:
            if len(theirs) > 1:
                for site in theirs:
                    yield other, _with(mine, site), _with(theirs, without=site)
            if len(mine) > 1:
                for own in mine:
                    yield other, _with(mine, without=own), _with(theirs, own)


def _with(group: Sequence[int], site: int | None = None, without: int | None = None) -> tuple[int, ...]:
    return tuple(sorted({*group, *(() if site is None else (site,))} - ({without} if without is not None else set())))
