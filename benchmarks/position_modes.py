"""What is left of a model past its trained window, under each position mode.

    python benchmarks/position_modes.py tests/models/babyllama-361 --windows 4
    python benchmarks/position_modes.py tests/models/stories260K --windows 14 --budget 256

Mean negative log-likelihood per token of the shipped novel (or of `--text FILE`), one column per
trained window. The row "fresh" is transformers itself with half a trained window before each token.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import windlass
from windlass.cache.options import policy_of
from windlass.evals.report.page import table
from windlass.evals.texts import novel


@torch.no_grad()
def nats(model: PreTrainedModel, ids: Tensor, cache: windlass.KVCache | None, chunk: int) -> Tensor:
    """Negative log-likelihood of every token of `ids` (1, tokens) but the first."""
    losses = []
    for start in range(0, ids.shape[1] - 1, chunk):
        piece = ids[:, start : min(start + chunk, ids.shape[1] - 1)]
        logits = model(piece, past_key_values=cache, use_cache=cache is not None).logits[0]
        losses.append(cross_entropy(logits, ids[0, start + 1 : start + 1 + piece.shape[1]], reduction="none"))
    return torch.cat(losses)


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    windows: int = 4,
    budget: Annotated[int | None, typer.Option(help="of the bounded rows; by default half a window")] = None,
    text: Path | None = None,
    skip: Annotated[int, typer.Option(help="characters of the text to leave out")] = 5000,
    chunk: int = 64,
    policy: Annotated[str, typer.Option(help="of the bounded rows")] = "recent",
    threads: int = 1,
) -> None:
    """Print the table."""
    torch.set_num_threads(threads)
    model = windlass.attach(AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(model_name, model_max_length=10**9)
    whole = novel() if text is None else text.read_text()
    trained = model.config.max_position_embeddings
    ids = torch.tensor([tokenizer(whole[skip : skip + 12 * windows * trained])["input_ids"][: windows * trained + 1]])
    half, slots = trained // 2, budget or trained // 2
    fresh = [
        nats(model, ids[:, max(0, at - half) : at + half + 1], None, trained)[-half:]
        for at in range(0, windows * trained, half)
    ]
    rows = {"fresh": torch.cat(fresh)}
    for mode, limit in (
        ("original", None),
        ("self_extend(8, 64)", None),
        (f"clamp({half})", None),
        ("auto", None),
        ("original", slots),
        ("compact", slots),
        ("self_extend(8, 64)", slots),
        ("auto", slots),
        (f"clamp({half})", slots),
    ):
        cache = windlass.KVCache(model, limit, policy_of(policy), positions=mode, chunk=chunk)
        rows[f"{mode}, {'full cache' if limit is None else f'budget {limit}'}"] = nats(model, ids, cache, chunk)
    means = {label: losses[: windows * trained].reshape(windows, trained).mean(-1) for label, losses in rows.items()}
    heads = [f"nats per token, windows of {trained}", *(str(window + 1) for window in range(windows))]
    print(table(heads, [[label, *(f"{mean:.2f}" for mean in each.tolist())] for label, each in means.items()], 1))


if __name__ == "__main__":
    typer.run(main)
