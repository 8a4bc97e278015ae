"""A session that never ends: tool loops with facts that are asked for later, and a server that is killed on the way.

    python -m tests.helpers.endless run MODEL TEXT... --out FILE [--turns 1000] [--kills 10] [--budget 1024] ...
    python -m tests.helpers.endless read MODEL TEXT... --out FILE ... # the same text in one reading, also beside a run
    python -m tests.helpers.endless summary MODEL FILE...             # a table, and differences between files

MODEL is a folder or a GGUF file, TEXT are files of prose. `FILE` has a line for each turn, and
`run` goes on behind its last one. The server's folder lies beside it.
"""

import argparse
import copy
import json
import random
import shutil
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
from transformers import AutoTokenizer

from windlass.cache.options import CacheOptions
from windlass.core.step import PROMPT
from windlass.engine.prefill import feed, feed_tokens
from windlass.engine.templates import head_tokens, rendered, renderer
from windlass.engine.text import PromptEncoder
from windlass.evals import texts
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load

PER_BLOCK: Final = 50
NAME: Final = "endless"
SYSTEM: Final = "You help to read books. You call tools, and remember every magic number that the user names."
KEYS: Final = [f"{one}-{other}" for one in texts.ADJECTIVES for other in texts.NOUNS]
TEMPLATE: Final = """
{{- bos_token -}}
{%- for message in messages -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}{{- " Page " ~ call.function.arguments -}}{%- endfor -%}
    {%- if message.role == "assistant" and message.content -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
"""  # for a model without one, which goes on with a text: an answer stands directly behind its question


@dataclass(frozen=True)
class Plan:
    """The session: its texts, and the cache and the answers it is held with."""

    model: str
    words: Sequence[str]
    out: Path
    turns: int
    kills: int
    seed: int
    budget: int
    recall: int
    answer: int

    @property
    def options(self) -> CacheOptions:
        """Options of the server's row."""
        return CacheOptions(budget=self.budget, recall=self.recall, sinks="system", rollback=0)


@dataclass(frozen=True)
class Turn:
    """The messages that a client adds in a turn. `expected`: the number that the answer should name, if it asks."""

    messages: list[dict[str, Any]]
    expected: str | None = None
    distance: int = 0


def fact(number: int, seed: int) -> tuple[str, str]:
    """The key and the number that turn `number` tells."""
    order = random.Random(seed).sample(KEYS, len(KEYS))
    return order[number], texts.number(random.Random(f"{seed} fact {number}"))


def turn_of(number: int, words: Sequence[str], seed: int) -> Turn:
    """Turn `number`: it asks for the number of an earlier turn each fourth time, and tells one in all others."""
    draw = random.Random(f"{seed} turn {number}")
    if number % 4 == 3:
        asked = draw.choice([each for each in range(number) if each % 4 != 3])
        key, value = fact(asked, seed)
        question = (
            f" What is the special magic number for {key} mentioned above? The special magic number for {key} is:"
        )
        return Turn([{"role": "user", "content": question}], value, number - asked)
    key, value = fact(number, seed)
    told = f" One of the special magic numbers for {key} is: {value}. Read the next page to me."
    call = {"name": "read_page", "arguments": json.dumps({"page": number})}
    at, size = draw.randrange(len(words) - 1000), draw.randrange(250, 490)
    return Turn(
        [
            {"role": "user", "content": told},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": " " + " ".join(words[at : at + size])},
        ]
    )


def with_template(model: str, out: Path) -> str:
    """The model's folder, or a copy beside `out` with a chat template, if it has none."""
    folder = Path(model)
    if not folder.is_dir() or getattr(AutoTokenizer.from_pretrained(folder), "chat_template", None):
        return model
    twin = shutil.copytree(folder, out.with_suffix(".model"), dirs_exist_ok=True)
    (twin / "chat_template.jinja").write_text(TEMPLATE.strip())
    return str(twin)


