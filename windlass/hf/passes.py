"""Passes of an attached model: their arguments, their checks, and their state while they run."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from threading import get_ident
from typing import Any, Final, NoReturn, ParamSpec, TypeVar, final

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.cache.rows import check_mask
from windlass.cache.state import Text
from windlass.core.errors import UsageError, check_kind
from windlass.core.positions import EMPTY
from windlass.core.types import Picker, QueryPositions
from windlass.hf.mask import Mask

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

BUSY: Final = (
    "a pass with a KVCache runs in this model, in another thread or around this call. "
    "Give each thread a model of its own"
)


@dataclass(frozen=True)
class TokenTypes:
    """The argument that marks a model's picture columns: its name, and the number of columns it covers."""

    name: str
    columns: int


@dataclass(eq=False)
class RunningPass:
    """A pass with a cache, its thread, and the place of the cache's text before it.

    `is_alone`: the decoder was called by itself, not by the whole model.

    `sees_to` has for each mask that is not causal the last positions that the tokens see. `keys` has the inputs of
    layers whose keys others share. `pickers` are the indexers that were called, by their callers.
    """

    cache: TextCache
    thread: int | None = None
    before: Text | None = None
    is_alone: bool = False
    types: TokenTypes | None = None
    sees_to: dict[Mask, QueryPositions | None] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    pickers: dict[object, Picker] = field(default_factory=dict)


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, excluded from torch.compile where that compiles the model around it.

    Kernels are given the addresses of tensors, and a compiled frame frees tensors that it holds only by address.
    """
    kept: Callable[Arguments, Result] = torch.compiler.disable(function)

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Where nothing is compiled around it, PyTorch's wrapper would take longer than most of these functions.
        is_compiled = torch.compiler.is_compiling() or get_eval_frame_callback() is not None
        return kept(*args, **kwargs) if is_compiled else function(*args, **kwargs)

    return call


PREFIXES: Final = ("PREFIX_TUNING", "CARTRIDGE")  # PEFT's names of adapters that are a cache


def check_call(called: Sequence[nn.Module], arguments: dict[str, Any]) -> None:
    """Raises: UsageError for arguments of a forward pass of the modules `called` that no cache of ours can honour.

    The first of them is the decoder.
    """
    if called[0].training and torch.is_grad_enabled():
        raise UsageError("a KVCache is for inference: call model.eval(), or leave past_key_values out to train")
    asked = any(_asks_attentions(module.config) for module in called)
    if arguments.get("output_attentions", asked):
        raise UsageError("output_attentions is not available with a KVCache: it never holds the whole matrix")
    if arguments.get("use_cache") is False:
        raise UsageError(
            "use_cache=False asks for a pass without a cache, but past_key_values is a KVCache. Leave one of them out"
        )


def _asks_attentions(config: Any) -> bool:
    # Code of transformers reads a config's attributes, so that its dictionary and the public one take several calls.
    own, name = object.__getattribute__(config, "__dict__"), "_output_attentions"
    return bool(own[name] if name in own else getattr(config, name[1:], False))


def model_input(arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The input of a pass, ids or embeddings, and the ids. Raises: UsageError for no tokens."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    columns = ids if ids is not None else embeds
    if columns is None:
        raise UsageError("the model was called with neither input_ids nor inputs_embeds")
    if not columns.shape[1]:
        raise UsageError("the model was called with no tokens. Pass the new tokens")
    return columns, ids


@not_compiled
def note_drafts(cache: TextCache, wanted: object) -> None:
    """Assisted decoding asks for the logits of its drafts and of the token before: so many are `wanted`."""
    if cache.expects_drafts and isinstance(wanted, int):
        cache.schedule(replace(cache.next_pass, drafts=max(wanted - 1, 0)))


def check_model(model: object) -> None:
    """Check the model. Raises: UsageError unless it is a model of transformers, or one of PEFT around it."""
    # A wrapper gives the config of the model inside.
    kinds = nn.Module if isinstance(getattr(model, "config", None), PreTrainedConfig) else PreTrainedModel
    way_out = "Load a model and its tokenizer with windlass.load(folder)"
    check_kind("model", model, kinds, "a model of transformers", way_out)


def check_adapter(model: PreTrainedModel) -> None:
    """Raises: UsageError for a model of PEFT whose adapter is keys and values that it puts into a cache."""
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "peft_type", None) in PREFIXES:
        refuse_prefix()


def refuse_prefix() -> NoReturn:
    """Refuse PEFT's prefix tuning. Raises: UsageError."""
    raise UsageError(
        "PEFT's prefix tuning replaces the cache by one of its own, with keys that are rotated and have no positions: "
        "leave the KVCache out, or give it to the base model. LoRA, IA3 and prompt tuning work with a KVCache"
    )


