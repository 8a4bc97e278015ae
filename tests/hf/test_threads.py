"""Models that share a config object, and threads: right, or refused before anything changes."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import Text, read
from windlass import KVCache, UsageError
from windlass.testing import tiny_model

TOLERANCE = 1e-5
SECONDS = 20


@contextmanager
def held_in_layer(model: PreTrainedModel, layer: int, tokens: int) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A pass of `tokens` sets the first event when it comes to a layer, and goes on when the second is set."""
    arrived, go_on = threading.Event(), threading.Event()

    def wait(_: object, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[1] == tokens:
            arrived.set()
            assert go_on.wait(SECONDS)

    handle = model.model.layers[layer].register_forward_pre_hook(wait)
    try:
        yield arrived, go_on
    finally:
        go_on.set()
        handle.remove()


@contextmanager
def thread(work: Callable[[], object]) -> Iterator[list[object]]:
    """Run `work` in another thread meanwhile. After the block, its result or its error is in the list."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    other = threading.Thread(target=run)
    other.start()
    try:
        yield found
    finally:
        other.join(SECONDS)
        assert found, "the thread did not end"


def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits


def twins(attention: str, is_config_shared: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two equal models."""
    model = tiny_model("llama")
    config = model.config
    assert isinstance(config, LlamaConfig)
    other = LlamaForCausalLM(config if is_config_shared else copy.deepcopy(config)).eval()
    other.load_state_dict(model.state_dict())
    assert (other.model.config is config) == is_config_shared
    for one in (model, other):
        one.set_attn_implementation(attention)
    return model, other


@pytest.mark.parametrize("is_config_shared", [True, False])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("is_other_attached", [True, False])
def test_two_models_in_two_threads(attention: str, is_other_attached: bool, is_config_shared: bool, text: Text) -> None:
    """A pass with a cache begins while another model's pass runs, and ends before it, and the other way round."""
    model, other = twins(attention, is_config_shared)
    ids, short = text(23), text(7, seed=1)
    expected, expected_short = logits_of(model, ids), logits_of(model, short)
    windlass.attach(model)
    if is_other_attached:
        windlass.attach(other)

    def run(one: PreTrainedModel, ids: Tensor) -> Tensor:
        if one is other and not is_other_attached:
            return logits_of(one, ids)
        return read(one, KVCache(one), ids, ids.shape[1])

    for inner, outer in ((model, other), (other, model)):
        with (
            held_in_layer(outer, 1, 23) as (arrived, go_on),
            thread(partial(run, outer, ids)) as outer_logits,
        ):
            assert arrived.wait(SECONDS)
            with (
                held_in_layer(inner, 1, 7) as (arrived_too, go_on_too),
                thread(partial(run, inner, short)) as inner_logits,
            ):
                assert arrived_too.wait(SECONDS)
                go_on.set()
                while not outer_logits:
                    arrived.wait(0.001)
                go_on_too.set()
        for found, wanted in ((outer_logits, expected), (inner_logits, expected_short)):
            assert isinstance(found[0], Tensor), found
            torch.testing.assert_close(found[0], wanted, atol=TOLERANCE, rtol=0)
    for one in (model, other):
        assert one.config._attn_implementation == attention
        assert torch.equal(logits_of(one, ids), expected)


def test_models_that_share_a_config_take_turns(text: Text) -> None:
    """Interleaved in one thread: a pass of the other model, plain, and with a cache, inside of a pass."""
    model, other = twins("sdpa", is_config_shared=True)
    ids = text(11)
    expected = logits_of(model, ids)
    windlass.attach(model)
    config = model.config
    inner: list[Tensor] = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: inner.append(logits_of(other, ids)))
    torch.testing.assert_close(read(model, KVCache(model), ids, 11), expected, atol=TOLERANCE, rtol=0)
    assert torch.equal(inner[0], expected)
    handle.remove()
    windlass.attach(other)
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda *_: inner.append(read(other, KVCache(other), ids, 11))
    )
    torch.testing.assert_close(read(model, KVCache(model), ids, 11), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(inner[1], expected, atol=TOLERANCE, rtol=0)
    handle.remove()
    assert model.config is config
    assert all(module.config is config for module in model.modules() if "config" in vars(module))
    config.output_attentions = False
    windlass.detach(model)
    assert torch.equal(logits_of(model, ids), expected)
    torch.testing.assert_close(read(other, KVCache(other), ids, 11), expected, atol=TOLERANCE, rtol=0)


def test_what_is_set_in_a_config_is_seen_in_the_next_pass(text: Text) -> None:
    model = windlass.attach(tiny_model("llama"))
    cache = KVCache(model)
    model.config.output_hidden_states = True
    with torch.no_grad():
        assert len(model(text(4), past_key_values=cache).hidden_states) == model.config.num_hidden_layers + 1
        model.config.output_hidden_states = False
        assert model(text(4), past_key_values=cache).hidden_states is None


@pytest.mark.parametrize("is_with_cache", [True, False])
def test_another_thread_is_refused_while_a_pass_with_a_cache_runs(is_with_cache: bool, text: Text) -> None:
    model, ids = tiny_model("llama"), text(23)
    expected = logits_of(model, ids)
    windlass.attach(model)
    cache, short = KVCache(model), KVCache(model)
    with (
        held_in_layer(model, 1, 23) as (arrived, go_on),
        thread(lambda: read(model, cache, ids, 23)) as found,
    ):
        assert arrived.wait(SECONDS)
        with pytest.raises(UsageError, match="Give each thread a model of its own"):
            read(model, short, text(7), 7) if is_with_cache else logits_of(model, text(7))
        go_on.set()
    assert isinstance(found[0], Tensor), found
    torch.testing.assert_close(found[0], expected, atol=TOLERANCE, rtol=0)
    assert short.tokens_seen == [0]
    assert torch.equal(logits_of(model, ids), expected)


def test_a_plain_pass_that_began_before_one_with_a_cache_is_right_or_raises(text: Text) -> None:
    model, ids = tiny_model("llama"), text(23)
    windlass.attach(model)
    with held_in_layer(model, 1, 23) as (arrived, go_on), thread(lambda: logits_of(model, ids)) as found:
        assert arrived.wait(SECONDS)
        with (
            held_in_layer(model, 1, 7) as (arrived_too, go_on_too),
            thread(lambda: read(model, KVCache(model), text(7), 7)) as ours,
        ):
            assert arrived_too.wait(SECONDS)
            go_on.set()
            while not found:
                arrived.wait(0.001)
            go_on_too.set()
    assert isinstance(found[0], UsageError)
    assert "Give each thread a model of its own" in str(found[0])
    assert isinstance(ours[0], Tensor)


def test_natural_races_of_models_that_share_a_config(text: Text) -> None:
    model, other = twins("sdpa", is_config_shared=True)
    expected = logits_of(model, text(9))
    for one in (model, other):
        windlass.attach(one)

    def work(one: PreTrainedModel) -> float:
        errors = [float((read(one, KVCache(one), text(9), 3) - expected).abs().max()) for _ in range(15)]
        return max(errors)

    with thread(lambda: work(model)) as here, thread(lambda: work(other)) as there:
        pass
    assert all(isinstance(error, float) and error <= TOLERANCE for error in (*here, *there)), (here, there)
