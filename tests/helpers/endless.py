"""A session that never ends: tool loops with facts that are asked for later, and a server that is killed on the way.

    python -m tests.helpers.endless run MODEL TEXT... --out FILE [--turns 1000] [--kills 10] [--seed 0]
    python -m tests.helpers.endless read MODEL TEXT... --out FILE     # the same text in one reading
    python -m tests.helpers.endless summary MODEL FILE...            # a table, and differences between files

MODEL is a folder or GGUF file with a chat template, TEXT are files of prose. `FILE` has a line for each turn, and
`run` goes on behind its last one. The server's folder lies beside it.
"""

import argparse
import copy
import json
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from windlass.cache.options import CacheOptions
from windlass.core.step import PROMPT
from windlass.engine.prefill import feed, feed_tokens
from windlass.engine.templates import head_tokens, rendered, renderer
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load

BUDGET, RECALL, ANSWER, PER_BLOCK = 1024, 512, 40, 50
NAME: Final = "endless"
SYSTEM: Final = "You help to read books. You call tools, and remember every magic number that the user names."
FIRST: Final = ("amber", "brisk", "coral", "dusty", "eager", "faint", "green", "humid", "ivory", "jolly")
SECOND: Final = (
    *("anchor", "basket", "candle", "dragon", "engine", "feather", "garden", "hammer", "island", "jacket", "kettle"),
    *("ladder", "magnet", "needle", "orchard", "parrot", "quarry", "ribbon", "saddle", "teapot", "umbrella", "violin"),
    *("walnut", "yogurt", "zipper", "bridge", "castle", "donkey", "falcon", "goblet", "helmet", "insect", "jungle"),
    *("kitten", "lemon", "mirror", "napkin", "oyster", "pencil", "rabbit", "scarf", "tunnel", "urchin", "velvet"),
    *("wagon", "acorn", "bonnet", "cactus", "daisy", "emerald", "fiddle", "gravel", "harbor", "jewel", "kernel"),
    *("lantern", "marble", "nutmeg", "olive", "pepper", "quilt", "rocket", "sandal", "turnip", "valley", "whistle"),
    *("anvil", "beetle", "carrot", "desert", "easel", "forest", "guitar", "hollow", "icicle", "jasmine", "kayak"),
)
KEYS: Final = [f"{one}-{other}" for one in FIRST for other in SECOND]
OPTIONS: Final = CacheOptions(budget=BUDGET, recall=RECALL, sinks="system", rollback=0)


@dataclass(frozen=True)
class Turn:
    """The messages that a client adds in a turn. `expected`: the number that the answer should name, if it asks."""

    messages: list[dict[str, Any]]
    expected: str | None = None
    distance: int = 0


def fact(number: int, seed: int) -> tuple[str, str]:
    """The key and the number that turn `number` tells."""
    draw = random.Random(f"{seed} fact {number}")
    order = random.Random(seed).sample(KEYS, len(KEYS))
    return f"{order[number % len(KEYS)]}{number // len(KEYS) or ''}", str(draw.randrange(1000, 10000))


def turn_of(number: int, words: Sequence[str], seed: int) -> Turn:
    """Turn `number`: it asks for the number of an earlier turn each fourth time, and tells one in all others."""
    draw = random.Random(f"{seed} turn {number}")
    if number % 4 == 3:
        asked = draw.choice([each for each in range(number) if each % 4 != 3])
        key, value = fact(asked, seed)
        question = f"What is the special magic number for {key} mentioned above?"
        return Turn([{"role": "user", "content": question}], value, number - asked)
    key, value = fact(number, seed)
    told = f"One of the special magic numbers for {key} is: {value}. Read the next page to me."
    call = {"name": "read_page", "arguments": json.dumps({"page": number})}
    at, size = draw.randrange(len(words) - 1000), draw.randrange(250, 490)
    return Turn(
        [
            {"role": "user", "content": told},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": " ".join(words[at : at + size])},
        ]
    )


