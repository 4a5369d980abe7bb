"""Sampling and drafting on a CUDA device: the same laws and tokens, and one transfer a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.17")

from spec_compile.drafters import Draft
from spec_compile.drafters_model import AssistantModel
from spec_compile.models.zoo import build
from spec_compile.sampling import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SAMPLES, VOCAB = 50_000, 6


@pytest.mark.parametrize("drawn", [False, True], ids=["greedy_drafter", "sampling_drafter"])
@pytest.mark.parametrize("tree", [False, True])
def test_first_tokens_follow_the_target(drawn: bool, tree: bool) -> None:
    gen = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(3, VOCAB, generator=gen, device="cuda").expand(SAMPLES, 3, VOCAB)
    law = logits[0, 0].softmax(-1)
    q = torch.randn(2, VOCAB, generator=gen, device="cuda").softmax(-1).expand(SAMPLES, 2, VOCAB)
    tokens = torch.multinomial(q.reshape(-1, VOCAB), 1, generator=gen).reshape(SAMPLES, 2) if drawn else q.argmax(-1)
    draft = Draft(tokens, [2] * SAMPLES, [-1, -1] if tree else None, q if drawn else None)
    verdict = Sampler(True, seed=1, device="cuda").verify(logits, draft, [[]] * SAMPLES)
    counts = torch.bincount(torch.tensor([run[0] for run in verdict.kept]), minlength=VOCAB)
    expected = law.cpu() * SAMPLES
    # Five degrees of freedom: a right law passes but once in 100,000.
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.9


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_step_waits_once(do_sample: bool) -> None:
    """Drafts on the host, logits on the device: the outcome comes in one transfer, the only wait of the step."""
    sampler = Sampler(do_sample, 0.8, top_p=0.9, seed=0, device="cuda")
    logits = torch.randn(2, 4, 50, device="cuda")
    draft = Draft(torch.randint(50, (2, 3)), [3, 2])
    sampler.verify(logits, draft, [[], []], margins=True)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning) as caught:
            sampler.verify(logits, draft, [[], []], margins=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1


@pytest.mark.parametrize("cudagraphs", [False, True])
def test_assistant(cudagraphs: bool) -> None:
    """Drafts are the assistant's own greedy continuation, through acceptance and rollback, captured or not."""
    model: Any = build("llama", "sdpa").cuda()
    rows = [[5, 9, 11], [7] * 17]
    drafter = AssistantModel(model, max_drafts=3, cudagraphs=cudagraphs)
    drafter.start(rows)
    draft: Any = None
    for new, kept in ((None, None), ([[4], [5]], [0, 0]), ("all", [3, 3]), ([[4, 8], [5]], [0, 0])):
        if new == "all":
            new = [[*row, 9] for row in draft.tokens.tolist()]
        if kept is not None:
            drafter.accept(new, kept)
        draft = drafter.propose(3)
        for row, found in zip(drafter.rows, draft.tokens.tolist()):
            expected = list(row)
            with torch.no_grad():
                for _ in range(3):
                    expected.append(int(model(torch.tensor([expected], device="cuda")).logits[0, -1].argmax()))
            assert found == expected[len(row) :]
