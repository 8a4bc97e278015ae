"""The worker of transformers (`--kind dynamic` or `static`) and of Windlass (`--kind windlass`), on the same model."""

from argparse import Namespace
from typing import Any

import torch
import transformers
from peers.shape import Shape
from peers.worker import CHUNK, About, Peer, options, serve
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StaticCache

import windlass
from windlass.engine.generate import prefill
from windlass.evals.speed.measure import fill
from windlass.hf.forward import layer_shapes
from windlass.hf.weights import quantize


class TorchPeer(Peer):
    """The common part of the three: the model, and how it is called.

    A prompt is read as `generate` of the library reads it: at once by transformers, which then asks its
    model for the logits of the last column (`logits_to_keep=1`), and in chunks by Windlass.
    """

    def __init__(self, model: PreTrainedModel, about: About) -> None:
        self.model = model
        self.about = about
        self.cache: transformers.Cache
        self.depth = 0
        self.last = torch.empty(0)

    def feed(self, ids: list[int]) -> None:
        self.last = self.model(torch.tensor([ids]), past_key_values=self.cache, logits_to_keep=1).logits

    def read(self, ids: list[int], size: int | None = None) -> None:
        """Read in steps of `size` (None: as a user of the library would)."""
        super().read(ids, len(ids) if size is None else size)

    def logits(self) -> list[float]:
        return self.last.float().flatten().tolist()


class Dynamic(TorchPeer):
    """Keys and values that are concatenated at every step."""

    def hold(self, ids: list[int]) -> None:
        self.depth = len(ids)
        self.cache = DynamicCache(config=self.model.config)
        self.read(ids)

    def fill(self, ids: list[int]) -> None:
        self.depth = len(ids)
        self.cache = filled(self.model, self.depth)

    def restore(self, room: int) -> None:
        if self.depth == 0:
            self.cache = DynamicCache(config=self.model.config)
        else:
            self.cache.crop(self.depth - self.cache.get_seq_length())


class Static(TorchPeer):
    """Keys and values in tensors that are just long enough for the test."""

    def hold(self, ids: list[int]) -> None:
        self.depth = len(ids)
        self.cache = self.source = DynamicCache(config=self.model.config)
        self.read(ids)
        self.room = -1

    def fill(self, ids: list[int]) -> None:
        self.depth, self.room = len(ids), -1
        self.cache = self.source = filled(self.model, self.depth)

    def restore(self, room: int) -> None:
        if room != self.room:
            self.cache, self.room = self._copied(room), room
        layer: Any
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.depth)

    def _copied(self, room: int) -> StaticCache:
        """The held text, and room behind it."""
        config = self.model.config
        cache = StaticCache(config=config, max_cache_len=self.depth + room)
        cache.early_initialization(1, config.num_key_value_heads, config.head_dim, self.model.dtype, self.model.device)
        layer: Any  # of StaticCache, which is typed as a list of any cache's layers
        source: Any
        if self.depth:
            for layer, source in zip(cache.layers, self.source.layers, strict=True):
                layer.keys[:, :, : self.depth] = source.keys
                layer.values[:, :, : self.depth] = source.values
        return cache


class Windlass(TorchPeer):
    """A `windlass.KVCache` of `batch` equal texts, which keeps every token or `budget` of each."""

    cache: windlass.KVCache

    def __init__(self, model: PreTrainedModel, about: About, asked: Namespace) -> None:
        super().__init__(model, about)
        self.batch, self.budget = asked.batch, asked.budget
        self.policy = asked.policy if asked.budget else None

    def hold(self, ids: list[int]) -> None:
        self.depth = len(ids)
        self.cache = windlass.KVCache(self.model, self.budget, self.policy, chunk=CHUNK, batch=self.batch)
        if ids:
            self.read(ids)

    def fill(self, ids: list[int]) -> None:
        self.hold([])
        self.depth = len(ids)
        fill(self.cache, layer_shapes(self.model), self.depth)

    def restore(self, room: int) -> None:
        """Over budget the text goes on: as many tokens are held as before."""
        if self.budget is None:
            self.cache.rollback(self.cache.tokens_seen[0] - self.depth)
        elif not self.depth:
            self.hold([])

    def feed(self, ids: list[int]) -> None:
        self.last = self.model(torch.tensor([ids] * self.batch), past_key_values=self.cache, logits_to_keep=1).logits

    def read(self, ids: list[int], size: int | None = None) -> None:
        if size is None:
            self.last = prefill(self.model, self.cache, [ids] * self.batch)
        else:
            super().read(ids, size)


def filled(model: PreTrainedModel, depth: int) -> DynamicCache:
    """Random keys and values of so many tokens."""
    config = model.config
    cache, size = DynamicCache(config=config), (1, config.num_key_value_heads, depth, config.head_dim)
    for layer in range(config.num_hidden_layers if depth else 0):
        cache.update(torch.randn(size).to(model.dtype), torch.randn(size).to(model.dtype), layer)
    return cache


def loaded(shape: Shape, weights: str) -> PreTrainedModel:
    """The model, its weights in memory of its own, or codes of `weights` unless that is "auto"."""
    model: PreTrainedModel
    model = LlamaForCausalLM.from_pretrained(shape.folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    quantize(model, weights)
    return model


def main() -> None:
    """Serve the kind that is asked for."""
    shape, asked = options()
    torch.set_num_threads(asked.threads)
    model = loaded(shape, asked.weights)
    base = f"{transformers.__version__}, torch {torch.__version__}"
    match asked.kind:
        case "dynamic":
            about = About("transformers DynamicCache", base, "sdpa, bf16 cache", asked.threads)
            peer: Peer = Dynamic(model, about)
        case "static":
            about = About("transformers StaticCache", base, "sdpa, bf16 cache, not compiled", asked.threads)
            peer = Static(model, about)
        case "windlass":
            version = f"{windlass.__version__}, transformers {base}"
            held = "no budget" if asked.budget is None else f"{asked.policy}, budget {asked.budget}"
            peer = Windlass(
                windlass.attach(model), About("windlass", version, f"{held}, bf16 cache", asked.threads), asked
            )
        case kind:
            raise ValueError(f"--kind is {kind!r}, expected dynamic, static or windlass")
    with torch.inference_mode():
        serve(peer, shape.vocabulary, asked.fill)


if __name__ == "__main__":
    main()
