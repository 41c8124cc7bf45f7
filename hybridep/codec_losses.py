"""What lossy codecs cost in final loss, as far as measured (``configs/codecs/losses.yaml``), and which a given loss permits."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

from pydantic import Field

from hybridep.codecs import EXACT, KINDS, Codecs, LossGate
from hybridep.config import Strict, build, load

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


def permitted(max_loss: float) -> list[Codecs]:
    """Codecs of one level, exact ones first, whose measured losses add up to at most ``max_loss``. Each was measured alone; one
    that ended below the exact loss counts as none, but where no loss is allowed only exact ones are."""
    if not max_loss:
        return [EXACT]
    options: dict[str, list[MeasuredLoss | None]] = {kind: [None] for kind in KINDS}
    for one in measured_losses().losses:
        if one.kind in options:
            options[one.kind].append(one)
    found = []
    for chosen in product(*options.values()):
        used = [one for one in chosen if one is not None]
        if sum(max(one.relative, 0.0) for one in used) <= max_loss:
            fields = {name: value for one in used for name, value in one.codecs.model_dump(exclude_defaults=True).items()}
            found.append(with_gates(build(Codecs, fields, str(TABLE))) if used else EXACT)
    return found
