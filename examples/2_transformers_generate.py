"""The same cache under transformers' own `generate`: greedy, then sampled, then a second turn."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import windlass

folder = Path(windlass.__file__).parent / "assets" / "finder-3m"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = windlass.attach(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

prompt = "The old man looked at the sea and"
for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}):
    torch.manual_seed(0)
    cache = windlass.KVCache(model, budget=128, policy=windlass.policies.SnapKV())
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), past_key_values=cache, max_new_tokens=20, **options)
    print(options, "->", repr(tokenizer.decode(ids[0], skip_special_tokens=True)))

more = tokenizer(" Then the woman said", return_tensors="pt", add_special_tokens=False).input_ids
ids = model.generate(torch.cat([ids, more], dim=1), past_key_values=cache, max_new_tokens=20, do_sample=False)
print("second turn ->", repr(tokenizer.decode(ids[0], skip_special_tokens=True)))
print(f"{cache.tokens_seen[0]} tokens seen, {cache.bytes_held:,} bytes held")
