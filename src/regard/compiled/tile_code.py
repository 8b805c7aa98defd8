"""Products of tiles: the matrix unit of processors with AMX, as compiled loops use it; needs numba.

A tile is a matrix of TILE_ROWS rows of 64 bytes. One instruction multiplies one of (TILE_ROWS, TILE_DEPTH) bfloat16
numbers with one of (TILE_DEPTH, TILE_ROWS) and adds the product to a tile of float32. It multiplies sixteen times as
many numbers in a cycle as instructions for vectors of float32 do.

**float32 as a sum of parts.** A float32 number has 24 bits, a bfloat16 number 8. So x = a + b + c, where a is x rounded
to bfloat16, b what is left, rounded, and c what is left then. Of the nine products of the parts of two numbers those
that are left out are 2^-24 of the whole, so that six have the error of float32. Sums are float32. Of an
infinity nothing is left that is a number: what is multiplied with one is NaN.

Source: Henry, Tang and Heinecke 2019 (arXiv:1904.06376), section III.

Where the parts of a matrix stand: (blocks, parts, TILE_ROWS, TILE_DEPTH) for TILE_ROWS rows that are cut, and
(panels, blocks, parts, TILE_DEPTH / 2, PANEL, 2) for a matrix whose columns they are multiplied with; a block is
TILE_DEPTH numbers of a row.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from regard.compiled.step_work import TILE_DEPTH, TILE_ROWS
from regard.compiled.tile_permission import may_use_tiles
from regard.compiled.vector_code import HAS_PAIRS, LANES, LONG, PANEL, VectorCode, pointers_to

HAS_TILES = HAS_PAIRS and bool(llvm.get_host_cpu_features().get("amx-bf16")) and may_use_tiles()
"""Whether this process may multiply tiles."""
WHOLE_PARTS = 3
"""The parts of a float32 number."""
TILE_BYTES = 2 * TILE_ROWS * TILE_DEPTH
LINE_BYTES = 2 * TILE_DEPTH
PART_BYTES = 2 * TILE_DEPTH * PANEL
"""One part of a block of a panel."""
BYTE, ADDRESS = ir.IntType(8), ir.PointerType(ir.IntType(8))
COUNT = 8
"""The tiles of a processor: four for sums, and four for what is multiplied."""


class TileCode:
    """Writes the instructions of LLVM for tiles, which are known by their numbers."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, tile: int, address: Any, stride: int = LINE_BYTES) -> None:
        """Read a tile whose rows stand so many bytes apart."""
        self._call("tileloadd64", [tile], address, ir.Constant(LONG, stride))

    def store(self, tile: int, address: Any, stride: int) -> None:
        """Write a tile in rows that stand so many bytes apart."""
        self._call("tilestored64", [tile], address, ir.Constant(LONG, stride))

    def clear(self, tile: int) -> None:
        """Fill a tile with zeros."""
        self._call("tilezero", [tile])

    def add_product(self, sums: int, rows: int, columns: int) -> None:
        """Add the product of two tiles of bfloat16 to one of float32."""
        self._call("tdpbf16ps", [sums, rows, columns])

    def configure(self, address: Any) -> None:
        """Set the shapes of the tiles of this thread."""
        self._call("ldtilecfg", [], address)

    def release(self) -> None:
        """Give the tiles of this thread up, so that nobody has to save them."""
        self._call("tilerelease", [])

    def _call(self, name: str, tiles: Sequence[int], address: Any = None, *others: Any) -> None:
        values = [ir.Constant(BYTE, tile) for tile in tiles]
        if address is not None:
            values += [self.builder.inttoptr(address, ADDRESS), *others]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        found = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}")
        self.builder.call(found, values)


def _in_turn(parts: int) -> list[tuple[int, int]]:
    """The parts of the left and the right number of each product, in an order that seldom changes both of them.

    What is smaller than 2^-24 of the whole is left out.
    """
    found: list[tuple[int, int]] = []
    for part in range(parts):
        others = range(parts - part)
        found += [(part, other) for other in (others if part % 2 == 0 else reversed(others))]
    return found


def _fetch_tiles(vector: VectorCode, address: Any, columns: int) -> None:
    """Ask for the lines of the cache of some tiles of a panel that stand side by side, to read them."""
    for row in range(TILE_ROWS):
        for column in range(columns):
            place = vector.long(4 * PANEL * row + LINE_BYTES * column)
            vector.prefetch(vector.builder.add(address, place), 0)


