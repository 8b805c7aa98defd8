"""The inner kernel of the loop over rows: the weights of a few queries on a panel of keys; needs numba.

The products of the queries and the keys, the weights that these scores give, and the sums and maxima over the queries
stay in the vector registers of the processor; only the weights themselves go to memory, for the ranking. LLVM compiles
it for the processor that it runs on. It is written with vectors, because a compiler that has to find them keeps sums
in memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""The numbers in one vector. A processor with shorter registers takes several of them."""
VECTORS = 4 if llvm.get_host_cpu_features().get("avx512f") else 1
"""The vectors in one row of a panel. With four queries, the sums fill half of the registers, and keys the rest."""
PANEL = LANES * VECTORS
"""The keys of a panel."""
SMALLEST, LARGEST = -126.0, 127.0
"""The exponents between which 2^x is a normal float32; below them a weight is 0."""
BIAS, MANTISSA = 127, 23
"""The bias of the exponent of a float32, and the bits that stand below it."""
POWER = (1.5353359e-4, 1.3398875e-3, 9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.931472e-1, 1.0)
"""The polynomial that is nearest to 2^f for f in [-1/2, 1/2]: 2e-9 of itself, and 1e-7 by rounding."""

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _Code:
    """Writes the instructions of LLVM. Addresses are integers in bytes; offsets are in numbers of four bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def floats(self, value: float) -> Any:
        """A vector of one number, known now."""
        return ir.Constant(_FLOATS, [float(np.float32(value))] * LANES)

    def ints(self, value: int) -> Any:
        """A vector of one whole number, known now."""
        return ir.Constant(_INTS, [value] * LANES)

    def long(self, value: int) -> Any:
        """A whole number, known now."""
        return ir.Constant(_LONG, value)

    def at(self, address: Any, offset: Any) -> Any:
        """The address of the number that stands `offset` numbers further on."""
        offset = self.long(offset) if isinstance(offset, int) else offset
        return self.builder.add(address, self.builder.mul(offset, self.long(4)))

    def splat(self, value: Any) -> Any:
        """A vector of one number."""
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(_INT, 0))
        return self.builder.shuffle_vector(first, nothing, self.ints(0))

    def one(self, address: Any) -> Any:
        """The number at an address, in every place of a vector."""
        return self.splat(self.builder.load(self.builder.inttoptr(address, ir.PointerType(_FLOAT)), typ=_FLOAT))

    def load(self, address: Any) -> Any:
        """The vector at an address."""
        return self.builder.load(self.builder.inttoptr(address, ir.PointerType(_FLOATS)), align=4, typ=_FLOATS)

    def store(self, value: Any, address: Any) -> None:
        """Write a vector."""
        self.builder.store(value, self.builder.inttoptr(address, ir.PointerType(_FLOATS)), align=4)

    def call(self, name: str, *values: Any) -> Any:
        """An instruction that LLVM knows by name, for vectors."""
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * len(values))
        found = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v{LANES}f32")
        return self.builder.call(found, values)

    def power_of_2(self, x: Any) -> Any:
        """2^x for x between SMALLEST and LARGEST."""
        whole = self.call("floor", self.builder.fadd(x, self.floats(0.5)))
        fraction = self.builder.fsub(x, whole)
        found = self.floats(POWER[0])
        for coefficient in POWER[1:]:
            found = self.call("fmuladd", found, fraction, self.floats(coefficient))
        exponent = self.builder.add(self.builder.fptosi(whole, _INTS), self.ints(BIAS))
        return self.builder.fmul(found, self.builder.bitcast(self.builder.shl(exponent, self.ints(MANTISSA)), _FLOATS))

    def products(self, query: Any, stride: Any, keys: Any, depth: Any, rows: int) -> list[list[Any]]:
        """The products of `rows` queries with a panel of keys: a loop over the numbers of a vector."""
        builder, before = self.builder, self.builder.block
        starts = [self.at(query, builder.mul(stride, self.long(row))) for row in range(rows)]
        loop, after = builder.append_basic_block("products"), builder.append_basic_block("weights")
        builder.branch(loop)
        builder.position_at_end(loop)
        place = builder.phi(_LONG)
        sums = [[builder.phi(_FLOATS) for _ in range(VECTORS)] for _ in range(rows)]
        line = self.at(keys, builder.mul(place, self.long(PANEL)))
        panel = [self.load(self.at(line, vector * LANES)) for vector in range(VECTORS)]
        found = []
        for start, row in zip(starts, sums, strict=True):
            number = self.one(self.at(start, place))
            found.append([self.call("fmuladd", number, key, held) for key, held in zip(panel, row, strict=True)])
        following = builder.add(place, self.long(1))
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
        self._carry(place, (self.long(0), before), (following, loop))
        for held_row, new_row in zip(sums, found, strict=True):
            for held, new in zip(held_row, new_row, strict=True):
                self._carry(held, (self.floats(0.0), before), (new, loop))
        builder.position_at_end(after)
        return found

    def with_added(self, scores: list[list[Any]], added: Any, stride: Any) -> list[list[Any]]:
        """The scores plus what stands at an address, in rows `stride` apart; unchanged if the address is 0."""
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
        found = [[builder.phi(_FLOATS) for _ in row] for row in scores]
        for phis, row, sum_row in zip(found, scores, sums, strict=True):
            for phi, x, y in zip(phis, row, sum_row, strict=True):
                self._carry(phi, (x, before), (y, some))
        return found

    @staticmethod
    def _carry(phi: Any, *arrivals: tuple[Any, Any]) -> None:
        for value, block in arrivals:
            phi.add_incoming(value, block)

    def update(self, address: Any, combine: Callable[[Any, Any], Any], value: Any) -> None:
        """Combine a vector in memory with a value."""
        self.store(combine(self.load(address), value), address)

    def larger(self, one: Any, other: Any) -> Any:
        """The larger of two, number by number."""
        return self.call("maxnum", one, other)

    def of_all(self, combine: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
        """The combination of several vectors."""
        found, *others = values
        for value in others:
            found = combine(found, value)
        return found


def _kernel(rows: int) -> Any:
    """The kernel for so many queries."""

    def weigh(_context: Any, _places: Any, _scale: Any) -> Any:
        """Turn queries and a panel of keys into weights 2^(scale q k + added - state).

        Places, which are addresses in bytes, strides in numbers, and counts:
            query, stride: the queries, each `depth` numbers.
            keys, depth: the panel (depth, PANEL).
            state: one number for each query.
            added, stride: what is added to the scores of each query; the address 0 stands for nothing.
            weights, stride: where the weights of each query are written.
            total, peak: (PANEL,), to which the sums over the queries are added, and the largest weights.
            is_first: whether what stands in these two counts for nothing.
            spread: (rows, LANES), to which sums of w log2 w are added.
            maxima: (rows, LANES), for the largest weight of each lane.
        """

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            code, (places, scale) = _Code(builder), arguments
            query, query_stride, keys, depth, state, added, added_stride, *outcome = cgutils.unpack_tuple(
                builder, places
            )
            weights, weights_stride, total, peak, is_first, spread, maxima = outcome
            lowest, zero = code.floats(SMALLEST), code.floats(0.0)
            factor = code.splat(scale)
            products = code.products(query, query_stride, keys, depth, rows)
            states = [builder.fneg(code.one(code.at(state, row))) for row in range(rows)]
            scores = [
                [code.call("fmuladd", product, factor, less) for product in line]
                for line, less in zip(products, states, strict=True)
            ]
            found = []
            for row, line in enumerate(code.with_added(scores, added, added_stride)):
                place = code.at(weights, builder.mul(weights_stride, code.long(row)))
                spent, made = code.load(code.at(spread, row * LANES)), []
                for vector, x in enumerate(line):
                    power = code.larger(code.call("minnum", x, code.floats(LARGEST)), lowest)
                    weight = builder.select(builder.fcmp_ordered(">", x, lowest), code.power_of_2(power), zero)
                    code.store(weight, code.at(place, vector * LANES))
                    spent = code.call("fmuladd", weight, power, spent)
                    made.append(weight)
                code.store(spent, code.at(spread, row * LANES))
                code.update(code.at(maxima, row * LANES), code.larger, code.of_all(code.larger, made))
                found.append(made)
            is_fresh = builder.icmp_signed("!=", is_first, code.long(0))
            for place, combine in ((total, builder.fadd), (peak, code.larger)):
                for vector, column in enumerate(zip(*found, strict=True)):
                    here = code.at(place, vector * LANES)
                    held = builder.select(is_fresh, zero, code.load(here))
                    code.store(code.of_all(combine, [held, *column]), here)
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, 14), types.float32), generate

    return intrinsic(weigh)


weigh_4, weigh_2, weigh_1 = _kernel(4), _kernel(2), _kernel(1)


def _kth_largest(_context: Any, _address: Any, _k: Any) -> Any:
    """The k-th largest of the LANES numbers at an address, none below 0; 0 if there are fewer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (address, k) = _Code(builder), arguments
        numbers, not_below = code.load(address), code.ints(0)
        nothing = ir.Constant(_FLOATS, ir.Undefined)
        for lane in range(LANES):
            one = builder.shuffle_vector(numbers, nothing, code.ints(lane))
            not_below = builder.add(not_below, builder.zext(builder.fcmp_ordered(">=", one, numbers), _INTS))
        wanted = builder.insert_element(ir.Constant(_INTS, ir.Undefined), builder.trunc(k, _INT), ir.Constant(_INT, 0))
        wanted = builder.shuffle_vector(wanted, ir.Constant(_INTS, ir.Undefined), code.ints(0))
        kept = builder.select(builder.icmp_signed(">=", not_below, wanted), numbers, code.floats(0.0))
        kind = ir.FunctionType(_FLOAT, [_FLOATS])
        largest = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{LANES}f32")
        return builder.call(largest, [kept])

    return types.float32(types.int64, types.int64), generate


def _set_of_larger(_context: Any, _address: Any, _bound: Any) -> Any:
    """Which of the LANES numbers at an address are not below a bound, as the bits of a whole number."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        code, (address, bound) = _Code(builder), arguments
        are_larger = builder.fcmp_ordered(">=", code.load(address), code.splat(bound))
        return builder.zext(builder.bitcast(are_larger, ir.IntType(LANES)), _LONG)

    return types.int64(types.int64, types.float32), generate


def _first_bit(_context: Any, _bits: Any) -> Any:
    """The place of the first bit of a number that is not 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), generate


kth_largest: Any = intrinsic(_kth_largest)
set_of_larger: Any = intrinsic(_set_of_larger)
first_bit: Any = intrinsic(_first_bit)
