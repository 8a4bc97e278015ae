#!/usr/bin/env bash
# The compiled kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer; the first finding ends the run.
#     benchmarks/sanitize.sh [PYTHON] [pytest arguments]
# Needs nanobind beside PYTHON: `pip install nanobind`. Builds in a temporary folder, next to a copy of the package, so
# that the installed module is not the one that runs.
set -eu
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${1:-.venv/bin/python}")
[ $# -gt 0 ] && shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cp -r windlass tests pyproject.toml "$work"
find "$work/windlass" -name '_native*.so' -delete
# A module as it will run, but checked: the same optimisation, since the sanitizers see what the compiler made of a loop.
CXX=${CXX:-g++} cmake -S . -B "$work/build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
    -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" >"$work/build.log" 2>&1 &&
    cmake --build "$work/build" -j 2 >>"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
cp "$work"/build/_native*.so "$work/windlass/kernels/cpu/"

# Without `site` nothing leads to an editable install of the package.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cd "$work"
run() {
    # Python and PyTorch leave memory to the end of the process: leaks are not looked for.
    env LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libubsan.so)" PYTHONPATH="$work:$packages" \
        ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 OMP_WAIT_POLICY=passive "$python" -S "$@"
}
run - "$work" <<'EOF'
import sys

from windlass.kernels import cpu

assert cpu._native.__file__.startswith(sys.argv[1]), f"not the checked module: {cpu._native.__file__}"
assert "__asan_init" in open("/proc/self/maps").read() or "libasan" in open("/proc/self/maps").read()
print("checked:", cpu._native.__file__, *cpu.instruction_sets())
EOF
run -m pytest -p no:cacheprovider -q -s tests/kernels/test_kernels_cpu.py tests/kernels/test_kernels_cpu_slots.py tests/kernels/test_mean_key_cosine.py "$@"
