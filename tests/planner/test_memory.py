"""Bytes per rank."""

from __future__ import annotations

import numpy as np
import pytest
from planner_cases import make_cluster, make_workload, random_cluster, random_workload

from hybridep.plan import LayerGroup, Plan, Residency, Schedule
from hybridep.recompute import Recompute
from hybridep.topology import Cluster
from hybridep.traffic import Op, step_traffic
from hybridep.workload import Workload
from planner.activations import pre_expert_bytes, routed_bytes
from planner.memory import fits, memory_use
from planner.problem import build_problem


def plan(cluster: Cluster, workload: Workload, domains: dict[str, int], residency: Residency = Residency.STEP) -> Plan:
    group = LayerGroup(
        first_layer=0, num_layers=workload.model.num_moe_layers, domains=domains, migration={}, residency=residency
    )
    return Plan(cluster=cluster, workload=workload, layers=(group,))


def test_weights_gradients_and_states_by_hand() -> None:
    """fp32: 4 + 4 bytes of weight and gradient, 8 of AdamW's moments, of dense parameters half of these on either rank of a site.
    Copies keep a gradient where micro-batches accumulate."""
    for batches, copy_bytes in ((1, 4), (2, 8)):
        cluster, workload = make_cluster(4, 2), make_workload(layers=3, experts=16, micro_batches=batches)
        model = workload.model
        parts = memory_use(plan(cluster, workload, {"l0": 2})).parts_bytes
        assert parts["dense"] == model.dense_params * (8 + 8 / 2)
        assert parts["home_experts"] == 3 * 2 * model.expert_params * 16
        assert parts["copies"] == 3 * 2 * model.expert_params * copy_bytes


def awaited(made: Plan, combines: int, dispatches: int) -> float:
    """Bytes of so many layers' gradients of combine and dispatch that come to each rank, where ranks are alike."""
    times = {Op.COMBINE_BACKWARD: combines, Op.DISPATCH_BACKWARD: dispatches}
    whole = sum(times.get(key.op, 0) * float(sent.sum()) for key, sent in step_traffic(made).items())
    return whole / made.cluster.num_gpus / made.workload.model.num_moe_layers


def head_bytes(workload: Workload) -> float:
    """fp32; of the logits, and of what is larger: two parts of them, or the gradients of the head's weights and input."""
    tokens, vocabulary, hidden = workload.training.tokens, workload.model.vocab_size, workload.model.hidden_size
    return 4 * (tokens * vocabulary + max(2 * min(tokens * vocabulary, 1 << 22), (tokens + vocabulary) * hidden))


def test_receives_that_are_posted_ahead_are_there_when_the_head_and_the_experts_run_backward() -> None:
    """Two ranks of 8 experts each: a token of two choices needs the other one unless both are among its own 8 of 16."""
    for vocabulary, ffn in ((1 << 14, 64), (256, 1 << 12)):
        workload = make_workload(layers=3, experts=16, ffn=ffn, vocabulary=vocabulary)
        made, tokens = plan(make_cluster(2), workload, {}), workload.training.tokens
        rows = tokens * (1 - (8 * 7) / (16 * 15))
        combine, dispatch = rows * workload.combine_row_bytes, rows * workload.dispatch_gradient_row_bytes
        assert awaited(made, 1, 1) == pytest.approx(combine + dispatch)
        head = head_bytes(workload)
        experts = dispatch + 2 * 8 * workload.expert_bytes + 2 * tokens * workload.combine_row_bytes
        assert (head > experts) == (vocabulary > 256)
        buffers = combine + dispatch + max(head, experts)
        assert memory_use(made).parts_bytes["buffers"] == pytest.approx(buffers, rel=1e-9)


def test_at_the_head_there_are_no_copies_of_a_micro_batch() -> None:
    workload = make_workload(layers=3, experts=16, vocabulary=1 << 14)
    for residency, copies in ((Residency.STEP, 3 * 2), (Residency.MICROBATCH, 0)):
        made = plan(make_cluster(4, 2), workload, {"l0": 2}, residency)
        parts = memory_use(made).parts_bytes
        held = awaited(made, 1, 1) + head_bytes(workload) + copies * workload.expert_bytes
        assert parts["buffers"] + parts["copies"] == pytest.approx(held, rel=1e-9)


def test_gradients_of_one_layer_pass_in_backward() -> None:
    """First by expert, beside a row's and three times what comes out of SwiGLU, then in one piece: those at home and those of
    copies, beside the gradient of the experts' input."""
    ffn = 1 << 16
    for tokens, residency, copies in ((8, Residency.STEP, 3 * 2), (8, Residency.MICROBATCH, 2), (512, Residency.STEP, 3 * 2)):
        workload = make_workload(layers=3, experts=16, ffn=ffn, tokens=tokens)
        made = plan(make_cluster(4, 2), workload, {"l0": 2}, residency)
        use = memory_use(made)
        gradients, rows = (2 + 2) * workload.expert_bytes, tokens * workload.model.top_k
        row = workload.combine_row_bytes
        backward = gradients + max(gradients + rows * row, rows * (row + 3 * ffn * 4))
        assert use.parts_bytes["buffers"] == pytest.approx(awaited(made, 1, 2) + backward, rel=1e-9)
        assert use.parts_bytes["copies"] == copies * workload.expert_bytes
        assert (gradients > rows * 3 * ffn * 4) == (tokens == 8)


