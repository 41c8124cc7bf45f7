"""Sites of different size: one with several pods becomes that many sites of a pod each, which share what joins it to the others.

A pod is what plans place experts in, as large as every other; its own link is the one to its site's switch. What leaves the site
crosses a trunk in place of the site's up link, what enters it one in place of its down link, and where links are given per pair,
all pods of both sites share a trunk in place of that link. Between pods of one site nothing else is crossed, and bytes cost
nothing. Links per pair of pods carry the latencies; they are as wide as the path over the trunks, so they limit no more than it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations, product

from hybridep.sites import Level, PairLink, SharedTrunk, Site

MOST_PODS = 256
"""In all: every ordered pair gets a link."""

Pair = tuple[str, str]


def expanded(
    levels: Sequence[Level], sites: Sequence[Site], links: Sequence[PairLink], trunks: Sequence[SharedTrunk]
) -> dict[str, object]:
    """The same fields of a cluster whose sites are the pods of these; ``levels`` count sites before and pods after.

    Raises ValueError where nothing says what joins the pods of a site, and for more than ``MOST_PODS``.
    """
    outer = levels[0]
    if outer.pods is None:
        first = next(site for site in sites if site.num_pods > 1)
        raise ValueError(
            f"levels.0.pods: is missing, and site {first.name} has {first.num_pods} pods; say what joins those of a site, "
            "for example pods: {bandwidth: 800 Gbps, latency: 20 us}"
        )
    if (total := sum(site.num_pods for site in sites)) > MOST_PODS:
        raise ValueError(f"sites: {total} pods in all; where a site has several, up to {MOST_PODS}")
    pods = {site.name: _pods(site, outer.pods.bandwidth) for site in sites}
    within = [pair for site in sites for pair in permutations(pods[site.name], 2)]
    # Nothing is paid inside a site; said only where something is paid elsewhere.
    free = 0.0 if any(one.egress is not None for one in (outer, *sites, *links)) else None
    made = [_link(a.name, b.name, outer.pods.bandwidth, outer.pods.latency, free) for a, b in within]
    given = {(link.src, link.dst): link for link in links}
    for x, y in permutations(sites, 2):
        access, pair = min(x.up or outer.bandwidth, y.down or outer.bandwidth), given.get((x.name, y.name))
        path = (min(access, pair.bandwidth), pair.latency, pair.egress) if pair else (access, outer.latency, None)
        made += [_link(a.name, b.name, *path) for a, b in product(pods[x.name], pods[y.name])]

    def shared(name: str, bandwidth: float, pairs: Mapping[Pair, float] | Iterable[Pair]) -> SharedTrunk:
        """A trunk that carries pairs of sites, as one that carries their pods."""
        shares = pairs.items() if isinstance(pairs, Mapping) else ((pair, 1.0) for pair in pairs)
        carries = {
            f"{a.name} -> {b.name}": share for (x, y), share in shares for a in pods[x] for b in pods[y]
        }
        return SharedTrunk.model_construct(name=name, bandwidth=bandwidth, carries=carries)

    cables = []
    for site in sites if len(sites) > 1 else ():
        if site.num_pods > 1:
            others = [other.name for other in sites if other is not site]
            cables.append(shared(f"{site.name} up", site.up or outer.bandwidth, product([site.name], others)))
            cables.append(shared(f"{site.name} down", site.down or outer.bandwidth, product(others, [site.name])))
    for (x, y), link in given.items():
        if len(pods[x]) * len(pods[y]) > 1:
            cables.append(shared(f"{x} -> {y}", link.bandwidth, [(x, y)]))
    for trunk in trunks:
        carried = {(way.partition(" -> ")[0], way.partition(" -> ")[2]): share for way, share in trunk.carries.items()}
        cables.append(shared(trunk.name, trunk.bandwidth, carried))
    return {
        "levels": (outer.model_copy(update={"size": total, "pods": None}), *levels[1:]),
        "sites": tuple(pod for site in sites for pod in pods[site.name]),
        "links": tuple(made),
        "trunks": tuple(cables),
    }


def _pods(site: Site, bandwidth: float) -> list[Site]:
    if site.num_pods == 1:
        return [site]
    own = {"up": bandwidth, "down": bandwidth, "pods": None, "part_of": site.name}
    return [site.model_copy(update={**own, "name": f"{site.name}-pod{number}"}) for number in range(site.num_pods)]


def _link(src: str, dst: str, bandwidth: float, latency: float, egress: float | None) -> PairLink:
    return PairLink.model_construct(src=src, dst=dst, bandwidth=bandwidth, latency=latency, egress=egress)
