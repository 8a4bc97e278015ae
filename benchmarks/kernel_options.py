"""The options that programs about a kernel alone have in common."""

import argparse

import torch

KERNEL_SHAPES = ("1b", "8b", "7b-mha")


def kernel_parser(text: str | None, shapes: tuple[str, ...], rounds: int) -> argparse.ArgumentParser:
    """A parser of the shapes, rounds and threads; a program adds what is its own."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(shapes), choices=KERNEL_SHAPES)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked for; PyTorch has that many threads from here, and draws the same numbers each time."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    return options
