"""A tiny attached model with LoRA adapters, and a plain twin, which reads the attached one's attention outputs."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import windlass
from windlass.hf.attach import attached

ADAPTERS = ("first", "second")
REPLAY = "windlass-tests-replay"


@contextmanager
def quietly() -> Iterator[None]:
    """Hide PEFT's warnings: adapters that not all layers have, and features that transformers will remove."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Replayed(NamedTuple):
    """A layer's un-rotated queries, keys and values, each (batch, heads, tokens, head_dim), and their outputs."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor


class Twin:
    """A plain model whose attention outputs are given, so that all other parts are compared."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.config._attn_implementation = REPLAY
        AttentionInterface.register(REPLAY, self.attend)  # the newest twin is the one that runs
        AttentionMaskInterface.register(REPLAY, no_mask)
        self.outs: list[Tensor] = []
        self.states: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(
        self, module: Any, queries: Tensor, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:  # an attention function as transformers calls them
        """Note the inputs, and give the replayed outputs."""
        self.states.append((queries, keys, values))
        return self.outs[len(self.states) - 1].transpose(1, 2), None

    def read(self, ids: Tensor, outs: Sequence[Tensor]) -> tuple[Tensor, list[Replayed]]:
        """Logits and inputs of each layer's attention, in a pass with the attention outputs `outs`."""
        AttentionInterface.register(REPLAY, self.attend)
        self.outs, self.states = list(outs), []
        with torch.no_grad():
            nowhere = torch.zeros_like(ids)  # rotated by nothing
            logits = self.model(input_ids=ids, position_ids=nowhere, use_cache=False).logits
        return logits, [Replayed(*own, out) for own, out in zip(self.states, outs, strict=True)]


def no_mask(*_: Any, **__: Any) -> None:
    """Attention with given outputs has no mask."""


class State(NamedTuple):
    """Which adapter computes."""

    active: str = ADAPTERS[0]
    is_on: bool = True
    scale: float = 1.0
    is_merged: bool = False

    @property
    def weights(self) -> tuple[object, ...]:
        """Equal where the same weights compute, but for how they round."""
        return (self.active, self.scale) if self.is_on else ()


class Adapted:
    """An attached model with adapters and its twin, which are changed together."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.plain = with_adapters(model)
        self.twin = Twin(copy.deepcopy(self.plain))
        self.model: PreTrainedModel = windlass.attach(self.plain)
        self.weights = copy.deepcopy(self.plain.state_dict())
        self.state = State()

    @quietly()
    def reset(self) -> None:
        """As they were made."""
        for model in (self.plain, self.twin.model):
            model.base_model.enable_adapter_layers()
            if self.state.is_merged:
                model.base_model.unmerge_adapter()
            model.set_adapter(ADAPTERS[0])
            for name in ADAPTERS:
                scale(model, name, 1.0)
            model.load_state_dict(self.weights)
        attached(self.model).key_means = None
        self.state = State()

    @quietly()
    def change(self, number: int) -> bool:
        """Activate another adapter, or none, or merge the present one. Returns False where that is not possible now."""
        now, kind = self.state, number % 6
        if kind == 5 or now.is_merged:
            if not now.is_on:
                return False
            new = now._replace(is_merged=not now.is_merged)
        elif kind < 3:
            new = now._replace(active=ADAPTERS[number // 6 % 2], scale=1.0)
        elif kind == 3:
            new = now._replace(is_on=not now.is_on)
        else:
            new = now._replace(scale=(0.5, 2.0, 1.0)[number // 6 % 3])
        for model in (self.plain, self.twin.model):
            self.apply(model, new)
        self.state = new
        return True

    def apply(self, model: Any, new: State) -> None:
        now = self.state
        if new.is_merged != now.is_merged:
            model.base_model.merge_adapter() if new.is_merged else model.base_model.unmerge_adapter()
        if new.active != now.active:
            scale(model, now.active, 1.0)
            model.set_adapter(new.active)
        if new.scale != now.scale:
            scale(model, new.active, new.scale)
        if new.is_on != now.is_on:
            tuner = model.base_model
            tuner.enable_adapter_layers() if new.is_on else tuner.disable_adapter_layers()


def scale(model: Any, adapter: str, factor: float) -> None:
    """Scale the outputs of an adapter."""
    from peft.tuners.lora import LoraLayer  # an optional package

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_scale(adapter, factor)


@quietly()
def with_adapters(model: PreTrainedModel) -> Any:
    """A model of PEFT with two adapters, the first of them active. Both change the outputs."""
    from peft import LoraConfig, get_peft_model  # an optional package

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = get_peft_model(model, LoraConfig(r=2, target_modules=targets), adapter_name=ADAPTERS[0])
        made.add_adapter(ADAPTERS[1], LoraConfig(r=3, target_modules=targets[1:4]))
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return made.eval().requires_grad_(False)
