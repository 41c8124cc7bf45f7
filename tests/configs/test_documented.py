"""Every key that a user may write is explained where users look, and the examples there load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from hybridep.codecs import PAYLOADS, Codecs
from hybridep.commands.inputs import load_cluster
from hybridep.config import Strict, build
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner import Constraints
from simulator.fabric_file import FabricFile
from simulator.scenario import Scenario

DOCS = Path(__file__).resolve().parents[2] / "docs"
WRITTEN_BY_US = {"part_of", "part"}


def nested(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        yield from (one for inner in models_in(field.annotation) for one in nested(inner))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


@pytest.mark.parametrize(
    ("model", "page"),
    [
        (Cluster, "files.md"),
        (Workload, "files.md"),
        (Run, "training.md"),
        (Scenario, "scenarios.md"),
        (FabricFile, "scenarios.md"),
        (Constraints, "constraints.md"),
    ],
)
def test_every_key_is_explained(model: type[Strict], page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    keys = {name for one in nested(model) for name in one.model_fields if one.__name__ != "Part"} - WRITTEN_BY_US
    assert len(keys) > 4 and {key for key in keys if not re.search(rf"\b{key}:", text)} == set()


def test_the_examples_of_files_load() -> None:
    cluster, model, more = re.findall(r"```yaml\n(.*?)```", (DOCS / "files.md").read_text(encoding="utf-8"), re.DOTALL)
    assert build(Cluster, yaml.safe_load(cluster), "files.md").num_gpus == 24
    example = yaml.safe_load(model)
    assert build(Workload, example, "files.md").expert_capacity == 160
    for key in ("num_kv_heads", "head_dim", "attention_bias", "qk_norm", "qk_norm_full_width", "partial_rotary_factor"):
        del example["model"][key]
    example["model"] |= yaml.safe_load(more)
    assert build(Workload, example, "files.md").model.value_width == 16 * 128


def test_the_example_of_scenarios_speaks_of_its_cluster() -> None:
    text = re.findall(r"```yaml\n(.*?)```", (DOCS / "scenarios.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    scenario = build(Scenario, yaml.safe_load(text), "scenarios.md")
    cluster = load_cluster(str(scenario.cluster), [one.removeprefix("cluster.") for one in scenario.overrides])
    # What is in a file of the user's.
    scenario.conditions.model_copy(update={"trace": None}).require(cluster)
    scenario.course.require(cluster, None)


def test_every_codec_is_named() -> None:
    text = (DOCS / "files.md").read_text(encoding="utf-8")
    names = {codec.value for kind in PAYLOADS for codec in type(getattr(Codecs(), kind))}
    names |= {f"{name}" for name in Codecs.model_fields if name != "gates"}
    assert {name for name in names if f"`{name}`" not in text and f"`{name}:" not in text} == set()
