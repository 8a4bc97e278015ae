"""`generate` and `cache` with a model that has a chat template: the model reads the template's output."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers import cli
from tests.helpers.cli import Ran, assert_refused
from tests.helpers.models import MODEL

run, model, in_library, loaded_once = cli.run, cli.model, cli.in_library, cli.loaded_once  # fixtures
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
OPTIONS = ("--dtype", "float32", "-n", "4")


def folder_with(template: str, folder: Path) -> str:
    """The shipped model, with another chat template."""
    folder.mkdir()
    for path in Path(MODEL).iterdir():
        if path.is_file() and path.name != "tokenizer_config.json":
            (folder / path.name).symlink_to(path)
    settings = json.loads((Path(MODEL) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return str(folder)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_with(TEMPLATE, tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = windlass.load(MODEL, "float32")[1]
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(tokenizer: PreTrainedTokenizerBase, *messages: tuple[str, str]) -> str:
    """By the tokenizer itself, but for the first token, which the engine adds."""
    given = [{"role": role, "content": content} for role, content in messages]
    text = str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True))
    return text.removeprefix(str(tokenizer.bos_token))


def test_a_prompt_is_a_message(
    run: Callable[..., Ran],
    in_library: Callable[..., windlass.Result],
    tokenizer: PreTrainedTokenizerBase,
    chatty: str,
):
    said = {
        (): rendered(tokenizer, ("user", "Who was he?")),
        ("--system", "Be brief."): rendered(tokenizer, ("system", "Be brief."), ("user", "Who was he?")),
        ("--raw",): "Who was he?",
    }
    for options, text in said.items():
        found = json.loads(run("generate", chatty, "Who was he?", *OPTIONS, *options, "--json").out)
        result = in_library(text, max_tokens=4)
        assert (found["prompt_tokens"], found["tokens"]) == (result.prompt_tokens, result.tokens)
    assert "unchanged (--raw)" in run("generate", chatty, "a", *OPTIONS, "-v", "--raw").err


@pytest.mark.parametrize("system", [(), ("--system", "Be brief.")])
def test_a_question_after_a_cached_text_is_one_message(
    run: Callable[..., Ran],
    in_library: Callable[..., windlass.Result],
    tokenizer: PreTrainedTokenizerBase,
    chatty: str,
    tmp_path: Path,
    system: tuple[str, ...],
):
    """Cut where tokens are: the ids are those of the whole."""
    file = str(tmp_path / "file")
    assert run("cache", chatty, "He was old.", "--prompt-cache", file, "--dtype", "float32", *system).code == 0
    assert run("cache", chatty, " She was young.", "--append", "--prompt-cache", file, "--dtype", "float32").code == 0
    before = [("system", system[1])] if system else []
    whole = in_library(rendered(tokenizer, *before, ("user", "He was old. She was young. Who was he?")), max_tokens=4)
    ran = run("generate", chatty, " Who was he?", "--prompt-cache", file, *OPTIONS)
    assert ran.out == whole.text + "\n"


def test_a_text_without_messages_comes_before_the_first_one(
    run: Callable[..., Ran],
    in_library: Callable[..., windlass.Result],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chatty: str,
    tmp_path: Path,
):
    file = str(tmp_path / "file")
    assert run("cache", chatty, "He was old.", "--raw", "--prompt-cache", file, "--dtype", "float32").code == 0
    cache = windlass.KVCache(model)
    in_library("He was old.", cache, max_tokens=1)
    cache.rollback(1)
    expected = in_library(rendered(tokenizer, ("user", "Who was he?")), cache, max_tokens=4).text
    assert run("generate", chatty, "Who was he?", "--prompt-cache", file, *OPTIONS).out == expected + "\n"
    cache = windlass.KVCache(model)
    in_library("He was old.", cache, max_tokens=1)
    cache.rollback(1)
    expected = in_library(" Who was he?", cache, max_tokens=4).text
    assert run("generate", chatty, " Who was he?", "--prompt-cache", file, "--raw", *OPTIONS).out == expected + "\n"


def test_what_has_no_place_is_refused(run: Callable[..., Ran], chatty: str, tmp_path: Path):
    brief = ("--system", "Be brief.")
    assert_refused(run("generate", chatty, "a", *OPTIONS, *brief, "--raw"), "which --raw leaves out. Give one of them")
    assert_refused(run("generate", MODEL, "a", *OPTIONS, *brief), "this model has no chat template. Leave --system out")
    assert_refused(run("chat", MODEL, *OPTIONS, *brief, stdin=b"a"), "this model has no chat template")
    file = str(tmp_path / "file")
    assert run("cache", chatty, "a", "--prompt-cache", file, "--dtype", "float32").code == 0
    ran = run("generate", chatty, "a", "--prompt-cache", file, *OPTIONS, *brief)
    assert_refused(ran, "--system begins a text, and this prompt cache holds one. Give it when the file is made")


def test_a_template_that_fails_is_one_line(run: Callable[..., Ran], tmp_path: Path):
    broken = folder_with("{{ raise_exception('no\nsystem') }}", tmp_path / "broken")
    says = "this model's chat template fails: no system. `windlass generate --raw` leaves the template out"
    assert_refused(run("generate", broken, "a", *OPTIONS), says)
    assert run("generate", broken, "a", *OPTIONS, "--raw").code == 0


def test_chat_has_a_system_prompt(
    run: Callable[..., Ran],
    in_library: Callable[..., windlass.Result],
    tokenizer: PreTrainedTokenizerBase,
    chatty: str,
):
    expected = in_library(rendered(tokenizer, ("system", "Be brief."), ("user", "Who was he?")), max_tokens=4).text
    assert run("chat", chatty, *OPTIONS, "--system", "Be brief.", stdin=b"Who was he?\n").out == expected + "\n"
