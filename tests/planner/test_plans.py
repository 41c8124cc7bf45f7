"""Whole plans: sensible choices, memory that binds, and who is told what when nothing fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from planner_cases import dense_workload, make_cluster, make_workload, shipped_cluster, shipped_workload, two_sites

import planner
from hybridep.errors import InfeasibleError
from hybridep.pipeline import load_any_plan
from hybridep.plan import Residency, Schedule
from hybridep.recompute import Recompute
from planner.plans import plan_of, top_domains
from planner.problem import build_problem
from planner.solve import solve

PAIRS = [
    ("lab-4dc", "tiny"),
    ("paper-s", "llama-tiny"),
    ("paper-m", "mistral-small"),
    ("paper-l", "gpt-medium"),
    ("paper-l", "gpt-large"),
]
LARGE_UNEVEN = ("dtfm-10", "gpt-medium")


@pytest.mark.parametrize(
    ("cluster", "workload", "solver"),
    [
        *((*pair, solver) for pair in PAIRS for solver in ("highs", "cbc")),
        ("aws-9", "gpt-large", "highs"),
        pytest.param(*LARGE_UNEVEN, "highs", marks=pytest.mark.slow),
    ],
)
def test_shipped_configurations(cluster: str, workload: str, solver: str) -> None:
    """Nearly proven best where sites are alike, never slower than the two end points, and never slower than equal domains."""
    made = planner.plan(shipped_cluster(cluster), shipped_workload(workload), solver=solver, time_limit_s=5)
    assert made.solver is not None and made.prediction is not None
    assert made.solver.solver == solver
    assert made.solver.gap < (0.01 if made.cluster.is_symmetric else 0.2)
    assert made.solver.objective <= planner.plan_domains(made.cluster, made.workload).prediction.step * (1 + 1e-9)
    assert made.prediction.step == pytest.approx(made.solver.objective, rel=1e-9)
    assert made.prediction.step <= min(made.prediction.baselines.values()) * (1 + 1e-9)
    assert set(made.prediction.baselines) == {"ep", "full_gather"}
    assert len(made.layers) == 1
    planner.check(made)


def test_saved_plans_still_check(tmp_path: Path) -> None:
    made = planner.plan(shipped_cluster("lab-4dc"), shipped_workload("tiny"))
    made.save(tmp_path / "plan.yaml")
    loaded = load_any_plan(tmp_path / "plan.yaml")
    assert loaded == made
    planner.check(loaded)


def test_the_lab_mixes_experts_and_tokens() -> None:
    """Tokens of the tiny model need nearly every site and experts weigh as much: the middle domain."""
    made = planner.plan(shipped_cluster("lab-4dc"), shipped_workload("tiny"))
    assert made.layers[0].domains["dc"] == 2
    assert made.predicted.step < min(made.predicted.baselines.values())


def test_slow_links_move_experts_and_many_tokens_more_of_them() -> None:
    """More micro-batches per step: tokens cost more, copies the same, so domains grow up to full gather."""
    sizes = []
    for micro_batches in (1, 4, 64):
        workload = shipped_workload("gpt-large", f"training.micro_batches={micro_batches}")
        made = planner.plan(shipped_cluster("paper-l"), workload)
        sizes.append(made.layers[0].domains["dc"])
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 4


def test_large_experts_and_few_tokens_stay_at_home() -> None:
    workload = make_workload(hidden=64, ffn=8192, tokens=16, top_k=1)
    made = planner.plan(make_cluster(4, 2), workload)
    assert made.layers[0].domains == {"l0": 1, "l1": 1}
    assert made.layers[0].migration == {}
    assert made.layers[0].residency is Residency.STEP


def test_memory_makes_layers_differ() -> None:
    """Between what the fastest and the leanest configuration need, some layers take the one and some the other."""
    workload = make_workload(layers=6, hidden=128, experts=32, ffn=512, tokens=2048, micro_batches=4)
    roomy = planner.plan(make_cluster(4, 2), workload)
    lean = planner.memory_use(planner.baseline(make_cluster(4, 2), workload, "ep")).fullest_bytes
    ample = planner.memory_use(roomy).fullest_bytes
    assert ample > lean
    tight = make_cluster(4, 2, memory=f"{lean + 0.7 * (ample - lean):.0f} B")
    made = planner.plan(tight, workload)
    assert planner.memory_use(made).fits
    assert len(made.layers) > 1
    assert roomy.prediction is not None and made.prediction is not None
    assert roomy.prediction.step < made.prediction.step < made.prediction.baselines["ep"]
    planner.check(made)
    assert planner.explain(made).binds.startswith("memory of ")


def test_no_room_says_how_much_is_missing_where() -> None:
    workload = make_workload(experts=5, ffn=4096)
    least = planner.memory_use(planner.baseline(make_cluster(2, 2), workload, "ep")).fullest_bytes
    problem = build_problem(make_cluster(2, 2, memory="5 MB"), workload, Schedule())
    assert problem.best_uniform() is None and not problem.fits(problem.uniform(0))
    for solver in ("highs", "cbc"):
        with pytest.raises(InfeasibleError) as caught:
            planner.plan(make_cluster(2, 2, memory="5 MB"), workload, solver=solver)
        text = str(caught.value)
        assert caught.value.exit_code == 3
        assert "l00/l10 needs" in text and "has 5 MB" in text and "are missing" in text
        assert "gpu.memory" in text and "\n" not in text
        assert least > 5e6


@pytest.mark.parametrize(("cluster", "workload"), [("paper-l", "gpt-large"), pytest.param(*LARGE_UNEVEN, marks=pytest.mark.slow)])
def test_plans_are_deterministic(cluster: str, workload: str) -> None:
    """Of uneven sites many more in ``sites/test_site_limits.py``."""
    first, second = (planner.plan(shipped_cluster(cluster), shipped_workload(workload)) for _ in range(2))
    assert first.digest == second.digest
    assert first.solver is not None and second.solver is not None
    # Nor does the rest of their files differ, but for when they were made and how long that took.
    solver = second.solver.model_copy(update={"solve": first.solver.solve})
    assert first == second.model_copy(update={"solver": solver, "provenance": first.provenance})


def test_nothing_to_gain_means_nothing_copied() -> None:
    """One datacenter level of size one: domains there change nothing, and the smallest is taken."""
    made = planner.plan(shipped_cluster("paper-s"), shipped_workload("tiny"))
    assert made.layers[0].domains["dc"] == 1
    # One rank: every configuration costs the same.
    alone = planner.plan(make_cluster(1, 1), make_workload())
    assert alone.layers[0].domains == {"l0": 1, "l1": 1}


def test_three_levels() -> None:
    made = planner.plan(make_cluster(2, 2, 2), make_workload())
    assert set(made.layers[0].domains) == {"l0", "l1", "l2"}
    planner.check(made)


@pytest.mark.parametrize("name", ["ep", "full_gather"])
def test_baselines(name: str) -> None:
    cluster, workload = shipped_cluster("paper-l"), shipped_workload("gpt-large")
    made = planner.baseline(cluster, workload, name)
    sizes = {level.name: level.size if name == "full_gather" else 1 for level in cluster.levels}
    assert made.layers[0].domains == sizes
    assert made.predicted.step == pytest.approx(made.predicted.baselines[name])
    assert made.solver is None
    planner.check(made)


def test_mixed_solutions_become_consecutive_groups() -> None:
    problem = build_problem(make_cluster(4, 2), make_workload(layers=6), Schedule())
    solution = solve(problem)
    counts = [0] * len(problem.candidates)
    counts[0], counts[3], counts[-1] = 1, 2, 3
    made = plan_of(problem, replace(solution, counts=tuple(counts)))
    assert [(group.first_layer, group.num_layers) for group in made.layers] == [(0, 1), (1, 2), (3, 3)]
    assert planner.step_cost(made).step_s == pytest.approx(problem.objective_s(counts), rel=1e-12)


def test_the_next_best_plans_are_of_all_that_may_compute_again() -> None:
    """With layers without experts plans in which attention computes again are a problem of their own."""
    workload = dense_workload(2048)
    most = planner.memory_use(planner.plan_domains(two_sites(1e12), workload)).total_bytes.max()
    best = planner.plan_domains(two_sites(0.95 * most), workload)
    others = top_domains(best, 9)
    assert {Recompute.EXPERTS, Recompute.ATTENTION} <= {one.layers[0].recompute for one in (best, *others)}
    steps_s = [one.predicted.step for one in others]
    assert steps_s == sorted(steps_s) and all(planner.memory_use(one).fits for one in others)
