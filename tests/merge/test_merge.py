"""Evicted tokens in cells: every rule against loops in float64, and what a cache does with them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass import KVCache
from windlass.core.step import Limits, Record, Step
from windlass.merge import FRAMES, MERGES, TARGETS, Room, absorb
from windlass.positions.rotary import Rotary, Turns
from windlass.stores.base import Plain

Models = Callable[[str], PreTrainedModel]
HEADS, GROUP, SLOTS, KEY_DIM, VALUE_DIM, SINKS, WINDOW, ENDS = 3, 5, 17, 10, 4, 2, 3, (20, 24)
SCALE, TAU = 0.3, 0.1
FRAMED = [
    (name, frame) for name, rule in MERGES.items() for frame in FRAMES if not rule.keeps_keys or frame == FRAMES[0]
]


def rotary_of(model: PreTrainedModel) -> Rotary:
    """Of the first layer: 4 channel pairs, so that two of our 10 channels are never turned."""
    rotary = KVCache(model).layers[0].rotary
    assert rotary is not None
    assert rotary.pairs == 4
    return rotary


def turned(key: Tensor, by: int, tables: tuple[Tensor, Tensor]) -> Tensor:
    """A key at a place of the text, pair by pair, in float64; `by` below 0 turns back, the scale too."""
    cos, sin = (table[abs(by)].double() for table in tables)
    out = key.clone()
    for i in range(4):
        a, b = float(key[i]), float(key[i + 4])
        c, s = float(cos[i]), float(sin[i])
        if by < 0:
            c, s = c / (c * c + s * s), -s / (c * c + s * s)
        out[i], out[i + 4] = a * c - b * s, b * c + a * s
    return out


def by_hand(
    name: str,
    frame: str,
    target: str,
    step: dict[str, Tensor],
    sliding_window: int | None,
    tables: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """Keys, values, merged counts, weights and running cosines after the step, cell by cell in float64."""
    keys, values, merged, weights = (step[each].double().clone() for each in ("keys", "values", "merged", "weights"))
    old_keys, old_values, old_merged = keys.clone(), values.clone(), merged.clone()
    ranked, taus = merged.shape[1], step["taus"].double().clone()
    for row, rank in product(range(2), range(ranked)):
        heads = range(HEADS) if ranked == 1 else [rank]
        held = {slot: int(at) for slot, at in enumerate(step["positions"][row, rank]) if at >= 0}
        oldest = 0 if sliding_window is None else ENDS[row] - sliding_window + 1
        cells = [s for s, at in held.items() if max(SINKS, oldest) <= at < ENDS[row] - WINDOW]
        chosen: list[tuple[int, int, int, float]] = []

        def like(token: int, cell: int, row: int = row, heads: Iterable[int] = heads) -> float:
            each = [torch.cosine_similarity(old_keys[row, h, token], old_keys[row, h, cell], dim=0) for h in heads]
            return float(sum(each)) / len(each)

        for token, at in zip(step["evicted"][row, rank].tolist(), step["before"][row, rank].tolist(), strict=True):
            if at < max(oldest, 0) or not cells:
                continue
            if target == "next":
                later = [s for s in cells if held[s] > at]
                cell = min(later, key=lambda s: held[s]) if later else max(cells, key=lambda s: held[s])
            else:
                cell = max(cells, key=lambda s: like(token, s))
            chosen.append((cell, at, token, like(token, cell)))
        if name == "d2o" and chosen:
            now = sum(each[3] for each in chosen) / len(chosen)
            tau = float(taus[row, rank])
            tau = now if tau == -2 else (tau + now) / 2
            taus[row, rank] = tau
            chosen = [each for each in chosen if each[3] >= tau - 1e-6]
        joining: dict[int, list[tuple[int, int, float]]] = {}
        for cell, at, token, likeness in chosen:
            joining.setdefault(cell, []).append((at, token, likeness))
        for cell, tokens in joining.items():
            merged[row, rank, cell] += sum(old_merged[row, rank, token] + 1 for _, token, _ in tokens)
            for head in heads:
                members = [(held[cell], cell, 1.0), *tokens]
                counts = [float(1 + old_merged[row, rank, s]) for _, s, _ in members]
                if name == "weighted":
                    counts = [float(step["weights"][row, rank, s]) for _, s, _ in members]
                    weights[row, rank, cell] = sum(counts)
                ks = [old_keys[row, head, s] for _, s, _ in members]
                vs = [old_values[row, head, s] for _, s, _ in members]
                places = [at for at, _, _ in members]
                if frame == "rotated":
                    ks = [
                        ks[0],
                        *(
                            turned(turned(k, at, tables), -held[cell], tables)
                            for k, at in zip(ks[1:], places[1:], strict=True)
                        ),
                    ]
                    places = [held[cell]] * len(members)
                if name == "sum":
                    key, value = sum(ks), sum(vs)
                elif name == "pick":
                    last = max(range(len(members)), key=lambda i: -1 if i == 0 else members[i][0])
                    key, value = (ks[last], vs[last]) if head % 2 else (ks[0], vs[0])
                elif name == "d2o":
                    alike = [likeness for _, _, likeness in members]
                    key, value = (sum(w * x for w, x in zip(alike, xs, strict=True)) / len(xs) for xs in (ks, vs))
                elif name == "keepkv":
                    query = step["queries"][row, head * GROUP : (head + 1) * GROUP, 2 - row].double().mean(0)
                    query = turned(query, ENDS[row] - 1, tables)
                    logits = [SCALE * float(query @ turned(k, at, tables)) for k, at in zip(ks, places, strict=True)]
                    ws = [n * math.exp(logit) for n, logit in zip(counts, logits, strict=True)]
                    key, value = (sum(w * x for w, x in zip(ws, xs, strict=True)) / sum(ws) for xs in (ks, vs))
                    factor = math.log(sum(ws) / sum(counts)) / (SCALE * float(query @ turned(key, held[cell], tables)))
                    key = key * min(max(factor, 0.5), 2.0)
                else:
                    key, value = (sum(n * x for n, x in zip(counts, xs, strict=True)) / sum(counts) for xs in (ks, vs))
                keys[row, head, cell] = ks[0] if name == "values" else key
                values[row, head, cell] = value
    return keys, values, merged, weights, taus


def random_step(ranked: int, seed: int) -> dict[str, Tensor]:
    """Two rows over budget; some slots free, some evicted ones too, some slots already cells."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(ENDS[i // ranked], generator=g)[:SLOTS] for i in range(2 * ranked)])
    positions = positions.reshape(2, ranked, SLOTS).int()
    positions[..., 11] = -1
    weights = torch.rand(2, ranked, SLOTS, generator=torch.Generator().manual_seed(seed + 9)).add(0.1)
    weights[..., 11] = 0
    evicted = torch.stack([torch.randperm(SLOTS, generator=g)[:6] for _ in range(2 * ranked)]).reshape(2, ranked, 6)
    before = positions.gather(-1, evicted)
    return {
        "keys": torch.randn(2, HEADS, SLOTS, KEY_DIM, generator=g),
        "values": torch.randn(2, HEADS, SLOTS, VALUE_DIM, generator=g),
        "merged": torch.randint(0, 3, (2, ranked, SLOTS), generator=g).float(),
        "queries": torch.randn(2, HEADS * GROUP, 3, KEY_DIM, generator=g),
        "positions": positions.scatter(-1, evicted, before.where(before < 0, -2)),
        "evicted": evicted,
        "before": before,
        "weights": weights,
        "taus": torch.full((2, ranked), TAU if seed % 2 else -2.0),
    }


