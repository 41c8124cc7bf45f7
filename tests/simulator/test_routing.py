import numpy as np
import pytest
from simulated_plans import make_plan

from hybridep.gating import gating
from hybridep.traffic import expected_rows, routed_rows
from hybridep.workload import DropPolicy
from simulator.errors import SimulationError
from simulator.routing import zipf_routing
from simulator.step import simulate_step

PLAN = make_plan(4, 2, num_experts=16)


def shares(exponent: float, **options: float) -> np.ndarray:
    routing = zipf_routing(PLAN, exponent=exponent, seed=3, **options)  # type: ignore[arg-type]
    return np.stack([np.bincount(routing[layer, 0].ravel(), minlength=16) for layer in range(2)]) / (8 * 64)


def test_tokens_choose_distinct_experts_and_the_same_again() -> None:
    first, second = (zipf_routing(PLAN, exponent=1.0, seed=3) for _ in range(2))
    for key, choices in first.items():
        assert choices.shape == (8, 64, 3)
        assert all(len(set(row)) == 3 for row in choices.reshape(-1, 3).tolist())
        np.testing.assert_array_equal(choices, second[key])
    assert (zipf_routing(PLAN, exponent=1.0, seed=4)[0, 0] != first[0, 0]).any()


def test_shares_follow_the_exponent() -> None:
    assert shares(0.0).max() < 0.3  # 3 of 16 each, 512 tokens
    steep = np.sort(shares(2.0), axis=1)[:, ::-1]
    assert (steep[:, 0] > 0.85).all()
    assert (steep[:, 4:] < 0.3).all()
    assert np.argmax(shares(2.0)[0]) != np.argmax(shares(2.0)[1])


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_tokens_keep_to_their_groups_and_travel_as_expected(exponent: float) -> None:
    """Rows drawn are those that are expected, also of the popularity that was drawn; without groups a third more are."""
    model = PLAN.workload.model.model_copy(update={"expert_groups": 4, "groups_per_token": 1, "top_k": 3})
    training = PLAN.workload.training.model_copy(update={"sequence_length": 1024})
    plan = PLAN.model_copy(update={"workload": PLAN.workload.model_copy(update={"model": model, "training": training})})
    choices = zipf_routing(plan, exponent=exponent, seed=3)[0, 0]
    assert all(len(set(row)) == 1 for row in (choices // 4).reshape(-1, 3).tolist())
    [placement] = {one.placement for one in plan.placed}
    shares = np.bincount(choices.ravel(), minlength=16) / choices.size
    known = gating(plan.workload, shares.tolist() if exponent else None, plan.cluster)
    drawn, expected = (np.sum(one[0]) for one in (routed_rows(placement, choices), expected_rows(placement, known)))
    assert drawn == pytest.approx(expected, rel=0.03)
    free = expected_rows(placement, gating(PLAN.workload))
    assert float(np.sum(free[0])) * 1024 / PLAN.workload.training.sequence_length > 1.3 * drawn


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_experts_drop_what_they_have_no_room_for(policy: str) -> None:
    """As many rows as expected; those that stay are the first of a sequence, or any."""
    model = PLAN.workload.model.model_copy(update={"capacity_factor": 1.0, "token_drop_policy": DropPolicy(policy)})
    training = PLAN.workload.training.model_copy(update={"sequence_length": 512, "micro_batch_size": 2})
    free = PLAN.model_copy(update={"workload": PLAN.workload.model_copy(update={"training": training})})
    plan = free.model_copy(update={"workload": free.workload.model_copy(update={"model": model})})
    for exponent in (0.0, 2.0, 1e300):
        chosen, kept = (zipf_routing(one, exponent=exponent, seed=3)[0, 0].reshape(16, 512, 3) for one in (free, plan))
        assert ((kept == chosen) | (kept == -1)).all()
        for before, after in zip(chosen, kept, strict=True):
            counts = np.bincount(before.ravel(), minlength=16)
            assert np.bincount(after[after >= 0], minlength=16).tolist() == np.minimum(counts, 96).tolist()
            first = np.flatnonzero((before == counts.argmax()).any(axis=1))[:96]
            assert (after[first] == counts.argmax()).any(axis=1).all() == (policy == "position")
    [placement] = {one.placement for one in plan.placed}
    drawn = routed_rows(placement, zipf_routing(plan, exponent=0.0, seed=3)[0, 0])
    assert np.sum(drawn[0]) == pytest.approx(np.sum(expected_rows(placement, gating(plan.workload))[0]), rel=0.01)


def test_popularity_drifts_as_far_as_asked() -> None:
    def distance(drift: float) -> float:
        return float(np.abs(shares(2.0, step=5, drift=drift) - shares(2.0)).sum())

    assert distance(0.0) < distance(0.1) < distance(0.9)


def test_uneven_choices_slow_the_step() -> None:
    even, uneven = (simulate_step(PLAN, zipf_routing(PLAN, exponent=exponent, seed=3)).step_s for exponent in (0.0, 2.0))
    assert uneven > 1.1 * even


@pytest.mark.parametrize("options", [{"exponent": -1.0}, {"exponent": 1.0, "drift": 2.0}, {"exponent": 1.0, "step": -1}])
def test_misuse_names_the_values(options: dict[str, float]) -> None:
    with pytest.raises(SimulationError, match="must not be negative"):
        zipf_routing(PLAN, seed=0, **options)  # type: ignore[arg-type]
