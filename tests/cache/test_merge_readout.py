"""Attention to merged tokens, against lists of the tokens that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import Models, Text
from windlass import KVCache, UsageError
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.merging import merge_of
from windlass.core.step import AttentionCall, Limits, Step
from windlass.core.types import Scores
from windlass.policies import Needs, Observation, Policy, Recent, Slots
from windlass.positions.modes import Clamp, Original, PositionMode, SelfExtend
from windlass.positions.rotary import Rotary
from windlass.stores.base import Store
from windlass.stores.formats import Int8, Plain

HEADS, GROUP, KEY_DIM, VALUE_DIM, TOKENS, BUDGET, SINKS, WINDOW, SCALE = 3, 5, 10, 6, 40, 15, 2, 4, 0.4


@dataclass(frozen=True)
class Third(Policy):
    """Keeps every third token, each head others, and remembers the last mass that it was shown."""

    needs = Needs(state=("mass",))
    observed_queries = 1

    def observe(self, slots: Slots, seen: Observation) -> None:
        slots.state["mass"].copy_(seen.mass)

    def score(self, slots: Slots) -> Scores:
        heads = torch.arange(HEADS)[None, :, None]
        return ((slots.positions + heads) % 3 == 0).float()


@dataclass
class Told:
    """A run of the layer: its tokens, and the outputs of the last query."""

    keys: Tensor
    values: Tensor
    query: Tensor
    out: Tensor
    layer: SlotLayer
    cells: list[dict[int, list[int]]]  # per row and head: the places of the members of the cell at a place


def told(merge: str, rotary: Rotary | None, mode: PositionMode, store: Store, chunk: int) -> Told:
    """Read 40 tokens in steps of `chunk`, then one more query. Returns the place of each token, by lists."""
    g = torch.Generator().manual_seed(3)
    rule = merge_of(merge)
    layer = SlotLayer(0, Limits(BUDGET, SINKS, WINDOW, chunk, 0), Third(), rotary, store, rule)
    keys = torch.randn(2, HEADS, TOKENS, KEY_DIM, generator=g)
    values = torch.randn(2, HEADS, TOKENS, VALUE_DIM, generator=g)
    cells: list[dict[int, list[int]]] = [{} for _ in range(2 * HEADS)]
    for start in range(0, TOKENS, chunk):
        end = min(start + chunk, TOKENS)
        query = torch.randn(2, HEADS * GROUP, end - start, KEY_DIM, generator=g)
        places = torch.arange(start, end).expand(2, -1)
        ends = torch.tensor([end, end])
        step = Step(places, (end - start,) * 2, ends, torch.tensor([0, 0]), end, is_prompt=True)
        before = [set(layer.positions[r, h].tolist()) for r, h in product(range(2), range(HEADS))] if start else []
        new = keys[:, :, start:end], values[:, :, start:end]
        out = layer.step(LayerCall(query, *new, step, mode, AttentionCall(SCALE)))
        for i, (row, head) in enumerate(product(range(2), range(HEADS))):
            held = {at for at in layer.positions[row, head].tolist() if at >= 0}
            gone = ({at for at in before[i] if at >= 0} if before else set()) | set(range(start, end))
            for at in sorted(gone):
                cells[i].setdefault(at, [at])
            open_cells = [at for at in held if SINKS <= at < end - WINDOW]
            for at in sorted(gone - held):
                cell = min((c for c in open_cells if c > at), default=max(open_cells))
                cells[i][cell] += cells[i].pop(at)
    query = torch.randn(2, HEADS * GROUP, 1, KEY_DIM, generator=g)
    own = torch.randn(2, HEADS, 1, KEY_DIM, generator=g), torch.randn(2, HEADS, 1, VALUE_DIM, generator=g)
    last = torch.full((2, 1), TOKENS)
    step = Step(last, (1, 1), torch.tensor([TOKENS + 1] * 2), torch.tensor([0, 0]), TOKENS + 1)
    out = layer.step(LayerCall(query, *own, step, mode, AttentionCall(SCALE)))
    for each in cells:
        each[TOKENS] = [TOKENS]
    keys, values = (torch.cat(both, 2).double() for both in ((keys, own[0]), (values, own[1])))
    return Told(keys, values, query.double(), out, layer, cells)


def turned(states: Tensor, angles: Tensor) -> Tensor:
    """Channel pairs (i, i + n) as complex numbers, times exp(i angle)."""
    n = len(angles)
    pairs = torch.complex(states[..., :n], states[..., n : 2 * n]) * torch.polar(torch.ones(n).double(), angles)
    return torch.cat((pairs.real, pairs.imag, states[..., 2 * n :]), -1)


def expected(
    run: Told, merge: str, speeds: Tensor, read_at: Callable[[int], float]
) -> tuple[Tensor, list[dict[int, float]]]:
    """Output of the last query, cell by cell in float64, and the probability of every cell."""
    rule = merge_of(merge)
    assert rule is not None
    out, masses = torch.zeros(2, HEADS * GROUP, VALUE_DIM).double(), []
    for i, (row, head) in enumerate(product(range(2), range(HEADS))):
        mass, held = dict.fromkeys(run.cells[i], 0.0), {}
        for at, members in run.cells[i].items():
            n, ks = len(members), run.keys[row, head, members]
            held[at] = turned(ks.mean(0), speeds * read_at(at)), n if rule.is_counted else 1
        for q in range(head * GROUP, (head + 1) * GROUP):
            query = turned(run.query[row, q, 0], speeds * read_at(TOKENS))
            weights = {at: share * float((SCALE * key @ query).exp()) for at, (key, share) in held.items()}
            total = sum(weights.values())
            for at, members in run.cells[i].items():
                mass[at] += weights[at] / total
                out[row, q] += weights[at] / total * run.values[row, head, members].mean(0)
        masses.append(mass)
    return out, masses


def check(run: Told, merge: str, speeds: Tensor, read_at: Callable[[int], float], tolerance: float) -> None:
    out, masses = expected(run, merge, speeds, read_at)
    assert max(len(members) for cells in run.cells for members in cells.values()) > 3
    error = (run.out[:, :, 0].double() - out).norm() / out.norm()
    assert error < tolerance, error
    for i, (row, head) in enumerate(product(range(2), range(HEADS))):
        there = run.layer.positions[row, head].tolist()
        for slot, at in enumerate(there):
            if at >= 0:
                assert abs(float(run.layer.table.state["mass"][row, head, slot]) - masses[i][at]) < 5 * tolerance


RULES = ["mean_count(next)", "mean(next)"]


@pytest.mark.parametrize("chunk", [3, TOKENS])
@pytest.mark.parametrize("merge", RULES)
def test_a_query_reads_all_merged_tokens(attached_model: Models, merge: str, chunk: int) -> None:
    rotary = KVCache(attached_model("llama")).layers[0].rotary
    assert rotary is not None
    cos, sin = (table[1].double() for table in rotary.tables(2, torch.device("cpu")))
    check(told(merge, rotary, Original(), Plain(), chunk), merge, torch.atan2(sin, cos), float, 1e-4)


@pytest.mark.parametrize("merge", RULES)
def test_a_layer_without_rotation_reads_them_too(merge: str) -> None:
    check(told(merge, None, Original(), Plain(), 7), merge, torch.zeros(4).double(), float, 1e-5)


@pytest.mark.parametrize(
    ("mode", "read_at"),
    [
        (SelfExtend(4, 8), lambda p: TOKENS // 4 + 8 - 2 - (TOKENS - p) if TOKENS - p < 8 else p // 4),
        (Clamp(9), lambda p: max(p, TOKENS - 9)),
    ],
    ids=["self_extend", "clamp"],
)
def test_merged_tokens_are_read_where_the_mode_has_them(
    attached_model: Models, mode: PositionMode, read_at: Callable[[int], float]
) -> None:
    rotary = KVCache(attached_model("llama")).layers[0].rotary
    assert rotary is not None
    cos, sin = (table[1].double() for table in rotary.tables(2, torch.device("cpu")))
    at = (lambda p: TOKENS // 4 + 6 if p == TOKENS else read_at(p)) if isinstance(mode, SelfExtend) else read_at
    merge = "mean_count(next)"
    check(told(merge, rotary, mode, Plain(), 7), merge, torch.atan2(sin, cos), at, 1e-4)


@pytest.mark.parametrize("merge", RULES)
def test_low_bit_merged_tokens_are_read_alike(attached_model: Models, merge: str) -> None:
    rotary = KVCache(attached_model("llama")).layers[0].rotary
    assert rotary is not None
    cos, sin = (table[1].double() for table in rotary.tables(2, torch.device("cpu")))
    check(told(merge, rotary, Original(), Int8(), 7), merge, torch.atan2(sin, cos), float, 0.03)


def read(model: PreTrainedModel, cache: KVCache, ids: Tensor, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(size, 1)], 1)


def test_merging_shows_all_that_was_not_yet_merged(attached_model: Models, text: Text) -> None:
    """Recent hides the tokens that it would have evicted. Where those were merged there is nothing to hide."""
    model, ids = attached_model("llama"), text(50)
    full = read(model, KVCache(model), ids, 50)
    once = read(model, KVCache(model, budget=20, policy=Recent(), merge="mean_count(next)"), ids, 50)
    torch.testing.assert_close(once, full, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"merge": "mean(threshold=2)"}, "threshold of a merge must be a cosine from -1 to 1, got 2"),
        ({"merge": "mean(threshold=a)"}, "threshold must be a number, got 'a'"),
        ({"merge": "mean(rate=0.1)"}, "'rate' is not a setting. The only number is threshold"),
        ({"merge": "mean(next, nearest)"}, "target is given twice"),
        ({"merge": "mean(threshold=0.1, threshold=0.2)"}, "threshold is given twice"),
    ],
)
def test_what_does_not_go_together_is_refused(attached_model: Models, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KVCache(attached_model("llama"), budget=20, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("mean_count", "mean_count"),
        ("mean_count( nearest, threshold=-1)", "mean_count"),
        ("mean_count(threshold=.1, next)", "mean_count(next, threshold=0.1)"),
        ("weighted(next)", "weighted"),
        ("mean(threshold=1)", "mean(threshold=1)"),
        ("sum(threshold=0.123456789)", "sum(threshold=0.123456789)"),
    ],
)
def test_a_rule_prints_as_the_shortest_text_that_gives_it(typed: str, shown: str) -> None:
    rule = merge_of(typed)
    assert str(rule) == shown
    assert merge_of(shown) == rule