class Server:
    """A server of one row in a process of its own."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder = model, folder
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Start it. Returns the seconds until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        options = f"--budget {BUDGET} --recall {RECALL} --rows 1 --reuse 16GiB --disk 16GiB --recall-bytes 32GiB"
        command = [sys.executable, "-m", "windlass", "serve", self._model, *options.split(), "--port", "0"]
        command += ["--reuse-folder", str(self._folder), "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "http://127.0.0.1:" in line:
                self.port = int(line.partition("127.0.0.1:")[2].split("/")[0].split()[0].rstrip("."))
                break
        else:
            raise RuntimeError("the server has ended")
        threading.Thread(target=self._log, args=(self.process.stdout,), daemon=True).start()
        return time.monotonic() - start

    def _log(self, lines: Iterator[str]) -> None:
        with self._folder.with_suffix(".log").open("a") as file:
            file.writelines(lines)

    def kill(self) -> None:
        """End it at once."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ask(self, route: str, body: Any = None) -> Any:
        """The document of an answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{route}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=3600) as answer:
            return json.loads(answer.read())

    def turn(self, messages: Sequence[dict[str, Any]]) -> Any:
        """A turn of the session."""
        asked = {"session": NAME, "messages": messages, "max_tokens": ANSWER, "temperature": 0}
        return self.ask("/v1/chat/completions", asked)

    def wait_for_file(self, tokens: int) -> None:
        """Wait until a row of so many tokens is on disk, as a client does whose tools take their time."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if any(int(path.name.split("-")[2]) >= tokens for path in self._folder.glob("*.safetensors")):
                return
            time.sleep(0.05)
        raise RuntimeError(f"no row of {tokens} tokens was written")

    @property
    def count(self) -> int:
        """Messages of the session."""
        held = self.ask("/v1/sessions")["data"]
        return next((int(each["count"]) for each in held if each["name"] == NAME), 0)

    @property
    def cpu(self) -> float:
        """Seconds of CPU that it has taken."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    @property
    def memory(self) -> int:
        """Bytes of its memory."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))

    @property
    def disk(self) -> tuple[int, int]:
        """Bytes of logs, and of all files."""
        sizes = {path: path.stat().st_size for path in self._folder.iterdir() if path.is_file()}
        return sum(size for path, size in sizes.items() if path.suffix == ".jsonl"), sum(sizes.values())


def run(model: str, words: Sequence[str], out: Path, turns: int, kills: int, seed: int) -> None:
    """Take the turns behind the last line of `out`."""
    done = len(out.read_text().splitlines()) if out.exists() else 0
    places = random.Random(f"{seed} kills").sample(range(1, turns), kills)
    server = Server(model, out.with_suffix(".folder"))
    server.start()
    try:
        held = sum(len(turn_of(each, words, seed).messages) + 1 for each in range(done)) + 1
        if done and server.count != held:  # a turn without a line
            server.ask(f"/v1/sessions/{NAME}/rewind", {"messages": held})
        taken = 5.0
        for number in range(done, turns):
            wanted = turn_of(number, words, seed)
            messages = [{"role": "system", "content": SYSTEM}] * (number == 0) + wanted.messages
            told: dict[str, Any] = {"turn": number}
            if number in places:
                told["killed"] = killed(server, messages, random.Random(f"{seed} {number}").random() * taken)
            start, cpu = time.monotonic(), server.cpu
            if server.count == held + len(messages) + 1 and number:
                text, usage = server.ask(f"/v1/sessions/{NAME}")["messages"][-1]["content"], {}
            else:
                answer = server.turn(messages)
                text, usage = answer["choices"][0]["message"]["content"] or "", answer["usage"]
            taken = time.monotonic() - start
            held = held + len(messages) + 1 if number else len(messages) + 1
            log, disk = server.disk
            told |= {"answer": text, "seconds": round(taken, 3), "cpu": round(server.cpu - cpu, 3)}
            told |= {"memory": server.memory, "log": log, "disk": disk}
            if usage:
                told |= {"prompt": usage["prompt_tokens"], "bytes": usage["windlass"]["bytes"]}
                told |= {"cached": usage["prompt_tokens_details"]["cached_tokens"], "kept": usage["windlass"]["kept"]}
            if wanted.expected is not None:
                told |= {"found": wanted.expected in text, "distance": wanted.distance}
            with out.open("a") as file:
                file.write(json.dumps(told) + "\n")
            if usage:
                server.wait_for_file(usage["total_tokens"] - 1)
    finally:
        server.kill()


