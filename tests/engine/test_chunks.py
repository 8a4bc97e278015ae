"""Parts read once and joined in any order, against a text that is read anew, and against transformers itself."""

from itertools import permutations

import pytest
import torch

import windlass
from tests.helpers.joined import ORDER, SIZES, divergence, fresh, ids_of, joined, joined_by_hand, slots_in_order, texts
from tests.helpers.models import Models
from windlass import CacheOptions, KVCache, chunks
from windlass.testing import tiny_model

MODES = ("none", "first(1)", "first(4)", "divergent(0.3)", "all")
FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "deepseek_v3", "gpt_oss", "gemma3n", "mistral", "llama4", "smollm3")


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_a_fresh_prefill(attached_model: Models, family: str) -> None:
    model, (*own, question) = attached_model(family), texts(3, (*SIZES, 5))
    parts = [chunks.encode(model, own[at]) for at in ORDER]
    for options in (CacheOptions(), CacheOptions(chunk=13)):
        cache, done = joined(model, parts, "all", options)
        assert (done.tokens, len(done.recomputed)) == (80, 49)  # the first part needs nothing
        truth = fresh(model, ids_of(parts), question, options)
        torch.testing.assert_close(windlass.prefill(model, cache, [question]), truth, atol=3e-5, rtol=0)
    none, _ = joined(model, parts, "none")
    if family != "mistral":  # two layers of windows of 11 tokens see the last part alone
        assert divergence(truth, windlass.prefill(model, none, [question])) > 1e-3


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("tokens", [0, 1, 4, 16])
def test_first_is_transformers_own_pass_with_tokens_written_over(
    plain_model: Models, attached_model: Models, family: str, tokens: int
) -> None:
    *own, question = texts(4, (*SIZES, 5))
    ordered = [own[at] for at in ORDER]
    parts = [chunks.encode(attached_model(family), each) for each in ordered]
    cache, done = joined(attached_model(family), parts, f"first({tokens})" if tokens else "none")
    starts = (31, 54, 63)
    again = [
        place
        for start, size in zip(starts, (23, 9, 17), strict=True)
        for place in range(start, start + min(tokens, size))
    ]
    assert list(done.recomputed) == again
    truth = joined_by_hand(plain_model(family), ordered, again, question)[-1]
    ours = windlass.prefill(attached_model(family), cache, [question])[0]
    torch.testing.assert_close(ours, truth, atol=5e-5, rtol=0)


@pytest.mark.parametrize("mode", ["none", "first(8)", "divergent(0.3)", "all"])
@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
def test_the_first_layer_is_that_of_a_fresh_prefill(mode: str, store: str) -> None:
    """Its keys and values depend on the token alone, so no mode may change a bit of them.

    With PyTorch's linear layers, and no pass of very few tokens: these are rounded otherwise.
    """
    model, own = windlass.attach(tiny_model("llama"), own_linear=False), texts(5)
    options = CacheOptions(store=store)
    parts = [chunks.encode(model, own[at], options) for at in ORDER]
    cache, _ = joined(model, parts, mode, options)
    whole = KVCache.from_options(model, options)
    windlass.prefill(model, whole, [ids_of(parts)])
    for (name, ours), truth in zip(slots_in_order(cache, 0).items(), slots_in_order(whole, 0).values(), strict=True):
        assert ours.equal(truth), name


@pytest.mark.slow
def test_divergence_falls_as_more_is_read_again(attached_model: Models) -> None:
    model, means = attached_model("llama"), []
    for mode in ("none", "first(2)", "first(6)", "first(16)", "first(31)"):
        found = []
        for seed in range(12):
            *own, question = texts(seed, (*SIZES, 5))
            parts = [chunks.encode(model, each) for each in own]
            cache, _ = joined(model, parts, mode)
            found.append(divergence(fresh(model, ids_of(parts), question), windlass.prefill(model, cache, [question])))
        means.append(sum(found) / len(found))
    assert means == sorted(means, reverse=True)
    assert means[-1] < 1e-9 < 1e-2 < means[0]


