"""What is counted inside sites at least: never more than a plan spends there, all of it for some plans, and mistakes are found
out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from site_cases import box_of, random_problem, random_table

from hybridep.config import build
from hybridep.topology import Cluster
from planner.sites import inside
from planner.sites.boxes import Box
from planner.sites.cost import site_cost
from planner.sites.problem import Configuration, SiteProblem, site_problem
from planner.sites.relaxation import Limits, Relaxation

NODES = ((), (2,), (3,), (2, 2))
SEEDS = range(40)


def slow_inside(seed: int) -> SiteProblem:
    """Links inside sites that are as slow as those between them, some slower, some faster."""
    rng = np.random.default_rng(seed)
    shape = {"sites": int(rng.integers(2, 6)), "experts": int(rng.integers(2, 24)), "inside": int(rng.integers(1, 4))}
    problem = random_problem(seed, **shape, nodes=NODES[seed % len(NODES)])
    levels = [level.model_dump(mode="json") for level in problem.cluster.levels]
    for level in levels[1:]:
        level |= {"bandwidth": f"{10 ** rng.uniform(0, 4):.3f} Mbps", "latency": f"{10 ** rng.uniform(-2, 1):.3f} ms"}
    data = problem.cluster.model_dump(mode="json", exclude_none=True) | {"levels": levels}
    return site_problem(build(Cluster, data, "test"), problem.workload, problem.schedule)


@cache
def plans_of(seed: int) -> tuple[tuple[SiteProblem, Configuration, Box, float], ...]:
    """(problem, configuration, smallest box, step's seconds) of some tables in every configuration."""
    problem = slow_inside(seed)
    relaxation, rng = Relaxation(problem=problem), np.random.default_rng(seed)
    anything, own = random_table(rng, problem), np.arange(problem.num_sites)[:, None]
    some = np.where(rng.random(anything.shape) < 0.3, problem.home_site, own)
    tables = (anything, problem.home_site + 0 * anything, some, own + 0 * anything)
    return tuple(
        (problem, one, box_of(relaxation, table, one), site_cost(problem, table, one).step_s)
        for table, one in product(tables, problem.configurations())
    )


def shares() -> Iterator[tuple[Configuration, float, float]]:
    """(configuration, what a box's lower ends prove of the step, the same without what is spent inside) of each plan."""
    for seed in SEEDS:
        for problem, configuration, box, step_s in plans_of(seed):
            relaxation = Relaxation(problem=problem)
            if relaxation.inside_times:
                layer_s, inside_s = relaxation.corner_s(box), relaxation.inside_s(box)
                proven = (relaxation.base_s + relaxation.num_layers * np.array([layer_s, layer_s - inside_s])) / step_s
                yield configuration, float(proven[0]), float(proven[1])


@pytest.mark.turns(4)
def test_no_plan_spends_less_inside_and_some_no_more() -> None:
    best: dict[str, float] = {}
    gained = 0.0
    for configuration, proven, alone in shares():
        assert alone <= proven <= 1 + 1e-9
        name = ", ".join(one.value for one in configuration.inside)
        best[name] = max(best.get(name, 0.0), proven)
        gained = max(gained, proven - alone)
    assert len(best) == 2 + 4 + 8
    assert min(best.values()) > 0.8 and gained > 0.5, best


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the fullest place has more": lambda patch: _scaled(patch, "_fullest", 1.3),
    "more rows of a token": lambda patch: _scaled(patch, "_fewest_rows", 1.3),
    "own tokens find all at home": lambda patch: _limits(patch, "least_own", 99),
    "sites hold more": lambda patch: _limits(patch, "least_held", 2),
    "the choice that takes most": lambda patch: patch.setattr(
        inside, "inside_times", lambda problem: tuple(_times(problem)[-1:])
    ),
}


def _times(problem: SiteProblem) -> list[Any]:
    return sorted(
        (inside._of_choice(problem, one) for one in dict.fromkeys(each.inside for each in problem.configurations())),
        key=lambda one: float(one.gather_s[-1] + one.token_s[-1]),
    )


def _limits(patch: pytest.MonkeyPatch, name: str, more: float) -> None:
    right = Relaxation.limits

    def wrong(self: Relaxation, box: Box) -> Limits:
        found = right(self, box)
        return replace(found, **{name: getattr(found, name) + more})

    patch.setattr(Relaxation, "limits", wrong)


def _scaled(patch: pytest.MonkeyPatch, name: str, factor: float) -> None:
    right = getattr(inside, name)
    patch.setattr(inside, name, lambda *args: factor * right(*args))


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name](monkeypatch)
    monkeypatch.setattr("planner.sites.relaxation.inside_times", inside.inside_times)
    assert any(proven > 1 + 1e-6 for _, proven, _ in shares())
