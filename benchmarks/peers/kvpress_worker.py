"""What presses of kvpress keep of a text: runs in kvpress's environment, asked by `kvpress_sets.py`.

    python -m peers.kvpress_worker REQUEST.json ANSWER.safetensors

Nothing of kvpress is copied. Where a press is asked for `mended`, its own code runs with one difference taken
away, so that what is left can be compared.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import kvpress
import torch
from kvpress.presses.non_causal_attention_press import NonCausalAttnPress
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache


def main(request: Path, answer: Path) -> None:
    """Read the request, write what every setting keeps and the logits of the next token."""
    asked = json.loads(request.read_text())
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    model.eval()
    ids, token = torch.tensor([asked["ids"]]), torch.tensor([[asked["next"]]])
    whole: Any = DynamicCache()
    model(ids, past_key_values=whole)
    found: dict[str, Tensor] = {}
    for number, setting in enumerate(asked["settings"]):
        cache: Any = DynamicCache()
        # Only this press reads attention, and only eager attention gives it; another one refuses to be given any.
        model.set_attn_implementation("eager" if setting["press"] == "ObservedAttentionPress" else "sdpa")
        with mended(setting), made(setting)(model):
            model(ids, past_key_values=cache)
        kept = [
            torch.cdist(ours.keys[0].double(), theirs.keys[0].double()).argmin(-1)
            for ours, theirs in zip(cache.layers, whole.layers, strict=True)
        ]
        found[f"{number}.kept"] = torch.stack(kept).int()
        # A compressed cache is shorter than the text: the position has to be told.
        logits = model(token, past_key_values=cache, position_ids=torch.tensor([[ids.shape[1]]])).logits
        found[f"{number}.logits"] = logits[0, -1].float().contiguous()
    found["whole.logits"] = model(token, past_key_values=whole).logits[0, -1].float().contiguous()
    save_file(found, str(answer))


def made(setting: dict[str, Any]) -> Any:
    """The press that a setting names, around another one if it says so; it keeps the newest token if asked to."""
    options = dict(setting["options"])
    inner = (
        made({**setting, "press": options.pop("around"), "options": options.pop("inner")})
        if ("around" in options)
        else None
    )
    kind = getattr(kvpress, setting["press"])
    if inner is not None:
        return kind(press=inner, **options)
    press = kind(**options)
    score = press.score

    def changed(module: Any, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Any:
        scores = score(module, hidden_states, keys, values, attentions, kwargs).clone()
        if "undivided" in setting["mended"]:
            scores *= torch.arange(scores.shape[-1], 0, -1)
        scores[..., -setting["newest"] :] = torch.inf
        return scores

    if setting["newest"]:
        press.score = changed
    return press


@contextlib.contextmanager
def mended(setting: dict[str, Any]) -> Iterator[None]:
    """With the differences that a setting names taken away."""
    with contextlib.ExitStack() as stack:
        if "sketch" in setting["mended"]:
            stack.enter_context(mock.patch("torch.randn", one_sketch))
        if "attention" in setting["mended"]:
            stack.enter_context(mock.patch.object(NonCausalAttnPress, "non_causal_chunked_attn", staticmethod(blocks)))
        if "deviations" in setting["mended"]:
            # Their means and deviations are over batch and heads at once.
            mean, deviation = Tensor.mean, Tensor.std
            stack.enter_context(mock.patch.object(Tensor, "mean", lambda x, *a, **o: by_head(mean, x, a, o)))
            stack.enter_context(mock.patch.object(Tensor, "std", lambda x, *a, **o: by_head(deviation, x, a, o)))
        yield


def by_head(function: Any, states: Tensor, given: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """`function` as it is called, or over the last dimension where it is called for all of (batch, heads, tokens)."""
    if given or options or states.ndim != 3:
        found: Tensor = function(states, *given, **options)
    else:
        found = function(states, dim=-1, keepdim=True)
    return found


def one_sketch(*shape: int, device: Any, dtype: Any) -> Tensor:
    """The draw of windlass for every head, in place of the global generator's."""
    drawn = torch.empty(shape[-2:], dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(0))
    return drawn.to(device, dtype).expand(shape)


def blocks(q: Tensor, k: Tensor, chunk_size: int) -> Tensor:
    """Attention within blocks, summed over its queries: logits over sqrt(head_dim), and no padding takes part."""
    parts = [
        ((one @ other.mT) / math.sqrt(one.shape[-1])).softmax(-1).sum(-2)
        for one, other in zip(q.split(chunk_size, 2), k.split(chunk_size, 2), strict=True)
    ]
    return torch.cat(parts, -1)


if __name__ == "__main__":
    with torch.inference_mode():
        main(Path(sys.argv[1]), Path(sys.argv[2]))
