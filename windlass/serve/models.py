"""What clients are told of the model: how long its texts may be, and what a row does with longer ones."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from windlass.engine.service import Service
from windlass.hf.trained_length import trained_length

WEIGHTS: Final = ("model*.safetensors", "pytorch_model*.bin")
CONFIG: Final = "config.json"


@dataclass(frozen=True)
class ModelFacts:
    """`created`: the time of the model's files, in seconds since 1970; `trained_length`: tokens of the longest text
    that it was trained on, None where its config does not tell."""

    created: int = field(default_factory=lambda: int(time.time()))
    trained_length: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFacts":
        """Those of a model that was loaded; one that has no files is as old as the server."""
        trained, folder = trained_length(model.config.get_text_config()), _folder_of(model.name_or_path or "")
        found = [] if folder is None else [path for each in WEIGHTS for path in folder.glob(each)]
        if folder is not None and not found and (folder / CONFIG).exists():
            found = [folder / CONFIG]
        if not found:
            return cls(trained_length=trained)
        return cls(int(max(path.stat().st_mtime for path in found)), trained)


def model_document(name: str, facts: ModelFacts, service: Service, vocabulary: int) -> dict[str, Any]:
    """The model as `/v1/models` has it. Servers have several names for the length of a context: all are here."""
    limits, options = service.limits, service.options
    longest = limits.prompt_tokens + limits.max_tokens
    length = longest if facts.trained_length is None else min(facts.trained_length, longest)
    names = ("max_model_len", "context_length", "context_window", "max_context_length")
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "windlass",
        **dict.fromkeys(names, length),
        "meta": {"n_ctx_train": facts.trained_length, "n_vocab": vocabulary},
        "windlass": {
            "budget": options.budget,
            "beyond_budget": "grows" if options.budget is None else "recalls" if options.recall else "evicts",
            "max_prompt_tokens": limits.prompt_tokens,
            "max_tokens": limits.max_tokens,
            "options": options.labels(),
            "kinds": [each.labels() for each in service.kinds],
        },
    }


def _folder_of(name: str) -> Path | None:
    """The folder of a model: that of its name, or where the hub's files of this name are kept."""
    if name and Path(name).is_dir():
        return Path(name)
    try:
        held = try_to_load_from_cache(name, CONFIG)
    except ValueError:  # no name of the hub
        return None
    return Path(held).parent if isinstance(held, str) else None
