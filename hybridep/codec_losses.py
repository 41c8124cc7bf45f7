"""What lossy codecs cost in final loss, as far as measured (``configs/codecs/losses.yaml``), which a given loss permits, and
which of those are worth a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from pydantic import Field

from hybridep.arrays import FloatArray
from hybridep.codecs import EXACT, KINDS, LOSSLESS_OF, PAYLOADS, Codecs, ExpertCodec, GradientCodec, LossGate, Speed, Speeds, Wire
from hybridep.config import Strict, build, load
from hybridep.errors import UserError
from hybridep.workload import Workload

TABLE = Path(__file__).resolve().parent / "configs" / "codecs" / "losses.yaml"


class MeasuredLoss(Strict):
    """One codec, alone."""

    kind: str
    """Kind of payload, one of ``hybridep.codecs.PAYLOADS``."""
    codec: str
    keep: float | None = None
    """Share of elements that a sparse codec sends; None for others."""
    relative: float
    """(final loss - exact) / exact, mean over seeds."""
    range: tuple[float, float]
    """Smallest and largest (final loss - exact) / exact of a seed."""
    seeds: int = Field(ge=1)

    @property
    def codecs(self) -> Codecs:
        """This codec and nothing else."""
        keep = {} if self.keep is None else {f"{self.kind}_keep": self.keep}
        return build(Codecs, {self.kind: self.codec, **keep}, str(TABLE))


class MeasuredLosses(Strict):
    """What ``configs/codecs/losses.yaml`` holds."""

    source: str
    losses: tuple[MeasuredLoss, ...]


@cache
def measured_losses() -> MeasuredLosses:
    """The table of all codecs whose loss was measured."""
    return load(MeasuredLosses, TABLE)


def with_gates(codecs: Codecs) -> Codecs:
    """``codecs`` with a gate for each lossy one whose loss was measured; gates that it has stay."""
    table, gates = measured_losses(), dict(codecs.gates)
    for one in table.losses:
        if codecs.lossy.get(one.kind) == one.codecs.lossy[one.kind]:
            spread = f"{one.seeds} seeds, {one.range[0]:+.2%} to {one.range[1]:+.2%}"
            gates.setdefault(one.kind, LossGate(relative=one.relative, source=f"{table.source}; {spread}"))
    return codecs.model_copy(update={"gates": gates})


def permitted(max_loss: float, kinds: Sequence[str] = KINDS) -> list[Codecs]:
    """Codecs of one level for these kinds of payload, exact ones first, whose measured losses add up to at most ``max_loss``.
    Each was measured alone; one that ended below the exact loss counts as none, but where no loss is allowed only lossless ones
    are. Where some is, lossless ones are for experts alone, whose short lossy codecs need room for copies at both ends; those of
    other kinds do not, and have ended below the exact loss. Raises UserError for a loss below zero."""
    if max_loss < 0:
        raise UserError(f"a permitted loss must be at least zero (found {max_loss:g})")
    options: dict[str, list[tuple[Codecs, float]]] = {kind: [(EXACT, 0.0)] for kind in kinds}
    for kind in options.keys() if not max_loss else options.keys() & {"experts"}:
        options[kind].append((LOSSLESS_OF[kind], 0.0))
    for one in measured_losses().losses if max_loss else ():
        if one.kind in options:
            options[one.kind].append((one.codecs, max(one.relative, 0.0)))
    found = []
    for chosen in product(*options.values()):
        if sum(loss for _, loss in chosen) <= max_loss:
            fields = {name: value for one, _ in chosen for name, value in one.model_dump(exclude_defaults=True).items()}
            found.append(with_gates(build(Codecs, fields, str(TABLE))) if fields else EXACT)
    return found


def worthwhile(choices: Sequence[Codecs], workload: Workload, speeds: Speeds | None) -> list[Codecs]:
    """Those of which no other one makes every message as short, codes it as fast and keeps no more; of equal ones that with the
    least measured loss, or with fewer kinds that are coded. First those that keep least, in the order in which they are given."""
    by_loss = sorted(range(len(choices)), key=lambda place: (_loss(choices[place]), len(choices[place].coded), place))
    takes = np.array([_takes(choices[place], workload, speeds or Speeds()) for place in by_loss])
    left: list[int] = []
    for own, place in enumerate(by_loss):
        no_more = (takes <= takes[own]).all(axis=1)
        less = (takes < takes[own]).any(axis=1) | (np.arange(len(takes)) < own)
        if not (no_more & less).any():
            left.append(place)
    return sorted((choices[place] for place in sorted(left)), key=lambda codecs: sum(_keeps(codecs)))


def shortest(choices: Iterable[Codecs], workload: Workload) -> Codecs:
    """The codec of each kind of payload whose messages are shortest among all ``choices``: what holds with these holds for every
    choice, as far as bytes go. Together they need not be permitted."""
    fields: dict[str, object] = {}
    every = list(choices)
    for kind in PAYLOADS:
        least = min(every, key=lambda one: _lengths(one, workload)[kind])
        fields |= {name: getattr(least, name) for name in (kind, f"{kind}_keep") if name in Codecs.model_fields}
    return EXACT.model_copy(update=fields)


def times_exact(codecs: Codecs, workload: Workload, speeds: Speeds | None, bytes_per_s: float) -> float:
    """How long messages take over a link, coding included, each as a multiple of an exact one's time; the sum of all kinds."""
    exact, coded, speeds = _lengths(EXACT, workload), _lengths(codecs, workload), speeds or Speeds()
    total = 0.0
    for kind in PAYLOADS:
        speed = _speed(speeds, kind, codecs)
        coding = 0.0 if speed is None else bytes_per_s / speed.encode + bytes_per_s / speed.decode
        total += coded[kind][0] / exact[kind][0] + coding
    return total


