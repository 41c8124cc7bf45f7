"""The bound against every serving table, its proof, and that false proofs are found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from site_cases import few_kinds, random_problem, random_table, run, small_workload, uneven_cluster

from hybridep.codecs import Codecs, GradientCodec
from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.sites import bound, lp
from planner.sites.bound import Proof, prove, proven_s, verify
from planner.sites.boxes import side_by_side
from planner.sites.cost import site_cost
from planner.sites.linear import BoxProgram, Duals
from planner.sites.lp import box_program, programs
from planner.sites.narrowing import all_narrowed, narrowed
from planner.sites.oracle import best_table
from planner.sites.problem import SiteProblem, site_problem
from planner.sites.relaxation import Limits, Relaxation
from planner.sites.search import Search
from planner.sites.solution import Wishes, solve_sites

SMALL = [(2, 2), (3, 1), (2, 3)]
SHAPES = [(2, 2), (2, 4), (3, 1), (3, 2), (4, 1), (2, 5), (5, 1), (6, 1)]


def check_instance(seed: int, nodes: tuple[int, ...] = ()) -> None:
    """bound <= best of all tables <= what the search finds, which lies within the gap that it reports."""
    sites, experts = SHAPES[seed % len(SHAPES)]
    problem = random_problem(seed, sites, experts, inside=None if sites < 6 else 0, nodes=nodes)
    found = best_table(problem)
    search = Search(problem=problem, max_evaluations=400)
    run(search)
    assert search.best is not None
    proof = prove(Relaxation(problem=problem), search.best.rank[1], max_boxes=40)
    assert found is not None
    optimum_s = found[2]
    assert proof.bound_s <= optimum_s * (1 + 1e-9)
    assert optimum_s <= search.best.rank[1] * (1 + 1e-9)
    assert search.best.rank[1] * (1 - (1 - proof.bound_s / search.best.rank[1])) <= optimum_s * (1 + 1e-9)
    assert verify(Relaxation(problem=problem), proof) == pytest.approx(proof.bound_s, rel=1e-12)


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(8))
def test_bound_and_plan_against_every_table(seed: int) -> None:
    check_instance(seed)


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", [8, 10, 16, 18])
def test_bound_and_plan_where_sites_have_several_levels(seed: int) -> None:
    check_instance(seed, nodes=(2,) if seed < 12 else (2, 2))


@pytest.mark.parametrize("seed", [3, 5, 40])
def test_the_best_of_all_tables_counts_what_a_probe_measures(seed: int) -> None:
    """Overheads of experts and messages, jitter and sharing decide, too: without them seed 40 has another table."""
    sites, experts = (2, 2) if seed == 40 else (3, 1)
    problem = random_problem(seed, sites, experts, inside=0)
    assert (problem.cluster.gpu.sharing > 1) == (seed != 3)
    tables = [np.array(one).reshape(sites, experts) for one in product(range(sites), repeat=sites * experts)]
    best_s = min(site_cost(problem, table, one).step_s for table in tables for one in problem.configurations())
    found = best_table(problem)
    assert found is not None and found[2] == pytest.approx(best_s, rel=1e-12)
    assert site_cost(problem, found[0], found[1]).step_s == pytest.approx(best_s, rel=1e-12)


def test_bound_where_ranks_and_their_tokens_differ() -> None:
    """A site's rows are its own, and more than those of the site that has fewest."""
    problem = random_problem(28, 3, 1)
    assert np.ptp(problem.tokens) > 0 and problem.cluster.has_uneven_gpus
    optimum = best_table(problem)
    assert optimum is not None
    assert 0.2 * optimum[2] < prove(Relaxation(problem=problem), 2 * optimum[2], max_boxes=30).bound_s <= optimum[2] * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 1300, 30))
def test_three_hundred_instances(first: int) -> None:
    for seed in range(first, first + 30):
        check_instance(seed)


@pytest.fixture
def problem() -> SiteProblem:
    rng = np.random.default_rng(5)
    return site_problem(uneven_cluster(rng, 6, 2), small_workload(rng, 12))


