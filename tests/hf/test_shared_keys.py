"""Models in which layers share another layer's keys and values. Common behaviour is in `test_families.py`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.caches import bytes_of_slots
from tests.helpers.hybrid_caches import assert_same, held
from tests.helpers.interrupts import interrupted_at
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.hf.attach import attached
from windlass.policies import DMC, H2O, Compactor, KeyDiff, Policy, Recent, SnapKV
from windlass.testing import SLIDING_WINDOW

FAMILIES = {"gemma3n": "gemma3n", "gemma4_e": "gemma4"}  # and where transformers has them
TOKENS, BUDGET, SINKS, OWN = 45, 20, 3, 4  # the first layers have keys and values of their own
TOLERANCE = 1e-5
LIMITS: dict[str, Any] = {"budget": BUDGET, "sinks": SINKS, "window": 4, "positions": "original"}

each_family = pytest.mark.parametrize("family", FAMILIES)
each_policy = pytest.mark.parametrize("policy", [KeyDiff(), H2O(), SnapKV(observed_queries=4)], ids=repr)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()


@torch.no_grad()
def one_shot(model: PreTrainedModel, ids: Tensor, **options: object) -> Tensor:
    return model(ids, use_cache=False, **options).logits


@each_family
def test_the_probe_finds_whose_keys_a_layer_attends_to(family: str, attached_model: Models) -> None:
    kinds = attached(attached_model(family)).kinds
    assert (kinds.attention, kinds.sources) == ((0, 1, 2, 3), {4: 2, 5: 3, 6: 3, 7: 2})
    assert [layer.is_shared for layer in KVCache(attached_model(family)).layers] == [False, False, True, True]


@each_family
@pytest.mark.parametrize("chunk", [1, 7, 18, TOKENS])
def test_a_budget_equals_an_explicit_mask(
    family: str, chunk: int, plain_model: Models, attached_model: Models, text: Text
) -> None:
    plain, ids, at = plain_model(family), text(TOKENS), torch.arange(TOKENS)
    distance = at[:, None] - at
    seen = {
        "full_attention": (distance >= 0) & ((at < SINKS) | (distance <= BUDGET - SINKS)),
        "sliding_attention": (distance >= 0) & (distance < SLIDING_WINDOW),
    }
    masks = {kind: torch.zeros(each.shape).masked_fill(~each, -1e30)[None, None] for kind, each in seen.items()}
    theirs = one_shot(plain, ids, attention_mask=masks)
    cache = KVCache(attached_model(family), policy=Recent(), **LIMITS)
    assert_close(read(attached_model(family), cache, ids, chunk), theirs)
    assert (theirs - one_shot(plain, ids)).norm() > 0.05 * theirs.norm()
    assert [int((layer.positions >= 0).sum(-1).max()) for layer in cache.layers] == [11, 11, 20, 11]


@each_family
@each_policy
def test_all_layers_see_what_the_one_that_wrote_holds(
    family: str,
    policy: Policy,
    plain_model: Models,
    attached_model: Models,
    text: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transformers' own attention under masks of the tokens each layer held: heads of their own, layer by layer."""
    model, ids = attached_model(family), text(TOKENS)
    cache = KVCache(model, policy=policy, **LIMITS)
    heads = model.config.num_attention_heads
    seen = torch.zeros(OWN, 1, heads, TOKENS, TOKENS, dtype=torch.bool)
    logits = []
    for at in range(TOKENS):
        for place, layer in enumerate(cache.layers if at else []):
            for head, positions in enumerate(
                layer.positions[0].repeat_interleave(heads // layer.positions.shape[1], 0)
            ):
                seen[place, 0, head, at, positions[positions >= 0]] = True
        seen[:, :, :, at, at] = True
        logits.append(read(model, cache, ids[:, at : at + 1], 1))
    kinds = attached(model).kinds
    for place in (0, 1, 3):  # hidden by the window, and evicted only by the next token
        seen[place] &= torch.ones(TOKENS, TOKENS).triu(1 - SLIDING_WINDOW).bool()
    assert any(not seen[2, 0, 0].equal(seen[2, 0, head]) for head in range(heads))  # each kv head its own

    def eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: object, scaling: float, **__: object):
        key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
        scores = (query @ key.mT * scaling).masked_fill(~seen[kinds.place(module.layer_idx)], -torch.inf)  # type: ignore[arg-type]
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    name = FAMILIES[family]
    monkeypatch.setattr(f"transformers.models.{name}.modeling_{name}.eager_attention_forward", eager)
    assert_close(torch.cat(logits, 1), one_shot(plain_model(family), ids))


