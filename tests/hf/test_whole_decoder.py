"""A token of all decoder layers in one call of a kernel, against the same token layer by layer."""

import copy
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import windlass
from tests.helpers.caches import assert_same
from tests.helpers.shares import APART
from windlass import KVCache, Shares, UsageError, kernels
from windlass.cache.fused import FusedDecode
from windlass.core.step import AttentionCall
from windlass.hf.attach import AttachedModel
from windlass.hf.cpu_decoder import WholeDecoder
from windlass.policies import KeyNorm, Policy, Slots, Smoothed
from windlass.policies.wrappers import ranks_layers_as_rows
from windlass.testing import tiny_model

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

from windlass.kernels.cpu.decode import DecoderSteps

TOLERANCE = 1e-5
LAYERS_APART = [[1.5] * 3, [0.5] * 3]
POLICIES = ["recent", "h2o", "tova", "snapkv", "key_diff"]
# No kernel knows how they rank: they are asked, for all layers at once.
ASKED = [
    "key_norm",
    "lag_kv(lag=3)",
    "r_kv(observed_queries=3)",
    "expected_attention(future=7)",
    "random",
    "leverage",
    "tri_attention",
    "compactor(observed_queries=4)",
    "smoothed(h2o)",
    "in_chunks(key_diff)",
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers of each call of the kernel."""
    counted: list[int] = []
    step = DecoderSteps.step

    def counting(self: DecoderSteps, *given: Any) -> Tensor:
        counted.append(len(self._layers))
        return step(self, *given)

    monkeypatch.setattr(DecoderSteps, "step", counting)
    with torch.no_grad():
        yield counted


def tokens(count: int, batch: int = 1) -> Tensor:
    return torch.arange(count * batch).view(batch, count) % 61


def fed(model: PreTrainedModel, cache: Cache, text: Tensor, single: int) -> Tensor:
    """The logits of the last `single` columns, which come one by one."""
    first = text.shape[1] - single
    model(text[:, :first], past_key_values=cache)
    return torch.cat([model(part, past_key_values=cache).logits for part in text[:, first:].split(1, 1)], 1)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_equals_the_plain_model(family: str, batch: int, calls: list[int]) -> None:
    plain = tiny_model(family)
    model, text = windlass.attach(copy.deepcopy(plain)), tokens(23, batch)
    calls.clear()
    ours = fed(model, KVCache(model, batch=batch), text, 9)
    theirs = fed(plain, DynamicCache(config=plain.config), text, 9)
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    assert len(calls) >= 8  # the first one may find no slots that are laid out for decode
    assert set(calls) == {plain.config.num_hidden_layers}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("store", ["plain", "int4(sinks=3)"])
def test_several_tokens_leave_what_modules_around_the_layers_leave(
    family: str, is_narrow: bool, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, of passes below and above the most tokens of a kernel, with padding, eviction, and rollback."""
    plain, text = tiny_model(family), tokens(120, 2)
    model = windlass.attach(plain.bfloat16() if is_narrow else plain)
    caches = [KVCache(model, batch=2, budget=50, store=store, policy="h2o", rollback=3) for _ in range(2)]
    call, outs, asked = AttachedModel.call, list[Tensor](), list[int]()

    def counting(self: AttachedModel, layer: int, *given: Any) -> AttentionCall:
        asked.append(layer)
        return call(self, layer, *given)

    monkeypatch.setattr(AttachedModel, "call", counting)
    with torch.no_grad():
        for cache, by_modules in zip(caches, (False, True), strict=True):
            asked.clear()
            with monkeypatch.context() as patched:
                if by_modules:
                    patched.setattr(WholeDecoder, "output", lambda *_: None)
                mask = torch.ones(2, 0, dtype=torch.long)
                for start, end in pairwise([0, 7, 9, 80, 81, 112, 118]):
                    mask = torch.cat([mask, torch.ones(2, end - start, dtype=torch.long)], 1)
                    mask[1, start : start + (end - start) // 3] = 0
                    ids = text[:, start:end]
                    outs.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
            assert bool(asked) == by_modules
    for one, other in zip(outs[:6], outs[6:], strict=True):
        assert one.equal(other)
    assert_same(*caches)
    for cache in caches:
        cache.rollback([3, 1])
    assert_same(*caches)


@pytest.mark.parametrize("policy", [*POLICIES, *ASKED])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("store", "shares"),
    [
        ("plain", None),
        ("plain", LAYERS_APART),
        ("plain", APART),
        ("int8", None),
        ("int4", None),
        ("int4", APART),
        ("int4(sinks=3)", None),
        ("int8(sinks=2)", APART),
    ],
)
def test_it_leaves_what_layers_by_themselves_leave(
    policy: str,
    batch: int,
    store: str,
    shares: list[list[float]] | None,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit: logits, slots, state, and the remainder after a rollback."""
    model, text = windlass.attach(tiny_model("qwen3")), tokens(47, batch)
    options: dict[str, Any] = {"policy": policy, "rollback": 3, "store": store}
    options["shares"] = None if shares is None else Shares(shares)
    options["sinks"] = 1 if "sinks" in store else 4  # some of the tokens in full precision are evicted
    caches = [KVCache(model, batch=batch, budget=16, **options) for _ in range(2)]
    calls.clear()
    ours = fed(model, caches[0], text, 15)
    assert len(calls) >= 14
    with monkeypatch.context() as patched:
        patched.setattr(WholeDecoder, "output", lambda *_: None)
        theirs = fed(model, caches[1], text, 15)
    assert torch.equal(ours, theirs)
    assert_same(*caches)
    for cache in caches:
        cache.rollback(2)
    assert_same(*caches)


@pytest.mark.parametrize(
    "policy", [*POLICIES, "lag_kv(lag=3)", "r_kv(observed_queries=3)", "expected_attention", "smoothed(h2o)"]
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("rollback", "budget", "store", "shares"),
    [
        (3, 16, "int4(sinks=3)", None),
        (0, 16, "plain", None),
        (3, 16, "plain", APART),
        (3, 48, "plain", None),
        (3, 16, "int8", None),
        (3, 16, "int4", APART),
    ],
)
def test_readers_and_forgotten_steps_leave_what_layers_by_themselves_leave(
    policy: str,
    batch: int,
    rollback: int,
    budget: int,
    store: str,
    shares: list[list[float]] | None,
    calls: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes are counted, steps forgotten, passes interrupted and taken back between two tokens, in any order."""
    model, text = windlass.attach(tiny_model("llama")), tokens(70, batch)
    options: dict[str, Any] = {"policy": policy, "rollback": rollback, "budget": budget, "store": store}
    options["shares"] = None if shares is None else Shares(shares)
    options |= {"sinks": 1} if "sinks" in store else {"recall": 16}
    caches = [KVCache(model, batch=batch, **options) for _ in range(2)]
    run, told = FusedDecode.run, list[list[Any]]()

    def interrupted(self: FusedDecode, plan: Any) -> Tensor:
        run(self, plan)
        raise KeyboardInterrupt

    for cache, is_whole in zip(caches, (True, False), strict=True):
        calls.clear()
        told.append([])
        with monkeypatch.context() as patched:
            if not is_whole:
                patched.setattr(WholeDecoder, "output", lambda *_: None)
            fed(model, cache, text[:, :20], 2)
            draw = random.Random(batch)
            for at in range(20, 60):
                told[-1].append(model(text[:, at : at + 1], past_key_values=cache).logits)
                for _ in range(draw.randrange(3)):
                    what = draw.choice(["forget", "read", "interrupt", "roll back"])
                    if what == "forget":
                        cache.forget_steps()
                    elif what == "read":
                        told[-1] += [layer.table.occupancy_bound for layer in cache.layers_to_read]
                        told[-1] += [len(layer.history.records) for layer in cache.layers_to_read]
                    elif what == "interrupt" and is_whole:
                        patched.setattr(FusedDecode, "run", interrupted)
                        with pytest.raises(KeyboardInterrupt):
                            model(text[:, at + 1 : at + 2], past_key_values=cache)
                        patched.setattr(FusedDecode, "run", run)
                    elif what == "roll back":
                        told[-1].append(_rolled_back(cache))
        assert bool(calls) == is_whole
    for ours, theirs in zip(*told, strict=True):
        assert ours.equal(theirs) if isinstance(ours, Tensor) else ours == theirs
    assert_same(*caches)


@pytest.mark.parametrize("store", ["plain", "int4"])
@pytest.mark.parametrize("positions", ["auto", "compact"])
@pytest.mark.parametrize("length", [7, 122, 250])
def test_rows_with_far_more_slots_than_tokens_leave_what_layers_by_themselves_leave(
    length: int, positions: str, store: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two lengths go on past the end of a block of slots, one more after the other was cleared."""
    model, text = windlass.attach(tiny_model("qwen3")), tokens(length + 40, 2)
    options: dict[str, Any] = {"batch": 2, "budget": 700, "store": store, "positions": positions, "rollback": 2}
    caches, outs = [KVCache(model, **options) for _ in range(2)], list[Tensor]()
    for cache, is_whole in zip(caches, (True, False), strict=True):
        calls.clear()
        with monkeypatch.context() as patched:
            if not is_whole:
                patched.setattr(WholeDecoder, "output", lambda *_: None)
            mask = torch.ones(2, length, dtype=torch.long)
            mask[1, : length // 2] = 0
            model(text[:, :length], attention_mask=mask, past_key_values=cache)
            for at in range(length, length + 20):
                outs.append(model(text[:, at : at + 1], past_key_values=cache).logits)
            cache.rollback(2)
            cache.clear_row(0)
            for at in range(length + 20, length + 40):
                outs.append(model(text[:, at : at + 1], past_key_values=cache).logits)
        assert len(calls) >= 38 * is_whole
        assert bool(calls) == is_whole
    assert all(one.equal(other) for one, other in zip(outs[:40], outs[40:], strict=True))
    assert_same(*caches)


@dataclass(frozen=True)
class ByLayer(KeyNorm):
    """Keeps the keys of the largest norm in every second layer."""

    def score(self, slots: Slots) -> Tensor:
        return super().score(slots) * (-1) ** slots.layer


@pytest.mark.parametrize("policy", [ByLayer(), Smoothed(ByLayer())], ids=repr)
def test_a_policy_that_reads_the_number_of_its_layer_is_shown_one_layer(
    policy: Policy, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ranks_layers_as_rows(KeyNorm())
    assert ranks_layers_as_rows(Smoothed(KeyNorm()))
    assert not ranks_layers_as_rows(policy)
    model, text = windlass.attach(tiny_model("llama")), tokens(47)
    caches = [KVCache(model, budget=16, policy=policy) for _ in range(2)]
    calls.clear()
    ours = fed(model, caches[0], text, 15)
    assert len(calls) >= 14
    with monkeypatch.context() as patched:
        patched.setattr(WholeDecoder, "output", lambda *_: None)
        assert torch.equal(ours, fed(model, caches[1], text, 15))
    assert_same(*caches)


@pytest.mark.parametrize("policy", [*POLICIES, "r_kv(observed_queries=3)"])
@pytest.mark.parametrize("store", ["plain", "int4", "int8(sinks=3)"])
def test_rows_with_pins_leave_what_layers_by_themselves_leave(
    policy: str, store: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row has none, one has some in the middle, and one has no room for others beside the window."""
    model, text = windlass.attach(tiny_model("llama")), tokens(47, 3)
    pins = [(), ((5, 7), (7, 10), (21, 22)), ((4, 16),)]
    caches = [
        KVCache(model, batch=3, budget=20, window=3, policy=policy, store=store, sinks="system") for _ in range(2)
    ]
    for cache in caches:
        for row, its in enumerate(pins):
            cache.set_sinks(4, row, its)
    calls.clear()
    ours = fed(model, caches[0], text, 19)
    assert len(calls) >= 18
    with monkeypatch.context() as patched:
        patched.setattr(WholeDecoder, "output", lambda *_: None)
        theirs = fed(model, caches[1], text, 19)
    # With tokens in full precision, layers by themselves may attend in plain PyTorch.
    tolerance = TOLERANCE if "sinks" in store else 0.0
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert_same(*caches)
    for row, its in enumerate(pins):
        pinned = {at for start, stop in its for at in range(start, stop)}
        assert all(pinned <= set(head) for layer in caches[0].layers for head in layer.positions[row].tolist())
    for cache in caches:
        cache.rollback([2, 0, 1])
    assert_same(*caches)


def _rolled_back(cache: KVCache) -> bool:
    try:
        cache.rollback(1)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("store", ["plain", "int4"])
def test_padding_and_rows_of_several_lengths_are_the_same(store: str) -> None:
    model, text = windlass.attach(tiny_model("llama")), tokens(20, 2)
    caches = [KVCache(model, batch=2, budget=8, store=store) for _ in range(2)]
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    outs = []
    for cache, own in zip(caches, (False, True), strict=True):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
            if own:
                patched.setattr(WholeDecoder, "output", lambda *_: None)
            model(text[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
            for end in range(13, 21):
                part = model(text[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache).logits
                outs.append(part)
    for one, other in zip(outs[:8], outs[8:], strict=True):
        assert torch.equal(one, other)
    assert_same(*caches)


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(
    ("policy", "store"),
    [("h2o", "plain"), ("snapkv", "int4"), ("key_diff", "plain"), ("smoothed(h2o)", "plain"), ("r_kv", "int8")],
)
def test_an_interrupt_around_the_call_leaves_no_trace(
    is_taken: bool, error: type[BaseException], policy: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one token and after many, which free the slots of earlier evictions, with tokens that can be recalled."""
    model, text = windlass.attach(tiny_model("llama")), tokens(48)
    cache = KVCache(model, budget=12, policy=policy, rollback=2, recall=16, store=store)
    take = FusedDecode.take

    def interrupted(self: FusedDecode, *given: Any) -> Tensor:
        if is_taken:
            take(self, *given)
        raise error

    with torch.no_grad():
        fed(model, cache, text[:, :25], 2)
        for start in (25, 35):
            before = copy.deepcopy(cache)
            with monkeypatch.context() as patched:
                patched.setattr(FusedDecode, "take", interrupted)
                with pytest.raises(error):
                    model(text[:, start : start + 1], past_key_values=cache)
            assert_same(cache, before)
            after = [fed(model, each, text[:, start : start + 9], 8) for each in (cache, before)]
            assert torch.equal(*after)
            assert_same(cache, before)


@pytest.mark.parametrize("store", ["plain", "int4(sinks=3)"])
@pytest.mark.parametrize("policy", ["key_diff", "smoothed(h2o)", "expected_attention"])
def test_a_token_that_the_layers_know_of_is_taken_back(policy: str, store: str, calls: list[int]) -> None:
    """Its states, statistics and tokens in full precision as well."""
    model, text = windlass.attach(tiny_model("llama")), tokens(48)
    cache = KVCache(model, budget=12, policy=policy, rollback=3, sinks=1, store=store)
    fed(model, cache, text[:, :25], 6)
    before, twin = cache.text, copy.deepcopy(cache)
    calls.clear()
    model(text[:, 25:26], past_key_values=cache)
    assert calls
    assert len(cache.layers) == calls[0]  # they are brought up to date
    cache.take_back(before)
    assert_same(cache, twin)
    # In other slots they are added up in another order.
    after = [fed(model, each, text[:, 25:34], 8) for each in (cache, twin)]
    torch.testing.assert_close(*after, rtol=TOLERANCE, atol=TOLERANCE)
    assert_same(cache, twin)


def test_python_calls_of_a_token_do_not_grow_with_the_layers() -> None:
    """Compare models of 2 and of 12 layers, with caches that are full, evict, recall, or hold a batch."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 4}
    low_bit = {"store": "int4"}, {"budget": 32, "recall": 16, "store": "int8"}
    for options in (
        {},
        {"budget": 24},
        {"budget": 24, "policy": "h2o"},
        {"budget": 32, "recall": 16},
        {"batch": 3},
        *low_bit,
    ):
        counts = []
        for layers in (2, 2, 12):  # the first one fills the caches of types
            config = LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, **sizes)
            model = windlass.attach(LlamaForCausalLM(config).eval())
            cache, called = KVCache(model, **options), 0
            text = tokens(48, cache.batch_size)

            def count(frame: object, event: str, function: object) -> None:  # noqa: ARG001
                nonlocal called
                called += event in ("call", "c_call")

            with torch.no_grad():
                fed(model, cache, text, 26)
                sys.setprofile(count)
                model(text[:, :1], past_key_values=cache)
                sys.setprofile(None)
            counts.append(called)
        assert counts[1] == counts[2], options


def test_layers_that_are_hooked_left_out_or_of_several_kinds_are_called_by_themselves(calls: list[int]) -> None:
    plain = tiny_model("llama")
    model = windlass.attach(copy.deepcopy(plain))
    calls.clear()
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)  # noqa: ARG005
    other = plain.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)  # noqa: ARG005
    ours, theirs = (
        fed(model, KVCache(model), tokens(19), 4),
        fed(plain, DynamicCache(config=plain.config), tokens(19), 4),
    )
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    handle.remove()
    other.remove()
    assert not calls
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "max_window_layers": 1}
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    windowed = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, use_sliding_window=True, sliding_window=7)).eval()
    twin = windlass.attach(copy.deepcopy(windowed))
    ours, theirs = (
        fed(twin, KVCache(twin), tokens(19), 4),
        fed(windowed, DynamicCache(config=windowed.config), tokens(19), 4),
    )
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    assert not calls


def test_arguments_and_embeddings_that_no_kernel_reads_go_the_decoders_own_way(calls: list[int]) -> None:
    """A list among the arguments, and embeddings of another number type or in other memory."""
    model, text = windlass.attach(tiny_model("llama")), tokens(24)
    caches = [KVCache(model) for _ in range(3)]
    embeds = model.get_input_embeddings()(text)
    strided = embeds.mT.contiguous().mT
    for cache in caches:
        model(text[:, :20], past_key_values=cache)
    for at in range(20, 24):
        one = slice(at, at + 1)
        ours = model(inputs_embeds=embeds[:, one].contiguous(), past_key_values=caches[0]).logits
        before = len(calls)
        theirs = model(inputs_embeds=strided[:, one], past_key_values=caches[1]).logits
        assert len(calls) == before
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    assert calls
    with pytest.raises(RuntimeError, match="dtype"):
        model(inputs_embeds=embeds[:, :1].double(), past_key_values=caches[2])
    with pytest.raises(UsageError, match="hands its attention unheard_of"):
        model(text[:, 20:21], past_key_values=caches[2], unheard_of=["a list"])
    assert caches[2].columns_seen == 20
