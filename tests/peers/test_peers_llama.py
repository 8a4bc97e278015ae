"""The behaviours that llama.cpp's KV tests and long-context examples demand, rewritten for ours.

A sequence is a row. `seq_rm` is `drop`, `seq_add` is `shift`, `seq_div` is `divide`, `seq_cp` is `copy` or `splice`,
`seq_keep` is `select_rows`. A slot is a row or a cache. Context shift, chunk reuse and group attention are in
`test_peers_llama_context`. Already shown elsewhere:

    test-backend-ops (attention)        test_kernels::test_attend_equals_loops, test_low_precision_stays_near_float64
    test-llama-archs                    test_families, test_prompt_cache::test_goes_on_in_every_kind_of_layer
    test-batch-alloc, gaps, decrease    test_hf::test_a_refused_call_changes_nothing[position_ids]
    test-save-load-state 4, seq_cp      test_edits::test_copy_makes_a_row_a_twin_that_then_goes_its_own_way
    seq_keep                            test_edits::test_rows_can_be_selected_and_repeated
    seq_add below 0 (theirs frees)      test_edits::test_edits_that_make_no_text_are_refused
    K-shift drift (no test of theirs)   test_edits::test_ten_thousand_shifts_leave_every_byte
    test_completion, batch size         test_engine::test_greedy_text_is_that_of_transformers
    test_completion, unified, ragged    test_engine::test_rows_of_a_batch_are_the_rows_alone
    test_speculative                    test_generate::test_assisted_decoding_equals_greedy
    test_speculative, context shift     test_generate::test_assisted_decoding_over_budget

Not ours: test-save-load-state 5 (caches on other devices), the splitting into micro-batches of test-batch-alloc, the
errors of a prompt longer than the slot (our texts may be longer than the memory).
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import windlass
from tests.helpers.caches import assert_holds, contents, held
from tests.helpers.models import Models, Text, greedy, read
from windlass import KVCache
from windlass.core.positions import rotate
from windlass.policies import H2O, Recent, SnapKV


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "llama_linear", "cohere", "glm4"])
def test_keys_turned_by_100_and_back_by_67_stand_at_33(
    plain_model: Models, attached_model: Models, text: Text, family: str
) -> None:
    """test-rope: rope at 100 + i, then by -67, equals rope at 33 + i, relative L1 below 1e-4.

    With ours the keys as they are read, after shifts by 100 and -67, equal transformers' own at 33 + i, in five kinds
    of rotation.
    """
    model, ids = attached_model(family), text(20)
    cache, theirs = KVCache(model), DynamicCache(config=plain_model(family).config)
    read(model, cache, ids, 6)
    cache.shift(0, 20, 100)
    cache.shift(100, 120, -67)
    assert cache.next_positions == [53]
    with torch.no_grad():
        plain_model(family)(ids, position_ids=torch.arange(33, 53)[None], past_key_values=theirs)
    for layer, truth in zip(cache.layers, theirs.layers, strict=True):
        order = layer.positions[0, 0].where(layer.positions[0, 0] >= 0, 2**30).argsort(stable=True)[:20]
        positions, keys, rotary = layer.positions[0, 0, order].long(), layer.store.keys()[:, :, order], layer.rotary
        assert rotary is not None
        cos, sin = rotary.tables(53, keys.device)
        turned = rotary.layout.from_halves(rotate(keys, cos[positions], sin[positions]), rotary.rotary_pairs)
        assert float((turned - truth.keys).abs().sum() / truth.keys.abs().sum()) < 1e-4


def test_one_row_removed_leaves_the_other_and_goes_on(attached_model: Models, text: Text) -> None:
    """test-save-load-state, 2: of two sequences one is removed.

    The bytes of the other are unchanged, it goes on as before, and the freed row reads a new text from position 0.
    """
    model, ids = attached_model("llama"), text(36, rows=2)
    cache, alone, fresh = (
        KVCache(model, 20, batch=2, policy=Recent()),
        KVCache(model, 20, policy=Recent()),
        KVCache(model, 20, policy=Recent()),
    )
    read(model, cache, ids[:, :30], 9)
    kept = [tensor.clone() for tensor in contents(cache, 1)]
    cache.drop(0, 30, row=0)
    assert (cache.next_positions, held(cache, row=0)) == ([0, 30], [[]])
    assert_holds(cache, kept, 1)
    read(model, alone, ids[1:, :30], 9)
    after = read(model, cache, ids[:, 30:], 1)
    torch.testing.assert_close(after[0], read(model, fresh, ids[:1, 30:], 1)[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(after[1], read(model, alone, ids[1:, 30:], 1)[0], atol=1e-5, rtol=0)


def test_a_file_and_its_last_token_again(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """test-save-load-state, 3: after a load the last token is replayed, and the same tokens follow."""
    model, ids = attached_model("llama"), text(23)
    cache = KVCache(model)
    read(model, cache, ids, 23)
    cache.save(tmp_path / "state")
    cache.rollback(1)
    expected = greedy(model, cache, ids[:, -1:], 16)
    loaded = KVCache.load(tmp_path / "state", model)
    loaded.rollback(1)
    assert greedy(model, loaded, ids[:, -1:], 16) == expected
    assert len(set(expected)) > 4, "a text that repeats itself shows nothing"


def test_a_row_is_restored_where_others_have_gone_on(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """test-state-restore-fragmented: three interleaved sequences of 70.

    One is saved, removed and, after the others went on, restored: every row then holds the same as without the
    interruption, and decodes so.
    """
    model, ids = attached_model("llama"), text(80, rows=3)
    cache, single = KVCache(model, batch=3), KVCache(model)
    read(model, cache, ids[:, :70], 7)
    single.splice(cache, 1)
    single.save(tmp_path / "row")
    cache.drop(5, 40, row=1)
    cache.drop(0, 70, row=1)
    others = torch.tensor([[1], [0], [1]])
    with torch.no_grad():
        for column in ids[:, 70:75].split(1, 1):
            model(column, attention_mask=others, past_key_values=cache)
    cache.splice(KVCache.load(tmp_path / "row", model), row=1)
    assert cache.next_positions == [75, 70, 75]
    after = read(model, cache, ids[:, 75:], 1)
    for row in range(3):
        alone = KVCache(model)
        read(model, alone, ids[row : row + 1, : 70 if row == 1 else 75], 7)
        expected = read(model, alone, ids[row : row + 1, 75:], 1)[0]
        torch.testing.assert_close(after[row], expected, atol=1e-5, rtol=0)
        assert_holds(cache, contents(alone), row, tolerance=1e-5)


def test_a_slot_is_saved_restored_elsewhere_and_erased(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """test_slot_save, test_kv_keep_only_active: a prompt of 21 and its continuation, 84 in all, is saved.

    Restored in another row, only a suffix of 6 is read. The original needs 1 token. Once erased, all 21 again.
    """
    model, prompt, suffix = attached_model("llama"), text(21), text(6, seed=1)
    slots = KVCache(model)
    first = read(model, slots, prompt, 21)[:, -1]
    greedy(model, slots, first.argmax(-1, keepdim=True), 62)
    assert slots.tokens is not None
    whole = slots.tokens[0]
    assert len(whole) == 84 == slots.tokens_seen[0]
    slots.save(tmp_path / "slot")
    other = KVCache(model, batch=2)
    other.splice(KVCache.load(tmp_path / "slot", model), row=1)
    assert other.tokens == [[], whole]
    with torch.no_grad():
        ours = model(suffix.expand(2, -1), attention_mask=torch.tensor([[0], [1]]).expand(-1, 6), past_key_values=other)
    truth = windlass.prefill(model, KVCache(model), [whole + suffix[0].tolist()])
    assert other.next_positions == [0, 90]
    torch.testing.assert_close(ours.logits[1, -1], truth[0], atol=1e-5, rtol=0)
    slots.rollback(1)
    again = read(model, slots, torch.tensor([whole[-1:]]), 1)[0, -1]
    torch.testing.assert_close(again, windlass.prefill(model, KVCache(model), [whole])[0], atol=1e-5, rtol=0)
    slots.reset()
    assert (slots.bytes_held, slots.tokens) == (0, [[]])
    torch.testing.assert_close(read(model, slots, prompt, 21)[:, -1], first, atol=0, rtol=0)


def test_rollback_by_3_then_a_file(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """test-recurrent-state-rollback: 3 tokens taken back, saved and restored, also over budget: logits within 1e-5
    of never having read them."""
    model, ids = attached_model("gemma3"), text(50)
    for budget in (None, 14):
        cache, never = (
            KVCache(model, budget, window=2, policy=Recent()),
            KVCache(model, budget, window=2, policy=Recent()),
        )
        for each in (cache, never):
            read(model, each, ids[:, :40], 8)
        read(model, cache, text(3, seed=1), 1)
        cache.rollback(3)
        cache.save(tmp_path / "cache")
        loaded = KVCache.load(tmp_path / "cache", model)
        ours, truth = (read(model, each, ids[:, 40:], 5) for each in (loaded, never))
        torch.testing.assert_close(ours, truth, atol=1e-5, rtol=0)


def test_caches_of_one_model_do_not_meet(attached_model: Models, text: Text) -> None:
    """test-thread-safety: several caches, and passes without one, take turns on one model.

    Here each text is that of a cache that had the model to itself.
    """
    model, ids = attached_model("llama"), text(33, rows=2)
    makes = [
        lambda: KVCache(model, batch=2),
        lambda: KVCache(model, 12, H2O(), window=2, batch=2),
        lambda: KVCache(model, 15, window=3, positions="compact", batch=2, policy=Recent()),
        lambda: KVCache(model, 14, SnapKV(observed_queries=3), window=3, positions="self_extend(3, 5)", batch=2),
    ]
    caches = [make() for make in makes]
    together: list[list[Tensor]] = [[] for _ in makes]
    for piece in ids.split([7, 1, 12, 1, 1, 9, 1, 1], 1):
        for cache, logits in zip(caches, together, strict=True):
            logits.append(read(model, cache, piece, piece.shape[1]))
            with torch.no_grad():
                model(text(40, seed=3))
    for make, logits in zip(makes, together, strict=True):
        alone = make()
        expected = [read(model, alone, piece, piece.shape[1]) for piece in ids.split([7, 1, 12, 1, 1, 9, 1, 1], 1)]
        assert torch.equal(torch.cat(logits, 1), torch.cat(expected, 1))
