"""Interfaces, ports and Ray's timeouts."""

from __future__ import annotations

import socket

import pytest

from hybridep.errors import UserError
from hybridep.launch.env import free_port, interface_of, rank_environment, ray_head_environment


def test_the_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert rank_environment("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with pytest.raises(UserError, match=r"192\.0\.2\.1; it has .*127\.0\.0\.1 \(lo\)"):
        interface_of("192.0.2.1")


def test_a_free_port_can_be_bound() -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        assert free_port("127.0.0.1") != port
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        free_port("192.0.2.1")


def test_ray_gives_up_after_the_time_asked_for_but_never_within_a_few_round_trips() -> None:
    assert ray_head_environment(6) == {
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "3",
    }
    assert ray_head_environment(1, round_trip_s=0.3)["RAY_health_check_timeout_ms"] == "900"
    with pytest.raises(UserError, match="detection_s"):
        ray_head_environment(0)
