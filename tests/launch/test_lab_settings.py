"""Which measurements belong to which setting of an experiment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridep.codecs import Codecs, TokenCodec
from hybridep.commands import lab_settings
from hybridep.commands.lab_settings import Bench, Setting, measure_all, placements, rows_of
from hybridep.config import build
from hybridep.launch.trials import Measured, _together
from hybridep.plan import LayerGroup, Plan, Residency
from hybridep.routing import RoutingRecord
from hybridep.workload import Workload
from planner import plans
from simulator.step import simulate_step

MODEL = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 32,
    "num_experts": 8,
    "top_k": 2,
    "expert_ffn_size": 16,
    "ffn": "swiglu",
}


def setting(name: str, sequences: int, tokens: TokenCodec) -> Setting:
    training = {"sequence_length": 16, "micro_batch_size": sequences}
    workload = build(Workload, {"name": "drawn", "model": MODEL, "training": training}, "test")
    return Setting(name=name, rate="50 Mbps", workload=workload, codecs={"dc": Codecs(tokens=tokens)})


def test_neighbours_that_differ_in_codecs_alone_share_a_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = [
        setting("0", 1, TokenCodec.EXACT),
        setting("1", 1, TokenCodec.INT8),
        setting("2", 2, TokenCodec.EXACT),
    ]
    bench = Bench(cluster="lab-4dc", steps=1, probe_s=0.1, folder=tmp_path)
    each = len(placements(bench.at("50 Mbps"), settings[0]))
    kept: list[tuple[str, Any, Any, Any]] = []
    monkeypatch.setattr(lab_settings.Lab, "current", lambda: SimpleNamespace(sites=()))
    # What is trained stands for its measurement; one probe per change of workload, as ranks measure them.
    monkeypatch.setattr(lab_settings, "measure", lambda plans, **_: (plans, ["first probe", "second probe"]))
    monkeypatch.setattr(lab_settings, "with_measurements", lambda cluster, probe: probe)

    def choose(_: Bench, setting: Setting, probed: Any, trials: Any) -> SimpleNamespace:
        return SimpleNamespace(setting=setting, probed=probed, trials=trials, chosen=setting.name, is_other=setting.name != "1")

    monkeypatch.setattr(lab_settings, "_choose", choose)
    monkeypatch.setattr(
        lab_settings, "_keep", lambda _, taken, own: kept.append((taken.setting.name, taken.probed, taken.trials, own))
    )
    measure_all(bench, settings)
    assert [(name, probe) for name, probe, *_ in kept] == [("0", "first probe"), ("1", "first probe"), ("2", "second probe")]
    for setting_, (_, _, trials, _) in zip(settings, kept, strict=True):
        assert len(trials) == each
        assert all(one.workload == setting_.workload and one.codecs == setting_.codecs for one in trials)
    # Chosen plans that are none of the combinations are trained together, afterwards, and given to their settings.
    assert [own for *_, own in kept] == ["0", None, "2"]


def kept_of(bench: Bench, one: Setting, popularity: list[Any], step_s: list[float]) -> dict[str, Any]:
    """As of a measured setting, where EP was chosen."""
    cluster = bench.at("50 Mbps")
    combinations = placements(cluster, one)
    return {
        "workload": one.workload.model_dump(mode="json", exclude_none=True),
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "popularity": popularity,
        "step_s": [step_s] * len(combinations),
        "wan_bytes": [0.0] * len(combinations),
        "plan": combinations[0].model_dump(mode="json", exclude_none=True),
    }


def test_recorded_steps_are_simulated_with_their_choices(tmp_path: Path) -> None:
    """The first step's tokens all go to one expert, the other's to theirs; a plan that is none of the combinations, too."""
    one = setting("0", 4, TokenCodec.EXACT)
    bench = Bench(cluster="lab-4dc", steps=5, untimed=2, record=True, candidates=8, probe_s=0.1, folder=tmp_path)
    cluster = bench.at("50 Mbps")
    combinations, ranks, tokens = placements(cluster, one), cluster.num_gpus, 64
    crowded = np.broadcast_to(np.array([0, 1]), (ranks, tokens, 2))
    homes = np.broadcast_to(np.arange(ranks)[:, None, None], (ranks, tokens, 2)) * 8 // ranks
    at_home = np.concatenate([homes[..., :1], np.full((ranks, tokens, 1), -1)], axis=2)
    steep, chosen = (0.44, *(0.08,) * 7), np.ones((1, 8), dtype=np.int64)
    routing = RoutingRecord(chosen=chosen, choices={(0, 0): crowded, (0, 1): at_home})
    routing.save(bench.routing_path(one))
    sizes, residency = {"dc": 4, "gpu": 1}, Residency.MICROBATCH
    group = LayerGroup(first_layer=0, num_layers=1, domains=sizes, migration={}, residency=residency)
    other = Plan(cluster=cluster, workload=one.workload, layers=(group,), codecs=dict(one.codecs), popularity=(steep,))
    record = kept_of(bench, one, [((1 / 8,) * 8,)] * 5, [5.0, 1.0, 3.0])
    record |= {"plan": other.model_dump(mode="json"), "plan_trial": {"step_s": [4.0, 2.0, 2.0], "wan_bytes": 8e6}}
    bench.path(one).write_text(json.dumps(record))
    rows = rows_of(bench, [one])
    assert [row["measured_s"] for row in rows] == [3.0] * len(combinations) + [2.0]
    assert [row["chosen"] for row in rows] == [0] * len(combinations) + [1] and rows[-1]["dc"] == lab_settings.CHOSEN
    for row, made in zip(rows, [*combinations, other], strict=True):
        steps_s = [simulate_step(made, {(0, 0): ids}).step_s for ids in (crowded, at_home)]
        assert row["simulated_s"] == pytest.approx(sum(steps_s) / 2)
    apart = [simulate_step(combinations[0], {(0, 0): ids}).step_s for ids in (crowded, at_home)]
    assert apart[0] > 1.05 * apart[1], "tokens travel: where to matters"
    # What is chosen anew from that record is the plan that is simulated the shortest of eight.
    trial = Measured(step_s=(1.0,), wan_bytes=0.0, parts_s={}, popularity=(), routing=routing)
    taken = lab_settings._choose(bench, one, cluster, [trial])
    found = plans(cluster, one.workload, 8, codecs=one.codecs, popularity=routing.popularity())
    shortest = min(found, key=lambda made: sum(simulate_step(made, step).step_s for step in routing.steps(one.workload)))
    assert taken.chosen.digest == shortest.digest


def test_predictions_are_means_over_the_untimed_steps(tmp_path: Path) -> None:
    one = setting("0", 4, TokenCodec.EXACT)
    bench = Bench(cluster="lab-4dc", steps=3, untimed=2, probe_s=0.1, folder=tmp_path)
    even, steep = ((1 / 8,) * 8,), ((0.44, *(0.08,) * 7),)
    bench.path(one).write_text(json.dumps(kept_of(bench, one, [even, steep, even], [1.0])))
    rows = rows_of(bench, [one])
    assert [row["chosen"] for row in rows] == [1, *[0] * (len(rows) - 1)]
    for row, made in zip(rows, placements(bench.at("50 Mbps"), one), strict=True):
        steps_s = [simulate_step(made.with_popularity(shares)).step_s for shares in (even, steep)]
        assert row["simulated_s"] == pytest.approx(sum(steps_s) / 2)


def test_popularity_is_that_of_all_ranks_by_step() -> None:
    """Two ranks, two steps, one layer of two experts."""
    rank = {"step_s": [1.0, 2.0], "wan_bytes": 1, "parts_s": {}, "ids": [[]]}
    ranks = [rank | {"choices": [[[3, 1]], [[0, 4]]]}, rank | {"choices": [[[1, 3]], [[1, 3]]]}]
    found = _together(ranks, 1, 1)
    assert found.popularity == (((0.5, 0.5),), ((0.125, 0.875),)) and found.step_s == (2.0,)
    assert found.routing.popularity() == ((0.5, 0.5),), "of the recorded step"


def test_choices_of_all_ranks_come_together_by_step() -> None:
    """Two ranks with one token each, two steps of two micro-batches, two layers; ids say where they belong."""
    trial = {"step_s": [1.0, 1.0], "wan_bytes": 1, "parts_s": {}, "choices": [[[0], [0]]] * 2}

    def ids(rank: int) -> list[Any]:
        # As ranks report them: micro-batch by micro-batch, layer by layer in each.
        return [[[[1000 * rank + 100 * step + 10 * mb + layer]] for mb in range(2) for layer in range(2)] for step in range(2)]

    found = _together([trial | {"ids": ids(0)}, trial | {"ids": ids(1)}], 1, 2).routing.choices
    assert set(found) == {(layer, place) for layer in range(2) for place in range(4)}
    for (layer, place), chosen in found.items():
        step, mb = divmod(place, 2)
        assert chosen.tolist() == [[[100 * step + 10 * mb + layer]], [[1000 + 100 * step + 10 * mb + layer]]]
