"""The comparison with kvpress, on our side of it: kvpress has an environment of its own."""

import pytest
import torch
from peers import kvpress_sets
from peers.kvpress_sets import RATIOS, ROWS, Row, asked, ours, shared

from tests.helpers.models import Models, Text

KEPT = [torch.tensor([[0, 1, 5, -1], [0, 2, 3, -1]]), torch.tensor([[4, 5, 6, -1], [1, 2, 6, -1]])]


def test_the_share_is_of_their_tokens_over_all_layers_and_heads() -> None:
    theirs = torch.tensor([[[5, 1, 0], [0, 1, 4]], [[4, 5, 6], [6, 7, 1]]])
    assert shared(KEPT, theirs) == (3 + 1 + 3 + 2) / 12


def test_a_press_around_another_one_hands_the_ratio_on() -> None:
    row = Row("in_chunks(key_diff)", "ChunkKVPress", {"around": "KeyDiffPress", "chunk_length": 10})
    assert asked(row, 0.75)["options"] == {
        "around": "KeyDiffPress",
        "chunk_length": 10,
        "inner": {"compression_ratio": 0.75},
    }
    assert "inner" not in row.options


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.policy}, {row.is_rotated}")
def test_every_row_reads_whole_and_keeps_what_the_ratio_leaves(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, text: Text, row: Row
) -> None:
    monkeypatch.setattr(kvpress_sets, "TOKENS", 160)
    model, ids = attached_model("llama"), text(161)[0].tolist()
    kept, logits = ours(model, row, ids[:160], ids[160], RATIOS[1])
    assert len(kept) == model.config.num_hidden_layers
    assert all(int((layer >= 0).sum()) == 40 * layer.shape[0] for layer in kept)
    assert all(int(layer.max()) == 159 for layer in kept)
    assert logits.isfinite().all()
