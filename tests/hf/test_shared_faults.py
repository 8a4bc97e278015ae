"""Faults planted in layers that share keys, each refused by name. Changes of unshared parts are honoured. Pictures."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

import windlass
from tests.helpers.hybrid_caches import assert_same, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.policies import Recent
from windlass.testing import SLIDING_WINDOW, VOCABULARY, tiny_model

SHARING, SOURCE = 7, 2  # the last layer, and whose keys it attends to
TOKENS, PICTURES, PICTURE = 45, (5, 20), 9
TOLERANCE = 1e-5


def planted(model: PreTrainedModel, fault: str) -> PreTrainedModel:
    """`model`, whose last layer is given something else than it was."""
    layers, theirs = model.model.layers, dict[str, Any]()

    def note(_module: nn.Module, _args: object, options: dict[str, Any]) -> None:
        theirs.update(options)  # of the layer before, which has a sliding window

    def change(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        kind = str(module.layer_type)
        keys, values = options["shared_kv_states"][kind]
        states = {"other keys": (keys.clone(), values), "other values": (keys, values.clone())}.get(fault)
        if states is not None:
            return args, {**options, "shared_kv_states": {kind: states}}
        name = {"window": "attention_mask", "rotation": "position_embeddings"}.get(fault)
        return args, options if name is None else {**options, name: theirs[name]}

    layers[SHARING - 1].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    layers[SHARING].self_attn.register_forward_pre_hook(change, with_kwargs=True)
    return model


FAULTS = {
    "window": rf"layer 7 to the keys and values of layer 2 through a sliding window of {SLIDING_WINDOW}, and layer 2 "
    "keeps them for one of None",
    "other values": "attends in layer 7 to the keys of layer 2, and to other values",
    "other keys": r"has layers without attention keys and values of their own: \[7\]",
    "rotation": r"attends otherwise in layer 7 than a cache does: its output is \d+\.\d% off",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_sharing_layer_is_refused_by_name(fault: str) -> None:
    model = planted(tiny_model("gemma3n"), fault)
    with pytest.raises(UnsupportedModel, match=f"Gemma3nForCausalLM:? .*{FAULTS[fault]}"):
        windlass.attach(model)
    assert "forward" not in vars(model.model)


def test_keys_that_become_others_later_are_refused_then(text: Text) -> None:
    model = windlass.attach(tiny_model("gemma3n"))
    cache = KVCache(model, 20, Recent())
    read(model, cache, text(30), 30)
    before = held(cache)
    planted(model, "other keys")
    with pytest.raises(
        UsageError, match="layer 7 attends to other keys than at attach, when it read the keys of layer 2"
    ):
        read(model, cache, text(3), 3)
    assert_same(held(cache), before)


def test_a_part_of_a_mask_that_is_not_its_end_is_refused(text: Text) -> None:
    model = windlass.attach(tiny_model("gemma4_e"))

    def cut(_module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        part = options["attention_mask"][:, :, :2, :]
        return args, {**options, "attention_mask": part}

    model.model.layers[SHARING].self_attn.register_forward_pre_hook(cut, with_kwargs=True)
    with pytest.raises(UsageError, match="takes a part of its attention mask"):
        read(model, KVCache(model), text(9), 9)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
def test_a_sharing_layer_has_a_scale_of_its_own(chunk: int, text: Text) -> None:
    plain, model = tiny_model("gemma3n"), tiny_model("gemma3n")
    for each in (plain, model):
        each.model.layers[SHARING].self_attn.scaling = 0.4
    model, ids = windlass.attach(model), text(TOKENS)
    with torch.no_grad():
        theirs, other = plain(ids, use_cache=False).logits, tiny_model("gemma3n")(ids, use_cache=False).logits
    assert (read(model, KVCache(model), ids, chunk) - theirs).norm() <= TOLERANCE * theirs.norm()
    assert (other - theirs).norm() > 0.01 * theirs.norm()


def wrapped(family: Models) -> PreTrainedModel:
    """Gemma 4 E where it reads pictures, too: their tokens see each other in sliding layers."""
    config = copy.deepcopy(family("gemma4_wrapped").config)
    config.text_config = copy.deepcopy(family("gemma4_e").config)
    config.text_config.use_bidirectional_attention = "vision"
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("wanted", [0, 3, 13])
@pytest.mark.parametrize("passes", [(TOKENS,), (17, 28), (5, 9, 6, 9, 16)], ids=str)
@torch.no_grad()
def test_pictures_before_layers_that_leave_queries_out(
    wanted: int, passes: tuple[int, ...], plain_model: Models, text: Text
) -> None:
    plain, model = wrapped(plain_model), windlass.attach(wrapped(plain_model))
    ids, types = text(TOKENS) % (VOCABULARY - 1), torch.zeros(1, TOKENS, dtype=torch.long)
    for at in PICTURES:
        types[:, at : at + PICTURE] = 1
    theirs = plain(input_ids=ids, mm_token_type_ids=types, use_cache=False).logits
    assert (plain(input_ids=ids, use_cache=False).logits - theirs).norm() > 0.01 * theirs.norm()
    cache, start, pieces = KVCache(model), 0, list[Tensor]()
    for tokens in passes:
        stop = start + tokens
        given = {"input_ids": ids[:, start:stop], "mm_token_type_ids": types[:, :stop]}
        pieces.append(model(**given, past_key_values=cache, logits_to_keep=wanted).logits)
        own = theirs[:, start:stop][:, -wanted:]
        assert (pieces[-1] - own).norm() <= TOLERANCE * own.norm()
        start = stop
