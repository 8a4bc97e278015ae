"""Models with norms after RoPE whose weights do not commute with it (Hunyuan)."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import windlass
from tests.helpers.models import Models, Text, greedy, masked, read
from tests.helpers.slots import GROUP, HEAD_DIM, HEADS, turned_slots
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.hf.attach import attached
from windlass.policies import Compactor, ExpectedAttention, Needs, Observation, Policy, Recent, Slots, TriAttention
from windlass.testing import tiny_model

FAMILIES = ("hunyuan", "hunyuan_moe")
TOLERANCE = 1e-4  # of a standard deviation
BUDGET, SINKS = 20, 3


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norms_are_found_and_matter(family: str, attached_model: Models) -> None:
    model = attached_model(family)
    rotaries = attached(model).rotaries
    for rotary, layer in zip(rotaries, model.model.layers, strict=True):
        assert rotary is not None
        assert rotary.norm_weights is not None
        assert rotary.norm_weights.query_norm is layer.self_attn.query_layernorm
        assert rotary.norm_weights.key_norm is layer.self_attn.key_layernorm
        # As unequal as can be in a pair, so that leaving it out, or applying it before RoPE, shows.
        first, second = layer.self_attn.key_layernorm.weight.detach().chunk(2)
        assert float((first - second).abs().max()) > 0.2
    # Layers that rotate alike share one table.
    rotaries[0].tables(9, torch.device("cpu"))
    assert rotaries[0].built is rotaries[1].built


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 45])
def test_a_budget_equals_an_explicit_mask(
    family: str, chunk: int, plain_model: Models, attached_model: Models, text: Text
) -> None:
    ids, at = text(45, seed=3), torch.arange(45)
    seen = (at <= at[:, None]) & ((at < SINKS) | (at[:, None] - at <= BUDGET - SINKS))
    cache = KVCache(attached_model(family), BUDGET, Recent(), sinks=SINKS, positions="original")
    assert_close(read(attached_model(family), cache, ids, chunk), masked(plain_model(family), ids, seen))


def test_positions_are_places(plain_model: Models, attached_model: Models, text: Text) -> None:
    """Ranks are places of a text, too. With preserved distances alone, attention would differ."""
    model, ids = attached_model("hunyuan"), text(45, seed=5)
    with torch.no_grad():
        expected = plain_model("hunyuan")(ids, use_cache=False).logits
    for positions in ("compact", "auto"):
        assert_close(read(model, KVCache(model, positions=positions), ids, 7), expected)
    for positions in ("self_extend(4, 60)", "clamp(60)"):
        with pytest.raises(UsageError, match="attention depends on both"):
            read(model, KVCache(model, positions=positions), ids, 7)


def test_ranks_are_read_as_a_text_of_the_kept_tokens(plain_model: Models, text: Text) -> None:
    """In one layer, whose keys depend on their own tokens alone."""
    one, plain = tiny_model("hunyuan"), plain_model("hunyuan")
    one.load_state_dict(plain.state_dict())
    del one.model.layers[1:]
    one.config.num_hidden_layers = 1
    ids = text(45, seed=11)
    kept = torch.cat((ids[:, :SINKS], ids[:, 45 - BUDGET + SINKS - 1 :]), 1)  # the newest token's own slot, too
    with torch.no_grad():
        expected = one(kept, use_cache=False).logits[:, -1]
        windlass.attach(one)
        cache = KVCache(one, BUDGET, Recent(), sinks=SINKS, positions="compact")
        assert_close(read(one, cache, ids, 1)[:, -1], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_rolled_back(family: str, attached_model: Models, text: Text) -> None:
    model, ids, other = attached_model(family), text(40, seed=6), text(4, seed=7)
    cache = KVCache(model, BUDGET, Recent(), sinks=SINKS)
    read(model, cache, ids[:, :35], 1)
    read(model, cache, other, 1)
    cache.rollback(4)
    twin = KVCache(model, BUDGET, Recent(), sinks=SINKS)
    expected = read(model, twin, ids, 1)[:, 35:]
    assert_close(read(model, cache, ids[:, 35:], 1), expected)
    assert greedy(model, cache, ids[:, -1:], 5) == greedy(model, twin, ids[:, -1:], 5)


def test_bfloat16_is_as_close_to_float32_as_plain_bfloat16(plain_model: Models, text: Text) -> None:
    ids, low = text(45, seed=8), tiny_model("hunyuan").bfloat16()
    with torch.no_grad():
        exact = plain_model("hunyuan")(ids, use_cache=False).logits
        theirs = low(ids, use_cache=False).logits
        ours = low(ids, past_key_values=KVCache(windlass.attach(low))).logits
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


def test_weights_that_change_after_attach_are_read_anew(text: Text) -> None:
    ids, model = text(45, seed=9), windlass.attach(tiny_model("hunyuan"))
    with torch.no_grad():
        model.model.layers[1].self_attn.key_layernorm.weight.mul_(torch.linspace(0.5, 2, 8))
        expected = model(ids, use_cache=False).logits
        assert_close(model(ids, past_key_values=KVCache(model)).logits, expected)


def test_a_norm_that_hides_a_channel_is_refused() -> None:
    model = tiny_model("hunyuan")
    model.model.layers[1].self_attn.key_layernorm.weight.data[3] = 0.0
    with pytest.raises(UnsupportedModel, match="layer 1 of which a weight is 0"):
        windlass.attach(model)


class Shifted(nn.Module):
    """A norm that multiplies by more than its weight says."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self._norm = norm.weight, [norm]

    def forward(self, states: Tensor) -> Tensor:
        return self._norm[0](states) * torch.linspace(0.5, 2, states.shape[-1])


