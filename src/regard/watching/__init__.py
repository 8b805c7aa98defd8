"""Looking inside models: `regard.watch`, and analyses of all its maps together."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.watching import checks as checks
    from regard.watching.analysis.head_table import compare as compare
    from regard.watching.analysis.head_table import head_table as head_table
    from regard.watching.analysis.mixing import measure_mixing as measure_mixing
    from regard.watching.analysis.relevance import AttentionRelevance as AttentionRelevance
    from regard.watching.analysis.relevance import AttentionStep as AttentionStep
    from regard.watching.analysis.relevance import Relevance as Relevance
    from regard.watching.analysis.relevance import attn_lrp as attn_lrp
    from regard.watching.analysis.relevance import relevance as relevance
    from regard.watching.analysis.rollout import rollout as rollout
    from regard.watching.analysis.tables import HeadTable as HeadTable
    from regard.watching.monitor import AttentionMonitor as AttentionMonitor
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
