"""Small changes of a pipeline's sites and layers, and which of them are tried first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

from hybridep.pipeline import PipelinePlan
from planner.sites.grouping import Groups
from planner.stages.kinds import Kinds


def turn(path: Groups, own: Groups, busy: set[int]) -> int:
    """When a change is tried: first stages of the same sites, quick to sketch, then what changes ``busy`` ones."""
    kept = set(map(id, own))  # what does not change is the same tuple: among many sites to compare them takes long
    new = {site for group in path if id(group) not in kept and group not in own for site in group}
    return 0 if not new else 1 if new & busy else 2


def changed(groups: Groups, layers: Sequence[int], kinds: Kinds) -> Iterator[tuple[Groups, list[int] | None]]:
    """(Sites of stages, their layers; None for those that suit the sites) after each change: a layer goes to another stage, or
    two change sites; of sites of one kind only one does."""
    for giver, taker in permutations(range(len(layers)), 2):
        if layers[giver] > 1:
            yield groups, [number - (stage == giver) + (stage == taker) for stage, number in enumerate(layers)]
    for path in dict.fromkeys(map(kinds.settled, _other_sites(groups, kinds))):
        yield path, None


def _other_sites(groups: Groups, kinds: Kinds) -> Iterator[Groups]:
    """Two sites of different stages change places, or one goes to another stage; stages in a row are turned round."""
    sites = [(stage, site) for stage, group in enumerate(groups) for site in kinds.one_of_each(group)]

    def with_sites(of: dict[int, tuple[int, ...]]) -> Groups:
        return tuple(tuple(sorted(of[stage])) if stage in of else group for stage, group in enumerate(groups))

    for (stage, site), (other, another) in combinations(sites, 2):
        if stage != other and kinds.of_site[site] != kinds.of_site[another]:
            yield with_sites(
                {
                    stage: (*(one for one in groups[stage] if one != site), another),
                    other: (*(one for one in groups[other] if one != another), site),
                }
            )
    for stage, site in sites:
        for other in range(len(groups)):
            if other != stage and len(groups[stage]) > 1:
                yield with_sites({stage: tuple(one for one in groups[stage] if one != site), other: (*groups[other], site)})
    for first, last in combinations(range(len(groups)), 2):
        yield (*groups[:first], *groups[first : last + 1][::-1], *groups[last + 1 :])


def layers_of(plan: PipelinePlan) -> list[int]:
    """[stages]: layers of each."""
    return [stage.num_layers for stage in plan.stages]
