"""What ``hybridep doctor`` says of a Ray cluster."""

from __future__ import annotations

import platform
import socket
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from hybridep.commands.doctor import Check, Verdict, cluster_checks
from hybridep.errors import UserError
from hybridep.launch import ray_sites
from hybridep.launch.ray_cluster import Examiner
from hybridep.launch.ray_sites import Node

PARIS = Node(
    dc="paris",
    address="10.0.0.1",
    cpus=96,
    gpus=8,
    error="",
    python=platform.python_version(),
    hybridep=metadata.version("hybridep"),
    torch=metadata.version("torch"),
    devices=(("H100", 80 << 30),) * 8,
    memory_bytes=1 << 40,
    unreachable={},
)
TOKYO = replace(PARIS, dc="tokyo", address="10.0.1.1")


def checks_of(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> dict[str, Check]:
    monkeypatch.setattr(ray_sites, "nodes_of", lambda address: list(nodes))
    return {check.name: check for check in cluster_checks("somewhere")}


def test_a_cluster_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # A CUDA build beside a CPU build of the same version is none of anybody's business.
    other = replace(TOKYO, torch=metadata.version("torch").split("+")[0] + "+cu999")
    checks = checks_of(monkeypatch, other, PARIS, replace(PARIS, address="10.0.0.2"))
    assert {check.verdict for check in checks.values()} == {Verdict.GOOD} and not any(check.fix for check in checks.values())
    assert checks["ray cluster"].found.splitlines() == [
        "paris: 10.0.0.1 with 96 CPUs and 8 GPUs, 10.0.0.2 with 96 CPUs and 8 GPUs",
        "tokyo: 10.0.1.1 with 96 CPUs and 8 GPUs",
    ]
    assert checks["connections"].found == "open both ways between all of 3 nodes"


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "said"),
    [
        ({"dc": None}, "ray cluster", Verdict.LIMITED, "without a site: 10.0.1.1"),
        ({"error": "it does not answer"}, "ray cluster", Verdict.BROKEN, "tokyo (10.0.1.1): it does not answer"),
        ({"torch": None}, "node software", Verdict.BROKEN, "tokyo (10.0.1.1): torch is not installed, here "),
        ({"torch": "2.12.9"}, "node software", Verdict.BROKEN, "tokyo (10.0.1.1): torch 2.12.9, here "),
        ({"hybridep": "9.9"}, "node software", Verdict.BROKEN, "tokyo (10.0.1.1): hybridep 9.9, here "),
        ({"python": "3.99.1"}, "node software", Verdict.BROKEN, "tokyo (10.0.1.1): Python 3.99.1, here "),
        ({"devices": ()}, "node software", Verdict.LIMITED, "tokyo (10.0.1.1): Ray counts 8 GPUs, torch "),
        (
            {"unreachable": {"10.0.0.1": "timed out"}},
            "connections",
            Verdict.BROKEN,
            "tokyo (10.0.1.1) -> paris (10.0.0.1): timed out",
        ),
    ],
)
def test_what_is_wrong_with_a_node_is_named(
    changes: dict[str, Any], check: str, verdict: Verdict, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = checks_of(monkeypatch, PARIS, replace(TOKYO, **changes))
    found = checks.pop(check)
    assert found.verdict is verdict and said in found.found and found.fix
    assert {other.verdict for other in checks.values()} == {Verdict.GOOD}


def test_a_cluster_out_of_reach_and_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> list[Node]:
        raise UserError(f"RAY_ADDRESS={address}: cannot be reached (nobody there)")

    monkeypatch.setattr(ray_sites, "nodes_of", refuse)
    [check] = cluster_checks("somewhere")
    assert check.verdict is Verdict.BROKEN and "RAY_ADDRESS=somewhere" in check.found and check.fix
    assert cluster_checks(None) == []


def test_a_port_that_nobody_listens_at_is_unreachable() -> None:
    examiner = Examiner()
    examiner._address = "127.0.0.2"
    with socket.create_server(("127.0.0.3", 0)) as open_one, socket.create_server(("127.0.0.4", 0)) as shut_one:
        others = [one.getsockname() for one in (open_one, shut_one)]
        shut_one.close()
        assert examiner.unreachable(others, 5.0) == {"127.0.0.4": "Connection refused"}