def test_any_order_is_its_own_fresh_prefill(attached_model: Models) -> None:
    model, (*own, question) = attached_model("qwen3"), texts(6, (14, 7, 9, 3))
    encoded = [chunks.encode(model, each) for each in own]
    answers = []
    for order in permutations(range(3)):
        parts = [encoded[at] for at in order]
        cache, _ = joined(model, parts, "all")
        answers.append(windlass.prefill(model, cache, [question]))
        assert cache.tokens == [ids_of(parts) + question]
        torch.testing.assert_close(answers[-1], fresh(model, ids_of(parts), question), atol=2e-5, rtol=0)
    assert all((answers[0] - other).abs().max() > 1e-2 for other in answers[1:])


@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_one_part_alone_is_fresh_to_the_bit(attached_model: Models, family: str, store: str) -> None:
    model, (own, question) = attached_model(family), texts(7, (41, 18))
    options = CacheOptions(store=store)
    cache, done = joined(model, [chunks.encode(model, own, options)], "none", options)
    assert (done.recomputed, done.spans) == ((), ((0, 41),))
    whole = KVCache.from_options(model, options)
    windlass.prefill(model, whole, [own])
    for layer in range(len(whole.layers)):
        held = slots_in_order(whole, layer)
        count = held["positions"].shape[-1]
        assert all(slots_in_order(cache, layer)[name][:, :, -count:].equal(each) for name, each in held.items())
    truth = windlass.prefill(model, whole, [question])
    ours = windlass.prefill(model, cache, [question])
    if family == "gemma2":  # a layer with a window has the part whole until the question comes: in other slots
        torch.testing.assert_close(ours, truth, atol=1e-6, rtol=1e-5)
    else:
        assert ours.equal(truth)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_later_part_changes_no_earlier_row(attached_model: Models, mode: str) -> None:
    """A token that is read again sees nothing that stands behind it."""
    model, own, other = attached_model("llama"), texts(8), texts(9)
    held = []
    for last in (own[3], other[3]):
        parts = [chunks.encode(model, each) for each in (*own[:3], last)]
        chosen = mode if mode != "divergent(0.3)" else "first(7)"  # which tokens diverge is told by all of them
        cache, _ = joined(model, parts, chosen)
        held.append([slots_in_order(cache, layer) for layer in range(2)])
    for one, two in zip(*held, strict=True):
        for name, ours in one.items():
            assert ours[:, :, :71].equal(two[name][:, :, :71]) if ours.ndim == 4 else True, name
            assert ours.ndim < 4 or not ours[:, :, 71:].equal(two[name][:, :, 71:])


@pytest.mark.parametrize("store", ["int8", "int4"])
def test_a_join_rounds_nothing(store: str) -> None:
    """Codes and scales are copied, wherever they go: encoding decoded bfloat16 values again would change them."""
    model, own = windlass.attach(tiny_model("llama").bfloat16()), texts(10)
    options = CacheOptions(store=store)
    parts = [chunks.encode(model, each, options) for each in own]
    cache, done = joined(model, [parts[at] for at in ORDER], "none", options)
    for layer in range(2):
        ours = slots_in_order(cache, layer)
        for at, (start, stop) in zip(ORDER, done.spans, strict=True):
            alone = slots_in_order(parts[at].cache, layer)
            assert (ours["positions"][..., start:stop] - start).equal(alone.pop("positions"))
            assert all(ours[name][:, :, start:stop].equal(each) for name, each in alone.items())


