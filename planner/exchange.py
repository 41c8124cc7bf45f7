"""How long one exchange takes: latency, the overhead of further messages, and the busiest link's bytes over its bandwidth, or
what the largest message takes at so many windows per round trip as two ranks have connections, if that is longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hybridep.arrays import FloatArray
from hybridep.topology import Cluster
from hybridep.traffic import OpLevel, is_late, link_bytes


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Times of exchanges on one cluster."""

    cluster: Cluster
    streams: Mapping[str, int] = field(default_factory=dict)
    """Level name -> connections per pair of ranks (``Schedule.streams``)."""

    @cached_property
    def bandwidths_bytes_per_s(self) -> FloatArray:
        """[number of links], as in ``cluster.link_table``."""
        return np.array([link.bandwidth_bytes_per_s for link in self.cluster.link_table])

    @cached_property
    def window_s_per_byte(self) -> tuple[FloatArray, ...]:
        """[levels] of ``window_s_per_byte``."""
        return tuple(window_s_per_byte(self.cluster, level, self.streams) for level in range(len(self.cluster.levels)))

    def loads_bytes(self, traffic: Mapping[OpLevel, FloatArray]) -> FloatArray:
        """[number of links]: bytes over each link."""
        return link_bytes(self.cluster, traffic)

    def transfer_s(self, loads_bytes: FloatArray) -> float:
        """Seconds that the busiest link needs for its bytes."""
        return float((loads_bytes / self.bandwidths_bytes_per_s).max())

    def latency_s(self, key: OpLevel, sent: FloatArray) -> float:
        """Of one exchange: a rank sends its messages one after the other without waiting for answers, so
        latencies overlap and that of the farthest pair that exchanges anything counts, once; zero when nobody does.
        Each further message of the rank that sends most takes its overhead, and jitter is added where it counts. ``sent`` is
        [G, SF_l]."""
        if not sent.any():
            return 0.0
        gpu, level = self.cluster.gpu, key.level
        further_s = (int((sent > 0).sum(axis=1).max()) - 1) * gpu.message_overhead + (gpu.jitter if is_late(key) else 0.0)
        if level > 0 or not self.cluster.links:
            return self.cluster.levels[level].latency + further_s
        size = self.cluster.sizes[0]
        talks = sent.reshape(size, -1, size).any(axis=1)
        return float(self.cluster.site_latency_s[talks].max()) + further_s

    def windows_s(self, level: int, sent: FloatArray) -> float:
        """Seconds that one exchange at ``level`` takes at least, without its latency, because no pair of ranks has more than its
        windows under way; zero where nothing limits. ``sent`` is [G, SF_l]."""
        per_byte = self.window_s_per_byte[level]
        if not per_byte.any():
            return 0.0
        size = self.cluster.sizes[0]
        largest = sent.reshape(size, -1, size).max(axis=1) if per_byte.ndim else sent
        return float((largest * per_byte).max())

    def exchange_s(self, key: OpLevel, sent: FloatArray) -> float:
        """Seconds of one exchange whose bytes are ``sent`` ([G, SF_l])."""
        busy_s = max(self.transfer_s(self.loads_bytes({key: sent})), self.windows_s(key.level, sent))
        return self.latency_s(key, sent) + busy_s


def window_s_per_byte(cluster: Cluster, level: int, streams: Mapping[str, int]) -> FloatArray:
    """What each byte of a message between two ranks takes at least: their round trip over the bytes that they may have under way.
    [DCs, DCs] for the outermost level of a cluster with links per pair, else one number; zero without a window."""
    one = cluster.levels[level]
    way_s = cluster.site_latency_s if level == 0 and cluster.links else np.array(one.latency)
    return np.asarray((way_s + way_s.T) / one.under_way_bytes(streams))
