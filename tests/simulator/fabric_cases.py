"""Fabrics of every shape, for clusters of six sites `dc0` .. `dc5` with nodes of four GPUs."""

from typing import Any

from hybridep.config import build
from simulator.fabric_file import FabricFile


def fabric(**parts: Any) -> FabricFile:
    return build(FabricFile, {"name": "test", **parts}, "test")


def ring_of_trunks(sites: int, bandwidth: str) -> list[dict[str, Any]]:
    return [
        {"ends": [f"dc{site}", f"dc{(site + 1) % sites}"], "bandwidth": bandwidth, "latency": "3 ms"} for site in range(sites)
    ]


FABRICS = {
    "mesh": fabric(wan={"mesh": {"bandwidth": "0.2 Gbps"}}),
    "hub": fabric(wan={"hub": {"bandwidth": "0.4 Gbps", "latency": "1 ms"}}),
    "hub at a site": fabric(wan={"hub": {"bandwidth": "0.4 Gbps", "at": "dc2"}}),
    "ring": fabric(wan={"ring": {"bandwidth": "0.3 Gbps"}}),
    "ring, both ways": fabric(wan={"ring": {"bandwidth": "0.3 Gbps", "routing": "ecmp"}}),
    "trunks": fabric(
        wan={
            "graph": {
                "routing": "ecmp",
                "trunks": [
                    *ring_of_trunks(6, "0.5 Gbps"),
                    {"ends": ["dc0", "west"], "bandwidth": "0.1 Gbps", "latency": "2 ms"},
                    {"ends": ["west", "dc3"], "bandwidth": "0.7 Gbps", "latency": "9 ms", "metric": 2},
                ],
            }
        }
    ),
    "fat-tree": fabric(inside={"fat_tree": {"workers_per_leaf": 1, "oversubscription": 3}}),
    "rail": fabric(inside={"rail": {}}),
    "nvlink": fabric(inside={"nvlink": {"domain": 4, "bandwidth": "900 Gbps"}}),
    "all of it": fabric(
        wan={"ring": {"bandwidth": "0.3 Gbps"}},
        inside={
            "fat_tree": {"workers_per_leaf": 2, "oversubscription": 4},
            "nvlink": {"domain": 2, "bandwidth": "900 Gbps"},
        },
    ),
}
