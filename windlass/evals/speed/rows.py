"""The rows of a benchmark, out of the lists that a user typed."""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.evals.grid import axes_of
from windlass.evals.speed.workloads import BenchLists, Workload, check_subject, setups_of, workloads_of
from windlass.evals.task import ALL, Budget
from windlass.hf.forward import LayerShape
from windlass.policies import Recent
from windlass.positions.modes import Original

USUAL: Final[dict[str, Any]] = {"policy": Recent(), "positions": Original()}  # named in rows, so never "auto"
AXES: Final = ("budget", "policy", "positions", "store", "storage", "threads", "graph")


@dataclass(frozen=True)
class BenchSetup:
    """The settings of a row's runs. `options` are those of its cache, but for the batch."""

    options: CacheOptions = field(default_factory=lambda: CacheOptions(**USUAL))
    storage: str = "unrotated"
    threads: int = 1
    graph: str = "off"

    def labels(self) -> dict[str, int | str | None]:
        """All settings, as a row of results has them."""
        return self.options.labels() | {"storage": self.storage, "threads": self.threads, "graph": self.graph}

    @property
    def texts(self) -> dict[str, str]:
        """The settings that a list may vary, as a table has them: by `AXES`."""
        labels = self.labels()
        return {axis: ALL if labels[axis] is None else str(labels[axis]).removesuffix("()") for axis in AXES}


@dataclass
class BenchRow:
    """One row and its measurements.

    `places` tells which workload it has (`task`), and which value of each list it has. `bytes_per_token` are read
    from memory in decode: its held keys, values and scales, and its share of the weights, which are
    read once for a batch. None for prompts, whose tokens share a reading.
    """

    workload: Workload
    setup: BenchSetup
    places: dict[str, int]
    samples_s: list[float] = field(default_factory=list)
    bytes_per_token: float | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each run, those of all texts."""
        return [self.workload.batch * self.workload.tokens / seconds for seconds in self.samples_s]

    @property
    def tokens_per_s(self) -> float:
        """The median speed."""
        return statistics.median(self.speeds)

    @property
    def half_range(self) -> float:
        """Half the interquartile range of tokens per second. 0 for one run."""
        if len(self.samples_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.speeds, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes read per second, at the median."""
        return None if self.bytes_per_token is None else self.bytes_per_token * self.tokens_per_s / 1e9


def rows_of(lists: BenchLists, chunk: int) -> list[BenchRow]:
    """The product of all lists. Rows that differ only in their setup are neighbours.

    Raises: WindlassError for values that cannot be honoured.
    """
    cache_axes = axes_of(lists.options)
    setup_axes: dict[str, list[Any]] = {"threads": [torch.get_num_threads()]} | setups_of(lists)
    axes = {axis: values for axis in AXES if (values := (cache_axes | setup_axes).get(axis))}
    setups = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        chosen = {axis: axes[axis][place] for axis, place in zip(axes, places, strict=True)}
        rest = {axis: chosen.pop(axis) for axis in setup_axes}
        if "budget" in chosen:
            chosen["budget"] = _slots(chosen["budget"])
        setup = BenchSetup(CacheOptions(chunk=chunk, **USUAL | chosen), **rest)
        _check(setup)
        setups.append((setup, dict(zip(axes, places, strict=True))))
    return [
        BenchRow(workload, setup, {"task": index, **dict.fromkeys(AXES, 0), **places})
        for index, workload in enumerate(workloads_of(lists))
        for setup, places in setups
    ]


def _check(setup: BenchSetup) -> None:
    if setup.storage == "rotated" and not isinstance(setup.options.positions, Original):
        raise UsageError(
            f"--storage rotated and --positions {setup.options.positions} exclude each other: a key that is stored "
            "rotated is read where it was. Measure them in two runs"
        )


def _slots(budget: Budget) -> int | None:
    if budget.divisor is not None:
        raise UsageError(f"--budget {budget.asked!r} is a part of a text. A benchmark takes a number of tokens, or all")
    return budget.slots