def _multiply(blocks_of_rows: int, parts: int) -> Any:
    """The product of one or two blocks of TILE_ROWS rows with columns of a panel, written in rows of PANEL numbers.

    Two blocks of rows meet two tiles of columns at a time, one meets all four of a panel: so there are four sums.
    """
    columns = COUNT // 2 // blocks_of_rows

    def multiply(_context: Any, _rows: Any, _stride: Any, _panel: Any, _blocks: Any, _target: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, vector = TileCode(builder), VectorCode(builder)
            rows, stride, panel, blocks, target = arguments
            held = range(COUNT // 2, COUNT // 2 + blocks_of_rows)

            def body(place: Any) -> list[Any]:
                first = builder.add(rows, builder.mul(place, vector.long(parts * TILE_BYTES)))
                line = builder.add(panel, builder.mul(place, vector.long(parts * PART_BYTES)))
                before, of_before = -1, -1
                for part, other in _in_turn(parts):
                    if part != before:
                        for number, tile in enumerate(held):
                            at = builder.add(first, builder.mul(stride, vector.long(number)))
                            code.load(tile, builder.add(at, vector.long(part * TILE_BYTES)))
                    for column in range(columns):
                        tile_of_columns = COUNT - 1 - column % 2
                        if columns > 2 or other != of_before:
                            at = builder.add(line, vector.long(other * PART_BYTES + column * LINE_BYTES))
                            code.load(tile_of_columns, at, 4 * PANEL)
                        for number, tile in enumerate(held):
                            code.add_product(number * columns + column, tile, tile_of_columns)
                    if part == 0:
                        _fetch_tiles(vector, builder.add(line, vector.long((parts + other) * PART_BYTES)), columns)
                    before, of_before = part, other
                return []

            for tile in range(COUNT // 2):
                code.clear(tile)
            vector.loop(blocks, [], body)
            for number in range(blocks_of_rows):
                for column in range(columns):
                    place = 4 * PANEL * TILE_ROWS * number + LINE_BYTES * column
                    code.store(number * columns + column, builder.add(target, vector.long(place)), 4 * PANEL)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return intrinsic(multiply)


def _cut(parts: int) -> Any:
    """Write the parts of the TILE_DEPTH numbers at an address, each TILE_BYTES further on than the one before."""

    def cut(_typing: Any, _source: Any, _target: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (source, target) = VectorCode(builder), arguments
            for half in range(TILE_DEPTH // LANES):
                rest = code.load(code.at(source, half * LANES))
                for part in range(parts):
                    at = builder.add(target, code.long(part * TILE_BYTES + 2 * LANES * half))
                    code.round_to_half(rest, at)
                    rest = builder.fsub(rest, code.load_half(at))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return intrinsic(cut)


def _configure(_typing: Any, _address: Any) -> Any:
    """Set the shapes of the tiles of this thread, which stand at an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        TileCode(builder).configure(arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _release(_typing: Any) -> Any:
    """Give up the tiles of this thread."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        TileCode(builder).release()
        return context.get_dummy_value()

    return types.void(), generate


_floats: Any = pointers_to(types.float32)
_load_shapes: Any = intrinsic(_configure)
_give_up: Any = intrinsic(_release)
_two_whole, _two_half = _multiply(2, WHOLE_PARTS), _multiply(2, 1)
_one_whole, _one_half = _multiply(1, WHOLE_PARTS), _multiply(1, 1)
_cut_whole, _cut_half = _cut(WHOLE_PARTS), _cut(1)


# The conditions are known when the functions are compiled: no processor is asked for instructions that it lacks.


@numba.njit(nogil=True)
def configure_tiles(shapes: Any) -> None:
    """Make this thread ready for products of tiles; `shapes` is an array of 64 zeros (uint8), to write them to."""
    if HAS_TILES:
        shapes[0] = 1
        for tile in range(COUNT):
            shapes[16 + 2 * tile] = LINE_BYTES
            shapes[48 + tile] = TILE_ROWS
        _load_shapes(shapes.ctypes.data)


@numba.njit(nogil=True)
def release_tiles() -> None:
    """Give the tiles of this thread up, so that nobody has to save them."""
    if HAS_TILES:
        _give_up()


@numba.njit(nogil=True)
def blocks_of(count: int) -> int:
    """The blocks of a row of so many numbers."""
    return (count + TILE_DEPTH - 1) // TILE_DEPTH


@numba.njit(nogil=True)
def row_bytes(count: int, parts: int) -> int:
    """The bytes of one row, or one column, of so many numbers that are cut."""
    return blocks_of(count) * LINE_BYTES * parts


@numba.njit(nogil=True)
def cut_rows(source: int, stride: int, rows: int, inputs: int, parts: int, target: int) -> None:
    """Cut up to TILE_ROWS rows of so many numbers, `stride` numbers apart, with zeros up to a whole block."""
    if HAS_TILES:
        last = np.zeros(TILE_DEPTH, np.float32)
        for row in range(rows):
            start, line = source + 4 * row * stride, target + LINE_BYTES * row
            for block in range(blocks_of(inputs)):
                first, there = start + 4 * block * TILE_DEPTH, inputs - block * TILE_DEPTH
                if there < TILE_DEPTH:
                    numbers = carray(_floats(first), there)
                    for i in range(there):
                        last[i] = numbers[i]
                    first = last.ctypes.data
                at = line + block * parts * TILE_BYTES
                if parts == 1:
                    _cut_half(first, at)
                else:
                    _cut_whole(first, at)


@numba.njit(nogil=True)
def multiply_tiles(rows: int, cut: int, panel: int, inputs: int, parts: int, target: int) -> None:
    """The product of one or two blocks of rows that are cut with a panel, written in rows of PANEL numbers.

    Args:
        rows: up to twice TILE_ROWS. The target has room for one or two whole blocks.
        cut: the address of the rows.
        panel: the address of a matrix of PANEL columns.
        inputs: the numbers of a row.
        parts: 1, or WHOLE_PARTS.
        target: an address.
    """
    if HAS_TILES:
        blocks, stride = blocks_of(inputs), TILE_ROWS * row_bytes(inputs, parts)
        if rows > TILE_ROWS:
            for half in range(2):
                place = half * 2 * LINE_BYTES
                if parts == 1:
                    _two_half(cut, stride, panel + place, blocks, target + place)
                else:
                    _two_whole(cut, stride, panel + place, blocks, target + place)
        elif parts == 1:
            _one_half(cut, stride, panel, blocks, target)
        else:
            _one_whole(cut, stride, panel, blocks, target)
