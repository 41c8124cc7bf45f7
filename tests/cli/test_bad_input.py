"""Everything a user can get wrong: exit code 2 and one line that names the file, the key and what to do."""

from __future__ import annotations

import errno
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cli_cases import Call, Inputs, Result

from hybridep.commands.demo import _own
from hybridep.commands.inputs import load_cluster, load_run
from hybridep.errors import UserError
from hybridep.launch import lab, shaping
from hybridep.topology import Cluster

ONE_SITE = (("--compare",), ("--pool", "2"), ("--upgrades",))
"""What is asked about what joins sites."""


def one_line(result: Result) -> str:
    assert result.code == 2, result.err
    assert result.err.count("\n") == 1, result.err
    assert "Traceback" not in result.err
    return result.err


@pytest.mark.parametrize(
    ("good", "bad", "named"),
    [
        ("bandwidth: 100 Mbps", "bandwith: 100 Mbps", ["cluster.yaml:3: levels.0.bandwith", "did you mean 'bandwidth'"]),
        ("bandwidth: 100 Mbps", "bandwidth: 100", ["cluster.yaml:3: levels.0.bandwidth", "no unit", "10 Gbps"]),
        ("bandwidth: 100 Mbps", "bandwidth: -100 Mbps", ["cluster.yaml:3: levels.0.bandwidth", "above zero"]),
        ("bandwidth: 100 Mbps", "bandwidth: 100 MiB", ["levels.0.bandwidth", "'MiB' is not a unit of bandwidth"]),
        ("size: 2", "size: two", ["cluster.yaml:3: levels.0.size", "'two'"]),
        ("memory: 1 GiB, ", "", ["cluster.yaml:5: gpu.memory", "missing"]),
        ("levels:", "levels: [", ["cluster.yaml", "is not YAML"]),
    ],
)
def test_wrong_cluster_files(inputs: Inputs, call: Call, good: str, bad: str, named: list[str]) -> None:
    text = inputs.cluster.read_text(encoding="utf-8")
    assert good in text
    inputs.cluster.write_text(text.replace(good, bad, 1), encoding="utf-8")
    line = one_line(call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml"))
    assert all(name in line for name in named), line
    assert not (inputs.folder / "plan.yaml").exists()


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("levels.dc.bandwith=1 Gbps", ["levels.0.bandwith", "did you mean 'bandwidth'"]),
        ("levels.dc.bandwidth=fast", ["levels.0.bandwidth", "10 Gbps"]),
        ("levels.rack.bandwidth=1 Gbps", ["no entry 'rack'", "dc, gpu"]),
        ("modle.top_k=1", ["unknown key 'modle'", "did you mean 'model'"]),
        ("name=x", ["ambiguous", "cluster.name or workload.name"]),
        ("levels", ["write it as key.path=value"]),
        ("cluster=3", ["write which key of it, as in cluster.name="]),
        ("levels.dc.bandwidth=1e-300 bps", ["levels.0.bandwidth", "'1e-300 bps' is too small"]),
        ("levels.dc.bandwidth=1e300 Gbps", ["levels.0.bandwidth", "'1e300 Gbps' is too large"]),
        ("levels.dc.size=100000000", ["levels: 1e+08 GPUs in all; at most 1e+07"]),
        ("model.hidden_size=100000000000000000000", ["parameters; at most 1e+15"]),
        ("training.sequence_length=100000000000000000000", ["1e+20 tokens of each rank in a step; at most 1e+12"]),
        ("training.micro_batches=0", ["training.micro_batches", "greater than or equal to 1"]),
    ],
)
def test_wrong_overrides(inputs: Inputs, call: Call, override: str, named: list[str]) -> None:
    line = one_line(call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml", "--set", override))
    assert all(name in line for name in named), line


def test_names_of_configs(inputs: Inputs, call: Call) -> None:
    assert "did you mean 'lab-4dc'" in one_line(call("plan", "lab-4cd", "tiny"))
    assert "did you mean 'mixtral-8x7b'" in one_line(call("plan", "lab-4dc", "mixtral"))
    assert "no such file" in one_line(call("plan", inputs.folder / "missing.yaml", "tiny"))


def test_matrix_errors_name_the_line(inputs: Inputs, call: Call) -> None:
    matrix = inputs.write("pairs.csv", "src,dst,gbps,rtt_ms\na,b,5,20\nb,c,fast,20\n")
    line = one_line(call("plan", matrix, inputs.workload, "-o", inputs.folder / "plan.yaml"))
    assert "pairs.csv:3: gbps" in line and "'fast'" in line
    for text, place in (
        ("gbps,rtt_ms,src,dst\n5,20,a,b\n5,20,a\n", "pairs.csv:3: src,dst"),
        ("src,dst,gbps,rtt_ms\na,b,5,20\n\nb,c,fast,20\n", "pairs.csv:4: gbps"),
    ):
        assert place in one_line(call("plan", inputs.write("pairs.csv", text), inputs.workload))


def test_what_is_set_of_a_matrix_is_named(inputs: Inputs, call: Call) -> None:
    matrix = inputs.write("PAIRS.CSV", "src,dst,gbps,rtt_ms\na,b,5,20\n")
    line = one_line(call("plan", matrix, inputs.workload, "--set", "gpu.throughput=1"))
    assert "--set gpu.throughput=1: gpu.throughput: 1 has no unit" in line


def test_a_matrix_of_a_spreadsheet_is_read(inputs: Inputs) -> None:
    """Some begin files with a byte order mark."""
    assert load_cluster(str(inputs.write("pairs.csv", "\ufeffsrc,dst,gbps,rtt_ms\na,b,5,20\n"))).site_names == ("a", "b")


def written_plan(inputs: Inputs, call: Call) -> Path:
    path = inputs.folder / "plan.yaml"
    assert call("plan", inputs.cluster, inputs.workload, "-o", path).code == 0
    return path


def test_wrong_plan_files(inputs: Inputs, call: Call) -> None:
    path = written_plan(inputs, call)
    text = path.read_text(encoding="utf-8")

    path.write_text(text.replace("domains: {dc: ", "domains: {dc: 7"), encoding="utf-8")
    line = one_line(call("simulate", path))
    assert "plan.yaml" in line and "domains.dc" in line and "must divide the level's size 2" in line

    path.write_text(text[: text.index("layers:")], encoding="utf-8")
    assert "plan.yaml" in one_line(call("simulate", path))

    path.write_text(text.replace("schema_version: 1", "schema_version: 99"), encoding="utf-8")
    assert "schema_version" in one_line(call("simulate", path))

    assert "cannot be read" in one_line(call("simulate", inputs.folder / "missing.yaml"))
    path.write_text(text, encoding="utf-8")
    assert "no such baseline" in one_line(call("simulate", path, "--against", "ep,magic"))


def test_two_plan_files_are_compared_as_they_are(inputs: Inputs, call: Call) -> None:
    path = written_plan(inputs, call)
    for more in (("--set", "gpu.memory=1 GB"), ("--stages", "auto"), ("--top", "2"), ("-o", inputs.folder / "other.yaml")):
        assert "not where --compare is given two plan files" in one_line(call("plan", "--compare", path, path, *more))
    assert call("plan", "--compare", path, path, "--json").code == 0
    for other in (inputs.folder / "missing.yaml", inputs.cluster):
        for both in ((path, other), (other, path)):
            why = f"holds no plan, as {path} does" if other.exists() else "no such file"
            assert f"--compare {other}: {why}" in one_line(call("plan", "--compare", *both))


def test_wrong_runs(inputs: Inputs, call: Call) -> None:
    path = written_plan(inputs, call)
    other = ("--set", f"run.plan={path}", "--set", "levels.dc.bandwidth=1 Gbps")
    line = one_line(call("train", inputs.run, "--local", *other))
    assert "was made for another cluster" in line and "bandwidth" in line and "0.1 Gbps" in line and "1 Gbps" in line

    assert "steps" in one_line(call("train", inputs.run, "--local", "--set", "steps=0"))
    assert "did you mean 'steps'" in one_line(call("train", inputs.run, "--local", "--set", "step=3"))
    assert "auto, stages, ep, full_gather" in one_line(call("train", inputs.run, "--local", "--set", "plan=best"))
    line = one_line(call("train", inputs.run, "--local", "--set", f"data.path={inputs.folder / 'nothing'}"))
    assert "data.path" in line and "nothing" in line and "No such file" in line
    tokens = inputs.folder / "tokens.npy"
    np.save(tokens, np.arange(255, 275, dtype=np.uint16))
    line = one_line(call("train", inputs.run, "--local", "--set", f"data.path={tokens}"))
    assert "tokens.npy: token 256 is not below model.vocab_size 256" in line
    line = one_line(call("train", inputs.run, "--local", "--set", "training.sequence_length=10000"))
    assert "text.txt: 9000 tokens are too few" in line
    latent = "model.latent_attention={kv_rank: 4, nope_head_dim: 4, rope_head_dim: %d, value_head_dim: 4}"
    line = one_line(call("train", inputs.run, "--local", "--set", latent % 3))
    assert "latent_attention.rope_head_dim" in line and "multiple of 2" in line
    line = one_line(call("train", inputs.run, "--local", "--set", latent % 2, "--set", "model.head_dim=8"))
    assert "head_dim: 8 does not go with latent_attention" in line
    inputs.write("file", "")
    assert "output" in one_line(call("train", inputs.run, "--local", "--set", f"output={inputs.folder / 'file' / 'below'}"))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=-1", ["--set seed=-1", "greater than or equal to 0"]),
        ("trace_step=0", ["--set trace_step=0", "greater than or equal to 1"]),
        ("exchange_timeout=0 s", ["--set exchange_timeout=0 s", "greater than 0"]),
        ("exchange_timeout=1e300 s", ["--set exchange_timeout=1e300 s", "less than or equal to 86400"]),
        ('output="a\\0b"', ["output", "null character"]),
        ('output="a\\ud800b"', ["output", "surrogates not allowed"]),
        ("output=~nouser/x", ["output", "'~nouser/x'", "home directory"]),
        ("checkpoints.folder=~nouser", ["checkpoints.folder", "'~nouser'"]),
        ("data.path=~nouser", ["data.path", "'~nouser'"]),
    ],
)
def test_wrong_values_of_runs(inputs: Inputs, call: Call, override: str, named: list[str]) -> None:
    line = one_line(call("train", inputs.run, "--local", "--set", override))
    assert all(name in line for name in named), line


