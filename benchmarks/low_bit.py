"""What keys and values lose as small whole numbers, scheme by scheme, and how the shipped ones were chosen.

    python benchmarks/low_bit.py --stories tinystories-valid-part.txt > table.md

Kullback-Leibler divergence (nats per token) of the next token from that of a float cache: 8 windows
of the trained length, streamed in chunks, every token read back through the scheme. "bias" is the
pass-key model with a bias on two slow channel pairs of its keys, ten times as wide as the keys: its
text hardly changes, its keys look like those of Qwen. Pass keys: 128 of them in 500 tokens of novel.

Rows with a store's name are the shipped stores. Where first or newest tokens are exact, "of bf16" is
still that of the codes: the copies come on top, as many tokens of bf16 per row as the label says.
"""

import math
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from windlass.cli.demo import MODEL
from windlass.core.types import NewKeys, NewValues
from windlass.evals.report import page
from windlass.evals.texts import ASKED, BEFORE, HIDDEN, in_words, novel
from windlass.hf.attach import attached
from windlass.hf.forward import vocabulary_of
from windlass.hf.load import load
from windlass.stores.base import Parts, Store
from windlass.stores.formats import Int4, Int8, Plain, store_of

WINDOWS, CHUNK, PROMPT, SAMPLES, SLOTS = 8, 64, 500, 128, 64
STATIC = {
    "": "",
    "channel": "keys: scale per channel of the first step",
    "pair": "keys: scale per pair of the first step",
    "first step": "keys: mean of the first step",
    "random": "keys: mean of 128 random tokens",
    "own": "keys: mean of own text",
}


