"""What can be known of a run before its ranks start. Without torch, which takes seconds to load."""

from __future__ import annotations

from hybridep.errors import UserError
from hybridep.hugging_face import require_same_model
from hybridep.run import Run
from hybridep.topology import Cluster
from hybridep.workload import Workload
from runtime.data import training_batches, validation_batches


def check_run(run: Run, workload: Workload, *, resume: bool = False) -> None:
    """Raises UserError for a model that this runtime cannot train, or weights of another (which a run that is to ``resume`` does
    not read), and DataError for data that do not suit it."""
    check_trainable(workload)
    if run.weights is not None and not resume:
        require_same_model(run.weights, workload.model)
    training_batches(run, workload)
    validation_batches(run, workload)


def check_copies(run: Run, cluster: Cluster) -> None:
    """Raises UserError where fewer sites train than are to keep copies of one's checkpoints."""
    others = len({*cluster.datacenters}) - 1
    if run.checkpoints.copies > others:
        raise UserError(
            f"checkpoints.copies: {run.checkpoints.copies} other sites are to keep what one writes, but {cluster.name} has only "
            f"{others} others; write at most {others}"
        )


def check_trainable(workload: Workload) -> None:
    """Raises UserError for what a model may be but this runtime cannot train."""
    model, where = workload.model, f"workload {workload.name}: model"
    rotated = model.rotary_dim
    if rotated % 2 or not rotated:
        partial = model.partial_rotary_factor < 1
        what = f"partial_rotary_factor: {rotated} rotated elements" if partial else f"head_dim: {rotated}"
        must = "even and more than none" if partial else "even"
        raise UserError(f"{where}.{what} must be {must}, rotary embeddings turn pairs of elements")
