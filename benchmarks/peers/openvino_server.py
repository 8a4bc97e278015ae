"""OpenVINO GenAI behind the HTTP that `benchmarks/serving.py` speaks: its paged pipeline, and a thread that steps it.

    PYTHONPATH=benchmarks .venv-peers/openvino/bin/python -m peers.openvino_server FOLDER PORT [--budget 1024]

FOLDER is what `optimum-cli export openvino` and `openvino_tokenizers` wrote. The package has no server of its own.
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import openvino_genai

SINKS: Final = 32  # of its eviction, which wants multiples of its blocks of 32 tokens
RECENT: Final = 128
IDLE_S: Final = 0.002


class Engine:
    """The pipeline, stepped by one thread as long as any request is unfinished."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = openvino_genai.SchedulerConfig()
        settings.max_num_batched_tokens, settings.cache_size = options.chunk, options.cache_gb
        if options.budget:
            settings.use_cache_eviction = True
            settings.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                SINKS, RECENT, options.budget, openvino_genai.AggregationMode.NORM_SUM
            )
        else:
            settings.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": options.threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(options.folder, settings, "CPU", properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self._lock, self._requests = threading.Lock(), 0
        threading.Thread(target=self._step, daemon=True).start()

    def _step(self) -> None:
        while True:
            if self.pipeline.has_non_finished_requests():
                self.pipeline.step()
            else:
                time.sleep(IDLE_S)

    def begin(self, prompt: str, tokens: int) -> tuple[Any, int]:
        """The handle of a request, and the tokens of its prompt."""
        ids = self.tokenizer.encode(prompt).input_ids
        config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        with self._lock:
            self._requests += 1
            number = self._requests
        return self.pipeline.add_request(number, ids, config), ids.shape[-1]


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """Answers of an engine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._begin("application/json")
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            handle, prompt = engine.begin(asked["prompt"], asked["max_tokens"])
            self._begin("text/event-stream")
            written = 0
            while written < asked["max_tokens"]:
                if not handle.can_read():
                    time.sleep(IDLE_S)
                    continue
                for output in handle.read().values():
                    written += len(output.generated_ids)
                    text = engine.tokenizer.decode(output.generated_ids)
                    self._tell({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            usage = {"prompt_tokens": prompt, "completion_tokens": written}
            self._tell({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _begin(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()

        def _tell(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing."""

    return Handler


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--budget", type=int, default=0, help="tokens that its eviction leaves; 0: all, and prefixes")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    ThreadingHTTPServer(("127.0.0.1", options.port), handler_of(Engine(options))).serve_forever()


if __name__ == "__main__":
    main()
