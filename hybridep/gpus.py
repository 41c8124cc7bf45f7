"""What ranks compute with, and where sites differ in it."""

from __future__ import annotations

from pydantic import Field

from hybridep.codecs import Speeds
from hybridep.config import Bandwidth, Duration, Rent, Size, Strict, Throughput


class Gpu(Strict):
    """What one rank computes with."""

    throughput: Throughput
    """Effective, as matrix products reach it, not the data sheet's peak."""
    memory: Size
    memory_bandwidth: Bandwidth
    """Effective; bounds the optimizer step."""
    block_overhead: Duration = 0.0
    """Fixed cost of one MoE block's forward pass (kernel launches, interpreter); twice that for backward."""
    expert_throughput: Throughput | None = None
    """FLOP/s that the routed experts' products reach, which are many and small; ``throughput`` when absent."""
    expert_overhead: Duration = 0.0
    """Fixed cost of each expert that a rank holds, its own or a copy, in one block's forward pass (launches, reading the
    weights, writing their gradients); twice that for backward."""
    pass_overhead: Duration = 0.0
    """Fixed cost of one micro-batch's forward outside the MoE blocks (embedding, loss); twice that for backward."""
    jitter: Duration = 0.0
    """How late the last rank comes to an exchange after computation, beyond what uneven work explains. Counted where little
    else hides it: for copies, which travel amid computation, and for tokens inside sites."""
    sharing: float = Field(default=1.0, ge=1)
    """How many times as fast a rank computes while all others wait; above 1 where ranks share processors, as in an emulation.
    All other figures are those of a rank while all compute."""
    message_overhead: Duration = 0.0
    """Time that each message of an exchange takes a rank but for the first, whose time is in the level's latency."""
    coding: Speeds | None = None
    """How fast a rank codes and decodes payloads; coding takes no time where absent."""
    price: Rent | None = None
    """What one rank costs in dollars per time; nothing where absent."""

    @property
    def expert_flops_per_s(self) -> float:
        """FLOP/s that the routed experts' products reach."""
        return self.expert_throughput or self.throughput


class SiteGpu(Strict):
    """What differs from the cluster's GPU at one site. What ranks have in common (``jitter``, ``sharing``,
    ``message_overhead``, ``coding``) cannot."""

    throughput: Throughput | None = None
    memory: Size | None = None
    memory_bandwidth: Bandwidth | None = None
    block_overhead: Duration | None = None
    expert_throughput: Throughput | None = None
    expert_overhead: Duration | None = None
    pass_overhead: Duration | None = None
    price: Rent | None = None

    def of(self, gpu: Gpu) -> Gpu:
        """The cluster's with what differs. Raises ValueError where one throughput changes and the other would stay behind."""
        if self.throughput is not None and self.expert_throughput is None and gpu.expert_throughput is not None:
            raise ValueError("throughput differs from the cluster's, whose gpu has an expert_throughput; give that here, too")
        return gpu.model_copy(update={name: value for name, value in self if value is not None})
