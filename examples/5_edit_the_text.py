"""Edits of a text that was already read: integers change, keys and values never do."""

from pathlib import Path

import torch

import windlass

model, tokenizer = windlass.load(Path(windlass.__file__).parent / "assets" / "finder-3m", "float32")
QUESTION = " What is the pass key? The pass key is"


def read(text: str, is_start: bool = True) -> windlass.KVCache:
    """A new cache that has read `text`."""
    cache = windlass.KVCache(model)
    windlass.prefill(model, cache, [tokenizer(text, add_special_tokens=is_start)["input_ids"]])
    return cache


def answer(cache: windlass.KVCache) -> str:
    """What the model says now; the cache is afterwards as it was before."""
    seen = cache.tokens_seen[0]
    [result] = windlass.generate(model, tokenizer, [QUESTION], cache, max_tokens=6)
    cache.rollback(cache.tokens_seen[0] - seen)
    return result.text


first = " The pass key is 48213. Remember it. 48213 is the pass key."
second = " The grass is green. The sky is blue. The sun is yellow."
cache = read(first)
print("read", repr(first), "->", answer(cache))

end = cache.next_positions[0]
cache.splice(read(second, is_start=False))
print("splice", repr(second), "->", answer(cache))

cache.shift(end, cache.next_positions[0], by=100)
print("shift it away by 100 positions ->", answer(cache))

before = cache.layers[0].store.keys().clone()
for _ in range(500):
    cache.shift(end + 100, cache.next_positions[0], by=7)
    cache.shift(end + 107, cache.next_positions[0], by=-7)
same = torch.equal(before, cache.layers[0].store.keys())
print(f"shift there and back 500 times: every byte of the keys unchanged: {same}")

cache.drop(1, end)
print("drop the sentence with the pass key ->", answer(cache))
