"""What the tokens of one MoE layer are expected to choose, before any of them has chosen.

Each token picks ``top_k`` distinct experts. Where nothing is known all sets of experts are equally likely; where the
popularity of the experts has been measured, the sets follow the distribution of largest entropy that has it: each expert
is drawn by itself, given that ``top_k`` are drawn (conditional Bernoulli; Chen, Dempster and Liu, Biometrika 1994).
Where tokens choose from some groups of experts only, the sets are those of ``hybridep.group_choice``.
With a capacity, an expert's load in a sequence is binomial and what exceeds the capacity is dropped. Tokens late in a sequence
lose most where the last are dropped, so that is counted by position; otherwise the drops of one token at different experts are
taken to be independent, which is an approximation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import comb

import numpy as np
from numpy.typing import NDArray

from hybridep.arrays import BoolArray, FloatArray, IntArray
from hybridep.group_choice import GroupChoice
from hybridep.shares import site_sequences
from hybridep.topology import Cluster
from hybridep.workload import DropPolicy, Workload

_CLOSE = 1e-10
_PARTS = 32
"""Parts of a sequence that are told apart where the probability of a drop depends on the position."""
_ROUNDS = 1000
_RARE = 1e-9
"""Experts never (or always) seen: so unlikely (likely), since what was not measured is not impossible."""


@dataclass(frozen=True, kw_only=True)
class Gating:
    """The choices of each rank's tokens in one micro-batch of one layer."""

    num_experts: int
    top_k: int
    sequence_length: int
    sequences: tuple[int, ...]
    """[DCs]: sequences of one rank of each site in one micro-batch; one number where all sites have as many."""
    popularity: tuple[float, ...] | None = None
    """[E]: each expert's share of all choices; they add up to 1. None: all alike."""
    capacity: int | None = None
    """Tokens of one sequence that an expert takes; None: all."""
    last_dropped: bool = False
    """An expert without room drops the last tokens of the sequence, else those with the smallest probability."""
    padded: bool = False
    """An expert computes its full capacity, whatever came."""
    groups: GroupChoice | None = None
    """None: tokens choose from all experts."""

    @property
    def counts_decide(self) -> bool:
        """Whether how many experts a set has is all that matters to how often it is needed (``hit_by_count``)."""
        return self.popularity is None and self.groups is None

    @cached_property
    def chosen(self) -> FloatArray:
        """[E]: the probability that a token chooses each expert. Of groups, what comes next to a popularity that choices from
        these cannot have (of one that was measured with other groups): as ``hit`` has it, or bounds would not hold."""
        if self.popularity is None:
            return np.full(self.num_experts, self.top_k / self.num_experts)
        if self.groups is not None:
            return np.asarray(np.clip(self.groups.chosen_with(self._odds_in_groups), _RARE, 1 - _RARE))
        return self._wanted(self.popularity)

    def _wanted(self, popularity: tuple[float, ...]) -> FloatArray:
        """[E]: ``chosen`` as it was measured."""
        return np.asarray(np.clip(self.top_k * np.asarray(popularity), _RARE, 1 - _RARE))

    @cached_property
    def kept(self) -> FloatArray:
        """[E]: the probability that a choice is not dropped: E[min(N, capacity)] / E[N], N binomial."""
        if self.capacity is None or self.capacity >= self.sequence_length:
            return np.ones(self.num_experts)
        from scipy.special import bdtrc

        chosen, where = np.unique(self.chosen, return_inverse=True)
        more_than = np.arange(self.capacity, dtype=np.float64)[:, None]
        taken = bdtrc(more_than, np.int64(self.sequence_length), chosen[None, :]).sum(axis=0)
        return np.asarray(np.minimum(taken / (self.sequence_length * chosen), 1.0), dtype=np.float64)[where]

    @cached_property
    def kept_along(self) -> FloatArray:
        """[P, E]: the probability that a choice is not dropped in each of P parts of a sequence, of about equal length; P is 1
        where position does not count."""
        if self.capacity is None or not self.last_dropped or self.capacity >= self.sequence_length:
            return self.kept[None, :]
        from scipy.special import bdtr

        # Room is left while fewer than ``capacity`` of the tokens before chose the expert.
        chosen, where = np.unique(self.chosen, return_inverse=True)
        before = np.arange(self.sequence_length, dtype=np.int64)[:, None]
        is_free = np.where(before < self.capacity, 1.0, bdtr(self.capacity - 1.0, before, chosen[None, :]))
        parts = np.array_split(is_free, min(_PARTS, self.sequence_length))
        return np.stack([part.mean(axis=0) for part in parts])[:, where]

    @cached_property
    def travelling(self) -> FloatArray:
        """[E]: choices of each expert by the tokens of one sequence, those that are dropped left out."""
        return self.sequence_length * self.chosen * self.kept

    @cached_property
    def rows(self) -> FloatArray:
        """[E]: rows that an expert computes for the tokens of one sequence."""
        if self.padded:
            assert self.capacity is not None
            return np.full(self.num_experts, float(self.capacity))
        return self.travelling

    @cached_property
    def hit_by_count(self) -> FloatArray:
        """[E + 1]: the probability that at least one of a token's experts is among n given ones (and takes it), where all
        experts are alike: 1 - C(E - n, K) / C(E, K) without drops (the count of destination groups in DeepEP)."""
        assert self.counts_decide
        experts, top_k = self.num_experts, self.top_k
        dropped = 1 - self.kept_along[:, 0]
        all_dropped = [float((dropped**j).mean()) for j in range(top_k + 1)]
        missed = [
            sum(comb(n, j) * comb(experts - n, top_k - j) * all_dropped[j] for j in range(min(n, top_k) + 1))
            / comb(experts, top_k)
            for n in range(experts + 1)
        ]
        return 1.0 - np.asarray(missed)

    def hit(self, member: BoolArray) -> FloatArray:
        """[N]: the probability that a token has at least one expert that takes it among each of N sets [N, E]."""
        if self.counts_decide:
            return np.asarray(self.hit_by_count[member.sum(axis=1)])
        if not len(member):
            return np.zeros(0)
        if self.groups is not None and self.popularity is None:
            return self.hit_by_groups(member.reshape(len(member), self.groups.groups, -1).sum(axis=2))
        # Ranks of one domain ask for the same sets.
        first, where = _different(np.packbits(member, axis=1))
        different = member[first]
        if self.groups is not None:
            odds, each = self._odds_in_groups, self.kept_along
            none = [self.groups.missed(np.where(different, odds * (1 - kept), odds)) for kept in each]
            return np.asarray(1.0 - np.mean(none, axis=0) / self.groups.missed(odds[None, :])[0])[where]
        missed = np.zeros(len(different))
        for kept in self.kept_along:
            picked = np.where(different, self._drawn * (1 - kept), self._drawn)
            missed += _number_drawn(self._drawn, picked, self.top_k)[:, self.top_k] / len(self.kept_along)
        all_drawn = _number_drawn(self._drawn, self._drawn[None, :], self.top_k)[0, self.top_k]
        return np.asarray(1.0 - missed / all_drawn)[where]

    def hit_by_groups(self, counts: IntArray) -> FloatArray:
        """[N]: the probability that a token needs one of so many experts of each group ([N, groups]), where all are equally
        popular."""
        assert self.groups is not None and self.popularity is None
        none = [self.groups.missed_of_counts(counts, dropped=1 - float(kept[0])) for kept in self.kept_along]
        return np.asarray(1.0 - np.mean(none, axis=0))

    @cached_property
    def _odds_in_groups(self) -> FloatArray:
        """[E]: odds with which each expert is ``chosen`` where tokens choose from some groups only."""
        assert self.groups is not None and self.popularity is not None
        return self.groups.odds_of(self._wanted(self.popularity))

    @cached_property
    def _drawn(self) -> FloatArray:
        """[E]: probabilities of drawing each expert by itself so that, given that K are drawn, each is ``chosen``."""
        wanted = self.chosen * (self.top_k / self.chosen.sum())
        wanted = np.clip(wanted, _RARE, 1 - _RARE)
        odds = wanted / (1 - wanted)
        for _ in range(_ROUNDS):
            drawn = odds / (1 + odds)
            found = _included(drawn, self.top_k)
            if np.abs(found - wanted).max() <= _CLOSE:
                break
            odds = odds * (wanted / (1 - wanted)) / (found / (1 - found))
        return np.asarray(odds / (1 + odds))


