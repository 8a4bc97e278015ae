"""The processes that hold one model together, and the few things that they tell one another."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.launch import START, Launch

Value = TypeVar("Value")


def is_lost(error: BaseException) -> bool:
    """Return True if PyTorch raises `error` when another rank has died or has not answered in time."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@final
class Ranks:
    """All processes of PyTorch's default process group: `size` of them, of which this one is `number`.

    Every method is a collective call: all ranks make it in the same order. A rank that misses a call makes the others
    wait until the group's timeout. Where the default group is of a device, data of the host goes through a second
    group.

    Raises: RuntimeError from PyTorch, here and in all methods, where a rank has died or the timeout is over.
    """

    def __init__(self) -> None:
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self._host = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def __deepcopy__(self, memo: Mapping[int, object]) -> "Ranks":
        """Itself: processes can't be copied."""
        return self

    @property
    def is_first(self) -> bool:
        """Return True on rank 0, which alone writes files and prints."""
        return self.number == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, a new tensor, the same bit by bit on each of them."""
        total = tensor.clone()
        dist.all_reduce(total, group=self._group(total))
        return total

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's `tensor`, of the same shape and dtype on all ranks."""
        sent = tensor.contiguous().clone()
        dist.broadcast(sent, 0, group=self._group(sent))
        return sent

    def all_gather(self, value: Value) -> list[Value]:
        """Return the `value` of each rank in order. It can be pickled."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def gather(self, value: Value) -> list[Value]:
        """Return the `value` of each rank in order on rank 0, and an empty list on the other ranks."""
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, 0, group=self._host)
        return values or []

    def broadcast_object(self, value: Value) -> Value:
        """Return rank 0's `value`. It can be pickled."""
        values = [copy(value)]
        dist.broadcast_object_list(values, 0, group=self._host)
        return values[0]

    def _group(self, tensor: Tensor) -> Any:
        return self._host if tensor.device.type == "cpu" else dist.group.WORLD


@dataclass(frozen=True)
class RankHeads:
    """The heads of each attention layer on this rank: `kv_heads` of them, in the order of the cache's layers.

    `is_split` tells whether the kv heads of a layer are split among the ranks, the first ones on rank 0. Otherwise each
    rank has all of them, with the same keys. `has_all_queries` tells whether each rank has all query heads. Otherwise
    it has some of them, with or without split kv heads.
    """

    ranks: Ranks
    kv_heads: tuple[int, ...]
    is_split: bool
    has_all_queries: bool

    def heads(self, layer: int) -> tuple[int, ...] | None:
        """The model's numbers of the kv heads that this rank has of a layer. None: all of them."""
        if not self.is_split:
            return None
        count = self.kv_heads[layer]
        return tuple(range(self.ranks.number * count, (self.ranks.number + 1) * count))

    def in_all(self, count: int) -> int:
        """The number of heads of a layer of which this rank has `count`."""
        return count * self.ranks.size if self.is_split else count

    @property
    def label(self) -> str:
        """The description in `KVCache.describe`."""
        own = f"rank {self.ranks.number} of {self.ranks.size}"
        if self.is_split:
            counts = sorted({*self.kv_heads})
            each = " or ".join(f"{count} of {self.in_all(count)}" for count in counts)
            return f"{own}, with {each} kv heads"
        return f"{own}, with all kv heads: this model's plan gives each rank the keys and values of all of them"


SECONDS: Final = 600  # timeout for other ranks. A dead rank is noticed at once
INTERFACE: Final = "GLOO_SOCKET_IFNAME"  # read by PyTorch: the network interface on which processes listen
BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}


def join(launch: Launch) -> None:
    """Make PyTorch's process group, which later calls find. Returns once all processes are there.

    Processes that meet at a loopback address talk over the loopback interface alone, unless the environment names
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
        raise UsageError(f"--tensor-parallel: the {launch.size} processes do not meet: {first}. {START}") from error


def leave() -> None:
    """Wait for the other processes, so that none is left in a call, and leave the group, if there is one."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def is_loopback(address: str) -> bool:
    """Return True if an address, or the name of one, belongs to this machine alone."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except (OSError, ValueError):
        return False


def loopback_interface() -> str:
    """The name of the interface that reaches no other machine: `lo`, or `lo0`."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")


def is_spread(tensor: object) -> bool:
    """Return True if each process has a part of `tensor`."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor: itself, or a copy where it is spread over the ranks, which is a collective call."""
    if not is_spread(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # a DTensor
    return whole