def _loss(codecs: Codecs) -> float:
    return sum(max(gate.relative, 0.0) for gate in codecs.gates.values())


def _lengths(codecs: Codecs, workload: Workload) -> dict[str, tuple[float, ...]]:
    """Kind of payload -> bytes of its messages."""
    wire = Wire(workload=workload, codecs=codecs)
    dense_bytes = wire.dense_bytes(np.array([max(workload.model.dense_params, 1)]))
    return {
        "tokens": (wire.row_there_bytes, wire.row_back_bytes),
        "experts": (wire.expert_bytes,),
        "gradients": (wire.expert_gradient_bytes, float(dense_bytes[0])),
        "activations": (wire.activation_row_bytes,),
    }


def _speed(speeds: Speeds, kind: str, codecs: Codecs) -> Speed | None:
    """Activations are coded as fast as tokens are."""
    return speeds.of(kind, codecs) if kind in KINDS else speeds.tokens.get(codecs.activations)


def _takes(codecs: Codecs, workload: Workload, speeds: Speeds) -> FloatArray:
    """[n]: bytes of each kind of message, seconds per byte to code and decode it, what is kept for it; the less the better."""
    found = [size for sizes in _lengths(codecs, workload).values() for size in sizes]
    for kind in PAYLOADS:
        speed = _speed(speeds, kind, codecs)
        found += [0.0, 0.0] if speed is None else [1 / speed.encode, 1 / speed.decode]
    return np.array([*found, *_keeps(codecs)], dtype=np.float64)


def _keeps(codecs: Codecs) -> list[bool]:
    """What needs memory: copies at both ends, an expert that is shared, gradients that were not sent, and sums of coded ones."""
    experts, gradients = codecs.experts, codecs.gradients
    shared, top_k = experts is ExpertCodec.SHARED_RESIDUAL, gradients is GradientCodec.TOP_K
    return [experts.is_change, shared, top_k, gradients is not GradientCodec.EXACT]
