"""Training over any plan equals training in one process, and sends the bytes that the traffic function says.

Mutations show that these comparisons can fail: each breaks one thing in one rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rank_pool import Pools
from training_cases import (
    CROSS,
    DEEPSEEK_GATE,
    MODELS,
    STEPS,
    Case,
    Outcome,
    cases,
    check_bytes,
    check_fidelity,
    check_losses,
    divisors,
    order_of_copies,
    reference_of,
    train_case,
    training_run,
    wild_cases,
)

from hybridep.plan import Residency
from hybridep.recompute import Recompute
from hybridep.run import Data
from runtime.transport import Posted

pytestmark = pytest.mark.timeout(180)

ATTENTION, EXPERTS = Recompute
BOTH = ATTENTION | EXPERTS
FOUR = [
    *cases((2, 2), 4),
    Case(sizes=(2, 2), domains=(1, 2), random_serving=1, micro_batches=2),
    Case(sizes=(2, 2), domains=(1, 1), tokens=(3, 1), model="top1-gelu-shared", micro_batches=2),
    Case(sizes=(2, 2), domains=(2, 1), tokens=(1, 3), model="drop-padded", residency=Residency.MICROBATCH),
    *(Case(sizes=(2, 2), domains=(2, 1), streams=3, prefetch=prefetch) for prefetch in (0, 1)),
    Case(sizes=(2, 2), domains=(2, 1), recompute=EXPERTS, micro_batches=2, model="qwen2"),
    Case(sizes=(2, 2), domains=(2, 2), recompute=EXPERTS, residency=Residency.MICROBATCH, prefetch=1, model="top4-tied-gqa"),
    Case(sizes=(2, 2), domains=(1, 2), recompute=EXPERTS, chunks=3, residency=Residency.MICROBATCH, micro_batches=2),
    Case(sizes=(2, 2), domains=(2, 1), recompute=EXPERTS, model="drop-padded", random_serving=3),
    Case(sizes=(2, 2), domains=(2, 1), recompute=ATTENTION, micro_batches=2, model="qwen2", prefetch=1),
    Case(sizes=(2, 2), domains=(1, 2), recompute=BOTH, micro_batches=2, model="dense-first-uneven"),
    Case(sizes=(2, 2), domains=(2, 2), recompute=ATTENTION, residency=Residency.MICROBATCH, model="top4-tied-gqa", prefetch=2),
    Case(sizes=(2, 2), domains=(1, 2), recompute=BOTH, chunks=3, residency=Residency.MICROBATCH, micro_batches=2, model="qwen2"),
    Case(sizes=(2, 2), domains=(2, 1), recompute=BOTH, model="drop-probs", random_serving=3, micro_batches=2),
    Case(sizes=(2, 2), domains=(2, 1), recompute=ATTENTION, model="top1-gelu-shared", chunks=2, micro_batches=2),
    Case(sizes=(2, 2), domains=(2, 2), recompute=BOTH, model="qwen3", overlap=False),
    Case(sizes=(2, 2), domains=(1, 2), chunks=2, micro_batches=2),
    Case(sizes=(2, 2), domains=(1, 1), chunks=5, residency=Residency.MICROBATCH, model="top4-tied-gqa"),
    Case(sizes=(2, 2), domains=(2, 1), migration=(0.5,), chunks=3, residency=Residency.MICROBATCH, micro_batches=2),
    Case(sizes=(2, 2), domains=(1, 1), random_serving=5, chunks=16, overlap=False),
    Case(sizes=(4, 1), domains=(1, 1), pods=(2, 1, 1), random_serving=3, residency=Residency.MICROBATCH, micro_batches=2),
]
EIGHT = [
    *cases((4, 2), 1),
    Case(sizes=(4, 2), domains=(1, 1), random_serving=2, residency=Residency.MICROBATCH, prefetch=1),
    Case(sizes=(2, 2, 2), domains=(2, 1, 2), micro_batches=2, migration=(0.5,)),
    Case(sizes=(2, 2, 2), domains=(1, 2, 1), chunks=2, micro_batches=2, model="dense-first-uneven"),
    Case(sizes=(2, 2, 2), domains=(1, 2, 1), random_serving=4, micro_batches=2, prefetch=2, recompute=ATTENTION),
]


class TrainingPools(Pools):
    """That train cases."""

    def train(self, case: Case, prepare: Callable[[Any], None] | None = None, steps: int = STEPS) -> list[Any]:
        return self.run(partial(train_case, steps=steps), case, prepare)

    def check(self, case: Case) -> None:
        """It trains as the single process does, and sends what its plan says."""
        outcomes = self.train(case)
        check_fidelity(case, outcomes)
        check_bytes(case, outcomes)


@pytest.fixture(scope="module")
def pools() -> Iterator[TrainingPools]:
    pools = TrainingPools()
    yield pools
    pools.close()


@pytest.mark.turns(6)
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_every_plan_on_four_ranks_equals_the_reference(pools: TrainingPools, case: Case) -> None:
    pools.check(case)


ALL = [
    Case(sizes=sizes, domains=domains, model=model, micro_batches=micro_batches)
    for sizes in ((2, 2), (4, 2))
    for domains in product(divisors(sizes[0]), divisors(sizes[1]))
    for model in CROSS
    for micro_batches in (1, 2)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=str)
def test_the_complete_cross_of_factors_equals_the_reference(pools: TrainingPools, case: Case) -> None:
    pools.check(case)


BIASED = Case(sizes=(2, 2), domains=(1, 2), model="top4-tied-gqa", micro_batches=2)


@pytest.mark.turns(2)
@pytest.mark.parametrize("recompute", [Recompute.NOTHING, BOTH], ids=["once", "again"])
def test_biases_are_the_same_to_the_bit(pools: TrainingPools, recompute: Recompute) -> None:
    """Those of the single process, at all ranks, though they follow the choices of all. They change what is chosen."""
    assert MODELS[BIASED.model].items() >= DEEPSEEK_GATE.items()
    case = replace(BIASED, recompute=recompute)
    outcomes = pools.train(case, steps=10)
    check_fidelity(case, outcomes)
    check_bytes(case, outcomes)
    _, expected = reference_of(case, outcomes)
    names = [f"layers.{layer}.feed_forward.gate.expert_bias" for layer in range(2)]
    for name in names:
        assert len(set(expected[name])) > 4 and np.abs(expected[name]).max() > 3 * DEEPSEEK_GATE["expert_bias_update_rate"]
        assert all(np.array_equal(outcome.parameters[name], expected[name]) for outcome in outcomes)


def in_small_pieces(trainer: Any) -> None:
    trainer.dense_reduce.piece = 700


@pytest.mark.turns(2)
@pytest.mark.parametrize("sizes", [(2, 3), (2, 2, 2)], ids=str)
def test_dense_gradients_in_pieces_equal_the_reference(pools: TrainingPools, sizes: tuple[int, ...]) -> None:
    """As those of large models travel inside sites: parts are not multiples of a piece, nor all as long."""
    case = Case(sizes=sizes, domains=(1,) * len(sizes), model="qwen2", micro_batches=1)
    outcomes = pools.train(case, in_small_pieces)
    check_fidelity(case, outcomes)
    check_bytes(case, outcomes)


WILD_PLANS = wild_cases(20)


@pytest.mark.turns(5)
@pytest.mark.parametrize("case", WILD_PLANS[:10], ids=str)
def test_some_random_placements_equal_the_reference(pools: TrainingPools, case: Case) -> None:
    """Those on four ranks."""
    pools.check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", WILD_PLANS[10:], ids=str)
def test_random_placements_equal_the_reference(pools: TrainingPools, case: Case) -> None:
    """Partial migration of the most popular, homes and plans that differ by layer, both residencies, with and without drops."""
    pools.check(case)


def log_exchanges(rank: int, case: Case) -> list[tuple[str, str]]:
    """("posted" or "begun", label) of one step's exchanges of tokens, in order."""
    log: list[tuple[str, str]] = []

    def prepare(trainer: Any) -> None:
        post = trainer.transport.post

        def logged_post(receives: Any, label: str) -> Any:
            log.append(("posted", label))
            posted = post(receives, label)

            def logged_begin(sends: Any) -> Any:
                log.append(("begun", label))
                return posted.begin(sends)

            return Posted(logged_begin)

        trainer.transport.post = logged_post

    train_case(rank, case, prepare, steps=1)
    return [(what, label) for what, label in log if label.startswith(("token", "combine", "dispatch"))]


