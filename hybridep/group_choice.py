"""What tokens choose that may choose from some groups of experts only (``Model.expert_groups``).

Put the experts in the order of a token's scores, best first: the groups that appear first are the token's, and the first experts
of these are chosen. Where all orders are equally likely, so are all sets with the same numbers of experts in the groups, and how
likely the numbers are is found by drawing one expert after the other. That is exact where a group counts by its best expert
(DeepSeek-V2, arXiv:2405.04434); where it counts by its best two (DeepSeek-V3) tokens go to half a percent fewer groups. Where
popularity was measured, sets have the distribution nearest to this one that has it: each set counts in proportion to the product
of its experts' odds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import comb, factorial, prod

import numpy as np

from hybridep.arrays import FloatArray, IntArray

_CLOSE, _ROUNDS, _MOST_LOG = 1e-10, 2000, 30.0
_EXACT = 1 << 62
_AT_ONCE = 1 << 22
"""Numbers of sets and of states, multiplied, that are in memory together."""
Pattern = tuple[int, ...]
"""How many experts are chosen in each group that has any, most first."""


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """``top_k`` experts of ``per_token`` of so many ``groups`` of ``size`` neighbouring experts each."""

    groups: int
    size: int
    per_token: int
    top_k: int

    @cached_property
    def patterns(self) -> dict[Pattern, float]:
        """The probability of each pattern, whichever groups they are."""
        found: dict[Pattern, float] = {(): 1.0}
        for _ in range(self.top_k):
            after: dict[Pattern, float] = defaultdict(float)
            for pattern, probability in found.items():
                fresh = (self.groups - len(pattern)) * self.size if len(pattern) < self.per_token else 0
                left = len(pattern) * self.size - sum(pattern)
                for place, number in enumerate(pattern):
                    if number < self.size:
                        after[_with(pattern, place)] += probability * (self.size - number) / (left + fresh)
                if fresh:
                    after[(*pattern, 1)] += probability * fresh / (left + fresh)
            found = dict(after)
        return found

    @property
    def num_states(self) -> int:
        """What ``missed_of_counts`` takes for each set grows with this."""
        return len(self._states[0])

    def missed(self, odds: FloatArray) -> FloatArray:
        """[N]: the sum over all sets of their probability and the product of their experts' ``odds`` [N, E]: with ones for some
        experts and zeros for the others, how likely no other one is chosen."""
        return self._added(self._sums(odds.reshape(len(odds), self.groups, self.size)))

    def odds_of(self, chosen: FloatArray) -> FloatArray:
        """[E]: odds with which each expert is chosen with the probability ``chosen`` [E]: those of the sets of least relative
        entropy, found by the convex dual. Where no sets are chosen so, some that come next."""
        from scipy.optimize import minimize

        def dual(logs: FloatArray) -> tuple[float, FloatArray]:
            total, missed = self._missed_each(np.exp(logs))
            return float(np.log(total) - logs @ chosen), 1 - missed / total - chosen

        found = minimize(
            dual,
            np.zeros(len(chosen)),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-_MOST_LOG, _MOST_LOG)] * len(chosen),
            options={"maxiter": _ROUNDS, "maxfun": _ROUNDS, "ftol": 0.0, "gtol": _CLOSE, "maxcor": 30},
        )
        return np.asarray(np.exp(found.x))

    def chosen_with(self, odds: FloatArray) -> FloatArray:
        """[E]: with which probability each expert is chosen with the ``odds`` [E]."""
        total, missed = self._missed_each(odds)
        return np.asarray(1 - missed / total)

    def _missed_each(self, odds: FloatArray) -> tuple[float, FloatArray]:
        """``missed`` of ``odds`` [E] as they are, and of those without each of the experts [E]."""
        split, some = odds.reshape(1, self.groups, self.size), self.top_k + 1
        sums = self._sums(split)[0]
        # All else is the same: what each number of choices in each group counts for.
        each = np.tile(sums, (self.groups * some, 1, 1))
        each.reshape(self.groups, some, self.groups, some)[np.arange(self.groups), :, np.arange(self.groups)] = np.eye(some)
        counts = self._added(each).reshape(self.groups, some)
        without = self._sums((split[0, :, None] * (1 - np.eye(self.size))).reshape(-1, 1, self.size))
        missed = np.einsum("gen,gn->ge", without.reshape(self.groups, self.size, some), counts)
        return float(counts[0] @ sums[0]), missed.ravel()

    def _sums(self, odds: FloatArray) -> FloatArray:
        """[N, groups, K + 1]: of ``odds`` [N, groups, size] the mean product of so many of each group."""
        sums = np.zeros((*odds.shape[:2], self.top_k + 1))
        sums[..., 0] = 1.0
        for expert in range(self.size):
            sums[..., 1:] += sums[..., :-1] * odds[..., expert, None]
        return np.asarray(sums / np.array([max(comb(self.size, number), 1) for number in range(self.top_k + 1)]))

    def missed_of_counts(self, counts: IntArray, *, dropped: float = 0.0) -> FloatArray:
        """[N]: how likely none of so many experts of each group ([N, groups]) is chosen and takes the token, which each turns
        away with the probability ``dropped``; or of each of the token's own groups alone ([N, per_token])."""
        ordered = np.sort(counts, axis=1)
        radix = self.size + 1
        if radix ** counts.shape[1] < _EXACT:  # as numbers, which are told apart faster than rows
            _, first, where = np.unique(ordered @ radix ** np.arange(counts.shape[1]), return_index=True, return_inverse=True)
        else:
            _, first, where = np.unique(ordered, axis=0, return_index=True, return_inverse=True)
        none, parts = _none_taken(self, dropped), -(-len(first) * self.num_states // _AT_ONCE)
        found = [self._added(none[some]) for some in np.array_split(ordered[first], max(parts, 1))]
        return np.asarray(np.concatenate(found)[where.reshape(-1)])

    def _added(self, each: FloatArray) -> FloatArray:
        """[N]: ``each`` [N, groups, K + 1] is what a number of choices in a group counts for; the mean of the groups' product."""
        states, steps = self._states
        total = np.zeros((len(each), len(states)))
        total[:, states[()]] = 1.0
        for group in range(each.shape[1]):
            before, total = total, total * each[:, group, 0, None]
            for number, (start, end) in steps.items():
                total[:, end] += before[:, start] * each[:, group, number, None]
        weights = np.zeros(len(states))
        for pattern, probability in self.patterns.items():
            weights[states[pattern]] = probability / _ways(pattern, each.shape[1])
        return np.asarray(total @ weights)

    @cached_property
    def _states(self) -> tuple[dict[Pattern, int], dict[int, tuple[IntArray, IntArray]]]:
        """Places of all parts of patterns; for each number, from which states its group leads to which."""
        states: dict[Pattern, int] = {(): 0}
        for pattern in self.patterns:
            parts: set[Pattern] = {()}
            for number in pattern:
                parts |= {tuple(sorted((*part, number), reverse=True)) for part in parts}
            for part in parts:
                states.setdefault(part, len(states))
        steps = {}
        for number in range(1, self.top_k + 1):
            ways = {part: tuple(sorted((*part, number), reverse=True)) for part in states}
            there = [(states[part], states[whole]) for part, whole in ways.items() if whole in states]
            steps[number] = (
                np.array([start for start, _ in there], dtype=np.int64),
                np.array([end for _, end in there], dtype=np.int64),
            )
        return states, steps


@lru_cache(maxsize=64)
def _none_taken(choice: GroupChoice, dropped: float) -> FloatArray:
    """[size + 1, K + 1]: how likely none of so many experts of a group takes the token, by how many are chosen there."""
    size, none = choice.size, np.zeros((choice.size + 1, choice.top_k + 1))
    for count in range(size + 1):
        for number in range(min(choice.top_k, size) + 1):
            ways = [comb(count, one) * comb(size - count, number - one) * dropped**one for one in range(number + 1)]
            none[count, number] = sum(ways) / comb(size, number)
    return none


def _with(pattern: Pattern, place: int) -> Pattern:
    """One more at a place."""
    more = list(pattern)
    more[place] += 1
    return tuple(sorted(more, reverse=True))


def _ways(pattern: Pattern, groups: int) -> int:
    """In how many ways so many groups can have the numbers of a pattern."""
    alike = prod(factorial(pattern.count(number)) for number in set(pattern))
    return factorial(groups) // (alike * factorial(groups - len(pattern)))
