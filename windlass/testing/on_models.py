"""Whether a policy works on models of every kind: latents, states beside attention, shared keys, chunks."""

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
from transformers import PreTrainedModel

from windlass.core.errors import PolicyError, UsageError
from windlass.hf.attach import attach
from windlass.hf.kv_cache import KVCache
from windlass.policies.base import Policy
from windlass.testing.hybrids import HYBRIDS, tiny_hybrid
from windlass.testing.models import FAMILIES, VOCABULARY, tiny_model

TOKENS: Final = 45
BUDGET, SINKS, WINDOW, ROOM = 20, 3, 4, 60
PASSES: Final = (17, 17, *(1,) * 11)


def check_on_models(policy: Policy, families: Sequence[str] = (*FAMILIES, *HYBRIDS)) -> None:
    """Let tiny models of these families read a text with `policy`, and check what is kept of it.

    With room for the whole text the logits must be those without a budget. With a budget below it, each layer must
    hold as many tokens as it may, the first and the newest among them, and logits must be finite. A model that refuses
    the policy by name (`UsageError`) is passed over: recurrent layers, say, can't read a text twice. Takes about a
    second for each family.

    Raises: PolicyError, naming the family and what is wrong; UsageError for an unknown family.
    """
    for family in families:
        model = _attached(family)
        try:
            caches = [_cache(model, budget, policy) for budget in (None, ROOM, BUDGET)]
        except UsageError:
            continue
        whole, roomy, bounded = (_read(model, each) for each in caches)
        if not (roomy - whole).norm() <= 1e-5 * whole.norm():
            raise PolicyError(f"{policy!r} changes what a {family} model says though nothing is evicted")
        if not bounded.isfinite().all():
            raise PolicyError(f"{policy!r} makes a {family} model say what is not finite")
        _check_kept(caches[-1], policy, family)


def _cache(model: PreTrainedModel, budget: int | None, policy: Policy) -> KVCache:
    return KVCache(model, budget, policy, SINKS, WINDOW, positions="original")


def _check_kept(cache: KVCache, policy: Policy, family: str) -> None:
    required = {*range(SINKS), *range(TOKENS - WINDOW, TOKENS)}
    for layer in cache.layers:
        if layer.rules.is_whole_window:  # a sliding window or chunk that fits is held, whatever the policy
            continue
        for held in layer.positions[0].tolist():
            kept = {position for position in held if position >= 0}
            if len(kept) > BUDGET or not required <= kept:
                raise PolicyError(
                    f"{policy!r} keeps {len(kept)} tokens in layer {layer.index} of a {family} model, with a budget of "
                    f"{BUDGET}; of the first {SINKS} and newest {WINDOW} it lacks {sorted(required - kept)}"
                )


@torch.no_grad()
def _read(model: PreTrainedModel, cache: KVCache) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(PASSES, 1)], 1)


@cache
def _attached(family: str) -> PreTrainedModel:
    return attach(tiny_hybrid(family) if family in HYBRIDS else tiny_model(family))
