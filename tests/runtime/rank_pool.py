"""Processes that stand for ranks: started once, given many jobs, gone when the tests end."""

from __future__ import annotations

import multiprocessing as mp
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any

from hybridep.errors import HybridEPError

ADDRESS = "127.0.0.1"
START_TIMEOUT_S = 90.0


def forking() -> ForkServerContext:
    """Processes forked from one that has imported everything once: starting eight ranks then costs little more than one. Beside
    the trainer it is what torch imports late, seconds in every rank: with the first layer that computes again."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["runtime.trainer", "torch._dynamo"])
    return context


class RankFailed(Exception):
    """A rank raised; the message holds its traceback."""


class RankPool:
    """``run(job, ...)`` calls ``job(rank, ...)`` on every rank and returns the results in order. The ranks form a gloo
    world unless ``join`` is false."""

    def __init__(self, world_size: int, *, join: bool = True) -> None:
        from runtime.mesh import host_store

        self.world_size = world_size
        context = forking()
        self._store = host_store(ADDRESS, timeout_s=START_TIMEOUT_S)
        port = self._store.port if join else None
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(START_TIMEOUT_S)

    def run(self, job: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """Results by rank. The first error in time ends the pool, since its process group is of no use afterwards."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        return self._collect(timeout_s)

    def run_with_store(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As ``run``; each rank is told the port of a store, too, by which they find each other."""
        from runtime.mesh import host_store

        store = host_store(ADDRESS, timeout_s=30)
        return self.run(job, store.port, *arguments)

    def _collect(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(results) < self.world_size:
                waiting = [rank for rank in range(self.world_size) if rank not in results]
                ready = mp.connection.wait([self._pipes[rank] for rank in waiting], deadline - time.monotonic())
                if not ready:
                    raise RankFailed(f"ranks {waiting} did not answer within {timeout_s} s")
                for rank in waiting:
                    if self._pipes[rank] in ready:
                        failed, results[rank] = self._pipes[rank].recv()
                        if failed:
                            raise RankFailed(f"rank {rank}:\n{results[rank]}")
        except BaseException:
            self.close()
            raise
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _serve(rank: int, world_size: int, port: int | None, pipe: Connection) -> None:
    import torch

    from runtime.mesh import join_store, open_process_group

    torch.set_num_threads(1)
    if port is not None:
        store = join_store(ADDRESS, port, timeout_s=START_TIMEOUT_S)
        open_process_group(store, rank=rank, world_size=world_size, timeout_s=START_TIMEOUT_S)
    pipe.send((False, None))
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((False, job(rank, *arguments)))
        except HybridEPError as error:
            pipe.send((True, f"{type(error).__name__}: {error}"))
        except Exception:
            pipe.send((True, traceback.format_exc()))


class Pools:
    """The pool of the world size last asked for; a new one after a failure."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None

    def run(self, job: Callable[..., Any], case: Any, *arguments: Any) -> list[Any]:
        if self._pool is None or self._pool.world_size != case.num_ranks:
            self.close()
            self._pool = RankPool(case.num_ranks)
        try:
            return self._pool.run(job, case, *arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None