def killed(server: Server, messages: Sequence[dict[str, Any]], seconds: float) -> float:
    """Kill the server so many seconds after a turn began, and start it again. Returns the seconds of the start."""

    def ask() -> None:
        with suppress(OSError, ValueError):
            server.turn(messages)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(seconds)
    server.kill()
    thread.join()
    return round(server.start(), 3)


@torch.no_grad()
def reading(model: str, words: Sequence[str], out: Path, seed: int) -> None:
    """Answer the same questions at the same places, with a cache that reads the text of the session once."""
    net, tokenizer = load(model, "auto")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    cache = KVCache.from_options(net, OPTIONS)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    done = 0
    target = out.with_suffix(".reading")
    target.unlink(missing_ok=True)
    for row in rows:
        wanted = turn_of(row["turn"], words, seed)
        messages += wanted.messages
        text, form = rendered(tokenizer, [dict(each) for each in messages])
        if not done:
            cache.set_sinks(head_tokens(tokenizer, renderer(tokenizer, form), messages, text))
        if wanted.expected is not None:
            ids, logits = tokenizer(text)["input_ids"], None
            while done < len(ids):
                stop = min(done + cache.chunk, len(ids))
                logits = feed(net, cache, [ids[done:stop]], [stop - done - 1], PROMPT)[0, -1]
                cache.forget_steps()
                done = stop
            assert logits is not None
            beside, answer = copy.deepcopy(cache), list[int]()
            while len(answer) < ANSWER and (token := int(logits.argmax())) not in ends:
                answer.append(token)
                logits = feed_tokens(net, beside, {0: token})[0]
                beside.forget_steps()
            said = str(tokenizer.decode(answer))
            told = {"turn": row["turn"], "found": wanted.expected in said, "answer": said, "distance": wanted.distance}
            with target.open("a") as file:
                file.write(json.dumps(told) + "\n")
        messages.append({"role": "assistant", "content": row["answer"]})


def summary(files: Sequence[Path]) -> None:
    """A line for each block of turns of each file, and the turns whose answers differ from those of the first file."""
    found = {file: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    for file, rows in found.items():
        for first in range(0, len(rows), PER_BLOCK):
            block = rows[first : first + PER_BLOCK]
            told: dict[str, Any] = {"file": file.name, "turns": [first, first + len(block)]}
            asked = [each["found"] for each in block if "found" in each]
            told |= {"found": sum(asked), "asked": len(asked)}
            read = [each for each in block if "prompt" in each and "killed" not in each]
            for name in ("seconds", "cpu") if read else ():
                told[name] = round(statistics.median(each[name] for each in read), 3)
            if read:
                told["read"] = round(statistics.mean(each["prompt"] - each["cached"] for each in read))
                told |= {name: read[-1][name] for name in ("prompt", "bytes", "memory", "log", "disk")}
            print(json.dumps(told))
        own, first_rows = {each["turn"]: each["answer"] for each in rows}, next(iter(found.values()))
        others = [each["turn"] for each in first_rows if own.get(each["turn"], each["answer"]) != each["answer"]]
        shared = sum(each["turn"] in own for each in first_rows)
        print(json.dumps({"file": file.name, "turns": shared, "differ": len(others), "first": others[:3]}))


def main() -> None:
    """Run, read, or tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "read", "summary"))
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, nargs="+", help="files of prose, or the FILEs of `summary`")
    parser.add_argument("--out", type=Path, default=Path("endless.jsonl"))
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what == "summary":
        summary(given.texts)
        return
    words = [word for file in given.texts for word in file.read_text().split()]
    if given.what == "read":
        reading(given.model, words, given.out, given.seed)
    else:
        run(given.model, words, given.out, given.turns, given.kills, given.seed)


if __name__ == "__main__":
    main()