@pytest.mark.parametrize(("which", "why"), [("key", "rotate the keys of layer 0"), ("query", "queries of layer 0")])
def test_a_norm_with_other_weights_than_its_own_is_refused(which: str, why: str) -> None:
    model = tiny_model("hunyuan")
    attention = model.model.layers[0].self_attn
    setattr(attention, f"{which}_layernorm", Shifted(getattr(attention, f"{which}_layernorm")))
    with pytest.raises(UnsupportedModel, match=why):
        windlass.attach(model)


@dataclass(frozen=True)
class Compares(Policy):
    """Computes attention from the keys and queries that policies see, and compares it with the mass that they got."""

    needs = Needs(state=("seen",))
    observed_queries = 1

    def observe(self, slots: Slots, observation: Observation) -> None:
        queries = slots.rotate(observation.queries, observation.positions[:, None])
        keys = slots.rotated_keys().repeat_interleave(queries.shape[1] // slots.keys().shape[1], 1)
        logits = (queries @ keys.mT)[:, :, 0] * queries.shape[-1] ** -0.5
        hidden = (slots.positions < 0).repeat_interleave(queries.shape[1] // slots.keys().shape[1], 1)
        shares = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        mass = shares.unflatten(1, (slots.keys().shape[1], -1)).sum(2)
        assert torch.allclose(mass, observation.mass, atol=1e-5)
        slots.state["seen"].fill_(1.0)

    def score(self, slots: Slots) -> Tensor:
        return slots.state["seen"]


def test_policies_see_the_attention_that_the_model_gives(attached_model: Models, text: Text) -> None:
    cache = KVCache(attached_model("hunyuan"), 60, Compares(), positions="original")
    read(attached_model("hunyuan"), cache, text(30, seed=10), 7)
    assert all(bool((layer.table.state["seen"] == 1).any()) for layer in cache.layers)


@pytest.mark.parametrize("policy", [ExpectedAttention(future=7), TriAttention(reach=16), Compactor()], ids=repr)
def test_policies_weigh_products_by_the_gain(policy: Policy) -> None:
    """A gain that is alike in both channels of a pair commutes with RoPE: it may as well be in the keys."""
    gain = torch.tensor([1.7, 0.4, 1.7, 0.4, 0.6, 1.3])
    inside, beside = turned_slots(), turned_slots()
    beside = replace(beside, query_gain=lambda: gain)
    inside.store.restore({"keys": inside.keys() * gain, "values": inside.values()})
    at = torch.tensor([[9, 8], [-1, -1], [3, -1]])
    queries = torch.randn(3, HEADS, 2, HEAD_DIM)
    mass = torch.zeros(3, HEADS // GROUP, inside.positions.shape[-1])
    for slots in (inside, beside):
        slots.state.update({name: torch.zeros(slots.positions.shape) for name in policy.needs.state})
        policy.observe(slots, Observation(mass, queries, at))
    is_held = inside.positions >= 0
    if isinstance(policy, Compactor):  # leverage is of keys alone
        ours, theirs = beside.state["attended"], inside.state["attended"]
    else:
        ours, theirs = policy.score(beside), policy.score(inside)
    assert torch.allclose(ours[is_held], theirs[is_held], atol=1e-4)
    plain = turned_slots()
    plain.state.update({name: torch.zeros(plain.positions.shape) for name in policy.needs.state})
    policy.observe(plain, Observation(mass, queries, at))
    without = plain.state["attended"] if isinstance(policy, Compactor) else policy.score(plain)
    assert not torch.allclose(without[is_held], theirs[is_held], atol=1e-2)