def test_more_ranks_than_the_machine_has_memory_for(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2e9))
    monkeypatch.setattr("psutil.swap_memory", lambda: SimpleNamespace(total=0))
    line = one_line(call("train", inputs.run, "--local", "--set", "levels.gpu.size=8"))
    assert "16 ranks on this machine take at least 2.40" in line and "may have 2 GB" in line and "RAY_ADDRESS" in line


def test_a_file_in_place_of_the_logs(inputs: Inputs, call: Call) -> None:
    inputs.output.mkdir()
    (inputs.output / "logs").write_text("")
    result = call("train", inputs.run, "--local")
    assert result.code == 2 and "output/logs cannot be written" in result.err.splitlines()[-1]


def test_the_demo_takes_no_plan(inputs: Inputs, call: Call) -> None:
    line = one_line(call("demo", "--run", inputs.run, "--set", "plan=full_gather"))
    assert "--set plan=full_gather: the demo trains under plans of its own" in line


def test_the_demo_takes_other_clusters_and_models(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lab(cluster: Cluster) -> str:
        raise UserError(f"sites of {cluster.levels[0].bandwidth:.0f} bytes a second")

    monkeypatch.setattr(shaping, "why_not_in_lab", no_lab)
    line = one_line(call("demo", "--run", inputs.run, "--set", "levels.dc.bandwidth=8 Mbps"))
    assert "sites of 1000000 bytes a second" in line
    line = one_line(call("demo", "--run", inputs.run, "--set", "model.hidden_size=6"))
    assert "model.head_dim: 3 must be even" in line


def test_each_plan_of_the_demo_has_folders_of_its_own(inputs: Inputs) -> None:
    run = load_run(str(inputs.run), [f"checkpoints.folder={inputs.folder / 'kept'}"])
    mine = [_own(run, name) for name in ("ep", "plan")]
    assert [one.checkpoint_folder for one in mine] == [inputs.folder / "kept" / "ep", inputs.folder / "kept" / "plan"]
    assert _own(load_run(str(inputs.run)), "ep").checkpoint_folder == inputs.output / "ep" / "checkpoints"


def test_any_path_reaches_the_command_inside_the_lab(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(shaping, "why_not_in_lab", lambda cluster: None)
    monkeypatch.setattr(lab, "run_in_lab", lambda command, *_: commands.append(command) or 0)
    folder = inputs.folder / 'é: #1 "x"'
    assert call("train", inputs.run, "--set", f"output={json.dumps(str(folder))}").code == 0
    overrides = [override for word, override in pairwise(commands[0]) if word == "--set"]
    run = load_run(str(inputs.run), overrides)
    assert run.output == folder and Path(run.plan) == folder / "plan.yaml" and Path(run.plan).exists()


def test_what_a_probe_cannot_write_is_noticed_before_it_measures(inputs: Inputs, call: Call) -> None:
    line = one_line(call("probe", inputs.cluster, inputs.workload, "-o", inputs.text / "measured.yaml"))
    assert "--output: " in line and "text.txt cannot be written" in line


def test_errors_as_json(call: Call) -> None:
    result = call("plan", "lab-4cd", "tiny", "--json")
    assert result.code == 2 and result.json["exit"] == 2 and "lab-4cd" in result.json["error"]
    assert result.json["error"] in result.err


def test_memory_that_does_not_suffice_is_infeasible(inputs: Inputs, call: Call) -> None:
    small = ("--set", "gpu.memory=1 kB")
    result = call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml", *small)
    assert result.code == 3 and result.err.count("\n") == 1 and "memory" in result.err


def test_an_output_that_is_a_folder_is_refused_before_anything_is_planned(inputs: Inputs, call: Call) -> None:
    result = call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder)
    assert result.code == 2 and "is a directory" in result.err and "planned" not in result.out


def test_places_that_no_file_can_have_are_refused_before_anything_is_computed(inputs: Inputs, call: Call) -> None:
    plan, below = written_plan(inputs, call), inputs.text / "below-a-file"
    for words in (("plan", "aws-9", "gpt-large", "--output"), ("simulate", plan, "--trace"), ("simulate", plan, "--out")):
        assert f"{words[-1]} {below}: cannot be written in {inputs.text}" in one_line(call(*words, below))


def test_names_that_no_file_can_have(inputs: Inputs, call: Call) -> None:
    assert "cannot be read (File name too long)" in one_line(call("plan", "x" * 300, inputs.workload))


def test_paths_that_may_not_be_looked_at(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    plan, locked = written_plan(inputs, call), inputs.folder / "locked" / "file.yaml"
    stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: refused(path) if "locked" in path.parts else stat(path, **how))
    one_line(call("plan", locked, inputs.workload))
    one_line(call("plan", "--compare", locked, locked))
    one_line(call("simulate", plan, "--routing", locked))
    assert call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "locked.yaml").code == 0
    one_line(call("plan", inputs.cluster, inputs.workload, "-o", locked))


