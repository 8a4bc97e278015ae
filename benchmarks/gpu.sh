#!/usr/bin/env bash
# What Windlass does on a GPU, in under ten minutes: OUT/gpu.jsonl, and OUT/gpu.md with the tables made of it.
#     benchmarks/gpu.sh OUT [options of python -m gpu]
#     benchmarks/gpu.sh OUT --device cpu --tiny            # tiny shapes on the CPU: shows that every step works
# For a CUDA machine with PyTorch, Triton and transformers. Nothing is fetched and nothing installed: the Windlass of
# this folder is measured, whatever else is installed. PYTHON names another interpreter.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
if [ $# -eq 0 ]; then
    echo "gpu.sh: give a folder for the results: benchmarks/gpu.sh OUT" >&2
    exit 2
fi
out=$1
python=${PYTHON:-$here/.venv/bin/python}
[ -n "${PYTHON:-}" ] || [ -x "$python" ] || python=python3
export HF_HUB_OFFLINE=1
export PYTHONPATH="$here:$here/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
"$python" - <<'CHECK'
import importlib.util
import sys

needed = ("torch", "transformers", "triton", "safetensors", "numpy", "jaxtyping", "typer", "rich", "pydantic")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"gpu.sh: {sys.executable} lacks {', '.join(missing)}; set PYTHON to one that has them")
CHECK

code=0
"$python" -m gpu "$@" || code=$?
[ ! -f "$out/gpu.jsonl" ] || "$python" -m gpu.tables "$out/gpu.jsonl" >"$out/gpu.md"
[ ! -f "$out/gpu.md" ] || echo "results: $out/gpu.jsonl; tables: $out/gpu.md"
exit $code
