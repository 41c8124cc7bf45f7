"""Clusters, models, rules and options drawn at random: each gives a plan that can be simulated, or one line that says why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import yaml
from cli_cases import Call, Inputs

from hybridep.pipeline import load_any_plan
from hybridep.routing import RoutingRecord

LIMIT_S = 0.5
OPTIONS = (
    ("--compare",),
    ("--explain",),
    ("--top", "3"),
    ("--simulate",),
    ("--no-simulate",),
    ("--upgrades",),
    ("--within", "0.2"),
    ("--pool", "2"),
    ("--codec", "dc.experts=change-int8"),
    ("--codec", "gpu.tokens=int8"),
    ("--max-loss", "1%"),
    ("--prefetch",),
    ("--chunks", "4"),
    ("--streams", "dc=2"),
    ("--without", "s1"),
    ("--objective", "dollars"),
    ("--budget", "0.001 $"),
    ("--fabric", "ring-100g"),
    ("--json",),
)
WITH_STAGES = (
    ("--fewer-sites",),
    ("--compare",),
    ("--upgrades",),
    ("--within", "0.2"),
    ("--pool", "2"),
    ("--explain",),
    ("--top", "3"),
    ("--streams", "dc=2"),
    ("--without", "s1"),
    ("--objective", "dollars"),
    ("--budget", "0.001 $"),
    ("--codec", "dc.activations=int8"),
    ("--max-loss", "1%"),
    ("--fabric", "ring-100g"),
    ("--codec", "dc.experts=change-int8"),
    ("--json",),
)
SYSTEMS = ("ep", "full_gather", "ep,tutel", "faster_moe", "smart_moe", "pipeline")


class Draw:
    """Choices of one case."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def of(self, *values: Any) -> Any:
        """One of these."""
        return values[int(self.rng.integers(len(values)))]

    def some(self, share: float, values: dict[str, Any]) -> dict[str, Any]:
        """Each with this chance."""
        return {key: value for key, value in values.items() if self.rng.random() < share}

    def rate(self) -> str:
        """Between sites."""
        return f"{self.rng.uniform(0.05, 20):.3f} Gbps"


def cluster_of(draw: Draw) -> dict[str, Any]:
    """Up to seven sites of up to twelve ranks, alike or not, at times in pods or with links per pair."""
    size = draw.of(1, 2, 2, 3, 3, 4, 5, 7)
    outer = {
        "name": "dc",
        "size": size,
        "bandwidth": draw.of("50 Mbps", "1 Gbps", "20 Gbps"),
        "latency": draw.of("0 ms", "1 ms", "30 ms"),
    }
    node = {"name": "node", "size": draw.of(1, 2, 3), "bandwidth": "50 Gbps", "latency": "20 us"}
    gpu = {"name": "gpu", "size": draw.of(1, 2, 3, 4), "bandwidth": "400 Gbps", "latency": "5 us"}
    levels = [outer | draw.some(0.2, {"window": "1 MiB"}), *([node] if draw.rng.random() < 0.25 else []), gpu]
    extra = {"sharing": 2, "jitter": "0.2 ms", "message_overhead": "0.1 ms", "expert_overhead": "0.1 ms", "price": "2 $/h"}
    data: dict[str, Any] = {
        "name": "drawn",
        "levels": levels,
        "gpu": {"throughput": "1 TFLOPS", "memory": draw.of("20 MB", "500 MB", "8 GB"), "memory_bandwidth": "100 GB/s"}
        | draw.some(0.2, extra),
    }
    if draw.rng.random() < 0.35:
        return data
    own = {"tokens": draw.of(2, 3), "experts": draw.of(0, 2), "gpu": {"throughput": "2 TFLOPS"}, "egress": "0.09 $/GB"}
    rates = {"up": draw.rate, "down": draw.rate} if draw.rng.random() < 0.6 else {}
    names = [f"s{number}" for number in range(size)]
    data["sites"] = [{"name": name} | {key: made() for key, made in rates.items()} | draw.some(0.2, own) for name in names]
    if len(levels) == 2 and draw.rng.random() < 0.2:
        outer = levels[0]
        outer["pods"] = {"bandwidth": "3200 Gbps", "latency": "20 us"}
        data["sites"][0]["pods"] = draw.of(2, 3)
    if draw.rng.random() < 0.35:
        ends = [(src, dst) for src in names for dst in names if src != dst]
        data["links"] = [{"src": src, "dst": dst, "bandwidth": draw.rate(), "latency": "20 ms"} for src, dst in ends]
    return data


def workload_of(draw: Draw) -> dict[str, Any]:
    """Up to 24 experts in up to three layers."""
    experts, layers = draw.of(2, 4, 6, 8, 12, 24), draw.of(1, 2, 3)
    model = {
        "num_layers": layers,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 256,
        "num_experts": experts,
        "top_k": int(draw.rng.integers(1, min(experts, 6) + 1)),
        "expert_ffn_size": draw.of(32, 1024),
        **draw.some(0.2, {"shared_ffn_size": 64, "ffn": "gelu", "capacity_factor": 1.0, "token_drop_policy": "position"}),
    }
    if layers > 1 and draw.rng.random() < 0.2:
        model |= {"num_dense_layers": 1, "dense_ffn_size": 128}
    training = {
        "sequence_length": 128,
        "micro_batch_size": draw.of(1, 4),
        "micro_batches": draw.of(1, 4),
        "dtype": draw.of("fp32", "bf16"),
    }
    return {"name": "drawn", "model": model, "training": training}


