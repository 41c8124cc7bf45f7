"""No plan is faster than what is proven of a box that holds it, nor narrowed away, be the box a point; mistakes are found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from site_cases import box_of, few_kinds, random_problem, random_table

from hybridep.codecs import Codecs, GradientCodec
from hybridep.config import build
from hybridep.plan import Residency
from hybridep.topology import Cluster
from planner.sites import classes, lp, narrowing, pooled_lp, thresholds, visits
from planner.sites.bound import Corner, Evidence, proven_s
from planner.sites.boxes import POSITIONS, TIMES, Box, covered
from planner.sites.capacity import serving_lines
from planner.sites.cost import cost_of, rank_memory_bytes, site_cost
from planner.sites.exchange import LayerExchanges, held_by_site, layer_exchanges
from planner.sites.lp import box_program
from planner.sites.narrowing import narrowed
from planner.sites.problem import Inside, SiteProblem, site_problem
from planner.sites.relaxation import Limits, Relaxation
from planner.sites.thresholds import least_rows_s
from planner.sites.visits import home_groups

SIDES = (*TIMES, *POSITIONS)
SHAPES = [(2, 8), (3, 4), (4, 6), (5, 9), (6, 5)]
ALONE, MERGED, EQUAL = (*range(5), 10, 20, 25, 30, 45, 85, 90, 103), (7, 8, 46, 50, 58, 69), (11, 12, 21)
"""Seeds of problems in which each site is a class of its own, in which different ones are merged, and in which sites are equal or
their access links, the only ones, are as fast up as down."""
ALL = (*EQUAL, *ALONE, *MERGED)
TRUNK, SLOW_RANKS, NODES, CODED = (3, 10), (0, 103), 103, 21
"""Seeds of problems whose sites share a cable, whose links inside sites are the narrower ones, with a further level there, and
with shorter gradients."""
CLOSE = 1 + 1e-9


class Case(NamedTuple):
    """A plan."""

    problem: SiteProblem
    merged: bool
    table: np.ndarray
    layer: LayerExchanges
    box: Box
    """The smallest that holds it."""
    step_s: float

    @property
    def relaxation(self) -> Relaxation:
        return relaxed(self.problem, self.merged)


def relaxed(problem: SiteProblem, merged: bool) -> Relaxation:
    relaxation = Relaxation(problem=problem)
    if merged:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(classes, "MOST_KINDS", 3)
            patch.setattr(classes, "BANDS", 1)
            patch.setattr(classes, "MOST_SITES", 3)
            assert relaxation.classes.merged
    return relaxation


def cable(problem: SiteProblem) -> dict[str, Any]:
    """A slow one that some pairs of sites share, half of them with half of their bytes."""
    names = [site.name for site in problem.cluster.sites]
    carries = {f"{a} -> {b}": 1.0 if i < j else 0.5 for (i, a), (j, b) in permutations(enumerate(names), 2) if i < 2}
    return {"name": "cable", "bandwidth": "9 Mbps", "carries": carries}


def changed(problem: SiteProblem, **wrong: Any) -> SiteProblem:
    data = problem.cluster.model_dump(mode="json", exclude_none=True) | wrong
    return site_problem(build(Cluster, data, "test"), problem.workload, problem.schedule)


def tables(rng: np.random.Generator, problem: SiteProblem) -> Iterator[np.ndarray]:
    """Anything, at home, mostly at home, all at one site, some at home and the rest at the user's, and everything everywhere."""
    anything, sites = random_table(rng, problem), np.arange(problem.num_sites)[:, None]
    yield anything
    yield problem.home_site + 0 * anything
    yield np.where(rng.random(anything.shape) < 0.2, anything, problem.home_site)
    yield 0 * anything
    yield 0 * anything + problem.num_sites - 1
    yield np.where(rng.random(anything.shape) < 0.3, problem.home_site, sites)
    yield sites + 0 * anything


