"""Scenarios: what to simulate, under which conditions, and over which grid of variations; one YAML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from hybridep.config import Strict, apply_override, build, key_lines, read_yaml
from hybridep.errors import ConfigError
from simulator.conditions import Conditions
from simulator.many_steps import Course
from simulator.network import EXACT
from simulator.precision import Precision

_PARTS = ("cluster.", "workload.")


class Scenario(Strict):
    """One thing to simulate, or a grid of them."""

    plan: str = "auto"
    """`auto` (planned now), `stages` (planned now, as a pipeline), a baseline's name, or the path of a plan file, with stages or
    without, which then brings cluster and workload along."""
    cluster: str | None = None
    workload: str | None = None
    overrides: tuple[str, ...] = ()
    """As after ``--set``: ``cluster.levels.dc.bandwidth=1 Gbps``."""
    planning_time: float = Field(default=60.0, gt=0)
    """Seconds that the planner may take, each time."""
    against: tuple[str, ...] = ()
    """Baselines, and schedules of other systems, to simulate too (one step each)."""
    routing: str = "uniform"
    """`uniform`, `zipf:1.2`, or the path of a record of a real run's choices."""
    drift: float = Field(default=0.0, ge=0, le=1)
    """How far the order of popularity moves per step under Zipf's law."""
    seed: int = 0
    fabric: str | None = None
    """A shipped fabric's name or a file: what joins the sites, and the machines inside each."""
    conditions: Conditions = Conditions()
    course: Course = Course()
    tolerance: float = Field(default=EXACT, ge=EXACT, lt=0.1)
    """Share of its bytes by which a transfer may differ, for speed."""
    one_rank_per_site: bool = False
    """Take the ranks of a site for alike, for speed."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Key of this file, or ``cluster.<key>`` and ``workload.<key>`` of these, -> values; every combination is a point."""

    @property
    def precision(self) -> Precision:
        """How exactly to simulate."""
        return Precision(tolerance=self.tolerance, one_rank_per_site=self.one_rank_per_site)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key}: needs at least one value")
            if key.split(".")[0] == "grid":
                raise ValueError("grid: cannot vary itself")
        return self


Point = dict[str, Any]
"""Key -> value of one combination of a grid."""


def points(path: Path, overrides: tuple[str, ...] = ()) -> Iterator[tuple[Point, Scenario]]:
    """Every combination of a scenario file's grid, and its scenario; one without a grid.

    Raises ConfigError for a bad file, and for a bad value with the point at which it is.
    """
    data = read_yaml(path)
    for override in overrides:
        apply_override(data, override)
    whole = build(Scenario, data, str(path), key_lines(path))
    for values in product(*whole.grid.values()):
        point = dict(zip(whole.grid, values, strict=True))
        yield point, _at(point, data, str(path))


def _at(point: Point, data: Mapping[str, Any], where: str) -> Scenario:
    mine = json.loads(json.dumps({key: value for key, value in data.items() if key != "grid"}))
    for key, value in point.items():
        if key.startswith(_PARTS):
            mine.setdefault("overrides", []).append(f"{key}={json.dumps(value)}")
        else:
            apply_override(mine, f"{key}={json.dumps(value)}")
    try:
        return build(Scenario, mine, where)
    except ConfigError as error:
        at = ", ".join(f"{key}={value}" for key, value in point.items())
        raise ConfigError(f"{where} ({at})" if at else where, error.key, error.problem) from None
