"""Processes that hold tiny models together, started once for many cases, and the same cases in one process.

`run` writes cases to a folder and starts `python -m tests.helpers.ranks` for each rank. Each process writes its results
next to them. The result of a failure is its error.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.served_ranks import lost, served
from windlass import KVCache, Sampling
from windlass.core.errors import WindlassError
from windlass.engine.decode import Decoder, Sampler
from windlass.hf.weights import fingerprint
from windlass.testing import tiny_model
from windlass.testing.models import HYBRIDS, tiny_hybrid

KV_HEADS: Final = 4
SECONDS: Final = 240  # after which processes that wait for one another are ended
PROMPT: Final = [(7 * at * at + 3 * at) % 97 for at in range(24)]
LIMITS: Final[dict[str, Any]] = {"budget": 12, "sinks": 2, "window": 3, "chunk": 7}


@dataclass(frozen=True)
class Case:
    """A case of a process: read `PROMPT` with a cache of these options, and write `tokens`.

    `load` continues from a file in place of a new cache, `save` writes one before the tokens are written. `then` names
    an operation between the two, see `_between`.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int = 4
    seed: int | None = None
    save: str = ""
    load: str = ""
    then: str = ""


@dataclass(frozen=True)
class Found:
    """Result of a case: tokens, the sorted positions that each layer holds, bytes, or the error."""

    tokens: list[int] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0
    described: str = ""
    fingerprint: str = ""
    error: str = ""


def folder_of(models: Path, name: str) -> Path:
    """The folder of a tiny model, written when it is first asked for: `llama`, or `llama@3` with 3 kv heads."""
    folder = models / name
    if folder.exists():
        return folder
    family, _, heads = name.partition("@")
    config = tiny_hybrid(family).config if family in HYBRIDS else tiny_model(family).config
    count = int(heads or KV_HEADS)
    sizes = {"num_attention_heads": 5 * count, "num_key_value_heads": count, "hidden_size": 40 * count}
    if family in HYBRIDS:
        sizes = {"num_attention_heads": 3 * count, "num_key_value_heads": count}
    elif getattr(config, "q_lora_rank", None):  # latent attention, with as many kv heads as heads
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4}
    # Half an expert must have rows of 16 bytes.
    sizes |= {name: 64 for name in ("moe_intermediate_size", "intermediate_size") if name in config.to_dict()}
    given = {**config.to_dict(), **sizes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(given.pop("model_type"), **given), dtype=torch.float32, attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return folder


def found(case: Case, model: PreTrainedModel, files: Path, seed: int = 0) -> Found:
    """Result of an attached model in a case. For a model on several ranks, all of them call it."""
    try:
        return _found(case, model, files, seed)
    except WindlassError as error:
        return Found(error=f"{type(error).__name__}: {error}")


def _found(case: Case, model: PreTrainedModel, files: Path, seed: int) -> Found:
    windlass.attach(model)
    if case.then == "serve":
        return Found(served(model, PROMPT))
    if case.then == "die":
        return Found(error=f"lost: {lost(model, PROMPT)}")
    if case.load:
        cache = windlass.KVCache.load(files / case.load, model)
        logits = windlass.prefill(model, cache, [PROMPT[:1]] * cache.batch_size)
    else:
        cache = KVCache(model, **(LIMITS | _made(case.options, files)))
        logits = windlass.prefill(model, cache, [PROMPT] * cache.batch_size)
        _between(case.then, model, cache)
    if case.save:
        cache.save(files / case.save)
    sampling = Sampling() if case.seed is None else Sampling(temperature=1.5, seed=case.seed + seed)
    ranks = None if cache.heads is None else cache.heads.ranks
    sampler = Sampler(sampling, [PROMPT] * cache.batch_size, logits.device, ranks)
    decoder, written = Decoder(model, cache, sampler, logits, None), list[int]()
    for number in range(case.tokens):
        written += decoder.next_tokens()
        decoder.advance([True] * cache.batch_size, is_last=number + 1 == case.tokens)
    held = [layer.positions.sort(-1).values for layer in cache.layers]
    return Found(written, held, _bytes(cache), cache.describe(), fingerprint(model))


def _made(options: dict[str, Any], files: Path) -> dict[str, Any]:
    """With files where options name them."""
    named = {name: value.replace("FILES", str(files)) for name, value in options.items() if isinstance(value, str)}
    return options | named


def _bytes(cache: KVCache) -> int:
    """Bytes of keys and values, as they are held."""
    parts = [part for layer in cache.layers for part in layer.tensors().items()]
    return sum(tensor.nbytes for name, tensor in parts if name in ("keys", "values"))


def _between(then: str, model: PreTrainedModel, cache: KVCache) -> None:
    if then == "compress":
        cache.compress(9)
    elif then == "fit":
        cache.compress(9, fit=True)
    elif then == "rollback":
        windlass.prefill(model, cache, [PROMPT[:3]])
        cache.rollback(2)
    elif then == "divergent":
        options = windlass.CacheOptions(policy="recent", sinks=2, window=3, chunk=7)
        parts = [windlass.chunks.encode(model, own, options) for own in (PROMPT[:9], PROMPT[9:17], PROMPT[17:])]
        cache.reset()
        windlass.chunks.join(model, cache, parts, recompute="divergent(0.3)")
        windlass.prefill(model, cache, [PROMPT[:2]])


@contextmanager
def started(folder: Path, cases: dict[str, Case], models: Path, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks, running. They are ended with the block."""
    (folder / "cases.json").write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.helpers.ranks", str(folder), str(models)]
    with ExitStack() as stack:
        running = []
        for rank in range(size):
            errors = stack.enter_context((folder / f"errors{rank}").open("w"))
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(subprocess.Popen(command, env=own, stderr=errors, text=True, cwd=Path(__file__).parents[2]))
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        yield running


def run(folder: Path, cases: dict[str, Case], models: Path, size: int) -> dict[str, list[Found]]:
    """Results of each of `size` ranks in each case."""
    with started(folder, cases, models, size) as running:
        codes = [each.wait(SECONDS) for each in running]
    is_deadly = any(case.then == "die" for case in cases.values())
    expected = [0, *[-signal.SIGKILL if is_deadly else 0] * (size - 1)]
    assert codes == expected, [(folder / f"errors{rank}").read_text()[-2000:] for rank in range(size)]
    of_ranks = [torch.load(folder / f"found{rank}") for rank in range(size)]
    return {name: [Found(**found.get(name, {})) for found in of_ranks] for name in cases}


def main(arguments: Sequence[str]) -> None:
    """A rank: all cases, in order, and each result to a file."""
    from windlass.hf.tensor_parallel import plan_of_processes

    folder, models = map(Path, arguments)
    torch.set_num_threads(1)
    plan, rank = plan_of_processes(), int(os.environ["RANK"])
    cases = {name: Case(**case) for name, case in json.loads((folder / "cases.json").read_text()).items()}
    results: dict[str, dict[str, Any]] = {}
    loaded: dict[str, PreTrainedModel] = {}
    for name, case in cases.items():
        if case.model not in loaded:
            loaded = {case.model: AutoModelForCausalLM.from_pretrained(models / case.model, **plan).eval()}
        if case.then == "die":
            torch.save(results, folder / f"found{rank}")
        results[name] = vars(found(case, loaded[case.model], folder, seed=rank))
    torch.save(results, folder / f"found{rank}")


if __name__ == "__main__":
    main(sys.argv[1:])
