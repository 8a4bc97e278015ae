"""CPU seconds until a command says its first word, and until its process has ended.

Each row is a process of its own, with one thread: user and system seconds, which other programs on the machine
disturb less than the clock. The first row imports what any program with a Llama of transformers must; the last ones
say something without a model. Rows take turns; the median of `--runs` is shown.

    python benchmarks/startup.py [--runs 7] [--program "windlass"]
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import windlass

MODEL = str(Path(windlass.__file__).parent / "assets" / "finder-3m")
IMPORTS = (
    "import torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    "from transformers.models.llama.modeling_llama import LlamaForCausalLM\nprint('imported', flush=True)"
)
ROWS = {
    "generate": ["generate", MODEL, "The old man", "-n", "8"],
    "generate, a wrong number": ["generate", MODEL, "The old man", "--budget", "0"],
    "generate, a missing folder": ["generate", "./missing", "The old man"],
    "policies": ["policies"],
    "--help": ["--help"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """CPU seconds of a process until its first byte of output, and in all."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    reader, writer = os.pipe()
    # Errors are a first word, too; other lines on stderr come after the text.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment) as process:
        os.close(writer)
        os.read(reader, 1)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        first = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        while os.read(reader, 65536):
            pass
        os.close(reader)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return first, used.ru_utime + used.ru_stime


def main() -> None:
    """Measure all rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--program", default=f"{sys.executable} -m windlass.__main__")
    options = parser.parse_args()
    commands = {"imports alone": [sys.executable, "-c", IMPORTS]}
    commands |= {name: [*shlex.split(options.program), *arguments] for name, arguments in ROWS.items()}
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(options.runs):
        for name, command in commands.items():
            measured[name].append(seconds(command))
    print("| command | to the first word | in all |\n|---|--:|--:|")
    for name, pairs in measured.items():
        first, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {name} | {first:.2f} s | {whole:.2f} s |")


if __name__ == "__main__":
    main()
