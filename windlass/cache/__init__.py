"""The memory of a text: its layers and rows, in plain PyTorch."""
