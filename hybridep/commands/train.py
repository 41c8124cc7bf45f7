"""``hybridep train``: a run config -> plan -> ranks, over Ray, in emulated datacenters, or as local processes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybridep.commands.common import again_in_lab, emit, note, set_option, stdout_console, verb
from hybridep.errors import UserError
from hybridep.units import counted

if TYPE_CHECKING:
    from hybridep.run import Run


@verb(name="train")
@click.argument("run")
@click.option("--local", is_flag=True, help="Plain processes instead of Ray actors; unshaped outside `hybridep lab`.")
@click.option("--resume", is_flag=True, help="Continue from the last complete checkpoint of this run.")
@click.option(
    "--max-restarts",
    "restarts",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Losses of ranks or sites after which it goes on from the last checkpoint: with the sites that answer within half a "
    "minute, and with the others again, after a checkpoint, once they are back.",
)
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Train nothing: write the weights of this run's last checkpoint as Hugging Face keeps them (config.json, safetensors).",
)
@set_option
def command(
    run: str, local: bool, resume: bool, restarts: int, export: Path | None, overrides: tuple[str, ...], as_json: bool
) -> int:
    """Train RUN: a shipped run config's name, or the path of one.

    With RAY_ADDRESS set: on that Ray cluster, whose nodes carry the label dc=<site>. Without: a cluster of up to 16 ranks is
    emulated on this machine, its links shaped where the kernel allows it.
    """
    from hybridep.commands.codecs import codec_lines
    from hybridep.commands.inputs import cluster_and_workload, load_run, resolve_plan
    from hybridep.commands.interrupts import ended_by_interrupts
    from hybridep.commands.restarts import train_on
    from hybridep.config import require_writable
    from hybridep.launch.backends import in_lab
    from hybridep.launch.folders import held
    from hybridep.launch.session import PLAN_FILE
    from hybridep.launch.worker import Job
    from runtime.trainable import check_copies, check_run

    config = load_run(run, overrides, resume=resume)
    if export is not None:
        given = {"--resume": resume, "--local": local, "--max-restarts": restarts}
        if any(given.values()):
            raise UserError(f"--export: trains nothing; leave out {next(name for name, value in given.items() if value)}")
        return _export(config, export, as_json)
    with ended_by_interrupts():
        require_writable("output", config.output)
        check_run(config, cluster_and_workload(config.cluster, config.workload, config.overrides)[1], resume=resume)
        plan = resolve_plan(config)
        check_copies(config, plan.cluster)
        for line in codec_lines(plan):
            note(f"hybridep train: {line}")
        if not local and not in_lab() and not os.environ.get("RAY_ADDRESS"):
            # The plan goes along, so that it is searched for once.
            with held("output", config.output):
                plan.save(config.output / PLAN_FILE)
            more = [*overrides, f"run.plan={json.dumps(str(config.output / PLAN_FILE), ensure_ascii=False)}"]
            words = [run, *["--resume"] * resume, "--max-restarts", str(restarts)]
            code = again_in_lab("train", words, plan.cluster, more, as_json)
            if code is not None:
                return code
        if config.data.path is None:
            note("hybridep train: no data.path: trains on the Python standard library's own sources, as bytes")
        if config.trace_step is not None and config.trace_step > config.steps:
            last = f"the last of {counted(config.steps, 'step')}"
            note(f"hybridep train: no timeline, since trace_step {config.trace_step} is beyond {last}")
        from hybridep.commands.progress import TrainingProgress

        with TrainingProgress(config.steps) as progress:
            job = Job(run=config, plan=plan, resume=resume)
            summary = train_on(job, local=local, restarts=restarts, on_step=progress)
        if as_json:
            emit(summary)
        else:
            _print(summary)
        return 0


def _export(run: Run, folder: Path, as_json: bool) -> int:
    from runtime.checkpoint_files import last_with_all
    from runtime.public_weights import export_weights

    found = last_with_all(run.checkpoint_folder)
    if found is None:
        raise UserError(f"checkpoints.folder: {run.checkpoint_folder} holds no complete checkpoint; train first")
    parameters = export_weights(found, folder, run.weights)
    if as_json:
        emit({"checkpoint": str(found), "folder": str(folder), "parameters": parameters})
    else:
        stdout_console().print(f"{counted(parameters, 'parameter')} of {found.name} written to {folder}")
    return 0


def _print(summary: dict[str, object]) -> None:
    from hybridep.units import format_bytes, format_seconds, format_throughput

    console = stdout_console()
    losses, step_s = summary["losses"], summary["step_s"]
    if not isinstance(losses, list) or not isinstance(step_s, dict):
        console.print("nothing to do: the checkpoint holds all steps")
        return
    predicted = summary["predicted_step_s"]
    beside = f", predicted {format_seconds(float(str(predicted)))}" if predicted is not None else ""
    planned = summary["planned_wan_bytes_per_step"]
    expected = f", planned {format_bytes(float(str(planned)))}" if planned is not None else ""
    links = "links shaped" if summary["shaped"] else "links not shaped"
    held_out = summary["validation_loss"]
    last = f"{losses[-1]:.4f}" + (f" (validation {held_out:.4f})" if isinstance(held_out, float) else "")
    console.print(f"loss {losses[0]:.4f} -> {last} in {counted(len(losses), 'step')} ({summary['backend']}, {links})")
    console.print(f"step {format_seconds(step_s['median'])} (median; {format_seconds(step_s['stdev'])} spread){beside}")
    computed = format_throughput(float(str(summary["model_flops_per_s_per_gpu"])))
    console.print(f"{float(str(summary['tokens_per_s'])):.0f} tokens/s, {computed} of each GPU")
    console.print(f"WAN {format_bytes(float(str(summary['wan_bytes_per_step'])))} per step{expected}")
    console.print(f"output {summary['output']}")
