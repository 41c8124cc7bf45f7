"""All ranks of a pipeline simulated together: what links carry, and that alike ranks need to be simulated once only."""

from __future__ import annotations

import numpy as np
import pytest
from stage_cases import even_stages, random_pipeline

from hybridep.pipeline import PipelinePlan, pipeline_link_bytes
from simulator.pipeline import simulate_pipeline
from simulator.symmetry import no_symmetry


def cases() -> list[PipelinePlan]:
    """Stages of unequal numbers of sites, alike and not, with copies of both kinds."""
    return [random_pipeline(seed, least_stages=2) for seed in (1, 2, 5, 7, 9, 13)]


@pytest.mark.parametrize("pipeline", cases())
def test_links_carry_what_stages_exchange_inside_and_between_them(pipeline: PipelinePlan) -> None:
    found = simulate_pipeline(pipeline)
    number = len(pipeline.cluster.link_table)
    np.testing.assert_allclose(found.result.link_bytes[:number], pipeline_link_bytes(pipeline), rtol=1e-9)
    assert 0 < found.result.busiest_link.load <= 1 + 1e-9
    assert found.work_s + found.bubble_s + found.transfers_s == pytest.approx(found.step_s)
    assert min(found.work_s, found.bubble_s, found.transfers_s) >= 0
    assert sum(found.result.parts.values()) == pytest.approx(found.step_s)
    ways = [pipeline.ways(stage) for stage in range(len(pipeline.stages) - 1)]
    sent = sum(int(way.number.sum()) for way in ways) * pipeline.sequence_bytes * pipeline.micro_batches
    assert found.activation_bytes == 2 * sent
    assert {span.name.split(" ")[0] for span in found.result.spans()} >= {"activations", "activation_gradients", "optimizer"}


@pytest.mark.parametrize("pipeline", [*cases(), even_stages()])
def test_ranks_that_are_alike_are_simulated_once(pipeline: PipelinePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    alike = simulate_pipeline(pipeline)
    monkeypatch.setattr("simulator.blocks.symmetry", lambda wires, *_: no_symmetry(wires))
    each = simulate_pipeline(pipeline)
    assert each.result.program.num_ranks == pipeline.cluster.num_gpus >= alike.result.program.num_ranks
    assert alike.step_s == pytest.approx(each.step_s, rel=1e-9)