def record_of(step: dict[str, Tensor]) -> Record:
    """Of a step of 3 tokens and of 2."""
    places = torch.tensor([[ENDS[0] - 3, ENDS[0] - 2, ENDS[0] - 1], [ENDS[1] - 2, ENDS[1] - 1, -1]])
    now = Step(places, (3, 2), torch.tensor(ENDS), torch.tensor([0, 0]), max(ENDS))
    gone = {"evicted": step["evicted"], "evicted_positions": step["before"]}
    return Record(now, (0, 0), 0, torch.zeros(2, 1, 1).long(), {}, {}, {}, None, None, step["queries"], SCALE, **gone)


def room_of(step: dict[str, Tensor], rotary: Rotary, sliding_window: int | None = None, **state: Tensor) -> Room:
    store = Plain()
    store.allocate(step["keys"], step["values"], SLOTS)
    store.put(torch.arange(SLOTS).expand(2, 1, -1), {"keys": step["keys"], "values": step["values"]})
    limits = Limits(budget=SLOTS - 6, sinks=SINKS, window=WINDOW, chunk=5, rollback=0)
    turns = Turns(rotary, max(ENDS), torch.device("cpu"))
    state = {"merged": step["merged"].clone(), "token_weight": step["weights"].clone(), **state}
    return Room(store, step["positions"], state, {}, limits, sliding_window, turns)


@pytest.mark.parametrize("sliding_window", [None, 15])
@pytest.mark.parametrize("ranked", [1, HEADS])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "frame"), FRAMED)
def test_every_rule_equals_loops_over_cells(
    attached_model: Models, name: str, frame: str, target: str, ranked: int, sliding_window: int | None
) -> None:
    rotary = rotary_of(attached_model("llama_yarn"))  # whose tables are scaled
    rule = replace(MERGES[name](target, frame), threshold=-1.0)
    for seed in range(2):
        step = random_step(ranked, seed)
        room = room_of(step, rotary, sliding_window)
        if rule.is_relative and seed % 2:
            room.statistics["merged_likeness"] = step["taus"].clone()
        record = absorb(rule, room, record_of(step))
        *expected, taus = by_hand(
            name, frame, target, step, sliding_window, rotary.tables(max(ENDS), torch.device("cpu"))
        )
        ours = room.store.keys(), room.store.values(), room.state["merged"], room.state["token_weight"]
        for mine, truth in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine.double(), truth, atol=2e-5, rtol=0)
        assert not room.state["merged"].equal(step["merged"])
        assert ours[0].isfinite().all()  # in free slots, too
        if rule.is_relative:
            torch.testing.assert_close(room.statistics["merged_likeness"].double(), taus, atol=1e-6, rtol=0)
        assert record.cells is not None
        assert record.cells_before is not None
        room.store.put(record.cells, record.cells_before)
        assert room.store.keys().equal(step["keys"])
        assert room.store.values().equal(step["values"])
