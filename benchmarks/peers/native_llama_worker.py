"""The worker of a llama.cpp that was built from source: `--build` is the folder of its build, with `bin/libllama.so`.

`--kind` as in `llama_worker`. With `--weights int4` its own Q4_0, made once from the file of bfloat16.
"""

import ctypes
import subprocess
from pathlib import Path

from peers.shape import PEERS, Shape
from peers.worker import CHUNK, About, Peer, options, serve

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30}  # of ggml.h
ROOM = 4096
FILES = {"auto": "model.gguf", "int4": "model-q4_0.gguf"}


def compiled(build: Path) -> ctypes.CDLL:
    """The functions of `llama_native.cpp`, linked with the library of this build."""
    cache = (build / "CMakeCache.txt").read_text().splitlines()
    home = next(line.partition("=")[2] for line in cache if line.startswith("CMAKE_HOME_DIRECTORY:"))
    library = PEERS / "llama_native.so"
    library.parent.mkdir(exist_ok=True)
    headers = [f"-I{home}/include", f"-I{home}/ggml/include"]
    linked = [f"-L{build}/bin", "-lllama", f"-Wl,-rpath,{build}/bin"]
    source = str(Path(__file__).with_name("llama_native.cpp"))
    subprocess.run(["c++", "-O1", "-shared", "-fPIC", *headers, source, "-o", str(library), *linked], check=True)
    functions = ctypes.CDLL(str(library))
    functions.peer_model.restype = functions.peer_context.restype = ctypes.c_void_p
    functions.peer_logits.restype = ctypes.POINTER(ctypes.c_float)
    return functions


def version_of(build: Path) -> str:
    """The commit that CMake noted."""
    noted = (build / "common" / "build-info.cpp").read_text().splitlines()
    return next(line.split('"')[1] for line in noted if "LLAMA_COMMIT" in line)


class NativeLlama(Peer):
    """A model of llama.cpp, and one context per depth."""

    def __init__(self, shape: Shape, build: Path, kind: str, weights: str, threads: int) -> None:
        cache_type, _, attention = kind.partition("-")
        if cache_type not in CACHE_TYPES or attention not in ("flash", "plain"):
            raise ValueError(
                f"--kind is {kind!r}, expected one of {', '.join(CACHE_TYPES)}, a dash, and flash or plain"
            )
        if weights not in FILES:
            raise ValueError(f"--weights is {weights!r}, expected one of {', '.join(FILES)}")
        said = f"{cache_type} cache, {attention} attention, {'Q4_0' if weights == 'int4' else 'bf16'} weights"
        self.about = About("llama.cpp native", version_of(build), said, threads)
        self.vocabulary, self.threads = shape.vocabulary, threads
        self.cache_type, self.is_flash = CACHE_TYPES[cache_type], attention == "flash"
        self.calls = compiled(build)
        path, source = shape.folder / FILES[weights], shape.folder / FILES["auto"]
        if not path.exists() and self.calls.peer_quantize(str(source).encode(), str(path).encode(), threads):
            raise RuntimeError(f"llama.cpp cannot quantise {source}")
        self.model = ctypes.c_void_p(self.calls.peer_model(str(path).encode()))
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.context = ctypes.c_void_p()

    def hold(self, ids: list[int]) -> None:
        self._begin(len(ids))
        self.read(ids)

    def fill(self, ids: list[int]) -> None:
        """The first tokens are read, and their keys and values are copied behind them until there are enough."""
        self.hold(ids[:CHUNK])
        if len(ids) <= CHUNK:
            return
        first, self.context, held = self.context, ctypes.c_void_p(), CHUNK
        draft = self._context(2 * len(ids), sequences=2)
        is_done = self.calls.peer_copy(first, draft, 0)
        while is_done and held < len(ids):
            is_done, held = self.calls.peer_double(draft, held), 2 * held
        is_done = is_done and self.calls.peer_go_back(draft, len(ids))
        self._begin(len(ids))
        if not is_done or not self.calls.peer_copy(draft, self.context, 0):
            raise RuntimeError(f"llama.cpp cannot fill a context of {len(ids)} tokens")
        for used in (first, draft):
            self.calls.peer_free(used)

    def _begin(self, depth: int) -> None:
        if self.context:
            self.calls.peer_free(self.context)
        self.depth = depth
        self.context = self._context(depth, sequences=1)

    def _context(self, depth: int, sequences: int) -> ctypes.c_void_p:
        """Room for so many tokens and a test."""
        sizes = depth + ROOM, CHUNK, self.threads, self.cache_type, int(self.is_flash), sequences
        context = ctypes.c_void_p(self.calls.peer_context(self.model, *sizes))
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {sizes[0]} tokens")
        return context

    def restore(self, room: int) -> None:
        if room > ROOM:
            raise ValueError(f"a test of {room} tokens does not fit in the {ROOM} that are kept free")
        if not self.calls.peer_go_back(self.context, self.depth):
            raise RuntimeError(f"llama.cpp cannot go back to {self.depth} tokens")

    def feed(self, ids: list[int]) -> None:
        status = self.calls.peer_feed(self.context, (ctypes.c_int32 * len(ids))(*ids), len(ids))
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens behind {self.depth}: status {status}")

    def logits(self) -> list[float]:
        logits: list[float] = self.calls.peer_logits(self.context)[: self.vocabulary]
        return logits


def main() -> None:
    """Serve."""
    shape, asked = options()
    peer = NativeLlama(shape, Path(asked.build), asked.kind or "f16-flash", asked.weights, asked.threads)
    serve(peer, shape.vocabulary, asked.fill)


if __name__ == "__main__":
    main()
