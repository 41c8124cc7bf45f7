"""Flows in SimGrid with its pure fluid settings; run by an interpreter that has the `simgrid` module.

Reads one JSON object {capacity: [links], flows: [[links, bytes], ..]} from stdin and writes {end_s: [flows], cpu_s,
version} to stdout. All flows start at zero. SimGrid shares in proportion to 1 / latency, so every flow gets the same one,
LATENCY_S, from a link of its own.
"""

import json
import sys
import time

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, simgrid_version

LATENCY_S = 1e-6
SETTINGS = {
    "network/model": "CM02",
    "network/TCP-gamma": 0,
    "network/crosstraffic": 0,
    "network/bandwidth-factor": 1,
    "network/latency-factor": 1,
    "network/weight-S": 0,
    "maxmin/precision": 1e-9,
}


def main() -> None:
    work = json.load(sys.stdin)
    options = [f"--cfg={key}:{value}" for key, value in SETTINGS.items()]
    engine = Engine(["simgrid", *options, "--log=root.thresh:critical"])
    zone = NetZone.create_full_zone("all")
    links = []
    for number, capacity in enumerate(work["capacity"]):
        link = zone.create_link(f"l{number}", capacity)
        link.set_latency(0.0)
        links.append(link.seal())
    end_s = [0.0] * len(work["flows"])

    def send(number, source, destination):
        Comm.sendto(source, destination, work["flows"][number][1])
        end_s[number] = Engine.clock

    for number, (path, _) in enumerate(work["flows"]):
        source, destination = (zone.create_host(f"{side}{number}", 1e9).seal() for side in "ab")
        own = zone.create_link(f"own{number}", 1e18)
        own.set_latency(LATENCY_S)
        route = [LinkInRoute(link) for link in (own.seal(), *(links[link] for link in path))]
        zone.add_route(source.netpoint, destination.netpoint, None, None, route, False)
        Actor.create(f"s{number}", source, send, number, source, destination)
    zone.seal()
    began_s = time.process_time()
    engine.run()
    json.dump({"end_s": end_s, "cpu_s": time.process_time() - began_s, "version": str(simgrid_version)}, sys.stdout)


main()
