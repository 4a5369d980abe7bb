"""An index of the n-grams of a growing token list: where did its last tokens occur before?"""

from __future__ import annotations

from array import array

_SHIFT = 32


class NgramIndex:
    """Newest earlier occurrence of every n-gram of ``tokens``, as hash chains (the match finder of LZ77 compressors).

    For each length n: the newest end position of each n-gram, and for each position the previous end of the same n-gram. Growing
    and shrinking by k tokens cost O(k * lengths).

    Args:
        tokens: the list to index; it is kept by reference, and may grow and shrink between calls of :meth:`grow` and
            :meth:`shrink`.
        low, high: lengths of n-grams, 1 <= low <= high.
    """

    def __init__(self, tokens: list[int], low: int, high: int) -> None:
        self.tokens, self.lengths = tokens, range(low, high + 1)
        self._newest: dict[int, dict[int, int]] = {n: {} for n in self.lengths}
        self._previous: dict[int, array[int]] = {n: array("q") for n in self.lengths}
        self._indexed = 0
        self.grow()

    def _key(self, end: int, n: int) -> int:
        key = 0
        for token in self.tokens[end - n + 1 : end + 1]:
            key = (key << _SHIFT) | token
        return key

    def grow(self) -> None:
        """Index what was appended since the last call."""
        for n in self.lengths:
            newest, previous = self._newest[n], self._previous[n]
            for end in range(self._indexed, len(self.tokens)):
                if end + 1 < n:
                    previous.append(-1)
                    continue
                key = self._key(end, n)
                previous.append(newest.get(key, -1))
                newest[key] = end
        self._indexed = len(self.tokens)

    def shrink(self, count: int) -> None:
        """Forget the last ``count`` tokens; call it while ``tokens`` still holds them."""
        for n in self.lengths:
            newest, previous = self._newest[n], self._previous[n]
            for end in range(self._indexed - 1, self._indexed - 1 - count, -1):
                before = previous.pop()
                if end + 1 < n:
                    continue
                if before < 0:
                    del newest[self._key(end, n)]
                else:
                    newest[self._key(end, n)] = before
        self._indexed -= count

    def continuations(self, length: int, most: int) -> list[list[int]]:
        """What followed earlier occurrences of the last tokens: up to ``most`` runs of ``length`` tokens that differ.

        Longer matches first, newer ones first among equals.
        """
        tokens, last = self.tokens, self._indexed - 1
        found: list[list[int]] = []
        for n in reversed(self.lengths):
            end = self._previous[n][last] if last >= 0 else -1
            # A long run of one token has as many occurrences as tokens.
            for _ in range(4 * most):
                if end < 0 or len(found) >= most:
                    break
                run = tokens[end + 1 : end + 1 + length]
                while len(run) < length:
                    run.append(run[len(run) - (last - end)])
                if run not in found:
                    found.append(run)
                end = self._previous[n][end]
            if len(found) >= most:
                break
        return found
