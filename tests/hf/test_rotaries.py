"""Which rotary table each layer is given: models with two tables of one base, and tables that look alike."""

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import Text
from windlass import KVCache, UnsupportedModel
from windlass.hf.attach import attached
from windlass.hf.probe import Probe
from windlass.hf.rope import rotaries_of
from windlass.testing import VOCABULARY

SLIDING, FULL = "sliding_attention", "full_attention"
TYPES = [SLIDING, SLIDING, SLIDING, FULL]
ATTENTION_FACTOR = 1.208
# As OLMo 3 has it: one base, YaRN in the full layers alone.
TABLES = {
    SLIDING: {"rope_type": "default", "rope_theta": 5e5},
    FULL: {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": ATTENTION_FACTOR,
    },
}


def two_tables() -> PreTrainedModel:
    """A small OLMo 3. Its matrices hold values of bfloat16, so that one text is the same in both dtypes."""
    config = AutoConfig.for_model(
        "olmo3",
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=52,
        num_hidden_layers=len(TYPES),
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=128,
        max_position_embeddings=65536,
        sliding_window=11,
        layer_types=TYPES,
        rope_parameters=TABLES,
        initializer_range=0.15,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, cache: KVCache | None = None) -> Tensor:
    out: Tensor = model(ids, past_key_values=cache, use_cache=cache is not None).logits
    return out.float()


def set_in_order(is_reversed: bool) -> Callable[[Iterable[str]], list[str]]:
    """A `set` whose order is given: a real one's depends on PYTHONHASHSEED."""
    return lambda kinds: sorted(dict.fromkeys(kinds), reverse=is_reversed)


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tables_of_one_base(
    dtype: torch.dtype, is_reversed: bool, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, ids = two_tables(), text(45)
    expected = logits(exact, ids)
    model = two_tables()
    nn.Module.to(model, dtype)
    plain = logits(model, ids)
    monkeypatch.setattr(sys.modules[type(model).__module__], "set", set_in_order(is_reversed), raising=False)
    windlass.attach(model)
    rotaries = attached(model).rotaries
    assert [rotary and rotary.layer_type for rotary in rotaries] == TYPES
    for rotary, kind in zip(rotaries, TYPES, strict=True):
        assert rotary is not None
        cos, sin = rotary.tables(100, torch.device("cpu"))
        lengths = (cos.square() + sin.square()).sqrt()
        assert torch.allclose(lengths, torch.tensor(ATTENTION_FACTOR if kind == FULL else 1.0))
    own_error = (plain - expected).norm() / expected.norm()
    for chunk in (7, 45):
        cache = KVCache(model)
        ours = torch.cat([logits(model, piece, cache) for piece in ids.split(chunk, 1)], 1)
        assert (ours - expected).norm() / expected.norm() <= 1e-5 + 1.2 * own_error


class Table(nn.Module):
    """A rotary module that turns all channels by one angle at each of the probe's two positions."""

    def __init__(self, near: float, far: float, scale: float = 1.0) -> None:
        super().__init__()
        self.angles = torch.tensor([[[near]], [[far]]]).expand(2, 1, 6)
        self.scale = scale

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.scale * self.angles.cos(), self.scale * self.angles.sin()


def chosen(tables: Mapping[Any, Table], right: Table, layer_types: list[str], dtype: torch.dtype) -> str | None:
    """The layer type of the table that is found where `right` turned the keys."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL, layer_types=layer_types)).to(dtype)
    model.tables = nn.ModuleList(tables.values())
    rotated, plain = Probe(False), Probe(True)
    for kind, table in tables.items():
        rotated.rotary_output(table, (), {"layer_type": kind}, table())
    keys = torch.randn(2, 2, 1, 6, generator=torch.Generator().manual_seed(0))
    cos, sin = right()
    halves = torch.cat((-keys[..., 3:], keys[..., :3]), -1)
    plain.keys[0] = keys
    rotated.keys[0] = (keys * cos[:, None] + halves * sin[:, None]).to(dtype).float()
    (rotary,) = rotaries_of(model, rotated, plain)
    assert rotary is not None
    return rotary.layer_type


SMALL = {"vocab_size": 9, "hidden_size": 6, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 5}
NEAR, FAR = 0.4, 2.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [Table(NEAR, FAR + 0.1), Table(NEAR, FAR, 1.02)], ids=["far", "scale"])
@pytest.mark.parametrize("order", [(SLIDING, FULL), (FULL, SLIDING)])
def test_the_closest_table_is_taken(order: tuple[str, str], other: Table, dtype: torch.dtype) -> None:
    tables = {FULL: Table(NEAR, FAR), SLIDING: other}
    # The config's entry for the layer does not matter if the keys decide.
    assert chosen({kind: tables[kind] for kind in order}, tables[FULL], [SLIDING], dtype) == FULL


def test_tables_that_a_dtype_cannot_tell_apart() -> None:
    # Half a percent: less than rounding to bfloat16.
    tables = {FULL: Table(NEAR, FAR), SLIDING: Table(NEAR, FAR + 0.004)}
    assert chosen(tables, tables[FULL], [SLIDING], torch.float32) == FULL
    assert chosen(tables, tables[FULL], [SLIDING], torch.bfloat16) == SLIDING
    assert chosen(tables, tables[FULL], [FULL], torch.bfloat16) == FULL
    with pytest.raises(UnsupportedModel, match="layer 0 by either of two tables, which its dtype can't tell apart"):
        chosen({None: tables[FULL], "another": tables[SLIDING]}, tables[FULL], [SLIDING], torch.bfloat16)


@pytest.mark.parametrize("order", [(SLIDING, FULL), (FULL, SLIDING)])
def test_equal_tables_are_told_apart_by_layer_type(order: tuple[str, str]) -> None:
    tables = {kind: Table(NEAR, FAR) for kind in order}
    assert chosen(tables, tables[FULL], [FULL], torch.float32) == FULL
    assert chosen(tables, tables[FULL], [SLIDING], torch.float32) == SLIDING
