"""Every policy on the same texts, with the same budget: who still knows the pass key?"""

import random
from pathlib import Path

import windlass
from windlass.evals.texts import ASKED, hide_pass_key, novel
from windlass.policies import NAMES

TEXTS = 3
BUDGET = 96

model, tokenizer = windlass.load(Path(windlass.__file__).parent / "assets" / "finder-3m", "float32")
draw = random.Random(0)
text = novel()
tasks = []
for _ in range(TEXTS):
    key, start = f"{draw.randrange(10**5):05}", draw.randrange(len(text) - 1500)
    tasks.append((key, hide_pass_key(text[start : start + 1500], key, draw.random())))

print(f"pass key found in {TEXTS} texts, budget {BUDGET}, positions compact")
for policy in (kind() for kind in NAMES.values()):
    found = 0
    for key, story in tasks:
        cache = windlass.KVCache(model, budget=BUDGET, policy=policy, positions="compact", chunk=128)
        # The text is read before the question is known, so nothing can be kept because it was asked for.
        windlass.prefill(model, cache, [tokenizer(story)["input_ids"]])
        [answer] = windlass.generate(model, tokenizer, [ASKED], cache, max_tokens=8)
        found += answer.text.strip().startswith(key)
    print(f"{policy!r:40} {found} of {TEXTS}   {answer.bytes_held:,} bytes")