def test_too_little_memory_is_no_bug(inputs: Inputs, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 74.5 GiB")

    monkeypatch.setattr("planner.plans", hungry)
    assert "too little memory for it (Unable to allocate 74.5 GiB)" in one_line(call("plan", inputs.cluster, inputs.workload))


def test_keys_of_a_plans_cluster_and_workload_go_without_prefix(inputs: Inputs, call: Call) -> None:
    plan = written_plan(inputs, call)
    for key in ("levels.dc.bandwidth=50 Mbps", "training.micro_batches=3"):
        prefix = "cluster" if key.startswith("levels") else "workload"
        short, long = (call("simulate", plan, "--json", "--set", words).json["step_s"] for words in (key, f"{prefix}.{key}"))
        assert short == long
    assert "cluster.levels.0.bandwith: unknown key" in one_line(call("simulate", plan, "--set", "levels.dc.bandwith=1 Gbps"))


def test_wrong_usage(call: Call) -> None:
    assert call("plan", "lab-4dc").code == 2
    assert call("fly").code == 2
    assert call("reproduce", "no-such-claim").code == 2
    assert "not a finite number" in call("simulate", "plan.yaml", "--tolerance", "nan").err
    for number in (("--pool", "inf"), ("--pool", "nan"), ("--time-limit", "nan"), ("--within", "nan"), ("--quantile", "nan")):
        result = call("plan", "lab-4dc", "tiny", *number)
        assert result.code == 2 and "not a finite number" in result.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--objective", "dollars"), ["nothing has a price", "0.02 $/GB"]),
        (("--budget", "0.5"), ["--budget 0.5", "no unit", "0.50 $"]),
        (("--budget", "1 $", "--set", "gpu.price=1 $/h", "--within", "0.1"), ["--budget: not with --within", "time only"]),
        (("--max-loss", "0.005"), ["--max-loss 0.005", "'0.5%'"]),
        (("--max-loss", "1%", "--codec", "dc.tokens=int8"), ["leave one of them out"]),
        (("--codec", "dc.tokens"), ["--codec dc.tokens: write it as LEVEL.KIND=CODEC"]),
        (("--codec", "dc.tokens=[int8"), ["--codec dc.tokens=[int8", "is not YAML"]),
        (("--codec", "dc.=int8"), ["--codec dc.=int8: write it as"]),
        (("--streams", "dc=0"), ["--streams dc=0", "LEVEL=NUMBER", "1 to 64"]),
        (("--streams", "dc=1000"), ["--streams dc=1000", "1 to 64"]),
        (("--chunks", "1000000000"), ["--chunks 1000000000", "1024 parts"]),
        (("--streams", "wan=2"), ["--streams wan=2", "dc, gpu"]),
        (("--set", "levels.dc.window=0 B"), ["levels.0.window", "above zero"]),
        (("--set", "levels.dc.window=64"), ["levels.0.window", "no unit", "64 GiB"]),
        (("--simulate", "--within", "0.1"), ["--simulate", "known rates"]),
        (("--prefetch", "--top", "2"), ["copies ahead", "one plan at a time"]),
        (("--prefetch", "--within", "0.1"), ["--prefetch: not with --within", "leave one"]),
        (("--chunks", "2", "--within", "0.1"), ["--chunks: not with --within", "leave one"]),
        (("--chunks", "2", "--prefetch"), ["--chunks: not with --prefetch", "leave one"]),
        (("--top", "3", "--within", "0.1"), ["--top: not with --within"]),
        (("--routing", "missing.npz", "--within", "0.1"), ["--routing: not with --within"]),
        (("--routing", "missing.npz", "--upgrades"), ["--routing: not with --upgrades"]),
        (("--prefetch", "--upgrades"), ["--prefetch: not with --upgrades"]),
        (("--prefetch", "--max-loss", "1%"), ["--prefetch: not with --max-loss", "exact bytes"]),
        (("--objective", "dollars", "--upgrades", "--set", "gpu.price=1 $/h"), ["--objective: not with --upgrades", "time only"]),
        (("--quantile", "0.5"), ["--quantile", "give --scenario or --within"]),
        *((("--set", "levels.dc.size=1", *more), [f"{more[0]}: needs two sites"]) for more in ONE_SITE),
        (("--figure", "plan.docx"), ["--figure plan.docx", ".png or .pdf or .svg"]),
        (("--figure", "/dev/null/plan.png"), ["--figure /dev/null/plan.png", "cannot be written"]),
        (
            ("--chunks", "2", "--set", "model.capacity_factor=1", "--set", "model.pad_expert_input_to_capacity=true"),
            ["pads whole"],
        ),
        (("--set", "levels.gpu.egress=1 $/GB"), ["levels.1.egress", "give it to level 'dc'"]),
        (("--set", "levels.dc.egress=1 $"), ["levels.0.egress", "0.02 $/GB"]),
        (("--set", "sites=[{name: a}, {name: b, tokens: 0.1}]"), ["sites.b.tokens: 0.1", "training.micro_batch_size (1"]),
        (("--set", "sites=[{name: a}, {name: b, tokens: 0}]"), ["sites.1.tokens", "greater than 0"]),
        (("--set", "sites=[{name: a}, {name: b, gpu: {memory: 1}}]"), ["sites.1.gpu.memory", "no unit"]),
        (("--set", "sites=[{name: a}, {name: b, gpu: {jitter: 1 ms}}]"), ["sites.1.gpu.jitter", "unknown key"]),
        (
            ("--set", "gpu.expert_throughput=1 GFLOPS", "--set", "sites=[{name: a}, {name: b, gpu: {throughput: 1 GFLOPS}}]"),
            ["sites.1.gpu: throughput", "expert_throughput"],
        ),
    ],
)
def test_wishes_that_make_no_sense(inputs: Inputs, call: Call, options: tuple[str, ...], named: list[str]) -> None:
    line = one_line(call("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml", *options))
    assert all(name in line for name in named), line