def real_columns(mask: Any, cache: TextCache, tokens: int) -> Tensor | None:
    """True for the pass's columns that are not padding, or None when all are real.

    Raises: UsageError for a mask of another shape, or one that contradicts the mask of earlier columns.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UsageError("attention_mask must be two-dimensional (batch, tokens): a KVCache makes its own causal mask")
    seen, is_real = cache.columns_seen, mask.bool()
    if mask.shape[1] not in (tokens, seen + tokens):
        raise UsageError(
            f"attention_mask covers {mask.shape[1]} columns. Expected {seen + tokens}, the {seen} seen and {tokens} new"
        )
    if mask.shape[1] > tokens and mask.shape[0] == cache.batch_size:  # another batch is refused with its own words
        check_mask([row.padding for row in cache.rows.rows], is_real[:, :seen])
    return is_real[:, -tokens:]


def inference_only(output: Tensor, *inputs: Tensor) -> Tensor:
    """`output`, with a backward pass that raises where `inputs` ask for gradients: a cache's tokens have none."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        guarded: Tensor = _InferenceOnly.apply(output, *inputs)
        return guarded
    return output


class _InferenceOnly(torch.autograd.Function):
    """The first of its inputs, as if it came from all, without a gradient."""

    @staticmethod
    def forward(ctx: object, output: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG004  # PyTorch's signature
        return output.view_as(output)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> NoReturn:  # noqa: ARG004
        raise UsageError(
            "a KVCache is for inference: no gradient passes through the attention of a pass with one. "
            "Leave past_key_values out of a pass that needs gradients"
        )


POSITIONS: Final = "position_ids"

# Some models of transformers pass these arguments. Attention over a cache does not need them. `sliding_window` is
# among them because a model's own attention obeys the mask: not all models with a window pass it on, and some pass it
# in every layer. Packed texts (`cu_seq_lens`, `max_length`) come with positions, which are compared.
HARMLESS: Final = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "is_causal",
        "is_first_iteration",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


def check_arguments(layer: int, given: Mapping[str, object]) -> None:
    """Return when attention may leave all of `given` out.

    Raises: UsageError for an argument that is not None and not known to be harmless.
    """
    unknown = sorted(name for name, value in given.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise UsageError(
            f"layer {layer} hands its attention {', '.join(unknown)}, which windlass' attention does not know. "
            "Leave the argument out, or use the model without a KVCache"
        )


@not_compiled
def at_positions(
    cache: TextCache, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the pass that runs, with the cache's own positions, where the model takes any.

    It may scale queries by them, and would count columns, which after padding or edits are not a row's positions.
    """
    step = cache.text.pending
    assert step is not None, "positions outside of a pass"
    if POSITIONS not in names or (step.places is not None and step.places.has_pictures):  # these the model gives
        return args, kwargs
    at, positions = names.index(POSITIONS), step.positions.clamp(min=0).long()
    if at < len(args):
        return (*args[:at], positions, *args[at + 1 :]), kwargs
    return args, {**kwargs, POSITIONS: positions}


CACHE_NAMES: Final = ("cache", "past_key_values")


def cache_name(called: Callable[..., Any]) -> str:
    """The name of the cache among the arguments of `called`.

    For a function that takes any arguments it is the name in this release of transformers.
    """
    return _named(called) or GENERATE


def _named(called: Callable[..., Any]) -> str | None:
    taken = inspect.signature(called).parameters
    return next((name for name in CACHE_NAMES if name in taken), None)


# Name of the argument of `generate`, in this release.
GENERATE: Final = _named(GenerationMixin.prepare_inputs_for_generation) or CACHE_NAMES[-1]


def our_cache(arguments: Mapping[str, Any]) -> TextCache | None:
    """The windlass cache among keyword arguments, by either name, or None."""
    return next((arguments[name] for name in CACHE_NAMES if isinstance(arguments.get(name), TextCache)), None)


def with_cache_as(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the cache under this name, if there is one. Raises: UsageError for one of each name."""
    [other] = {*CACHE_NAMES} - {name}
    if other not in arguments:
        return arguments
    given = arguments[other]
    rest = {key: value for key, value in arguments.items() if key != other}
    if given is None:
        return rest
    if rest.get(name) is not None:
        raise UsageError(f"{name} and {other} are two names of one argument, and both were given. Leave {other} out")
    return {**rest, name: given}


TYPE_NAMES: Final = ("token_type_ids", "mm_token_type_ids")  # of an argument of models


def token_types(arguments: dict[str, Any]) -> TokenTypes | None:
    """The token types among the arguments of a pass."""
    for name in TYPE_NAMES:
        if isinstance(arguments.get(name), Tensor):
            return TokenTypes(name, arguments[name].shape[1])
    return None


def sees_to(running: RunningPass, mask: Mask, window: int | None) -> QueryPositions | None:
    """The last position that each token of a pass sees, or None where that is its own. `window` is the layer's.

    Raises: UsageError for a picture that a pass cuts in two, and for a mask of another kind.
    """
    if mask.is_causal:
        return None
    if mask not in running.sees_to:
        running.sees_to[mask] = _sees_to(running, mask, window)
    return running.sees_to[mask]


def _sees_to(running: RunningPass, mask: Mask, window: int | None) -> QueryPositions | None:
    step, types = running.cache.text.pending, running.types
    assert step is not None, "a mask outside of a pass"
    if types is not None:
        _check_whole(types, mask)
    elif len(mask.columns) == 1:  # attach has seen that texts without pictures are causal
        return None
    last = mask.last_seen(window)
    if last is not None and torch.equal(last, torch.arange(len(mask.columns), device=last.device).expand_as(last)):
        return None
    if types is None:
        raise UsageError(f"this model asks for a mask that is not causal, and brings none of {', '.join(TYPE_NAMES)}")
    if last is None:
        raise UsageError(
            f"{types.name} make this model ask for a mask that is not one of pictures, each of which sees itself, "
            "inside of the sliding window. A KVCache can't read such a text"
        )
    positions = step.positions
    return positions.maximum(positions.gather(1, last)).where(positions >= 0, EMPTY)


def _check_whole(types: TokenTypes, mask: Mask) -> None:
    """Raises: UsageError where token types don't tell of all columns, or where the pass begins or ends in a picture."""
    start, stop = mask.columns.start, mask.columns.stop
    if start and types.columns < stop:
        raise UsageError(
            f"{types.name} covers {types.columns} columns. Expected {stop}, the {start} seen and {stop - start} new: "
            "models look them up by the column of the text"
        )
    for cut in [at for at in (start, stop) if 0 < at < types.columns]:
        if bool(mask.sees(cut - 1, cut).any()):
            raise UsageError(
                f"a pass ends at column {cut}, inside of a picture, whose tokens see each other in both directions. "
                "End the pass before or after the picture: feed it in one piece, with a prefill_chunk_size that fits it"
            )


@final
class AttributePatch:
    """`module.name` is `replacement` from now on."""

    def __init__(self, module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
        self._module, self._name, self._own = module, name, vars(module).get(name)
        self._replacement = replacement
        setattr(module, name, replacement)

    @property
    def original(self) -> Callable[..., Any]:
        """The method that the module had. Where that was its class's, it is the present one of the class."""
        own: Callable[..., Any] | None = self._own
        # Not `__get__` of it, which torch.compile takes for the attribute of the module: the replacement.
        return partial(getattr(type(self._module), self._name), self._module) if own is None else own

    @property
    def is_there(self) -> bool:
        """Return True if nobody has replaced it since."""
        return vars(self._module).get(self._name) is self._replacement

    def put_back(self) -> None:
        """Restore the module, except for later changes of others."""
        if not self.is_there:
            return
        delattr(self._module, self._name)
        if self._own is not None:
            setattr(self._module, self._name, self._own)


@final
class WholePass:
    """Stands in for the `forward` of a model, whose head comes after its decoder.

    A pass with a cache of ours that fails in the head, or is interrupted there, leaves no trace either.
    """

    def __init__(self, model: nn.Module) -> None:
        self._passes: dict[int, list[RunningPass]] = {}  # by thread: its passes of the decoder
        self.__signature__ = inspect.signature(model.forward)  # which transformers' `generate` looks at
        self._cache_name = cache_name(model.forward)
        self.replaced = AttributePatch(model, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model. The arguments are its own."""
        kwargs = with_cache_as(self._cache_name, kwargs)
        cache = kwargs.get(self._cache_name)
        if not isinstance(cache, TextCache):
            return self.replaced.original(*args, **kwargs)
        return self.take(cache, kwargs.get("logits_to_keep"), lambda: self.replaced.original(*args, **kwargs))

    def take(self, cache: TextCache, logits_to_keep: object, work: Callable[[], Result]) -> Result:
        """The result of `work`, a pass of the whole model with this cache."""
        complete: list[RunningPass] = []
        try:
            note_drafts(cache, logits_to_keep)
            self._enter(complete)
            output = work()
            self.leave()
            return output
        except BaseException:
            self.leave()
            if len(complete) == 1 and complete[0].before is not None:
                complete[0].cache.take_back(complete[0].before)
            raise

    @property
    def is_served(self) -> bool:
        """Return True if a pass with a cache of ours runs in this thread."""
        return get_ident() in self._passes

    def begin(self, decoder: RunningPass) -> None:
        """Note that a pass of the decoder begins, in one of the whole model or alone."""
        decoder.is_alone = not self.is_served
        if decoder.is_alone:
            self._enter([])

    def end(self, decoder: RunningPass, is_complete: bool) -> None:
        """Note that a pass of the decoder has ended."""
        if decoder.is_alone:
            self.leave()
        elif is_complete:
            self._passes[get_ident()].append(decoder)

    @not_compiled
    def leave(self) -> None:
        """Forget the passes of this thread."""
        self._passes.pop(get_ident(), None)

    @not_compiled
    def _enter(self, complete: list[RunningPass]) -> None:
        self._passes[get_ident()] = complete


HOOKS: Final = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@final
class ModuleState:
    """The attributes and hooks of all modules of a model, until `put_back`."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        hooks = [vars(module)[name] for module in model.modules() for name in HOOKS if name in vars(module)]
        self._hooks = [(held, dict(held)) for held in hooks]

    def put_back(self) -> None:
        """Leave the modules as they were."""
        for now, then in (*self._attributes, *self._hooks):
            now.clear()
            now.update(then)


class NotCopied:
    """Part of a model that is None in a copy of the model, and in one out of a file, whose weights are elsewhere."""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Nothing is copied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing is in a file."""
        return type(None), ()
