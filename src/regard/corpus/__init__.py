"""Many documents: tables in, tables out, on one process or on an engine for many (`regard measure`)."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.corpus.atlas_page import Atlas as Atlas
    from regard.corpus.atlas_page import atlas as atlas
    from regard.corpus.comparing import Changes as Changes
    from regard.corpus.comparing import compare_statistics as compare_statistics
    from regard.corpus.measure import Measure as Measure
    from regard.corpus.measure import measure_corpus as measure_corpus
    from regard.corpus.measured_document import CorpusCounts as CorpusCounts
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