@each_family
@each_policy
def test_passes_of_few_tokens_are_single_tokens(
    family: str, policy: Policy, attached_model: Models, text: Text
) -> None:
    model, ids = attached_model(family), text(64)
    caches = [KVCache(model, policy=policy, **LIMITS) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :40], 40)
    singles = read(model, caches[0], ids[:, 40:], 1)
    passes = [read(model, caches[1], piece, 16) for piece in ids[:, 40:].split([5, 16, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(passes, 1), singles, atol=2e-5, rtol=0)


@each_family
def test_layers_that_share_hold_nothing(family: str, attached_model: Models, text: Text) -> None:
    """As many bytes as a model of the layers that write, and the same after a longer text."""
    model = attached_model(family)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.num_kv_shared_layers = OWN, 0
    config.layer_types = [*config.layer_types[: OWN - 1], "sliding_attention"]
    if family == "gemma3n":
        config.activation_sparsity_pattern = config.activation_sparsity_pattern[:OWN]
    short = windlass.attach(AutoModelForCausalLM.from_config(config).eval())
    caches = [KVCache(each, policy=KeyDiff(), **LIMITS, chunk=30) for each in (model, short)]
    sizes = []
    for tokens in (60, 240):
        for each, cache in zip((model, short), caches, strict=True):
            windlass.prefill(each, cache, text(tokens).tolist())
            read(each, cache, text(2), 1)
        assert len(caches[0].layers) == len(caches[1].layers) == OWN
        assert bytes_of_slots(caches[0]) == bytes_of_slots(caches[1])
        sizes.append(caches[0].bytes_held)
    assert sizes[0] == sizes[1]


def step(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> Callable[[KVCache], Tensor]:
    def work(cache: KVCache) -> Tensor:
        with torch.no_grad():
            return model(ids, attention_mask=mask, past_key_values=cache).logits

    return work


def begun(model: PreTrainedModel, text: Text) -> KVCache:
    """A cache of two rows that has read a prompt and a token, and evicts."""
    cache = KVCache(model, policy=H2O(), batch=2, **LIMITS)
    ids = text(27, rows=2)
    for piece in (ids[:, :26], ids[:, 26:]):
        read(model, cache, piece, 26)
    return cache


@each_family
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_an_interrupt_leaves_the_cache_as_it_was(family: str, tokens: int, attached_model: Models, text: Text) -> None:
    model = attached_model(family)
    cache, work = begun(model, text), step(model, text(tokens, rows=2, seed=8))
    before, twin, line = held(cache), copy.deepcopy(cache), 1
    work(twin)
    while interrupted_at(line, lambda: work(cache)):
        assert not cache.is_in_step
        assert all(layer.views == [] for layer in cache.layers)
        assert_same(held(cache), before, line)
        line += 97
    assert line > 1000
    assert_same(held(cache), held(twin))


@each_family
@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_the_last_step_is_rolled_back(family: str, tokens: int, attached_model: Models, text: Text) -> None:
    model = attached_model(family)
    cache, other = begun(model, text), text(6, rows=2, seed=9)
    before, twin = held(cache), copy.deepcopy(cache)
    step(model, text(tokens, rows=2, seed=8))(cache)
    cache.rollback(tokens)
    assert_same(held(cache), before)
    assert_close(step(model, other)(cache), step(model, other)(twin))


@each_family
def test_a_step_is_rolled_back_in_one_row(family: str, attached_model: Models, text: Text) -> None:
    model, ids = attached_model(family), text(4, rows=2, seed=8)
    cache = begun(model, text)
    twin = copy.deepcopy(cache)
    step(model, ids)(cache)
    cache.rollback([0, 3])
    step(model, ids, torch.tensor([[1] * 4, [1, 0, 0, 0]]))(twin)
    assert_close(step(model, text(3, rows=2))(cache), step(model, text(3, rows=2))(twin))


@each_family
def test_rows_edits_and_cuts(family: str, attached_model: Models, text: Text) -> None:
    model, ids = attached_model(family), text(5, rows=2, seed=6)
    cache = begun(model, text)
    truth = step(model, ids[[1, 1]])(copy.deepcopy(cache))[1]
    cache.select_rows(torch.tensor([1, 0, 1]))
    three = step(model, ids[[1, 0, 1]])(cache)
    assert_close(three[0], truth)
    assert_close(three[2], truth)
    cache.compress(12)
    end = cache.next_positions[0]
    if cache.layers[0].sliding_window is not None:
        with pytest.raises(UsageError, match="layer 0 has evicted tokens that its sliding window would see"):
            cache.drop(end - 3, end)
    cache.drop(end - 5, end - 2)
    assert step(model, text(9, rows=3))(cache).isfinite().all()
    assert [int((layer.positions >= 0).sum(-1).max()) for layer in cache.layers] == [11, 11, 12, 11]


@pytest.mark.parametrize("policy", [None, Recent(), H2O()], ids=repr)
@pytest.mark.parametrize("wanted", [0, 1, 3, 9])
def test_queries_that_nobody_asks_for_are_left_out(
    policy: Policy | None, wanted: int, plain_model: Models, attached_model: Models, text: Text
) -> None:
    """Gemma 4 takes the last columns alone through the layers that share."""
    model, ids = attached_model("gemma4_e"), text(TOKENS)
    caches = [KVCache(model, None if policy is None else BUDGET, policy, SINKS) for _ in range(2)]
    for piece in ids.split(9, 1):
        with torch.no_grad():
            logits = [
                model(piece, past_key_values=cache, logits_to_keep=keep).logits
                for cache, keep in zip(caches, (0, wanted), strict=True)
            ]
        assert_close(logits[1], logits[0][:, -wanted:])
    assert_same(held(caches[1]), held(caches[0]))
    if policy is None:
        assert_close(logits[0], one_shot(plain_model("gemma4_e"), ids)[:, -9:])


@each_family
@pytest.mark.parametrize("policy", [Recent(), Compactor(), windlass.policies.KVzip(8)], ids=repr)
def test_prompts_of_the_engine_equal_each_alone(
    family: str, policy: Policy, plain_model: Models, attached_model: Models, text: Text
) -> None:
    model, prompts = attached_model(family), [text(n, seed=n).tolist()[0] for n in (31, 13)]
    cache = KVCache(model, 60, policy, batch=2, chunk=8)
    logits = windlass.prefill(model, cache, prompts)
    for row, prompt in enumerate(prompts):
        assert_close(logits[row], one_shot(plain_model(family), torch.tensor([prompt]))[0, -1])


@pytest.mark.parametrize(
    "options",
    [
        {"store": "int4(sinks=2, newest=5)"},
        {"merge": "mean_count"},
        {"positions": "compact"},
        {"policy": "pyramid(snap_kv)"},
    ],
    ids=str,
)
def test_options_of_the_cache_work(options: dict[str, Any], attached_model: Models, text: Text) -> None:
    for family in FAMILIES:
        cache = KVCache(attached_model(family), BUDGET, **options)
        assert read(attached_model(family), cache, text(60), 13).isfinite().all()
        assert f"{OWN} layers" in cache.describe()


def test_a_trained_policy_is_refused(attached_model: Models) -> None:
    with pytest.raises(UsageError, match="layer 4 has no keys but those of layer 2"):
        KVCache(attached_model("gemma3n"), BUDGET, DMC())


@each_family
def test_bfloat16_is_no_worse_than_its_own_error(family: str, plain_model: Models, text: Text) -> None:
    ids = text(TOKENS)
    truth, low = one_shot(plain_model(family), ids), windlass.testing.tiny_model(family).bfloat16()
    own = (one_shot(low, ids).float() - truth).norm()
    low = windlass.attach(low)
    for chunk in (1, 7, TOKENS):
        assert (read(low, KVCache(low), ids, chunk).float() - truth).norm() <= 1.25 * own