@cache
def cases_of(seed: int) -> tuple[Case, ...]:
    sites, experts = SHAPES[seed % len(SHAPES)]
    merged = seed in MERGED
    if seed in EQUAL:
        problem = few_kinds(seed, sites, 2 * sites)
    else:
        nodes = (2,) if seed == NODES else ()
        problem = random_problem(seed, max(sites, 4) if merged else sites, experts, windows=seed % 3 == 2, nodes=nodes)
    if seed == CODED:
        codecs = {problem.cluster.levels[0].name: Codecs(gradients=GradientCodec.INT8)}
        problem = site_problem(problem.cluster, problem.workload, problem.schedule, codecs=codecs)
    if seed in TRUNK:
        problem = changed(problem, trunks=[cable(problem)])
    if seed in SLOW_RANKS:
        outer, first, *below = [level.model_dump(mode="json") for level in problem.cluster.levels]
        problem = changed(problem, levels=[outer, first | {"bandwidth": "80 kbps"}, *below])
    assert seed not in (*TRUNK, *SLOW_RANKS) or (problem.pair_bytes_per_s is not None and problem.num_inside > 1)
    # Where links inside sites are slow, all choices there; else what is held by all, which is as good as any.
    every = seed in SLOW_RANKS
    made = [one for one in problem.configurations() if every or one.inside == problem.everywhere(Inside.ALL)]
    return tuple(
        Case(
            problem,
            merged,
            table,
            layer_exchanges(problem, table, one.inside),
            box_of(relaxed(problem, merged), table, one),
            site_cost(problem, table, one).step_s,
        )
        for number, table in enumerate(tables(np.random.default_rng(seed), problem))
        for one in [made[number % len(made)]]
    )


def cases(seeds: Iterable[int]) -> Iterator[Case]:
    for seed in seeds:
        yield from cases_of(seed)


def root_of(relaxation: Relaxation, box: Box) -> Box:
    return next(root for root in relaxation.roots() if root.residency is box.residency)


def opened(root: Box, box: Box) -> Iterator[Box]:
    """Boxes that hold the plan and leave one side, or all of them, open; of copies' reach also
    as much as tells of some copy; and with lower ends near the plan."""
    for side in SIDES:
        yield replace(box, **{side: getattr(root, side)})
    yield root
    if box.copy_reach[0] > 0:
        yield replace(box, copy_reach=(1, root.copy_reach[1]))
    yield replace(box, **{side: (0.9 * getattr(box, side)[0], getattr(root, side)[1]) for side in TIMES})


def proven(relaxation: Relaxation, case: Case, best_s: float) -> float:
    """Of the plan's own box, by the best of all evidence."""
    box = case.box
    narrow = narrowed(relaxation, box, best_s)
    evidence: list[Evidence] = [Corner()]
    if narrow is not None and (program := box_program(relaxation, narrow)) is not None and (duals := program.solve()) is not None:
        evidence.append(duals)
    return max(proven_s(relaxation, box, one, best_s) for one in evidence)


def misjudged(relaxation: Relaxation, case: Case) -> list[str]:
    """What of the plan is beyond what boxes that hold it are said to leave possible."""
    wide = list(opened(root_of(relaxation, case.box), case.box))[len(SIDES) :]
    return [f"{name} in {box}" for box in (case.box, *wide) for name, kept in judged(relaxation, case, box) if not kept]


def judged(relaxation: Relaxation, case: Case, box: Box) -> Iterator[tuple[str, bool]]:
    kinds, problem, found = relaxation.classes, case.problem, relaxation.limits(box)
    label, place, held = kinds.label, kinds.kinds.place, held_by_site(problem, case.table).sum(axis=1)
    served = np.array([np.bincount(row, minlength=problem.num_sites) for row in case.table]) * ~np.eye(len(label), dtype=bool)
    copies, rows = case.layer.copies[0], case.layer.rows[0]
    yield "held at most", bool((held <= found.most_held[place]).all())
    yield "held at least", bool((held >= found.least_held[place]).all())
    yield "kept", bool((found.kept[np.ix_(place, label)] <= copies.pairs.T).all())
    yield "copies", bool((found.copies[np.ix_(place, label)] >= copies.pairs.T).all())
    yield "uploads", bool((copies.out.sum(axis=1) <= found.uploads[place]).all())
    yield "found", bool((served <= found.most_found[np.ix_(place, label)]).all())
    slope, at_none = serving_lines(relaxation, box, found)
    lines = at_none[label] + slope[label] * held[:, None]
    yield "served", bool((served.sum(axis=0)[:, None] <= lines * CLOSE + 1e-9).all())
    yield "possible", found.possible(kinds)
    sent = np.bincount(place, weights=copies.out.sum(axis=1), minlength=len(kinds.kinds.count))
    needed = visits.needed_copies(relaxation, box, found)
    yield "needed by visits", bool((needed <= home_groups(relaxation).member @ sent * CLOSE + 1e-9).all())
    latency_s, latency_back_s = relaxation.copy_latency_s(box)
    yield "latency of gathers", latency_s <= copies.line(problem)[0] * CLOSE
    yield "latency of returns", latency_back_s <= copies.reverse.line(problem)[0] * CLOSE
    forward_s, back_s = least_rows_s(relaxation, box, found)
    yield "rows", forward_s <= rows.line(problem)[1] * CLOSE
    yield "rows back", back_s <= rows.reverse.line(problem)[1] * CLOSE
    yield "corner", relaxation.corner_s(box) <= (case.step_s - relaxation.base_s) / relaxation.num_layers * (1 + 1e-6)


