"""Tokenizers of families of models: the shipped model's, with the marks and the kind of template that a family has."""

from functools import cache

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import TOOLS, VOCABULARY
from windlass.serve.forms import CALL_FORMS, GLM, HERMES, MINIMAX, QWEN_XML, CallForm
from windlass.serve.prompts import PromptTokenizer

EVIDENCE = {
    "gpt-oss (Harmony)": "<|channel|> <|message|>",
    "DeepSeek V3 and R1": "<｜tool▁call▁begin｜> ```json",  # noqa: RUF001
    "DeepSeek V3.1": "<｜tool▁call▁begin｜>",  # noqa: RUF001
    "Kimi K2": "<|tool_call_argument_begin|>",
    "Mistral from v11 on, Magistral, Devstral": "[TOOL_CALLS] [ARGS] [/THINK]",
    "Mistral up to v7, Nemo, Ministral": "[TOOL_CALLS]",
    "Granite 3": "<|tool_call|>",
    "GLM 4.5 and later": "<tool_call> <arg_key> </think>",
    "Qwen3-Coder, Qwen3.5": "<tool_call> <function= <parameter=",
    "MiniMax M2": "<minimax:tool_call> <invoke name= <parameter name= </think>",
    "Hermes, Qwen 2.5 and 3, and all others": "<tool_call> <|python_tag|> </think>",
    "Llama 3": '"parameters": dictionary',
}
MARKS = {
    "<|start|>",
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>", "<|python_tag|>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>"),  # noqa: RUF001
    *("<｜tool▁calls▁end｜>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),  # noqa: RUF001
    *("<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|eom_id|>"),
    *("<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
}


@cache
def words_of(form: CallForm) -> PromptTokenizer:
    """Words of a model of this family. Its marks are special tokens where those of the family are."""
    template = f"{{# {EVIDENCE[form.family]} #}}" + TEMPLATE.replace("{% for", TOOLS + "{% for", 1)
    tokenizer = with_template(template)
    if form not in (GLM, HERMES, MINIMAX, QWEN_XML):
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(MARKS)})
    assert EVIDENCE.keys() == {each.family for each in CALL_FORMS}
    return PromptTokenizer(tokenizer, [1], max(VOCABULARY, len(tokenizer)))
