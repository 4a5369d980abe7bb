"""A decoder without transformers whose mixtures keep three stacks, as gpt-fast's do: compiled as a whole, on CPU and CUDA."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spec_compile as sc
from spec_compile.models.reference_decoder import Decoder, DecoderCache, DecoderConfig

EXPERTS, CHOICES, INNER, PREFILL = 6, 2, 40, 20
CONFIG = DecoderConfig(layers=1)


class Mixture(nn.Module):
    """Softmax over all experts, the best renormalised; ``w1`` is the gate, ``w3`` up, ``w2`` down."""

    def __init__(self) -> None:
        super().__init__()
        hidden = CONFIG.hidden
        self.router = nn.Linear(hidden, EXPERTS, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(EXPERTS, INNER, hidden) / 4) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, hidden, INNER) / 4)

    def forward(self, block: Tensor) -> Tensor:
        x = block.view(-1, block.shape[-1])
        weight, choice = torch.topk(F.softmax(self.router(x), -1), CHOICES, dim=-1)
        weight /= weight.sum(-1, keepdim=True)
        gate = F.silu(torch.einsum("ti,taoi -> tao", x, self.w1[choice]))
        up = torch.einsum("ti, taoi -> tao", x, self.w3[choice])
        out = torch.einsum("tao, taio -> tai", gate * up, self.w2[choice])
        return torch.einsum("tai,ta -> ti", out, weight).view(block.shape)


class MixtureBlock(nn.Module):
    """A block of the reference decoder with a mixture for its MLP."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = block.attention, block.attention_norm, block.ffn_norm
        self.mixture = Mixture()

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *given)
        return x + self.mixture(self.ffn_norm(x))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(rows: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randint(CONFIG.vocab, (1, rows), generator=torch.Generator().manual_seed(seed)).to(device)


@torch.no_grad()
def model_and_cache(device: str = "cpu") -> tuple[Decoder, DecoderCache]:
    torch.manual_seed(0)
    model = Decoder(CONFIG).eval()
    model.blocks = nn.ModuleList(MixtureBlock(block) for block in model.blocks)
    model.requires_grad_(False).to(device)
    with torch.device(device):  # buffers that are moved lose their static marks
        cache = DecoderCache(CONFIG, 64)
    model(tokens(PREFILL, 0, device), cache=cache)
    return model, cache


@torch.no_grad()
def test_exact_and_sparse_steps() -> None:
    model, cache = model_and_cache()
    twin = copy.deepcopy(cache)
    plan = sc.SparsityPlan(moe=sc.MoePlan(top_k=1))
    verify = sc.compile_verify(model, cache, draft_len=4, plan=plan, codegen="eager")
    for step, rows in enumerate((5, 3, 5)):
        ids = tokens(rows, step + 1)
        wanted = model(ids, cache=twin)
        found = verify(ids, sparse=False)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
        cache.crop(-rows)
        assert (verify(ids) - wanted).abs().max() > 1e-3
        cache.crop(-1)
        twin.crop(-1)
    [moe] = verify.report().moes
    assert (moe.status, moe.form, moe.experts, moe.top_k, moe.inner) == ("rewritten", "gather", EXPERTS, CHOICES, INNER)
    assert moe.rule.startswith("top 1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cudagraphs", [False, True])
@torch.no_grad()
def test_on_gpu(cudagraphs: bool) -> None:
    """Router and experts in kernels; weights that are written in place take effect, also in a captured step."""
    model, cache = model_and_cache("cuda")
    twin = copy.deepcopy(cache)
    verify = sc.compile_verify(model, cache, draft_len=4, cudagraphs=cudagraphs)
    for step, rows in enumerate((5, 3, 5)):
        ids = tokens(rows, step + 1, "cuda")
        torch.testing.assert_close(verify(ids), model(ids, cache=twin), rtol=1e-3, atol=1e-3)
        for weight in (model.blocks[0].mixture.w1, model.blocks[0].mixture.w3):
            weight.mul_(1.25)
    [moe] = verify.report().moes
    assert (moe.status, moe.form, moe.router_note) == ("rewritten", "gather", "")
