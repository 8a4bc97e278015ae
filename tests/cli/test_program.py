"""The program as a process: its imports, the terminal's contents while it loads, and its end."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import windlass
from tests.helpers.cli import START, rest_of
from tests.helpers.models import MODEL
from windlass.cache import options
from windlass.cache.merging import MERGES
from windlass.cli.terminal import CLEAR, loading
from windlass.policies import FROM_FILES, NAMES, WRAPPERS
from windlass.positions.modes import MODES, position_mode
from windlass.stores.formats import STORES

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(windlass.__file__).parents[1]),
    "HF_HUB_OFFLINE": "1",
    "TERM": "xterm",
    "OMP_NUM_THREADS": "1",
}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)


def test_help_does_not_import_torch() -> None:
    commands = [
        "",
        "generate",
        "chat",
        "cache",
        "bench",
        "eval",
        "report",
        "calibrate",
        "demo",
        "policies",
        "serve",
        "view",
    ]
    code = (
        "import sys\nfrom windlass.cli.app import main\n"
        f"codes = [main([*name.split(), '--help']) for name in {commands}]\n"
        "print(codes, [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    ran = python(code)
    assert ran.stdout.splitlines()[-1] == f"{[0] * len(commands)} []", ran.stderr


def test_the_names_that_a_shell_completes_are_those_there_are() -> None:
    assert {*options.POLICIES} == {*NAMES, *WRAPPERS, *FROM_FILES}
    assert tuple(MODES) == options.MODES
    assert tuple(STORES) == options.STORES
    assert tuple(MERGES) == options.MERGES


def test_a_clamp_needs_its_limit() -> None:
    assert str(position_mode("clamp(7)")) == "clamp(7)"
    for spec in ("clamp", "clamp()"):
        with pytest.raises(windlass.UsageError, match="clamp takes a limit in tokens"):
            position_mode(spec)


def test_the_process_ends_without_taking_python_apart() -> None:
    code = (
        "import atexit, builtins, sys\n"
        "class End:\n    def __del__(self):\n        print('taken apart', flush=True)\n"
        "builtins.end = End()\n"
        "atexit.register(lambda: print('registered', flush=True))\n"
        "sys.argv = ['windlass', {argument}]\n"
        "from windlass.__main__ import run\nrun()"
    )
    ran = python(code.format(argument="'policies'"))
    assert ran.returncode == 0
    assert ran.stdout.startswith("recent ")
    assert ran.stdout.endswith("registered\n")
    assert "taken apart" not in ran.stdout
    ran = python(code.format(argument="'--frob'"))
    assert (ran.returncode, ran.stdout) == (2, "registered\n")
    assert ran.stderr == "windlass: error: No such option: --frob\n"


def test_loading_is_seen_at_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with loading():
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading():
        assert capsys.readouterr().err == "loading ..."
    assert capsys.readouterr().err == CLEAR


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_ctrl_c_while_it_loads_is_told(seconds: float) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*START, "generate", MODEL, "hi"],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        # A test runner in the background passes on that it ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        os.close(theirs)
        shown = os.read(ours, 1000)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    shown += rest_of(ours)
    assert (process.returncode, out) == (130, b"")
    assert shown.decode() == f"loading ...{CLEAR}windlass: interrupted\r\n"


def test_an_interrupt_after_the_first_loading_is_the_command_s_own() -> None:
    code = (
        "import signal\nfrom windlass.cli.terminal import end_at_ctrl_c, loading\n"
        # A test runner in the background passes on that it ignores interrupts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nend_at_ctrl_c()\nwith loading():\n    pass\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt:\n    print('taken', flush=True)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\nend_at_ctrl_c()\nsignal.raise_signal(signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nend_at_ctrl_c()\n"
        "try:\n    signal.raise_signal(signal.SIGINT)\nfinally:\n    print('not reached', flush=True)"
    )
    ran = python(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "taken\n", "windlass: interrupted\n")


def test_a_warning_of_ours_is_one_note() -> None:
    code = (
        "import sys, warnings\n"
        "import windlass.cli.app as app\n"
        "from windlass.core.errors import WindlassWarning\n"
        "def main():\n"
        "    for _ in range(2):\n"
        "        warnings.warn('no kernels', WindlassWarning, stacklevel=2)\n"
        "        warnings.warn('advice of a library', UserWarning, stacklevel=1)\n"
        "    return 0\n"
        "app.main = main\n"
        "from windlass.__main__ import run\nrun()"
    )
    ran = python(code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "windlass: note: no kernels\n")
