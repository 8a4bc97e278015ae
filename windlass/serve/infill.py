"""Fill in the middle: a prompt of the text before a gap and the text behind it, for models that were trained so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers import PreTrainedTokenizerBase

from windlass.engine.text import encode, token_text

# Tokens before the prefix, before the suffix, and before what is written between the two.
MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),  # Yi-Coder, Seed-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon
)
SUFFIX_FIRST: Final = ("[PREFIX]", "[SUFFIX]")  # Codestral, which has the suffix before the prefix and no third mark
# Tokens with which these models end what they write there, beside those that end any text.
ENDS: Final = (
    *("▁<EOT>", "<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_separator|>"),
    *("<|file_sep|>", "<file_sep>", "<|repo_name|>", "<repo_name>"),
)
PROBE: Final = "☺"  # which tokenizers of SentencePiece join to no text behind it


@dataclass(frozen=True)
class Infill:
    """How a tokenizer marks a gap. `middle` is None where the suffix comes first; tokens of `ends` end the text."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Infill | None":
        """Found by the names of tokens; None where there are none of these."""
        ids = tokenizer.get_vocab()
        marks = next((each for each in (*MARKS, SUFFIX_FIRST) if all(name in ids for name in each)), None)
        if marks is None:
            return None
        prefix, suffix, *middle = (ids[name] for name in marks)
        ends = {ids[name] for name in ENDS if name in ids}
        return cls(prefix, suffix, middle[0] if middle else None, frozenset({prefix, suffix, *middle, *ends}))

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The tokens of both texts with the marks, up to where the model is to write."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def encode_inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that goes on from another one: without the space that some tokenizers put before a text."""
    probe, both = encode(tokenizer, PROBE, False), encode(tokenizer, PROBE + text, False)
    if token_text(tokenizer, probe[0]).startswith(" ") and both[: len(probe)] == probe:
        return both[len(probe) :]
    return encode(tokenizer, text, False)
