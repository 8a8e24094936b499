"""What one kernel costs: operations, bytes and launches, and the time they take at a device's peaks.

Bytes of device memory: a kernel reads each tensor from outside once and writes each result that is read
outside once. What the shared cache keeps between two kernels is not taken off (a T4's 4 MiB hold few
activations, an H200's 50 MiB most of a batch of one), so the saving of a fusion is that of a cold cache.

Time is a roofline and a launch; every term is a lower bound at the device's peak::

    arithmetic = operations / (peak * share)
    memory     = bytes of device memory / its bandwidth
    cache      = (bytes of device memory + bytes read again) / bandwidth of the shared cache
    time       = max(arithmetic, memory, cache) + launches * launch

``share`` is 1, except for kernels whose blocks are known to be fewer than the multiprocessors; these also
get no more from the shared cache than their multiprocessors' ports let through.

Computing again:

- A *prologue* is computed wherever the anchor reads an element: a blocked product reads its operand once for
  each block of rows (``ROWS``), a convolution once more for each tap. Reads of several taps hit the block's
  own memory; those of other blocks the shared cache.
- What an *absorbed* product needs is computed by every block of a gate (``gate_blocks``), with its weights
  from the shared cache. An absorbed reduction works on the row of its block, once.

Blocks and rows are those of the schedules (``cuda_gate.py``, ``cuda_narrow.py``, ``cuda_tiles.py``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_fuse.core.dtypes import size_bytes
from tvm_fuse.core.flops import count_elements, count_flops
from tvm_fuse.core.graph import ConvAttrs, DenseAttrs, Graph, Kind, Node, TensorInfo
from tvm_fuse.core.kinds import (
    ANCHOR_KINDS,
    CONVOLUTION_KINDS,
    LEAF_KINDS,
    MATRIX_KINDS,
    TRANSPOSED_KINDS,
    VIEW_KINDS,
)
from tvm_fuse.core.layout import axis_index, channel_axes
from tvm_fuse.core.targets import Device

__all__ = [
    "NO_COST",
    "ROWS",
    "GroupCost",
    "Parts",
    "find_before",
    "gate_blocks",
    "group_cost",
    "operator_costs",
    "side_by_side",
    "tensor_bytes",
    "time_s",
]

#: Rows of a block of a product, about: those of the example models have 8 to 64, most of them 16.
ROWS = 16
#: A product of fewer columns is computed a warp a result, this many in a block.
_NARROW_COLUMNS, _NARROW_WARPS = 8, 8
#: Blocks for each image of a gate, and warps of a block.
_GATE_SLICES, _GATE_WARPS = 16, 16
#: Results of a depthwise block along each axis, about.
_STENCIL = 16
#: Bytes that the port of one multiprocessor takes in a clock.
_PORT_BYTES_PER_CLOCK = 64

_NO_KERNEL = LEAF_KINDS | VIEW_KINDS | {Kind.TUPLE, Kind.GET_ITEM}


@dataclass(frozen=True)
class Parts:
    """A kernel's operators by what becomes of them.

    Args:
        nodes: Ids of all operators, in topological order.
        anchor: Id of the operator whose schedule the kernel gets; None for elementwise operators alone.
        prologue: Ids of those computed while the anchor reads its operands.
        absorbed: Ids of earlier heavy operators in the same kernel.
        recomputed: Ids of those that other kernels compute, too: they are not written for them.
    """

    nodes: tuple[int, ...]
    anchor: int | None = None
    prologue: tuple[int, ...] = ()
    absorbed: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupCost:
    """What one or more kernels need.

    Args:
        flops: Operations, each once.
        extra_flops: Operations for values that are computed again.
        dram_read_bytes: Bytes read from device memory.
        dram_write_bytes: Bytes written to it.
        l2_read_bytes: Bytes read again, from the shared cache.
        launches: Kernels; a fraction where several share one.
        blocks: Blocks of the kernel where they may be few; None: enough for any device.
    """

    flops: int
    extra_flops: int
    dram_read_bytes: int
    dram_write_bytes: int
    l2_read_bytes: int
    launches: float
    blocks: int | None = None

    @property
    def dram_bytes(self) -> int:
        """Bytes read from and written to device memory."""
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def flops_per_byte(self) -> float:
        """Arithmetic intensity, extra operations included."""
        return (self.flops + self.extra_flops) / max(1, self.dram_bytes)


#: A kernel that is not there.
NO_COST = GroupCost(0, 0, 0, 0, 0, 0)


def time_s(cost: GroupCost, device: Device) -> float:
    """Seconds of one kernel at a device's peaks; the formula is at the top of the file."""
    blocks = device.sms if cost.blocks is None else min(cost.blocks, device.sms)
    arithmetic = (cost.flops + cost.extra_flops) / (device.fp32_flops_per_s * blocks / device.sms)
    memory = cost.dram_bytes / device.dram_bytes_per_s
    ports = blocks * _PORT_BYTES_PER_CLOCK * device.clock_hz
    cache = (cost.dram_bytes + cost.l2_read_bytes) / min(device.l2_bytes_per_s, ports)
    return max(arithmetic, memory, cache) + cost.launches * device.launch_s


