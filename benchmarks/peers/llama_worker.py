"""The worker of llama.cpp, through the plain C interface of llama-cpp-python.

`--kind` is the type of its cache and whether flash attention is on, such as `f16-flash` or `bf16-plain`.
"""

import ctypes
from importlib.metadata import version

import llama_cpp
from gguf import GGMLQuantizationType
from peers.shape import Shape
from peers.worker import CHUNK, About, Peer, options, serve

CACHE_TYPES = {"f16": GGMLQuantizationType.F16, "bf16": GGMLQuantizationType.BF16, "f32": GGMLQuantizationType.F32}
ATTENTION = {"flash": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, "plain": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED}
ROOM = 4096


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _is_silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Takes what llama.cpp would print."""


class LlamaCpp(Peer):
    """A model of llama.cpp, and one context per depth."""

    def __init__(self, shape: Shape, kind: str, threads: int) -> None:
        cache_type, _, attention = kind.partition("-")
        if cache_type not in CACHE_TYPES or attention not in ATTENTION:
            types, attentions = ", ".join(CACHE_TYPES), ", ".join(ATTENTION)
            raise ValueError(f"--kind is {kind!r}, expected one of {types}, a dash, and one of {attentions}")
        release = f"llama-cpp-python {version('llama-cpp-python')}"
        self.about = About(f"llama.cpp {attention}", release, f"{cache_type} cache", threads)
        self.vocabulary = shape.vocabulary
        llama_cpp.llama_log_set(_is_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        loading = llama_cpp.llama_model_default_params()
        # Pages of a mapped file may be dropped while the other peers work.
        loading.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(str(shape.folder / "model.gguf").encode(), loading)
        if self.model is None:
            raise RuntimeError(f"llama.cpp cannot load {shape.folder / 'model.gguf'}")
        self.settings = llama_cpp.llama_context_default_params()
        self.settings.n_ubatch = CHUNK
        self.settings.n_threads = self.settings.n_threads_batch = threads
        self.settings.type_k = self.settings.type_v = CACHE_TYPES[cache_type]
        self.settings.flash_attn_type = ATTENTION[attention]
        self.context: llama_cpp.llama_context_p | None = None

    def hold(self, ids: list[int]) -> None:
        if self.context is not None:
            llama_cpp.llama_free(self.context)
        self.depth = len(ids)
        self.settings.n_ctx = self.depth + ROOM
        self.context = llama_cpp.llama_init_from_model(self.model, self.settings)
        if self.context is None:
            raise RuntimeError(f"llama.cpp cannot make a context of {self.settings.n_ctx} tokens")
        self.read(ids)

    def restore(self, room: int) -> None:
        if room > ROOM:
            raise ValueError(f"a test of {room} tokens does not fit in the {ROOM} that are kept free")
        memory = llama_cpp.llama_get_memory(self.context)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, self.depth, -1):
            raise RuntimeError(f"llama.cpp cannot go back to {self.depth} tokens")

    def feed(self, ids: list[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)  # the batch only points to them
        status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens behind {self.depth}: status {status}")
        llama_cpp.llama_synchronize(self.context)

    def logits(self) -> list[float]:
        logits: list[float] = llama_cpp.llama_get_logits_ith(self.context, -1)[: self.vocabulary]
        return logits


def main() -> None:
    """Serve."""
    shape, asked = options()
    serve(LlamaCpp(shape, asked.kind or "f16-flash", asked.threads), shape.vocabulary)


if __name__ == "__main__":
    main()
