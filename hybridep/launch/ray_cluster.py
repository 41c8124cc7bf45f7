"""What a Ray cluster is asked: who answers, what its nodes have, and whether they reach each other.

python -m hybridep.launch.ray_cluster room PARENT_PID ADDRESS       JSON: what nodes have that answer, by site
python -m hybridep.launch.ray_cluster nodes PARENT_PID ADDRESS      JSON: of each node what ``ray_sites.Node`` has
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridep.errors import UserError
from hybridep.launch.host import die_with_parent

LABEL = "dc"
"""Node label that names a datacenter."""
_CONNECT_TIMEOUT_S = 30.0
_ANSWER_S = 20.0
"""For a node to run a task of nothing, which starts a process there, beside others that compute."""
_EXAMINE_S = 90.0
"""For a node to import torch, or to try to reach all others."""
_REACH_S = 5.0


def connect(address: str) -> None:
    """Join the cluster as a driver; its nodes may still be coming up. Raises UserError."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if time.monotonic() > deadline:
                raise UserError(f"RAY_ADDRESS={address}: cannot be reached ({first_line(error)})") from None
            time.sleep(0.5)


def first_line(error: BaseException) -> str:
    """Of what an error of Ray's says; it goes on with tracebacks and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class Examiner:
    """An actor that says what its node has. It travels as code: this package need not be installed there."""

    def facts(self) -> dict[str, Any]:
        """Versions and what torch sees, and the port at which this listens from now on."""
        import os
        import platform
        import socket
        from importlib import metadata

        self._address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._listening = socket.create_server((self._address, 0), backlog=1024)
        versions: dict[str, str | None] = {"python": platform.python_version()}
        for package in ("hybridep", "torch"):
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        devices: list[tuple[str, int]] = []
        if versions["torch"]:
            if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # as some versions of Ray hide GPUs that were not asked for
                del os.environ["CUDA_VISIBLE_DEVICES"]
            import torch

            for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
                about = torch.cuda.get_device_properties(number)
                devices.append((about.name, about.total_memory))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {**versions, "devices": devices, "memory_bytes": memory, "port": self._listening.getsockname()[1]}

    def unreachable(self, others: list[tuple[str, int]], patience_s: float) -> dict[str, str]:
        """Address -> why no connection from here to the port there is possible; without those to which one is."""
        import socket
        from concurrent.futures import ThreadPoolExecutor

        def why(other: tuple[str, int]) -> str | None:
            try:
                # From the address at which ranks here would listen, as theirs do.
                socket.create_connection(other, timeout=patience_s, source_address=(self._address, 0)).close()
            except OSError as error:
                return error.strerror or str(error)
            return None

        with ThreadPoolExecutor(32) as pool:
            found = zip(others, pool.map(why, others), strict=True)
            return {address: reason for (address, _), reason in found if reason is not None}


def room(address: str) -> dict[str, dict[str, int]]:
    """By site the CPUs and GPUs of nodes that run a task within some seconds, and the GPUs of all that there have been. What Ray
    knows of a node that has just been lost, or hangs, is old; of one that was lost it still says what it had."""
    connect(address)
    asked: Any = ray.remote(_here)
    calls = {}
    # At one address the last one counts, which may be the one that was lost, started again.
    known = {node["NodeManagerAddress"]: node for node in sorted(_labelled(), key=lambda node: bool(node["Alive"]))}
    found = {node["Labels"][LABEL]: dict.fromkeys(("cpus", "gpus", "had_gpus"), 0) for node in known.values()}
    for node in known.values():
        found[node["Labels"][LABEL]]["had_gpus"] += _has(node, "GPU")
        if node["Alive"]:
            calls[asked.options(num_cpus=0, max_retries=0, scheduling_strategy=_there(node)).remote()] = node
    for call, answer in _answers(list(calls), _ANSWER_S):
        if not isinstance(answer, RayError):
            for name in ("CPU", "GPU"):
                found[calls[call]["Labels"][LABEL]][name.lower() + "s"] += _has(calls[call], name)
    return found


def _here() -> None:
    """A task that says no more than that somebody did it."""


def nodes(address: str) -> list[dict[str, Any]]:
    """What each node is called and has, or why it does not say so, and whom it cannot reach."""
    connect(address)
    examiner: Any = ray.remote(Examiner)
    found, actors, calls = list[dict[str, Any]](), dict[int, Any](), dict[Any, int]()
    for number, node in enumerate(_alive()):
        has = {name.lower() + "s": _has(node, name) for name in ("CPU", "GPU")}
        found.append(
            {"dc": node["Labels"].get(LABEL), "address": node["NodeManagerAddress"], **has, "error": "it does not answer"}
        )
        actors[number] = examiner.options(num_cpus=0, scheduling_strategy=_there(node)).remote()
        calls[actors[number].facts.remote()] = number
    ports = dict[int, tuple[str, int]]()
    for call, answer in _answers(list(calls), _EXAMINE_S):
        number = calls[call]
        if isinstance(answer, RayError):
            found[number]["error"] = first_line(answer)
        else:
            ports[number] = found[number]["address"], answer.pop("port")
            found[number] |= answer | {"error": "", "unreachable": {}}
    calls = {}
    for number in ports:
        others = [port for other, port in ports.items() if other != number]
        calls[actors[number].unreachable.remote(others, _REACH_S)] = number
    for call, answer in _answers(list(calls), _EXAMINE_S):
        found[calls[call]] |= {"error": first_line(answer)} if isinstance(answer, RayError) else {"unreachable": answer}
    return found


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _labelled() -> list[dict[str, Any]]:
    """Also those that have been lost."""
    return [node for node in ray.nodes() if LABEL in node["Labels"]]  # type: ignore[no-untyped-call]


def _has(node: dict[str, Any], resource: str) -> int:
    return int(node["Resources"].get(resource, 0))


def _there(node: dict[str, Any]) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)


def _answers(calls: list[Any], patience_s: float) -> Iterator[tuple[Any, Any]]:
    """Of calls that are done in time: with what they return, or Ray's error."""
    for call in ray.wait(calls, num_returns=len(calls), timeout=patience_s)[0] if calls else []:
        try:
            yield call, ray.get(call)
        except RayError as error:
            yield call, error


def main() -> None:
    """Entry point."""
    what, parent, address = sys.argv[1:]
    die_with_parent(int(parent))
    try:
        answer = {"room": room, "nodes": nodes}[what](address)
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps(answer), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
