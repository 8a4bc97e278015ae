"""How large the kernels' blocks are, decided from sizes alone, so that equal calls give equal bits."""

from dataclasses import dataclass
from functools import cache

import torch

MULTIPROCESSORS = 132  # of an H200; of any device that can't be asked
PROGRAMS = 4  # per multiprocessor: enough that some load while others multiply


@dataclass(frozen=True)
class Plan:
    """A program's rows of queries and block of slots, and what the compiler makes of them."""

    rows: int
    block: int
    warps: int
    stages: int


def attend_plan(rows: int, width: int, itemsize: int) -> Plan:
    """For `rows` queries (heads of a group x tokens) of `width` channels."""
    if rows <= 32:
        # A block of keys is turned in float32, in registers: as many channels as four warps hold.
        return Plan(16 if rows <= 16 else 32, 64 if width <= 64 else 32, 4, 3)
    if itemsize == 4 or width > 128:
        return Plan(32, 32, 4, 2)
    # Each block of keys is turned once per block of rows, so rows are as many as eight warps hold.
    return Plan(128 if rows > 64 else 64, 64, 8, 2)


def mass_plan(width: int, itemsize: int) -> Plan:
    """For the mass of some slots; rows of queries come by one after the other."""
    return Plan(16, 64 if width <= 128 and itemsize == 2 else 32, 4, 2)


def splits(programs: int, slots: int, block: int, device: torch.device) -> tuple[int, int]:
    """In how many parts the slots are read, and how many slots each has, when `programs` share no slot."""
    blocks = -(-slots // block)
    wanted = 1 if programs >= multiprocessors(device) else -(-PROGRAMS * multiprocessors(device) // programs)
    each = -(-blocks // min(wanted, blocks))
    return -(-blocks // each), each * block


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device, or as many as a usual one has."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS
