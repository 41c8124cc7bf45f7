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
from hybridep.launch.trials import _together
from hybridep.routing import RoutingRecord
from hybridep.workload import Workload
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
    kept = []
    monkeypatch.setattr(lab_settings.Lab, "current", lambda: SimpleNamespace(sites=()))
    # What is trained stands for its measurement; one probe per change of workload, as ranks measure them.
    monkeypatch.setattr(lab_settings, "measure", lambda plans, **_: (plans, ["first probe", "second probe"]))
    monkeypatch.setattr(lab_settings, "with_measurements", lambda cluster, probe: probe)
    monkeypatch.setattr(lab_settings, "_keep", lambda _, setting, probe, trials: kept.append((setting.name, probe, trials)))
    measure_all(bench, settings)
    assert [(name, probe) for name, probe, _ in kept] == [("0", "first probe"), ("1", "first probe"), ("2", "second probe")]
    for setting_, (_, _, trials) in zip(settings, kept, strict=True):
        assert len(trials) == each
        assert all(one.workload == setting_.workload and one.codecs == setting_.codecs for one in trials)


def test_batches_that_come_again_are_simulated_with_their_choices(tmp_path: Path) -> None:
    """Each batch's median, then the mean of the batches; the first batch's tokens all go to one expert, the other's to theirs."""
    one = setting("0", 4, TokenCodec.EXACT)
    bench = Bench(cluster="lab-4dc", steps=8, untimed=2, batches=2, probe_s=0.1, folder=tmp_path)
    cluster = bench.at("50 Mbps")
    plans, even = placements(cluster, one), ((1 / 8,) * 8,)
    record = {
        "workload": one.workload.model_dump(mode="json", exclude_none=True),
        "cluster": cluster.model_dump(mode="json", exclude_none=True),
        "popularity": [even] * 8,
        "step_s": [[5.0, 1.0, 3.0, 1.0, 4.0, 7.0]] * len(plans),
        "wan_bytes": [0.0] * len(plans),
    }
    bench.path(one).write_text(json.dumps(record))
    ranks, tokens = cluster.num_gpus, 64
    crowded = np.broadcast_to(np.array([0, 1]), (ranks, tokens, 2))
    homes = np.broadcast_to(np.arange(ranks)[:, None, None], (ranks, tokens, 2)) * 8 // ranks
    at_home = np.concatenate([homes[..., :1], np.full((ranks, tokens, 1), -1)], axis=2)
    chosen = np.ones((1, 8), dtype=np.int64)
    RoutingRecord(chosen=chosen, choices={(0, 0): crowded, (0, 1): at_home}).save(bench.routing_path(one))
    rows = rows_of(bench, [one])
    assert [row["measured_s"] for row in rows] == [(4.0 + 1.0) / 2] * len(plans)
    for row, made in zip(rows, plans, strict=True):
        steps_s = [simulate_step(made, {(0, 0): ids}).step_s for ids in (crowded, at_home)]
        assert row["simulated_s"] == pytest.approx(sum(steps_s) / 2)
    apart = [simulate_step(plans[0], {(0, 0): ids}).step_s for ids in (crowded, at_home)]
    assert apart[0] > 1.05 * apart[1], "tokens travel: where to matters"


def test_a_choice_takes_the_mean_of_the_untimed_steps(tmp_path: Path) -> None:
    one = setting("0", 4, TokenCodec.EXACT)
    bench = Bench(cluster="lab-4dc", steps=3, untimed=2, probe_s=0.1, folder=tmp_path)
    plans = placements(bench.at("50 Mbps"), one)
    even, steep = ((1 / 8,) * 8,), ((0.44, *(0.08,) * 7),)
    record = {
        "workload": one.workload.model_dump(mode="json", exclude_none=True),
        "cluster": bench.at("50 Mbps").model_dump(mode="json", exclude_none=True),
        "popularity": [even, steep, even],
        "step_s": [[1.0]] * len(plans),
        "wan_bytes": [0.0] * len(plans),
    }
    bench.path(one).write_text(json.dumps(record))
    for row, made in zip(rows_of(bench, [one]), plans, strict=True):
        steps_s = [simulate_step(made.with_popularity(shares)).step_s for shares in (even, steep)]
        assert row["simulated_s"] == pytest.approx(sum(steps_s) / 2)


def test_popularity_is_that_of_all_ranks_by_step() -> None:
    """Two ranks, two steps, one layer of two experts."""
    rank = {"step_s": [1.0, 2.0], "wan_bytes": 1, "parts_s": {}, "ids": []}
    ranks = [rank | {"choices": [[[3, 1]], [[0, 4]]]}, rank | {"choices": [[[1, 3]], [[1, 3]]]}]
    assert _together(ranks, 1).popularity == (((0.5, 0.5),), ((0.125, 0.875),))
    assert _together(ranks, 1).step_s == (2.0,)


def test_choices_of_all_ranks_come_together_by_batch() -> None:
    """Two ranks with one token each, two batches of two micro-batches, two layers; ids say where they belong."""
    trial = {"step_s": [1.0, 1.0], "wan_bytes": 1, "parts_s": {}, "choices": [[[0], [0]]] * 2}

    def ids(rank: int) -> list[Any]:
        # As ranks report them: micro-batch by micro-batch, layer by layer in each.
        return [[[[1000 * rank + 100 * step + 10 * mb + layer]] for mb in range(2) for layer in range(2)] for step in range(2)]

    found = _together([trial | {"ids": ids(0)}, trial | {"ids": ids(1)}], 1).routing.choices
    assert set(found) == {(layer, place) for layer in range(2) for place in range(4)}
    for (layer, place), chosen in found.items():
        step, mb = divmod(place, 2)
        assert chosen.tolist() == [[[100 * step + 10 * mb + layer]], [[1000 + 100 * step + 10 * mb + layer]]]
