"""Where the next column of a batch stands whose rows were rolled back one by one."""

from pathlib import Path

import torch

from tests.helpers.models import Models, Text
from windlass import KVCache


def test_columns_after_rows_were_rolled_back_one_by_one(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20, rows=2)
    cache = KVCache(model, batch=2)
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
    cache.rollback([3, 0])
    cache.rollback([0, 3])
    assert cache.next_positions == [7, 7]
    assert cache.get_seq_length() == 7
    whole = torch.cat((ids[:, :7], ids[:, 10:14]), 1)
    wanted = KVCache(model, batch=2)
    out = [model.generate(whole, past_key_values=one, max_new_tokens=3, do_sample=False) for one in (cache, wanted)]
    assert out[0].equal(out[1])


def test_columns_of_each_row_survive_a_file(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model = attached_model("llama")
    cache = KVCache(model, batch=2)
    with torch.no_grad():
        model(text(10, rows=2), past_key_values=cache)
    cache.rollback([3, 0])
    cache.save(tmp_path / "file")
    loaded = KVCache.load(tmp_path / "file", model)
    assert loaded.rows == cache.rows
    loaded.rollback([0, 3])
    assert loaded.get_seq_length() == 7
