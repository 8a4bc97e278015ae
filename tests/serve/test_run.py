"""A process that serves: its address, its signals, and its serve."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.helpers.cli import Ran, assert_refused, loaded_once, run
from tests.helpers.models import MODEL
from tests.helpers.serving import RawClient, complete
from windlass.cli import serve
from windlass.cli.serve import ServeArguments, options_of
from windlass.core.errors import UsageError
from windlass.engine.request import PREFIX, ReuseMode
from windlass.serve.run import bind

__all__ = ["loaded_once", "process", "run"]
CODE = f"""
import sys
from windlass.cache.options import CacheOptions
from windlass.hf.load import load
from windlass.serve.run import ServeOptions, serve
from tests.helpers.serving import ScriptedService, events
from windlass.engine.request import Piece

service = ScriptedService(events(Piece(5, "a"), None))
model, tokenizer = load({MODEL!r}, "float32")
options = ServeOptions("finder-3m", 4, CacheOptions(budget=64), port=0, stop_seconds=float(sys.argv[1]))
code = serve(model, tokenizer, options, lambda *_: service, lambda line: print(line, flush=True))
print(service.stopped, flush=True)
raise SystemExit(code)
"""


@contextmanager
def process(stop_seconds: float) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of its own process, and its port."""
    folder = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, "-c", CODE, str(stop_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert started.stdout is not None
    try:
        line = started.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), started.communicate()
        assert line.endswith("/v1 (finder-3m, 4 rows, 16,384 bytes)\n")
        yield started, int(line.partition("127.0.0.1:")[2].partition("/")[0])
    finally:
        started.kill()
        started.communicate()


def test_a_signal_cuts_what_takes_too_long_with_a_word() -> None:
    with process(stop_seconds=0.2) as (server, port):
        client = RawClient(port)
        client.post("/v1/completions", complete(stream=True))
        client.until(b'"text":"a"')
        server.send_signal(signal.SIGINT)
        client.until(b"the server ends")
        out, err = server.communicate(timeout=20)
        assert (server.returncode, out.splitlines()[0], "Traceback" in err) == (0, "[0.2, 0.0]", False)
        client.close()


def test_an_address_that_is_taken_is_told_before_weights_are_loaded(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.hf.load.load", Mock(side_effect=AssertionError("loaded")))
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        ran = run("serve", MODEL, "--port", str(port))
    assert_refused(ran, f"cannot listen on 127.0.0.1:{port}: ")
    assert_refused(
        run("serve", MODEL, "--kind", "rows=1,merge=weighted"), "takes weights from the policy, and KeyDiff() "
    )


def test_an_address_that_is_taken() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UsageError, match=r"cannot listen on 127\.0"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UsageError, match=r"cannot listen on no\.such"):
        bind("no.such.host.invalid", 80)


def test_what_is_typed_is_what_is_served() -> None:
    asked = ServeArguments(
        rows=3, port=9, keys=["long-enough"], queue=5, max_tokens=6, max_prompt=7, stop_seconds=1.5, reuse="2KiB"
    )
    made = options_of(MODEL, {"policy": "recent", "store": "int8"}, asked)
    assert (made.name, made.rows, made.port, made.keys, made.stop_seconds) == ("finder-3m", 3, 9, ("long-enough",), 1.5)
    assert (made.limits.queue, made.limits.max_tokens, made.limits.prompt_tokens) == (5, 6, 7)
    assert (made.options.budget, repr(made.options.policy), made.options.store.name) == (1024, "Recent()", "int8")
    assert (made.reuse_bytes, made.settings.reuse) == (2048, PREFIX)
    other = options_of(MODEL, {"recall": 16}, ServeArguments(recall_bytes="3MiB"))
    assert (other.options.recall, other.limits.recall_bytes, other.reuse_bytes) == (16, 3 << 20, 1 << 30)
    assert options_of(MODEL, {}, ServeArguments(reuse_mode="edited(16)")).settings.reuse == ReuseMode("edited", 16)
    with pytest.raises(UsageError, match=r"reuse='all' is no mode\. Use one of: exact, prefix, edited"):
        options_of(MODEL, {}, ServeArguments(reuse_mode="all"))
    assert (made.speculate, options_of(MODEL, {}, ServeArguments(speculate="lookup")).speculate) == (None, "lookup")
    with pytest.raises(UsageError, match=r"--speculate draft is neither 'lookup' nor 'off'"):
        options_of(MODEL, {}, ServeArguments(speculate="draft"))
    assert made.settings.hosts is None
    assert (made.reuse_folder, made.disk_bytes, made.settings.salt) == (None, 1 << 30, None)
    assert options_of("me/model", {"budget": 64}, ServeArguments()).name == "me/model"
    assert options_of(MODEL, {}, ServeArguments(called="x")).name == "x"
    assert "127.0.0.1" in (options_of(MODEL, {}, ServeArguments()).settings.hosts or ())


def test_a_folder_for_what_is_kept(tmp_path: Path) -> None:
    asked = ServeArguments(reuse="2KiB", reuse_folder=tmp_path, disk="3MiB")
    made = options_of(MODEL, {}, asked)
    assert (made.reuse_folder, made.disk_bytes) == (tmp_path, 3 << 20)
    assert made.settings.salt == made.settings.salt == (tmp_path / "windlass.salt").read_bytes()
    with pytest.raises(UsageError, match=r"needs memory beside it\. Give --reuse"):
        options_of(MODEL, {}, ServeArguments(reuse="0", reuse_folder=tmp_path))
    with pytest.raises(UsageError, match=r"--reuse-mode edited\(64\) has no memory to use\. Give --reuse"):
        options_of(MODEL, {}, ServeArguments(reuse="0", reuse_mode="edited"))
    assert options_of(MODEL, {}, ServeArguments(), is_parallel=True).reuse_bytes == 0
    with pytest.raises(UsageError, match=r"is no folder\. Make it first"):
        options_of(MODEL, {}, ServeArguments(reuse="1KiB", reuse_folder=tmp_path / "none"))


def test_an_open_address_is_refused_before_the_model_is_loaded(run: Callable[..., Ran]) -> None:
    ran = run("serve", MODEL, "--host", "0.0.0.0")
    assert ran.code == 2
    assert "there is no key. Give --api-key KEY" in ran.err


def test_the_extra_is_named_where_it_is_missing(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> Any:
        return None if name in ("uvicorn", "llguidance") else find_spec(name)

    monkeypatch.setattr(serve, "find_spec", found)
    ran = run("serve", MODEL)
    assert ran.code == 2
    assert ran.err.endswith("`windlass serve` needs uvicorn, llguidance. Run: pip install 'windlass[serve]'\n")


def test_nothing_of_it_is_imported_by_the_library() -> None:
    code = (
        "import sys, windlass, windlass.cli.app; "
        f"print([name for name in {[*serve.NEEDED, 'windlass.serve']} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr
