"""Settings of an experiment in the lab: every combination of domain sizes is trained and timed, and predicted from a probe.

Measurements are kept in one file per setting and not made again; predictions are computed from them each time, so a better
cost model needs no new measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hybridep.codecs import Codecs
from hybridep.commands import tables
from hybridep.commands.inputs import load_cluster
from hybridep.commands.plan_choice import by_simulation
from hybridep.commands.probe import with_measurements
from hybridep.config import build, write_text
from hybridep.launch.lab import Lab, run_in_lab
from hybridep.launch.shaping import lab_spec, why_not_in_lab
from hybridep.launch.trials import Measured, measure
from hybridep.placement import divisors
from hybridep.plan import LayerGroup, Plan
from hybridep.routing import Routing, load_routing
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import expected_s, plans, step_cost
from simulator.step import simulate_step

if TYPE_CHECKING:
    from runtime.probe import Probe

TIMES = ("measured_s", "min_s", "max_s", "predicted_s", "simulated_s", "uniform_s", "bound_s")
COLUMNS = ("setting", "dc", "gpu", "chosen", *TIMES, "wan_mb")
CHOSEN = "plan"
"""Domain sizes of a chosen plan that is none of the combinations."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, at which rate of the sites' access links."""

    name: str
    rate: str
    workload: Workload
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    """Level name -> codecs; exact without."""


def setting_of(model: Mapping[str, Any], name: str, fields: Mapping[str, Any]) -> Setting:
    """From a configuration: ``fields`` are the rate, the experts' size and those of training, ``model`` all else of the model."""
    training = dict(fields)
    rate, size = training.pop("rate"), training.pop("expert_ffn_size")
    workload = build(Workload, {"name": name, "model": {**model, "expert_ffn_size": size}, "training": training}, name)
    return Setting(name=name, rate=rate, workload=workload)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how settings are measured."""

    cluster: str
    """Name of a cluster of sites and GPUs."""
    steps: int
    """Optimizer steps per placement."""
    untimed: int = 1
    """How many of them, the first ones, are not timed: what they route is what is known when a plan is chosen."""
    record: bool = False
    """Known is all that tokens choose in the untimed steps, not only how popular experts are."""
    probe_s: float
    """About how long each measurement of links and computation takes."""
    folder: Path
    """Holds ``<setting>.json``."""
    at_once: int = 10
    """Settings of one rate per start of the ranks."""
    candidates: int = 1
    """Also trained is what the planner chooses, knowing nothing of experts, where it is none of the combinations; or with more
    candidates, as `hybridep plan --top --simulate --routing` does."""

    def at(self, rate: str) -> Cluster:
        """The cluster with these access links."""
        return load_cluster(self.cluster, [f"levels.dc.bandwidth={rate}"])

    def path(self, setting: Setting) -> Path:
        """The file with the setting's measurements."""
        return self.folder / f"{setting.name}.json"

    def routing_path(self, setting: Setting) -> Path:
        """The file with what tokens chose in the untimed steps."""
        return self.folder / f"{setting.name}.npz"


def placements(cluster: Cluster, setting: Setting) -> list[Plan]:
    """Every combination of domain sizes."""
    names, layers = [level.name for level in cluster.levels], setting.workload.model.num_moe_layers
    return [
        Plan(
            cluster=cluster,
            workload=setting.workload,
            layers=(LayerGroup(first_layer=0, num_layers=layers, domains=dict(zip(names, sizes, strict=True)), migration={}),),
            codecs=dict(setting.codecs),
        )
        for sizes in product(*(divisors(level.size) for level in cluster.levels))
    ]


def each_in_lab(script: str, names: Iterable[str], folder: Path, cluster_of: Callable[[str], Cluster]) -> int:
    """Run ``script --inside NAME`` with this process's arguments in a lab, for every setting that has no ``NAME.json`` there;
    0, or what ended the first that failed (2 with the reason where there can be no lab)."""
    for name in names:
        if (folder / f"{name}.json").exists():
            continue
        if code := run_script_in_lab(cluster_of(name), script, *sys.argv[1:], "--inside", name):
            return code
    return 0


def enter_lab(bench: Bench, rate: str, script: str) -> int:
    """Run ``script --inside`` with this process's arguments in a lab; 2 with the reason where there can be none."""
    return run_script_in_lab(bench.at(rate), script, "--inside", *sys.argv[1:])