@dataclass(frozen=True)
class Scheme:
    """How one row of numbers becomes codes. `fit`: symmetric (largest magnitude), extreme (signed,
    all codes used), offset (least and most, with an offset), searched (extreme, best of 9 scales)."""

    bits: int
    fit: str
    group: int | None = None
    is_hadamard: bool = False  # rotated by a Hadamard matrix
    static: str = ""  # a key of STATIC: what of keys is constant, scales or a mean that is subtracted

    def bytes_per_token(self, width: int) -> float:
        scales = 2 * (width // min(self.group or width, width)) * (2 if self.fit == "offset" else 1)
        return width * self.bits / 8 + scales

    def __str__(self) -> str:
        notes = (
            self.fit,
            f"groups of {self.group}" if self.group else "",
            "Hadamard" if self.is_hadamard else "",
            STATIC[self.static],
        )
        return f"int{self.bits} " + ", ".join(filter(None, notes))


def coded(numbers: Tensor, scheme: Scheme) -> Tensor:
    """`numbers` through codes and back."""
    width, top = numbers.shape[-1], 2 ** (scheme.bits - 1)
    group = min(scheme.group or width, width)
    matrix = hadamard(width)
    rows = (numbers @ matrix if scheme.is_hadamard else numbers).unflatten(-1, (width // group, group))
    low, high = rows.aminmax(dim=-1, keepdim=True)
    extreme = torch.where(-low > high, low, high)
    if scheme.fit == "symmetric":
        out = _nearest(rows, extreme.abs() / (top - 1), 1 - top, top - 1)
    elif scheme.fit == "extreme":
        out = _nearest(rows, extreme / -top, -top, top - 1)
    elif scheme.fit == "offset":
        low = low.half().float()
        out = _nearest(rows - low, (high - low) / (2 * top - 1), 0, 2 * top - 1) + low
    else:
        tries = torch.stack([_nearest(rows, extreme / -(top * n / 10), -top, top - 1) for n in range(8, 17)])
        best = (tries - rows).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
        out = tries.take_along_dim(best, 0)[0]
    out = out.flatten(-2)
    return out @ matrix.T if scheme.is_hadamard else out


def _nearest(rows: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    scales = scales.half().float()
    scales = scales.where(scales != 0, 1.0)
    return (rows / scales).round().clamp(low, high) * scales


def hadamard(width: int) -> Tensor:
    """Sylvester's, orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(width)


class Simulated(Plain):
    """Floats that went through codes at write."""

    def __init__(self, keys: Scheme | None, values: Scheme | None, given: Tensor | None = None) -> None:
        super().__init__()
        self._schemes = keys, values
        self._scales: Tensor | float = 1.0
        self._means: Tensor | float = 0.0 if given is None else given[:, None]

    def fresh(self, key_means: Tensor | None) -> "Simulated":
        is_wanted = self._schemes[0] is not None and self._schemes[0].static in ("random", "own")
        return Simulated(*self._schemes, given=key_means if is_wanted else None)

    def make_constants(self, keys: NewKeys) -> Parts:
        static = "" if self._schemes[0] is None else self._schemes[0].static
        if static == "first step":
            self._means = keys.mean(2, keepdim=True)
        elif static in ("channel", "pair"):
            self._scales = keys.abs().amax(2, keepdim=True)
            if static == "pair":
                halves = torch.maximum(*self._scales.chunk(2, -1))
                self._scales = torch.cat((halves, halves), -1)
        return {}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        parts = {"keys": keys, "values": values}
        if self._schemes[0] is not None:
            parts["keys"] = coded((keys - self._means) / self._scales, self._schemes[0]) * self._scales + self._means
        if self._schemes[1] is not None:
            parts["values"] = coded(values, self._schemes[1])
        return parts


def new_cache(model: PreTrainedModel, store: str | Store, rows: int, budget: int | None = None) -> windlass.KVCache:
    policy = windlass.KeyDiff() if budget else None
    return windlass.KVCache(model, budget, policy, batch=rows, chunk=128, store=store)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: Tensor, store: str | Store, chunk: int) -> Tensor:
    cache = new_cache(model, store, len(ids))
    logits = [model(piece, past_key_values=cache).logits for piece in ids.split(chunk, 1)]
    return torch.cat(logits, 1).double().log_softmax(-1)


class Bench:
    """One model and its text."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        self.model, self.tokenizer = model, tokenizer
        trained = model.config.max_position_embeddings
        ids = tokenizer(text[20_000 : 20_000 + WINDOWS * trained * 6], add_special_tokens=False)["input_ids"]
        pieces = [ids[n * (trained - 1) : (n + 1) * (trained - 1)] for n in range(WINDOWS)]
        self.ids = torch.tensor([[model.config.bos_token_id, *piece] for piece in pieces])
        self._truth: dict[int, Tensor] = {}

    @torch.no_grad()
    def set_key_means(self, how: str) -> None:
        """Give the model's new low-bit caches the mean keys of `how`."""
        seam = attached(self.model)
        seam.key_means = None
        new_cache(self.model, Int8(), 1)  # measures them
        if how == "random":
            cache = new_cache(self.model, "plain", 1)
            ids = torch.randint(vocabulary_of(self.model), (1, 128), generator=torch.Generator().manual_seed(0))
            self.model(ids, past_key_values=cache)
            seam.key_means = [layer.store.keys()[:, :, :128].mean((0, 2)) for layer in cache.layers]

    def nats(self, store: str | Store, chunk: int = CHUNK) -> float:
        """Divergence from the float cache."""
        if chunk not in self._truth:
            self._truth[chunk] = log_probabilities(self.model, self.ids, "plain", chunk)
        truth, ours = self._truth[chunk], log_probabilities(self.model, self.ids, store, chunk)
        return float((truth.exp() * (truth - ours)).sum(-1).mean())

    @torch.no_grad()
    def pass_keys(self, store: str | Store, budget: int | None) -> int:
        """Keys told right, of `SAMPLES`; the question comes after the text was read."""
        draw, prose, found = Random(5), in_words(novel()), 0
        encode = self.tokenizer.encode
        question = encode(ASKED, add_special_tokens=False)
        texts, answers = [], []
        for n in range(SAMPLES):
            key = "".join(draw.choice("0123456789") for _ in range(5))
            hidden = encode(HIDDEN.format(key=key), add_special_tokens=False)
            start = encode(BEFORE, add_special_tokens=False)
            answer = encode(f" {key}.", add_special_tokens=False)
            room = PROMPT - len(start) - len(hidden) - len(question) - len(answer) - 1
            at = draw.randrange(len(prose) - 8 * room)
            filler = encode(prose[at : at + 8 * room], add_special_tokens=False)[:room]
            cut = int(room * (n + 0.5) / SAMPLES)
            texts.append([self.model.config.bos_token_id, *start, *filler[:cut], *hidden, *filler[cut:]])
            answers.append(answer)
        for first in range(0, SAMPLES, 32):
            cache = new_cache(self.model, store, 32, budget)
            windlass.prefill(self.model, cache, texts[first : first + 32])
            told = torch.tensor(answers[first : first + 32])
            asked = torch.cat((torch.tensor([question] * 32), told[:, :-1]), 1)
            logits = self.model(asked, past_key_values=cache).logits[:, -told.shape[1] :]
            found += int((logits.argmax(-1) == told).all(1).sum())
        return found


def biased(bench: Bench, text: str) -> Bench:
    """The same model with a wide bias on the two slowest channel pairs of each key."""
    model, tokenizer = load(str(bench.model.name_or_path), "float32")
    config = model.config
    cache = new_cache(model, "plain", WINDOWS)
    with torch.no_grad():
        model(bench.ids, past_key_values=cache)
        wide = 10 * float(torch.stack([layer.store.keys().std() for layer in cache.layers]).mean())
        bias = torch.zeros(config.num_key_value_heads, 2, config.head_dim // 2)
        bias[:, 0, -2:], bias[:, 1, -2:] = wide, -0.7 * wide
        for block in model.model.layers:
            block.self_attn.k_proj.bias = torch.nn.Parameter(bias.flatten())
    return Bench(model, tokenizer, text)


def main(
    stories: Annotated[Path, typer.Option(help="text for babyllama-361")],
    baby: Path = Path("tests/models/babyllama-361"),
    threads: int = 1,
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        large = Bench(*load(str(folder), "float32"), novel())
    small = Bench(*load(str(baby), "float32"), stories.read_text())
    benches = large, small, biased(large, novel())
    heads = ["bits, scale, and more", "of bf16", "width 16", "keys", "values", "both"]
    heads += ["width 16: keys", "values", "both", "bias", "pass keys", "in 64 slots"]
    print("\n".join(page.top(heads, 1)))
    schemes = [Scheme(8, fit) for fit in ("symmetric", "extreme", "offset")]
    schemes += [Scheme(4, fit) for fit in ("symmetric", "extreme", "offset", "searched")]
    schemes += [Scheme(4, fit, group=32) for fit in ("extreme", "offset")]
    schemes += [Scheme(4, fit, is_hadamard=True) for fit in ("extreme", "offset")]
    schemes += [Scheme(4, "extreme", static=static) for static in ("channel", "pair", "first step", "random", "own")]
    schemes += [Scheme(4, "offset", static="own")]
    for scheme in schemes:
        for bench in benches:
            bench.set_key_means(scheme.static)
        values = replace(scheme, static="")
        stores: tuple[Store, Store, Store] = Simulated(scheme, None), Simulated(None, values), Simulated(scheme, values)
        print(row(str(scheme), scheme, benches, stores), flush=True)
    for bits in (8, 4):
        for bench in benches:
            bench.set_key_means("own")
        scheme = Scheme(bits, "extreme", static="own")
        stores = Simulated(scheme, None), Simulated(None, scheme), store_of(f"int{bits}")
        print(row(f'**`store="int{bits}"`**', scheme, benches, stores), flush=True)
    for store in (Int4(sinks=4), Int4(newest=32), Int4(sinks=4, newest=32)):
        label = f'`store="{store.name}"` and {copied(large.model, store)} tokens'
        # Few at a time, as when text is written: a chunk's own tokens are the newest.
        print(row(label, scheme, benches, (None, None, store), 4 if store.full_precision.newest else CHUNK), flush=True)


@torch.no_grad()
def copied(model: PreTrainedModel, store: Store) -> int:
    """Tokens of a row that the store makes room for beside its codes, as the model made them."""
    cache = new_cache(model, store, 1)
    model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    copies = cache.layers[0].store.full_precision.keys
    return 0 if copies is None else copies.shape[2]


def row(
    label: str,
    scheme: Scheme,
    benches: tuple[Bench, Bench, Bench],
    stores: tuple[Store | None, Store | None, Store],
    chunk: int = CHUNK,
) -> str:
    """One line of the table; `stores` hold keys, values and both by the scheme (None: not measured)."""
    large, small, bias = benches
    cells = [f"{scheme.bytes_per_token(width) / (2 * width):.3f}" for width in (64, 16)]
    cells += [f"{bench.nats(store, chunk):.1e}" if store else "" for bench in (large, small) for store in stores]
    cells += [f"{bias.nats(stores[2], chunk):.1e}", str(large.pass_keys(stores[2], None))]
    cells += [str(large.pass_keys(stores[2], SLOTS))]
    return page.row([label, *cells])


if __name__ == "__main__":
    typer.run(main)
