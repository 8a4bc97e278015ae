"""A novel six times longer than the trained context, read in a cache of 256 tokens, then a question."""

from pathlib import Path

import windlass
from windlass.evals.texts import ASKED, hide_pass_key, novel

model, tokenizer = windlass.load(Path(windlass.__file__).parent / "assets" / "finder-3m", "float32")
text = hide_pass_key(novel()[30_000:50_000], key="48213", depth=0.3)

cache = windlass.KVCache(model, budget=256, policy=windlass.policies.KeyDiff(), positions="compact", chunk=128)
stream = windlass.stream(model, tokenizer, text + ASKED, cache, max_tokens=8)
print(ASKED, end="")
for piece in stream:
    print(piece, end="", flush=True)
print(f"\n\nread {stream.result.prompt_tokens} tokens at {stream.result.prefill_tokens_per_s:.0f} tokens/s\n")
print(cache.describe())
