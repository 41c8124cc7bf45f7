"""Ranks that several tests of a file train on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4, join=False) as pool:
        yield pool
