"""Tables of the comparison with other libraries, out of samples. The libraries themselves are not called."""

import json

import pytest
import torch
from peers.shape import shape_of
from peers.tables import tables
from peers.weights import config_of
from peers.worker import random_ids
from transformers import LlamaForCausalLM

ABOUT = {"shape": "tiny", "layers": 3, "params": 2_000_000, "weights": "auto", "cpu": "a CPU", "date": "2026-01-02"}
ABOUT |= {"threads": 2, "cores": 5, "system": "a system", "python": "3.11"}


def run(
    peers: dict[str, list[float]], test: str = "tg", depth: int = 64, reads: list[float] | None = None
) -> list[str]:
    """The lines of one run: seconds that four tokens took each of these peers, round by round."""
    said = {"version": "1", "settings": "as it is", "threads": 2}
    lines: list[dict[str, object]] = [{"kind": "run", **ABOUT}]
    lines += [{"kind": "peer", "peer": peer, **said} for peer in peers]
    about = {"test": test, "tokens": 4, "depth": depth}
    for peer, seconds in peers.items():
        taken = enumerate(seconds)
        lines += [{"kind": "sample", "peer": peer, **about, "round": turn, "seconds": each} for turn, each in taken]
    lines += [{"kind": "read", **about, "round": turn, "gb_per_s": each} for turn, each in enumerate(reads or [])]
    return [json.dumps(line) for line in lines]


def cells(text: str, library: str) -> list[str]:
    """The row of one library."""
    (row,) = [line for line in text.splitlines() if line.startswith("|") and f" {library} " in line]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_ratios_are_those_of_one_round_of_one_run() -> None:
    """Windlass is slow in the run beside B, so rounds of different runs would give A other ratios."""
    lines = run({"windlass": [1.0, 2.0, 4.0], "A": [2.0, 6.0, 20.0]})
    lines += run({"windlass": [40.0, 100.0], "B": [20.0, 50.0]})
    text = tables(lines)
    assert text.count("### ") == 1
    assert cells(text, "A")[:6] == ["tg4 @ d64", "A", "0.67", "2.00", "3.000 (2.500 to 4.000)", "3"]
    assert cells(text, "B")[2:6] == ["0.14", "0.07", "0.500 (0.500 to 0.500)", "2"]


def test_bytes_of_a_token_are_put_beside_the_read_of_its_round() -> None:
    held = shape_of("tiny").token_bytes(64 + 2, "auto")
    lines = run({"windlass": [4.0, 2.0], "A": [1.0, 1.0]}, reads=[held / 1e9 * 10, held / 1e9 * 4])
    assert cells(tables(lines), "A")[-1] == "0.300 (0.200 to 0.400)"
    prompts = run({"windlass": [4.0, 2.0], "A": [1.0, 1.0]}, test="pp", depth=0, reads=[1.0, 1.0])
    assert cells(tables(prompts), "A")[0] == "pp4"
    assert cells(tables(prompts), "A")[-1] == "-"


def test_models_and_days_have_tables_of_their_own() -> None:
    later = [line.replace("2026-01-02", "2026-01-03") for line in run({"windlass": [1.0], "A": [2.0]})]
    fewer = [line.replace('"layers": 3', '"layers": 2') for line in run({"windlass": [1.0], "A": [2.0]})]
    assert tables(run({"windlass": [1.0], "A": [2.0]}) + later + fewer).count("### ") == 3


def test_lines_out_of_order_are_refused() -> None:
    about, ours, sample, *_ = run({"windlass": [1.0]})
    with pytest.raises(ValueError, match="before the run"):
        tables([sample])
    with pytest.raises(ValueError, match="before the peer's description"):
        tables([about, sample])
    assert tables([about, ours, sample]).count("| tg4 @ d64 |") == 1


def test_a_shape_counts_what_its_model_holds() -> None:
    shape = shape_of("tiny", 2)
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(shape))
    assert shape.params == sum(each.numel() for each in model.parameters())
    matrices = {name: each.numel() for name, each in model.named_parameters() if each.ndim == 2}
    assert shape.matrices == sum(matrices.values()) - matrices["model.embed_tokens.weight"]
    cached = 2 * 2 * shape.kv_heads * shape.head_dim * 2  # keys and values of two layers, two bytes each
    assert shape.token_bytes(7, "auto") - shape.token_bytes(0, "auto") == 7 * cached
    assert shape.token_bytes(0, "int4") == shape.matrices * (0.5 + 4 / 128)


def test_all_workers_draw_the_same_ids() -> None:
    assert random_ids(5, 100, seed=1) == random_ids(5, 100, seed=1) != random_ids(5, 100, seed=2)
