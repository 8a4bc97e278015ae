"""Models to measure: random weights in the shape of well-known ones, made in memory."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from windlass.evals.speed.workloads import check_subject

CPU = torch.device("cpu")
BLOCK = 1_000_003  # random numbers that are drawn; a prime, so that no two rows of a matrix are alike


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama; its head over the vocabulary has weights of its own."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int

    @property
    def config(self) -> LlamaConfig:
        """For transformers."""
        return LlamaConfig(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.mlp,
            vocab_size=self.vocabulary,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


SHAPES = {
    "tiny": Shape(2, 60, 15, 3, 8, 52, 97),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 32000),
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "7b-mha": Shape(32, 4096, 32, 32, 128, 11008, 32000),
}


def shape_of(name: str, layers: int | None) -> tuple[Shape, str]:
    """The shape that `name` names, with so many layers instead of its own, and how a table calls it.

    Raises: UsageError for an unknown name.
    """
    check_subject(None, name, layers, SHAPES)
    shape = SHAPES[name]
    if layers is None or layers == shape.layers:
        return shape, name
    return replace(shape, layers=layers), f"{name} ({layers} layer{'s' if layers > 1 else ''})"


@torch.no_grad()
def random_model(shape: Shape, dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """A Llama of this shape in eval mode, made where it is to be; the same numbers at every call and place.

    Each matrix repeats one block of random numbers, scaled so that states neither grow nor vanish:
    the speed of a matrix product does not depend on what is in it.
    """
    config = shape.config
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device=device)
    # Its table is not among the weights, and was lost with the meta device.
    model.get_decoder().rotary_emb = LlamaRotaryEmbedding(config).to(device)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    scaled: dict[float, Tensor] = {}
    start = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # of norms
            continue
        deviation = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
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
