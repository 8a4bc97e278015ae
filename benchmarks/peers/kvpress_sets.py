"""Which tokens windlass and kvpress keep of the same text: one table, for `docs/coming-from-kvpress.md`.

    make compare-kvpress
    PYTHONPATH=benchmarks python -m peers.kvpress_sets > table.md

Three models are saved once and loaded by both libraries, each in an environment of its own, in float32: a random
Llama, a random Qwen3 whose query and key norms are drawn anew, and the shipped model. 400 tokens of the novel are
read in one step, and cut to a half and to a quarter. A cell is the lowest and the highest of the six: the share of
kvpress's tokens that windlass keeps too, over all layers and heads, and the largest difference of the logits of the
next token, which is read over the compressed cache at its own position.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from peers.shape import PEERS
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from windlass import KVCache, attach
from windlass.cache.options import policy_of
from windlass.evals.report.page import table
from windlass.evals.speed.measure import RotatedStorage
from windlass.evals.texts import novel
from windlass.hf.load import load

MODEL = Path(str(resources.files("windlass"))) / "assets" / "finder-3m"
TOKENS = 400
RATIOS = (0.5, 0.75)  # kvpress's: the share that is evicted
VOCABULARY = 2048


@dataclass(frozen=True)
class Row:
    """A policy with its cache, and the press beside it. `{ratio}` in a text is the share that is evicted."""

    policy: str
    press: str
    options: dict[str, Any] = field(default_factory=dict)
    sinks: int = 0
    window: int = 1
    is_rotated: bool = False
    newest: int = 1  # that the press is made to keep, as windlass always does; 0: it keeps them itself
    mended: tuple[str, ...] = ()  # differences taken away from the press, see `kvpress_worker.py`
    note: str = ""


SNAPKV = {"window_size": 32, "kernel_size": 5}
COMPACTOR = "compactor(blend={ratio}, observed_queries=400)"
ROWS = (
    Row("tova", "TOVAPress", newest=0),
    Row("expected_attention(epsilon=0.01)", "ExpectedAttentionPress", {"epsilon": 0.01}, 4),
    Row("expected_attention(has_covariance=False)", "ExpectedAttentionPress", {"use_covariance": False}, 4),
    Row("expected_attention(observed_queries=256)", "ExpectedAttentionPress", {}, 4),
    Row("key_norm", "KnormPress"),
    Row("key_diff", "KeyDiffPress", is_rotated=True),
    Row("key_diff", "KeyDiffPress"),
    Row("lag_kv(lag=32)", "LagKVPress", {"n_sink": 0, "lag_size": 32}, is_rotated=True),
    Row("lag_kv(lag=32)", "LagKVPress", {"n_sink": 0, "lag_size": 32}),
    Row("h2o", "ObservedAttentionPress", mended=("undivided",), note="before its division"),
    Row("h2o", "ObservedAttentionPress"),
    Row("leverage", "LeverageScorePress", mended=("sketch",), note="with windlass's sketch"),
    Row("recent", "StreamingLLMPress", {"n_sink": 4}, 4, newest=0),
    Row("snapkv(is_mean=True)", "SnapKVPress", SNAPKV, window=32, newest=0),
    Row("snapkv", "SnapKVPress", SNAPKV, window=32, newest=0),
    Row(COMPACTOR, "CompactorPress", {}, 8, 4, newest=0, mended=("sketch",), note="with windlass's sketch"),
    Row(
        COMPACTOR,
        "CompactorPress",
        {},
        8,
        4,
        newest=0,
        mended=("sketch", "attention", "deviations"),
        note="and without its three faults",
    ),
    Row(
        "in_chunks(key_diff, size=10)",
        "ChunkKVPress",
        {"around": "KeyDiffPress", "chunk_length": 10},
        is_rotated=True,
    ),
)


def models(folder: Path) -> dict[str, Path]:
    """The models, in folders that both libraries open."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "initializer_range": 0.12,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    qwen = Qwen3ForCausalLM(Qwen3Config(head_dim=64, **sizes))
    for name, parameter in qwen.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.data.uniform_(0.2, 3.2)
    made: dict[str, PreTrainedModel] = {"llama": llama, "qwen3": qwen}
    for name, model in made.items():
        model.save_pretrained(folder / name)
    return {**{name: folder / name for name in made}, MODEL.name: MODEL}


