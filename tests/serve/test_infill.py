"""Fill in the middle: prompts as the models that know it were trained on."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.models import MODEL
from tests.helpers.serving import Answer, ScriptedService, ask, complete, says, serving
from windlass.serve.prompts import MARKS, SUFFIX_FIRST, PromptTokenizer

STORIES = Path(__file__).parents[1] / "models" / "stories260K"
PREFIX, SUFFIX = "def area(r):\n    return ", " * r\n"
FAMILIES: list[tuple[tuple[str, ...], str]] = [
    (each, "{prefix}" + each[0] + PREFIX + each[1] + SUFFIX + each[2]) for each in MARKS if not each[0].startswith("▁")
]
FAMILIES.append((SUFFIX_FIRST, "{prefix}" + SUFFIX_FIRST[1] + SUFFIX + SUFFIX_FIRST[0] + PREFIX))


def with_tokens(path: Path | str, *names: str) -> PreTrainedTokenizerBase:
    """A tokenizer of a model with these tokens, too."""
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    made.add_special_tokens({"additional_special_tokens": list(names)})
    return made


def asked(tokenizer: PreTrainedTokenizerBase, **fields: Any) -> tuple[ScriptedService, Answer]:
    """A completion of one or more prompts, and the requests to the engine."""
    service = ScriptedService(says("pi"))
    with serving(service, PromptTokenizer(tokenizer, [1], len(tokenizer))) as served:
        return service, ask(served.port, "/v1/completions", complete(**{"prompt": PREFIX} | fields))


@pytest.mark.parametrize(
    ("marks", "wanted"), FAMILIES, ids=lambda each: str(each[0]) if isinstance(each, tuple) else ""
)
def test_a_gap_is_marked_as_the_tokenizer_names_it(marks: tuple[str, ...], wanted: str) -> None:
    tokenizer = with_tokens(MODEL, *marks, "<|endoftext|>")
    service, answer = asked(tokenizer, suffix=SUFFIX)
    request = service.requests[-1]
    assert answer.document["choices"][0]["text"] == "pi"
    assert tokenizer.decode(list(request.prompt)) == wanted.format(prefix="<|bos|>")
    ids = [tokenizer.convert_tokens_to_ids(each) for each in (*marks, "<|endoftext|>")]
    assert request.stops.ids == {1, *ids}


def test_the_parts_have_the_tokens_that_they_have_alone() -> None:
    tokenizer = with_tokens(MODEL, *MARKS[0])
    before, middle, after = (tokenizer.convert_tokens_to_ids(each) for each in MARKS[0])
    bare = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in (PREFIX, SUFFIX)]
    wanted = [tokenizer.bos_token_id, before, *bare[0], middle, *bare[1], after]
    for prompt in (PREFIX, tokenizer(PREFIX)["input_ids"], bare[0]):
        service, _ = asked(tokenizer, prompt=prompt, suffix=SUFFIX)
        assert list(service.requests[-1].prompt) == wanted
    service, answer = asked(tokenizer, prompt=[PREFIX, "x = "], suffix=SUFFIX, n=2)
    assert [list(each.prompt) == wanted for each in service.requests] == [True, True, False, False]
    assert len(answer.document["choices"]) == 4


def test_code_llamas_suffix_begins_without_a_space() -> None:
    """SentencePiece puts a space before a text, but not before a continuation."""
    marks = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    tokenizer = with_tokens(STORIES, *marks)
    service, _ = asked(tokenizer, prompt="Once", suffix="upon")
    request = service.requests[-1]
    names = tokenizer.convert_ids_to_tokens(list(request.prompt))
    assert names[:2] == ["<s>", "▁<PRE>"]
    at = names.index("▁<SUF>")
    assert "".join(names[2:at]) == "▁Once"
    assert "".join(names[at + 1 : -1]) == "upon"
    assert names[-1] == "▁<MID>"
    assert tokenizer.convert_tokens_to_ids("▁<EOT>") in request.stops.ids


def test_what_cannot_be_is_refused_and_nothing_is_no_suffix() -> None:
    plain = AutoTokenizer.from_pretrained(MODEL)
    service, answer = asked(plain, suffix=SUFFIX)
    error = answer.document["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "suffix", "unsupported_parameter")
    assert "<|fim_prefix|>" in error["message"]
    assert service.requests == []
    service, answer = asked(plain, suffix="")
    assert (answer.status, plain.decode(list(service.requests[-1].prompt))) == (200, "<|bos|>" + PREFIX)
    _, answer = asked(with_tokens(MODEL, *MARKS[0]), suffix=SUFFIX, echo=True)
    assert (answer.status, answer.document["error"]["param"]) == (400, "echo")
