"""Where the processes of `torchrun` find one another, and part."""

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from windlass.core.errors import UsageError
from windlass.parallel.launch import START, Launch

SECONDS: Final = 600  # that a rank waits for the others; one that has died is noticed at once
INTERFACE: Final = "GLOO_SOCKET_IFNAME"  # read by PyTorch: the network interface on which processes listen
BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


def join(launch: Launch) -> None:
    """Make PyTorch's process group, which later calls find; returns once all processes are there.

    Where they meet at a loopback address, they talk over the loopback interface alone, unless the environment names
    another one. A GPU of CUDA becomes the process's current one.

    Raises: UsageError where they do not meet, or for a device of another kind.
    """
    if dist.is_initialized():
        return
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    if kind is None or kind.type not in BACKENDS:
        raise UsageError(f"--tensor-parallel works on CPUs and on GPUs of CUDA, and this machine has {kind}")
    if kind.type == "cuda":
        torch.cuda.set_device(launch.local)
    if is_loopback(launch.address):
        os.environ.setdefault(INTERFACE, loopback_interface())
    try:
        dist.init_process_group(BACKENDS[kind.type], timeout=timedelta(seconds=SECONDS))
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise UsageError(f"--tensor-parallel: the {launch.size} processes do not meet: {first}; {START}") from error


def leave() -> None:
    """Wait for the others, and part, so that nobody is left in the middle of a call; nothing where nobody met."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def is_loopback(address: str) -> bool:
    """Whether an address, or the name of one, is that of this machine alone."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False


def loopback_interface() -> str:
    """What this system calls the interface that reaches no other machine: `lo`, or `lo0`."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")
