"""The body of each request as a pydantic model, which refuses unknown fields by name.

FastAPI reads these models and describes them on the page at `/docs`. `errors.of_validation` makes an answer of their
errors.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, LiteralString

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from windlass.cache.options import CacheOptions
from windlass.core.fields import Option, field_info
from windlass.core.parse import AUTO
from windlass.engine.sampling import Sampling
from windlass.policies import NAMES
from windlass.policies.registry import POLICIES
from windlass.serve.errors import UNSUPPORTED

CACHE: Final = field_info(CacheOptions)
SAMPLING: Final = field_info(Sampling)
MOST_CHARACTERS: Final = 4_000_000
SEEDS: Final = 2**62
RANDOM: Final = -1  # a seed that means random
MOST_FIELDS: Final = 1024
TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")
STORES_NOTHING: Final = "must be false, as only /v1/responses are stored, or a store of the cache such as int8"
FUNCTION: Final = "function"
FUNCTION_TAG: Final = "a function"  # no field has such a name


def _entries(most: int, value: Any) -> Any:
    """Return the entries of an object that are not null. More than `most` are refused before any is looked at."""
    if not isinstance(value, dict):
        return value
    if len(value) > most:
        raise PydanticCustomError("too_long", "must have at most {most} items", {"most": most})
    return {name: each for name, each in value.items() if each is not None}


class Body(BaseModel):
    """An object of JSON. A field that is null counts as absent, and so does one of `ignored`."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    ignored: ClassVar[frozenset[str]] = frozenset()  # fields for other servers

    @model_validator(mode="before")
    @classmethod
    def _present(cls, value: Any) -> Any:
        given = _entries(MOST_FIELDS, value)
        is_plain = not isinstance(given, dict) or not cls.ignored
        return given if is_plain else {name: each for name, each in given.items() if name not in cls.ignored}