def narrow_ones(relaxation: Relaxation, case: Case) -> Iterator[tuple[Box, Box | None]]:
    """Boxes that hold the plan, each narrowed to what is as fast."""
    for box in opened(root_of(relaxation, case.box), case.box):
        yield box, narrowed(relaxation, box, case.step_s * CLOSE)


@pytest.mark.turns(2)
@pytest.mark.parametrize("variables", [600, 0])
def test_no_plan_is_faster_than_its_own_box(monkeypatch: pytest.MonkeyPatch, variables: int) -> None:
    """Whether the program tells homes apart or not; it is tight where it matters: in the mean little of a step is not proven."""
    monkeypatch.setattr(lp, "MOST_VARIABLES", variables)
    shares = []
    for case in cases(ALL):
        bound_s = proven(case.relaxation, case, 1.5 * case.step_s)
        assert bound_s <= case.step_s * CLOSE
        # Of plans that are no faster nothing is said.
        assert proven(case.relaxation, case, 0.97 * bound_s) <= 0.97 * bound_s
        if not case.merged:
            shares.append(bound_s / case.step_s)
    assert np.mean(shares) > 0.8


@pytest.mark.turns(2)
def test_no_plan_in_parts_is_faster_than_its_own_box() -> None:
    """Where experts may hide behind tokens' exchanges, or these behind experts; mistakes are found out."""
    lies = {"experts never hide": 0, "experts compute for longer": 0}
    for case in cases(ALL):
        schedules = [case.problem.schedule.model_copy(update={"chunks": number}) for number in (1, 2, 5, 64)]
        problems = [replace(case.problem, schedule=schedule) for schedule in schedules]
        shortest_s = min(cost_of(one, case.layer, case.box.residency).step_s for one in problems)
        relaxation = relaxed(replace(case.problem, most_chunks=64), case.merged)
        assert proven(relaxation, case, 1.5 * shortest_s) <= shortest_s * CLOSE
        # What holds for tokens in one piece does not, nor does more computation.
        lies["experts never hide"] += proven(case.relaxation, case, 1.5 * shortest_s) > shortest_s * CLOSE
        own("computing_s", lambda seconds: 1.2 * seconds)(relaxation, pytest.MonkeyPatch())
        lies["experts compute for longer"] += proven(relaxation, case, 1.5 * shortest_s) > shortest_s * CLOSE
    assert min(lies.values()) > 3, lies


def test_limits_and_narrowing_leave_every_plan_in() -> None:
    shorter = dict.fromkeys(SIDES, 0)
    for case in cases(ALL):
        relaxation = case.relaxation
        root = root_of(relaxation, case.box)
        assert case.box.inside(root)
        assert not misjudged(relaxation, case)
        for side, (_, narrow) in zip(SIDES, narrow_ones(relaxation, case), strict=False):
            assert narrow is not None and case.box.inside(narrow)
            shorter[side] += getattr(narrow, side)[1] < getattr(root, side)[1]
    assert min(shorter.values()) > 3


Change = Callable[[Relaxation, pytest.MonkeyPatch], None]


def own(name: str, wrong: Callable[[Any], Any]) -> Change:
    """Another method or value of the relaxation."""

    def change(relaxation: Relaxation, monkeypatch: pytest.MonkeyPatch) -> None:
        old = getattr(relaxation, name)
        relaxation.__dict__[name] = (lambda *args: wrong(old(*args))) if callable(old) else wrong(old)

    return change


def patched(module: Any, name: str, wrong: Callable[[Any], Any]) -> Change:
    """Another function."""

    def change(relaxation: Relaxation, monkeypatch: pytest.MonkeyPatch) -> None:
        old = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: wrong(old(*args)))

    return change


