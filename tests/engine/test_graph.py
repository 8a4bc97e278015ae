"""Steps that are recorded once and replayed, against steps that run as they come."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import windlass
from tests.helpers.models import Models, Text
from tests.helpers.policies import made_by_default
from tests.helpers.recorded import BUDGET, ENDS, PROMPT, begun, same, write
from tests.helpers.tape import Tape
from windlass import KVCache, Sampling, UsageError, kernels
from windlass.engine import generate
from windlass.engine.decode import CudaGraph, Graph
from windlass.evals.speed.measure import RotatedStorage
from windlass.hf.cpu_decoder import FewTokensLayer, WholeDecoder
from windlass.policies import H2O, TOVA, KeyDiff, Policy, Recent, SnapKV
from windlass.testing import tiny_model

MODEL = Path(windlass.__file__).parent / "assets" / "finder-3m"
SAMPLED = Sampling(temperature=1.5, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.3, seed=5)


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference kernels, as compiled ones would hide their work from the tape."""
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    monkeypatch.setattr(FewTokensLayer, "_kernel", lambda *_: None)  # which a shared model may have prepared before
    monkeypatch.setattr(WholeDecoder, "output", lambda *_: None)  # as above


def check(
    model: PreTrainedModel, text: Text, recordings: int, sampling: Sampling = SAMPLED, **options: object
) -> KVCache:
    """The same text and the same cache with a graph and without, also once the last step was taken back."""
    tape = Tape()
    ours = check_with(tape, model, text, sampling, options)
    assert tape.captured == recordings
    assert tape.replayed >= ENDS[0] - 3 * recordings
    return ours


def check_with(
    graph: Graph, model: PreTrainedModel, text: Text, sampling: Sampling, options: dict[str, Any]
) -> KVCache:
    (ours, logits), (theirs, others) = begun(model, text, options), begun(model, text, options)
    written = write(model, ours, logits, graph, sampling)
    assert written == write(model, theirs, others, None, sampling)
    same(ours, theirs)
    for cache in (ours, theirs):
        cache.rollback(1 if cache.batch_size == 1 else [1, 0, 0])
    same(ours, theirs)
    return ours


@pytest.mark.parametrize("policy", made_by_default().values(), ids=repr)
def test_every_policy_writes_from_a_graph_what_it_writes_without(
    policy: Policy, attached_model: Models, text: Text
) -> None:
    check(attached_model("llama"), text, 2, policy=policy)  # before and after it begins to evict


@pytest.mark.parametrize("positions", ["original", "compact", "self_extend(4, 9)", "clamp(11)"])
@pytest.mark.parametrize("store", ["plain", "int8", "int4(sinks=3, newest=6)"])
def test_every_store_and_position_mode_does(positions: str, store: str, attached_model: Models, text: Text) -> None:
    check(attached_model("llama"), text, 2, policy=KeyDiff(), positions=positions, store=store)


@pytest.mark.parametrize("trained", [6, 13, 21, 300])
@pytest.mark.parametrize("budget", [BUDGET, 27, None])
def test_auto_does_before_and_beyond_the_trained_length(trained: int, budget: int | None, text: Text) -> None:
    """A graph serves steps on both sides of that length, and groups that no row needs when it is recorded."""
    config = tiny_model("llama").config
    config.max_position_embeddings = trained
    torch.manual_seed(5)
    model = windlass.attach(AutoModelForCausalLM.from_config(config).eval())
    cache = check(model, text, 1 if budget is None else 2, policy=KeyDiff(), positions="auto", budget=budget)
    assert max(cache.next_positions) == 28


@pytest.mark.parametrize("merge", ["mean_count", "mean_count(threshold=0.2)", "sum(next)", "pick"])
def test_every_merge_does(merge: str, attached_model: Models, text: Text) -> None:
    check(attached_model("llama"), text, 2, policy=SnapKV(), merge=merge)


@pytest.mark.parametrize("policy", [None, H2O(), TOVA()], ids=repr)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_end_at_different_steps_do(
    policy: Policy | None, sampling: Sampling, attached_model: Models, text: Text
) -> None:
    check(attached_model("llama"), text, 1, sampling, policy=policy, batch=3)


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "glm4", "cohere", "gemma4_e"])
def test_families_with_windows_and_other_rotations_do(family: str, attached_model: Models, text: Text) -> None:
    check(attached_model(family), text, 2, policy=H2O())


def test_keys_that_the_model_rotates_itself_do(attached_model: Models, text: Text) -> None:
    check(attached_model("llama"), text, 2, policy=H2O(), kind=RotatedStorage)


def test_a_step_of_a_graph_that_evicted_nothing_can_be_taken_back(attached_model: Models, text: Text) -> None:
    check(attached_model("llama"), text, 1, policy=H2O(), budget=50)


