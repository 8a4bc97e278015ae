"""Facts of a model: kind, trained length, device, ordinary tokens, and methods whose code is known."""

import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, __version__

from windlass.core.errors import UnsupportedModel, UsageError
from windlass.core.parse import GGUF, MAX_NUMBER, split_quant
from windlass.core.ranks import is_spread
from windlass.hf.mask import Mask
from windlass.hf.recurrent import keeps_states, layer_kinds, unknown_types


def has_no_weights(model: PreTrainedModel) -> bool:
    """Return True if weights are missing that accelerate does not bring from elsewhere when a layer runs."""
    is_offloaded = any("_hf_hook" in vars(module) for module in model.modules())
    return not is_offloaded and any(parameter.is_meta for parameter in model.parameters())


def device_of_inputs(model: PreTrainedModel) -> torch.device:
    """The device of the model's weights, or the one that offloaded weights are run on.

    Raises: UsageError for a model without weights.
    """
    device = model.device
    if device.type != "meta":
        return device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)  # accelerate's
    runs_on = getattr(hook, "execution_device", None)
    if runs_on is None:
        raise UsageError(
            f"{type(model).__name__} has weights on the meta device, and accelerate brings them from nowhere. "
            "Load all of them"
        )
    return torch.device(runs_on)


CANDIDATES = 4  # per wanted token


