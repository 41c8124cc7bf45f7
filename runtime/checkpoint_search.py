"""Which checkpoint a run goes on from, and the files of it that ranks lack: they come from the sites that have them.

The last one counts of which every file is somewhere, whole: sites may have lost theirs, or be new, or have other ranks now.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hybridep.checkpoint_folders import MANIFEST, checkpoint_name, checkpoints, is_checkpoint
from hybridep.config import sync_folder, write_text
from hybridep.errors import UserError
from hybridep.topology import Cluster
from hybridep.units import counted, format_bytes
from runtime.barrier import Barrier
from runtime.checkpoint_files import (
    CHOSEN,
    UnreadableError,
    codec_shard,
    damage_of,
    dense_pieces,
    expert_shard,
    is_codec_shard,
    needed_files,
    read_manifest,
    require_known_version,
    require_same_model,
    whole_files,
)
from runtime.checkpoint_travel import Roads, Transfer, arrival, carry, kept, together
from runtime.dense_shard import DenseShard
from runtime.mesh import Mesh
from runtime.transport import Transport

_KNOWN = 64
"""Checkpoints of a folder of which others are told, the last ones."""
_RANKS, _STEP = "ranks", "step"


class Folder(NamedTuple):
    """Of checkpoints, as some ranks see it alike."""

    path: Path
    scratch: Path
    """Inside, for what has not all come yet; a checkpoint of which nothing was here comes together in its ``step``."""
    leader: int
    """The lowest of these ranks."""


class LastCheckpoint(NamedTuple):
    """What to go on from."""

    path: Path
    manifest: dict[str, Any]
    """As at any of the sites that have it: what all of them say alike."""
    remarks: list[str]
    """What is wrong with this one's and later ones' files, as this rank sees them."""


@contextmanager
def shared_folder(path: Path, rank: int, barrier: Barrier) -> Iterator[Folder]:
    """All ranks enter and leave it together. Raises UserError where the folder cannot be written."""
    number = int(barrier.agree(float(random.SystemRandom().getrandbits(52))))
    scratch = path / f".step-resume.partial-{number:x}"
    try:
        for inside in (_RANKS, _STEP):
            (scratch / inside).mkdir(parents=True, exist_ok=True)
        (scratch / _RANKS / str(rank)).touch()
        barrier.wait()
        yield Folder(path, scratch, min(int(one.name) for one in (scratch / _RANKS).iterdir()))
        barrier.wait()
    except OSError as error:
        raise UserError(f"checkpoints.folder: {path} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def last_checkpoint(
    folder: Folder, rank: int, barrier: Barrier, *, plan: str = "", required: bool = True
) -> LastCheckpoint | None:
    """The checkpoint with the most steps of which every file is whole at some rank's; all ranks call it. Those that the run wrote
    before it was last resumed come after all since, whatever their steps: a site may have been away, and steps be made anew in
    another way. Under the ``plan`` (its digest) that it was written, what codecs keep belongs to it. None where no site has any,
    unless one is ``required``; UserError where there is one but none is whole."""
    mine, damage = dict[int, tuple[int, int]](), dict[str, str]()
    for path in checkpoints(folder.path) if rank == folder.leader else ():
        try:
            manifest = read_manifest(path)
            mine[manifest["step"]] = manifest["attempt"], manifest["number"]
        except UnreadableError as error:
            damage[path.name] = error.args[0]
    told = barrier.gather_json([(mine[step][0], step, mine[step][1]) for step in sorted(mine)][-_KNOWN:])
    candidates = sorted({(attempt, step, number) for one in told or [] for attempt, step, number in one})
    lacking = list[str]()
    while True:
        attempt, step, number = barrier.share_json(candidates.pop() if candidates else (0, -1, 0))
        if step < 0:
            break
        path, here = folder.path / checkpoint_name(step), None
        if mine.get(step) == (attempt, number):
            # Of this one only: stores of many checkpoints hold many files.
            here = read_manifest(path) | {"whole": list(whole_files(path))}
            wrong = damage_of(path)
            if wrong is not None:
                damage[path.name] = wrong
        told = barrier.gather_json(here)
        answer: dict[str, Any] | None = None
        if told is not None:
            having = [one for one in told if one is not None]
            needed = needed_files(having[0])
            if having[0]["plan"] == plan:
                needed |= {name for one in having for name in one["bytes"] if is_codec_shard(name)}
            gone = needed - {name for one in having for name in one.pop("whole")}
            answer = {"manifest": having[0], "gone": sorted(gone)}
        answer = barrier.share_json(answer)
        if not answer["gone"]:
            return LastCheckpoint(path, answer["manifest"], [damage[name] for name in sorted(damage) if name >= path.name])
        lacking.append(f"no site has {answer['gone'][0]} of {path.name}")
    if not required and not barrier.most([bool(lacking or damage)])[0]:
        return None
    if barrier.most([bool(damage)])[0] and not damage:
        barrier.wait()  # for the rank that ends the run
    missing = "; ".join(damage[name] for name in sorted(damage)) or "; ".join(lacking[:1])
    if not missing:
        raise UserError(f"checkpoints.folder: {folder.path} holds no complete checkpoint; start without --resume")
    raise UserError(
        f"checkpoints.folder: {folder.path} holds no checkpoint that is whole, nor do all sites together ({missing}); bring back "
        "what is missing (with checkpoints.copies other sites keep it, too), or start without --resume"
    )


def bring(
    found: LastCheckpoint, folder: Folder, *, mesh: Mesh, shard: DenseShard, barrier: Barrier, transport: Transport
) -> list[str]:
    """What this rank reads of the checkpoint is in its folder afterwards; all ranks call it. Returns what there is to say of it.
    Raises UserError where it cannot be written."""
    rank, path, number = mesh.run_rank, found.path, found.manifest["number"]
    require_known_version(path, found.manifest)
    require_same_model(path, found.manifest["workload"], mesh.whole.workload)
    is_here = is_checkpoint(path) and _number(path) == number
    own: dict[str, Any] = {"leader": folder.leader, "files": sorted(_read_files(mesh, found.manifest)), "dense": []}
    own["dense"] = [(one.name, one.first, one.first + one.where.stop - one.where.start) for one in shard.pieces()]
    if rank == folder.leader:
        own["have"] = whole_files(path) if is_here else {}
        own["pieces"] = {name: dense_pieces(path / name) for name in found.manifest["dense"] if name in own["have"]}
    told = barrier.gather_json(own)
    ordered = barrier.share_json(_transfers(told, mesh.whole.cluster) if told is not None else None)
    transfers = [Transfer(*one) for one in ordered]
    if not barrier.most([bool(transfers) or not is_here])[0]:
        return []
    target = path if is_here else folder.scratch / _STEP
    # Where the checkpoint is, which may be a link to another disk.
    arrivals = target / folder.scratch.name
    with together(folder.path, barrier, folder.scratch, arrivals):
        arrivals.mkdir(exist_ok=True)
        for one in carry(transfers, path, arrivals, rank=rank, transport=transport, barrier=barrier, cluster=mesh.whole.cluster):
            (arrivals / arrival(one.name, rank)).replace(target / one.name)
    shutil.rmtree(arrivals, ignore_errors=True)
    with together(folder.path, barrier, folder.scratch):
        if rank == folder.leader:
            sizes = {one.name: one.size_bytes for one in transfers if _size(target / one.name) == one.size_bytes}
            known = read_manifest(target)["bytes"] if is_here else {}
            write_text(target / MANIFEST, json.dumps(found.manifest | {"bytes": known | sizes}, indent=1))
            sync_folder(target)
        if rank == folder.leader and not is_here:
            if os.path.lexists(path):
                path.rename(path.with_name(f"{path.name}.other-{random.SystemRandom().getrandbits(52):x}"))
            target.rename(path)
            sync_folder(path.parent)
    if rank or not transfers:
        return []
    size = format_bytes(sum(one.size_bytes for one in transfers))
    return [f"checkpoint {path}: {counted(len(transfers), 'file')} ({size}) went to sites that lacked them"]


def _number(path: Path) -> int | None:
    try:
        return int(read_manifest(path)["number"])
    except UserError:
        return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _read_files(mesh: Mesh, manifest: Mapping[str, Any]) -> set[str]:
    """What a rank reads beside dense parameters."""
    files = {codec_shard(mesh.run_rank)} if manifest["plan"] == mesh.whole.digest else set()
    if mesh.run_rank == 0:
        files.add(CHOSEN)
    for own, _, placement in mesh.plan.each_layer():
        homes = manifest["homes"][mesh.first_moe_layer + own]
        if mesh.whole.codecs and manifest["plan"] != mesh.whole.digest:
            # Codecs that begin anew begin with the weights that both ends have of an expert.
            files |= {expert_shard(home) for home in homes}
        files |= {expert_shard(homes[expert]) for expert in np.flatnonzero(placement.home == mesh.rank)}
    return files


def _transfers(told: list[dict[str, Any]], cluster: Cluster) -> list[Transfer]:
    """From where each folder gets what ranks that see it read and it lacks."""
    leaders = [one["leader"] for one in told]
    while leaders != (above := [leaders[leader] for leader in leaders]):  # of ranks that see each other's files late
        leaders = above
    files = kept({leader: told[leader]["have"] for leader in set(leaders)})
    pieces: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    """By parameter: file, first element and the one after the last."""
    for leader in sorted(set(leaders)):
        for file, parts in told[leader]["pieces"].items():
            for parameter, (first, last) in parts.items():
                pieces[parameter].append((file, first, last))
    wanted: dict[str, set[int]] = defaultdict(set)
    for leader, one in zip(leaders, told, strict=True):
        for parameter, first, last in one["dense"]:
            for file, begin, end in pieces[parameter]:
                if begin < last and first < end:
                    wanted[file].add(leader)
        for file in one["files"]:
            wanted[file].add(leader)
    roads = Roads(cluster, leaders)
    for name, file in files.items():
        roads.bring(name, file, wanted[name])
    return roads.transfers
