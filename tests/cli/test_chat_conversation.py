"""The text that each turn adds, against the template rendered as a whole."""

from collections.abc import Sequence

import pytest

import windlass
from tests.helpers.chats import TEMPLATE, with_template
from windlass.cli.chat.conversation import Conversation, Exchange

TURNS = (("Hello?", "Yes, here."), ("And now?", "Still\nhere."), ("Bye", ""))
ALTERNATE = "{% if messages|length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}" + TEMPLATE


def after(conversation: Conversation, turns: Sequence[tuple[str, str]] = TURNS, ended_with: str = "") -> Conversation:
    conversation.turns += [Exchange(line, reply, ended_with=ended_with) for line, reply in turns]
    return conversation


@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_turns_add_up_to_the_template(is_stopped: bool, system: str | None):
    tokenizer = with_template()
    ended_with = str(tokenizer.eos_token) if is_stopped else ""
    conversation, held = Conversation(tokenizer, system=system), str(tokenizer.bos_token)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for line, reply in TURNS:
        held += conversation.missing(line)
        messages.append({"role": "user", "content": line})
        assert held == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # A reply that stops by itself has its last token in the cache already.
        held += reply + ended_with
        after(conversation, [(line, reply)], ended_with)
        messages.append({"role": "assistant", "content": reply})


def test_ids_made_from_the_text_are_those_of_the_whole():
    tokenizer = with_template()
    conversation = after(Conversation(tokenizer), TURNS[:2], str(tokenizer.eos_token))
    conversation.encode_again()
    messages = [
        {"role": role, "content": text}
        for turn in TURNS[:2]
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    whole = str(tokenizer.apply_chat_template(messages, tokenize=False)).removesuffix("\n")
    assert tokenizer.decode(conversation.ids) == whole
    assert conversation.ids[0] == tokenizer.bos_token_id
    conversation.tell("Be brief.")
    told = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.decode(conversation.ids) == str(tokenizer.apply_chat_template(told, tokenize=False))[:-1]
    conversation.tell(None)
    assert tokenizer.decode(conversation.ids) == whole


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[-1].content }}", "leaves earlier replies out"),
        ("{{ messages[0].content }} {{ messages[-1].content }}", "leaves earlier replies out"),
        (ALTERNATE, "fails: roles must alternate"),
    ],
)
def test_a_template_that_fails_later_changes_nothing(template: str, says: str):
    conversation = Conversation(with_template(template))
    assert conversation.missing("a")
    after(conversation, TURNS[:2])
    with pytest.raises(windlass.UsageError, match=says):
        conversation.missing("b")
    with pytest.raises(windlass.UsageError):
        conversation.tell("Be brief.")
    assert (conversation.system, conversation.turns) == (None, [Exchange(*each) for each in TURNS[:2]])


def test_a_system_text_without_a_place_is_refused():
    with pytest.raises(windlass.UsageError, match="leaves the system text out"):
        Conversation(with_template("[{{ messages[-1].role }}]"), system="Be brief.")
    with pytest.raises(windlass.UsageError, match="no chat template"):
        Conversation(with_template(None), system="Be brief.")
    with pytest.raises(windlass.UsageError, match="continues a prompt cache"):
        Conversation(with_template(), start=[5, 6], system="Be brief.")


def test_a_text_that_was_read_before_is_gone_on_with():
    tokenizer = with_template()
    whole = str(tokenizer.apply_chat_template([{"role": "user", "content": "A b. C?"}], tokenize=False))
    generation = whole.removesuffix("\n") + "\n[assistant]"
    begun, rest = tokenizer.bos_token + "[user]A b.", Conversation(tokenizer, tokenizer("x")["input_ids"])
    assert rest.missing(" C?") == "[user]C?<|eos|>\n[assistant]"  # a text without messages: one begins after it
    inside = Conversation(tokenizer, tokenizer(begun, add_special_tokens=False)["input_ids"])
    assert begun + inside.missing(" C?") == generation
    replied = generation + "D.<|eos|>"
    later = Conversation(tokenizer, tokenizer(replied, add_special_tokens=False)["input_ids"])
    assert later.missing("E") == "\n[user]E<|eos|>\n[assistant]"


def test_without_a_template_a_message_begins_a_line():
    conversation = Conversation(with_template(None))
    assert conversation.missing("a") == "a"
    assert after(conversation, TURNS[:1]).missing("b") == "\nb"
    assert conversation.missing("b", after=0) == "b"
