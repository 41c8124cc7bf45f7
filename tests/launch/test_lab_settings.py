"""Which measurements belong to which setting of an experiment."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridep.codecs import Codecs, TokenCodec
from hybridep.commands import lab_settings
from hybridep.commands.lab_settings import Bench, Setting, measure_all, placements
from hybridep.config import build
from hybridep.workload import Workload

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
