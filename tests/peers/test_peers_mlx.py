"""The behaviours that mlx-lm's own cache tests demand, rewritten for ours.

A ring of `max_size` with `keep` is our budget with sinks under `Recent`: the tokens at rest are the same, and a query
sees them beside itself. `trim` is `rollback`. `merge` and `extend` are `splice`. `filter` and `extract` are
`select_rows`. Of their behaviours 32 apply: 19 in the docstrings here and in `test_peers_mlx_masks`, and 13 that are
shown elsewhere:

    test_prompt_cache.py
      test_save_load_mixed_cache                 test_prompt_cache::test_goes_on_in_every_kind_of_layer[gemma2]
      test_save_load_batch_caches                test_prompt_cache::test_goes_on_after_eviction, which goes on, too
      test_cache_with_generate                   test_generate::test_a_second_turn_equals_a_fresh_run
    test_models.py
      test_kv_cache                              test_cache::test_an_unbounded_cache_grows_geometrically
      test_causal_mask_padding                   test_families::test_row_of_ragged_batch_equals_row_alone
      test_llama_model_sliding_attention         test_families::test_room_for_all_equals_transformers[mistral]
    test_generate.py
      test_batch_matches_single                  test_engine::test_rows_of_a_batch_are_the_rows_alone
      test_batch_sliding_window                  test_cache::test_a_ragged_row_equals_the_row_alone
      test_batch_continued_generation            test_engine::test_rows_of_a_batch_are_the_rows_alone, second turn
      test_stream_generate_speculative           test_generate::test_assisted_decoding_equals_greedy, .._over_budget
      per-row samplers and stop matchers         test_engine::test_rows_of_a_batch_are_the_rows_alone[sampled]
      test_batch_max_kv_size_*                   test_cache::test_budget_sinks_and_window_hold

Not ours: `..._quantized_cache`, `test_cache_to_quantized`, `test_quantized_sdpa_*` (the store is plain).
`..._arrays_cache` and `test_arrays_cache_*` (recurrent models are refused, and so is Llama 4's
`test_llama4_chunked_kv_cache`). `test_save_load_cache_list` (a layer holds one cache, never a list).
`test_many_batches`, `test_batch_unique_max_toks`, `test_remove_prompt_*` (a scheduler of requests).
`TestLRUPromptCache`, `TestKeepalive` (a server).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import windlass
from tests.helpers.caches import assert_holds, contents
from tests.helpers.models import Models, Text, greedy, read
from windlass import KVCache, Sampling, UsageError
from windlass.policies import Recent

MODEL = Path(windlass.__file__).parent / "assets" / "finder-3m"


@pytest.mark.parametrize("budget", [None, 8])
def test_a_file_gives_back_every_byte(attached_model: Models, text: Text, tmp_path: Path, budget: int | None) -> None:
    """test_save_load, test_save_load_rotating_cache: keys, values and limits come back as they were, also
    after two rotations (8 slots, 2 kept), and the next update leaves both caches alike."""
    model, ids = attached_model("llama"), text(34)
    cache = KVCache(model, budget, sinks=2, window=1, policy=Recent())
    read(model, cache, ids[:, :24], 4)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    assert (loaded.tokens_seen, loaded.limits) == ([24], cache.limits)
    assert contents(loaded)[0].tolist() == (list(range(24)) if budget is None else [0, 1, *range(18, 24)])
    assert_holds(loaded, contents(cache))
    after = [read(model, each, ids[:, 24:], 5) for each in (cache, loaded)]
    torch.testing.assert_close(*after, atol=1e-5, rtol=0)
    assert_holds(loaded, contents(cache), tolerance=1e-5)


def test_a_trim_is_whole_or_refused(attached_model: Models, text: Text) -> None:
    """test_trim_cache: of 10 tokens 7 go.

    Where theirs then answers a wish for 4 with 3, ours refuses and keeps the 3. A cache of 6 with 5 gives up 4. After
    10 more theirs gives none, ours the newest exactly.
    """
    model, ids = attached_model("llama"), text(30)
    cache, twin = KVCache(model), KVCache(model, budget=6, sinks=2, window=1, policy=Recent())
    read(model, cache, ids[:, :10], 10)
    kept = [tensor[:3] if tensor.ndim == 1 else tensor[:, :3] for tensor in contents(cache)]
    cache.rollback(7)
    with pytest.raises(UsageError, match="rollback of 4 tokens, but row 0 is at position 3"):
        cache.rollback(4)
    assert_holds(cache, kept)
    for most, is_refused in ((16, False), (0, True)):
        ring = KVCache(model, budget=6, sinks=2, window=1, rollback=most, policy=Recent())
        read(model, ring, ids[:, :5], 5)
        ring.rollback(4)
        assert contents(ring)[0].tolist() == [0]
        twin.reset()
        read(model, twin, ids[:, :1], 1)
        read(model, twin, ids[:, 1:7], 1)
        read(model, ring, ids[:, 1:11], 1)
        assert contents(ring)[0].tolist() == [0, 1, 7, 8, 9, 10]
        before = contents(ring)
        if is_refused:
            with pytest.raises(UsageError, match="rollback of 4 tokens is more than"):
                ring.rollback(4)
            assert_holds(ring, before)
        else:
            ring.rollback(4)
            assert_holds(ring, contents(twin), tolerance=1e-5)


def test_one_layer_that_cannot_trim_keeps_all(attached_model: Models, text: Text) -> None:
    """test_trim_cache, mixed: where one kind of layer cannot give tokens back, no layer does."""
    model = attached_model("gemma3")
    cache = KVCache(model, rollback=0)
    read(model, cache, text(30), 10)
    before = contents(cache)
    assert [before[0].tolist(), before[3].tolist()] == [list(range(19, 30)), list(range(30))]
    with pytest.raises(UsageError, match="rollback of 11 tokens is more than layer 0"):
        cache.rollback(11)
    assert cache.next_positions == [30]
    assert_holds(cache, before)


def test_a_copy_keeps_what_the_other_overwrites(attached_model: Models, text: Text) -> None:
    """test_cache_copying: trim and append on one of two copies leaves slot 10 of the other alone."""
    model, ids = attached_model("llama"), text(12, rows=2)
    cache = KVCache(model, batch=2)
    read(model, cache, ids[:, :11], 11)
    kept = [tensor.clone() for tensor in contents(cache)]
    cache.copy(0, 1)
    cache.rollback([1, 0])
    with torch.no_grad():
        model(ids[:, 11:], attention_mask=torch.tensor([[1], [0]]), past_key_values=cache)
    assert cache.next_positions == [11, 11]
    assert_holds(cache, kept, 1)
    assert not contents(cache, 0)[1][:, 10].equal(kept[1][:, 10])


def test_a_trimmed_cache_writes_the_same_again(attached_model: Models, text: Text) -> None:
    """test_trim_cache_with_generate: after a rollback of 3 the same 3 tokens follow, also over budget."""
    model, ids = attached_model("llama"), text(9)
    for budget in (None, 6):
        cache = KVCache(model, budget, window=1, policy=Recent())
        written = greedy(model, cache, ids, 8)
        cache.rollback(3)
        assert cache.next_positions == [14]
        cache.rollback(1)
        assert greedy(model, cache, torch.tensor([[written[4]]]), 3) == written[5:]


@pytest.mark.parametrize(("sinks", "first"), [(0, 1), (2, 20)])
def test_a_single_write_touches_one_slot(attached_model: Models, text: Text, sinks: int, first: int) -> None:
    """test_rotating_kv_cache: a ring of 8, alone or with keep=2 after 20 tokens, then tokens one by one (21 to 30
    are counted): theirs cycles through slots, ours overwrites the bytes of one free slot and moves none."""
    model, ids = attached_model("llama"), text(31)
    cache = KVCache(model, budget=8, sinks=sinks, window=1, policy=Recent())
    read(model, cache, ids[:, :first], first)
    read(model, cache, ids[:, first : first + 1], 1)
    for at in range(first + 1, 30):
        slots = [{p: i for i, p in enumerate(layer.positions[0, 0].tolist()) if p >= 0} for layer in cache.layers]
        keys = [layer.store.keys().clone() for layer in cache.layers]
        read(model, cache, ids[:, at : at + 1], 1)
        assert cache.tokens_seen == [at + 1]
        for layer, before, old in zip(cache.layers, slots, keys, strict=True):
            now = {p: i for i, p in enumerate(layer.positions[0, 0].tolist()) if p >= 0}
            assert sorted(now) == sorted({*range(sinks), *range(max(at + 1 - 8 + sinks, 0), at + 1)})
            assert all(now[p] == before[p] for p in now if p != at)
            changed = (layer.store.keys() != old).any(-1)[0, 0].nonzero()[:, 0].tolist()
            assert changed == [now[at]]
            assert now[at] not in before.values()


@pytest.mark.parametrize("budget", [None, 4])
def test_rows_are_filtered_and_joined(attached_model: Models, text: Text, budget: int | None) -> None:
    """test_batch_kv_cache, test_batch_rotating_kv_cache: two rows are kept, others join, and the five then stand at 6,
    7, 6, 1, 4. No padding is held, and decode and another ragged prompt are those of each row alone.
    """
    model, lengths = attached_model("llama"), (6, 7, 6, 1, 4)
    prompts = [text(n, seed=i)[0].tolist() for i, n in enumerate(lengths)]
    more = [text(n, seed=20 + i)[0].tolist() for i, n in enumerate((2, 5, 1, 9, 3))]
    limits: dict[str, Any] = {"budget": budget, "sinks": 1, "window": 1, "policy": Recent()}
    first, second = KVCache(model, **limits, batch=3), KVCache(model, **limits, batch=3)
    windlass.prefill(model, first, [prompts[1], prompts[0] * 2, prompts[0]])
    windlass.prefill(model, second, prompts[2:])
    first.select_rows(torch.tensor([2, 0]))
    joined = KVCache(model, **limits, batch=5)
    for row in range(5):
        joined.splice(*((first, row) if row < 2 else (second, row - 2)), row)
    assert joined.next_positions == joined.tokens_seen == list(lengths)
    assert [len(contents(joined, row)[0]) for row in range(5)] == [min(n, budget or n) for n in lengths]
    alone = [KVCache(model, **limits) for _ in range(5)]
    for one, prompt in zip(alone, prompts, strict=True):
        windlass.prefill(model, one, [prompt])
    ids = text(3, rows=5, seed=40)
    together = [read(model, joined, ids, 1)[:, -1], windlass.prefill(model, joined, more)]
    for row, one in enumerate(alone):
        own = [read(model, one, ids[row : row + 1], 1)[:, -1], windlass.prefill(model, one, [more[row]])]
        for ours, theirs in zip(together, own, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], atol=1e-5, rtol=0)
        assert_holds(joined, contents(one), row, tolerance=1e-5)


def test_empty_caches_join(attached_model: Models, text: Text) -> None:
    """test_merge_with_empty_caches, test_extend_with_empty_and_nonempty_batch_caches: to or from an empty
    cache nothing is lost, nothing appears, and every row goes on where it stood."""
    model, ids = attached_model("llama"), text(12)
    full = KVCache(model)
    read(model, full, ids[:, :7], 7)
    kept = [tensor.clone() for tensor in contents(full)]
    full.splice(KVCache(model))
    assert full.next_positions == [7]
    assert_holds(full, kept)
    nothing = KVCache(model, batch=2)
    nothing.splice(KVCache(model), row=1)
    nothing.select_rows(torch.tensor([1, 0]))
    assert (nothing.next_positions, nothing.bytes_held) == ([0, 0], 0)
    nothing.splice(full, row=1)
    assert nothing.next_positions == [0, 7]
    assert len(contents(nothing, 0)[0]) == 0
    assert_holds(nothing, kept, 1)
    both = read(model, nothing, ids[:, 7:].expand(2, -1), 5)
    for row, truth in enumerate((KVCache(model), full)):
        torch.testing.assert_close(both[row], read(model, truth, ids[:, 7:], 5)[0], atol=1e-5, rtol=0)


def test_merge_then_extract_is_lossless(attached_model: Models, text: Text) -> None:
    """test_cache_list: caches that become rows of one and are taken out again are unchanged."""
    model = attached_model("gemma3")
    singles = [KVCache(model, budget=14, window=2, policy=Recent()) for _ in range(3)]
    merged = KVCache(model, budget=14, window=2, batch=3, policy=Recent())
    for row, (single, tokens) in enumerate(zip(singles, (5, 30, 13), strict=True)):
        read(model, single, text(tokens, seed=row), 6)
        merged.splice(single, row=row)
    for row in (2, 0, 1):
        extracted = KVCache(model, budget=14, window=2, policy=Recent())
        extracted.splice(merged, row)
        assert_holds(extracted, contents(singles[row]))
        assert (extracted.next_positions, extracted.tokens) == (singles[row].next_positions, singles[row].tokens)
    merged.select_rows(torch.tensor([1]))
    assert merged.next_positions == merged.tokens_seen == [30]
    assert_holds(merged, contents(singles[1]))


def test_embeddings_read_as_their_tokens(attached_model: Models, text: Text) -> None:
    """test_stream_generate_input_embeddings_prefill: a prompt given as embeddings, in chunks, over budget."""
    model, ids = attached_model("llama"), text(25)
    caches = [KVCache(model, budget=10, window=2, policy=Recent()) for _ in range(2)]
    read(model, caches[0], ids[:, :20], 6)
    with torch.no_grad():
        for piece in model.get_input_embeddings()(ids[:, :20]).split(6, 1):
            model(inputs_embeds=piece, past_key_values=caches[1])
    assert_holds(caches[1], contents(caches[0]))
    assert torch.equal(read(model, caches[1], ids[:, 20:], 5), read(model, caches[0], ids[:, 20:], 5))


def test_processors_see_the_prompt_from_the_first_token() -> None:
    """..._processor_tokens_match_prompt_on_first_step: a repetition penalty counts the prompt from the start, as
    in transformers, and its first token is another than without."""
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompt = "The grass is green. The sky is blue. The grass is green. The sky is"
    inputs = tokenizer(prompt, return_tensors="pt")
    options = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.9}
    truth = plain.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()
    model = windlass.attach(plain)
    (ours,) = windlass.generate(model, tokenizer, [prompt], max_tokens=12, sampling=Sampling(repetition_penalty=1.9))
    assert ours.tokens == truth
    (free,) = windlass.generate(model, tokenizer, [prompt], max_tokens=1)
    assert free.tokens[0] != truth[0]
