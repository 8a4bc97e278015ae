"""Measurements of Windlass on a GPU, part by part: see `benchmarks/gpu.sh`."""