class Server:
    """A server of one row in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._folder = plan, plan.out.with_suffix(".folder")
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Start it. Returns the seconds until it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        plan, room = self._plan, "--rows 1 --reuse 16GiB --disk 16GiB --recall-bytes 32GiB"
        options = f"--budget {plan.budget} --recall {plan.recall} {room}"
        command = [sys.executable, "-m", "windlass", "serve", plan.model, *options.split(), "--port", "0"]
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
        asked = {"session": NAME, "messages": messages, "max_tokens": self._plan.answer, "temperature": 0}
        return self.ask("/v1/chat/completions", asked)

    def wait_for_file(self, tokens: int) -> None:
        """Wait until a row of so many tokens is on disk, as a client does whose tools take their time."""
        for _ in range(6000):  # no clock, which goes on while the processes are stopped
            if any(int(path.name.split("-")[2]) >= tokens for path in self._folder.glob("*.safetensors")):
                return
            time.sleep(0.02)
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
    def memory(self) -> dict[str, int]:
        """Resident bytes: all, and those that no file has."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        found = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        return {"memory": int(found["VmRSS"][0]) << 10, "anonymous": int(found["RssAnon"][0]) << 10}

    @property
    def disk(self) -> tuple[int, int]:
        """Bytes of logs, and of all files."""
        sizes = {path: path.stat().st_size for path in self._folder.iterdir() if path.is_file()}
        return sum(size for path, size in sizes.items() if path.suffix == ".jsonl"), sum(sizes.values())


def run(plan: Plan) -> None:
    """Take the turns behind the last line of the plan's file."""
    words, out, turns, seed = plan.words, plan.out, plan.turns, plan.seed
    done = len(out.read_text().splitlines()) if out.exists() else 0
    places = random.Random(f"{seed} kills").sample(range(1, turns), plan.kills)
    server = Server(plan)
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
            told |= {**server.memory, "log": log, "disk": disk}
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


def followed(file: Path, turns: int) -> Iterator[dict[str, Any]]:
    """The lines of so many turns, as a run writes them."""
    with file.open() as lines:
        for _ in range(turns):
            while not (line := lines.readline()):
                time.sleep(1)
            yield json.loads(line)


@torch.no_grad()
def reading(plan: Plan) -> None:
    """Answer the same questions at the same places, with a cache that reads the text of the session once."""
    net, tokenizer = load(plan.model, "auto")
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    cache, encoder = KVCache.from_options(net, plan.options), PromptEncoder(tokenizer)
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    done = 0
    target = plan.out.with_suffix(".reading")
    target.unlink(missing_ok=True)
    for row in followed(plan.out, plan.turns):
        wanted = turn_of(row["turn"], plan.words, plan.seed)
        messages += wanted.messages
        text, form = rendered(tokenizer, [dict(each) for each in messages])
        if not done:
            cache.set_sinks(head_tokens(tokenizer, renderer(tokenizer, form), messages, text))
        if wanted.expected is not None:
            ids, logits = encoder.tokenized(text).ids, None
            while done < len(ids):
                stop = min(done + cache.chunk, len(ids))
                logits = feed(net, cache, [list(ids[done:stop])], [stop - done - 1], PROMPT)[0, -1]
                cache.forget_steps()
                done = stop
            assert logits is not None
            beside, answer = copy.deepcopy(cache), list[int]()
            while len(answer) < plan.answer and (token := int(logits.argmax())) not in ends:
                answer.append(token)
                logits = feed_tokens(net, beside, {0: token})[0]
                beside.forget_steps()
            said = str(tokenizer.decode(answer))
            told = {"turn": row["turn"], "found": wanted.expected in said, "answer": said, "distance": wanted.distance}
            with target.open("a") as file:
                file.write(json.dumps(told) + "\n")
        messages.append({"role": "assistant", "content": row["answer"]})


def readings(file: Path, first: int) -> dict[str, int]:
    """Facts that one reading has found in the questions of a block."""
    path = file.with_suffix(".reading")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    asked = [each["found"] for each in rows if first <= each["turn"] < first + PER_BLOCK]
    return {"found in one reading": sum(asked)} if asked else {}


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
            told |= readings(file, first)
            for name in ("seconds", "cpu") if read else ():
                told[name] = round(statistics.median(each[name] for each in read), 3)
            if read:
                told["read"] = round(statistics.mean(each["prompt"] - each["cached"] for each in read))
                told |= {name: read[-1][name] for name in ("prompt", "bytes", "memory", "anonymous", "log", "disk")}
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
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--recall", type=int, default=512)
    parser.add_argument("--answer", type=int, default=24, help="most tokens of an answer")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends too
    if given.what == "summary":
        summary(given.texts)
        return
    plan = Plan(
        model=with_template(given.model, given.out),
        words=[word for file in given.texts for word in file.read_text().split()],
        out=given.out,
        turns=given.turns,
        kills=given.kills,
        seed=given.seed,
        budget=given.budget,
        recall=given.recall,
        answer=given.answer,
    )
    (reading if given.what == "read" else run)(plan)


if __name__ == "__main__":
    main()
