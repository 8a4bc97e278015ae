"""What Windlass does on a GPU, part by part; see `benchmarks/gpu.sh`."""