def test_receives_are_posted_an_exchange_ahead(pools: TrainingPools) -> None:
    """All but the rows of a dispatch, whose number is not known, and the first counts of a micro-batch."""
    late = []
    for log in pools.run(log_exchanges, Case(sizes=(2, 2), domains=(1, 1), micro_batches=2)):
        waiting: dict[str, list[int]] = {}
        begun = 0
        for what, label in log:
            if what == "posted":
                waiting.setdefault(label, []).append(begun)
            else:
                if waiting[label].pop(0) == begun:
                    late.append(label.split("@")[0])
                begun += 1
        assert not any(waiting.values())
    assert set(late) == {"token_dispatch", "token_counts"}
    assert late.count("token_dispatch") == 4 * 2 * 2 * MODELS["plain"]["num_layers"], "ranks, micro-batches, hops, layers"
    assert late.count("token_counts") == 4 * 2, "the first of each micro-batch: the second hop's are posted with it"


def test_cases_cover_what_plans_can_say() -> None:
    for sizes, found in (((2, 2), FOUR), ((4, 2), EIGHT)):
        same = [case for case in found if case.sizes == sizes and case.random_serving is None and not case.tokens]
        assert {case.residency for case in same} == set(Residency)
        assert {case.micro_batches for case in same} == {1, 2}
        assert {case.model for case in same} == set(MODELS)
        assert len({case.migration for case in same}) == 4
        assert {case.prefetch for case in same} == {0, 1, 2}
        assert {case.residency for case in same if case.prefetch} == set(Residency)
        assert len({case.domains for case in same}) == len(divisors(sizes[0])) * len(divisors(sizes[1]))


