"""LLVM vector instructions for the compiled loops; needs numba.

Products are written with explicit vectors, because the auto-vectorizer keeps sums in memory. LLVM compiles them for the
host.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core import event as events
from numba.extending import intrinsic

LANES = 16
"""Elements of a vector. A processor with shorter registers takes several of them."""
VECTORS = 4 if llvm.get_host_cpu_features().get("avx512f") else 1
"""Vectors in one row of a panel. With four rows, the sums fill half of the registers, and the panel the rest."""
IS_FOR_HOST = all(getattr(numba.config, name, None) is None for name in ("CPU_NAME", "CPU_FEATURES"))
"""Whether numba compiles for this processor, not for another one of its settings."""
HAS_COMPRESS = IS_FOR_HOST and bool(llvm.get_host_cpu_features().get("avx512f"))
"""Whether the processor can compress chosen elements of a vector."""
PANEL = LANES * VECTORS
SMALLEST, LARGEST = -126.0, 127.0
"""The exponents between which 2^x is a normal float32; below them a weight is 0."""
LOG2_E, LOG_2 = 1.4426950408889634, 0.6931471805599453
BIAS, MANTISSA = 127, 23
"""The bias of the exponent of a float32, and the bits below it."""
POWER = (1.5353359e-4, 1.3398875e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)
"""The minimax polynomial of 2^f for f in [-1/2, 1/2]: relative error 2e-9, and 1e-7 by rounding."""

FLOAT, INT, LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)


class VectorCode:
    """Emits LLVM instructions. Addresses are integers in bytes; offsets count elements of four bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def floats(self, value: float) -> Any:
        return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)

    def ints(self, value: int) -> Any:
        return ir.Constant(INTS, [value] * LANES)

    def long(self, value: int) -> Any:
        return ir.Constant(LONG, value)

    def at(self, address: Any, offset: Any) -> Any:
        offset = self.long(offset) if isinstance(offset, int) else offset
        return self.builder.add(address, self.builder.mul(offset, self.long(4)))

    def splat(self, value: Any) -> Any:
        """A scalar broadcast to a vector: float32 or a 32-bit integer."""
        nothing = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, nothing, self.ints(0))

    def compressed(self, values: Any, chosen: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS, FLOATS, chosen.type])
        name = f"llvm.x86.avx512.mask.compress.v{LANES}f32"
        found = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(found, [values, self.floats(0.0), chosen])

    def one(self, address: Any) -> Any:
        return self.splat(self.builder.load(self.builder.inttoptr(address, ir.PointerType(FLOAT)), typ=FLOAT))

    def load(self, address: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, ir.PointerType(FLOATS)), align=4, typ=FLOATS)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, ir.PointerType(FLOATS)), align=4)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """LANES rows as columns. Four times each row is interleaved with the one half of them further on."""
        half, shuffled = LANES // 2, self.builder.shuffle_vector
        pairs = [place // 2 + place % 2 * LANES for place in range(LANES)]
        orders = [ir.Constant(INTS, [place + start for place in pairs]) for start in (0, half)]
        for _ in range(LANES.bit_length() - 1):
            rows = [shuffled(rows[row], rows[row + half], order) for row in range(half) for order in orders]
        return rows

    def loop(self, count: Any, carried: Sequence[Any], body: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        """A loop of `count` >= 1 iterations; `body(index, *carried)` returns the next `carried`."""
        builder, before = self.builder, self.builder.block
        start, after = builder.append_basic_block("loop"), builder.append_basic_block("after_loop")
        builder.branch(start)
        builder.position_at_end(start)
        place, held = builder.phi(LONG), [builder.phi(value.type) for value in carried]
        found = body(place, *held)
        end, following = builder.block, builder.add(place, self.long(1))
        builder.cbranch(builder.icmp_signed("<", following, count), start, after)
        self._carry(place, (self.long(0), before), (following, end))
        for phi, first, value in zip(held, carried, found, strict=True):
            self._carry(phi, (first, before), (value, end))
        builder.position_at_end(after)
        return found

    def evens_and_odds(self, one: Any, other: Any) -> tuple[Any, Any]:
        evens, odds = (ir.Constant(INTS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
        return self.builder.shuffle_vector(one, other, evens), self.builder.shuffle_vector(one, other, odds)

    def call(self, name: str, *values: Any) -> Any:
        kind = ir.FunctionType(FLOATS, [FLOATS] * len(values))
        found = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v{LANES}f32")
        return self.builder.call(found, values)

    def power_of_2(self, x: Any) -> Any:
        whole = self.call("floor", self.builder.fadd(x, self.floats(0.5)))
        fraction = self.builder.fsub(x, whole)
        found = self.floats(POWER[0])
        for coefficient in POWER[1:]:
            found = self.call("fmuladd", found, fraction, self.floats(coefficient))
        exponent = self.builder.add(self.builder.fptosi(whole, INTS), self.ints(BIAS))
        return self.builder.fmul(found, self.builder.bitcast(self.builder.shl(exponent, self.ints(MANTISSA)), FLOATS))

    def products(self, rows_at: Any, row_stride: Any, panel_at: Any, depth: Any, rows: int) -> list[list[Any]]:
        """The products of `rows` rows with a panel (depth, PANEL): a loop over the depth."""
        builder = self.builder
        starts = [self.at(rows_at, builder.mul(row_stride, self.long(row))) for row in range(rows)]
        line_length = self.long(4 * PANEL)

        def body(place: Any, *sums: Any) -> list[Any]:
            line = builder.add(panel_at, builder.mul(place, line_length))
            panel = [self.load(builder.add(line, self.long(vector * LANES * 4))) for vector in range(VECTORS)]
            found: list[Any] = []
            for row, start in enumerate(starts):
                number, held = self.one(self.at(start, place)), sums[row * VECTORS : (row + 1) * VECTORS]
                found += [self.call("fmuladd", number, *pair) for pair in zip(panel, held, strict=True)]
            return found

        found = self.loop(depth, [self.floats(0.0)] * (rows * VECTORS), body)
        return [list(found[row * VECTORS : (row + 1) * VECTORS]) for row in range(rows)]

    def with_added(self, scores: list[list[Any]], added: Any, stride: Any) -> list[list[Any]]:
        """The scores plus the tile at an address, in rows `stride` apart; unchanged for address 0."""
        builder, before = self.builder, self.builder.block
        some, after = builder.append_basic_block("added"), builder.append_basic_block("all")
        builder.cbranch(builder.icmp_signed("!=", added, self.long(0)), some, after)
        builder.position_at_end(some)
        lines = [self.at(added, builder.mul(stride, self.long(row))) for row in range(len(scores))]
        sums = [
            [builder.fadd(x, self.load(self.at(line, v * LANES))) for v, x in enumerate(row)]
            for line, row in zip(lines, scores, strict=True)
        ]
        builder.branch(after)
        builder.position_at_end(after)
        found = [[builder.phi(FLOATS) for _ in row] for row in scores]
        for phis, row, sum_row in zip(found, scores, sums, strict=True):
            for phi, x, y in zip(phis, row, sum_row, strict=True):
                self._carry(phi, (x, before), (y, some))
        return found

    @staticmethod
    def _carry(phi: Any, *arrivals: tuple[Any, Any]) -> None:
        for value, block in arrivals:
            phi.add_incoming(value, block)

    def update(self, address: Any, combine: Callable[[Any, Any], Any], value: Any) -> None:
        self.store(combine(self.load(address), value), address)

    def larger(self, one: Any, other: Any) -> Any:
        return self.call("maxnum", one, other)

    def of_all(self, combine: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
        found, *others = values
        for value in others:
            found = combine(found, value)
        return found


def compiled_function(kind: Any) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        kept: str | None = None
        with suppress(RuntimeError):
            # Without a folder that may be written, the package's or the user's, each process compiles for itself.
            kept = kept_code_folder(function)
        with events.install_listener("numba:run_pass", _Compiling(function.__module__, kept)):
            return numba.cfunc(kind, cache=kept is not None)(function)

    return decorate


def kept_code_folder(function: Any) -> str:
    return str(numba.njit(cache=True)(function).stats.cache_path)


class _Compiling(events.Listener):
    def __init__(self, module: str, kept: str | None) -> None:
        self.module, self.kept = module, kept

    def on_start(self, event: Any) -> None:
        _say(self.module, self.kept)

    def on_end(self, event: Any) -> None: ...


@cache
def _say(module: str, kept: str | None) -> None:
    where = f"once: the code is kept in {kept}" if kept else "in each process: no folder for it can be written"
    logging.getLogger("regard").warning("regard compiles %s for this processor, about ten seconds, %s", module, where)


@numba.njit(nogil=True)
def aligned_numbers(count: int) -> Any:
    """Float32 aligned to a cache line: access to a 64-byte vector across two lines takes about twice as long."""
    numbers = np.empty(count + LANES, np.float32)
    first = (-numbers.ctypes.data >> 2) % LANES
    return numbers[first : first + count]


def pointers_to(kind: Any) -> Any:
    def pointer(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return intrinsic(pointer)


def _next_of(_typing: Any, _counter: Any) -> Any:
    """Fetch and add 1 to a counter at an address, atomically; later readers see all earlier writes of this thread."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.PointerType(LONG))
        return builder.atomic_rmw("add", place, ir.Constant(LONG, 1), "acq_rel")

    return types.int64(types.int64), generate


def _transposed(_typing: Any, _source: Any, _stride: Any, _target: Any, _target_stride: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (source, stride, target, target_stride) = VectorCode(builder), arguments
        rows = [code.load(code.at(source, builder.mul(stride, code.long(row)))) for row in range(LANES)]
        for row, column in enumerate(code.transposed(rows)):
            code.store(column, code.at(target, builder.mul(target_stride, code.long(row))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _long(_typing: Any) -> Any:
    """Request 512-bit vectors: LLVM prefers 256 bits on most processors; exponentials then take 1.5 times as long."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        attributes = builder.function.attributes
        if isinstance(attributes, set):
            set.add(attributes, '"prefer-vector-width"="512"')  # `add` itself only takes names without a value.
        return context.get_dummy_value()

    return types.void(), generate


long_vectors: Any = intrinsic(_long)
next_of: Any = intrinsic(_next_of)
transpose: Any = intrinsic(_transposed)
