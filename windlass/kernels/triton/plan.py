"""How large the kernels' blocks are, decided from sizes alone, so that equal calls give equal bits."""

from dataclasses import dataclass
from functools import cache

import torch
import triton

DEFAULT_MULTIPROCESSORS = 132  # of an H200, and of a device that can't be asked


@dataclass(frozen=True)
class Plan:
    """A program's rows of queries and block of slots, and what the compiler makes of them."""

    rows: int
    block: int
    warps: int
    stages: int
    programs: int = 1  # that a multiprocessor has room for at once


def attend_plan(rows: int, width: int, itemsize: int, bits: int) -> Plan:
    """For `rows` queries (heads of a group x tokens) of `width` channels, which the store holds in `bits` each."""
    wide = width * itemsize
    if width > 256:  # latents; not tuned
        return Plan(16, 16, 8, 1) if itemsize == 4 else Plan(16 if rows <= 16 else 32, 32, 8, 2)
    if rows <= 32:
        # Bound by bytes: as many as possible on their way. Keys and rows of the table wait for positions, which is
        # why five stages hold two blocks of them, and a block is what four programs can hold twice each. Codes become
        # floats in registers, of which two programs then take all.
        padded = 16 if rows <= 16 else 32
        if wide > 512:
            return Plan(padded, 16, 8, 3)
        return Plan(padded, 64 if wide <= 128 else 32, 4, 5, 4 if bits == 16 and wide <= 256 else 2)
    if itemsize == 4:
        # No tensor core multiplies float32 as such, and its tiles take twice the room.
        return Plan(32, 32, 4, 2, 2) if width <= 64 else Plan(16, 32 if width <= 128 else 16, 8, 1)
    if width > 128:
        return Plan(32, 32, 4, 2, 2)
    # Bound by products: keys are rotated once per block of rows, so rows are as many as eight warps' registers hold.
    return Plan(128 if rows > 64 else 64, 64, 8, 2)


def mass_plan(rows: int, width: int, itemsize: int) -> Plan:
    """For the mass of some slots; blocks of `rows` queries come by one after the other, keys stay in registers."""
    wide = width * itemsize
    return Plan(16 if rows <= 32 or wide > 256 else 64, 64 if wide <= 128 else 32, 4 if wide <= 256 else 8, 2)


def stream_plan(width: int) -> Plan:
    """For keys of `width` channels that are read one by one. No program fetches ahead: others run while it waits."""
    return Plan(1, max(8, 4096 // triton.next_power_of_2(width)), 4, 1, 4)


def splits(programs: int, slots: int, at: Plan, device: torch.device) -> tuple[int, int]:
    """In how many splits the slots are read, and how many slots each has, where `programs` would read all of them."""
    blocks = -(-slots // at.block)
    # No more than run at once: a few that are left over would take as long as all before them.
    wanted = max(1, at.programs * multiprocessors(device) // programs)
    each = -(-blocks // min(wanted, blocks))
    return -(-blocks // each), each * at.block


@cache
def multiprocessors(device: torch.device) -> int:
    """Of the device, or as many as a usual one has."""
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