def of_classes(wrong: Callable[[np.ndarray], np.ndarray], *, rates: bool = False) -> Change:
    """Another number than the mean, of rates or of what is not; only where different sites are merged."""

    def change(relaxation: Relaxation, monkeypatch: pytest.MonkeyPatch) -> None:
        right = classes.SiteClasses.mean

        def mean(self: classes.SiteClasses, values: np.ndarray, axis: int = -1) -> np.ndarray:
            is_rate = values is self.kinds.up_bytes_per_s or values is self.kinds.down_bytes_per_s
            if not self.mixed or is_rate is not rates:
                return right(self, values, axis)
            first = np.moveaxis(values, axis, 0)
            found = np.stack([wrong(first[self.kinds.label == one]) for one in range(len(self.count))])
            return np.moveaxis(found, 0, axis)

        monkeypatch.setattr(classes.SiteClasses, "mean", mean)

    return change


def limits(**wrong: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(found: Limits) -> Limits:
        return replace(found, **{name: one(getattr(found, name)) for name, one in wrong.items()})

    return own("limits", change)


def shortened(side: str) -> Change:
    """A twentieth less of what is left of one side, or a position less."""

    def change(box: Box) -> Box:
        low, high = getattr(box, side)
        return replace(box, **{side: (low, max(high - 1, low) if side in POSITIONS else low + 0.95 * (high - low))})

    return patched(narrowing, "_ends_within", change)


MUTATIONS: dict[str, Change] = {
    "copies are farther than they are": own("copy_latency_s", lambda both: (1.5 * both[0], 1.5 * both[1])),
    "gradients return from farther": own("copy_latency_s", lambda both: (both[0], 1.5 * both[1])),
    "tokens are farther than they are": own("token_latency_of", lambda seconds: 1.5 * seconds),
    "latency counted five times": own("token_latency_s", lambda latency: 5 * latency),
    "rows counted twice": own("rows", lambda rows: 2 * rows),
    "rows are more than the chord says": own("unit_rows", lambda rows: 1.3 * rows),
    "fewer experts are found at one site": own("_most_found", lambda found: 0.7 * found),
    "fewer experts are found elsewhere": own("_found_in_all", lambda found: 0.7 * found),
    "homes send a copy less": limits(uploads=lambda one: np.maximum(one - 1, 0)),
    "a copy less fits through links": limits(copies=lambda one: np.maximum(one - 1, 0)),
    "sites hold an expert less": limits(most_held=lambda one: one - 1),
    "sites must hold an expert more": limits(least_held=lambda one: one + 1),
    "visits need more rows": patched(pooled_lp, "_chords", lambda chords: chords * np.array([1.3, 1.3, 1.0])[:, None, None]),
    "visits find an expert less": patched(pooled_lp, "_chords", lambda chords: chords - np.array([0, 0, 1])[:, None, None]),
    "less is found beside large visits": patched(pooled_lp, "_beside", lambda found: found - 1),
    "a large visit less is made or received": patched(
        pooled_lp, "large_visits", lambda both: tuple(np.maximum(one - 1, 0) for one in both)
    ),
    "more sites must make large visits": patched(pooled_lp, "in_small_visits", lambda found: np.maximum(found - 2, 0)),
    "what goes back takes as long everywhere": own("tied", lambda tied: True),
    "links inside sites take longer": own("inside_s", lambda seconds: 1.1 * seconds),
    "sites serve an expert less": patched(lp, "serving_lines", lambda lines: (lines[0], lines[1] - 1)),
    "who holds more serves less": patched(lp, "serving_lines", lambda lines: (0.5 * lines[0], lines[1])),
    "merged sites serve an expert less": patched(pooled_lp, "serving_lines", lambda lines: (lines[0], lines[1] - 1)),
    "rows keep links busy for longer": patched(narrowing, "least_rows_s", lambda both: (1.3 * both[0], 1.3 * both[1])),
    "copies keep links busy for longer": patched(narrowing, "least_copies_s", lambda both: (1.3 * both[0], 1.3 * both[1])),
    "visits need more copies": patched(visits, "needed_copies", lambda needed: 1.3 * needed),
    "less is found in small visits": patched(visits, "in_small_visits", lambda found: np.maximum(found - 1, 0)),
    "holders receive a large visit less": patched(visits, "large_visits", lambda both: (both[0], np.maximum(both[1] - 1, 0))),
    "sending takes longer": patched(thresholds, "_sending_s", lambda seconds: 1.3 * seconds),
    "serving takes longer": patched(thresholds, "_serving_s", lambda seconds: 1.3 * seconds),
    "all of a class hold less than the one that may hold least": of_classes(lambda values: 0.9 * values.min(axis=0)),
    "all of a class are as fast as the slowest": of_classes(lambda values: values.min(axis=0), rates=True),
} | {f"{side} ends too early": shortened(side) for side in SIDES}


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_box_is_caught_by_its_own_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lp, "MOST_VARIABLES", 0)

    def caught(case: Case) -> bool:
        relaxation = case.relaxation
        with monkeypatch.context() as inside:
            MUTATIONS[name](relaxation, inside)
            if any(narrow is None or not case.box.inside(narrow) for _, narrow in narrow_ones(relaxation, case)):
                return True
            if misjudged(relaxation, case):
                return True
            return proven(relaxation, case, 1.5 * case.step_s) > case.step_s * (1 + 1e-6)

    assert any(caught(case) for case in cases(ALL))