def group_cost(graph: Graph, parts: Parts) -> GroupCost:
    """What a group costs as one kernel.

    Args:
        graph: The graph; the shapes of the operators and their operands are static.
        parts: Its operators.

    Returns:
        The cost of one launch; ``NO_COST`` where nothing is computed or moved.
    """
    if all(graph.nodes[node].kind in _NO_KERNEL for node in parts.nodes):
        return NO_COST
    once = GroupCost(
        flops=_flops(graph, parts.nodes),
        extra_flops=0,
        dram_read_bytes=_read_bytes(graph, parts.nodes, parts.nodes),
        dram_write_bytes=_written_bytes(graph, parts.nodes, parts.recomputed),
        l2_read_bytes=0,
        launches=1,
    )
    anchor = None if parts.anchor is None else graph.nodes[parts.anchor]
    sizes = None if anchor is None else _sizes(graph, anchor)
    if anchor is None or sizes is None:
        return once
    return (
        _with_absorbed(graph, parts, anchor, once)
        if parts.absorbed
        else _with_reads(graph, parts, anchor, sizes, once)
    )


def _with_reads(graph: Graph, parts: Parts, anchor: Node, sizes: _Sizes, once: GroupCost) -> GroupCost:
    """A product and its prologue: read and computed once for each block of rows."""
    data = graph.nodes[anchor.inputs[0]]
    again = _read_bytes(graph, parts.prologue, parts.nodes) if parts.prologue else tensor_bytes(data.output)
    return replace(
        once,
        extra_flops=int((sizes.row_blocks * sizes.reads - 1) * _flops(graph, parts.prologue)),
        l2_read_bytes=(sizes.row_blocks - 1) * again,
        blocks=sizes.blocks,
    )


def _with_absorbed(graph: Graph, parts: Parts, anchor: Node, once: GroupCost) -> GroupCost:
    """A gate: every block of an image computes all that the last product needs."""
    blocks = gate_blocks(anchor.output)
    before = find_before(graph, anchor.id, parts.nodes)
    again = blocks // int(anchor.output.shape[0]) - 1
    return replace(
        once,
        extra_flops=again * _flops(graph, before),
        l2_read_bytes=again * _read_bytes(graph, before, parts.nodes),
        blocks=blocks,
    )


def side_by_side(costs: Sequence[GroupCost], shared_bytes: int) -> GroupCost:
    """What kernels that read one operand cost as one kernel.

    Args:
        costs: Of each kernel.
        shared_bytes: Size of the operand; all but the first read it again, from the shared cache.
    """
    again = (len(costs) - 1) * shared_bytes
    blocks = [cost.blocks for cost in costs if cost.blocks is not None]
    return GroupCost(
        flops=sum(cost.flops for cost in costs),
        extra_flops=sum(cost.extra_flops for cost in costs),
        dram_read_bytes=sum(cost.dram_read_bytes for cost in costs) - again,
        dram_write_bytes=sum(cost.dram_write_bytes for cost in costs),
        l2_read_bytes=sum(cost.l2_read_bytes for cost in costs) + again,
        launches=1,
        blocks=sum(blocks) if len(blocks) == len(costs) else None,
    )


def operator_costs(graph: Graph, nodes: Collection[int]) -> tuple[GroupCost, ...]:
    """What operators cost when each is a kernel of its own; reshapes and their like cost nothing."""
    computing = (graph.nodes[node] for node in sorted(nodes))
    kernels = (node for node in computing if node.kind not in _NO_KERNEL)
    return tuple(group_cost(graph, Parts((node.id,), _anchor_of(node))) for node in kernels)


