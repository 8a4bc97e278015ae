"""A server that speaks OpenAI's HTTP, measured by its clients: speed, times to a first token, gaps, memory.

    PYTHONPATH=benchmarks python -m speed.serving model FOLDER    # random weights of 4 layers of `1b`
    windlass serve FOLDER --rows 16 --budget 1024 --port 8001 &
    PYTHONPATH=benchmarks python -m speed.serving clients NAME 8001 PID >> benchmarks/results/serving.jsonl

Any server may be measured. PID is its process, whose memory is read. Prompts are pieces of a novel that differ in
their first words, so that none is a beginning of another, but for those that are sent twice on purpose. Standard
library only, but for `model`.
"""

import argparse
import http.client
import json
import lzma
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOVEL = ROOT / "windlass" / "assets" / "three_men_in_a_boat.txt.xz"
WARM_TOKENS = 8


@dataclass
class Answer:
    """The result of one request: seconds from its start to each piece of text, and what its usage says."""

    started: float
    pieces: list[float] = field(default_factory=list)
    prompt: int = 0
    written: int = 0
    cached: int = 0

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.pieces[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in pairwise(self.pieces)]


@dataclass(frozen=True)
class Server:
    """Where it listens."""

    port: int
    model: str

    def asked(self, prompt: str, tokens: int, answer: Answer | None = None) -> Answer:
        """Send a streamed request, and read all of its answer."""
        answer = Answer(time.perf_counter()) if answer is None else answer
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read()!r}")
        for line in response:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                usage = event["usage"]
                answer.prompt, answer.written = usage["prompt_tokens"], usage["completion_tokens"]
                answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            if event.get("choices") and event["choices"][0].get("finish_reason") is None:
                answer.pieces.append(time.perf_counter() - answer.started)
        connection.close()
        return answer


def side_by_side(server: Server, prompts: list[str], tokens: int) -> tuple[list[Answer], float]:
    """All prompts at once, each by a client of its own. Returns their answers, and seconds until the last one ended."""
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda prompt=prompt: answers.append(server.asked(prompt, tokens)))
        for prompt in prompts
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers, time.perf_counter() - start


def percentiles(numbers: list[float]) -> dict[str, float]:
    """The median and the 95th of 100 parts, in seconds."""
    ranked = sorted(numbers)
    return {"p50": statistics.median(ranked), "p95": ranked[min(int(0.95 * len(ranked)), len(ranked) - 1)]}


def memory(process: int) -> dict[str, int]:
    """Bytes that the process holds in memory, and the most that it held."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[key].split()[0]) * 1024 for name, key in (("rss", "VmRSS"), ("peak", "VmHWM"))}


def measured(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one server."""
    words = lzma.decompress(NOVEL.read_bytes()).decode().split()

    def prompt(number: int, count: int) -> str:
        start = number * 997 % (len(words) // 2)
        return f"{number} {number * 7} " + " ".join((words * 3)[start : start + count])

    number = iter(range(options.first, 10**6))
    server.asked(prompt(next(number), options.words), WARM_TOKENS)
    found: dict[str, Any] = {"memory_idle": memory(options.process)}
    for clients in options.clients:
        answers, seconds = side_by_side(
            server, [prompt(next(number), options.words) for _ in range(clients)], options.tokens
        )
        written = sum(answer.written for answer in answers)
        found[f"clients_{clients}"] = {
            "tokens_per_s": written / seconds,
            "prompt_tokens": answers[0].prompt,
            "written": written,
            "first": percentiles([answer.first for answer in answers]),
            "gap": percentiles([gap for answer in answers for gap in answer.gaps]),
        }
    found["beside_long"] = beside_long(server, prompt, number, options)
    long = prompt(next(number), options.long_words)
    miss, hit = (server.asked(long, WARM_TOKENS) for _ in range(2))
    found["reuse"] = {
        "prompt_tokens": miss.prompt,
        "miss_first": miss.first,
        "hit_first": hit.first,
        "ratio": hit.first / miss.first,
        "cached": hit.cached,
    }
    return found | {"memory": memory(options.process)}


def beside_long(server: Server, prompt: Any, number: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Three clients write while a long prompt is read."""
    writing = [Answer(time.perf_counter()) for _ in range(3)]
    threads = [
        threading.Thread(target=server.asked, args=(prompt(next(number), options.words), options.beside, answer))
        for answer in writing
    ]
    for thread in threads:
        thread.start()
    while not all(len(answer.pieces) > 2 for answer in writing):
        time.sleep(0.01)
    long = server.asked(prompt(next(number), options.long_words), 1)
    for thread in threads:
        thread.join()
    start, end = long.started, long.started + long.first
    gaps = []
    for answer in writing:
        times = [answer.started + piece for piece in answer.pieces]
        gaps += [after - before for before, after in pairwise(times) if start < after <= end]
    chunks = max(long.prompt // options.chunk, 1)
    chunk_seconds = long.first / chunks
    told = percentiles(gaps) if gaps else {"p50": long.first, "p95": long.first}
    return {"long_tokens": long.prompt, "long_first": long.first, "gap": told, "gaps": len(gaps), "turn": chunk_seconds}


def save_model(folder: Path, layers: int) -> None:
    """Random weights of the sizes of `1b`, with the tokenizer of the shipped model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "windlass" / "assets" / "finder-3m")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Make a model, or measure and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    made = tasks.add_parser("model")
    made.add_argument("folder", type=Path)
    made.add_argument("--layers", type=int, default=4)
    asked = tasks.add_parser("clients")
    asked.add_argument("name")
    asked.add_argument("port", type=int)
    asked.add_argument("process", type=int)
    asked.add_argument("--model", default="model")
    asked.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16])
    for name, own in (("--words", 100), ("--long-words", 5500), ("--tokens", 64)):
        asked.add_argument(name, type=int, default=own)
    asked.add_argument("--beside", type=int, default=300)
    asked.add_argument("--chunk", type=int, default=512)
    asked.add_argument("--first", type=int, default=0, help="number of the first prompt: no server is sent one again")
    options = parser.parse_args()
    if options.task == "model":
        save_model(options.folder, options.layers)
        return
    from machine import machine

    line = {"kind": "serving", "server": options.name, **machine(os.cpu_count() or 1)}
    print(json.dumps(line | measured(Server(options.port, options.model), options)), flush=True)


if __name__ == "__main__":
    main()