@pytest.mark.parametrize("tokens", [8, 512])
def test_gradients_of_copies_ahead_wait_where_activations_have_been(tokens: int) -> None:
    """All of a step's, of two copies in each of three layers; accumulated ones are there before."""
    for micro_batches in (1, 2):
        workload = make_workload(layers=3, experts=16, ffn=128, tokens=tokens, micro_batches=micro_batches)
        made = plan(make_cluster(4, 2), workload, {"l0": 2})
        usual = memory_use(made).parts_bytes
        ahead = memory_use(made.model_copy(update={"schedule": Schedule(prefetch=1)})).parts_bytes
        weights = 3 * 2 * workload.expert_bytes
        waiting = max(weights - usual["activations"], 0) if micro_batches == 1 else weights
        assert ahead["copies"] == pytest.approx(weights + waiting)
        assert micro_batches > 1 or bool(waiting) == (tokens == 8)


def test_experts_that_compute_again_keep_what_arrived_and_make_the_rest_in_backward() -> None:
    """Everything is at every rank, so each has its own tokens: two rows of the experts for each, SwiGLU, fp32."""
    workload = make_workload(layers=3, experts=16, ffn=128)
    kept = plan(make_cluster(2), workload, {"l0": 2})
    again = kept.with_layers(kept.layers[0].recomputing(Recompute.EXPERTS))
    parts, less = (memory_use(one).parts_bytes for one in (kept, again))
    row, tokens = workload.combine_row_bytes, workload.training.tokens
    served = 2 * tokens * (row + (2 * 128 + 1) * 4 + 16)
    saved, made = served - tokens * row, served + tokens * row
    assert parts["activations"] - less["activations"] == pytest.approx(3 * saved)
    assert less["buffers"] - parts["buffers"] == pytest.approx(made)
    in_parts = again.model_copy(update={"schedule": Schedule(chunks=2)})
    all_kept = kept.model_copy(update={"schedule": Schedule(chunks=2)})
    assert memory_use(in_parts).fullest_bytes - memory_use(all_kept).fullest_bytes == pytest.approx(made / 2 - 3 * saved)


def test_so_does_a_shared_expert_while_its_own_backward_runs() -> None:
    """SwiGLU keeps two inner widths; with a gate also the output and one number. Then it has gradients of as much."""
    workload = make_workload(layers=3, experts=16, ffn=8)
    for size, gated in ((1 << 16, False), (1 << 16, True)):
        model = workload.model.model_copy(update={"shared_ffn_size": size, "shared_expert_gate": gated})
        kept = plan(make_cluster(2), workload.model_copy(update={"model": model}), {})
        again = kept.with_layers(kept.layers[0].recomputing(Recompute.EXPERTS))
        parts, less = (memory_use(one).parts_bytes for one in (kept, again))
        plain = plan(make_cluster(2), workload, {})
        routed = [memory_use(one).parts_bytes["activations"] for one in (plain, plain.with_layers(again.layers[0]))]
        made = workload.training.tokens * (2 * size + gated * 65) * 4
        assert parts["activations"] - less["activations"] == pytest.approx(3 * made + routed[0] - routed[1])
        assert less["buffers"] == pytest.approx(awaited(again, 1, 1) + 2 * made)


def test_dense_gradients_are_reduced_when_no_activations_are_left() -> None:
    """With few tokens that is what takes most; a layer that computes again keeps less until then."""
    workload = make_workload(layers=3, experts=16, ffn=8, tokens=8)
    model = workload.model.model_copy(update={"shared_ffn_size": 1 << 12})
    kept = plan(make_cluster(2), workload.model_copy(update={"model": model}), {})
    uses = [memory_use(one).parts_bytes for one in (kept, kept.with_layers(kept.layers[0].recomputing(Recompute.EXPERTS)))]
    shared = 3 * workload.training.tokens * 2 * (1 << 12) * 4
    assert uses[1]["buffers"] - uses[0]["buffers"] == pytest.approx(shared)


def test_when_a_layer_runs_backward_activations_above_it_are_gone() -> None:
    """In one of two layers tokens choose rank 0's experts only; of several micro-batches in flight one goes."""
    workload = make_workload(layers=2, experts=4, top_k=1, ffn=1024)
    even, skewed = (0.25,) * 4, (0.4999, 0.4999, 0.0001, 0.0001)
    kept = plan(make_cluster(2), workload, {})
    base = kept.with_layers(kept.layers[0].recomputing(Recompute.EXPERTS))
    low, high = (base.with_popularity(popularity) for popularity in ((skewed, even), (even, skewed)))
    for in_flight in (1, 3):
        lower, higher = (memory_use(one, in_flight) for one in (low, high))
        assert lower.fullest_rank == higher.fullest_rank == 0
        routed = routed_bytes(workload, *(np.full(1, workload.training.tokens),) * 2, Recompute.EXPERTS).kept
        gone = float(routed[0] + pre_expert_bytes(workload, np.ones(1), Recompute.EXPERTS).kept[0])
        assert higher.fullest_bytes - lower.fullest_bytes == pytest.approx(gone)


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
            groups.append(made.group(first, int(counts[candidate])))
            first += int(counts[candidate])
        use = memory_use(Plan(cluster=cluster, workload=workload, layers=tuple(groups)))
        np.testing.assert_allclose(problem.memory_bytes(counts.tolist()), use.total_bytes, rtol=1e-12)
        assert sum(use.parts_bytes.values()) == pytest.approx(use.fullest_bytes)


def test_fits_has_the_solvers_tolerance() -> None:
    assert fits(100.0, 100.0) and fits(100.0001, 100.0)
    assert not fits(100.01, 100.0)