@pytest.mark.parametrize("verb", ["plan", "train", "simulate"])
def test_a_batch_that_sites_cannot_share(inputs: Inputs, call: Call, verb: str) -> None:
    """One sequence a rank, and one site to take twice as many: also where a baseline needs no planning."""
    inputs.cluster.write_text(inputs.cluster.read_text() + "sites: [{name: a, tokens: 3}, {name: b}]\n", encoding="utf-8")
    scenario = inputs.write("scenario.yaml", f"cluster: {inputs.cluster}\nworkload: {inputs.workload}\nplan: ep\n")
    arguments = {
        "plan": ("plan", inputs.cluster, inputs.workload, "-o", inputs.folder / "plan.yaml"),
        "train": ("train", inputs.run, "--local"),
        "simulate": ("simulate", scenario),
    }
    assert "sites.b.tokens: 1 is 0.5 sequences per rank and micro-batch" in one_line(call(*arguments[verb]))


def test_a_question_about_a_plan_without_an_answer_leaves_no_file(inputs: Inputs, call: Call) -> None:
    path = inputs.folder / "plan.yaml"
    result = call("plan", inputs.cluster, inputs.workload, "--set", "levels.dc.size=1", "--upgrades", "-o", path)
    assert result.code == 2 and "--upgrades: needs two sites" in result.err
    assert not path.exists()
