"""Several continuations of each row as one token tree, of one shape for the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from spec_compile.drafters import Draft

# A node is named by the ordinals of the children on its way down, so that trees of different rows can be laid over each other.
Path = tuple[int, ...]


def tree_draft(runs: Sequence[Sequence[Sequence[int]]], room: int) -> Draft:
    """Merge the runs of each row into a trie and lay the tries over each other (token trees: SpecInfer, Miao et al. 2023).

    The first run is the main line: the others get ``room // (2 * runs)`` tokens each (at least one) past the point where they
    leave it, and it gets the rest. Nodes are ordered depth first, the main line leading, so an accepted main line lies where the
    cache wants it.

    Args:
        runs: per row its continuations, the likeliest first; none for a row without drafts.
        room: most nodes.

    Returns:
        Draft with ``parents``; a row without a node of the common shape repeats its first draft there.
    """
    tries = [_trie(row, room) for row in runs]
    used = Counter(path for trie in tries for path in trie)
    # A node is in at least as many rows as its children, and shallower: what this order cuts off leaves trees.
    shape = sorted(sorted(used, key=lambda path: (-used[path], len(path), path))[:room])
    place = {path: at for at, path in enumerate(shape)}
    parents = [place[path[:-1]] if len(path) > 1 else -1 for path in shape]
    tokens, counts = [], []
    for trie in tries:
        present = [at for at, path in enumerate(shape) if path in trie]
        counts.append(present[-1] + 1 if present else 0)
        fill = next(iter(trie.values()), 0)
        tokens.append([trie.get(path, fill) for path in shape])
    return Draft(torch.tensor(tokens, dtype=torch.int64).reshape(len(runs), len(shape)), counts, parents)


def _trie(runs: Sequence[Sequence[int]], room: int) -> dict[Path, int]:
    """``{path: token}`` of one row, at most ``room`` nodes."""
    if not runs:
        return {}
    side = max(room // (2 * len(runs)), 1)
    trie: dict[Path, int] = {}
    children: dict[tuple[Path, int], Path] = {}
    fanout: Counter[Path] = Counter()
    main = max(room - side * (len(runs) - 1), 1)
    for at, run in enumerate(runs):
        path: Path = ()
        fresh = 0
        for token in run[:main] if at == 0 else run:
            known = children.get((path, token))
            if known is None:
                if len(trie) == room or (at and fresh == side):
                    break
                known = (*path, fanout[path])
                fanout[path] += 1
                children[path, token], trie[known] = known, token
                fresh += 1
            path = known
    # What merging saved goes to the main line.
    path = ()
    for token in runs[0]:
        known = children.get((path, token))
        if known is None:
            if len(trie) == room:
                break
            known = (*path, fanout[path])
            children[path, token], trie[known] = known, token
            fanout[path] += 1
        path = known
    return trie