def _such(holds: Callable[[Any], object], problem: str, code: LiteralString = "value") -> Callable[[Any], Any]:
    """Return a check of a value, which refuses a value with `problem` unless it `holds`."""

    def checked(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError(code, "{problem}", {"problem": problem})
        return value

    return checked


def only(*values: Any) -> Any:
    """Return an annotation that refuses all values but these. Neither `true` nor 1.0 counts as 1."""
    known, wanted = [(type(each), each) for each in values], " or ".join(map(json.dumps, values))
    check = _such(lambda value: (type(value), value) in known, f"must be {wanted} on this server", UNSUPPORTED)
    return PlainValidator(check, json_schema_input_type=Annotated[Any, WithJsonSchema({"enum": [*values]})])


def _one_of(names: Iterable[str], name_in: Callable[[str], str] = str) -> AfterValidator:
    """A check of a text that is, or has in it, one of these names."""
    return AfterValidator(_such(lambda value: name_in(value) in names, f"must be one of {', '.join(names)}"))


def _of_option(option: Option) -> Any:  # of the type that the field is annotated with
    """The field of a declared option, with its range and help."""
    least, above = (None, option.least) if option.is_above else (option.least, None)
    return Field(option.default, ge=least, gt=above, le=option.most, description=option.described)


def _of_cache(name: str, most: int) -> Any:
    """The field of an option of a cache, which a request may set up to `most`."""
    return _of_option(replace(_of_server(name), most=most))


def _of_server(name: str) -> Option:
    """An option of a cache that is the server's by default."""
    return replace(CACHE[name], default=None, usual="the server's")


def text_of_json(value: Any) -> Any:
    """JSON that is neither a string nor a list, as text."""
    return value if isinstance(value, str | list) else json.dumps(value, ensure_ascii=False)


Object = dict[str, Any]
Word = Annotated[str, Field(max_length=64)]
Label = Annotated[str, Field(max_length=256)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")]
Text = Annotated[str, Field(max_length=MOST_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_CHARACTERS, fail_fast=True)]
Count = Annotated[int, Field(ge=1, le=2**30)]
Top = Annotated[int, Field(ge=0, le=20)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Variable = Annotated[
    str, Field(max_length=64), AfterValidator(_such(str.isidentifier, "must be the name of a variable"))
]
IdText = Annotated[str, AfterValidator(_such(TOKEN_ID.fullmatch, "must be a token id, written as a string"))]
StoreName = Annotated[str, _one_of(CACHE["store"].names)]
Positions = Annotated[Word, _one_of(CACHE["positions"].names, lambda mode: mode.partition("(")[0].strip())]
Variables = Annotated[dict[Variable, bool | int | float | Label], BeforeValidator(partial(_entries, 16), Object)]
Choice = Literal["none", "auto", "required"]
Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Included = Literal[  # items and parts that our answers never have
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class NeutralFields(Body):
    """Fields that clients send to every route: without effect, or with one allowed value.

    Of `reasoning_effort`, `none` has an effect. Subclasses declare some of the fields again, with more values.
    """

    background: Annotated[bool, only(False)] = False
    best_of: Annotated[int, only(1)] = 1
    client_metadata: Object = {}
    echo: Annotated[Any, only(False)] = False
    function_call: Annotated[str, only("none", "auto")] = "none"
    functions: Annotated[list[Any], only([])] = []
    include: Annotated[list[Included], Field(max_length=7)] = []
    include_obfuscation: bool = False
    max_tool_calls: Annotated[int, Field(ge=0, le=2**30)] | None = None
    metadata: Object = {}
    modalities: Annotated[list[str], only(["text"])] = ["text"]
    n: Annotated[Any, only(1)] = 1
    parallel_tool_calls: bool = True
    prediction: Object = {}
    prompt_cache_key: Annotated[str, Field(max_length=4096)] = ""
    prompt_cache_retention: Label = ""
    reasoning_effort: Effort | None = None
    """`none` turns off a model's thinking if its chat template can. Other values have no effect."""
    safety_identifier: Annotated[str, Field(max_length=4096)] = ""
    service_tier: Label = ""
    suffix: Annotated[Any, only("")] = ""
    top_logprobs: Annotated[Any, only(0)] = 0
    verbosity: Verbosity = "medium"


class SamplingFields(Body):
    """The options of a `Sampling` under its names, with OpenAI's ranges."""

    temperature: float = _of_option(replace(SAMPLING["temperature"], default=1.0, most=2))
    top_k: int = _of_option(replace(SAMPLING["top_k"], least=-1, most=2**20, usual="0, off, and so is -1"))
    top_p: float = _of_option(replace(SAMPLING["top_p"], is_above=False))
    min_p: float = _of_option(SAMPLING["min_p"])
    repetition_penalty: float = _of_option(SAMPLING["repetition_penalty"])
    seed: int = _of_option(
        replace(SAMPLING["seed"], default=RANDOM, usual="-1, another one each time", least=-(2**63), most=2**64 - 1)
    )

    def sampling(self, at: int) -> Sampling:
        """The sampling of text number `at` of a prompt."""
        given = self.model_dump(include={*SAMPLING})
        seed = secrets.randbelow(SEEDS) if self.seed == RANDOM else self.seed
        given |= {"seed": (seed + at) % SEEDS, "top_k": max(0, self.top_k)}
        if not self.top_p:  # only the likeliest token is in top_p=0
            given |= {"temperature": 0.0, "top_p": 1.0}
        return Sampling(**given)


class ReuseFields(Body):
    """Use of cached prefixes by a request."""

    lookup: bool = True
    """Start from a cached prefix of the prompt, if there is one."""
    store: bool = True
    """Cache the prefix of this prompt for later requests."""
    reuse: Word | None = None
    """Cached tokens to use: `exact`, `prefix`, or `edited`, after which a window may follow, as `edited(16)`."""
    name: Name = ""
    """Only requests with this name share the prefix."""


POLICY_NAMES: Final = (AUTO, *sorted(NAMES))


def _policy_name(given: object) -> object:
    """The name of a policy that was given, as on the command line, or, of no such name, the same again."""
    return (POLICIES.name_in(given, POLICY_NAMES) or given) if isinstance(given, str) else given


class CacheFields(Body):
    """Options of the cache that a request may set. Arguments of a policy are set at the start of the server."""

    budget: int | None = _of_cache("budget", 1 << 20)
    policy: Annotated[str, BeforeValidator(_policy_name, str), _one_of(POLICY_NAMES)] | None = None
    """The policy that chooses which tokens to evict."""
    positions: Positions | None = None
    """Position mode in which cached keys are read."""
    store: Annotated[
        StoreName | None,
        BeforeValidator(lambda given: None if given is False else given, str | Literal[False]),
        BeforeValidator(_such(lambda given: given is not True, STORES_NOTHING)),
    ] = None
    """Format of cached keys and values. OpenAI's `false` is accepted without effect."""
    recall: Annotated[int, Field(ge=CACHE["recall"].least, le=1 << 16)] | Literal["half"] | None = Field(
        None, description=_of_server("recall").described
    )
    sinks: Literal["system"] | Annotated[int, Field(ge=CACHE["sinks"].least, le=4096)] | None = None
    """Number of first tokens that are never evicted, or `system` for the tokens of the system message."""
    window: int | None = _of_cache("window", 1 << 16)
    cache: ReuseFields = ReuseFields()
    """Use of cached prefixes."""

    @property
    def cache_options(self) -> dict[str, Any]:
        """The options that are set, under the names of `CacheOptions`."""
        return self.model_dump(include={*CacheFields.model_fields} - {"cache"}, exclude_none=True)


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    """End the stream with a chunk of token counts."""
    include_obfuscation: bool = False


StopStrings = Annotated[
    list[Annotated[Label, Field(min_length=1)]],
    Field(max_length=16),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given, str | list[str]),
]


class SharedFields(SamplingFields, CacheFields):
    """Fields of every route that writes text."""

    model: Label | None = None
    """The model's name, as `/v1/models` has it (default: the server's only model)."""
    stop: StopStrings = []
    """One or more strings that end the text."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[IdText, Annotated[float, Field(ge=-100.0, le=100.0)]], BeforeValidator(partial(_entries, 1024), Object)
    ] = {}
    """A number that is added to the score of each of these token ids."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    user: Label = ""
    """Requests with the same `user` share cached prefixes. Other requests cannot use them."""


class TextRequest(NeutralFields, SharedFields):
    """Fields of chats and completions."""

    max_tokens: Count | None = None
    """Maximum number of tokens to write."""
    max_seconds: Annotated[float, Field(gt=0.0, le=1e6)] | None = None
    """Timeout of the request, including its time in the queue (default: none)."""
    n: Annotated[int, Field(ge=1, le=8)] = 1
    """Texts to write for each prompt."""
    speculate: Literal["lookup", "off"] | None = None
    """Draft tokens that followed the last ones earlier in the text, which changes no text (default: the server's)."""


class Part(Body):
    """A part of a message: text, or a chunk, which is cached wherever it stands."""

    ignored = frozenset(("annotations", "cache_control", "id", "index", "logprobs"))
    type: Annotated[str, only("text", "chunk", "input_text", "output_text")]
    text: Text

    @model_validator(mode="after")
    def _has_text(self) -> "Part":
        if self.type == "chunk" and not self.text:
            raise PydanticCustomError("empty_chunk", "must have some text in a chunk", {"field": "text"})
        return self


Content = str | Annotated[list[str | Part], Field(fail_fast=True)]


class PromptMessage(Body):
    """A message of the system, a developer or the user."""

    ignored = Part.ignored | {"status", "phase", "end_turn"}
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user"]
    content: Content
    name: Label | None = None
    pin: bool = False
    """Never evict the tokens of this message."""


class AssistantMessage(Body):
    """A message that a model wrote, in the dialects of many clients. Fields beyond these are ignored."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["message"] = "message"
    role: Literal["assistant"]
    content: str | list[Any] = []
    tool_calls: Annotated[list[Object], Field(max_length=128)] = []
    reasoning_content: Any = None
    """The thought before the content."""
    reasoning: Any = None
    refusal: Any = None
    function_call: Any = None
    name: Any = None
    pin: bool = False


class ToolMessage(Body):
    """The result of a call. JSON that is neither a string nor a list of parts is read as text."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["message"] = "message"
    role: Literal["tool", "function"]
    content: Annotated[Content, BeforeValidator(text_of_json, Any)] = ""
    tool_call_id: Any = None
    name: Any = None
    pin: bool = False


AnyMessage = PromptMessage | AssistantMessage | ToolMessage
Message = TypeAliasType("Message", Annotated[AnyMessage, Field(discriminator="role")])
Messages = Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]


class Function(Body):
    """A function that the model may call. Its `parameters` are a JSON schema."""

    ignored = frozenset(("cache_control", "defer_loading", "output_schema"))
    name: Name
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: Object | None = None
    strict: bool | None = None


class FunctionTool(Body):
    """A function as chats have it."""

    ignored = Function.ignored
    type: Literal["function"]
    function: Function


class OtherTool(Body):
    """A tool that only other servers have. The answer's usage lists it as left out."""

    model_config = ConfigDict(extra="ignore")
    type: Word


def tool_kind(value: Any) -> str:
    """The tag of a tool: a function, or another one."""
    return FUNCTION_TAG if isinstance(value, Mapping) and value.get("type") == FUNCTION else "other"


Tool = Annotated[FunctionTool, Tag(FUNCTION_TAG)] | Annotated[OtherTool, Tag("other")]


class FunctionName(Body):
    """The name of a function."""

    name: Name


class NamedChoice(Body):
    """A demand that one function is called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """A JSON schema that the answer follows."""

    name: Word
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Object, Field(alias="schema")]
    strict: bool | None = None


class PlainFormat(Body):
    """Any text, or any object of JSON."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Recompute(Body):
    """Recomputation of parts of type `chunk`."""

    recompute: Word | None = None
    """Tokens of each chunk that are computed again in their place (default: `first(16)`)."""


class PromptChunks(Recompute):
    """Chunks that stand before a prompt."""

    texts: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(min_length=1, max_length=256)]


class ChatRequest(TextRequest):
    """The body of `/v1/chat/completions`."""

    messages: Messages
    """The conversation, oldest message first. With a `session`, its new messages."""
    session: Name | None = None
    """Name of the conversation that the server remembers, and that this turn is added to."""
    chat_template_kwargs: Variables = {}
    """Variables of the model's chat template."""
    chunks: Recompute | None = None
    max_completion_tokens: Count | None = None
    """Another name for `max_tokens`."""
    logprobs: bool = False
    """Return the log probability of each token."""
    top_logprobs: Top = 0
    """Number of likeliest tokens to return with each token. Requires `logprobs`."""
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] = PlainFormat(type="text")
    """Format of the answer: text, a JSON object, or JSON that matches a schema."""
    tools: Annotated[list[Annotated[Tool, Discriminator(tool_kind)]], Field(max_length=128)] = []
    """Functions that the model may call."""
    tool_choice: Choice | NamedChoice = "auto"
    """`none`, `auto`, `required`, or the function that must be called."""

    @property
    def function_tools(self) -> list[dict[str, Any]]:
        """The functions among the tools, as chat templates read them."""
        tools = [tool for tool in self.tools if isinstance(tool, FunctionTool)]
        return [{"type": FUNCTION, "function": tool.function.model_dump(exclude_unset=True)} for tool in tools]

    @property
    def callable(self) -> dict[str, Object]:
        """The schema of the arguments of each function that may be called, by the function's name."""
        tools = [tool.function for tool in self.tools if isinstance(tool, FunctionTool)]
        return {} if self.choice == "none" else {tool.name: tool.parameters or {} for tool in tools}

    @property
    def choice(self) -> str:
        """`none`, `auto`, `required`, or `=` and the name of a function."""
        if isinstance(self.tool_choice, NamedChoice):
            return f"={self.tool_choice.function.name}"
        return self.tool_choice

    @property
    def left_out(self) -> list[str]:
        """A note for each part of the request that the answer is without."""
        effort = self.reasoning_effort or "none"
        return unread_tools(self.tools) + ([] if effort == "none" else [f"reasoning_effort: {effort}"])


