"""Plans for experts whose popularity was measured: every layer gets the configuration that is fastest for its own experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

import numpy as np

from hybridep.codecs import Codecs
from hybridep.errors import InfeasibleError
from hybridep.plan import Plan, Schedule, SolverReport, Status
from hybridep.provenance import provenance
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.clock import elapsed_s
from planner.plans import predict, seconds
from planner.problem import TIE, Problem, build_problem, ways_again
from planner.solve import PROVEN_GAP, gap, missing_memory


def plans_measured(
    cluster: Cluster,
    workload: Workload,
    popularity: Sequence[tuple[float, ...]],
    count: int = 1,
    *,
    schedule: Schedule | None = None,
    codecs: Mapping[str, Codecs] | None = None,
) -> list[Plan]:
    """At most ``count`` plans of equal domains per level, the fastest first, for experts of this ``popularity`` ([layers][E]
    shares). The first chooses for each MoE layer anew, the others have one configuration in all layers, and no solver's report.
    ``codecs`` by level name, exact where absent.

    Times add up over layers, so the fastest of each layer together are the fastest plan, if they fit the memory. If not, the
    fastest configuration that fits in all layers is taken, and the gap to the former is reported. Raises InfeasibleError.
    """
    asked_s = elapsed_s()
    make = partial(build_problem, cluster, workload, schedule or Schedule(), codecs=codecs)
    problems = [make(shares) for shares in popularity]
    ways = ways_again(workload.model)
    most = max(ways.index(problem.recompute) for problem in problems)
    found, errors = list[list[Plan]](), list[InfeasibleError]()
    # Where some layer is short of memory, layers may compute again in all ways but the first, which is a part of others.
    for way in ways[1:] if most else ways[:1]:
        try:
            found.append(_by_layer([make(shares, recompute=way) for shares in popularity], popularity, count))
        except InfeasibleError as error:
            errors.append(error)
    if not found:
        raise errors[-1]  # of what needs least memory
    first, *others = min(found, key=lambda plans: plans[0].predicted.step)
    # Of plans that compute nothing again, nothing is faster than what keeps all.
    kept = [make(shares, recompute=ways[0]) for shares in popularity] if most else problems
    step_s = first.predicted.step
    bound_s = min(kept[0].fixed_s + sum(float(problem.layer_s.min()) for problem in kept), step_s)
    report = SolverReport(
        status=Status.OPTIMAL if gap(step_s, bound_s) <= PROVEN_GAP else Status.FEASIBLE,
        solver="by layer",
        objective=seconds(step_s),
        bound=seconds(bound_s),
        gap=gap(step_s, bound_s),
        solve=seconds(elapsed_s() - asked_s),
    )
    return [first.model_copy(update={"solver": report}), *others]


def _by_layer(problems: Sequence[Problem], popularity: Sequence[tuple[float, ...]], count: int) -> list[Plan]:
    """As `plans_measured`, of problems that may compute the same again, one for each layer, and without a report."""
    # Layers differ in time and memory, not in which configurations there are: those follow from counts of experts.
    layer_s = np.array([problem.layer_s for problem in problems])
    lasting = np.array([problem.lasting_bytes for problem in problems])
    passing = np.array([problem.passing_bytes for problem in problems])
    first = problems[0]

    def fits(chosen: Sequence[int]) -> bool:
        layers = np.arange(len(problems))
        most = np.maximum(passing[layers, chosen].max(axis=0), first.fixed_passing_bytes)
        return first.has_room(first.fixed_lasting_bytes + lasting[layers, chosen].sum(axis=0) + most)

    def made_of(chosen: Sequence[int]) -> Plan:
        groups, layer = [], 0
        for candidate, same in groupby(chosen):
            number = len(list(same))
            groups.append(first.candidates[candidate].group(layer, number))
            layer += number
        made = Plan(
            cluster=first.cluster,
            workload=first.workload,
            layers=tuple(groups),
            codecs=first.codecs,
            popularity=tuple(popularity),
            schedule=first.schedule,
            provenance=provenance(),
        )
        return made.model_copy(update={"prediction": predict(made)})

    best = [int(np.argmax(times <= times.min() * (1 + TIE))) for times in layer_s]
    by_time = np.argsort(layer_s.sum(axis=0), kind="stable").tolist()
    alike = [each for c in by_time if fits(each := [c] * len(problems))]
    if not fits(best):
        if not alike:
            raise InfeasibleError(missing_memory(first))
        best = alike[0]
    return [made_of(best), *map(made_of, [each for each in alike if each != best][: count - 1])]
