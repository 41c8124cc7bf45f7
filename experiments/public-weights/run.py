"""Are the weights of public models ours, and ours theirs? Needs transformers beside this project (``pip install transformers``).

For each architecture a tiny model is made with transformers and saved. Its loss on random tokens is computed there and by this
project's transformer with the weights read from the folder. Then ``hybridep train`` goes on from it under several plans, exports,
and transformers computes the loss with what was exported; beside it the loss of one process that makes the same steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from hybridep.commands.inputs import load_run, resolve_plan
from hybridep.commands.tables import write_rows
from hybridep.hugging_face import CONFIG_FILE
from hybridep.launch.host import child_environment
from runtime.reference import ReferenceTrainer

HERE = Path(__file__).resolve().parent
COLUMNS = ["architecture", "plan", "their_loss", "our_loss", "off", "their_loss_after", "our_loss_after", "off_after"]
EXPECTED = "expected.json"
TIMEOUT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--make", type=Path, help="only make the models, with tokens and their loss, in this folder")
    parser.add_argument("--only", help="one architecture alone")
    given = parser.parse_args()
    try:
        import transformers  # noqa: F401
    except ImportError:
        sys.exit("public-weights: needs transformers: pip install transformers")
    config = yaml.safe_load((HERE / "config.yaml").read_text())
    names = [given.only] if given.only else list(config["architectures"])
    if given.make is not None:
        for name in names:
            make(config, name, given.make / name)
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            model = Path(folder) / name / "first"
            expected = make(config, name, model)
            rows += [compare(config, name, model, expected, plan) for plan in config["plans"]]
            write_rows(given.results / "rows.csv", rows, COLUMNS)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    worst = max(max(abs(float(row["off"])), abs(float(row["off_after"]))) for row in rows)
    print(f"largest difference of a loss: {worst:.1e}")
    return 0 if worst < 1e-6 else 1


def make(config: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """Save a random model, with tokens and its loss on them beside it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = config["shape"] | config["architectures"][name]
    own = AutoConfig.for_model(
        config["built_as"].get(name, name), **shape, rope_parameters=config["rope"][name], bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(config["weight_std"] * torch.randn_like(parameter) + ("norm" in key))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(config["weight_std"] * torch.randn_like(buffer))
    model.save_pretrained(folder)
    written = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(written | {"model_type": config["written_as"].get(name, name)}, indent=2) + "\n")
    tokens = torch.randint(config["shape"]["vocab_size"], config["tokens"])
    expected = {"tokens": tokens.tolist(), "loss": their_loss(config, folder, tokens)}
    (folder / EXPECTED).write_text(json.dumps(expected))
    return expected


def their_loss(config: dict[str, Any], folder: Path, tokens: Tensor) -> float:
    """Sum over tokens, in fp64 but for what transformers always computes in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    data = json.loads((folder / CONFIG_FILE).read_text())
    kind = data.pop("model_type")
    own = AutoConfig.for_model(config["built_as"].get(kind, kind), **data)
    # Their other implementations of experts do not take fp64.
    model = AutoModelForCausalLM.from_pretrained(folder, config=own, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        logits = model(tokens).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))


def compare(config: dict[str, Any], name: str, model: Path, expected: dict[str, Any], plan: str) -> dict[str, Any]:
    """A row: before training, and after."""
    output = model.parent / plan
    run = config["run"] | {"name": plan, "workload": str(model), "weights": str(model), "plan": plan, "output": str(output)}
    path = model.parent / f"{plan}.yaml"
    path.write_text(yaml.safe_dump(run))
    # As after training from random weights, under one plan: with a config.json of this project's making.
    own = ["--set", "weights=null"] * (plan == config["plans"][0])
    for more in (["--local"], ["--export", str(output / "public"), *own]):
        command = [sys.executable, "-m", "hybridep.cli", "train", str(path), *more]
        subprocess.run(command, env=child_environment(), check=True, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
    kind = json.loads((output / "public" / CONFIG_FILE).read_text())["model_type"]
    assert kind == (config["built_as"] if own else config["written_as"]).get(name, name)
    tokens = torch.tensor(expected["tokens"])
    loaded = load_run(str(path))
    trainer = ReferenceTrainer(loaded, resolve_plan(loaded))
    losses = [our_loss(trainer, tokens)]
    for step in range(1, loaded.steps + 1):
        trainer.step(step)
    losses.append(our_loss(trainer, tokens))
    theirs = [expected["loss"], their_loss(config, output / "public", tokens)]
    off = [own / their - 1 for own, their in zip(losses, theirs, strict=True)]
    return {
        "architecture": name,
        "plan": plan,
        "their_loss": f"{theirs[0]:.9g}",
        "our_loss": f"{losses[0]:.9g}",
        "off": f"{off[0]:.1e}",
        "their_loss_after": f"{theirs[1]:.9g}",
        "our_loss_after": f"{losses[1]:.9g}",
        "off_after": f"{off[1]:.1e}",
    }


def our_loss(trainer: ReferenceTrainer, tokens: Tensor) -> float:
    """The same sum."""
    with torch.no_grad():
        return float(trainer.transformer(tokens[:, :-1], tokens[:, 1:])[0])


if __name__ == "__main__":
    sys.exit(main())
