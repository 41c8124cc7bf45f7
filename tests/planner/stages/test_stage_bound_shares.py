"""The bound of pipelines where sites take more of the batch than others, or have more experts."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from stage_cases import layered_workload, sites_cluster, with_shares

from hybridep.codecs import EXACT, Wire
from hybridep.pipeline import sequences_of_place
from hybridep.shares import parts, sequences_together
from planner.stages.bound import _Sites, _weighted_shares
from planner.stages.least_bytes import layer_dense_bytes, most_homes


def test_shares_and_homes_are_what_stages_make_of_weights(rng: np.random.Generator) -> None:
    """Of every stage of so many sites, with every number of sequences together; the extremes are reached within rounding."""
    for _ in range(30):
        weights, homes = rng.choice([0.5, 1.0, 2.0, 3.3], 5), rng.choice([0.0, 1.0, 2.5], 5)
        together, size = [4, 6, 12], int(rng.integers(1, 5))
        low, high = _weighted_shares(together, weights, weights, size)
        most = most_homes(8, homes, homes, size)
        seen, lived = [list[float]() for _ in range(5)], [0] * 5
        for group in combinations(range(5), size):
            own = tuple(weights[list(group)].tolist())
            for number in together:
                for site, mine in zip(group, parts(number, own) if size <= number else (), strict=True):
                    if min(parts(number, own)):
                        seen[site].append(mine / number)
            if homes[list(group)].any():
                for site, mine in zip(group, parts(8, tuple(homes[list(group)].tolist())), strict=True):
                    lived[site] = max(lived[site], mine)
        for site in range(5):
            assert low[site, 0] <= min(seen[site], default=1) + 1e-12 and max(seen[site], default=0) <= high[site, 0] + 1e-12
            assert lived[site] <= most[site] <= max(lived[site] + 1, 2) or np.ptp(homes) == 0
            assert high[site, 0] - low[site, 0] <= max(seen[site], default=1) - min(seen[site], default=0) + 2 / min(together)


@pytest.mark.parametrize("seed", range(12))
def test_what_every_site_of_every_stage_has_and_sends_is_counted(seed: int) -> None:
    """Its share is within a range, over its links passes no less than counted for that, and the stage's sites send no less."""
    rng = np.random.default_rng(seed)
    # Their rates differ, so they are told apart, in the order of these.
    cluster = with_shares(rng, sites_cluster(rng, 4, 1, "access"))
    workload = layered_workload(2, ffn=int(rng.choice([16, 64, 256])), micro_batches=int(rng.integers(2, 7)))
    sites, wire, sizes = _Sites(cluster, workload, EXACT, 4, alike=True), Wire(workload=workload), np.arange(1, 5)
    row_of = np.argsort(np.argsort(cluster.access_bytes_per_s[0]))
    away = np.array([1 - comb(held, 2) / comb(8, 2) for held in range(9)])
    dense_bytes = layer_dense_bytes(cluster, wire, sizes)
    copy = np.array([wire.expert_gradient_bytes, wire.expert_bytes])
    rows = np.array([wire.row_there_bytes, wire.row_back_bytes])
    tokens = workload.training.tokens * workload.training.micro_batches * 4
    nearest = 0.0
    for group in (one for size in sizes for one in combinations(range(4), int(size))):
        places, size = list(group), len(group)
        if not cluster.home_weights[places].any():
            continue
        own, homes = tuple(cluster.token_weights[places].tolist()), parts(8, tuple(cluster.home_weights[places].tolist()))
        ways = sites._sizes == size
        for together in sequences_together(sequences_of_place(workload, cluster), [own]):
            sent = 0.0
            for site, home, mine in zip(group, homes, parts(together, own), strict=True):
                row, share, held = row_of[site], mine / together, np.arange(home, 9)
                least, most = sites._share[row, ways], sites._most_share[row, ways]
                within = (least <= share * (1 + 1e-9)) & (share <= most * (1 + 1e-9))
                assert within.any(), (group, together)
                each = (held - home)[:, None] * copy + tokens * share * away[held][:, None] * rows
                counted = sites._layer_bytes[:, row][:, ways][:, within] - dense_bytes[size - 1]
                assert (counted <= each.min(axis=0)[:, None] * (1 + 1e-9) + 1e-6).all(), (group, together)
                sent += float(each.sum(axis=1).min()) / size
            found = sites._sent_bytes[size - 1] - dense_bytes[size - 1]
            assert found <= sent * (1 + 1e-9) + 1e-6, (group, together)
            nearest = max(nearest, found / sent if sent else 0.0)
    assert nearest > 0.1