NARROW = Case(sizes=(2, 2), domains=(2, 1), migration=(0.5,), model="dense-first-uneven", micro_batches=2)


def test_fp32_follows_the_reference(pools: TrainingPools) -> None:
    case = replace(NARROW, dtype="fp32")
    outcomes = pools.train(case)
    check_fidelity(case, outcomes, 1e-3)
    check_bytes(case, outcomes)


@pytest.mark.turns(6)
@pytest.mark.parametrize("coded", [False, pytest.param(True, marks=pytest.mark.turns(4))], ids=["few", "many-coded"])
def test_bf16_follows_the_reference(pools: TrainingPools, coded: bool) -> None:
    """Its token rows put 4-byte ids after 2-byte elements: nothing may rely on alignment. Only losses are compared: where a
    gradient is nearly zero, AdamW turns rounding into a whole step. Sums of many micro-batches are wider than what travels."""
    codecs = tuple((level, (("gradients", "int8"),)) for level in ("dc", "gpu") if coded)
    case = replace(NARROW, dtype="bf16", codecs=codecs, micro_batches=9 if coded else 2)
    outcomes = pools.train(case)
    check_losses(case, outcomes, 1e-2)
    check_bytes(case, outcomes)


def gradients_of_equal_micro_batches(rank: int, case: Case, text: Path) -> tuple[NDArray[Any], ...]:
    """In bf16: of dense parameters what this rank has added up, of experts at home what all ranks have."""
    import torch

    from runtime.mesh import Mesh
    from runtime.trainer import RankTrainer

    trainer = RankTrainer(training_run(data=Data(path=text)), Mesh(plan=case.plan(), rank=rank))
    try:
        trainer.gradients(1)
        for experts in trainer.model.routed:
            experts.exchange.finish_return()
        gradients = [one.grad for one in (*trainer.dense.values(), *trainer.model.home_parameters().values())]
        return tuple(one.to(torch.bfloat16).double().numpy().copy() for one in gradients if one is not None)
    finally:
        trainer.close()


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "case",
    [
        NARROW,
        replace(NARROW, domains=(2, 2), migration=()),
        replace(NARROW, domains=(2, 2), migration=(), residency=Residency.MICROBATCH),
        replace(NARROW, chunks=2, prefetch=0, model="qwen2"),
        replace(NARROW, prefetch=1, model="top4-tied-gqa", recompute=ATTENTION),
    ],
    ids=str,
)
def test_gradients_of_bf16_add_up_without_loss(pools: TrainingPools, tmp_path: Path, case: Case) -> None:
    """Sixteen equal micro-batches have the gradient that one has, which counts sixteen times as much: three times a number of
    bf16 may be none."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"x" * 99)
    many, one = (
        pools.run(gradients_of_equal_micro_batches, replace(case, dtype="bf16", micro_batches=number), text) for number in (16, 1)
    )
    for found, expected in zip(many, one, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert sum(gradient.any() for gradient in found) > 10


def rehearse_gpu(rank: int, case: Case) -> Outcome:
    """What a GPU does otherwise, on CPU: experts through the operators, every message through host memory of its own."""
    from runtime import staging
    from runtime.kernels import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "in_plain_torch", local.with_kernels)
        patch.setattr(staging, "needs_staging", lambda tensor: True)
        return train_case(rank, case)


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
def test_the_path_of_a_gpu_follows_the_reference(pools: TrainingPools, dtype: str) -> None:
    case = replace(NARROW, dtype=dtype, residency=Residency.MICROBATCH)
    outcomes = pools.run(rehearse_gpu, case)
    if dtype == "fp64":
        check_fidelity(case, outcomes)
    check_losses(case, outcomes, 1e-2)
    check_bytes(case, outcomes)


def watch_copies(rank: int, case: Case) -> list[int]:
    """Bytes of copies that the rank holds while each block of the second step routes, and afterwards."""
    from runtime.mesh import Mesh
    from runtime.trainer import RankTrainer

    trainer = RankTrainer(training_run(), Mesh(plan=case.plan(), rank=rank))
    held: list[int] = []

    def look(*_: Any) -> None:
        held.append(sum(experts.exchange._copies.untyped_storage().size() for experts in trainer.model.routed))

    try:
        trainer.step(1)
        for block in trainer.model.transformer.moe_blocks():
            block.routing_hook = look
        trainer.step(2)
        look()
    finally:
        trainer.close()
    return held


def test_microbatch_residency_holds_one_block_at_a_time(pools: TrainingPools) -> None:
    case = Case(sizes=(2, 2), domains=(2, 2), residency=Residency.MICROBATCH)
    one_block = 6 * case.plan().workload.expert_bytes
    for held in pools.run(watch_copies, case):
        # In its own forward a block's copies are on their way, those of the block before are gone.
        assert held == [one_block, one_block, 0]
    for held in pools.run(watch_copies, replace(case, prefetch=1)):
        assert held == [2 * one_block, one_block, 0]
    for held in pools.run(watch_copies, replace(case, residency=Residency.STEP)):
        assert held == [2 * one_block] * 3


def hold_copies_back(rank: int, case: Case, wait_s: float) -> dict[str, bool]:
    """Keep every gather and return from running until the computation it should run beside is over; says for each whether
    that came to pass within ``wait_s``."""
    from runtime.mesh import Mesh
    from runtime.trainer import RankTrainer

    trainer = RankTrainer(training_run(), Mesh(plan=case.plan(), rank=rank))
    over: dict[str, threading.Event] = {}
    found: dict[str, bool] = {}
    layers = {id(block.routed.exchange): block.layer for block in trainer.model.transformer.moe_blocks()}
    for layer in trainer.model.transformer.layers.values():
        forward, backward = (f"{kind} {layer.feed_forward.layer}" for kind in ("_gather", "_return"))
        over[forward], over[backward] = threading.Event(), threading.Event()
        layer.attention.register_forward_hook(lambda *_, event=over[forward]: event.set())
        layer.attention.register_full_backward_hook(lambda *_, event=over[backward]: event.set())
    submit = trainer.stream.submit

    def held(work: Any) -> Any:
        name = f"{work.__name__} {layers[id(work.__self__)]}"

        def later() -> Any:
            found[name] = over[name].wait(wait_s)
            return work()

        return submit(later)

    trainer.stream.submit = held
    try:
        trainer.step(1)
    finally:
        trainer.close()
    return found


def test_computation_does_not_wait_for_copies(pools: TrainingPools) -> None:
    """A block's gather may arrive after its attention, its gradients may leave after the attention's backward; without
    overlap both come first."""
    case = Case(sizes=(2, 2), domains=(2, 1))
    names = {f"{kind} {layer}" for kind in ("_gather", "_return") for layer in range(2)}
    for found in pools.run(hold_copies_back, case, 20.0):
        assert found == dict.fromkeys(names, True)
    for found in pools.run(hold_copies_back, replace(case, overlap=False), 0.05):
        assert found == dict.fromkeys(names, False)


def test_prefetch_sends_copies_ahead_and_gradients_behind(pools: TrainingPools) -> None:
    case = Case(sizes=(2, 2), domains=(2, 1))
    for found in pools.run(order_of_copies, replace(case, prefetch=1)):
        assert found == [
            *("_gather 0", "_gather 1", "forward 0", "forward 1"),
            *("_return 1", "backward 1", "_return 0", "backward 0", "held True"),
        ]
    for found in pools.run(order_of_copies, case):
        assert found == [
            *("_gather 0", "forward 0", "_gather 1", "forward 1"),
            *("_return 1", "backward 1", "_return 0", "backward 0"),
        ]


def _drop_gradient_return(trainer: Any) -> None:
    """Rank 1 loses what came back for its experts of layer 0."""
    exchange = trainer.model.routed[0].exchange
    original = exchange._return
    if trainer.mesh.rank == 1:
        exchange._return = lambda: original() * 0


def _swap_copies(trainer: Any) -> None:
    """Rank 2 takes its first two copies for each other."""
    place = trainer.model.routed[1]._place_E
    first, second = trainer.model.routed[1].exchange.held[-2:]
    if trainer.mesh.rank == 2:
        place[first], place[second] = place[second].clone(), place[first].clone()


def _swap_rows(trainer: Any) -> None:
    """Rank 0 gives its first two rows each other's combined output, in the first hop of every layer."""
    dispatcher = trainer.model.routed[0].dispatcher
    original = dispatcher.back

    def swapped(hop: Any, op: Any, x_NH: Any, beside: Any = ()) -> Any:
        sums = original(hop, op, x_NH, beside)
        if op.value == "token_combine" and hop.level == 0:
            sums[0][[0, 1]] = sums[0][[1, 0]]
        return sums

    if trainer.mesh.rank == 0:
        dispatcher.back = swapped