def record_of(rng: np.random.Generator, model: dict[str, Any]) -> RoutingRecord:
    """How often experts were chosen, none by more than all tokens."""
    tokens, experts = 1000, model["num_experts"]
    order = rng.permuted(np.tile(np.arange(experts), (model["num_layers"] - model.get("num_dense_layers", 0), 1)), axis=1)
    left, chosen = np.full(len(order), tokens * model["top_k"]), np.zeros(order.shape, dtype=np.int64)
    for place, column in enumerate(order.T, start=1):
        least = np.maximum(left - tokens * (experts - place), 0)
        chosen[np.arange(len(order)), column] = own = np.maximum(
            least, (np.minimum(left, tokens) * rng.random(len(order))).astype(np.int64)
        )
        left -= own
    chosen[np.arange(len(order)), order[:, -1]] += left
    return RoutingRecord(chosen=chosen)


def rules_of(draw: Draw, cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """One to three."""
    names = [site["name"] for site in cluster.get("sites", [{"name": "dc0"}])]
    made = []
    for number in range(draw.of(1, 2, 3)):
        some = sorted({draw.of(*names) for _ in range(draw.of(1, 2, 3))})
        rule = {"name": f"r{number}", "kind": draw.of("keep_tokens", "forbid", "pin", "no_link"), "sites": some}
        if rule["kind"] == "no_link":
            rule["to"] = [draw.of(*names)]
        elif rule["kind"] != "keep_tokens":
            rule |= draw.some(0.6, {"experts": draw.of("0", "1", "0-1")})
        made.append(rule)
    return made


def check(seed: int, inputs: Inputs, call: Call, *, in_stages: bool = False) -> None:
    draw = Draw(seed)
    cluster = cluster_of(draw)
    workload = workload_of(draw)
    arguments: list[object] = ["plan", inputs.write("c.yaml", yaml.safe_dump(cluster))]
    arguments += [inputs.write("w.yaml", yaml.safe_dump(workload)), "--time-limit", LIMIT_S]
    if in_stages:
        arguments += ["--stages", draw.of("auto", "auto", "2", "3", "4")]
    for one in WITH_STAGES if in_stages else OPTIONS:
        arguments += one if draw.rng.random() < (0.4 if one == ("--fewer-sites",) else 0.1) else ()
    if draw.rng.random() < 0.25:
        arguments += ["--constraints", inputs.write("r.yaml", yaml.safe_dump({"rules": rules_of(draw, cluster)}))]
    own = draw.rng.spawn(1)[0]
    if own.random() < 0.2:
        record_of(own, workload["model"]).save(inputs.folder / "routing.npz")
        arguments += ["--routing", inputs.folder / "routing.npz"]
    plan = inputs.folder / "plan.yaml"
    result = call(*arguments, "-o", plan)
    written = sorted(inputs.folder.glob("plan*"))
    if result.code:
        lines = [line for line in result.err.splitlines() if line.startswith("hybridep plan: ")]
        told = [line for line in lines if line.startswith(("hybridep plan: for ", "hybridep plan: without "))]
        assert result.code in (2, 3, 4) and len(lines) - len(told) == 1 and "Traceback" not in result.err, (arguments, result.err)
        assert not written, (arguments, result.err)
        return
    assert plan in written
    for path in written:
        made = load_any_plan(path)
        assert made.prediction is not None and 0 < made.prediction.step < float("inf")
    against = ("--against", draw.of(*SYSTEMS)) if draw.rng.random() < 0.3 else ()
    simulated = call("simulate", plan, *against)
    assert simulated.code in ((0, 2) if against else (0,)) and "Traceback" not in simulated.err, (
        arguments,
        against,
        simulated.err,
    )


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(16))
def test_a_plan_or_one_line(seed: int, inputs: Inputs, call: Call) -> None:
    check(seed, inputs, call)


@pytest.mark.turns(3)
@pytest.mark.parametrize("seed", range(2000, 2012))
def test_stages_or_one_line(seed: int, inputs: Inputs, call: Call) -> None:
    check(seed, inputs, call, in_stages=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(3000, 3300, 100))
def test_three_hundred_stages_or_lines(first: int, inputs: Inputs, call: Call) -> None:
    for seed in range(first, first + 100):
        for path in inputs.folder.glob("plan*"):
            path.unlink()
        check(seed, inputs, call, in_stages=True)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(1000, 1600, 100))
def test_six_hundred_plans_or_lines(first: int, inputs: Inputs, call: Call) -> None:
    for seed in range(first, first + 100):
        for path in inputs.folder.glob("plan*"):
            path.unlink()
        check(seed, inputs, call)
