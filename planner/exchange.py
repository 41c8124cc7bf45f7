"""How long one exchange takes: latency, the overhead of further messages, and the busiest link's bytes over its bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hybridep.topology import Cluster
from hybridep.traffic import FloatArray, OpLevel, is_late, link_bytes


@dataclass(frozen=True, kw_only=True)
class Network:
    """Times of exchanges on one cluster."""

    cluster: Cluster

    @cached_property
    def bandwidths_bytes_per_s(self) -> FloatArray:
        """[number of links], as in ``cluster.link_table``."""
        return np.array([link.bandwidth_bytes_per_s for link in self.cluster.link_table])

    @cached_property
    def site_latencies_s(self) -> FloatArray:
        """[SF_0, SF_0]: latency between workers of the outermost level."""
        size = self.cluster.sizes[0]
        inner = self.cluster.num_gpus // size
        return np.array([[self.cluster.latency_s(a * inner, b * inner) for b in range(size)] for a in range(size)])

    def loads_bytes(self, traffic: Mapping[OpLevel, FloatArray]) -> FloatArray:
        """[number of links]: bytes over each link."""
        return link_bytes(self.cluster, traffic)

    def transfer_s(self, loads_bytes: FloatArray) -> float:
        """Seconds that the busiest link needs for its bytes."""
        return float((loads_bytes / self.bandwidths_bytes_per_s).max())

    def latency_s(self, level: int, sent: FloatArray) -> float:
        """Of one exchange at ``level``: a rank sends its messages one after the other without waiting for answers, so
        latencies overlap and that of the farthest pair that exchanges anything counts, once; zero when nobody does.
        Each further message of the rank that sends most takes its overhead. ``sent`` is [G, SF_l]."""
        if not sent.any():
            return 0.0
        further_s = (int((sent > 0).sum(axis=1).max()) - 1) * self.cluster.gpu.message_overhead
        if level > 0 or not self.cluster.links:
            return self.cluster.levels[level].latency + further_s
        size = self.cluster.sizes[0]
        talks = sent.reshape(size, -1, size).any(axis=1)
        return float(self.site_latencies_s[talks].max()) + further_s

    def exchange_s(self, key: OpLevel, sent: FloatArray) -> float:
        """Seconds of one exchange whose bytes are ``sent`` ([G, SF_l])."""
        late_s = self.cluster.gpu.jitter if is_late(key) and sent.any() else 0.0
        return late_s + self.latency_s(key.level, sent) + self.transfer_s(self.loads_bytes({key: sent}))