def test_boxes_that_leave_something_out_do_not_cover() -> None:
    relaxation = Relaxation(problem=random_problem(4, 5, 7))
    rng = np.random.default_rng(0)
    root = relaxation.roots()[0]
    pieces = [root]
    for _ in range(40):
        piece = pieces.pop(int(rng.integers(len(pieces))))
        side = str(rng.choice(SIDES))
        low, high = getattr(piece, side)
        pieces += piece.cut(side, (low + high) // 2 if side in POSITIONS else (low + high) / 2) if low < high else [piece]
    assert len(pieces) > 30
    assert covered(root, pieces)
    for left_out in range(len(pieces)):
        assert not covered(root, pieces[:left_out] + pieces[left_out + 1 :])


def test_experts_of_a_home_that_a_site_cannot_find_must_be_held_there() -> None:
    """a has its tokens computed at b, but c's experts are copied to neither: counted together all could be found."""
    latency_ms = {"ab": 10, "bc": 20, "ac": 50}
    data = {
        "name": "line",
        "levels": [{"name": "dc", "size": 3, "bandwidth": "1 Gbps", "latency": "0 s"}],
        "gpu": {"throughput": "1 TFLOPS", "memory": "64 GiB", "memory_bandwidth": "1 TB/s"},
        "sites": [{"name": name} for name in "abc"],
        "links": [
            {"src": a, "dst": b, "bandwidth": "1 Gbps", "latency": f"{latency_ms[''.join(sorted(a + b))]} ms"}
            for a, b in permutations("abc", 2)
        ],
    }
    relaxation = Relaxation(problem=site_problem(build(Cluster, data, "test"), random_problem(0, 3, 6).workload))
    (root,) = (one for one in relaxation.roots() if one.residency is Residency.STEP)
    near, far = (int(np.searchsorted(relaxation.copy_reaches_s, reach_s + 1e-6)) - 1 for reach_s in (0.01, 0.02))
    tokens = int(np.searchsorted(relaxation.reaches_s, 5 * 0.02 + 1e-6)) - 1
    here = replace(root, copy_reach=(0, near), reach=(0, tokens))
    limits = relaxation.limits(here)
    assert limits.kept.tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert not limits.possible(relaxation.classes)
    assert relaxation.limits(replace(here, copy_reach=(0, far))).possible(relaxation.classes)


def test_sites_whose_memory_is_just_enough_keep_no_more_copies_than_is_said() -> None:
    """And some keep most of what is said, so a much smaller number would be found out."""
    shares = []
    for seed in range(12):
        problem, rng = random_problem(seed, 3, 6), np.random.default_rng(seed)
        sites = problem.cluster.model_dump(mode="json", exclude_none=True)["sites"]
        for table, one in product(tables(rng, problem), problem.configurations()):
            needed = rank_memory_bytes(problem, layer_exchanges(problem, table, one.inside), one.residency).max(axis=1)
            gpus = [site.get("gpu", {}) | {"memory": f"{number:.3f} B"} for site, number in zip(sites, needed, strict=True)]
            tight = changed(problem, sites=[site | {"gpu": gpu} for site, gpu in zip(sites, gpus, strict=True)])
            relaxation = Relaxation(problem=tight)
            room = relaxation.copies_in_memory(one.residency)[relaxation.classes.label]
            kept = held_by_site(problem, table).sum(axis=1) - problem.homes
            assert (kept <= room).all()
            shares += (kept / np.maximum(room, 1)).tolist()
    assert max(shares) > 0.75
