"""Where chunks end decides no score: each policy, on a text that was read in chunks of several sizes."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.caches import held
from tests.helpers.models import Models, Text
from tests.helpers.models import one_layer as one_layer
from tests.helpers.pair_tables import table_of
from tests.helpers.policies import made_by_default
from tests.helpers.scorers import scorer_of
from windlass import KVCache
from windlass.engine import generate
from windlass.policies import FROM_FILES, NAMES, WRAPPERS, KeyNorm, LagKV, LinearScorer, Pairs, Policy, Recent
from windlass.testing import VOCABULARY

TOKENS = 269  # more than TriAttention once observed of a step. Only chunks of 1 end there
CHUNKS = (1, 3, 8, 64)
DEPEND = ("snapkv", "r_kv", "compactor")  # before any eviction
BY_STEP = ("tova", "smoothed")  # by the steps that evict
LAG = 16


def of_pairs(folder: Path, model: PreTrainedModel) -> Policy:
    costs = {(first, (3 * first + 1) % VOCABULARY): float(first) for first in range(VOCABULARY)}
    return Pairs(table_of(folder / "pairs.json", model, costs))


def of_scorer(folder: Path, model: PreTrainedModel) -> Policy:
    return LinearScorer(scorer_of(folder / "scorer.json", model, range(len(model.model.layers))))


OF_FILES: dict[str, Callable[[Path, PreTrainedModel], Policy]] = {"pairs": of_pairs, "linear_scorer": of_scorer}


def scores(model: PreTrainedModel, policy: Policy, ids: list[int], chunk: int) -> list[Tensor]:
    """Scores of the tokens of each layer, in the order of the text, once all were read and before any is evicted."""
    cache = KVCache(model, 40 * len(ids), policy, chunk=chunk)  # the top layer of `Pyramid` gets a 20th
    generate.prefill(model, cache, [ids])
    found = []
    for layer in cache.layers:
        slots = layer.slots_at(cache.rows.standstill(cache.device))
        order = slots.positions.where(slots.positions >= 0, 2**30).argsort(-1)[..., : len(ids)]
        found.append(layer.policy.score(slots).double().gather(-1, order)[..., cache.options.sinks :])
    return found


def apart(score: Tensor, other: Tensor) -> float:
    """The most that `score` falls where `other` rises, in standard deviations: 0 where both rank alike."""
    falls = score.gather(-1, other.argsort(-1)) - score.sort(-1).values
    return float(falls.abs().max() / score.std())


@pytest.mark.parametrize("name", [*NAMES, *WRAPPERS, *FROM_FILES])
def test_scores_before_an_eviction(name: str, attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama"), text(TOKENS)[0].tolist()
    policy = OF_FILES[name](tmp_path, model) if name in OF_FILES else made_by_default()[name]
    whole = scores(model, policy, ids, TOKENS)
    found = {chunk: max(map(apart, whole, scores(model, policy, ids, chunk))) for chunk in CHUNKS}
    if name in DEPEND:
        assert max(found.values()) > 0.1, f"{name} no longer depends on chunks: its docstring may say so"
    else:
        # Where keys round apart, two tokens may swap neighbouring ranks: 0.013 of the deviation of 265 ranks.
        assert max(found.values()) < 0.02, f"distance from the scores of one chunk, by chunk: {found}"


@pytest.mark.parametrize("name", [*NAMES, *WRAPPERS, *FROM_FILES])
def test_a_docstring_says_what_chunks_decide(name: str) -> None:
    told = inspect.getdoc((NAMES | WRAPPERS | FROM_FILES)[name]) or ""
    assert ("Chunks:" in told) == (name in (*DEPEND, *BY_STEP))


@pytest.mark.parametrize("name", ["recent", "key_norm", "lag_kv", "linear_scorer"])
def test_tokens_kept_where_each_step_evicts(
    name: str, one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text, tmp_path: Path
) -> None:
    """These rank a token by itself, or by blocks that end with each chunk, and in one layer keys depend on no other."""
    model, ids = one_layer[1], text(10 * LAG)[0].tolist()
    made: dict[str, Policy] = {"recent": Recent(), "key_norm": KeyNorm(), "lag_kv": LagKV(LAG)}
    policy = made[name] if name in made else of_scorer(tmp_path, model)
    kept = []
    for chunk in (LAG, LAG // 2, 1):
        cache = KVCache(model, 5 * LAG - 3, policy, sinks=0, chunk=chunk)
        generate.prefill(model, cache, [ids])
        kept.append(held(cache))
    assert kept[1:] == kept[:1] * 2
    assert name == "recent" or min(kept[0][0]) < len(ids) - 5 * LAG, "some are older than the newest"
