"""Scenarios: what to simulate, under which conditions, and over which grid of variations; one YAML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from hybridep.baselines import Baseline
from hybridep.config import Strict, apply_override, apply_overrides, build, read_yaml
from hybridep.errors import ConfigError, UserError
from hybridep.units import format_seconds
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
    seed: int = Field(default=0, ge=0)
    fabric: str | None = None
    """A shipped fabric's name or a file: what joins the sites, and the machines inside each."""
    conditions: Conditions = Conditions()
    course: Course = Course()
    tolerance: float = Field(default=EXACT, ge=0, lt=0.1)
    """Share of its bytes by which a transfer may differ, for speed; 0 for exact."""
    one_rank_per_site: bool = False
    """Take the ranks of a site for alike, for speed."""
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Key of this file, or ``cluster.<key>`` and ``workload.<key>`` of these, -> values; every combination is a point."""

    @property
    def precision(self) -> Precision:
        """How exactly to simulate."""
        return Precision(tolerance=max(self.tolerance, EXACT), one_rank_per_site=self.one_rank_per_site)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key}: needs at least one value")
            for place, value in enumerate(values):
                # By what they say: 1 and true are equal in Python.
                if repr(value) in map(repr, values[:place]):
                    raise ValueError(f"grid.{key}: has {value!r} twice; leave one of them out")
            if key.split(".")[0] == "grid":
                raise ValueError("grid: cannot vary itself")
        return self

    @property
    def idle(self) -> dict[str, str]:
        """Key -> why, of keys that do nothing beside the others; limits aside, which need not be reached."""
        course, conditions, found = self.course, self.conditions, dict[str, str]()
        drawn = self.routing.startswith("zipf:")
        if self.drift and not drawn:
            found["drift"] = f"{self.drift} moves what routing: zipf:<exponent> draws, and routing is {self.routing}"
        elif self.drift and course.steps == 1:
            found["drift"] = f"{self.drift} moves popularity from step to step, and course.steps is 1"
        if self.seed and not drawn:
            found["seed"] = (
                f"{self.seed} draws what tokens choose with routing: zipf:<exponent>, and routing is {self.routing}; jitter has "
                "conditions.seed"
            )
        if conditions.seed and not (conditions.jitter or conditions.compute_jitter):
            found["conditions.seed"] = f"{conditions.seed} draws jitter and compute_jitter, and there is neither"
        if course.restart and not course.losses:
            found["course.restart"] = f"{format_seconds(course.restart)} follows a loss, and there are no course.losses"
        if course.switch and not course.replan_every:
            found["course.switch"] = f"{format_seconds(course.switch)} is the price of a new plan, and there is no replan_every"
        if course.replan_every and self.plan in {one.value for one in Baseline}:
            found["course.replan_every"] = f"plan: {self.plan} stays as it is whatever links carry; give plan: auto or stages"
        elif course.replan_every >= course.steps:
            found["course.replan_every"] = f"{course.replan_every} steps from look to look, and course.steps is {course.steps}"
        return found


Point = dict[str, Any]
"""Key -> value of one combination of a grid."""


def points(
    path: Path, overrides: tuple[str, ...] = (), given: Mapping[str, Any] | None = None
) -> Iterator[tuple[Point, Scenario]]:
    """Every combination of a scenario file's grid, and its scenario; one, at an empty point, without a grid. ``given``: keys of
    the file that options of the command line set, like ``overrides``.

    Raises ConfigError for a bad file, and for a bad value with the point at which it is; UserError for what is given while it
    varies over the grid, and for what does nothing at any point.
    """
    data = read_yaml(path)
    for override in overrides:
        if override.startswith(_PARTS):
            raise UserError(f"--set {override}: a scenario has such keys in `overrides` or in its grid; write them there")
    lines = apply_overrides(data, path, overrides)
    data |= dict(given or {})
    whole = build(Scenario, data, str(path), lines)
    for key in (*(override.partition("=")[0] for override in overrides), *(given or {})):
        for varied in whole.grid:
            if key == varied or key.startswith(f"{varied}."):
                raise UserError(f"{path}: {key} is given on the command line, and varies over the grid; leave one of them out")
    try:
        json.dumps(data)
    except TypeError:
        raise ConfigError(str(path), "", "holds a date, a set or binary data, which no key takes; put a date in quotes") from None
    every = [dict(zip(whole.grid, values, strict=True)) for values in product(*whole.grid.values())]
    made = [(point, _at(point, data, str(path))) for point in every]
    idle = [one.idle for _, one in made]
    for key, why in {key: why for of_point in idle for key, why in of_point.items()}.items():
        if all(key in of_point or not _gives(one, key) for of_point, (_, one) in zip(idle, made, strict=True)):
            raise UserError(f"{path}: {key}: {why}; leave it out")
    yield from made


def _gives(scenario: Scenario, key: str) -> bool:
    """Whether it has another value there than scenarios have without it."""
    given = scenario.model_dump(exclude_defaults=True)
    for part in key.split("."):
        given = given.get(part, {})
    return given != {}


def _at(point: Point, data: Mapping[str, Any], where: str) -> Scenario:
    mine = json.loads(json.dumps({key: value for key, value in data.items() if key != "grid"}))
    # A point's own `overrides` replace the file's, and keys of cluster and workload come behind either; keys inside another that
    # varies come behind it.
    for key, value in sorted(point.items(), key=lambda item: (item[0].startswith(_PARTS), item[0].count("."))):
        if not key.startswith(_PARTS):
            apply_override(mine, f"{key}={json.dumps(value)}")
        elif isinstance(mine.setdefault("overrides", []), list):
            mine["overrides"].append(f"{key}={json.dumps(value)}")
    try:
        return build(Scenario, mine, where)
    except ConfigError as error:
        at = ", ".join(f"{key}={value}" for key, value in point.items())
        raise ConfigError(f"{where} ({at})" if at else where, error.key, error.problem) from None