def asked(row: Row, ratio: float) -> dict[str, Any]:
    """A setting as the worker reads it."""
    options = dict(row.options)
    if "around" in options:
        options["inner"] = {"compression_ratio": ratio}
    else:
        options["compression_ratio"] = ratio
    return {"press": row.press, "options": options, "newest": row.newest, "mended": row.mended}


@torch.inference_mode()
def ours(model: PreTrainedModel, row: Row, ids: list[int], token: int, ratio: float) -> tuple[list[Tensor], Tensor]:
    """Per layer the positions that each kv head keeps, and the next token's logits."""
    kind = RotatedStorage if row.is_rotated else KVCache
    policy = policy_of(row.policy.replace("{ratio}", str(ratio)))
    cache = kind(model, policy=policy, sinks=row.sinks, window=row.window, chunk=TOKENS)
    model(torch.tensor([ids]), past_key_values=cache)
    cache.compress(round(TOKENS * (1 - ratio)), row.window)
    kept = [layer.positions[0].expand(model.config.num_key_value_heads, -1).clone() for layer in cache.layers]
    logits: Tensor = model(torch.tensor([[token]]), past_key_values=cache).logits
    return kept, logits[0, -1].float()


def shared(kept: list[Tensor], theirs: Tensor) -> float:
    """The share of their tokens that we keep too."""
    pairs = [
        (set(head.tolist()), set(their_head.tolist()))
        for layer, their_layer in zip(kept, theirs, strict=True)
        for head, their_head in zip(layer, their_layer, strict=True)
    ]
    return sum(len(mine & their) for mine, their in pairs) / sum(len(their) for _, their in pairs)


def compare(folder: Path, ids: list[int], token: int) -> list[list[tuple[float, float]]]:
    """For every row, at both ratios: the share kept alike, and the difference of the logits."""
    settings = [(row, ratio) for row in ROWS for ratio in RATIOS]
    with tempfile.TemporaryDirectory() as place:
        request, answer = Path(place, "request.json"), Path(place, "answer.safetensors")
        request.write_text(
            json.dumps(
                {"model": str(folder), "ids": ids, "next": token, "settings": [asked(*each) for each in settings]}
            )
        )
        command = [str(PEERS / "kvpress" / "bin" / "python"), "-m", "peers.kvpress_worker", str(request), str(answer)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        theirs = load_file(answer)
    model = attach(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    found: list[list[tuple[float, float]]] = [[] for _ in ROWS]
    for number, (row, ratio) in enumerate(settings):
        kept, logits = ours(model, row, ids, token, ratio)
        difference = float((logits - theirs[f"{number}.logits"]).abs().max())
        found[number // len(RATIOS)].append((shared(kept, theirs[f"{number}.kept"]), difference))
    return found


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    _, tokenizer = load(str(MODEL), dtype="float32")
    *ids, token = tokenizer(novel())["input_ids"][: TOKENS + 1]
    with tempfile.TemporaryDirectory() as place:
        found = [compare(folder, ids, token) for folder in models(Path(place)).values()]
    lines = []
    for number, row in enumerate(ROWS):
        cells = [cell for each in found for cell in each[number]]
        alike, apart = zip(*cells, strict=True)
        storage = "rotated keys" if row.is_rotated else ""
        lines.append(
            [
                f"`{row.policy.replace('{ratio}', 'ratio')}`{storage and ', ' + storage}",
                f"`{row.press}`{row.note and ', ' + row.note}",
                " to ".join(f"{100 * share:.1f} %" for share in sorted({min(alike), max(alike)})),
                " to ".join(f"{each:.0e}" if each < 1e-3 else f"{each:.2g}" for each in (min(apart), max(apart))),
            ]
        )
    print(table(["policy", "press", "tokens kept alike", "next logits apart"], lines, 2))


if __name__ == "__main__":
    main()
