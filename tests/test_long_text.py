"""Texts far longer than the memory and the trained window, on real models."""

import lzma
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import windlass
from windlass import KVCache

MODELS = Path(__file__).parent / "models"
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "trained"), [("stories260K", 512), ("babyllama-361", 256)])
def test_past_ten_times_the_trained_window_text_stays_text(name: str, trained: int) -> None:
    """Half a trained window of slots, read under `compact`: as good as a fresh window, token by token."""
    model, ids = load(name)
    start, end = 10 * trained + 1, 14 * trained + 1
    inside = float(nats_inside(model, ids, start, end, trained).mean())
    far = {
        mode: float(nats(model, ids[: end + 1], KVCache(model, trained // 2, positions=mode), 64)[start:end].mean())
        for mode in ("compact", "original")
    }
    assert far["compact"] < 1.05 * inside
    assert far["original"] > 1.15 * inside, "the control: positions that the model never saw"


@pytest.mark.slow
def test_babyllama_at_four_times_its_window() -> None:
    """Past the window, `original` collapses; `self_extend` and `compact` stay at what a fresh window gives."""
    model, ids = load("babyllama-361")
    inside = float(nats_inside(model, ids, 257, 1025, 256).mean())
    past = {
        mode: float(nats(model, ids[:1026], KVCache(model, budget, positions=mode), 64)[257:].mean())
        for mode, budget in (("original", None), ("self_extend(8, 64)", None), ("compact", 128))
    }
    assert past["original"] > inside + 1.5
    assert past["self_extend(8, 64)"] < 1.05 * inside
    assert past["compact"] < 1.05 * inside


@pytest.mark.slow
def test_twenty_thousand_tokens_at_budget_256_take_flat_memory_and_time() -> None:
    model, _ = load("stories260K")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories260K")
    cache = KVCache(model, budget=256, positions="compact")
    sampling = windlass.Sampling(temperature=0.8, seed=1)
    stream = windlass.stream(model, tokenizer, "Once upon a time", cache, 20_000, sampling, stop=())
    sizes, text, tokens = set(), [], 0
    marks: list[float] = []
    last = time.perf_counter()
    for piece in stream:
        text.append(piece)
        tokens += 1
        now = time.perf_counter()
        marks.append(now - last)
        last = now
        if tokens > 300 and tokens % 100 == 0:
            sizes.add(cache.nbytes())
    assert cache.tokens_seen[0] > 20_000
    assert len(sizes) == 1, "bytes held must not change once the budget is full"
    assert [layer.most_held for layer in cache.layers] == [256] * 5
    early, late = (torch.tensor(part).median().item() for part in (marks[1000:4000], marks[-3000:]))
    assert late < 1.5 * early, f"{early * 1e3:.2f} ms a token early, {late * 1e3:.2f} ms late"
    # Still English after 39 trained windows: the model itself, inside its window, finds it likely.
    ids = tokenizer("".join(text)[-2000:])["input_ids"][:400]
    assert nats(model, ids, None, 512)[50:].mean() < 2.0
