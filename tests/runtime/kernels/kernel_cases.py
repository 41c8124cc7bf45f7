"""The shape table that every kernel is tried on, and routings to go with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.kernels import reference

RESOURCES = Path(__file__).parents[3] / "experiments" / "kernels" / "resources.csv"
"""What every kernel takes on every architecture."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One routing problem: shapes and how tokens choose."""

    name: str
    rows: int = 37
    top_k: int = 4
    experts: int = 8
    hidden: int = 64
    multiple: int = 1
    routing: str = "even"
    """even: distinct experts at random; one: everything to expert 0; few: three experts get all; gaps: some slots empty."""


CASES = (
    *(Case(name=f"top-{k}", top_k=k) for k in range(1, 9)),
    Case(name="no tokens", rows=0),
    Case(name="one token", rows=1, multiple=8),
    Case(name="one expert takes all", routing="one", multiple=8),
    Case(name="empty experts", routing="few", multiple=16),
    Case(name="empty slots", routing="gaps", multiple=8),
    Case(name="one expert", experts=1, top_k=1),
    Case(name="many experts", experts=700, top_k=8, rows=50, hidden=16, multiple=4),
    Case(name="several tiles", rows=300, top_k=8, hidden=8, multiple=8),
    Case(name="several chunks", rows=9, top_k=2, hidden=1160, multiple=2),
    Case(name="hidden 63", hidden=63, multiple=8),
    Case(name="hidden 1", hidden=1),
    Case(name="hidden 130", hidden=130),
    Case(name="top-32", top_k=32, experts=40, rows=11),
)


def make_ids(case: Case, seed: int = 0) -> Tensor:
    """[rows, top_k] int32 expert ids."""
    make = torch.Generator().manual_seed(seed)
    if case.routing == "one":
        return torch.zeros(case.rows, case.top_k, dtype=torch.int32)
    open_to = 3 if case.routing == "few" else case.experts
    scores = torch.rand(case.rows, max(open_to, case.top_k), generator=make)
    ids = scores.argsort(dim=1)[:, : case.top_k] % open_to
    if case.routing == "gaps":
        ids[torch.rand(ids.shape, generator=make) < 0.4] = -1
    return ids.to(torch.int32)


def make_rows(rows: int, hidden: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """[rows, hidden] of the type, standard normal."""
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_sums(found: Tensor, wanted: Tensor, y: Tensor, slot: Tensor, weights: Tensor | None = None) -> None:
    """Two results of ``combine``, each added in float (double for double) and rounded once, are as near as rounding allows: one
    unit of the wide type per addition of the sum of the absolute products, and two units in the last place, since a fused
    multiply-add may round the other way."""
    wide = torch.promote_types(y.dtype, torch.float32)
    sizes = reference.combine(y.abs().to(wide), slot, None if weights is None else weights.abs().to(wide)).double()
    bound = slot.shape[1] * torch.finfo(wide).eps * sizes + 2 * torch.finfo(y.dtype).eps * wanted.double().abs()
    assert found.dtype == wanted.dtype
    excess = (found.double() - wanted.double()).abs() - bound
    assert not (excess > 0).any(), f"{float(excess.max())} beyond the bound"
