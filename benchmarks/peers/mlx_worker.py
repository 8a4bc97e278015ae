"""The worker of mlx-lm, on mlx's build for processors without Metal.

Its matrix products of many rows take so long there that only short prompts are measured, and that the
text at a depth is not read but random: keys and values of the right size and type in the cache.
"""

from importlib.metadata import version

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model
from peers.shape import Shape
from peers.worker import About, Peer, options, serve

MOST_PROMPT = 32


class Mlx(Peer):
    """A model of mlx-lm and its caches."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        versions = f"{version('mlx-lm')}, mlx {version('mlx')}"
        self.about = About("mlx-lm", versions, "bf16 cache", threads=1, most_prompt=MOST_PROMPT)
        self.model, _ = load_model(shape.folder)
        mx.eval(self.model.parameters())
        self.caches: list[KVCache] = []
        self.last = mx.zeros(0)

    def hold(self, ids: list[int]) -> None:
        self.depth = len(ids)
        self.caches = self.model.make_cache()
        if self.depth == 0:
            return
        for cache in self.caches:
            size = (1, self.shape.kv_heads, self.depth, self.shape.head_dim)
            cache.update_and_fetch(*(mx.random.normal(size).astype(mx.bfloat16) for _ in range(2)))
            mx.eval(cache.keys, cache.values)

    def restore(self, room: int) -> None:
        for cache in self.caches:
            cache.trim(cache.offset - self.depth)

    def feed(self, ids: list[int]) -> None:
        hidden = self.model.model(mx.array([ids]), self.caches)
        self.last = self.model.lm_head(hidden[:, -1:])
        mx.eval(self.last, [(cache.keys, cache.values) for cache in self.caches])

    def logits(self) -> list[float]:
        logits: list[float] = self.last.astype(mx.float32).flatten().tolist()
        return logits


def main() -> None:
    """Serve."""
    shape, _ = options()
    mx.set_default_device(mx.cpu)
    serve(Mlx(shape), shape.vocabulary)


if __name__ == "__main__":
    main()
