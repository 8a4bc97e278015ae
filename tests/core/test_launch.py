"""A rank notices that its starter has ended, and ends, by force where it ignores the first signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import is_alive
from tests.helpers.serving import soon
from windlass.core.errors import UsageError
from windlass.core.launch import MARK, Launch

RANK = """
import os, pathlib, signal, sys, time
from windlass.core.launch import end_with_starter
def term(*_):
    pathlib.Path(sys.argv[1], "term").touch()
    if sys.argv[2] == "heeds":
        sys.exit(0)
signal.signal(signal.SIGTERM, term)
end_with_starter(os.environ, 0.01, 0.3)
pathlib.Path(sys.argv[1], "pid").write_text(str(os.getpid()) + ".")
while True:
    time.sleep(0.01)
"""
STARTER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("mark", [{MARK: "a"}, {}], ids=["torchrun", "by hand"])
@pytest.mark.parametrize("heed", ["heeds", "does not"])
def test_a_rank_ends_with_its_starter(tmp_path: Path, mark: dict[str, str], heed: str) -> None:
    own = {name: value for name, value in os.environ.items() if name != MARK}
    starter = subprocess.Popen([sys.executable, "-c", STARTER, RANK, str(tmp_path), heed], env=own | mark)
    pid = tmp_path / "pid"
    assert soon(lambda: pid.exists() and pid.read_text().endswith("."), 60)
    rank = int(pid.read_text()[:-1])
    time.sleep(0.1)
    assert is_alive(rank), "its starter still runs"
    starter.kill()
    starter.wait()
    if mark:
        assert soon(lambda: not is_alive(rank), 30)
    else:
        time.sleep(0.5)
        assert is_alive(rank)
        os.kill(rank, signal.SIGKILL)
    assert (tmp_path / "term").exists() is bool(mark)


def test_a_process_alone_is_told_how_to_start_others() -> None:
    with pytest.raises(UsageError, match=r"RANK, LOCAL_RANK.* not set\). Start it with `torchrun --nproc-per"):
        Launch.of({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    with pytest.raises(UsageError, match="must be numbers"):
        Launch.of({"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert Launch.of(
        {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    ) == Launch(3, 1, 4, "host")