def _different(rows: NDArray[np.uint8]) -> tuple[IntArray, IntArray]:
    """(where each different row occurs first; which of these each of the rows [N, bytes] is)."""
    # As numbers, or compared as a whole: numpy's own way compares byte by byte.
    whole = np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))))
    keys = whole.view(np.uint64 if whole.shape[1] == 8 else np.dtype((np.void, whole.shape[1])))
    _, first, where = np.unique(keys.ravel(), return_index=True, return_inverse=True)
    return first, where


def _number_drawn(drawn: FloatArray, picked: FloatArray, most: int) -> FloatArray:
    """[N, most + 1]: probability of n draws, where expert e adds one with weight ``picked`` [N, E] and none with weight
    1 - ``drawn`` [E]."""
    count = np.zeros((len(picked), most + 1))
    count[:, 0] = 1.0
    for expert, probability in enumerate(drawn):
        more = count[:, :-1] * picked[:, expert, None]
        count *= 1 - probability
        count[:, 1:] += more
    return count


def _included(drawn: FloatArray, top_k: int) -> FloatArray:
    """[E]: the probability of each expert given that ``top_k`` are drawn."""
    before = _prefixes(drawn, top_k)
    after = _prefixes(drawn[::-1], top_k)[::-1]
    # K - 1 drawn among those before and after the expert.
    others = np.einsum("ej,ej->e", before[:-1, :top_k], after[1:, :top_k][:, ::-1])
    everybody = before[-1, top_k]
    return np.asarray(np.clip(drawn * others / everybody, _RARE, 1 - _RARE))