def run_script_in_lab(cluster: Cluster, script: str, *arguments: str) -> int:
    """What ended ``script``, run in a lab of the cluster's sites; 2 with the reason where there can be none."""
    reason = why_not_in_lab(cluster)
    if reason is not None:
        print(f"{Path(script).parent.name} needs the lab: {reason}", file=sys.stderr)
        return 2
    return run_in_lab([sys.executable, script, *arguments], lab_spec(cluster))


def run_compared(script: str, about: str, compare: Callable[[dict[str, Any], Cluster, Path], None]) -> int:
    """An experiment of variants that are measured together: ``compare`` (config, cluster, results) in a lab at the rate that the
    ``config.yaml`` beside the script says."""
    here = Path(script).resolve().parent
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=here / "results")
    parser.add_argument("--smoke", action="store_true", help="few steps: does it run?")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    config = yaml.safe_load((here / "config.yaml").read_text())
    config |= config["smoke"] if given.smoke else {}
    cluster = load_cluster(config["cluster"], [f"levels.dc.bandwidth={config['rate']}"])
    if not given.inside:
        return run_script_in_lab(cluster, script, "--inside", *sys.argv[1:])
    compare(config, cluster, given.results / "smoke" if given.smoke else given.results)
    return 0


def measure_all(bench: Bench, settings: Sequence[Setting], *, shaped: bool = True) -> None:
    """Whatever is not in the bench's folder yet, at one rate after the other; inside a lab, or with links as they are."""
    lab = Lab.current() if shaped else None
    for rate in dict.fromkeys(setting.rate for setting in settings):
        cluster = bench.at(rate)
        if lab is not None:
            bandwidth = cluster.levels[0].bandwidth
            for site in lab.sites:
                lab.set_bandwidth(site.name, up_bytes_per_s=bandwidth, down_bytes_per_s=bandwidth)
        missing = [one for one in settings if one.rate == rate and not bench.path(one).exists()]
        for chunk in _chunks(missing, bench.at_once):
            placed = [placements(cluster, setting) for setting in chunk]
            measured, probes = _measure(bench, [one for each in placed for one in each], bench.probe_s)
            taken: list[_Taken] = []
            # Neighbours with one workload, which differ in codecs, share a probe.
            groups = zip(groupby(zip(chunk, placed, strict=True), key=lambda pair: pair[0].workload), probes, strict=True)
            for (_, group), probe in groups:
                for setting, mine in group:
                    trials, measured = measured[: len(mine)], measured[len(mine) :]
                    taken.append(_choose(bench, setting, with_measurements(cluster, probe), trials))
            others = [one.chosen for one in taken if one.is_other]
            measured, _ = _measure(bench, others) if others else ([], [])
            for one in taken:
                own, measured = (measured[0], measured[1:]) if one.is_other else (None, measured)
                _keep(bench, one, own)