def _forget_last_sum(trainer: Any) -> None:
    """Rank 3's part of the dense gradients counts twice."""
    if trainer.mesh.rank == 3:
        weight = trainer.model.transformer.norm.weight
        weight.register_hook(lambda gradient: gradient * 2)


def _count_own_choices(trainer: Any) -> None:
    """Rank 2's biases follow its own tokens."""
    total = trainer.expert_bias._total

    def own(counts: Any) -> None:
        total(counts.clone())

    if trainer.mesh.rank == 2:
        trainer.expert_bias._total = own


@pytest.mark.parametrize("mutation", [_drop_gradient_return, _swap_copies, _swap_rows, _forget_last_sum, _count_own_choices])
def test_the_comparison_notices(pools: TrainingPools, mutation: Callable[[Any], None]) -> None:
    case = Case(sizes=(2, 2), domains=(2, 2), model=BIASED.model if mutation is _count_own_choices else "plain")
    outcomes = pools.train(case, mutation)
    with pytest.raises(AssertionError):
        check_fidelity(case, outcomes)


def test_the_byte_comparison_notices(pools: TrainingPools) -> None:
    case = Case(sizes=(2, 2), domains=(1, 1))
    outcomes = pools.train(case)
    check_bytes(case, outcomes)
    # As if none of rank 1's tokens had left it in layer 0.
    outcomes[1].routing[0, 0][:] = np.flatnonzero(case.plan().placements[0].home == 1)
    with pytest.raises(AssertionError):
        check_bytes(case, outcomes)


# Last, so that the pool of eight ranks is started once and that of four never again.
@pytest.mark.turns(6)
@pytest.mark.parametrize("case", EIGHT, ids=str)
def test_every_plan_on_eight_ranks_equals_the_reference(pools: TrainingPools, case: Case) -> None:
    """Eight ranks on two cores take seven seconds a case."""
    pools.check(case)