def _prefixes(drawn: FloatArray, most: int) -> FloatArray:
    """[E + 1, most + 1]: distribution of the number drawn among the first e experts."""
    count = np.zeros((len(drawn) + 1, most + 1))
    count[0, 0] = 1.0
    for expert, probability in enumerate(drawn):
        count[expert + 1] = count[expert] * (1 - probability)
        count[expert + 1, 1:] += count[expert, :-1] * probability
    return count


def gating(workload: Workload, popularity: Sequence[float] | None = None, cluster: Cluster | None = None) -> Gating:
    """What one layer's tokens choose: all experts alike without ``popularity`` [E], as many at all sites without ``cluster``."""
    sequences = (workload.training.micro_batch_size,) if cluster is None else site_sequences(cluster, workload)
    return _gating(workload, None if popularity is None else tuple(popularity), sequences)


@lru_cache(maxsize=256)
def _gating(workload: Workload, popularity: tuple[float, ...] | None, sequences: tuple[int, ...]) -> Gating:
    model, training = workload.model, workload.training
    return Gating(
        num_experts=model.num_experts,
        top_k=model.top_k,
        sequence_length=training.sequence_length,
        sequences=sequences,
        popularity=popularity,
        capacity=workload.expert_capacity,
        last_dropped=model.token_drop_policy is DropPolicy.POSITION,
        padded=model.pad_expert_input_to_capacity,
        groups=GroupChoice(
            groups=model.expert_groups,
            size=model.num_experts // model.expert_groups,
            per_token=model.groups_per_token,
            top_k=model.top_k,
        )
        if model.limits_groups
        else None,
    )