def unread_tools(tools: Sequence[Body]) -> list[str]:
    """A note for each tool that is not a function."""
    return [f"tools.{at}: {tool.type}" for at, tool in enumerate(tools) if isinstance(tool, OtherTool)]


def _prompt_kind(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else ""
    kinds = {int: "ids", bool: "ids", list: "lists"}
    return kinds.get(type(first), "texts") if isinstance(value, list) else "text"


class CompletionRequest(TextRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[Text], Field(min_length=1, max_length=16), Tag("texts")]
        | Annotated[TokenIds, Tag("ids")]
        | Annotated[list[TokenIds], Field(max_length=16), Tag("lists")],
        Discriminator(_prompt_kind),
    ]
    """Text to continue, its token ids, or a list of either."""
    suffix: Text = ""
    """Text after the written text, for models that fill in the middle."""
    echo: bool = False
    """Begin the answer with the prompt."""
    max_tokens: Annotated[int, Field(ge=0, le=2**30)] | None = None
    """Maximum number of tokens to write (default: 16)."""
    chunks: PromptChunks | None = None
    """Chunks before the prompt, each of which is cached wherever it stands."""
    logprobs: Top | None = None
    """Return the log probability of each token and of this many likeliest tokens."""

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else [*self.prompt]  # type: ignore[list-item]  # ids of one prompt


class TokenizeRequest(Body):
    """The body of `/tokenize`: a prompt, or messages."""

    model: Label | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    chat_template_kwargs: Variables | None = None
    add_special_tokens: bool = True
    """Add the special tokens at the start of a text."""


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: Label | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MOST_CHARACTERS, fail_fast=True)]


class CacheQuery(Body):
    """Selection of cached prefixes (default: all)."""

    name: Name | None = None