def proof_of(problem: SiteProblem) -> Proof:
    search = Search(problem=problem, max_evaluations=300)
    run(search)
    assert search.best is not None
    return prove(Relaxation(problem=problem), search.best.rank[1], max_boxes=40)


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(2))
def test_no_random_table_beats_the_bound(seed: int) -> None:
    """Larger than the oracle can do: any evidence on any box must stay below every plan in that box."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, 7, 10)
    relaxation = Relaxation(problem=problem)
    bound_s, best_s = proof_of(problem).bound_s, solve_sites(problem, Wishes(time_limit_s=1.0)).found.rank[1]
    for _ in range(30):
        table = random_table(rng, problem)
        if rng.random() < 0.5:
            table = np.where(rng.random(table.shape) < 0.2, table, problem.home_site)
        for configuration in problem.configurations():
            assert site_cost(problem, table, configuration).step_s >= bound_s * (1 - 1e-9)
    for root in relaxation.roots():
        program = box_program(relaxation, root)
        assert program is not None
        rows, columns = program.inequality.shape[0], program.frame.equality.shape[0]
        worse = Duals(inequality=rng.random(rows) * 10, equality=rng.normal(size=columns))
        assert proven_s(relaxation, root, worse) <= best_s * (1 + 1e-9)


@pytest.mark.turns(4)
def test_multipliers_of_one_program_prove_other_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more sites than ``SMALL`` few programs are solved; without the multipliers of others as many boxes prove less."""
    relaxation = Relaxation(problem=random_problem(6, 10, 12))
    search = Search(problem=relaxation.problem, max_evaluations=300)
    run(search)
    assert search.best is not None
    best_s = search.best.rank[1]
    proof = prove(relaxation, best_s, max_boxes=40)
    used = Counter(id(evidence) for _, evidence in proof.parts if isinstance(evidence, Duals))
    assert used and max(used.values()) > 1
    assert verify(relaxation, proof) == pytest.approx(proof.bound_s, rel=1e-9)
    monkeypatch.setattr(bound, "_by_known", lambda *given: given[1])
    assert prove(relaxation, best_s, max_boxes=40).bound_s < proof.bound_s


def wide(problem: SiteProblem, monkeypatch: pytest.MonkeyPatch) -> tuple[Relaxation, Proof]:
    """A proof whose boxes are cut sixteen at once."""
    monkeypatch.setattr(bound, "SHARE", 1)
    relaxation = Relaxation(problem=problem)
    search = Search(problem=problem, max_evaluations=100)
    run(search)
    assert search.best is not None
    return relaxation, prove(relaxation, search.best.rank[1], max_boxes=200)


