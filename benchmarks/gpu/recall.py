"""A part of `python -m gpu`: a step that recalls, against one of the same cache that does not, and of a full one."""

import functools
from typing import Any

import torch
from transformers import PreTrainedModel

from gpu.part import Part, Work
from windlass import KVCache, Sampling, attach
from windlass.cache.options import CacheOptions
from windlass.engine.decode import Decoder, Sampler, graph_for
from windlass.evals.speed.measure import fill
from windlass.evals.speed.rows import SHAPES, random_model
from windlass.hf.forward import layer_shapes

RECALL = 128
STORES = ("plain", "int8", "int4")
NONE, FULL = "no recall", "full cache"


def measure(part: Part, shape: str) -> None:
    """Behind a text of `recall_depth` tokens, with graphs where there are and without."""
    model = attach(random_model(SHAPES[shape], torch.bfloat16, part.device))
    for graph in part.graphs:
        part.attempt(f"recall of {shape}, graph {graph}", functools.partial(_measure, part, shape, model, graph))


def _measure(part: Part, shape: str, model: PreTrainedModel, graph: str) -> None:
    sizes, works, caches = part.sizes, dict[str, Work](), dict[str, KVCache]()
    usual: dict[str, Any] = {"budget": sizes.budget, "policy": "recent"}
    asked = {NONE: CacheOptions(**usual), FULL: CacheOptions(policy="recent")}
    asked |= {store: CacheOptions(**usual, recall=RECALL, recall_store=store) for store in STORES}
    for name, options in asked.items():
        caches[name] = KVCache.from_options(model, options)
        fill(caches[name], layer_shapes(model), sizes.recall_depth)
        works[name] = _writing(model, caches[name], graph)
    timed = part.alternate(works)
    for name, cache in caches.items():
        sizes_of = {"bytes_held": cache.bytes_held, "recall_bytes": cache.recall_bytes}
        setup = {"shape": shape, "graph": graph, "depth": sizes.recall_depth, "budget": sizes.budget, "recall": RECALL}
        part.write("recall", **setup, what=name, **timed[name], **sizes_of)


def _writing(model: PreTrainedModel, cache: KVCache, graph: str) -> Work:
    """A step that writes one token."""
    logits = torch.zeros(1, model.config.vocab_size, device=cache.device)
    sampler = Sampler(Sampling(), [[0]], cache.device)
    decoder = Decoder(model, cache, sampler, logits, graph_for(cache.device) if graph == "on" else None)

    def write() -> None:
        decoder.next_tokens()
        decoder.advance([True], is_last=False)

    return write
