"""``python -m runtime.kernels.bench``: every kernel's speed against a device copy of the same run; a table and a JSON file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import click
import torch

from hybridep.errors import UserError
from hybridep.provenance import provenance
from hybridep.units import format_bytes, format_seconds, ms_to_s
from runtime.kernels import bench_layer
from runtime.kernels.bench_cases import SHAPES, Case, codec_cases, copy_cases, quantised_cases, token_cases
from runtime.kernels.bench_layer import LAYERS, LayerData
from runtime.kernels.codecs import CodecKernels
from runtime.kernels.driver import cuda_driver
from runtime.kernels.tokens import TokenKernels

_COMPARED = ("torchtitan", "triton")
"""What is measured beside the kernels where it is installed."""
_IN_A_ROW = 4
"""Kernels, or layers, that are launched together at least, as those of a model are: what comes before the first counts once."""
ELEMENTS = 2**27
"""Of the codecs' weights: 256 MiB in bf16."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    name: str
    what: str
    time_s: float
    """Median of one run."""
    moved_bytes: int
    bytes_per_s: float
    share_of_copy: float | None
    """Of the fastest device copy's rate in the same run; None for a whole layer, which does more than move bytes."""


def time_runs_s(runs: list[Callable[[], object]], repeats: int) -> float:
    """Median seconds of one run. All runs, several times where they are few, are captured into a CUDA graph, so the host's launch
    time is left out, and what the first run after a wait takes longer hardly counts; the first call of each compiles and warms up
    outside it. On the current stream where that can be captured: backward runs on the stream
    that its forward ran on."""
    for run in runs:
        run()
    runs = runs * -(-_IN_A_ROW // len(runs))
    torch.cuda.synchronize()
    graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with torch.cuda.graph(graph, stream=None if current == torch.cuda.default_stream() else current):
        for run in runs:
            run()
    return _replay_s(graph.replay, repeats) / len(runs)


def _replay_s(replay: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call, after three that do not count."""
    times_s: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times_s.append(ms_to_s(start.elapsed_time(end)))
    return statistics.median(times_s[3:])


def _in_a_row_s(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of one of several runs that are launched together."""

    def several() -> None:
        for _ in range(_IN_A_ROW):
            run()

    return _replay_s(several, repeats) / _IN_A_ROW


def measure_copies(device: torch.device, repeats: int) -> tuple[list[Result], float]:
    """(device copies, bytes per second of the fastest)."""
    copies = list(measure(copy_cases(device), 1.0, repeats))
    fastest = max(copy.bytes_per_s for copy in copies)
    return [replace(copy, share_of_copy=copy.bytes_per_s / fastest) for copy in copies], fastest


def measure(cases: Iterable[Case], copy_bytes_per_s: float, repeats: int) -> Iterator[Result]:
    """Time each case as it comes, so that its data can go before the next is made."""
    for case in cases:
        time_s = time_runs_s(case.runs, repeats)
        rate = case.moved_bytes / time_s
        yield Result(
            name=case.name,
            what=case.what,
            time_s=time_s,
            moved_bytes=case.moved_bytes,
            bytes_per_s=rate,
            share_of_copy=rate / copy_bytes_per_s,
        )


def measure_layers(device: torch.device, repeats: int) -> Iterator[Result]:
    """One MoE layer, forward and backward, in each form, eager and compiled, launched as a training step would; then each part
    of it."""
    for layer in LAYERS:
        runs: list[tuple[str, float]] = []
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            data = LayerData(layer, device)
            for name, form in bench_layer.forms(data).items():
                for way, run in (("forward", form.forward), ("forward and backward", form.forward_backward)):
                    runs.append((f"layer, {name}, {way}", _in_a_row_s(run, repeats)))
            runs += [(f"layer, kernels, {name}", time_runs_s([run], repeats)) for name, run in bench_layer.parts(data)]
        for name, time_s in runs:
            yield Result(name=name, what=layer.label, time_s=time_s, moved_bytes=0, bytes_per_s=0.0, share_of_copy=None)


def measure_all(device: torch.device, repeats: int) -> Iterator[Result]:
    """The copies first, then everything held against the faster."""
    copies, ceiling = measure_copies(device, repeats)
    yield from copies
    tokens, codecs = TokenKernels(cuda_driver()), CodecKernels(cuda_driver())
    for shape in SHAPES:
        yield from measure(token_cases(tokens, shape, device), ceiling, repeats)
    yield from measure(quantised_cases(tokens, codecs, SHAPES[0], device), ceiling, repeats)
    yield from measure(codec_cases(codecs, ELEMENTS, device), ceiling, repeats)
    yield from measure_layers(device, repeats)


def line(result: Result) -> str:
    """For people."""
    speed = "" if result.share_of_copy is None else f"{format_bytes(result.bytes_per_s):>9}/s {result.share_of_copy:7.1%} of copy"
    return f"{result.name:32} {result.what:52} {format_seconds(result.time_s):>10} {speed}"


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("kernel-bench.json"), show_default=True)
@click.option("--repeats", default=20, show_default=True, help="Timed replays of each case.")
def main(out: Path, repeats: int) -> None:
    """Time the kernels on the first CUDA device."""
    if not torch.cuda.is_available():
        raise click.ClickException(str(UserError("the bench needs a CUDA device, and torch sees none")))
    device = torch.device("cuda", 0)
    results = []
    for result in measure_all(device, repeats):
        click.echo(line(result))
        results.append(result)
    facts = provenance() | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda or ""}
    facts |= {name: metadata.version(name) for name in _COMPARED if find_spec(name) is not None}
    absent = [name for name in _COMPARED if find_spec(name) is None]
    document = {"provenance": facts, "absent": absent, "results": [asdict(result) for result in results]}
    out.write_text(json.dumps(document, indent=1) + "\n")
    for name in absent:
        click.echo(f"{name} is not installed: nothing of it was measured")
    click.echo(f"written to {out}")


if __name__ == "__main__":
    main()
