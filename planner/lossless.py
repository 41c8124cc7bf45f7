"""What a plan would take if its messages between sites lost nothing in fewer bytes."""

from __future__ import annotations

from hybridep.codecs import LOSSLESS, is_shortened
from hybridep.pipeline import AnyPlan, PipelinePlan


def lossless_like(plan: AnyPlan) -> AnyPlan | None:
    """The same plan with all that travels between sites lossless (``--max-loss 0``), neither predicted nor reported; None where
    there is no such other plan: with one site, codecs of its own, copies ahead, or a type that is sent as it is."""
    name, several = plan.cluster.levels[0].name, plan.cluster.sizes[0] > 1
    coded = any(one.coded for one in plan.codecs.values())
    if not several or coded or plan.schedule.prefetch or not is_shortened(plan.workload.training.dtype.num_bytes):
        return None
    if isinstance(plan, PipelinePlan):
        return plan.coded({name: LOSSLESS})
    codecs = {name: LOSSLESS.without("activations")}
    return plan.model_copy(update={"codecs": codecs, "prediction": None, "solver": None})
