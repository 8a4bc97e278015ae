"""A cache that was filled under `torch.inference_mode` goes on without it, and the other way round."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from tests.helpers.models import Models, Text, read
from windlass import KVCache
from windlass.policies import H2O, Policy, Recent


@pytest.mark.parametrize("policy", [Recent(), H2O()], ids=repr)
@pytest.mark.parametrize(
    ("first", "then"), [(torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)]
)
def test_a_cache_may_cross_the_border_of_inference_mode(
    attached_model: Models,
    text: Text,
    policy: Policy,
    first: Callable[[], AbstractContextManager[None]],
    then: Callable[[], AbstractContextManager[None]],
) -> None:
    model, ids = attached_model("llama"), text(40)
    ours, truth = (KVCache(model, budget=20, policy=policy, window=3) for _ in range(2))
    with first():
        read(model, ours, ids[:, :30], 9)
        ours.shift(0, 0, 1)
    read(model, truth, ids[:, :30], 9)
    truth.shift(0, 0, 1)
    ours.drop(12, 13)
    truth.drop(12, 13)
    with then():
        out = read(model, ours, ids[:, 30:], 4)
    ours.rollback(1)
    torch.testing.assert_close(out, read(model, truth, ids[:, 30:], 4), atol=1e-5, rtol=0)


def test_a_copy_made_under_inference_mode_goes_on_without_it(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40)
    cache = KVCache(model, budget=20, policy=H2O(), window=3)
    read(model, cache, ids[:, :30], 9)
    with torch.inference_mode():
        twin = copy.deepcopy(cache)
    twin.select_rows(torch.tensor([0]))
    torch.testing.assert_close(read(model, twin, ids[:, 30:], 4), read(model, cache, ids[:, 30:], 4), atol=1e-5, rtol=0)
