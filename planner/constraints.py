"""Rules that a plan must keep, as a file gives them, and the smallest set of rules that no plan can keep together.

All rules come down to two tables: which site may compute for tokens of which site, and which site may hold which expert.
They speak of tokens and copies; the dense gradients' all-reduce joins all sites whatever the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from glob import escape
from itertools import combinations
from pathlib import Path

import numpy as np
from pydantic import Field, model_validator

from hybridep.arrays import BoolArray, IntArray
from hybridep.config import Strict, load
from hybridep.errors import InfeasibleError, PlacementError, UserError
from hybridep.placement import home_blocks
from hybridep.plan import Plan
from hybridep.serving import parse_experts
from hybridep.sites import is_called
from hybridep.topology import Cluster

MOST_RULES = 16
"""Up to so many rules, clashes are searched through all sets; with more, rules are left out one by one."""


class Kind(Enum):
    """What a rule demands."""

    PIN = "pin"
    """Only these sites compute these experts."""
    FORBID = "forbid"
    """These sites neither compute nor hold copies of these experts; their own experts they may own but not compute."""
    KEEP_TOKENS = "keep_tokens"
    """Tokens of these sites are computed at these sites only (data stays in a jurisdiction)."""
    NO_LINK = "no_link"
    """No token and no copy goes from these sites to those. Results and gradients come back the way their tokens and copies
    went, so none may come from there either."""


class Rule(Strict):
    """One demand."""

    name: str
    kind: Kind
    sites: tuple[str, ...] = Field(min_length=1)
    """Names, or patterns such as ``eu-*``; that of a site with pods means all of them."""
    to: tuple[str, ...] = ()
    """The other sites of ``no_link``; all others when absent."""
    experts: str = ""
    """Of ``pin`` and ``forbid``, as in ``0-3,8``; all when absent."""

    @model_validator(mode="after")
    def _consistent(self) -> Rule:
        if self.to and self.kind is not Kind.NO_LINK:
            raise ValueError(f"rule {self.name}: 'to' belongs to no_link, not to {self.kind.value}")
        if self.experts and self.kind not in (Kind.PIN, Kind.FORBID):
            raise ValueError(f"rule {self.name}: 'experts' belongs to pin and forbid, not to {self.kind.value}")
        return self


class Constraints(Strict):
    """A constraints file."""

    rules: tuple[Rule, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Constraints:
        names = [rule.name for rule in self.rules]
        if len(set(names)) != len(names):
            raise ValueError(f"rules: names repeat: {names}")
        return self


def load_constraints(path: Path) -> Constraints:
    """Raises ConfigError with file, line and key."""
    return load(Constraints, path)


@dataclass(frozen=True, kw_only=True, eq=False)
class Permissions:
    """What rules leave possible on one cluster."""

    serve: BoolArray
    """[D, D]: the row's tokens may be computed at the column's site."""
    hold: BoolArray
    """[D, E]: the site may compute the expert."""
    copy: BoolArray
    """[D, D]: the row's site may have copies from homes at the column's."""

    @cached_property
    def fallback(self) -> IntArray:
        """[D, E]: some permitted holder: the site itself where it may be, else the first; -1 where there is none."""
        own = np.arange(len(self.serve))[:, None]
        found = np.full(self.hold.shape, -1, dtype=np.int64)
        for holder in reversed(range(len(self.serve))):
            found[self.serve[:, holder, None] & self.hold[holder]] = holder
        return np.where(np.diagonal(self.serve)[:, None] & self.hold, own, found)

    @property
    def forbid_nothing(self) -> bool:
        """Every plan keeps the rules."""
        return bool(self.serve.all() and self.hold.all())

    @property
    def possible(self) -> bool:
        """Every site may have every expert computed somewhere."""
        return bool((self.serve.astype(np.float32) @ self.hold.astype(np.float32)).all())

    def keeps(self, table: IntArray) -> bool:
        """Whether a serving table ([D, E]) obeys."""
        experts = np.arange(table.shape[1])
        own = np.arange(len(table))[:, None]
        return bool((self.serve[own, table] & self.hold[table, experts]).all())

    def repaired(self, table: IntArray, home_site: IntArray) -> IntArray:
        """The table with every entry that breaks a rule moved to the expert's home where that is permitted, else to
        ``fallback``."""
        experts = np.arange(table.shape[1])
        own = np.arange(len(table))[:, None]
        good = self.serve[own, table] & self.hold[table, experts]
        if good.all():
            return table
        at_home = self.serve[:, home_site] & self.hold[home_site, experts]
        return np.where(good, table, np.where(at_home, home_site[None, :], self.fallback))


def permissions(cluster: Cluster, num_experts: int, rules: tuple[Rule, ...], home: IntArray | None = None) -> Permissions:
    """Of these rules together, where experts live where the cluster has them or at ``home`` ([E] ranks). Raises UserError for a
    site that no rule can mean and PlacementError for experts."""
    size = cluster.sizes[0]
    home = home_blocks(cluster, num_experts) if home is None else home
    serve, copy = np.ones((size, size), dtype=np.bool_), np.ones((size, size), dtype=np.bool_)
    hold = np.ones((size, num_experts), dtype=np.bool_)
    for rule in rules:
        chosen, others = rule_masks(cluster, rule)
        if rule.kind is Kind.KEEP_TOKENS:
            serve[np.ix_(chosen, ~chosen)] = False
        elif rule.kind is Kind.NO_LINK:
            if not others.any():
                raise UserError(f"rule {rule.name}: no_link from all sites to all others keeps none apart; say where 'to'")
            joined = (chosen[:, None] & others[None, :]) | (others[:, None] & chosen[None, :])
            np.fill_diagonal(joined, False)
            serve &= ~joined
            copy &= ~joined
        else:
            try:
                experts = parse_experts(rule.experts, num_experts) if rule.experts else np.arange(num_experts)
            except PlacementError as error:
                raise PlacementError(f"rule {rule.name}: {error}") from None
            barred = ~chosen if rule.kind is Kind.PIN else chosen
            hold[np.ix_(np.flatnonzero(barred), experts)] = False
    return Permissions(serve=serve, hold=hold & copy[:, home // cluster.ranks_per_site], copy=copy)


def require_possible(cluster: Cluster, num_experts: int, constraints: Constraints, home: IntArray | None = None) -> Permissions:
    """Raises InfeasibleError that names the smallest set of rules which no plan can keep together. ``home``: see
    ``permissions``."""
    found = permissions(cluster, num_experts, constraints.rules, home)
    if found.possible:
        return found
    clash = smallest_clash(cluster, num_experts, constraints.rules, home)
    blocked = permissions(cluster, num_experts, clash, home).fallback < 0
    site, expert = (int(x) for x in np.argwhere(blocked)[0])
    rules = " and ".join(repr(rule.name) for rule in clash)
    several = f"rules {rules} clash" if len(clash) > 1 else f"rule {rules} cannot be kept"
    raise InfeasibleError(
        f"{several}: expert {expert} can be computed nowhere for tokens of {cluster.site_name(site)}"
        f"{'; every smaller set of them can be kept' if len(clash) > 1 else ''}"
    )


def binding(
    cluster: Cluster, num_experts: int, constraints: Constraints | None, home: IntArray | None = None
) -> Permissions | None:
    """As ``require_possible``; None where every plan keeps the rules, or there are none."""
    found = require_possible(cluster, num_experts, constraints, home) if constraints is not None else None
    return None if found is None or found.forbid_nothing else found


def keeps(plan: Plan, constraints: Constraints | None) -> bool:
    """Whether a plan keeps the rules, with experts where it has them."""
    rules, experts = () if constraints is None else constraints.rules, plan.workload.model.num_experts
    return not rules or all(permissions(plan.cluster, experts, rules, one.home).keeps(one.serve[0]) for one in plan.placements)


def smallest_clash(cluster: Cluster, num_experts: int, rules: tuple[Rule, ...], home: IntArray | None = None) -> tuple[Rule, ...]:
    """The first smallest set of rules that leaves some expert without a holder for some site; with more than ``MOST_RULES``
    rules a set from which none can be left out. The rules together must clash."""
    if len(rules) > MOST_RULES:
        kept = rules
        for rule in rules:
            without = tuple(other for other in kept if other is not rule)
            if not permissions(cluster, num_experts, without, home).possible:
                kept = without
        return kept
    for count in range(1, len(rules) + 1):
        for chosen in combinations(rules, count):
            if not permissions(cluster, num_experts, chosen, home).possible:
                return chosen
    raise ValueError("these rules do not clash")


def constraints_among(cluster: Cluster, constraints: Constraints, names: Sequence[str]) -> Constraints:
    """The rules of a cluster among those of its sites that have these names, where the others take no part. Raises UserError for
    a site that no rule can mean."""
    sites = [cluster.site_names.index(name) for name in names]
    masks = [rule_masks(cluster, rule) for rule in constraints.rules]
    return Constraints(rules=narrowed(constraints.rules, masks, sites, names))


def narrowed(
    rules: Sequence[Rule], masks: Sequence[tuple[BoolArray, BoolArray]], sites: Sequence[int], names: Sequence[str]
) -> tuple[Rule, ...]:
    """What rules, with the sites that each means (``rule_masks``), demand among these sites alone, which have these names."""
    made = []
    for rule, both in zip(rules, masks, strict=True):
        chosen, others = (tuple(escape(name) for name, yes in zip(names, mask[list(sites)], strict=True) if yes) for mask in both)
        if rule.kind is Kind.PIN and not chosen:
            # Nobody here may compute what is pinned elsewhere.
            made.append(rule.model_copy(update={"kind": Kind.FORBID, "sites": tuple(escape(name) for name in names)}))
        elif chosen and rule.kind is Kind.NO_LINK:
            made += [rule.model_copy(update={"sites": chosen, "to": others})] * bool(others)
        elif chosen:
            made.append(rule.model_copy(update={"sites": chosen}))
    return tuple(made)


def rule_masks(cluster: Cluster, rule: Rule) -> tuple[BoolArray, BoolArray]:
    """[D] each: the rule's sites, and the other ones of ``no_link``."""
    chosen = rule_sites(cluster, rule, rule.sites)
    return chosen, rule_sites(cluster, rule, rule.to) if rule.to else ~chosen


def rule_sites(cluster: Cluster, rule: Rule, patterns: tuple[str, ...]) -> BoolArray:
    """[D]: the sites that any of the rule's patterns names. Raises UserError for one that names none."""
    labels = [cluster.site_labels(dc) for dc in range(cluster.sizes[0])]
    chosen = np.zeros(len(labels), dtype=np.bool_)
    for pattern in patterns:
        matching = [any(is_called(label, pattern) for label in each) for each in labels]
        if not any(matching):
            shown = ", ".join(each[0] for each in labels[:8]) + (" ..." if len(labels) > 8 else "")
            raise UserError(f"rule {rule.name}: no site is called {pattern!r}; there are {shown}")
        chosen |= np.array(matching)
    return chosen
