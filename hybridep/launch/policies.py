"""Pure decisions of the controller: whom to blame when ranks fail, and when waiting has gone on for too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridep.launch.worker_group import DcLost, Failed, FailureKind


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the controller waits for what."""

    start_s: float = 180.0
    """For all ranks to be up; they import torch, several of them on one core in an emulation."""
    finish_s: float = 60.0
    """For the remaining ranks once the first has finished."""
    cause_s: float = 0.3
    """After a death or an error, for others that belong to it (a whole datacenter dies rank by rank)."""
    complaint_s: float = 2.0
    """After a rank has only accused a peer, for the news of what happened to that peer."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why a run ended."""

    who: str
    """Rank and datacenter, or a datacenter; empty when the message speaks for itself."""
    why: str
    exit_code: int = 5


def rank_name(rank: int, dcs: Sequence[str]) -> str:
    """``rank 3 in us-east``."""
    return f"rank {rank} in {dcs[rank]}"


def is_time_to_judge(failures: Sequence[Failed], lost: Sequence[DcLost], waited_s: float, patience: Patience) -> bool:
    """Whether the first failure is ``waited_s`` old enough to name the cause."""
    if lost:
        return True
    only_complaints = all(failure.kind is FailureKind.PEER for failure in failures)
    return bool(failures) and waited_s >= (patience.complaint_s if only_complaints else patience.cause_s)


def first_cause(failures: Sequence[Failed], lost: Sequence[DcLost], dcs: Sequence[str]) -> Cause:
    """The failure that explains the others. ``dcs[r]`` is the datacenter of rank r; both lists are in order of arrival.

    A lost datacenter explains everything; an error or a death explains complaints about peers; among complaints alone,
    see :func:`accused`.
    """
    if lost:
        return Cause(who=lost[0].dc, why=lost[0].why)
    own = [failure for failure in failures if failure.kind is not FailureKind.PEER]
    if not own:
        return accused(failures, dcs)
    first = own[0]
    if first.kind is FailureKind.ERROR:
        speaks_for_itself = first.exit_code == 2  # the user's input, not the rank
        return Cause(who="" if speaks_for_itself else rank_name(first.rank, dcs), why=first.why, exit_code=first.exit_code)
    died = {failure.rank for failure in own if failure.kind is FailureKind.DIED}
    whole = _whole_dc(first.rank, died, dcs)
    if whole:
        return Cause(who=dcs[first.rank], why=f"all its ranks ended ({first.why})")
    return Cause(who=rank_name(first.rank, dcs), why=first.why)


def accused(complaints: Sequence[Failed], dcs: Sequence[str]) -> Cause:
    """Whom ranks that only complain about peers point at.

    A rank that hangs says nothing: accusations lead, over ranks that wait for it themselves, to one that has not
    complained. When everybody complains, nobody hangs and a link is gone: that of the datacenter which all accusations
    between datacenters have in common.
    """
    peers = {failure.rank: failure.peer for failure in complaints if failure.peer is not None}
    why = complaints[0].why
    silent = [end for end in (_follow(peers, rank) for rank in peers) if end is not None]
    if silent:
        # A complaint says "it" of whom it accuses.
        why = next(failure.why for failure in complaints if failure.peer == silent[0])
        if _whole_dc(silent[0], set(silent), dcs):
            return Cause(who=dcs[silent[0]], why=f"it stopped answering ({why})")
        return Cause(who=rank_name(silent[0], dcs), why=f"it stopped answering ({why})")
    between = [{dcs[rank], dcs[peer]} for rank, peer in peers.items() if dcs[rank] != dcs[peer]]
    common = sorted(set.intersection(*between)) if between else []
    if len(common) == 1:
        return Cause(who=common[0], why=f"its link carries nothing ({why})")
    if len(common) == 2:
        return Cause(who=" or ".join(common), why=f"nothing passes between them ({why})")
    return Cause(who=rank_name(complaints[0].rank, dcs), why=why)


def _follow(peers: Mapping[int, int], rank: int) -> int | None:
    """The silent rank at the end of a chain of accusations; None when it runs in a circle."""
    seen = set()
    while rank in peers:
        if rank in seen:
            return None
        seen.add(rank)
        rank = peers[rank]
    return rank


def _whole_dc(rank: int, gone: set[int], dcs: Sequence[str]) -> bool:
    """Whether ``gone`` holds all ranks of this rank's datacenter, and there is more than one."""
    members = {other for other, dc in enumerate(dcs) if dc == dcs[rank]}
    return len(members) > 1 and members <= gone
