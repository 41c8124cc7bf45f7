"""What a search makes small: the step's time, its price, or its time among plans that cost no more than a budget."""

from __future__ import annotations

from dataclasses import dataclass

from hybridep.errors import UserError
from hybridep.plan import Objective, Plan
from hybridep.topology import Cluster
from hybridep.units import format_dollars

WITHIN = 1e-5
"""Share by which a plan may overstep a budget: above the solvers' tolerances, so that what they find feasible is."""


Worth = tuple[float, float]
"""By what share a step is over the budget, and its seconds or dollars: the smaller the better."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Of two plans the one of smaller ``value`` is better, if it is within the budget."""

    objective: Objective = Objective.TIME
    budget_usd: float | None = None
    """Per step."""

    @property
    def needs_prices(self) -> bool:
        """Anything beside the step's time counts."""
        return self.objective is Objective.DOLLARS or self.budget_usd is not None

    def value(self, step_s: float, step_usd: float) -> float:
        """Seconds or dollars."""
        return step_usd if self.objective is Objective.DOLLARS else step_s

    def overdraft(self, step_usd: float) -> float:
        """By what share of the budget a step costs too much; zero within it."""
        if self.budget_usd is None or step_usd <= self.budget_usd * (1 + WITHIN):
            return 0.0
        return (step_usd - self.budget_usd) / max(self.budget_usd, 1e-300)

    def worth(self, step_s: float, step_usd: float) -> Worth:
        """Both of a step."""
        return self.overdraft(step_usd), self.value(step_s, step_usd)

    def value_of(self, plan: Plan) -> float:
        """Of its step, as predicted."""
        return self.value(plan.predicted.step, plan.predicted.cost_usd)

    def require_prices(self, cluster: Cluster) -> None:
        """Raises UserError where a cluster has none, or where a plan would be both the cheapest and within a budget."""
        if self.objective is Objective.DOLLARS and self.budget_usd is not None:
            raise UserError("the cheapest plan needs no budget; leave one of --objective dollars and --budget out")
        if self.budget_usd is not None and self.budget_usd <= 0:
            raise UserError(f"a budget of {format_dollars(self.budget_usd)} per step allows nothing; give more")
        if self.needs_prices and not cluster.has_prices:
            raise UserError(
                f"cluster {cluster.name}: nothing has a price; give levels.0.egress (or that of a site or a link), such as "
                "'0.02 $/GB', or gpu.price, such as '2.50 $/h'"
            )


FASTEST = Goal()
