"""What the engine's functions are called with, checked before anything changes."""

from collections.abc import Sequence
from numbers import Integral

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.check import check_kind, shown
from windlass.core.errors import UsageError
from windlass.core.limits import check_max_tokens
from windlass.engine.sampling import Sampling
from windlass.hf.forward import vocabulary_of
from windlass.hf.guards import check_model
from windlass.hf.kv_cache import KVCache


def check_reading(model: object, cache: object, progress: object) -> None:
    """Raises: UsageError for what is no model, no cache, or cannot be called."""
    check_model(model)
    check_kind("cache", cache, KVCache, "a KVCache", "make one with windlass.KVCache(model)")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function of (tokens done, tokens in all), or None, got {shown(progress)}")


def check_writing(tokenizer: object, prompts: Sequence[object], sampling: object, max_tokens: int) -> int:
    """`max_tokens` as an int. Raises: UsageError for what is no tokenizer, text, `Sampling` or number of tokens."""
    kind, way_out = PreTrainedTokenizerBase, "it comes after the model"
    check_kind("tokenizer", tokenizer, kind, "the model's tokenizer", way_out)
    check_kind("sampling", sampling, (Sampling, type(None)), "a windlass.Sampling", "write Sampling(temperature=0.7)")
    for row, prompt in enumerate(prompts):
        check_kind(f"the prompt of row {row}", prompt, str, "a text", "windlass.prefill reads token ids")
    return check_max_tokens(max_tokens)


def checked_prompts(
    model: PreTrainedModel, cache: KVCache, prompts: Sequence[Sequence[int]] | Tensor
) -> list[list[int]]:
    """The token ids of each row.

    Raises: UsageError for an empty row, what is no id or outside of the vocabulary, and another number of rows.
    """
    check_kind("prompts", prompts, (list, tuple, Tensor), "a list of token ids for each row")
    if len(prompts) != cache.batch_size:
        raise UsageError(f"{len(prompts)} prompts for a cache of batch={cache.batch_size}; give one prompt per row")
    vocabulary = vocabulary_of(model)
    rows = [_ids(row, prompt) for row, prompt in enumerate(prompts)]
    for row, ids in enumerate(rows):
        if not ids:
            raise UsageError(f"the prompt of row {row} is empty; give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise UsageError(f"token id {wrong} in row {row} is outside the model's vocabulary, 0 to {vocabulary - 1}")
    return rows


def _ids(row: int, prompt: object) -> list[int]:
    way_out = 'tokenizer(text)["input_ids"] gives them'
    given = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise UsageError(f"the prompt of row {row} must be a list of token ids, got {shown(prompt)}; {way_out}")
    wrong = [kind for kind in set(map(type, given)) if not issubclass(kind, Integral) or issubclass(kind, bool)]
    if wrong:
        first = next(each for each in given if type(each) in wrong)
        raise UsageError(f"the prompt of row {row} must be a list of token ids, and has {shown(first)}; {way_out}")
    return list(map(int, given))
