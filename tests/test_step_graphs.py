"""Which captured step serves a call. A stand-in runs what a CUDA graph would replay; tests/test_gpu*.py replay real ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import spec_compile as sc
from spec_compile import AttentionPlan, FfnPlan, MoePlan, SparsityPlan, row_verify, step_graph, verify
from spec_compile.backend import switch_of
from spec_compile.captured_rows import CapturedRows
from spec_compile.errors import CacheError
from spec_compile.kernels import mlp
from spec_compile.models.row_cache import RowCache, sequence_cache
from spec_compile.models.zoo import VOCAB, build
from spec_compile.options import Options
from spec_compile.row_verify import RowVerify
from spec_compile.step_graph import StepGraph, StepGraphs

SPARSE = SparsityPlan(attention=AttentionPlan(budget=24, block_size=8, index_topk_freq=2, query="all", min_context=0))
MEAN = SparsityPlan(attention=AttentionPlan(budget=24, block_size=8, query="mean", min_context=0))
SHALLOW = {"num_hidden_layers": 2}
# Rows and mode of each step.
STEPS = [(9, True), (4, True), (4, False), (1, True), (6, True), (2, False), (4, True), (1, True)]


class Steps:
    """Counts the steps made and run, by their rows."""

    def __init__(self) -> None:
        self.made: list[tuple[int, bool]] = []
        self.ran: list[int] = []


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    counted = Steps()

    class Step(StepGraph):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counted.made.append((self.rows, bool(args[6])))

        def __call__(self, ids: Tensor, held: int) -> Tensor:
            counted.ran.append(self.rows)
            self._fill(ids, ids.shape[1])
            with torch.no_grad():
                return self._step()[:, : ids.shape[1]].clone()

    class Rows(CapturedRows):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counted.made.append((self.rows, bool(args[6])))

        def __call__(self, last: Any, drafts: Tensor, counts: Any, shape: Tensor) -> Tensor:  # type: ignore[override]
            counted.ran.append(self.rows)
            self._stage(last, drafts, counts, shape)
            return self._step()

    for module in (verify, row_verify):
        monkeypatch.setattr(module, "why_not_captured", lambda model, cache: None)
    monkeypatch.setattr(verify.VerifyFunction, "_replay", lambda self, step, ids, held: step(ids, held))
    monkeypatch.setattr(step_graph, "StepGraph", Step)
    monkeypatch.setattr(row_verify, "CapturedRows", Rows)
    return counted


def tokens(rows: int, seed: int, batch: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, rows), generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item()))


def test_sparse_steps_run_their_own_number_of_rows(steps: Steps) -> None:
    """Rows of a padding would vote; exact steps of any number of rows share the one that all draft rows fill."""
    model = build("llama", "sdpa", **SHALLOW)
    caches = [sc.VerifyCache(model, 200) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(tokens(120, 1), past_key_values=cache)
    captured = sc.compile_verify(model, caches[0], draft_len=8, plan=SPARSE, codegen="eager", cudagraphs=True)
    plain = sc.compile_verify(model, caches[1], draft_len=8, plan=SPARSE, codegen="eager")
    for seed, (rows, sparse) in enumerate(STEPS):
        ids = tokens(rows, seed)
        found = captured(ids, sparse=sparse)
        assert found.shape == (1, rows, VOCAB) and near(found, plain(ids, sparse=sparse))
        for cache in caches:
            cache.crop(-(rows // 2))
        assert caches[0].length == caches[1].length
    assert steps.ran == [rows if sparse else 9 for rows, sparse in STEPS]
    # The fewer rows share one graph of the compiler with what runs uncaptured, whatever their number.
    assert steps.made == [(9, False), (4, True), (1, True), (6, True)]
    assert sum(report.kind == "verify" for report in captured.reports) <= 3


@pytest.mark.parametrize("plan", [None, SparsityPlan(moe=MoePlan(ratio=0.1))])
def test_where_rows_have_no_vote_all_steps_share_one(plan: SparsityPlan | None) -> None:
    switch, given = (None, ()) if plan is None else (switch_of(plan), (plan,))
    model = build("llama", "sdpa", **SHALLOW)
    shared = StepGraphs(lambda *args: args[0], model, sc.VerifyCache(model, 40), 1, 9, switch, *given)
    assert len({id(shared.of(rows)) for rows in (1, 4, 9)}) == 1 and shared.of(2).rows == 9


def test_where_exact_steps_launch_other_kernels_each_mode_has_its_own(steps: Steps) -> None:
    model = build("llama", "sdpa", **SHALLOW)
    caches = [sc.VerifyCache(model, 200) for _ in range(2)]
    plan = SparsityPlan(ffn=FfnPlan(threshold=0.3))
    captured = sc.compile_verify(model, caches[0], draft_len=8, plan=plan, codegen="eager", cudagraphs=True)
    plain = sc.compile_verify(model, caches[1], draft_len=8, codegen="eager")
    for seed, sparse in enumerate([False, True, False, True]):
        ids = tokens(5, seed)
        equal = near(captured(ids, sparse=sparse), plain(ids))
        assert equal != sparse
        for mine, other in zip(caches[0].layers, caches[1].layers):
            mine.keys.copy_(other.keys), mine.values.copy_(other.values)
    assert steps.made == [(9, False), (9, False)] and steps.ran == [9] * 4


@pytest.mark.parametrize("sparse", [True, False])
def test_operators_know_of_exact_steps_on_the_host(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no exact step launches what could skip channels."""
    known: list[bool] = []
    own = mlp.known_exact
    monkeypatch.setattr(mlp, "known_exact", lambda: (known.append(own()), own())[1])
    model = build("llama", "sdpa", **SHALLOW)
    plan = SparsityPlan(ffn=FfnPlan(threshold=0.3))
    sc.compile_verify(model, sc.VerifyCache(model, 40), plan=plan, codegen="eager")(tokens(5, 0), sparse=sparse)
    assert known == [not sparse] * 2