def gate_blocks(result: TensorInfo) -> int:
    """Blocks of a kernel that computes a gate: slices of the results, for each image."""
    images, results = int(result.shape[0]), count_elements(result)
    per_warp = math.ceil(results // images / (_GATE_SLICES * _GATE_WARPS))
    return images * math.ceil(results // images / (per_warp * _GATE_WARPS))


def _anchor_of(node: Node) -> int | None:
    return node.id if node.kind in ANCHOR_KINDS else None


def _flops(graph: Graph, nodes: Collection[int]) -> int:
    return sum(count_flops(graph, graph.nodes[node]) for node in nodes)


# --- bytes ---------------------------------------------------------------------------------------


def _read_bytes(graph: Graph, nodes: Collection[int], members: Collection[int]) -> int:
    """Bytes of the tensors that ``nodes`` read from outside the kernel, each once, without scalars.

    Of a tensor that only slices read, what they read together, at most all of it.
    """
    inside = frozenset(members)
    found: dict[int, int] = {}
    for node in map(graph.nodes.__getitem__, nodes):
        for source in _sources(graph, node):
            if source not in inside:
                whole = graph.nodes[source].output
                read = node.output if node.kind is Kind.SLICE else whole
                found[source] = min(tensor_bytes(whole), found.get(source, 0) + tensor_bytes(read))
    return sum(found.values())


def _sources(graph: Graph, node: Node) -> Iterator[int]:
    """Ids of the tensors that a node reads; of a tuple, its fields."""
    pending = list(node.inputs)
    while pending:
        source = graph.nodes[pending.pop()]
        if source.kind is Kind.TUPLE:
            pending.extend(source.inputs)
        elif source.kind is not Kind.CONSTANT or source.output.shape:
            yield source.id


def _written_bytes(graph: Graph, nodes: Collection[int], recomputed: Collection[int]) -> int:
    inside = frozenset(nodes)
    own = inside.difference(recomputed)
    written = (node for node in own if graph.nodes[node].kind is not Kind.TUPLE)
    leaving = (node for node in written if _leaves(graph, node, inside))
    return sum(tensor_bytes(info) for node in leaving for info in graph.nodes[node].outputs)


def _leaves(graph: Graph, node: int, inside: frozenset[int]) -> bool:
    readers = graph.readers(node)
    return graph.is_output(node) or not readers or any(reader not in inside for reader in readers)


def tensor_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor of static shape."""
    return count_elements(info) * size_bytes(info.dtype)


# --- what is read or computed again --------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """A product as ``groups`` times rows by columns, and how often one block of rows reads an element."""

    groups: int
    rows: int
    columns: int
    reads: float

    @property
    def is_narrow(self) -> bool:
        """Whether a warp computes each result."""
        return self.columns < _NARROW_COLUMNS

    @property
    def row_blocks(self) -> int:
        """Blocks that read the same columns."""
        return self.rows if self.is_narrow else math.ceil(self.rows / ROWS)

    @property
    def blocks(self) -> int | None:
        """Blocks of the kernel, where they may be few."""
        return math.ceil(self.groups * self.rows * self.columns / _NARROW_WARPS) if self.is_narrow else None


def _sizes(graph: Graph, anchor: Node) -> _Sizes | None:
    """The sizes of a convolution or matrix product; None for any other operator."""
    results = count_elements(anchor.output)
    if isinstance(anchor.attrs, DenseAttrs) and anchor.kind in MATRIX_KINDS:
        rows = int(anchor.output.shape[-1])
        return _Sizes(1, rows, results // rows, 1.0)
    if not isinstance(anchor.attrs, ConvAttrs) or anchor.kind not in CONVOLUTION_KINDS:
        return None
    attrs = anchor.attrs
    places = channel_axes(attrs.out_layout, "C") or ()
    channels = math.prod(int(anchor.output.shape[place]) for place in places)
    rows, columns = channels // attrs.groups, results // channels
    return _Sizes(attrs.groups, rows, columns, _taps(graph, anchor, attrs, is_stencil=rows == 1))


def _taps(graph: Graph, anchor: Node, attrs: ConvAttrs, *, is_stencil: bool) -> float:
    """How often the patches of a convolution hold an element of its data.

    A depthwise kernel keeps the data themselves, so only the halo of its blocks is read twice.
    """
    weight = graph.nodes[anchor.inputs[1]].output
    axes = [axis_index(attrs.kernel_layout, letter) for letter in "DHW"]
    window = [int(weight.shape[axis]) for axis in axes if axis is not None]
    steps = list(zip(window, attrs.strides, attrs.dilation))
    if is_stencil:
        return math.prod(1 + max(0, (k - 1) * d + 1 - s) / (_STENCIL * s) for k, s, d in steps)
    if anchor.kind in TRANSPOSED_KINDS:
        return float(math.prod(window))
    return math.prod(max(1.0, k / s) for k, s, _ in steps)


def find_before(graph: Graph, anchor: int, nodes: Collection[int]) -> tuple[int, ...]:
    """The operators of a kernel that its anchor needs."""
    inside, found, pending = frozenset(nodes), set(), list(graph.nodes[anchor].inputs)
    while pending:
        node = pending.pop()
        if node in inside and node not in found:
            found.add(node)
            pending.extend(graph.nodes[node].inputs)
    return tuple(sorted(found))
