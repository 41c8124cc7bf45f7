"""The file in which a run keeps what its gates chose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridep.commands.inputs import load_cluster, load_workload
from hybridep.errors import ConfigError, UserError
from hybridep.plan import LayerGroup, Plan
from hybridep.routing import RoutingRecord, load_routing
from hybridep.traffic import Op, OpLevel, expected_rows, step_traffic


def plan() -> Plan:
    workload = load_workload("tiny", ["training.sequence_length=8", "training.micro_batch_size=1", "model.num_layers=2"])
    group = LayerGroup(first_layer=0, num_layers=2, domains={"dc": 4}, migration={"dc": 0.5})
    return Plan(cluster=load_cluster("lab-4dc"), workload=workload, layers=(group,))


def record(rng: np.random.Generator) -> RoutingRecord:
    made = plan()
    choices = {
        (layer, 0): rng.permuted(np.broadcast_to(np.arange(16), (made.cluster.num_gpus, 8, 16)), axis=2)[..., :4]
        for layer in range(2)
    }
    return RoutingRecord(chosen=rng.integers(1, 20, size=(2, 16)), choices=choices)


def test_a_file_gives_back_what_was_saved(tmp_path: Path, rng: np.random.Generator) -> None:
    made = record(rng)
    made.save(tmp_path / "routing.npz")
    found = load_routing(tmp_path / "routing.npz")
    np.testing.assert_array_equal(found.chosen, made.chosen)
    assert found.choices.keys() == made.choices.keys()
    for key, ids in made.choices.items():
        np.testing.assert_array_equal(found.choices[key], ids)
    found.require(plan(), tmp_path)


def test_choices_of_several_steps_come_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    """Two micro-batches a step: those of step n are numbers 2n and 2n + 1."""
    workload = plan().workload
    twice = workload.model_copy(update={"training": workload.training.model_copy(update={"micro_batches": 2})})
    ids = record(rng).choices[0, 0]
    choices = {(layer, batch): ids + 100 * layer + batch for layer in range(2) for batch in range(6)}
    made = RoutingRecord(chosen=np.ones((2, 16), dtype=np.int64), choices=choices)
    steps = made.steps(twice)
    assert len(steps) == 3
    for number, step in enumerate(steps):
        assert set(step) == {(layer, batch) for layer in range(2) for batch in range(2)}
        for (layer, batch), found in step.items():
            np.testing.assert_array_equal(found, ids + 100 * layer + 2 * number + batch)
    longer = plan().model_copy(update={"workload": twice})
    made.require(longer, tmp_path)
    del choices[1, 5]
    with pytest.raises(UserError, match="record with the same batch"):
        RoutingRecord(chosen=made.chosen, choices=choices).require(longer, tmp_path)
    assert RoutingRecord(chosen=made.chosen).steps(twice) == []


def test_partial_migration_copies_the_most_popular_of_each_layer(rng: np.random.Generator) -> None:
    popularity = record(rng).popularity()
    measured = plan().with_popularity(popularity)
    assert [layers.num_layers for layers in measured.placed] == [1, 1]
    for layers, shares in zip(measured.placed, popularity, strict=True):
        placement = layers.placement
        copied = placement.holds.sum(axis=0) > 1
        for rank in range(placement.num_gpus):
            here = placement.home == rank
            if copied[here].any() and not copied[here].all():
                assert min(np.array(shares)[here & copied]) >= max(np.array(shares)[here & ~copied])
    # Fewer tokens leave than when what is copied is chosen by number.
    dispatch = OpLevel(Op.TOKEN_DISPATCH, 0)
    group = measured.layers[0]
    numbered = [group.placement(measured.cluster, 16)] * 2
    rows = sum(expected_rows(p, layers.gating)[0].sum() for p, layers in zip(numbered, measured.placed, strict=True))
    hot = step_traffic(measured)[dispatch].sum() / measured.workload.dispatch_row_bytes
    assert hot < rows


def test_what_does_not_fit_the_plan_is_refused(tmp_path: Path, rng: np.random.Generator) -> None:
    made = record(rng)
    with pytest.raises(UserError, match="is no record of routing"):
        load_routing(tmp_path / "missing.npz")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(UserError, match="is no record of routing"):
        load_routing(tmp_path / "broken.npz")
    (tmp_path / "plan.yaml").write_text("name: a plan\n")
    with pytest.raises(UserError, match=r"is no record of routing.*routing\.npz$"):
        load_routing(tmp_path / "plan.yaml")
    with pytest.raises(UserError, match=r"\(MoE layers, experts\) are \(2, 15\)"):
        RoutingRecord(chosen=made.chosen[:, :15]).require(plan(), tmp_path)
    fewer = {key: ids[:2] for key, ids in made.choices.items()}
    with pytest.raises(UserError, match="record with the same batch and number of ranks"):
        RoutingRecord(chosen=made.chosen, choices=fewer).require(plan(), tmp_path)
    # As tokens choose that have one expert, not four: half of them the same.
    alone = made.chosen.copy()
    alone[1, 5] = alone[1].sum() - alone[1, 5]
    with pytest.raises(UserError, match=r"in MoE layer 1 one expert has 50\.0% .* none can have over 25\.0%"):
        RoutingRecord(chosen=alone).require_model(plan().workload, tmp_path)
    shares = [list(row) for row in made.popularity()]
    shares[1][0] += 0.1
    with pytest.raises(ConfigError, match=r"popularity\.1: shares must"):
        plan().with_popularity(tuple(tuple(row) for row in shares))
    with pytest.raises(ConfigError, match="1 layers, the model has 2"):
        plan().with_popularity(made.popularity()[:1])


def test_layers_without_tokens_count_as_even() -> None:
    assert RoutingRecord(chosen=np.zeros((1, 4), dtype=np.int64)).popularity() == ((0.25,) * 4,)