def test_a_cache_without_budget_is_recorded_anew_when_it_grows(attached_model: Models, text: Text) -> None:
    cache = check(attached_model("llama"), text, 1, budget=None, window=None)
    assert [layer.store.slots for layer in cache.layers] == [64] * len(cache.layers)
    model, tape = attached_model("llama"), Tape()
    (ours, logits), (theirs, others) = (begun(model, text, {"budget": None, "window": None}) for _ in range(2))
    assert write(model, ours, logits, tape, steps=70) == write(model, theirs, others, None, steps=70)
    assert tape.captured == 2
    same(ours, theirs)


@pytest.mark.parametrize("positions", ["original", "compact"])
def test_a_table_is_long_enough_for_all_steps_that_one_graph_serves(positions: str, text: Text) -> None:
    # Tables have 256 rows, or twice as many, and a model that others used has long ones.
    model, ids = windlass.attach(tiny_model("llama")), text(250)[0].tolist()
    ours, theirs = (KVCache(model, budget=300, positions=positions, rollback=0, policy=Recent()) for _ in range(2))
    logits, others = (generate.prefill(model, cache, [ids]) for cache in (ours, theirs))
    tape = Tape()
    assert write(model, ours, logits, tape) == write(model, theirs, others, None)
    assert tape.captured == 1
    same(ours, theirs)


def test_edits_between_two_steps_are_seen(attached_model: Models, text: Text) -> None:
    model, tape = attached_model("llama"), Tape()
    (ours, logits), (theirs, others) = (begun(model, text, {"policy": H2O()}) for _ in range(2))

    def edits(cache: KVCache) -> Callable[[int], None]:
        def between(step: int) -> None:
            if step == 4:
                cache.drop(6, 9)
            if step == 11:
                cache.positions = "compact"
            if step == 14:
                cache.compress(14)
            if step == 17:
                cache.rollback(1)

        return between

    written = write(model, ours, logits, tape, between=edits(ours))
    assert written == write(model, theirs, others, None, between=edits(theirs))
    assert tape.captured >= 4
    same(ours, theirs)


def test_of_recorded_steps_the_last_can_be_taken_back(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    (ours, logits), (theirs, others) = (begun(model, text, {"rollback": 16}) for _ in range(2))
    assert write(model, ours, logits, Tape()) == write(model, theirs, others, None)
    with pytest.raises(UsageError, match="rollback"):
        ours.rollback(2)
    for cache in (ours, theirs):
        cache.rollback(1)
    ids = text(5, seed=3)
    with torch.no_grad():
        logits, others = (model(ids, past_key_values=cache).logits for cache in (ours, theirs))
    torch.testing.assert_close(logits, others)


def test_an_interrupt_while_a_token_is_awaited_leaves_the_books_right(attached_model: Models, text: Text) -> None:
    model, tape = attached_model("llama"), Tape()
    cache, logits = begun(model, text, {})
    (theirs, others) = begun(model, text, {})
    copied, waits = tape.copied, []

    def interrupted(ids: torch.Tensor) -> Callable[[], list[int]]:
        wait = copied(ids)

        def once() -> list[int]:
            waits.append(1)
            if len(waits) == 9:
                raise KeyboardInterrupt
            return wait()

        return once

    tape.copied = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        write(model, cache, logits, tape)
    (tokens,) = write(model, theirs, others, None, steps=5)
    assert cache.tokens == theirs.tokens == [text(PROMPT)[0].tolist() + tokens]
    same(cache, theirs)


def test_the_engine_writes_from_a_graph_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = windlass.attach(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stop, prompts = tokenizer(",")["input_ids"][-1:], ["There were four of us--George, and", "He said"]
    texts, caches, tape = [], [], Tape()
    for graph in (tape, None):
        monkeypatch.setattr(generate, "graph_for", lambda _, graph=graph: graph)
        caches.append(KVCache(model, budget=16, policy=SnapKV(), batch=2, rollback=0))
        texts.append([windlass.generate(model, tokenizer, prompts, caches[-1], 25, SAMPLED, stop) for _ in range(2)])
    assert tape.replayed > 10
    assert [[r.tokens for r in turn] for turn in texts[0]] == [[r.tokens for r in turn] for turn in texts[1]]
    same(*caches)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        *({"policy": policy} for policy in made_by_default().values()),
        *({"policy": KeyDiff(), "store": store} for store in ("int8", "int4(sinks=3, newest=6)")),
        *({"policy": H2O(), "positions": mode} for mode in ("compact", "self_extend(4, 9)", "clamp(11)")),
        *({"policy": SnapKV(), "merge": merge} for merge in ("mean_count", "pick")),
        {"policy": TOVA(), "batch": 3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error")
def test_a_device_writes_from_its_graph_what_it_writes_without(options: dict[str, Any], text: Text) -> None:
    check_with(CudaGraph(), windlass.attach(tiny_model("llama").cuda()), text, SAMPLED, options)  # type: ignore[call-arg]
