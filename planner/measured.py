"""Plans for experts whose popularity was measured: every layer gets the configuration that is fastest for its own experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from hybridep.errors import InfeasibleError
from hybridep.plan import Plan, Schedule, SolverReport, Status
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import now_s
from planner.plans import layer_group, predict, seconds
from planner.problem import TIE, build_problem
from planner.solve import PROVEN_GAP, gap, missing_memory


def plan_measured(
    cluster: Cluster, workload: Workload, popularity: Sequence[tuple[float, ...]], *, schedule: Schedule | None = None
) -> Plan:
    """Equal domains per level, chosen for each MoE layer by its ``popularity`` ([layers][E] shares).

    Times add up over layers, so the fastest of each layer together are the fastest plan, if they fit the memory. If not, the
    fastest configuration that fits in all layers is taken, and the gap to the former is reported. Raises InfeasibleError.
    """
    started = now_s()
    problems = [build_problem(cluster, workload, schedule or Schedule(), shares) for shares in popularity]
    # Layers differ in time and memory, not in which configurations there are: those follow from counts of experts.
    layer_s = np.array([problem.layer_s for problem in problems])
    lasting = np.array([problem.lasting_bytes for problem in problems])
    passing = np.array([problem.passing_bytes for problem in problems])
    first = problems[0]

    def fits(chosen: Sequence[int]) -> bool:
        layers = np.arange(len(problems))
        most = np.maximum(passing[layers, chosen].max(axis=0), first.fixed_passing_bytes)
        return first.has_room(first.fixed_lasting_bytes + lasting[layers, chosen].sum(axis=0) + most)

    best = [int(np.argmax(times <= times.min() * (1 + TIE))) for times in layer_s]
    bound_s = first.fixed_s + float(layer_s.min(axis=1).sum())
    if not fits(best):
        alike = [c for c in np.argsort(layer_s.sum(axis=0), kind="stable").tolist() if fits([c] * len(problems))]
        if not alike:
            raise InfeasibleError(missing_memory(first))
        best = [alike[0]] * len(problems)
    groups, layer = [], 0
    for candidate, same in groupby(best):
        count = len(list(same))
        configuration = first.candidates[candidate]
        groups.append(layer_group(layer, count, configuration.choices, configuration.residency))
        layer += count
    made = Plan(
        cluster=cluster,
        workload=workload,
        layers=tuple(groups),
        popularity=tuple(popularity),
        schedule=first.schedule,
        provenance=provenance(),
    )
    prediction = predict(made)
    bound_s = min(bound_s, prediction.step)
    found = gap(prediction.step, bound_s)
    report = SolverReport(
        status=Status.OPTIMAL if found <= PROVEN_GAP else Status.FEASIBLE,
        solver="by layer",
        objective=seconds(prediction.step),
        bound=seconds(bound_s),
        gap=found,
        solve=seconds(now_s() - started),
    )
    return made.model_copy(update={"prediction": prediction, "solver": report})
