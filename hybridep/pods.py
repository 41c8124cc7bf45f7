"""Sites of different size: one with several pods becomes that many sites of a pod each, which share what joins it to the others.

A pod is what plans place experts in, as large as every other; its own link is the one to its site's switch. What leaves the site
crosses a trunk in place of the site's up link, what enters it one in place of its down link, and where links are given per pair,
all pods of both sites share a trunk in place of that link. Between pods of one site nothing else is crossed, and bytes cost
nothing. Links per pair of pods carry the latencies; they are as wide as the path over the trunks, so they limit no more than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations, product

from hybridep.sites import Level, PairLink, SharedTrunk, Site

MOST_PODS = 256
"""Pods of all sites together at most: every ordered pair gets a link."""


def expanded(
    levels: Sequence[Level], sites: Sequence[Site], links: Sequence[PairLink], trunks: Sequence[SharedTrunk]
) -> dict[str, object]:
    """The four fields of a cluster whose sites are the pods of these; ``levels`` count sites before and pods after.

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
    payers: tuple[Level | Site | PairLink, ...] = (outer, *sites, *links)
    free = 0.0 if any(one.egress is not None for one in payers) else None
    made = [_link(a.name, b.name, outer.pods.bandwidth, outer.pods.latency, free) for a, b in within]
    given = {(link.src, link.dst): link for link in links}
    for x, y in permutations(sites, 2):
        access, pair = min(x.up or outer.bandwidth, y.down or outer.bandwidth), given.get((x.name, y.name))
        path = (min(access, pair.bandwidth), pair.latency, pair.egress) if pair else (access, outer.latency, None)
        made += [_link(a.name, b.name, *path) for a, b in product(pods[x.name], pods[y.name])]

    def shared(name: str, bandwidth: float, carries: Mapping[str, float]) -> SharedTrunk:
        """What carries these pairs of sites, as a trunk that carries their pods."""
        spread: dict[str, float] = {}
        for way, share in carries.items():
            src, _, dst = way.partition(" -> ")
            spread |= {f"{a.name} -> {b.name}": share for a, b in product(pods[src], pods[dst])}
        return SharedTrunk.model_construct(name=name, bandwidth=bandwidth, carries=spread)

    cables = []
    for site in sites if len(sites) > 1 else ():
        if site.num_pods > 1:
            others = [other.name for other in sites if other is not site]
            out = {f"{site.name} -> {other}": 1.0 for other in others}
            back = {f"{other} -> {site.name}": 1.0 for other in others}
            cables.append(shared(f"{site.name} up", site.up or outer.bandwidth, out))
            cables.append(shared(f"{site.name} down", site.down or outer.bandwidth, back))
    for (src, dst), link in given.items():
        if len(pods[src]) * len(pods[dst]) > 1:
            cables.append(shared(f"{src} -> {dst}", link.bandwidth, {f"{src} -> {dst}": 1.0}))
    cables += [shared(trunk.name, trunk.bandwidth, trunk.carries) for trunk in trunks]
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
