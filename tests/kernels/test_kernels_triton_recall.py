"""Recall in Triton against the reference: in its interpreter on a CPU, and on a GPU where there is one."""

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from transformers import PreTrainedModel

from tests.helpers import models
from tests.helpers.interpreted import interpret_quickly
from tests.helpers.models import Text
from tests.helpers.recall_calls import FORMATS, SIZES, call_of, read_of, tiles_of
from windlass import KVCache, kernels
from windlass.cache import cache as memory_of_cache
from windlass.cache import recall as recall_of_cache
from windlass.cache.recall import RecallMemory
from windlass.core.inputs import BestPages, ReadInput, WriteInput
from windlass.kernels import reference
from windlass.kernels.triton import recall
from windlass.policies import H2O

one_layer = models.one_layer  # fixture


@pytest.fixture(params=["interpreter", pytest.param("device", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors are."""
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("with a GPU, kernels are compiled")
        interpret_quickly(monkeypatch)
        # It takes as long for a small block as for a large one.
        for name, value in (("MOVED", 2**15), ("MOST_MOVED", 1024), ("MULTIPLIED", 2**14)):
            monkeypatch.setattr(recall, name, value)
    return "cuda" if request.param == "device" else "cpu"


def hosted(tensor: Tensor, on: str) -> Tensor:
    """In the host's memory, as a GPU reads it."""
    return tensor.contiguous().pin_memory() if on == "cuda" else tensor.contiguous()


def moved(value: Any, on: str, is_hosted: bool = False) -> Any:
    """A call with its tensors there, but for those of its pieces, which stay with the host."""
    if isinstance(value, Tensor):
        return hosted(value, on) if is_hosted else value.to(on)
    if isinstance(value, tuple):
        return tuple(moved(each, on, is_hosted) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        at_host = {name: is_hosted or name == "pieces" for name in parts}
        at_host |= {"means": False}
        return replace(value, **{name: moved(part, on, at_host[name]) for name, part in parts.items()})
    return value


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("channels", "queries", "score_heads", "candidates"),
    [
        (64, 1, 3, 21),
        (6, 7, 3, 33),
        (10, 3, 1, 0),
        pytest.param(10, 3, 1, 33, marks=pytest.mark.slow),
        pytest.param(128, 2, 3, 21, marks=pytest.mark.slow),
        pytest.param(288, 1, 1, 33, marks=pytest.mark.slow),
    ],
)
def test_best_pages_are_those_of_the_reference(
    on: str, format: str, channels: int, queries: int, score_heads: int, candidates: int
) -> None:
    call = call_of(format, channels, queries, score_heads, candidates=candidates)
    ours, truth = recall.best_pages(moved(call, on)), reference.best_pages(call)
    ours = BestPages(ours.pages.cpu(), ours.is_read.cpu())
    assert ours.pages.sort().values.equal(truth.pages.sort().values)
    assert read_of(ours).equal(read_of(truth))


def test_of_equal_pages_the_earlier_are_the_better(on: str) -> None:
    call = call_of("float32", 10, 1, candidates=21)
    pieces = tuple(replace(each, tiles=torch.ones_like(each.tiles)) for each in call.pieces)
    call = replace(call, pieces=pieces, count=4)
    pages = recall.best_pages(moved(call, on)).pages.cpu()
    assert pages.equal(reference.best_pages(call).pages)
    assert pages.diff(dim=-1).gt(0).all()


def test_what_digests_allow_is_that_of_the_reference(on: str) -> None:
    for format in FORMATS:
        call = call_of(format, 10, 3, candidates=21)
        queries = reference.grouped_queries(call)
        largest, least = (
            torch.cat([getattr(each, name).packed().floats().float() for each in call.digests], 2)[:, :, None, :140]
            for name in ("largest", "least")
        )
        wanted = queries.clamp(min=0) @ largest.mT + queries.clamp(max=0) @ least.mT
        found = recall._allowed(queries.to(on), moved(call, on), 140)
        torch.testing.assert_close(found.cpu(), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_tiled", [True, False])
def test_rows_are_read_and_written_as_the_reference_does(
    on: str, format: str, is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOVED", 64)
    pieces = call_of(format, 10, 1).pieces
    states = tuple(each.tiles if is_tiled else each.packed().data.contiguous() for each in pieces)
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(sum(SIZES), (2, 3, 41), generator=generator)
    read = ReadInput(states, index, is_tiled)
    assert recall.read_tokens(moved(read, on)).cpu().equal(reference.read_tokens(read))
    index = torch.stack([torch.randperm(sum(SIZES), generator=generator)[:41] for _ in range(2)])
    index[0, 3:9] = index[1, 40] = -1
    rows = reference.read_tokens(replace(read, index=index.clamp(min=0).flip(1)[:, None].expand(-1, 3, -1)))
    ours, truth = (tuple(piece.clone() for piece in states) for _ in range(2))
    ours = tuple(hosted(piece, on) for piece in ours)
    recall.write_tokens(replace(moved(WriteInput((), index, rows, is_tiled), on), pieces=ours))
    reference.write_tokens(WriteInput(truth, index, rows, is_tiled))
    if on == "cuda":
        torch.cuda.synchronize()
    for mine, true, before in zip(ours, truth, states, strict=True):
        assert mine.equal(true)
        assert not true.equal(before)


def test_the_reference_writes_where_the_index_says() -> None:
    rows, pieces = torch.arange(1.0, 13).view(1, 2, 3, 2), tuple(torch.zeros(1, 2, size, 2) for size in (32, 16))
    reference.write_tokens(WriteInput(pieces, torch.tensor([[35, -1, 7]]), rows, is_tiled=False))
    tiles = tuple(tiles_of(torch.zeros(1, 2, size, 2)) for size in (32, 16))
    reference.write_tokens(WriteInput(tiles, torch.tensor([[35, -1, 7]]), rows.view(torch.int32), True))
    for first, second in (pieces, [each.transpose(3, 4).flatten(2, 3).view(torch.float32) for each in tiles]):
        assert first[0, :, 7].tolist() == [[5.0, 6.0], [11.0, 12.0]]
        assert second[0, :, 3].tolist() == [[1.0, 2.0], [7.0, 8.0]]
        assert (int((first != 0).sum()), int((second != 0).sum())) == (4, 4)


WHOLE = [
    {"recall_store": "int4", "positions": "compact", "policy": H2O()},
    pytest.param({"recall_store": "plain", "positions": "original", "batch": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", WHOLE, ids=str)
def test_a_model_recalls_the_same_through_triton(
    on: str,
    options: dict[str, Any],
    one_layer: tuple[PreTrainedModel, PreTrainedModel],
    text: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks, padding, single tokens, and a rollback, with digests and before them."""
    monkeypatch.setattr(recall_of_cache, "CANDIDATES", 3)
    monkeypatch.setattr(memory_of_cache, "RecallMemory", partial(RecallMemory, piece=128))
    if on == "cpu":
        monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    model, rows, read, caches = one_layer[1], options.get("batch", 1), [], []
    ids, mask = text(38, rows=rows), torch.ones(rows, 30, dtype=torch.bool)
    mask[:1, :4] = False
    for is_triton in (False, True):
        if on == "cpu":
            monkeypatch.setattr(kernels, "_has_triton", lambda _, chosen=is_triton: chosen)
        device = on if is_triton else "cpu"
        nn.Module.to(model, device)
        cache = KVCache(model, budget=12, sinks=2, window=4, chunk=10, recall=16, **options)
        with torch.no_grad():
            padded = model(ids[:, :30].to(device), attention_mask=mask.to(device), past_key_values=cache)
            cache.rollback(2)
            parts = ids[:, 28:].to(device).split([7, 1, 1, 1], 1)
            said = [padded.logits[:, -1:], *(model(part, past_key_values=cache).logits for part in parts)]
        read.append(torch.cat(said, 1).cpu())
        caches.append(cache)
    assert not read[1].equal(read[0])  # another order of sums, so it did run
    assert (read[1] - read[0]).norm() <= 1e-5 * read[0].norm()
    theirs, ours = (cache.layers[0].table.recall for cache in caches)
    assert ours is not None
    assert theirs is not None
    assert ours.device.type == on
    assert ours.candidates == 4
    assert ours.last_recalled.cpu().equal(theirs.last_recalled)
    assert (ours.last_recalled >= 0).any()
    for name, tensor in ours.tensors().items():
        torch.testing.assert_close(
            tensor.cpu(), theirs.tensors()[name], atol=1 if tensor.dtype == torch.uint8 else 1e-5, rtol=0
        )
