"""Bytes per rank."""

from __future__ import annotations

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload, random_cluster, random_workload

from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.memory import fits, memory_use
from planner.plans import layer_group
from planner.problem import build_problem


def plan(cluster: Cluster, workload: Workload, domains: dict[str, int], residency: Residency = Residency.STEP) -> Plan:
    group = LayerGroup(
        first_layer=0, num_layers=workload.model.num_moe_layers, domains=domains, migration={}, residency=residency
    )
    return Plan(cluster=cluster, workload=workload, layers=(group,))


def test_weights_gradients_and_states_by_hand() -> None:
    """fp32: 4 + 4 bytes of weight and gradient, 8 of AdamW's moments. Copies keep a gradient where micro-batches accumulate."""
    for batches, copy_bytes in ((1, 4), (2, 8)):
        cluster, workload = make_cluster(4, 2), make_workload(layers=3, experts=16, micro_batches=batches)
        model = workload.model
        parts = memory_use(plan(cluster, workload, {"l0": 2})).parts_bytes
        assert parts["dense"] == model.dense_params * 16
        assert parts["home_experts"] == 3 * 2 * model.expert_params * 16
        assert parts["copies"] == 3 * 2 * model.expert_params * copy_bytes


def test_gradients_of_one_layer_pass_in_backward() -> None:
    """First by expert, then in one piece: those at home and those of copies, beside the gradient of the experts' input."""
    workload = make_workload(layers=3, experts=16, ffn=1 << 16)
    for residency, copies in ((Residency.STEP, 3 * 2), (Residency.MICROBATCH, 2)):
        use = memory_use(plan(make_cluster(4, 2), workload, {"l0": 2}, residency))
        rows = workload.training.tokens * workload.model.top_k * workload.combine_row_bytes
        assert use.parts_bytes["buffers"] == pytest.approx(2 * (2 + 2) * workload.expert_bytes + rows)
        assert use.parts_bytes["copies"] == copies * workload.expert_bytes


def test_copies_per_micro_batch_are_held_for_one_block() -> None:
    cluster, workload = make_cluster(4, 2), make_workload(layers=3, experts=16)
    step, each = (memory_use(plan(cluster, workload, {"l0": 4}, residency)) for residency in Residency)
    assert step.parts_bytes["copies"] == 3 * each.parts_bytes["copies"]
    assert step.fullest_bytes - each.fullest_bytes == pytest.approx(2 * each.parts_bytes["copies"])


def test_nothing_is_copied_in_plain_expert_parallelism() -> None:
    use = memory_use(plan(make_cluster(4, 2), make_workload(), {}))
    assert use.parts_bytes["copies"] == 0
    assert use.parts_bytes["buffers"] > 0


def test_parts_add_up_and_the_fullest_rank_is_named() -> None:
    """Five experts on four ranks: rank 0 has two of them."""
    use = memory_use(plan(make_cluster(2, 2), make_workload(experts=5, ffn=4096), {}))
    assert use.fullest_rank == 0 and use.fullest_name == "l00/l10"
    assert sum(use.parts_bytes.values()) == pytest.approx(use.fullest_bytes)
    assert use.total_bytes.argmax() == 0
    assert use.total_bytes[1] < use.total_bytes[0]


def test_activations_grow_with_the_micro_batch_not_with_their_number() -> None:
    cluster = make_cluster(4, 2)
    small, more, longer = (
        memory_use(plan(cluster, make_workload(tokens=tokens, micro_batches=batches), {})).parts_bytes["activations"]
        for tokens, batches in ((128, 1), (128, 8), (256, 1))
    )
    assert small == more
    assert longer == pytest.approx(2 * small)


def test_mixed_layers_count_lasting_copies_and_the_largest_passing_ones() -> None:
    cluster, workload = make_cluster(4, 2), make_workload(layers=5, ffn=4096)
    small, large = {"l0": 2, "l1": 1}, {"l0": 4, "l1": 2}
    expert = workload.expert_bytes
    groups = (
        LayerGroup(first_layer=0, num_layers=2, domains=small, migration={}, residency=Residency.STEP),
        LayerGroup(first_layer=2, num_layers=1, domains=small, migration={}, residency=Residency.MICROBATCH),
        LayerGroup(first_layer=3, num_layers=2, domains=large, migration={}, residency=Residency.MICROBATCH),
    )
    parts = memory_use(Plan(cluster=cluster, workload=workload, layers=groups)).parts_bytes
    assert parts["copies"] == (2 * 2 + 14) * expert


def test_the_problem_sums_memory_as_the_plan_does(rng: np.random.Generator) -> None:
    for _ in range(20):
        cluster, workload = random_cluster(rng), random_workload(rng)
        problem = build_problem(cluster, workload, Schedule())
        chosen = np.sort(rng.integers(len(problem.candidates), size=problem.num_layers))
        counts = np.bincount(chosen, minlength=len(problem.candidates))
        groups, first = [], 0
        for candidate in np.unique(chosen):
            made = problem.candidates[candidate]
            groups.append(layer_group(first, int(counts[candidate]), made.choices, made.residency))
            first += int(counts[candidate])
        use = memory_use(Plan(cluster=cluster, workload=workload, layers=tuple(groups)))
        np.testing.assert_allclose(problem.memory_bytes(counts.tolist()), use.total_bytes, rtol=1e-12)
        assert sum(use.parts_bytes.values()) == pytest.approx(use.fullest_bytes)


def test_fits_has_the_solvers_tolerance() -> None:
    assert fits(100.0, 100.0) and fits(100.0001, 100.0)
    assert not fits(100.01, 100.0)
