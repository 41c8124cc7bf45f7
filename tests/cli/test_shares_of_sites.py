"""Sites that take more of the batch than others, or have no experts: in stages, left out, alone, and trained."""

from __future__ import annotations

from itertools import pairwise

import pytest
from cli_cases import CLUSTER, Call, Inputs, shell

from hybridep.pipeline import PipelinePlan, global_sequences, load_any_plan

pytestmark = pytest.mark.timeout(120)
SHARES = """\
sites:
- {name: a, tokens: 3}
- {name: b, experts: 0}
- {name: c, experts: 2}
"""


def shared(inputs: Inputs) -> None:
    """Three sites, whose ranks have twelve sequences of a step together."""
    inputs.cluster.write_text(CLUSTER.replace("size: 2", "size: 3").replace("100 Mbps", "1 Mbps") + SHARES)
    inputs.workload.write_text(inputs.workload.read_text().replace("micro_batch_size: 1", "micro_batch_size: 4"))


@pytest.mark.turns(2)
def test_plans_of_every_kind_share_out_the_same_batch(inputs: Inputs, call: Call) -> None:
    shared(inputs)
    batches, kinds = [], []
    for options in ((), ("--stages", "2"), ("--without", "b"), ("--stages", "auto", "--fewer-sites"), ("--stages", "auto")):
        path = inputs.folder / "plan.yaml"
        result = call("plan", inputs.cluster, inputs.workload, "-o", path, "--time-limit", "3", *options)
        assert result.code == 0, result.err
        plan = load_any_plan(path)
        batches.append(global_sequences(plan.workload, plan.cluster))
        kinds.append((len(plan.stages) if isinstance(plan, PipelinePlan) else 1, plan.cluster.site_names))
        if isinstance(plan, PipelinePlan):
            # A site without experts is with another one.
            assert all(len(stage.sites) > 1 for stage in plan.stages if "b" in stage.sites)
        if not options:
            assert "a alone" in result.out or "c alone" in result.out
            assert "b alone" not in result.out and "2 stages (--stages auto)" in result.out
    assert batches == [12] * 5
    assert kinds[:3] == [(1, ("a", "b", "c")), (2, ("a", "b", "c")), (1, ("a", "c"))]
    refused = call("plan", inputs.cluster, inputs.workload, "--without", "a", "--without", "c")
    assert refused.code == 2 and "no experts live at b (sites.*.experts); leave fewer sites out" in refused.err


@pytest.mark.turns(2)
def test_the_same_training_in_stages_and_with_fewer_sites(inputs: Inputs, call: Call) -> None:
    shared(inputs)
    plain = shell("train", inputs.run, "--local", "--json", "--set", f"output={inputs.folder / 'plain'}")
    assert plain.code == 0, plain.err
    plans = [inputs.folder / name for name in ("stages.yaml", "fewer.yaml")]
    for path, options in zip(plans, (("--stages", "2"), ("--without", "b")), strict=True):
        assert call("plan", inputs.cluster, inputs.workload, "-o", path, "--time-limit", "3", *options).code == 0
    losses, output = [], ("--set", f"output={inputs.folder / 'parts'}")
    for steps, (plan, more) in enumerate(zip(plans, ((), ("--resume",)), strict=True), 1):
        part = shell("train", inputs.run, "--local", "--json", *output, "--set", f"steps={steps}", "--set", f"plan={plan}", *more)
        assert part.code == 0, part.err
        losses += part.json["losses"]
    assert losses == pytest.approx(plain.json["losses"][:2], rel=1e-5)
    assert all(before != after for before, after in pairwise(losses))