def test_the_end_of_a_cache_is_reached_row_by_row(steps: Steps) -> None:
    """A sparse step of few rows needs room for these alone, and stays captured to the last slot."""
    model = build("llama", "sdpa", **SHALLOW)
    cache = sc.VerifyCache(model, 64)
    with torch.no_grad():
        model(tokens(cache.capacity - 3, 1), past_key_values=cache)
    captured = sc.compile_verify(model, cache, draft_len=8, plan=SPARSE, codegen="eager", cudagraphs=True)
    captured(tokens(2, 0))
    captured(tokens(1, 1))
    assert steps.ran == [2, 1] and cache.length == cache.capacity
    with pytest.raises(CacheError, match="too short"):
        captured(tokens(2, 2))


@pytest.mark.parametrize("plan, sizes", [(MEAN, [9, 5, 9, 2, 5, 9]), (SPARSE, [9, 9, 9, 9, 9, 9])], ids=["mean", "max"])
def test_rows_of_the_loop(plan: SparsityPlan, sizes: list[int], steps: Steps) -> None:
    """Repeated rows leave a maximum as it is, and weigh in a mean."""
    model, batch = build("llama", "sdpa", **SHALLOW), 2
    caches = [RowCache(model, 200, batch=batch) for _ in range(2)]
    prompts = [tokens(90, 1), tokens(70, 2)]
    with torch.no_grad():
        for cache in caches:
            for i, prompt in enumerate(prompts):
                model(input_ids=prompt, past_key_values=sequence_cache(cache, i), use_cache=True)
            cache.set_lengths([90, 70])
    captured, plain = (
        RowVerify(model, cache, Options.parse({"codegen": "eager", "plan": plan, "cudagraphs": graphs}), [9])
        for cache, graphs in zip(caches, (True, False))
    )
    columns = [(8, True), (4, True), (4, False), (0, True), (4, True), (0, False)]
    for seed, (drafts, sparse) in enumerate(columns):
        given = tokens(drafts, seed, batch) if drafts else torch.zeros(batch, 0, dtype=torch.int64)
        counts = [drafts, max(0, drafts - 2)]
        found, wanted = (step([5, 6], given, counts, sparse=sparse).clone() for step in (captured, plain))
        for i, count in enumerate(counts):
            assert near(found[i, : count + 1], wanted[i, : count + 1])
    assert steps.ran == sizes
    assert steps.made == [(size, size != 9) for size in dict.fromkeys(sizes)]


