"""What each compiled kernel uses, and how well it fills a GPU.

ptxas' report and the cubin say the same independently of each other; where they differ, one of them
is misread. Spills are in the report only, parameters and launch bounds in the cubin only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm_fuse.core.errors import InternalError, ToolFailed
from tvm_fuse.core.gpu import Limit, blocks_per_sm, find_gpu
from tvm_fuse.cuda.compile import CompiledModule, parse_arch
from tvm_fuse.cuda.cubin import CubinKernel, read_cubin
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.ptxas import PtxasReport, read_ptxas_log

__all__ = ["KernelResources", "read_resources"]

#: Said by both.
_IN_BOTH = ("registers_per_thread", "frame_bytes", "smem_static_bytes")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel uses.

    Args:
        symbol: Its name.
        arch: What it was compiled for.
        registers_per_thread: Registers.
        spill_store_bytes: Bytes that a thread writes since registers ran out, as instructions in the code.
        spill_load_bytes: Bytes that it reads again.
        stack_bytes: Local memory of a thread for arrays and spills, which lies in device memory.
        smem_static_bytes: Shared memory of a block that the kernel declares.
        smem_dynamic_bytes: Shared memory of a block that the launch adds.
        barriers: Named barriers.
        threads_per_block: Threads.
        blocks_per_sm: Blocks that fit on one multiprocessor; 0: it cannot be launched.
        occupancy_ratio: Resident warps over the most possible, 0 to 1.
        limited_by: What allows no more blocks.
    """

    symbol: str
    arch: str
    registers_per_thread: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_static_bytes: int
    smem_dynamic_bytes: int
    barriers: int
    threads_per_block: int
    blocks_per_sm: int
    occupancy_ratio: float
    limited_by: tuple[Limit, ...]

    @property
    def spill_bytes(self) -> int:
        """Bytes of spills, written and read."""
        return self.spill_store_bytes + self.spill_load_bytes

    @property
    def badness(self) -> tuple[bool, int, int, float, int]:
        """Larger is worse: no launch, spills, stack, low occupancy, small blocks, in this order."""
        does_not_fit = self.blocks_per_sm == 0
        idle = 1.0 - self.occupancy_ratio
        return does_not_fit, self.spill_bytes, self.stack_bytes, idle, -self.threads_per_block


def read_resources(compiled: CompiledModule, launches: Iterable[Launch]) -> tuple[KernelResources, ...]:
    """Reads what kernels use.

    Args:
        compiled: The compiled kernels.
        launches: How each is launched; kernels without one are left out.

    Returns:
        One record a launch, in their order.

    Raises:
        UsageError: No limits are known for the architecture.
        ToolFailed: There is no machine code, or it cannot be read.
        InternalError: The report, the cubin and the launch disagree.
    """
    if not compiled.cubin:
        raise ToolFailed(
            f"{compiled.compiler} made no machine code for {compiled.arch}, only PTX: it is too old for it",
            "choose a newer compiler, or an older architecture",
        )
    reports, kernels = read_ptxas_log(compiled.log), read_cubin(compiled.cubin)
    if reports.keys() != kernels.keys():
        raise InternalError(
            f"kernels in ptxas' report {sorted(reports)} are not those of the cubin {sorted(kernels)}"
        )
    results = []
    for launch in launches:
        if launch.symbol not in reports:
            raise InternalError(f"kernel {launch.symbol} was not compiled; there are {sorted(reports)}")
        report, kernel = reports[launch.symbol], kernels[launch.symbol]
        _check(compiled.arch, report, kernel, launch)
        results.append(_combine(compiled.arch, report, kernel, launch))
    return tuple(results)


def _check(arch: str, report: PtxasReport, kernel: CubinKernel, launch: Launch) -> None:
    """Compares all that is said twice."""
    pairs = [(name, getattr(report, name), getattr(kernel, name)) for name in _IN_BOTH]
    pairs += [("arch", report.arch, arch), ("arch", parse_arch(report.arch), kernel.arch)]
    for name, reported, in_cubin in pairs:
        if reported != in_cubin:
            raise InternalError(
                f"{launch.symbol}: {name} is {reported} in ptxas' report and {in_cubin} in the cubin"
            )
    if kernel.parameter_bytes != launch.parameter_bytes:
        raise InternalError(
            f"{launch.symbol}: parameters have {launch.parameter_bytes} bytes in the launch "
            f"and {kernel.parameter_bytes} in the cubin"
        )
    if kernel.max_threads not in (0, launch.threads_per_block):
        raise InternalError(
            f"{launch.symbol}: blocks have {launch.threads_per_block} threads in the launch "
            f"and {kernel.max_threads} in the cubin (__launch_bounds__)"
        )


def _combine(arch: str, report: PtxasReport, kernel: CubinKernel, launch: Launch) -> KernelResources:
    smem_bytes = report.smem_static_bytes + launch.smem_dynamic_bytes
    fit = blocks_per_sm(find_gpu(arch), launch.threads_per_block, report.registers_per_thread, smem_bytes)
    return KernelResources(
        symbol=launch.symbol,
        arch=arch,
        registers_per_thread=report.registers_per_thread,
        spill_store_bytes=report.spill_store_bytes,
        spill_load_bytes=report.spill_load_bytes,
        stack_bytes=kernel.stack_bytes,
        smem_static_bytes=report.smem_static_bytes,
        smem_dynamic_bytes=launch.smem_dynamic_bytes,
        barriers=report.barriers,
        threads_per_block=launch.threads_per_block,
        blocks_per_sm=fit.blocks_per_sm,
        occupancy_ratio=fit.occupancy_ratio,
        limited_by=fit.limited_by,
    )
