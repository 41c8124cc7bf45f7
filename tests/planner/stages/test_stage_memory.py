"""What stages have room for: what is known of a layer holds for all stages that have such layers, and how far ahead they run."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from stage_cases import KINDS, layered_workload, sites_cluster

from hybridep.pipeline import possible_micro_batches
from hybridep.recompute import Recompute, cheapest_first
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import StageWishes
from planner.memory import step_memory
from planner.stages.candidates import AHEAD, Candidates
from planner.stages.costs import rooms
from planner.stages.inside import Store, _further, _placements, without_search
from planner.stages.pipelines import candidates_of

pytestmark = pytest.mark.timeout(120)

PATH = ((0, 1), (2,), (3,))


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    return cluster.model_copy(update={"gpu": cluster.gpu.model_copy(update={"memory": memory_bytes})})


def of_all_kinds(seed: int) -> tuple[Cluster, Workload, Candidates]:
    """Four sites, and a model of which some layers may have no experts, in micro-batches whose sums may be wider."""
    rng = np.random.default_rng(seed)
    cluster = sites_cluster(rng, 4, int(rng.choice([1, 2, 4])), KINDS[seed % 3])
    workload = layered_workload(9, ffn=int(rng.choice([64, 1024])), micro_batches=int(rng.choice([1, 12])))
    changes = {"num_dense_layers": seed % 2, "dense_ffn_size": 512 * (seed % 2), "shared_ffn_size": 256 * (seed % 3)}
    workload = workload.model_copy(update={"model": workload.model.model_copy(update=changes)})
    return cluster, workload, candidates_of(cluster, workload, StageWishes())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.turns(4)) for seed in range(1, 6))])
def test_what_is_known_of_layers_is_what_stages_keep(seed: int) -> None:
    """One store for stages of other sites, places, layers and micro-batches, placed and computing again in any way."""
    _, workload, candidates = of_all_kinds(seed)
    store, asked, dense = Store(), 0, workload.model.num_dense_layers
    batches = workload.training.micro_batches
    for group in ((0, 1), (2,), (3,)):
        for number, first, layers in ((0, 0, dense + 2), (0, 0, dense + 3), (1, dense + 2, 1), (1, dense + 2, 2), (2, 6, 3)):
            for micro_batches in (4 * batches, 2 * batches):
                stage = candidates._stage(group, (number, first, layers), micro_batches)
                placements = [one for groups in _placements(stage) for one in groups]
                for layer in (*placements, *islice(_further(stage), 4)):
                    for again in (Recompute.NOTHING, *cheapest_first(stage.workload)):
                        placed = (layer.recomputing(again),)
                        found, expected = store.memory(stage, placed), step_memory(stage.with_layers(*placed))
                        asked += 1
                        for in_flight in (1, 3):
                            both = found.use(in_flight, 1e6), expected.use(in_flight, 1e6)
                            assert (both[0].total_bytes == both[1].total_bytes).all()
                            assert both[0].parts_bytes == both[1].parts_bytes
    assert asked > 10 * len(store.loads)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.turns(4)) for seed in range(1, 6))])
def test_pipelines_run_as_far_ahead_as_memory_allows(seed: int) -> None:
    """From memory for nothing on to memory for all; where there is none it is told what the fullest stage lacks."""
    cluster, workload, _ = of_all_kinds(seed)
    layers, batches = (5, 2, 2), possible_micro_batches(workload, cluster, PATH)[-1]

    def ahead_with(memory_bytes: float) -> int | None:
        candidates = candidates_of(with_memory(cluster, memory_bytes), workload, StageWishes())
        plan = candidates._pipeline(PATH, layers, batches)
        assert plan is not None
        fullest = {}
        for ahead in AHEAD:
            running = plan.running_ahead(ahead)
            both = zip(running.plans, rooms(running), strict=True)
            fullest[ahead] = [without_search(stage, room).memory for stage, room in both]
        fitting = [ahead for ahead in AHEAD if all(one.fits for one in fullest[ahead])]
        made = candidates.of(PATH, layers, batches)
        assert (made and made.plan.ahead) == (max(fitting) if fitting else None)
        if made is not None:
            return made.plan.ahead
        most = max(fullest[AHEAD[0]], key=lambda one: one.fullest_bytes / one.capacity_bytes)
        assert candidates._lack == pytest.approx(most.fullest_bytes / most.capacity_bytes)
        assert f"rank {most.fullest_name} needs" in candidates.lacking
        return None

    low_bytes, high_bytes = 1e7, 3e8
    assert (ahead_with(low_bytes), ahead_with(high_bytes)) == (None, AHEAD[-1])
    while high_bytes > 1.02 * low_bytes and (middle := ahead_with((low_bytes + high_bytes) / 2)) in (None, AHEAD[-1]):
        low_bytes, high_bytes = (
            [(low_bytes + high_bytes) / 2, high_bytes] if middle is None else [low_bytes, (low_bytes + high_bytes) / 2]
        )
    assert middle not in (None, AHEAD[-1]), "there is nothing between"
    assert all(ahead_with(one) for one in np.linspace((low_bytes + high_bytes) / 2, high_bytes, 6).tolist())
