"""Passes that overwrite held tokens at their positions: all or nothing, and no other token is touched."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.contents import check_every_line, content, is_same
from tests.helpers.models import Models, Text
from windlass import CacheOptions, KVCache, UsageError
from windlass.cache.recompute import SlotLookup
from windlass.core.step import Pass, Step
from windlass.hf.forward import forward
from windlass.policies import H2O


def step_at(cache: KVCache, ids: Tensor, positions: Tensor) -> Step:
    """A step that reads `ids` (rows, tokens) at their places. A position below 0 is padding."""
    lengths = tuple((positions >= 0).sum(-1).tolist())
    ends, prompts = torch.tensor(cache.next_positions), torch.tensor(cache.rows.prompt_ends)
    step = Step(positions, lengths, ends, prompts, max(cache.next_positions), ids, defer_eviction=True)
    return replace(step, is_prompt=True, is_rewrite=True)


def test_where_tokens_stand() -> None:
    slots = torch.tensor([[[7, -1, 3, 5, -2], [3, 7, -1, -1, 4]], [[0, 1, 2, -2, 9], [9, -1, 5, 2, 0]]])
    tokens = torch.tensor([[5, 7, -1], [2, 9, 4]])
    standing = SlotLookup.of(slots, tokens)
    assert standing.columns.tolist() == [
        [[1, -1, -1, 0, -1], [-1, 1, -1, -1, -1]],
        [[-1, -1, 0, -1, 1], [1, -1, -1, 0, -1]],
    ]
    assert standing.is_held.tolist() == [[[True, True, False], [False, True, False]], [[True, True, False]] * 2]
    found = standing.slots.where(standing.is_held, -1)
    assert found.tolist() == [[[3, 0, -1], [-1, 1, -1]], [[2, 4, -1], [3, 0, -1]]]


@pytest.mark.parametrize("columns", [1, 3, 17])
def test_scattered_tokens_of_rows_of_different_lengths(attached_model: Models, text: Text, columns: int) -> None:
    """A row reads the same again as it would alone, in any order of the columns."""
    model, ids = attached_model("llama"), text(38, rows=2)
    caches = [KVCache(model, batch=2), KVCache(model), KVCache(model)]
    windlass.prefill(model, caches[0], [ids[0].tolist(), ids[1, :21].tolist()])
    windlass.prefill(model, caches[1], [ids[0].tolist()])
    windlass.prefill(model, caches[2], [ids[1, :21].tolist()])
    others = text(40, rows=2, seed=3)[:, :columns]  # other tokens come to stand there
    places = torch.stack([torch.randperm(21)[:columns] for _ in range(2)])
    places[1, 2:] = -1
    forward(model, others, None, caches[0], [], Pass(step=step_at(caches[0], others, places)))
    for row, cache in enumerate(caches[1:]):
        own = places[row][places[row] >= 0].sort()
        new = others[row][places[row] >= 0][own.indices]
        forward(model, new[None], None, cache, [], Pass(step=step_at(cache, new[None], own.values[None])))
    for name, ours in content(caches[0]).items():
        if isinstance(ours, Tensor):
            for row, cache in enumerate(caches[1:]):
                truth = content(cache)[name][0]
                torch.testing.assert_close(
                    ours[row, ..., : truth.shape[-2] if truth.ndim > 2 else truth.shape[-1], :]
                    if ours.ndim == 4
                    else ours[row, ..., : truth.shape[-1]],
                    truth,
                    atol=1e-5,
                    rtol=0,
                )
    assert caches[0].tokens_seen == [38, 21]
    with pytest.raises(UsageError, match="edited 0 tokens ago"):
        caches[0].rollback(1)


@pytest.mark.parametrize("store", ["plain", "int4"])
def test_an_interrupt_at_any_line_leaves_no_trace(attached_model: Models, text: Text, store: str) -> None:
    model, ids = attached_model("gemma2"), text(33)
    options = CacheOptions(budget=20, policy=H2O(), sinks=2, window=3, store=store)
    cache = KVCache.from_options(model, options)
    windlass.prefill(model, cache, [ids[0, :20].tolist()])
    places, others = torch.tensor([[3, 9, 10, 18]]), text(4, seed=2)

    def work(its: KVCache) -> None:
        forward(model, others, None, its, [], Pass(step=step_at(its, others, places)))

    before = copy.deepcopy(cache)
    assert check_every_line(model, cache, work, 7, may_be_done=True) > 200
    assert not is_same(content(cache), content(before))
    assert [layer.positions.ge(0).sum().item() for layer in cache.layers] == [
        layer.positions.ge(0).sum().item() for layer in before.layers
    ]


def test_layers_that_share_slots_read_what_is_written_over(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    """Every token of a text replaced by another, from back to front in two passes: the other text read anew."""
    ids, others, last = text(24), text(24, seed=1), text(1, seed=2)
    model = attached_model("gemma3n")
    cache = KVCache(model)
    forward(model, ids, None, cache, [], Pass(defer_eviction=True, is_prompt=True))
    for span in (slice(0, 9), slice(9, 24)):
        places = torch.arange(24)[None, span]
        forward(model, others[:, span], None, cache, [], Pass(step=step_at(cache, others[:, span], places)))
    with torch.no_grad():
        ours = model(last, past_key_values=cache).logits
        truth = plain_model("gemma3n")(torch.cat((others, last), 1)).logits[:, -1:]
    torch.testing.assert_close(ours, truth, atol=3e-5, rtol=0)