CPU = torch.device("cpu")
BLOCK = 1_000_003  # random numbers: a prime, so that no two rows of a matrix are alike


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: a type of transformers' configs, its number of layers, and other options of the config.

    Its head over the vocabulary has weights of its own.
    """

    model_type: str
    layers: int
    options: Mapping[str, Any]

    @property
    def config(self) -> PreTrainedConfig:
        """The config of transformers."""
        fixed = {"max_position_embeddings": 131072, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
        return AutoConfig.for_model(self.model_type, num_hidden_layers=self.layers, **fixed, **self.options)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        with torch.device("meta"):
            return sum(each.numel() for each in AutoModelForCausalLM.from_config(self.config).parameters())

    def cached_layers(self, dtype: torch.dtype) -> list[LayerShape]:
        """The shapes of keys and values of the layers that attend."""
        config = self.config
        types = getattr(config, "layer_types", None) or ["full_attention"] * self.layers
        heads, latent = config.num_attention_heads, getattr(config, "kv_lora_rank", None) or 0
        if latent:
            own = LayerShape(heads, 1, config.qk_rope_head_dim + latent, latent, dtype, None, latent)
        else:
            own = LayerShape(heads, config.num_key_value_heads, config.head_dim, config.head_dim, dtype, None)
        return [own for each in types if each == "full_attention"]


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int, vocabulary: int) -> Shape:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return Shape("llama", layers, {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary, **sizes})


SHAPES = {
    "tiny": _llama(2, 60, 15, 3, 8, 52, 97),
    "1b": _llama(16, 2048, 32, 8, 64, 8192, 32000),
    "8b": _llama(32, 4096, 32, 8, 128, 14336, 128256),
    "7b-mha": _llama(32, 4096, 32, 32, 128, 11008, 32000),
    # Qwen3-Next 80B-A3B has 48 layers: of every four, three are recurrent. Each has 3.2 GB of weights.
    "qwen3-next": Shape("qwen3_next", 4, {}),
    # DeepSeek V3 has 61 layers, of which the first three have no experts. Here no layer has experts.
    "dsv3": Shape("deepseek_v3", 3, {"first_k_dense_replace": 61}),
}
WHOLE: Final[Mapping[str, int]] = {"qwen3-next": 48, "dsv3": 61}  # layers of the models that these are a part of


def shape_of(name: str, layers: int | None) -> tuple[Shape, str]:
    """The shape that `name` names, with so many layers instead of its own, and how a table calls it.

    Raises: UsageError for an unknown name.
    """
    check_subject(None, name, layers, SHAPES)
    shape = SHAPES[name]
    layers = shape.layers if layers is None else layers
    if layers == WHOLE.get(name, shape.layers):
        return replace(shape, layers=layers), name
    return replace(shape, layers=layers), f"{name} ({layers} layer{'s' if layers > 1 else ''})"


@torch.no_grad()
def random_model(shape: Shape, dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """A model of this shape in eval mode, made on `device`. Its numbers are the same at every call and on every device.

    Each matrix repeats one block of random numbers, scaled so that states neither grow nor vanish.
    The speed of a matrix product does not depend on its numbers.
    """
    config = shape.config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    # Buffers that are not among the weights were lost with the meta device.
    for buffer in model.buffers():
        buffer.zero_()
    rotary = model.get_decoder().rotary_emb
    model.get_decoder().rotary_emb = type(rotary)(config).to(device)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    scaled: dict[float, Tensor] = {}
    start = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # of norms
            continue
        deviation = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
        if deviation not in scaled:
            scaled[deviation] = (block * deviation).to(device, dtype)
        _repeat(scaled[deviation], start, parameter.view(-1))
        start = (start + parameter.numel()) % BLOCK
    model.eval()
    return model


def _repeat(block: Tensor, start: int, target: Tensor) -> None:
    """Fill `target` with `block` from `start` on, over and over."""
    rest = block[start:][: len(target)]
    target[: len(rest)] = rest
    for part in target[len(rest) :].split(len(block)):
        part.copy_(block[: len(part)])
