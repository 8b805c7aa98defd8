"""The resources of a compiled Triton program, read from the machine code that Triton's own tools print.

A multiprocessor issues 128 instructions of a thread a clock. The loop that matters is the smallest one with a product
of tensor cores in it: the one without a mask.
"""

import math
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

KINDS = {
    "product": r"HGMMA|HMMA|UTCHMMA|FFMA_PRODUCT", "exp2": r"MUFU", "spill": r"LDL|STL", "shuffle": r"SHFL|REDUX",
    "atomic": r"ATOM|RED", "arithmetic": r"FFMA|FADD|FMUL",
    # Half as many of these a clock:
    "logic": r"FMNMX|ISETP|FSETP|FSEL|SEL|LOP3|PLOP3|VOTE|LEA|SHF|PRMT|VIMNMX|IMNMX|VIADD|IADD",
}  # fmt: skip
PER_CLOCK = {"logic": 64, "exp2": 16, "shuffle": 32}
SLOTS = 128
FLOPS_PER_CLOCK = {80: 1024, 90: 2048, 100: 4096}
"""The products of bf16 numbers that a multiprocessor adds in a clock."""
REGISTERS, SHARED_KIB = 65_536, {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}


@dataclass(frozen=True)
class Loop:
    kinds: Counter[str]
    weights: float

    def of(self, kind: str) -> float:
        return self.kinds[kind] / self.weights

    @property
    def slots(self) -> float:
        return self.kinds.total() / self.weights


class Compiled:
    def __init__(self, kernel: Any, weights: int) -> None:
        self.kernel, self.warps = kernel, kernel.metadata.num_warps
        self.shared = kernel.metadata.shared
        self.capability = kernel.metadata.target.arch
        self._weights = weights / (32 * self.warps)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", self._printed("-res-usage"))
        assert usage is not None
        self.registers, self.stack = map(int, usage.groups())

    @property
    def ttgir(self) -> str:
        return str(self.kernel.asm["ttgir"])

    @property
    def loops(self) -> str:
        return "\n".join(re.findall(r"scf\.for(?:(?!scf\.for).)*?scf\.yield", self.ttgir, re.DOTALL))

    def _printed(self, option: str) -> str:
        import triton

        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

    @cached_property
    def body(self) -> Loop:
        found = re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", self._printed("-sass"), re.MULTILINE)
        at = {int(address, 16): place for place, (address, _) in enumerate(found)}
        names = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for _, text in found]
        loops = []
        for place, (address, text) in enumerate(found):
            back = re.search(r"BRA.*?0x([0-9a-f]+)", text)
            if back and at.get(int(back[1], 16), place) < place and int(back[1], 16) < int(address, 16):
                kinds = Counter(map(kind_of, names[at[int(back[1], 16)] : place + 1]))
                if kinds["product"]:
                    loops.append(kinds)
        return Loop(min(loops, key=Counter.total), self._weights)

    def cycles(self, width: int) -> float:
        """Clocks of a multiprocessor for a weight, each unit by itself; inf where the kernel does not fit or spills."""
        if self.body.of("spill") > 0.05 or self.shared > SHARED_KIB[self.capability] * 1024:
            return math.inf
        room = SHARED_KIB[self.capability] * 1024
        programs = min(REGISTERS // (self.registers * 32 * self.warps), room // self.shared)
        # Where all warps of a program wait for its product, another program's powers run beside it.
        if programs * self.warps < 8 or (programs < 2 and self.capability in (90, 100)):
            return math.inf
        units = [self.body.of(kind) / rate for kind, rate in PER_CLOCK.items()]
        return max(self.body.slots / SLOTS, width / FLOPS_PER_CLOCK[self.capability], *units)


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if re.match(rf"(?:{names})(?:\b|\.|\d)", name)), "other")
