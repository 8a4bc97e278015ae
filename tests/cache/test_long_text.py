"""Texts far longer than the memory and the trained window, on real models."""

import lzma
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import windlass
from windlass import KVCache
from windlass.policies import H2O, KeyDiff, Recent

MODELS = Path(__file__).parents[1] / "models"
NOVEL = Path(windlass.__file__).parent / "assets" / "three_men_in_a_boat.txt.xz"


def load(name: str) -> tuple[PreTrainedModel, list[int]]:
    """An attached model, and the start of a novel that it never saw, in its tokens."""
    model = windlass.attach(AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name, model_max_length=10**9)
    with lzma.open(NOVEL, "rt") as file:
        return model, tokenizer(file.read(40_000))["input_ids"]


@torch.no_grad()
def nats(model: PreTrainedModel, ids: list[int], cache: KVCache | None, chunk: int) -> Tensor:
    """Negative log-likelihood of each token but the first."""
    text = torch.tensor([ids])
    losses = []
    for start in range(0, len(ids) - 1, chunk):
        piece = text[:, start : min(start + chunk, len(ids) - 1)]
        logits = model(piece, past_key_values=cache, use_cache=cache is not None).logits[0]
        losses.append(cross_entropy(logits, text[0, start + 1 : start + 1 + piece.shape[1]], reduction="none"))
    return torch.cat(losses)


def nats_inside(model: PreTrainedModel, ids: list[int], start: int, end: int, trained: int) -> Tensor:
    """The same of tokens `start` to `end`, each read by transformers with half a trained window before it."""
    half = trained // 2
    windows = [nats(model, ids[at - half : at + half + 1], None, trained)[half:] for at in range(start, end, half)]
    return torch.cat(windows)


@pytest.mark.parametrize(
    ("name", "trained"), [("stories260K", 512), pytest.param("babyllama-361", 256, marks=pytest.mark.slow)]
)
def test_past_ten_times_the_trained_length_text_stays_text(name: str, trained: int) -> None:
    """Half a trained window of slots, read under `compact`: as good as a fresh window, token by token."""
    model, ids = load(name)
    start, end = 10 * trained + 1, 14 * trained + 1
    inside = float(nats_inside(model, ids, start, end, trained).mean())
    far = {
        mode: float(
            nats(model, ids[: end + 1], KVCache(model, trained // 2, positions=mode, policy=Recent()), 64)[
                start:end
            ].mean()
        )
        for mode in ("compact", "original")
    }
    assert far["compact"] < 1.05 * inside
    assert far["original"] > 1.15 * inside, "the control: positions that the model never saw"


def test_babyllama_at_four_times_its_window() -> None:
    """Past the window, `original` collapses. `self_extend` and `compact` stay at the level of a fresh window."""
    model, ids = load("babyllama-361")
    inside = float(nats_inside(model, ids, 257, 1025, 256).mean())
    past = {
        mode: float(nats(model, ids[:1026], KVCache(model, budget, positions=mode, policy=Recent()), 64)[257:].mean())
        for mode, budget in (("original", None), ("self_extend(8, 64)", None), ("compact", 128))
    }
    assert past["original"] > inside + 1.5
    assert past["self_extend(8, 64)"] < 1.05 * inside
    assert past["compact"] < 1.05 * inside


@pytest.mark.slow
def test_two_thousand_tokens_at_budget_256_take_flat_memory() -> None:
    model, _ = load("stories260K")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories260K", model_max_length=10**9)
    cache = KVCache(model, budget=256, policy=Recent(), positions="compact")
    sampling = windlass.Sampling(temperature=0.8, seed=1)
    text, held = [], list[tuple[int, int]]()
    for piece in windlass.stream(model, tokenizer, "Once upon a time", cache, 2_100, sampling, stop=()):
        text.append(piece)
        if cache.tokens_seen[0] % 700 == 0:
            held.append((cache.layers[0].table.occupancy_bound, cache.bytes_held))
    assert len(held) == 3
    assert len(set(held)) == 1
    assert held[0][0] == 256
    # Still English after 4 trained windows: the model itself, inside its window, finds it likely.
    end = tokenizer("".join(text)[-4_096:])["input_ids"][:512]
    assert nats(model, end, None, 512)[64:].mean() < 1.6


class Work(TorchDispatchMode):
    """Counts the work of a step: operations, and the elements of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, Tensor):
                self.done[f"{func} {tuple(each.shape)}"] += 1
        return out


@pytest.mark.parametrize(
    "policy",
    [pytest.param(each, marks=pytest.mark.slow) for each in (Recent(), KeyDiff())] + [H2O()],
    ids=repr,
)
def test_a_token_late_in_the_text_is_the_same_work_as_one_early(policy: windlass.policies.Policy) -> None:
    """Time per token is flat because every step does the same operations on the same shapes."""
    model, ids = load("stories260K")
    cache = KVCache(model, budget=64, policy=policy, positions="compact", window=8)
    work = []
    with torch.no_grad():
        for start, end in ((0, 120), (120, 400)):
            for token in ids[start:end]:
                model(torch.tensor([[token]]), past_key_values=cache)
            with Work() as counted:
                model(torch.tensor([[ids[end]]]), past_key_values=cache)
            work.append(counted.done)
    assert sum(work[0].values()) > 10
    assert work[0] == work[1]
