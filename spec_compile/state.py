"""State that outlives a step: block summaries of caches, and the switch between sparse and exact steps.

Summaries are looked up by cache tensor at call time: graphs of different T share them, several caches run through one graph,
and they go when the cache goes. Writes that were not ours are noticed twice: by the tensors' version counters here, and on the
device, where each step compares the newest summary with its keys (:func:`spec_compile.kernels.library.block_summary_`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from spec_compile.errors import CacheError
from spec_compile.kernels.step_mode import launching
from spec_compile.passes.state_inputs import StateInput

# More tokens than any cache holds: every block is kept.
_NEVER = 1 << 62


class SparseSwitch:
    """Whether steps of one compiled function are sparse, as a number on the device that its graphs read.

    Args:
        min_context: live tokens below which sparse steps, too, read every block.
    """

    def __init__(self, min_context: int = 0) -> None:
        self.min_context, self.sparse = min_context, True
        # Those that the step read which is captured last.
        self.summaries: list[BlockSummaries] = []
        self._held: dict[tuple[str, torch.device], Tensor] = {}

    def set(self, sparse: bool) -> None:
        """Takes effect for the calls that follow on each device's current stream; no graph is compiled or captured anew."""
        if sparse != self.sparse:
            self.sparse = sparse
            for (kind, _), held in self._held.items():
                held.fill_(self._value(kind))

    def _value(self, kind: str) -> int:
        if kind == "sparse":
            return int(self.sparse)
        return self.min_context if self.sparse else _NEVER

    def tensor(self, kind: str, device: torch.device) -> Tensor:
        """int64 ``[1]``: of kind ``gate``, contexts of fewer tokens are read whole; of kind ``sparse``, 0 in exact steps."""
        if (kind, device) not in self._held:
            with torch.inference_mode(False):
                self._held[kind, device] = torch.full((1,), self._value(kind), dtype=torch.int64, device=device)
        return self._held[kind, device]


class BlockSummaries:
    """Summaries of the K caches of all anchors of one plan, and how many blocks of them hold."""

    def __init__(self, keys: Sequence[Tensor], summaries: Sequence[StateInput], valid: StateInput) -> None:
        self._keys = [weakref.ref(k) for k in keys]
        with torch.inference_mode(False):
            self.summaries = [torch.zeros(s.shape, dtype=s.dtype, device=s.device) for s in summaries]
            self.valid = torch.zeros(valid.shape, dtype=valid.dtype, device=valid.device)
        self._versions: list[int] = []

    @property
    def alive(self) -> bool:
        """Whether all its caches still exist; a layer may have been given another tensor."""
        return all(held() is not None for held in self._keys)

    def belongs_to(self, keys: Sequence[Tensor]) -> bool:
        return len(keys) == len(self._keys) and all(held() is k for held, k in zip(self._keys, keys))

    def distrust_if_written(self) -> None:
        """Before a step: if somebody else wrote the caches since the last one, no summary holds any more."""
        if not self._versions or self._now() != self._versions:
            self.valid.zero_()

    def trust(self) -> None:
        """After a step of ours: what was written until now is accounted for."""
        self._versions = self._now()

    @property
    def trusted(self) -> bool:
        """Whether nobody else has written the caches since the last step."""
        return bool(self._versions) and self._now() == self._versions

    def _now(self) -> list[int]:
        # Inference tensors have no version: whoever writes them goes unseen, so nothing is ever trusted.
        keys = [k for k in (held() for held in self._keys) if k is not None]
        return [] if any(k.is_inference() for k in keys) else [k._version for k in keys]


_summaries: Any = WeakIdKeyDictionary()


def any_summaries() -> bool:
    """Whether any cache of this process has block summaries."""
    return bool(_summaries)


@contextlib.contextmanager
def keep_trust(keys: Sequence[Tensor]) -> Iterator[None]:
    """Around a write of ``keys`` that touches no summarized block: whatever was trusted before is trusted afterwards."""
    found = [one for k in keys for one in (_summaries.get(k) or {}).values()]
    trusted = [one for one in found if one.trusted]
    yield
    for one in trusted:
        one.trust()


def _look_up(keys: Sequence[Tensor], members: Sequence[StateInput], valid: StateInput) -> BlockSummaries:
    owned = _summaries.setdefault(keys[0], {})
    signature = (valid.block_size, valid.representative, len(keys), *(id(k) for k in keys))
    found = owned.get(signature)
    if found is None or not found.belongs_to(keys):
        for other in [name for name, old in owned.items() if not old.alive]:
            del owned[other]
        if keys[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise CacheError("block summaries of this cache do not exist yet: run one step before capturing it")
        found = owned[signature] = BlockSummaries(keys, members, valid)
    return found


def bind_state(run: Callable[..., Any], inputs: Sequence[StateInput], switch: SparseSwitch) -> Callable[..., Any]:
    """``run`` without its added inputs: they are found by the caches among the given ones.

    Args:
        run: the compiled graph; takes the graph's own inputs, then one tensor for each of ``inputs``.
        switch: of the compiled function.
    """
    groups: dict[tuple[int, ...], tuple[list[StateInput], StateInput]] = {}
    for need in inputs:
        if need.kind == "valid":
            members = [other for other in inputs if other.kind == "summary" and other.caches == need.caches]
            groups[need.caches] = (members, need)

    def bound(*args: Any) -> Any:
        held = {caches: _look_up([args[i] for i in caches], *group) for caches, group in groups.items()}
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        extra = []
        for need in inputs:
            if need.kind in ("gate", "sparse"):
                extra.append(switch.tensor(need.kind, need.device))
            elif need.kind == "valid":
                extra.append(held[need.caches].valid)
            else:
                extra.append(held[need.caches].summaries[need.layer])
        if capturing:
            switch.summaries = list(held.values())
        else:
            for found in held.values():
                found.distrust_if_written()
        with launching(exact=not switch.sparse):
            result = run(*args, *extra)
        for found in held.values():
            found.trust()
        return result

    return bound
