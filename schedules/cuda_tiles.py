"""Which tile of a blocked product a CUDA kernel works on: an analytic rule, no measurement.

A product has ``groups`` x ``rows`` x ``columns`` results, each a sum of ``depth`` terms; the columns have
one or more axes, such as the image, height and width of a convolution's result. A block of threads makes
``Tile.rows`` times a *box* of columns and walks the depth in chunks that lie in shared memory; a thread
makes ``row_register`` times its ``own`` columns in registers. The rule adds up clock cycles of the
multiprocessor with the most blocks::

    busy  = issue slots of one chunk of one block: multiply-adds, reads of shared and of global memory
    chunk = max(busy of all resident blocks, busy of one + latency of global memory)
    time  = rounds of resident blocks * (chunks * chunk + adding up the slices)

and takes the tile with the smallest sum. Large tiles read less for a multiply-add; small ones give every
multiprocessor a block. Slices give a block more warps and longer chunks without more registers for a thread,
which pays where the results are few and the depth is long: late layers of a batch of one. Boxes are whole
rows of an image where those are short, so that little is wasted at the edges.

Source: textbook blocking and the issue rates in NVIDIA's CUDA C++ Programming Guide (arithmetic
instructions). Not fitted to any measurement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product as combinations

from tvm_fuse.core.gpu import GPUS, WARP_THREADS, GpuSpec, blocks_per_sm
from tvm_fuse.core.targets import DEVICES

__all__ = ["Device", "Product", "Tile", "choose_tile", "device_of", "estimate_cycles", "largest_part"]


@dataclass(frozen=True)
class Device:
    """What the rule knows about a GPU.

    Args:
        spec: The limits of its architecture.
        multiprocessors: Their number.
        multiply_adds: float32 multiply-adds a multiprocessor issues in a cycle, in warps.
    """

    spec: GpuSpec
    multiprocessors: int
    multiply_adds: int


#: Architectures with 64 float32 lanes in a multiprocessor; others have 128.
_HALF_RATE = ("sm_60", "sm_70", "sm_75", "sm_80")
#: For an arch that no device of ``tvm_fuse.core.targets`` has.
_USUAL_MULTIPROCESSORS = 84
_USUAL_ARCH = "sm_80"

_FLOAT_BYTES = 4
#: Floats in a vector of a load.
_VECTOR = 4

# --- what the rule chooses from ---
_MOST_THREADS, _FEWEST_THREADS = 256, 64
#: Threads along the columns, so that a warp reads and writes whole sectors of memory.
_FEWEST_THREAD_COLUMNS = 7
_ROWS = (8, 16, 32, 64, 128)
_ROW_REGISTERS = (8, 4, 2, 1)
_BOX_SIZES = (8, 16, 32, 56, 64, 98, 128)
_MOST_OWN_COLUMNS = 8
_MOST_SUMS = 32
_DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SLICES = (1, 2, 4, 8)
#: Terms of a chunk that a thread adds.
_FEWEST_TERMS, _MOST_TERMS = 16, 80
#: Loads of a thread for a chunk: they are unrolled, and ptxas spills when it has too many in flight.
_MOST_LOADS = 72
#: Shared memory of a block; two fit on every multiprocessor.
_CHUNK_BYTES = 32 << 10

# --- what the estimate knows ---
#: Cycles from asking global memory for a chunk until the block may go on.
_LATENCY = 700
#: Issue slots of a load from global memory with its address, its condition and the store to shared memory.
_LOAD_SLOTS = 6
#: Bytes a multiprocessor gets from the second-level cache in a cycle.
_CACHE_BYTES = 32
#: Schedulers of a multiprocessor; each issues an instruction in a cycle.
_SCHEDULERS = 4
#: Cycles of the barriers before the sums of slices are written and before they are read.
_BARRIERS = 100
#: Registers of a thread, for the number of resident blocks: the mean of 336 random convolutions.
_REGISTERS = 104
#: Warps that a multiprocessor needs in order to issue in every cycle.
_WARPS_TO_ISSUE = 8


def device_of(arch: str) -> Device:
    """The device that an arch such as ``sm_80`` stands for; a middling one where none is listed."""
    counts = (device.sms for device in DEVICES.values() if device.arch == arch)
    spec = GPUS.get(arch, GPUS[_USUAL_ARCH])
    return Device(spec, next(counts, _USUAL_MULTIPROCESSORS), 2 if arch in _HALF_RATE else 4)


@dataclass(frozen=True)
class Product:
    """The size of ``out[g, r, *c] = sum over d of left[g, r, d] * right[g, d, *c]``.

    Args:
        groups: Independent products.
        rows: Rows of one.
        columns: Sizes of the column axes.
        depth: Terms of a sum, without the taps.
        taps: Neighbours in memory that belong to one step of the depth; 9 for a 3x3 convolution.
        left_vector: Neighbouring floats along the depth that one load may take.
        right_vector: The same along the columns.
        is_joined: Groups and rows are one axis of the result; a block then has all rows of a group.
    """

    groups: int
    rows: int
    columns: tuple[int, ...]
    depth: int
    taps: int = 1
    left_vector: int = 1
    right_vector: int = 1
    is_joined: bool = False


@dataclass(frozen=True)
class Tile:
    """A block's part of the result and a thread's part of that.

    Args:
        rows: Rows of the block.
        row_register: Rows of a thread, neighbours.
        box: Columns of the block along each column axis.
        own: Columns of a thread along each column axis; not neighbours, so that a warp's are.
        depth: Steps of the depth in shared memory at a time.
        slices: Groups of threads that share the terms of a chunk; their sums are added at the end.
    """

    rows: int
    row_register: int
    box: tuple[int, ...]
    own: tuple[int, ...]
    depth: int
    slices: int = 1

    @property
    def columns(self) -> int:
        """Columns of the block."""
        return math.prod(self.box)

    @property
    def own_columns(self) -> int:
        """Columns of a thread."""
        return math.prod(self.own)

    @property
    def thread_rows(self) -> int:
        """Threads along the rows."""
        return self.rows // self.row_register

    @property
    def thread_columns(self) -> int:
        """Threads along the columns."""
        return self.columns // self.own_columns

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.thread_rows * self.thread_columns * self.slices

    @property
    def flops_per_byte(self) -> float:
        """Floating-point operations for a byte read from global memory, in the steady state."""
        return 2 * self.rows * self.columns / (_FLOAT_BYTES * (self.rows + self.columns))

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return self.row_register * self.own_columns

    @property
    def parts(self) -> int:
        """Sums of all slices that a block adds up at the end; 0 for one slice."""
        return self.rows * self.columns * self.slices if self.slices > 1 else 0

    def slice_terms(self, taps: int) -> int:
        """Terms of a chunk that a thread adds."""
        return self.depth * taps // self.slices

    def shared_bytes(self, taps: int) -> int:
        """Shared memory of a block.

        Left rows begin at odd multiples of a vector's size from each other, against bank conflicts. The parts
        take the place of a chunk; where they are larger, that grows.
        """
        terms = self.depth * taps
        pitch = terms + (_VECTOR - terms) % (2 * _VECTOR)
        left, right = self.rows * pitch, terms * self.columns
        return _FLOAT_BYTES * (left + right + max(0, self.parts - max(left, right)))


@functools.cache
def choose_tile(product: Product, device: Device) -> Tile | None:
    """The tile with the fewest estimated cycles, of those with a sensible number of loads if there are any.

    Args:
        product: The sizes.
        device: The GPU.

    Returns:
        The tile; None when the product is too small or too narrow for any.
    """

    def rank(tile: Tile) -> tuple[bool, float]:
        return _loads(tile, product) > _MOST_LOADS, estimate_cycles(tile, product, device)

    return min(_candidates(product), key=rank, default=None)


def _candidates(product: Product) -> Iterator[Tile]:
    rows = [rows for rows in _ROWS if rows < 2 * product.rows] or [_ROWS[0]]
    if product.is_joined:
        rows = [product.rows]
    chunks = _chunks(product)
    for count, register, box in combinations(rows, _ROW_REGISTERS, _boxes(product.columns)):
        if count % register == 0:
            for own, (slices, depth) in combinations(_shares(box), chunks):
                tile = Tile(count, register, box, own, depth, slices)
                if _is_usable(tile, product):
                    yield tile


def _is_usable(tile: Tile, product: Product) -> bool:
    return (
        _FEWEST_THREADS <= tile.threads <= _MOST_THREADS
        and tile.thread_columns >= min(_FEWEST_THREAD_COLUMNS, tile.columns)
        and tile.sums <= _MOST_SUMS
        and tile.sums % tile.slices == 0  # so that no thread has fewer results than another
        and tile.parts % _VECTOR == 0
        and tile.shared_bytes(product.taps) <= _CHUNK_BYTES
    )


def _chunks(product: Product) -> list[tuple[int, int]]:
    """Slices, and the steps of a chunk for a sensible number of terms of a slice."""
    fitting = [
        (slices, depth)
        for slices, depth in combinations(_SLICES, _DEPTHS)
        if depth < 2 * product.depth
        and depth * product.taps % slices == 0
        and _FEWEST_TERMS <= depth * product.taps // slices <= _MOST_TERMS
    ]
    return fitting or [(1, max(1, min(product.depth, _FEWEST_TERMS // product.taps)))]


def _boxes(columns: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Boxes of about each size: the innermost axis is filled first, axes that do not fit are cut."""
    boxes = []
    for size in _BOX_SIZES:
        box: list[int] = []
        for axis in reversed(columns):
            room = max(1, size // math.prod(box))
            box.append(largest_part(axis, room))
        boxes.append(tuple(reversed(box)))
    return list(dict.fromkeys(boxes))


def largest_part(axis: int, room: int) -> int:
    """How to cut an axis: not at all, else its largest divisor above half the room, else the room."""
    if axis <= room:
        return axis
    return next((size for size in range(room, room // 2, -1) if axis % size == 0), room)


def _shares(box: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """What one thread may have of a box: a divisor of one of its axes."""
    for axis, size in enumerate(box):
        for own in range(1 if axis == 0 else 2, min(size, _MOST_OWN_COLUMNS) + 1):
            if size % own == 0:
                yield tuple(own if index == axis else 1 for index in range(len(box)))


def _loads(tile: Tile, product: Product) -> int:
    """Loads from global memory that a thread does for a chunk."""
    terms = tile.depth * product.taps
    left = tile.rows * terms // (product.left_vector if terms % _VECTOR == 0 else 1)
    right = tile.columns * terms // (product.right_vector if tile.columns % _VECTOR == 0 else 1)
    return _ceil_div(left, tile.threads) + _ceil_div(right, tile.threads)


def estimate_cycles(tile: Tile, product: Product, device: Device) -> float:
    """Cycles of the multiprocessor with the most blocks; the formula is at the top of the file."""
    boxes = math.prod(_ceil_div(size, part) for size, part in zip(product.columns, tile.box))
    blocks = product.groups * _ceil_div(product.rows, tile.rows) * boxes
    own_blocks = _ceil_div(blocks, device.multiprocessors)
    warps = _ceil_div(tile.threads, WARP_THREADS)
    shared = tile.shared_bytes(product.taps)
    resident = min(own_blocks, blocks_per_sm(device.spec, tile.threads, _REGISTERS, shared).blocks_per_sm)
    terms = tile.depth * product.taps
    busy = terms * _cycles_per_term(tile, product, device)
    busy /= min(1.0, resident * warps / _WARPS_TO_ISSUE)
    chunk = max(resident * busy, busy + _LATENCY)
    chunks = _ceil_div(product.depth, tile.depth) * chunk
    return _ceil_div(own_blocks, resident) * (chunks + _cycles_to_add(tile, resident))


def _cycles_per_term(tile: Tile, product: Product, device: Device) -> float:
    """What one term costs a multiprocessor for one block: the busiest of its units."""
    warps = _ceil_div(tile.threads, WARP_THREADS) / tile.slices
    row_reads = tile.row_register / (_VECTOR if tile.slice_terms(product.taps) % _VECTOR == 0 else 1)
    left_vector = product.left_vector if tile.depth * product.taps % _VECTOR == 0 else 1
    multiply_adds = warps * tile.sums / device.multiply_adds
    shared_reads = warps * (row_reads + tile.own_columns)
    loads = (tile.rows / left_vector + tile.columns / product.right_vector) / WARP_THREADS
    traffic = (tile.rows + tile.columns) * _FLOAT_BYTES / _CACHE_BYTES
    return max(multiply_adds, shared_reads, traffic) + loads * _LOAD_SLOTS / _SCHEDULERS


def _cycles_to_add(tile: Tile, resident: int) -> float:
    """What a round of blocks needs to write the sums of slices to shared memory and to read them again."""
    return 2 * resident * tile.parts / WARP_THREADS + (_BARRIERS if tile.slices > 1 else 0)


def _ceil_div(value: int, step: int) -> int:
    return -(-value // step)
