"""The engine against transformers' own generation, and rows against themselves alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from windlass import KVCache, Sampling, UsageError
from windlass.engine.decode import DRAWS, Sampler
from windlass.engine.text import Stops, TextStream
from windlass.policies import H2O, KeyDiff, Policy

MODEL = Path(windlass.__file__).parent / "assets" / "finder-3m"
PROMPT = "There were four of us--George, and William Samuel Harris, and myself, and"
OTHERS = ["He said", "I never read a patent medicine advertisement without being impelled to the conclusion that"]


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return windlass.attach(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_greedy_text_is_that_of_transformers(
    plain: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chunk: int
) -> None:
    inputs = tokenizer(PROMPT, return_tensors="pt")
    truth = plain.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs.input_ids.shape[1] :].tolist()
    stream = windlass.stream(model, tokenizer, PROMPT, KVCache(model, chunk=chunk), max_tokens=40)
    text = "".join(stream)
    assert stream.result.tokens == truth
    assert text == stream.result.text == tokenizer.decode(truth, skip_special_tokens=True)
    assert stream.result.finish_reason == "length"
    assert stream.result.prompt_tokens == inputs.input_ids.shape[1]
    assert stream.result.prefill_tokens_per_s > 0
    assert stream.result.decode_tokens_per_s > 0


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=5)],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize("policy", [None, H2O(), KeyDiff()], ids=repr)
def test_rows_of_a_batch_are_the_rows_alone(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: Policy | None, sampling: Sampling
) -> None:
    """Prompts of different lengths, over two turns, each row stopping by itself."""
    stop = tokenizer(",")["input_ids"][-1:]
    budget = None if policy is None else 24
    prompts = [PROMPT, *OTHERS]
    cache = KVCache(model, budget=budget, policy=policy, chunk=16, batch=3)
    together = [windlass.generate(model, tokenizer, prompts, cache, 25, sampling, stop) for _ in range(2)]
    assert len({len(result.tokens) for result in together[0]}) > 1, "the rows should stop at different tokens"
    for row, prompt in enumerate(prompts):
        own = Sampling(**{**vars(sampling), "seed": sampling.seed + row})
        alone = KVCache(model, budget=budget, policy=policy, chunk=16)
        for turn in range(2):
            (result,) = windlass.generate(model, tokenizer, [prompt], alone, 25, own, stop)
            assert together[turn][row].tokens == result.tokens
            assert together[turn][row].text == result.text
            assert together[turn][row].finish_reason == result.finish_reason
        assert cache.tokens is not None
        assert alone.tokens is not None
        assert cache.tokens[row] == alone.tokens[0]


def test_after_a_run_the_cache_holds_the_whole_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """So a second turn equals one prompt that contains it all."""
    cache = KVCache(model)
    (first,) = windlass.generate(model, tokenizer, [PROMPT], cache, 12)
    (second,) = windlass.generate(model, tokenizer, [" and then"], cache, 12)
    ids = tokenizer(PROMPT)["input_ids"] + first.tokens + tokenizer(" and then", add_special_tokens=False)["input_ids"]
    assert cache.tokens == [ids + second.tokens]
    logits = windlass.prefill(model, KVCache(model), [ids])
    assert int(logits.argmax()) == second.tokens[0]


def test_stopping_early_keeps_what_was_given_out(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    cache = KVCache(model)
    stream = windlass.stream(model, tokenizer, PROMPT, cache, max_tokens=50)
    given = [next(stream) for _ in range(4)]
    result = stream.result
    assert result.finish_reason == "interrupted"
    assert "".join(given) == result.text
    assert cache.tokens == [tokenizer(PROMPT)["input_ids"] + result.tokens]


def test_an_interrupt_in_the_model_keeps_what_was_given_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = KVCache(model, budget=16, policy=H2O())
    stream = windlass.stream(model, tokenizer, PROMPT, cache, max_tokens=50)
    given = [next(stream) for _ in range(5)]
    calls = []
    forward = model.model.layers[2].mlp.forward

    def interrupt(states: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return forward(states)

    monkeypatch.setattr(model.model.layers[2].mlp, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert "".join(given) == stream.result.text
    assert cache.tokens == [tokenizer(PROMPT)["input_ids"] + stream.result.tokens]
    assert cache.next_positions == [len(cache.tokens[0])]


def test_only_the_last_tokens_logits_are_computed(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    head = model.lm_head.forward

    def count(states: Tensor) -> Tensor:
        sizes.append(states.shape[1])
        return head(states)

    monkeypatch.setattr(model.lm_head, "forward", count)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in (PROMPT, *OTHERS)]
    logits = windlass.prefill(model, KVCache(model, chunk=8, batch=3), prompts)
    ends = [(-(-len(prompt) // 8), (len(prompt) - 1) % 8) for prompt in prompts]
    assert sizes == [len({at for chunk, at in ends if chunk == n}) for n in sorted({chunk for chunk, _ in ends})]
    for row, prompt in enumerate(prompts):
        alone = windlass.prefill(model, KVCache(model), [prompt])
        torch.testing.assert_close(logits[row], alone[0], atol=1e-4, rtol=0)


def test_progress_counts_the_longest_prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    seen: list[tuple[int, int]] = []
    windlass.prefill(model, KVCache(model, chunk=8), [tokenizer(PROMPT)["input_ids"]], lambda *at: seen.append(at))
    total = len(tokenizer(PROMPT)["input_ids"])
    assert seen == [(min(n, total), total) for n in range(8, total + 8, 8)]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1, 2], []], "the prompt of row 1 is empty"),
        ([[1, 2], [5, 2048]], "token id 2048 in row 1 is outside the model's vocabulary, 0 to 2047"),
        ([[-3], [5]], "token id -3 in row 0 is outside"),
        ([[1]], "1 prompts for a cache of batch=2"),
    ],
)
def test_prompts_that_cannot_be_read_change_nothing(
    model: PreTrainedModel, prompts: list[list[int]], words: str
) -> None:
    cache = KVCache(model, batch=2)
    with pytest.raises(UsageError, match=words):
        windlass.prefill(model, cache, prompts)
    assert cache.tokens_seen == [0, 0]
    assert cache.bytes_held == 0


def test_wrong_calls_are_refused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UsageError, match=r"Use windlass\.generate"):
        windlass.stream(model, tokenizer, PROMPT, KVCache(model, batch=2))
    with pytest.raises(UsageError, match="takes a list of prompts"):
        windlass.generate(model, tokenizer, PROMPT)
    with pytest.raises(UsageError, match="max_tokens must be from 1 to 1073741824, got 0"):
        windlass.stream(model, tokenizer, PROMPT, KVCache(model), max_tokens=0)
    with pytest.raises(UsageError, match="the prompt of row 0 is empty"):
        windlass.generate(model, tokenizer, [""])


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"min_p": 1.5}, {"repetition_penalty": 0.0}],
    ids=str,
)
def test_sampling_numbers_out_of_range_are_refused(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=f"{name} must be"):
        Sampling(**options)  # type: ignore[arg-type]


def drawn_from(sampler: Sampler, logits: Tensor) -> list[int]:
    sampler.prepare()
    return sampler.choose(logits)[:, 0].tolist()


def test_the_sampler_draws_from_the_distribution_it_is_given() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0]])
    sampler = Sampler(Sampling(temperature=2.0, top_k=3, seed=1), [[0]], torch.device("cpu"))
    drawn = torch.tensor([drawn_from(sampler, probabilities.log())[0] for _ in range(4000)])
    heated = probabilities[0, :3].sqrt() / probabilities[0, :3].sqrt().sum()
    torch.testing.assert_close(drawn.bincount(minlength=5)[:3] / 4000, heated, atol=0.03, rtol=0)
    assert drawn.max() == 2


def test_each_row_takes_the_first_token_whose_share_reaches_beyond_its_own_draw() -> None:
    shares = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3])
    sampler = Sampler(Sampling(temperature=1.0, seed=8), [[], []], torch.device("cpu"))
    drawn = [drawn_from(sampler, shares.log().repeat(2, 1)) for _ in range(2 * DRAWS + 3)]
    for row in range(2):
        draws = torch.rand(3 * DRAWS, generator=torch.Generator().manual_seed(8 + row), dtype=torch.float64).tolist()
        expected = [1 if draw < 0.2 else 3 if draw < 0.7 else 4 for draw in draws]
        assert [tokens[row] for tokens in drawn] == expected[: len(drawn)]


def test_a_repetition_penalty_counts_the_rows_own_text() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), [[0], [2]], torch.device("cpu"))
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    assert drawn_from(sampler, logits) == [1, 0]
    negative = torch.tensor([[-1.0, -1.5, -1.9], [-1.0, -1.5, -1.9]])
    assert drawn_from(sampler, negative) == [2, 1], "what was chosen counts, too, and a negative score gets worse"


def test_text_never_breaks_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "caf\u00e9 \u2014 na\u00efve \U0001f600 done"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    streams = [TextStream.after(tokenizer, [], Stops(frozenset()))]
    for token in ids:
        streams.append(streams[-1].pushed(token))
    pieces = [stream.piece for stream in streams[1:]]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces, "some token must have been part of a character"


SCRIPT = """
import torch, windlass, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model = windlass.attach(AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
cache = windlass.KVCache(model, budget=32, policy=windlass.policies.Random(seed=2), window=4)
(result,) = windlass.generate(model, tokenizer, ["It was"], cache, 60, windlass.Sampling(temperature=1.0, seed=7))
print(result.tokens)
"""


@pytest.mark.slow
def test_two_processes_with_one_seed_write_the_same_text() -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    runs = [
        subprocess.run([sys.executable, "-c", SCRIPT, str(MODEL)], capture_output=True, check=True, env=environment)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout.split(b",")) == 60


def test_a_stop_token_ends_a_row_and_is_in_the_cache_but_not_in_the_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (free,) = windlass.generate(model, tokenizer, [PROMPT], max_tokens=20)
    stop = free.tokens[9]
    cut = free.tokens.index(stop) + 1
    cache = KVCache(model)
    (result,) = windlass.generate(model, tokenizer, [PROMPT], cache, max_tokens=20, stop=[stop])
    assert result.tokens == free.tokens[:cut]
    assert result.finish_reason == "stop"
    assert result.text == tokenizer.decode(free.tokens[: cut - 1], skip_special_tokens=True)
    assert cache.tokens is not None
    assert cache.tokens[0][-1] == stop


def test_prefill_makes_room_for_the_whole_prompt_at_once(model: PreTrainedModel) -> None:
    cache = KVCache(model, chunk=5)
    allocated: list[int] = []
    windlass.prefill(model, cache, [[3, 4] * 79], lambda *_: allocated.append(cache.layers[1].store.slots))
    assert allocated == [192] * 32  # 158 tokens, in groups of 64 slots
    windlass.prefill(model, cache, [[5] * 40])
    assert cache.layers[1].store.slots == 256  # 198 tokens, where growth by half would make 320


def test_a_repetition_penalty_counts_the_text_of_the_cache(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A text that is read in two calls is penalised as one that is read in one, as transformers does."""
    first, rest = "He was sitting in the boat,", " and the river was quiet."
    whole, sampling = first + rest, Sampling(repetition_penalty=3.0)
    expected = windlass.generate(model, tokenizer, [whole], max_tokens=12, sampling=sampling)[0]
    for speculate in (None, "lookup"):
        cache = KVCache(model)
        windlass.prefill(model, cache, [tokenizer(first)["input_ids"]])
        ids = [*tokenizer(first)["input_ids"], *tokenizer(rest, add_special_tokens=False)["input_ids"]]
        assert ids == tokenizer(whole)["input_ids"], "the text is cut between two tokens"
        found = windlass.generate(
            model, tokenizer, [rest], cache, max_tokens=12, sampling=sampling, speculate=speculate
        )[0]
        assert found.tokens == expected.tokens