class Replayed(CapturedRows):
    """What a graph would do, by running the step: counts captures and launches, and frees nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.captures = self.launches = 0

    def __call__(self, last: Any, drafts: Tensor, counts: Any, shape: Tensor) -> Tensor:  # type: ignore[override]
        self._stage(last, drafts, counts, shape)
        return self.replay()

    @torch.no_grad()
    def _capture(self, state: tuple[Any, ...]) -> None:
        self.captures += 1
        self._weights = [*self._model.parameters(), *self._model.buffers()]
        # Weights as they lie now; a graph would go on reading these.
        self._read = {name: x.detach() for name, x in [*self._model.named_parameters(), *self._model.named_buffers()]}
        self._graph, self._state, self._registrations = object(), state, step_graph._Registrations.count  # type: ignore[assignment]
        self._modules = [id(module) for module in self._model.modules()]
        self._places = [x.data_ptr() for x in self._weights]
        self._cache_places = self._cache_places_now()

    @torch.no_grad()
    def _launch(self) -> Tensor:
        self.launches += 1
        own = self._model
        held = {name: x.data for name, x in [*own.named_parameters(), *own.named_buffers()]}
        for name, x in [*own.named_parameters(), *own.named_buffers()]:
            x.data = self._read[name]
        try:
            return self._step().clone()
        finally:
            for name, x in [*own.named_parameters(), *own.named_buffers()]:
                x.data = held[name]


@pytest.mark.parametrize("by", ["data", "parameter", "module"])
def test_weights_that_are_replaced_between_the_steps_of_a_generation(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step over the old ones is run again over the new ones, and nothing of it stays in the cache."""
    monkeypatch.setattr(row_verify, "why_not_captured", lambda model, cache: None)
    monkeypatch.setattr(row_verify, "CapturedRows", Replayed)
    model, other = (build("llama", "sdpa", **SHALLOW) for _ in range(2))
    other.load_state_dict(model.state_dict())
    caches = [RowCache(x, 100) for x in (model, other)]
    prompt = tokens(40, 1)
    for x, cache in zip((model, other), caches):
        with torch.no_grad():
            x(prompt, past_key_values=sequence_cache(cache, 0))
        cache.set_lengths([40])
    verify = RowVerify(model, caches[0], Options.parse({"codegen": "eager", "cudagraphs": True}), [6])
    plain = RowVerify(other, caches[1], Options.parse({"codegen": "eager"}), [6])

    def same() -> bool:
        drafts = tokens(5, 2)
        return near(verify([7], drafts, [5]), plain([7], drafts, [5]))

    def replace(x: Any) -> None:
        attention = x.model.layers[0].self_attn
        weight = attention.v_proj.weight.detach() * 1.5
        if by == "data":
            attention.v_proj.weight.data = weight
        elif by == "parameter":
            attention.v_proj.weight = torch.nn.Parameter(weight)
        else:
            attention.v_proj = copy.deepcopy(attention.v_proj)
            attention.v_proj.weight.data = weight

    with verify.steps_in_a_row():
        assert same() and same()
        (step,) = verify._captured.values()
        assert (step.captures, step.launches) == (1, 2) and step._storages
        replace(model), replace(other)
        assert same()
        assert (step.captures, step.launches) == (2, 4)
        assert torch.equal(caches[0].layers[0].values[:, :, 40:46], caches[1].layers[0].values[:, :, 40:46])
        assert same()
        assert (step.captures, step.launches) == (2, 5)
    assert not step._storages and not step.holds
    replace(model), replace(other)
    # Between generations nothing is held: all is compared before the launch.
    assert same()
    assert (step.captures, step.launches) == (3, 6)


def test_caches_that_are_replaced_are_noticed_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_verify, "why_not_captured", lambda model, cache: None)
    monkeypatch.setattr(row_verify, "CapturedRows", Replayed)
    model = build("llama", "sdpa", **SHALLOW)
    cache = RowCache(model, 100)
    verify = RowVerify(model, cache, Options.parse({"codegen": "eager", "cudagraphs": True}), [6])
    with verify.steps_in_a_row():
        verify([7], tokens(5, 2), [5]), verify([7], tokens(5, 2), [5])
        cache.layers[1].keys = cache.layers[1].keys.clone()
        verify([7], tokens(5, 2), [5])
    (step,) = verify._captured.values()
    assert (step.captures, step.launches) == (2, 3)
