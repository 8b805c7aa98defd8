"""A card that is not there: Triton compiles for it, and its launches are written down."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from regard.tensors import triton_use


class AbsentCard:
    """Triton's questions to a driver, for a card of some compute capability, such as 90."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.launched: list[tuple[str, tuple[Any, ...]]] = []
        """The names of the programs and their arguments."""
        self.utils = SimpleNamespace(
            load_binary=lambda *binary: (None, 0, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024, "warpSize": 32},
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*given: Any) -> None:
            # The grid, the stream, the function, three of metadata and two hooks come first.
            self.launched.append((metadata.name, given[9:]))

        return launch


@contextmanager
def absent_card(capability: int) -> Iterator[AbsentCard]:
    """Our Triton kernels take CPU tensors as those of such a card; they are compiled, and leave memory as it is."""
    from triton.runtime.driver import driver

    from regard.maps.loop import triton_columns, triton_rows
    from regard.maps.loop.triton_plan import plan_of

    card = AbsentCard(capability)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", card)
        patch.setattr(triton_use, "has_triton", lambda: True)
        patch.setattr(triton_use, "current_device", lambda: 0)
        patch.setattr(triton_use, "_FAILED", set())
        patch.setattr(triton_use, "capability_of", lambda device: divmod(capability, 10))
        patch.setattr("regard.maps.loop.triton_statistics.runs_triton", lambda device, name: True)
        patch.setattr("regard.maps.loop.triton_statistics.TritonRows.devices", {"cpu"})
        patch.setattr("regard.watching.kept.rebuilding.can_look", lambda tensor: False)
        for module in (triton_columns, triton_rows):
            for name in ("read_rows", "join_parts", "rank_groups", "read_columns", "pool_keys"):
                if program := vars(module).get(name):
                    program.device_caches.clear()
        plan_of.cache_clear()
        yield card
    plan_of.cache_clear()
