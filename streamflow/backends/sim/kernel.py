"""What the simulator launches: reference bodies, array views and geometries."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from streamflow.backends.base import Access, DeviceProperties, KernelSpec
from streamflow.errors import LaunchFailed

__all__ = ["LaunchConfig", "SimArray", "SimKernel"]


class SimArray:
    """A view of device memory, as a launch takes it; looked up when the kernel runs."""

    __slots__ = ("address", "dtype", "nbytes", "shape")

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.nbytes = prod(shape) * dtype.itemsize

    def __repr__(self) -> str:
        return f"SimArray({self.address:#x}, {self.shape}, {self.dtype})"


class SimKernel:
    """A kernel's reference body with what a launch needs to know about its parameters."""

    __slots__ = ("body", "cost_s", "is_read_only", "name", "num_parameters")

    def __init__(self, spec: KernelSpec) -> None:
        if spec.body is None:
            raise LaunchFailed(
                f"kernel {spec.name!r} has no reference body, so the simulator cannot run it; "
                "give it one, or use backend='cuda'"
            )
        self.name = spec.name
        self.body = spec.body
        self.cost_s = spec.cost_s
        self.num_parameters = len(spec.parameters)
        self.is_read_only = tuple(p.access is Access.READ for p in spec.parameters)


class LaunchConfig:
    """A launch geometry; ``problem`` says why the device would refuse it, or is None.

    A bad one is refused by the launch, as on CUDA, not when it is made.
    """

    __slots__ = ("block", "grid", "problem", "shared_nbytes")

    def __init__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_nbytes: int,
        limits: DeviceProperties,
    ) -> None:
        self.grid = grid
        self.block = block
        self.shared_nbytes = shared_nbytes
        self.problem = self._find_problem(limits)

    def _find_problem(self, limits: DeviceProperties) -> str | None:
        for what, size, most in (
            ("grid", self.grid, limits.max_grid_dim),
            ("block", self.block, limits.max_block_dim),
        ):
            if len(size) != 3:
                return f"{what} needs three sizes, found {size}"
            if any(not 1 <= n <= limit for n, limit in zip(size, most, strict=True)):
                return f"{what} sizes must lie between (1, 1, 1) and {most}, found {size}"
        if prod(self.block) > limits.max_threads_per_block:
            return (
                f"a block has at most {limits.max_threads_per_block} threads, "
                f"found {self.block} = {prod(self.block)}"
            )
        if not 0 <= self.shared_nbytes <= limits.max_shared_memory_per_block_nbytes:
            return (
                f"a block has at most {limits.max_shared_memory_per_block_nbytes} bytes of "
                f"shared memory, found {self.shared_nbytes}"
            )
        return None