SIDE_BY_SIDE: dict[str, tuple[Callable[[], SiteProblem], int]] = {
    "homes told apart": (lambda: random_problem(6, 8, 12), 600),
    "homes not told apart": (lambda: random_problem(6, 8, 12), 0),
    "of few kinds": (lambda: few_kinds(1, 6, 12), 600),
    "as fast back as there": (lambda: few_kinds(0, 6, 12), 600),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_boxes_side_by_side_are_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, variables = SIDE_BY_SIDE[name]
    monkeypatch.setattr(lp, "MOST_VARIABLES", variables)
    relaxation, proof = wide(make(), monkeypatch)
    assert verify(relaxation, proof) == pytest.approx(proof.bound_s, rel=1e-12)
    compared = 0
    for root in relaxation.roots():
        boxes = [root, *(box for box, _ in proof.parts if box.residency is root.residency)]
        found = all_narrowed(relaxation, boxes, 1.2 * proof.best_s)
        for box, narrow in zip(boxes, found, strict=True):
            alone = narrowed(Relaxation(problem=relaxation.problem), box, 1.2 * proof.best_s)
            assert (alone is None) == (narrow is None)
            if alone is not None and narrow is not None:
                assert narrow.inside(alone) and alone.inside(narrow)
        some = [narrow for narrow in found if narrow is not None]
        if not some:
            continue
        ends, program = side_by_side(some), box_program(relaxation, some[0])
        assert program is not None
        rng = np.random.default_rng(0)
        anything = Duals(inequality=rng.random(len(program.right)), equality=rng.normal(size=len(program.frame.total)))
        known = [anything, *(duals for _, duals in proof.parts if isinstance(duals, Duals))][:5]
        together = programs(relaxation, ends, relaxation.limits(ends)).values_s(known)
        for one, values_s in zip(some, together, strict=True):
            program = box_program(relaxation, one)
            assert program is not None
            assert values_s == pytest.approx([weak_duality(program, duals) for duals in known], rel=1e-9)
            compared += 1
    assert compared > 1


def weak_duality(program: BoxProgram, duals: Duals) -> float:
    """As the module's docstring has it, with whole matrices."""
    frame = program.frame
    reduced = frame.costs + program.inequality.T @ duals.inequality - frame.equality.T @ duals.equality
    ends = np.minimum(reduced * program.bounds[:, 0], reduced * program.bounds[:, 1]).sum()
    return float(frame.total @ duals.equality - program.right @ duals.inequality + ends)


@cache
def known_plan() -> tuple[SiteProblem, float]:
    problem = random_problem(6, 7, 10)
    return problem, solve_sites(problem, Wishes(time_limit_s=1.0)).found.rank[1]


@pytest.mark.turns(2)
@pytest.mark.parametrize("module", ["bound.all_narrowed", "bound.heapq.heappush", "bound.widest", "bound.box_program"])
@pytest.mark.parametrize("after", [5, 60])
def test_interrupted_proofs_leave_nothing_out(module: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever Ctrl-C hits while boxes are cut, several at once."""
    problem, best_s = known_plan()
    monkeypatch.setattr(bound, "SHARE", 1)
    place, name = module.rsplit(".", 1)
    owner = bound.heapq if place == "bound.heapq" else bound
    right, calls = getattr(owner, name), 0

    def interrupting(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt
        return right(*given)

    monkeypatch.setattr(owner, name, interrupting)
    relaxation = Relaxation(problem=problem)
    proof = prove(relaxation, best_s, max_boxes=800)
    monkeypatch.undo()
    assert proof.interrupted
    assert verify(relaxation, proof) == pytest.approx(proof.bound_s, rel=1e-12)


def test_evidence_that_proves_nothing_is_refused(problem: SiteProblem) -> None:
    relaxation = Relaxation(problem=problem)
    root = relaxation.roots()[0]
    program = box_program(relaxation, root)
    assert program is not None
    rows, columns = program.inequality.shape[0], program.frame.equality.shape[0]
    with pytest.raises(ValueError, match="at least zero"):
        proven_s(relaxation, root, Duals(inequality=-np.ones(rows), equality=np.zeros(columns)))


def test_proofs_that_leave_plans_out_are_refused(problem: SiteProblem) -> None:
    relaxation = Relaxation(problem=problem)
    proof = proof_of(problem)
    assert len(proof.parts) > 2
    for left_out, (box, _) in enumerate(proof.parts):
        parts = tuple(part for index, part in enumerate(proof.parts) if index != left_out)
        if not any(box.inside(other) for other, _ in parts):  # a whole box may bound one of its halves
            with pytest.raises(ValueError, match="leaves out"):
                verify(relaxation, replace(proof, parts=parts))


def test_a_claimed_bound_is_not_believed(problem: SiteProblem) -> None:
    proof = proof_of(problem)
    lie = replace(proof, bound_s=proof.bound_s * 1.5)
    assert verify(Relaxation(problem=problem), lie) < lie.bound_s


def too_few_held(limits: Limits) -> Limits:
    return replace(limits, most_held=np.maximum(limits.most_held - 1, 1), copies=np.maximum(limits.copies - 1, 0))


MUTATIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "rows counted twice": ("rows", lambda rows: 2 * rows),
    "half too large budgets": ("budgets_s", lambda budgets: tuple(1.5 * value for value in budgets)),
    "latency counted five times": ("token_latency_s", lambda latency: 5 * latency),
    "copies cost what they hide": ("copies_s", lambda copies_s: lambda *args: copies_s(*args) * 1.5),
    "sites hold one expert too few": ("limits", lambda limits: lambda box: too_few_held(limits(box))),
    "more is fixed than is": ("base_s", lambda base_s: base_s * 1.3),
}


@cache
def small_optimum(seed: int) -> tuple[SiteProblem, float]:
    problem = random_problem(seed, *SMALL[seed % len(SMALL)])
    optimum = best_table(problem)
    assert optimum is not None
    return problem, optimum[2]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_relaxation_is_caught_by_the_oracle(name: str) -> None:
    """Each mistake makes the bound exceed the optimum of one of a few small instances: the oracle's tests would fail."""
    attribute, change = MUTATIONS[name]

    def exceeds(seed: int) -> bool:
        problem, optimum_s = small_optimum(seed)
        relaxation = Relaxation(problem=problem)
        wrong = change(getattr(relaxation, attribute))
        relaxation.__dict__[attribute] = wrong  # a cached value, or a method of this one object
        return prove(relaxation, 2 * optimum_s, max_boxes=100).bound_s > optimum_s * (1 + 1e-6)

    assert any(exceeds(seed) for seed in range(10, 24))


@pytest.mark.parametrize("seed", range(12))
def test_bound_of_few_kinds_against_every_table(seed: int) -> None:
    """Sites taken together, and ways back as fast as ways there."""
    problem = few_kinds(seed, *[(2, 3), (3, 2), (2, 4)][seed % 3])
    relaxation, optimum = Relaxation(problem=problem), best_table(problem)
    assert relaxation.tied is (seed % 3 == 0)
    assert relaxation.classes.merged or seed % 2 == 0 or relaxation.tied
    if optimum is None:
        return
    proof = prove(relaxation, 1.5 * optimum[2], max_boxes=60)
    assert verify(relaxation, proof) == pytest.approx(proof.bound_s, rel=1e-12)
    assert proof.bound_s <= optimum[2] * (1 + 1e-9)


def test_a_trunk_slower_than_every_link_leaves_time_for_tokens() -> None:
    """Copies of these experts are a hundred times the bytes of all tokens, however slow the cable that both cross."""
    cluster = uneven_cluster(np.random.default_rng(3), 3, 0)
    data = cluster.model_dump(mode="json", exclude_none=True)
    pairs = {f"{a.name} -> {b.name}": 1.0 for a, b in permutations(cluster.sites, 2)}
    data["trunks"] = [{"name": "cable", "bandwidth": "1 kB/s", "carries": pairs}]
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 64, "num_experts": 3, "top_k": 1}
    training = {"sequence_length": 4, "micro_batch_size": 1, "micro_batches": 1}
    workload = build(Workload, {"name": "test", "model": model | {"expert_ffn_size": 1024}, "training": training}, "test")
    problem = site_problem(build(Cluster, data, "test"), workload)
    optimum = best_table(problem)
    assert optimum is not None and (optimum[0] == problem.home_site).all()
    assert prove(Relaxation(problem=problem), 2 * optimum[2], max_boxes=30).bound_s <= optimum[2] * (1 + 1e-9)


def test_where_the_last_tokens_are_dropped_groups_of_sites_are_no_faster_than_proven() -> None:
    """Nearly all experts per token, of which most drop it: a row to a site finds then more than a line up to all experts says."""
    sites, size = [{"name": f"s{i}"} for i in range(4)], 16
    cluster = {
        "name": "test",
        "levels": [{"name": "dc", "size": 4, "bandwidth": "100 Mbps", "latency": "0 s"}],
        "gpu": {"throughput": "1000 TFLOPS", "memory": "64 GiB", "memory_bandwidth": "1000 TB/s"},
        "sites": [site | {"down": "400 Mbps"} for site in sites],
    }
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 4, "num_experts": size, "expert_ffn_size": 8}
    model |= {"top_k": 14, "capacity_factor": 0.25, "token_drop_policy": "position"}
    training = {"sequence_length": 4, "micro_batch_size": 16}
    workload = build(Workload, {"name": "test", "model": model, "training": training}, "test")
    codecs = {"dc": Codecs(gradients=GradientCodec.TOP_K)}
    problem = site_problem(build(Cluster, cluster, "test"), workload, codecs=codecs)
    # Each half of the sites has all experts, a half of them at each site.
    table = np.repeat([problem.home_site % 2, problem.home_site % 2 + 2], 2, axis=0)
    step_s = min(site_cost(problem, table, one).step_s for one in problem.configurations())
    proof = prove(Relaxation(problem=problem), 1.05 * step_s, max_boxes=600)
    assert 0.99 * step_s < proof.bound_s <= step_s * (1 + 1e-9)