@pytest.mark.parametrize("store", ["plain", "int8"])
def test_a_shift_far_away_changes_no_bit(attached_model: Models, store: str) -> None:
    model, (*own, question) = attached_model("qwen3"), texts(11, (*SIZES, 18))
    options = CacheOptions(store=store, positions="compact")
    parts = [chunks.encode(model, each, options) for each in own]
    near, _ = joined(model, parts, "none", options)
    far = KVCache.from_options(model, options)
    chunks.join(model, far, parts[:1])
    far.shift(0, len(parts[0]), 10**6)
    done = chunks.join(model, far, parts[1:])
    assert done.spans[0] == (10**6 + 23, 10**6 + 40)
    for layer in range(2):
        one, two = slots_in_order(near, layer), slots_in_order(far, layer)
        assert (one.pop("positions") + 10**6).equal(two.pop("positions"))
        assert all(each.equal(two[name]) for name, each in one.items())
    assert windlass.prefill(model, near, [question]).equal(windlass.prefill(model, far, [question]))


def test_the_ids_of_parts_are_those_of_the_text(attached_model: Models) -> None:
    model, own = attached_model("llama"), texts(12)
    prefix = [5, 9, 11]
    parts = [chunks.encode(model, prefix), *(chunks.encode(model, each, prefix=prefix) for each in own)]
    cache, done = joined(model, parts, "first(4)")
    whole = KVCache(model)
    windlass.prefill(model, whole, [prefix + [token for each in own for token in each]])
    assert ids_of(parts) == prefix + [token for each in own for token in each]
    assert (cache.tokens, cache.tokens_seen, cache.next_positions) == (whole.tokens, [83], [83])
    assert [len(part) for part in parts] == [3, *SIZES]
    # A part that follows its own prefix is exact, so it is not read again.
    assert done.recomputed == (*range(26, 30), *range(43, 47), *range(74, 78))


def test_a_prefix_is_seen_and_not_kept(attached_model: Models) -> None:
    """A part that follows its prefix is the text read anew, wherever else it may go."""
    model, (prefix, own, question) = attached_model("phi3"), texts(13, (6, 29, 4))
    first, second = chunks.encode(model, prefix), chunks.encode(model, own, prefix=prefix)
    cache, done = joined(model, [first, second], "all")
    assert done.recomputed == ()
    truth = fresh(model, prefix + own, question)
    torch.testing.assert_close(windlass.prefill(model, cache, [question]), truth, atol=2e-5, rtol=0)
    alone, done = joined(model, [second], "all")
    assert done.recomputed == tuple(range(29))
    torch.testing.assert_close(
        windlass.prefill(model, alone, [question]), fresh(model, own, question), atol=2e-5, rtol=0
    )


def test_a_token_that_begins_a_text_is_always_read_again(attached_model: Models) -> None:
    model, own = attached_model("llama"), [[1, 7, 8, 9], [1, 4, 5], [6, 1, 3]]
    parts = [chunks.encode(model, each) for each in own]
    config = model.config
    config.bos_token_id = 1
    try:
        assert [joined(model, parts, mode)[1].recomputed for mode in ("none", "first(2)")] == [(4,), (4, 5, 7, 8)]
    finally:
        config.bos_token_id = None
    assert joined(model, parts, "none")[1].recomputed == ()


def test_divergent_reads_the_tokens_again_that_differ_most(plain_model: Models, attached_model: Models) -> None:
    """The second layer's values of the parts alone, and of the whole text, by transformers itself."""
    model, own = attached_model("gemma2"), texts(14)
    parts = [chunks.encode(model, own[at]) for at in ORDER]
    _, done = joined(model, parts, "divergent(0.2)")
    values = []
    for pieces in ([own[at] for at in ORDER], [ids_of(parts)]):
        states = []
        for piece in pieces:
            with torch.no_grad():
                out = plain_model("gemma2")(torch.tensor([piece]), use_cache=True)
            states.append(out.past_key_values.layers[1].values)
        values.append(torch.cat(states, 2))
    distances = (values[1] - values[0]).square().sum((0, 1, 3))
    assert set(done.recomputed) == set(distances.argsort(descending=True)[:16].tolist())
    assert len(done.recomputed) == 16
