"""How many experts a site can serve for others, against all ways to share them out."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement
from math import comb

import numpy as np
import pytest
from site_cases import random_problem

from hybridep.config import build
from hybridep.topology import Cluster
from hybridep.workload import Workload
from planner.sites import lp
from planner.sites.capacity import SLOPES, most_served, serving_lines
from planner.sites.lp import box_program
from planner.sites.problem import site_problem
from planner.sites.relaxation import Relaxation


@pytest.mark.parametrize(("experts", "top_k"), [(6, 1), (7, 2), (8, 4)])
def test_no_way_to_share_out_experts_serves_more(experts: int, top_k: int) -> None:
    hit = np.array([1 - comb(experts - n, top_k) / comb(experts, top_k) for n in range(experts + 1)])
    rooms = np.array([0.0, 0.1, float(hit[1]), 0.7, 1.0, 1.3, float(2 * hit[2]), 2.4, 9.0])
    for users in (1, 2, 3):
        found = most_served(hit, rooms[:, None], users, np.arange(experts + 1))
        for place, room in enumerate(rooms):
            for held in range(experts + 1):
                ways = combinations_with_replacement(range(held + 1), users)
                assert found[place, held] == max(sum(parts) for parts in ways if hit[list(parts)].sum() <= room + 1e-9)


def test_with_room_for_more_than_a_row_two_users_are_not_served_in_full() -> None:
    """Room for 1.4 rows at a site that holds seven of eight experts, two per token: one user of seven, one of one expert; with
    two experts three users of both."""
    hit = np.array([1 - comb(8 - n, 2) / comb(8, 2) for n in range(9)])
    by_held = most_served(hit, np.array([1.4]), 20, np.arange(9))
    assert (by_held[7], by_held[2]) == (8, 6)


def test_lines_touch_what_sites_can_serve_from_above() -> None:
    relaxation, users = Relaxation(problem=random_problem(3, 5, 9)), 4
    rng, tried = np.random.default_rng(0), 0
    for box in relaxation.roots():
        for _ in range(20):
            forward_s, back_s = (end[1] * 10 ** -rng.uniform(0, 5) for end in (box.forward_s, box.back_s))
            tight = replace(box, forward_s=(0.0, forward_s), back_s=(0.0, back_s))
            limits, kinds = relaxation.limits(tight), relaxation.classes
            if not limits.possible(kinds):
                continue
            slope, at_none = serving_lines(relaxation, tight, limits)
            rows = np.minimum(forward_s * kinds.down_bytes_per_s, back_s * kinds.up_bytes_per_s) / relaxation.rows
            for kind, served in enumerate(most_served(relaxation.hit, rows[:, None], users, np.arange(10))):
                held = np.arange(max(limits.least_held[kind], kinds.homes[kind]), limits.most_held[kind] + 1).astype(int)
                above = at_none[kind] + slope[kind] * held[:, None] - served[held][:, None]
                assert above.min(axis=0) == pytest.approx(0, abs=1e-9)
                tried += 1
    assert tried > 20


def test_what_sites_can_serve_raises_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def anything(relaxation: Relaxation, *_: object) -> tuple[np.ndarray, np.ndarray]:
        shape = len(relaxation.classes.count), len(SLOPES)
        return np.zeros(shape), np.full(shape, 1e6)

    # Eight sites that are not quite alike, large experts, and time for 1.4 rows of each token.
    rng, names = np.random.default_rng(0), [f"s{i}" for i in range(8)]
    cluster = build(
        Cluster,
        {
            "name": "eight",
            "levels": [{"name": "dc", "size": 8, "bandwidth": "100 Mbps", "latency": "1 ms"}],
            "gpu": {"throughput": "100 TFLOPS", "memory": "64 GiB", "memory_bandwidth": "1 TB/s"},
            "sites": [{"name": name, "up": "100 Mbps", "down": f"{rng.uniform(100, 102):.2f} Mbps"} for name in names],
        },
        "test",
    )
    model = {
        "num_layers": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "vocab_size": 64,
        "num_experts": 8,
        "top_k": 2,
        "expert_ffn_size": 2048,
    }
    fields = {"name": "test", "model": model, "training": {"sequence_length": 512, "micro_batch_size": 4}}
    relaxation = Relaxation(problem=site_problem(cluster, build(Workload, fields, "test")))
    rows_s = 1.4 * relaxation.rows / 12.5e6
    box = replace(relaxation.roots()[0], forward_s=(0.0, rows_s), back_s=(0.0, rows_s))
    values = []
    for lines in (serving_lines, anything):
        monkeypatch.setattr(lp, "serving_lines", lines)
        program = box_program(relaxation, box)
        assert program is not None
        duals = program.solve()
        assert duals is not None
        values.append(program.values_s([duals])[0])
    assert values[0] > 1.02 * values[1]
