"""When sparse steps stop and a dense one checks them, decided from what was measured."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence

from spec_compile.plan import AuditPlan
from spec_compile.row_verify import MOST_ROWS

# Logit margins that separate classes of tokens by how likely dense and sparse agree on them.
_MARGINS = (0.25, 0.5, 1.0, 2.0, 4.0)
# While sparse steps do not pay, one window is tried in so many dense steps.
_PROBE = 32


class AuditWindow:
    """When to audit, from what was measured: agreement by margin, tokens a step, bytes of a sparse and of a dense step.

    Sparse steps go on for as long as the next one is expected to bring more final tokens per byte than the best window brings on
    average (the marginal value theorem); where the best window is none at all, steps are dense. Estimates are functions of tokens
    alone, never of time, so that a seed gives the same run twice.

    Args:
        plan: ``window`` bounds the pending tokens of a sequence, ``margin`` forces an audit, ``adapt=False`` fills every window.
    """

    def __init__(self, plan: AuditPlan) -> None:
        self.plan = plan
        self.limit = min(plan.window, MOST_ROWS - 1)
        # Prior: nine tokens of ten agree, from what plans of a sixth of the cache show on real text.
        self._agreed, self._judged = 9.0, 10.0
        self._classes = [[0.0, 0.0] for _ in range(len(_MARGINS) + 1)]
        self._gain, self._steps = 2.0, 1.0
        # Times that a sparse step would have read no fewer bytes than a dense one.
        self.idle = self.saves_nothing = 0

    @property
    def agreement(self) -> float:
        """Estimated share of pending tokens that the dense model agrees with, given that it agreed with those before."""
        return self._agreed / self._judged

    @property
    def gain(self) -> float:
        """Estimated tokens of a sequence that a step adds."""
        return self._gain / self._steps

    def survives(self, margin: float | None) -> float:
        """Probability that the dense model chooses a token that won by this margin of logits."""
        if margin is None:
            return self.agreement
        agreed, judged = self._classes[bisect(_MARGINS, margin)]
        return (agreed + 4 * self.agreement) / (judged + 4)

    def saw_step(self, tokens: float) -> None:
        """A step added so many tokens to a sequence, on average."""
        self._gain, self._steps = 0.98 * self._gain + tokens, 0.98 * self._steps + 1

    def saw_audit(self, margins: Sequence[float | None], agreed: int) -> None:
        """The dense model agreed with the first ``agreed`` of the pending tokens of these margins; what follows is unknown."""
        judged = min(agreed + 1, len(margins))
        self._agreed, self._judged = 0.98 * self._agreed + agreed, 0.98 * self._judged + judged
        for place, margin in enumerate(margins[:judged]):
            if margin is not None:
                found = self._classes[bisect(_MARGINS, margin)]
                found[0], found[1] = 0.99 * found[0] + (place < agreed), 0.99 * found[1] + 1

    def best_rate(self, sparse: float, dense: float) -> tuple[float, int]:
        """Final tokens of a sequence per byte in the best window, and how many sparse steps that has."""
        best, at = 0.0, 0
        for steps in range(self.limit + 1):
            pending = steps * self.gain
            if steps and pending > self.limit:
                break
            rate = (self._run(pending) + 1 + self.agreement**pending * (self.gain - 1)) / (dense + steps * sparse)
            if rate > best:
                best, at = rate, steps
        return best, at

    def _run(self, tokens: float) -> float:
        """Expected length of the run that agrees, of so many tokens."""
        chance = self.agreement
        return tokens if chance > 1 - 1e-9 else chance * (1 - chance**tokens) / (1 - chance)

    def goes_on(self, alive: Sequence[float], pending: int, drafts: int, sparse: float, dense: float) -> bool:
        """Whether another sparse step comes before the audit.

        Args:
            alive: of each sequence that goes on, the probability that all its pending tokens are agreed with.
            pending: most pending tokens of a sequence.
            drafts: most drafts of a step.
            sparse, dense: bytes that such a step reads, for all sequences.
        """
        if not alive:
            return False
        # The next step's tokens must find room in the window, and in the rows of the audit.
        if pending and pending + 1 + min(drafts, math.ceil(self.gain)) > self.limit:
            return False
        if not self.plan.adapt:
            return True
        if sparse >= dense:
            self.saves_nothing += 1
            return False
        rate, steps = self.best_rate(sparse, dense)
        if not pending:
            self.idle = 0 if steps else self.idle + 1
            return steps > 0 or self.idle % _PROBE == 0
        chance = self.agreement**self.gain
        # What the step adds is also taken from the drafts that the audit judges behind the pending tokens.
        added = self._run(self.gain) - (1 - chance) * (self.gain - 1)
        return sum(alive) * added / sparse > rate * len(alive)
