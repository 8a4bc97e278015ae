"""Positions in llama.cpp for texts longer than the context: context shift, chunk reuse, group attention.

On a model of one layer every edit is exact, so each is compared with transformers reading the remaining text at its new
positions. The tests of rows and files are in `test_peers_llama`.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import windlass
from tests.helpers import models
from tests.helpers.caches import assert_holds, contents, held
from tests.helpers.models import Models, Text, logits_at, read
from windlass import KVCache
from windlass.policies import Recent

MODEL = Path(windlass.__file__).parent / "assets" / "finder-3m"
Pair = tuple[PreTrainedModel, PreTrainedModel]
one_layer = models.one_layer  # fixture


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts share at their starts."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@pytest.mark.parametrize(("n_keep", "n_discard", "end"), [(0, 0, 195), (4, 0, 197), (32, 0, 211), (4, 10, 252)])
def test_context_shift(one_layer: Pair, text: Text, n_keep: int, n_discard: int, end: int) -> None:
    """test_ctx_shift: a prompt of 226 and 96 more in 256.

    When full, n_discard tokens (half of the rest) after the first n_keep go and the others move down. The remaining
    text is then read.
    """
    plain, attached = one_layer
    ids = text(226 + 96)[0].tolist()
    cache, left = KVCache(attached), ids[:226]
    read(attached, cache, torch.tensor([left]), 64)
    for token in ids[226:]:
        if len(left) + 1 >= 256:
            n = n_discard or (len(left) - n_keep) // 2
            cache.drop(n_keep, n_keep + n)
            cache.shift(n_keep + n, len(left), -n)
            del left[n_keep : n_keep + n]
        ours = read(attached, cache, torch.tensor([[token]]), 1)[0, 0]
        left.append(token)
    assert (cache.next_positions, cache.tokens_seen, len(left)) == ([end], [322], end)
    assert held(cache) == [list(range(end))]
    torch.testing.assert_close(ours, logits_at(plain, left, [*range(end)]), atol=1e-5, rtol=0)


def test_keep_4_discard_1_is_recent_under_compact(attached_model: Models, text: Text) -> None:
    """Context shift with --keep 4 and n_discard 1 equals StreamingLLM: our `Recent` with 4 sinks, read compactly."""
    model, ids = attached_model("llama"), text(70)
    shifted, recent = KVCache(model), KVCache(model, budget=20, sinks=4, window=1, positions="compact", policy=Recent())
    for at, token in enumerate(ids.split(1, 1)):
        ours, truth = (read(model, cache, token, 1) for cache in (recent, shifted))
        torch.testing.assert_close(ours, truth, atol=1e-5, rtol=0)
        if at >= 20:
            shifted.drop(4, 5)
            shifted.shift(5, 21, -1)
    assert held(shifted) == [list(range(20))]
    assert held(recent) == [[0, 1, 2, 3, *range(54, 70)]]


@pytest.mark.parametrize(("least", "reused"), [(0, 6), (1, 17), (4, 17), (5, 13), (8, 6)])
def test_chunks_are_reused(one_layer: Pair, least: int, reused: int) -> None:
    """--cache-reuse N: from A B C x D to A C D Y.

    N=0 keeps A. N up to the shorter of C and D moves both left by drop and shift. N above D's length loses D, above C's
    both. The rest is read anew.
    """
    plain, attached = one_layer
    a, b, c, x, d, y = (list(part) for part in torch.arange(30).split([6, 5, 7, 3, 4, 5]))
    old, new = (torch.stack(parts).tolist() for parts in (a + b + c + x + d, a + c + d + y))
    cache = KVCache(attached)
    read(attached, cache, torch.tensor([old]), 30)
    done = was = common(old, new)
    while least and was < len(old):
        match = common(old[was:], new[done:])
        if match < least:
            was += 1
            continue
        cache.drop(done, was)
        cache.shift(was, was + match, done - was)
        done, was = done + match, was + match
    cache.drop(done, len(old))
    assert (done, cache.next_positions, held(cache)) == (reused, [reused], [list(range(reused))])
    ours = read(attached, cache, torch.tensor([new[done:]]), 3)[0, -1]
    torch.testing.assert_close(ours, logits_at(plain, new, [*range(22)]), atol=1e-5, rtol=0)


def test_alternating_prompts_reuse_their_prefix(attached_model: Models, text: Text) -> None:
    """test_completion, prompt cache: over 16 prompts in turn, tokens kept and tokens read add up to the prompt, and
    the text is that of an empty cache."""
    model, cache = attached_model("llama"), KVCache(attached_model("llama"))
    shared = text(24)[0].tolist()
    prompts = [shared + text(9, seed=1)[0].tolist(), shared[:17] + text(21, seed=2)[0].tolist()]
    expected = [windlass.prefill(model, KVCache(model), [prompt]) for prompt in prompts]
    kept = []
    for turn in range(16):
        prompt = prompts[turn % 2]
        assert cache.tokens is not None
        prefix = common(cache.tokens[0], prompt[:-1])
        cache.rollback(cache.tokens_seen[0] - prefix)
        ours = windlass.prefill(model, cache, [prompt[prefix:]])
        assert cache.tokens == [prompt]
        torch.testing.assert_close(ours, expected[turn % 2], atol=1e-5, rtol=0)
        kept.append(prefix)
    assert kept == [0] + [17] * 15


def test_part_of_a_row_is_copied(one_layer: Pair, text: Text) -> None:
    """seq_cp with a range: the other row holds just these tokens, at their positions. The source keeps every byte."""
    plain, attached = one_layer
    ids = text(21, rows=2)
    cache = KVCache(attached, batch=2)
    read(attached, cache, ids[:, :20], 20)
    kept = [tensor.clone() for tensor in contents(cache)]
    cache.copy(0, 1)
    cache.keep(6, 15, row=1)
    assert (held(cache, row=1), cache.next_positions) == ([list(range(6, 15))], [20, 15])
    assert_holds(cache, kept)
    ours = read(attached, cache, ids[:1, 20:].expand(2, -1), 1)[1, 0]
    truth = logits_at(plain, ids[0, [*range(6, 15), 20]].tolist(), [*range(6, 16)])
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=0)


def test_group_attention_of_the_passkey_example(one_layer: Pair, text: Text) -> None:
    """passkey.cpp, G=4, batch 8, 32 tokens: positions 0000 1111 ... 5555 6 7 ... 13, and attention at these."""
    plain, attached = one_layer
    ids, cache = text(33), KVCache(attached)
    for i in range(0, 32, 8):
        if i:
            (past,), ahead = cache.next_positions, (i // 8 - 1) * 6
            cache.shift(past - 8, past, ahead)
            cache.divide(past - 8 + ahead, past + ahead, 4)
        read(attached, cache, ids[:, i : i + 8], 8)
    positions = [i // 4 for i in range(24)] + [*range(6, 14)]
    assert (held(cache), cache.next_positions) == ([positions], [14])
    ours = read(attached, cache, ids[:, 32:], 1)[0, 0]
    torch.testing.assert_close(ours, logits_at(plain, ids[0].tolist(), [*positions, 14]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("n", "w"), [(2, 8), (4, 8), (3, 6)])
def test_group_attention_of_the_server(one_layer: Pair, text: Text, n: int, w: int) -> None:
    """--grp-attn-n, --grp-attn-w: tokens one by one.

    Those below the moving border stand at i // n, the others follow step by step, without a gap, and attention is at
    these positions.
    """
    plain, attached = one_layer
    ids, cache, border = text(41)[0].tolist(), KVCache(attached), 0
    for at, token in enumerate(ids):
        (past,) = cache.next_positions
        while past >= border + w:
            ahead = n * border // w * (w // n) * (n - 1)
            cache.shift(border, past, ahead)
            cache.divide(border + ahead, border + ahead + w, n)
            cache.shift(border + ahead + w, past + ahead, w // n - ahead - w)
            border += w // n
            past -= w // n * (n - 1)
            assert cache.next_positions == [past]
        ours = read(attached, cache, torch.tensor([[token]]), 1)[0, 0]
        grouped = border * n
        positions = [i // n if i < grouped else border + i - grouped for i in range(at + 1)]
        assert held(cache) == [positions]
    assert grouped > 2 * w
    torch.testing.assert_close(ours, logits_at(plain, ids, positions), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_pass_key_is_found_in_groups_of_8_and_not_of_2() -> None:
    """passkey.feature: a text of six times the trained length with the key in its first fifth.

    Enough grouping must answer with the key, too little must not.
    """
    model = windlass.attach(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(MODEL, model_max_length=10**9)
    junk = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    before = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz"
    before += " you about the important information there."
    hidden = " The pass key is 40217. Remember it. 40217 is the pass key."
    ids = tokenizer(before + junk * 40 + hidden + junk * 160)["input_ids"]
    answers = {}
    for mode in ("self_extend(2, 64)", "self_extend(8, 64)"):
        cache = KVCache(model, positions=mode)
        windlass.prefill(model, cache, [ids])
        (result,) = windlass.generate(model, tokenizer, [" What is the pass key? The pass key is"], cache, 6)
        answers[mode] = result.text.strip().startswith("40217")
    assert len(ids) > 5 * 1024
    assert answers == {"self_extend(2, 64)": False, "self_extend(8, 64)": True}