def ordinary_ids(model: PreTrainedModel, count: int) -> Tensor:
    """(1, count) ids, the same at every call, spread over the vocabulary.

    No token that a config names: those of images, padding and the like are read in ways of their own. None whose
    embedding is all zeros. Ids repeat only in a vocabulary too small for that.
    """
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    vocabulary = weight.shape[0]
    step = max(vocabulary // (CANDIDATES * count + 1), 1)
    named = _named_ids(model)
    candidates = [each for each in range(step, vocabulary, step) if each not in named] or [0]
    real = candidates
    if not weight.is_meta:  # offloaded
        is_real = _embedded(model, torch.tensor(candidates, device=weight.device)).any(-1).tolist()
        real = [each for each, is_one in zip(candidates, is_real, strict=True) if is_one] or candidates
    picked = [real[(index * len(real)) // count % len(real)] for index in range(count)]
    return torch.tensor([picked], device=device_of_inputs(model))


@torch.no_grad()
def _embedded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The embeddings of some tokens. Weights that are spread over processes come together in a pass of their module."""
    embeddings = model.get_input_embeddings()
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    found: Tensor = embeddings(ids[None])[0] if is_spread(weight) else weight[ids]
    return found


def _named_ids(model: PreTrainedModel) -> set[int]:
    """The ids that the model's configs name: `pad_token_id`, `image_token_index`, several `eos_token_id`."""
    configs = (vars(module).get("config") for module in model.modules())
    found: set[int] = set()
    for config in {id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values():
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return found


# With these schemes `max_position_embeddings` is the length before the window was extended by `factor`, as
# transformers asks. A config that names the original length as well needs no scheme.
KEEPS_LENGTH: Final = ("linear", "dynamic")


def trained_length(config: PreTrainedConfig, layer_type: str | None = None) -> int | None:
    """Tokens of the longest text that the model can read as it is, with an extended window, or None if unknown.

    Of several readings of a config the longest counts, so that reading changes no sooner than needed.
    """
    longest = _whole(getattr(config, "max_position_embeddings", None))
    if longest is None:
        return None
    shared = getattr(config, "rope_parameters", None) or {}
    own = shared.get(layer_type)
    parameters = own if isinstance(own, dict) else shared
    factor, original = parameters.get("factor"), _whole(parameters.get("original_max_position_embeddings"))
    if parameters.get("rope_type") == "longrope":  # always extended, and its original length may be made up
        return longest
    if parameters is not own and parameters.get("rope_type") in KEEPS_LENGTH:
        original = original or longest
    if original is None or not isinstance(factor, int | float) or not factor >= 1:
        return longest
    return max(longest, int(min(original * factor, MAX_NUMBER)))


def _whole(number: object) -> int | None:
    return number if type(number) is int and 0 < number <= MAX_NUMBER else None


# Layer types of configs. A class with some recurrent models calls all of them recurrent: then these decide.
ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
STATES_SINCE: Final = (5, 22)  # a version of transformers: before it, models reach into the layers of their caches
COMPRESSED: Final = "keeps one entry for several tokens ({types}), none of which can be evicted by itself"
BLOCKS: Final = "picks blocks of columns of its cache ({types}), which are other tokens once any is evicted"
PREFILL: Final = (
    "keeps the tokens of the first pass of a text, and slides over later tokens ({types}): a token then sees others by "
    "the passes of the text, and a KVCache decides by positions"
)
# Layer types that no eviction can serve, and why.
REFUSED: Final[Mapping[str, str]] = {
    "compressed_sparse_attention": COMPRESSED,
    "heavily_compressed_attention": COMPRESSED,
    "minimax_m3_sparse": BLOCKS,
    "reference_sliding_attention": PREFILL,
}


def check_kind_of_model(model: PreTrainedModel) -> None:
    """Return for a model that may work. Raises: UnsupportedModel, with the reason."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    reason, refused = None, sorted(kinds & REFUSED.keys())
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder: its cross-attention has no text positions"
    elif refused:
        reason = REFUSED[refused[0]].format(types=", ".join(refused))
    elif getattr(model, "_is_stateful", False) and not keeps_states(config) and not (kinds and kinds <= ATTENTION):
        reason = "is recurrent, or keeps other states, in layers that its config's layer_types don't tell of"
    elif keeps_states(config) and tuple(map(int, __version__.split(".")[:2])) < STATES_SINCE:
        since = ".".join(map(str, STATES_SINCE))
        reason = f"has recurrent layers, which are served with transformers {since} or newer. This is {__version__}"
    elif unknown := unknown_types(config):
        reason = f"has recurrent layers, and others of types that transformers' own cache does not know: {unknown}"
    elif keeps_states(config) and not layer_kinds(model).attention:
        reason = "is recurrent in all layers: no layer attends, so there are no keys to keep"
    elif has_no_weights(model):
        reason = "has weights on the meta device, not loaded. Attach runs the model, so load all of them"
    if reason is not None:
        raise UnsupportedModel(reason)


def refusal(model: PreTrainedModel, error: Exception) -> UnsupportedModel:
    """The error for a model that cannot be attached because of `error`: its name, and the reason."""
    name = type(model).__name__
    if isinstance(error, UnsupportedModel):
        return UnsupportedModel(f"{name} {error}")
    if isinstance(error, UsageError):
        return UnsupportedModel(f"{name}: {error}")
    if isinstance(error, AttributeError) and isinstance(error.obj, Mask):
        return UnsupportedModel(f"{name} makes its own attention mask")
    return UnsupportedModel(f"{name} can't be run with attention replaced: {type(error).__name__}: {error}")


def shown_name(name: str | os.PathLike[str]) -> str:
    """The name of a model's folder or GGUF file, without its path. A name on the hub is unchanged.

    `folder:Q4_K_M` keeps the types that choose one of several files.
    """
    folder, quant = Path(name).expanduser(), None
    if not folder.exists():
        base, quant = split_quant(str(name))
        folder = Path(base).expanduser()
    if not folder.exists():
        return str(name)
    # Links are not resolved: the user's name says more than the target's.
    path = Path(os.path.normpath(folder.absolute()))
    shown = path.stem if path.suffix.lower() == GGUF and path.is_file() else path.name
    return (shown or str(name)) + ("" if quant is None else f":{quant}")


Method = tuple[str, str, str]  # a family of transformers, a class of it, a method


def has_code_of(module: nn.Module, *methods: Method) -> bool:
    """Return True if each of these methods is, in the module's class, the same code."""
    return all(_is_same(getattr(type(module), name, None), _known(family, of, name)) for family, of, name in methods)


def global_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """The object that a global name means in the `forward` of a module's class."""
    found: Callable[..., Any] = inspect.unwrap(type(module).forward).__globals__[name]
    return found


def _known(family: str, of: str, name: str) -> Any:
    return getattr(getattr(import_module(f"transformers.models.{family}.modeling_{family}"), of, None), name, None)


def _is_same(ours: Callable[..., Any] | None, known: Callable[..., Any] | None) -> bool:
    if ours is None or known is None:
        return False
    one, other = _code(ours), _code(known)
    return one is not None and other is not None and _facts(one) == _facts(other)


def _code(function: Callable[..., Any]) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _facts(code: CodeType) -> tuple[object, ...]:
    """Facts of a function: its instructions, and the objects that it names."""
    return code.co_code, code.co_names, code.co_varnames, code.co_consts, code.co_freevars, code.co_flags
