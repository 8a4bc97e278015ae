"""Pieces of a conversation add up to the template's output for all of it, in several styles."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.models import MODEL
from windlass.core.errors import UsageError
from windlass.engine import templates
from windlass.engine.text import encode

STYLES = {
    "tags": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}",
    # A system prompt of its own, and the user's in the place of it.
    "default system": "{% if messages[0].role != 'system' %}(system: be kind)\n{% endif %}{% for m in messages %}"
    "({{ m.role }}: {{ m.content }})\n{% endfor %}{% if add_generation_prompt %}(assistant: {% endif %}",
    # Each turn begins with the first special token, and the system prompt is within the first one.
    "brackets": "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = '<<S>>' + m.content + '<</S>>\n' %}{% elif m.role == 'user' %}"
    "{{ bos_token }}[IN] {{ ns.s }}{{ m.content | trim }} [/IN]{% set ns.s = '' %}"
    "{% else %}{{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
}
TURNS = (("Hello?", "Yes, here."), ("And now?", "Still\nhere."), ("Bye", ""))


@pytest.fixture(params=STYLES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    made = AutoTokenizer.from_pretrained(MODEL)
    made.chat_template = STYLES[request.param]
    return made


def whole(tokenizer: PreTrainedTokenizerBase, messages: list[templates.Message]) -> str:
    """The conversation as transformers renders it, without the token that `encode` puts before a text."""
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return text.removeprefix(str(tokenizer.bos_token))


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("is_stopped", [True, False])
def test_turns_add_up_to_the_template(tokenizer: PreTrainedTokenizerBase, system: str | None, is_stopped: bool):
    held, end, messages = "", "", templates.of_system(system)
    spaces: list[tuple[str, str]] = []
    for line, reply in TURNS:
        messages.append(templates.message("user", line))
        piece = templates.next_prompt(tokenizer, messages, end) if held else templates.first_prompt(tokenizer, messages)
        held += piece
        expected = whole(tokenizer, messages)
        for shown, fed in spaces:
            expected = expected.replace(shown, fed, 1)
        assert held == expected
        after = templates.next_prompt(
            tokenizer, [*messages, templates.message("assistant", ""), templates.message("user", "")]
        )
        # A reply that stops by itself has its last token in the cache already.
        end = str(tokenizer.eos_token) if is_stopped and after.lstrip().startswith(str(tokenizer.eos_token)) else ""
        space = " " if end and after.startswith(" ") else ""  # of the template, which the model does not write
        held += reply + end
        spaces.append((reply + space + end, reply + end))
        messages.append(templates.message("assistant", reply))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_message_in_two_parts_is_the_message(tokenizer: PreTrainedTokenizerBase, system: str | None):
    before = templates.user_start(tokenizer, "A long text.", system)
    message = templates.message("user", "A long text. What of it?")
    assert before + templates.user_end(tokenizer, " What of it?") == whole(
        tokenizer, [*templates.of_system(system), message]
    )


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_the_end_of_a_text_is_known_by_its_tokens(tokenizer: PreTrainedTokenizerBase, system: str | None):
    def standing(text: str) -> tuple[str, str]:
        return templates.text_end(tokenizer, encode(tokenizer, text, is_start=True))

    messages = [*templates.of_system(system), templates.message("user", "A long text.")]
    assert standing(templates.user_start(tokenizer, "A long text.", system)) == ("user", "")
    asked = templates.first_prompt(tokenizer, messages)
    assert standing(asked) == ("reply", "")
    assert standing(asked + "A reply") == ("reply", "")
    again = [*messages, templates.message("assistant", ""), templates.message("user", "More?")]
    following = templates.next_prompt(tokenizer, again)
    assert standing(asked + "A reply" + following) == ("reply", "")
    is_end = following.lstrip().startswith(str(tokenizer.eos_token))
    assert standing(asked + "A reply" + str(tokenizer.eos_token)) == (
        "reply",
        str(tokenizer.eos_token) if is_end else "",
    )
    assert standing("A long text of no one, [and] (so) on: the end.") == ("no_message", "")


def test_no_template_is_told():
    bare = AutoTokenizer.from_pretrained(MODEL)
    assert not templates.has_template(bare)
    assert templates.text_end(bare, [5, 6, 7]) == ("no_message", "")
    with pytest.raises(UsageError, match=r"this model has no chat template\. Leave --system out"):
        templates.user_start(bare, "a", "Be brief.")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{ raise_exception('no system\nhere') }}", "no system here"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_whatever_a_template_raises_is_one_line(template: str, says: str):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    with pytest.raises(UsageError) as caught:
        templates.first_prompt(tokenizer, [templates.message("user", "a")])
    assert str(caught.value).startswith("this model's chat template fails: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_drops_replies_is_refused():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(UsageError, match="leaves earlier replies out"):
        templates.next_prompt(tokenizer, [templates.message(role, "a") for role in ("user", "assistant", "user")])