def _measure(bench: Bench, plans: Sequence[Plan], probe_s: float | None = None) -> tuple[list[Measured], list[Probe]]:
    recorded_steps = bench.untimed if bench.record else 0
    return measure(plans, steps=bench.steps, untimed=bench.untimed, recorded_steps=recorded_steps, probe_s=probe_s)


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A setting whose combinations were trained."""

    setting: Setting
    probed: Cluster
    trials: Sequence[Measured]
    chosen: Plan

    @property
    def is_other(self) -> bool:
        """The chosen plan is none of the combinations."""
        return not any(_same(self.chosen, one) for one in placements(self.probed, self.setting))


def _choose(bench: Bench, setting: Setting, probed: Cluster, trials: Sequence[Measured]) -> _Taken:
    record = trials[0].routing
    known = record.popularity() if bench.record else ()
    found = plans(probed, setting.workload, bench.candidates, codecs=setting.codecs, popularity=known)
    if bench.candidates > 1:
        found, _ = by_simulation(found, record.steps(setting.workload))
    return _Taken(setting=setting, probed=probed, trials=trials, chosen=found[0])


def _keep(bench: Bench, taken: _Taken, own: Measured | None) -> None:
    setting, trials = taken.setting, taken.trials
    record: dict[str, Any] = {
        "workload": setting.workload.model_dump(mode="json", exclude_none=True),
        "cluster": taken.probed.model_dump(mode="json", exclude_none=True),
        "popularity": trials[0].popularity,
        "step_s": [one.step_s for one in trials],
        "wan_bytes": [one.wan_bytes for one in trials],
        "parts_s": [one.parts_s for one in trials],
        "plan": taken.chosen.model_dump(mode="json", exclude_none=True),
    }
    if own is not None:
        record["plan_trial"] = {"step_s": own.step_s, "wan_bytes": own.wan_bytes}
    if bench.record:
        trials[0].routing.save(bench.routing_path(setting))
    write_text(bench.path(setting), json.dumps(record))
    medians = [round(one.median_s, 3) for one in [*trials, *([own] if own is not None else [])]]
    print(f"{setting.name}: {medians}", file=sys.stderr, flush=True)


def _same(chosen: Plan, made: Plan) -> bool:
    """Do both compute every expert at the same places and keep copies as long?"""

    def tables(one: Plan) -> list[Any]:
        return [
            (group.residency, group.recompute, [serve.tolist() for serve in placed.serve])
            for _, group, placed in one.each_layer()
        ]

    return tables(chosen) == tables(made)


def _chunks(items: Sequence[Setting], size: int) -> Iterator[Sequence[Setting]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def rows_of(bench: Bench, settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """A row (``COLUMNS``) per measured setting and placement. ``measured_s`` is the median of the timed steps. ``predicted_s``
    and ``simulated_s`` are means over the untimed steps, with the popularity of experts of each, or simulated with every choice
    where these are recorded; ``uniform_s`` is predicted as if all experts were equally popular. ``chosen``: by the planner."""
    rows = []
    for setting in settings:
        if bench.path(setting).exists():
            rows += _rows(bench, setting)
    return rows


def _rows(bench: Bench, setting: Setting) -> list[dict[str, Any]]:
    path = bench.path(setting)
    record = json.loads(path.read_text())
    if build(Workload, record["workload"], str(path)) != setting.workload:
        raise SystemExit(f"{path} was measured with other settings: delete it, or give another --results folder")
    cluster, chosen = build(Cluster, record["cluster"], str(path)), build(Plan, record["plan"], str(path))
    known = record["popularity"][: bench.untimed]
    choices: Sequence[Routing | None] = [None] * len(known)
    if bench.record:
        choices = load_routing(bench.routing_path(setting)).steps(setting.workload)
    rows = []
    for made, steps_s, sent in zip(placements(cluster, setting), record["step_s"], record["wan_bytes"], strict=True):
        routed = [made.with_popularity(shares) for shares in known]
        row = _row(setting, routed, choices, steps_s, sent)
        rows.append(row | {"chosen": int(_same(chosen, made)), "uniform_s": expected_s(made)})
    if "plan_trial" in record:
        # With other popularity partial migration would copy other experts than the plan that was trained.
        trial, expected = record["plan_trial"], choices if bench.record else [None]
        row = _row(setting, [chosen] * len(expected), expected, trial["step_s"], trial["wan_bytes"])
        rows.append(row | {"dc": CHOSEN, "gpu": CHOSEN, "chosen": 1, "uniform_s": expected_s(chosen)})
    return rows


def _row(
    setting: Setting, routed: Sequence[Plan], choices: Sequence[Routing | None], steps_s: Sequence[float], wan_bytes: float
) -> dict[str, Any]:
    costs = [step_cost(one) for one in routed]
    return {
        "setting": setting.name,
        **routed[0].layers[0].domains,
        "measured_s": statistics.median(steps_s),
        "min_s": min(steps_s),
        "max_s": max(steps_s),
        "predicted_s": statistics.fmean(expected_s(one, cost) for one, cost in zip(routed, costs, strict=True)),
        "simulated_s": statistics.fmean(simulate_step(one, chosen).step_s for one, chosen in zip(routed, choices, strict=True)),
        "bound_s": statistics.fmean(cost.bound_s for cost in costs),
        "wan_mb": wan_bytes / 1e6,
    }


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """``rows.csv`` and ``provenance.json`` in ``folder``."""
    cells = [{name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows]
    tables.write_rows(folder / "rows.csv", cells, COLUMNS)
    tables.write_provenance(folder)
