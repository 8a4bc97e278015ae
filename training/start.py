"""What training starts from: weights with their tokenizer, or a config and a tokenizer made of the books."""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from training.books import Books
from training.lessons import lessons
from windlass.core.errors import UsageError

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
LEAST_SIZE = 256 + 3  # every byte, and the tokens above
READ = 40_000_000  # characters of the books that a tokenizer is made of
PART = 100_000
TEXTS = 100  # of every lesson, beside the books


def from_folder(folder: Path, attention: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32, and its tokenizer.

    Raises: UsageError for a folder that transformers does not open.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"model {folder} cannot be opened: {_gist(error)}") from error
    return model, tokenizer


def from_config(
    path: Path, tokens: Path | None, attention: str, books: Books
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights, and the tokenizer of the folder `tokens`, or one with all tokens that it embeds.

    Raises: UsageError for what transformers does not open, or a vocabulary that is too small.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        config.dtype = torch.float32
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except (OSError, ValueError) as error:
        raise UsageError(f"config {path} cannot be opened: {_gist(error)}") from error
    if config.vocab_size < LEAST_SIZE:
        raise UsageError(f"config {path}: vocab_size {config.vocab_size} is too small; the least is {LEAST_SIZE}")
    tokenizer = bpe(books, config.vocab_size) if tokens is None else _opened(tokens)
    if len(tokenizer) > config.vocab_size:
        few = f"vocab_size {config.vocab_size} is less than the {len(tokenizer)} tokens of {tokens}"
        raise UsageError(f"config {path}: {few}; raise it")
    for special in (model.config, model.generation_config):
        special.bos_token_id, special.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        special.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _opened(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(f"tokenizer {folder} cannot be opened: {_gist(error)}") from error
    return tokenizer


def bpe(books: Books, size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of up to `size` tokens, with every digit its own; texts begin with `<|bos|>`."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(_texts(books), trainer)
    made.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, made.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def _texts(books: Books) -> Iterator[str]:
    text = books.text[:READ]
    for start in range(0, len(text), PART):
        yield text[start : start + PART]
    for name, lesson in lessons(books).items():
        for number in range(TEXTS):
            yield "".join(piece.text for piece in lesson.pieces(random.Random(f"{name} {number}"), 512, 0))


def _gist(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
