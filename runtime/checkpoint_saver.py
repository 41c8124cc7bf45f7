"""Saves a run's checkpoints, one after the other: between steps, or beside the next ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybridep.run import Run
from runtime.barrier import Barrier
from runtime.checkpoint import RankState, keep_last, save_checkpoint
from runtime.mesh import Mesh
from runtime.transport import Transport
from runtime.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Future


class CheckpointSaver:
    """On one rank; all do the same in the same order. What it is given must not change, beside steps, while it writes."""

    def __init__(self, run: Run, mesh: Mesh, barrier: Barrier, transport: Transport, settings: Mapping[str, Any]) -> None:
        """``barrier`` and ``transport`` join all ranks of the run, and nothing else uses them meanwhile. ``settings`` are
        ``Run.settings``."""
        self._folder, self._checkpoints, self._mesh, self._settings = run.checkpoint_folder, run.checkpoints, mesh, settings
        self._barrier, self._transport = barrier, transport
        self._worker = Worker("checkpoint") if run.checkpoints.async_save else None
        self._under_way: Future[None] | None = None
        self.complete: int | None = None
        """Steps of the last one that all ranks have saved since the run was last started."""

    @property
    def is_beside_steps(self) -> bool:
        """Whether training goes on while it writes."""
        return self._worker is not None

    def save(self, step: int, state: RankState, attempt: int) -> None:
        """Raises what ``save_checkpoint`` raises; beside steps, the next call does."""
        self.wait()
        if self._worker is None:
            self._save(step, state, attempt)
        else:
            self._under_way = self._worker.submit(lambda: self._save(step, state, attempt))

    def _save(self, step: int, state: RankState, attempt: int) -> None:
        save_checkpoint(
            self._folder,
            step,
            state,
            mesh=self._mesh,
            barrier=self._barrier,
            transport=self._transport,
            copies=self._checkpoints.copies,
            attempt=attempt,
            settings=self._settings,
        )
        if self._checkpoints.keep is not None:
            # All ranks have this one by now.
            keep_last(self._folder, self._checkpoints.keep, step)
            # What is removed may take a slow disk longer than the next exchange waits.
            self._barrier.wait()
        self.complete = step

    @property
    def has_begun(self) -> bool:
        """Whether something was saved beside steps, and may still be; the same on all ranks."""
        return self._under_way is not None

    def check(self) -> None:
        """Raises what went wrong beside the steps since."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    def wait(self) -> None:
        """Until what it was given last is saved; raises what went wrong."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def close(self) -> None:
        """End the thread, once it has nothing to do."""
        if self._worker is not None:
            self._worker.close()
