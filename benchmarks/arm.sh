#!/usr/bin/env bash
# The compiled kernels for ARM (aarch64), cross-compiled and compared under an emulator with loops in float64.
#     benchmarks/arm.sh
# Needs Debian's g++-aarch64-linux-gnu and qemu-user; CXX=g++ RUN= benchmarks/arm.sh does the same on this machine.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cxx=${CXX:-aarch64-linux-gnu-g++}
options="-O2 -std=c++17 -fopenmp -fno-math-errno -fno-trapping-math -Wno-psabi -Iwindlass/kernels/cpu"
for source in attend linear mass recall retain; do
    "$cxx" $options -DWINDLASS_SET=plain -c "windlass/kernels/cpu/$source.cpp" -o "$work/$source.o"
done
"$cxx" $options -static benchmarks/arm/parity.cpp "$work"/*.o -o "$work/parity"
${RUN-qemu-aarch64} "$work/parity"
