"""Looking inside models: `regard.watch`, and analyses of all its maps together."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.inspection.analysis.attn_lrp import AttentionRelevance as AttentionRelevance
    from regard.inspection.analysis.attn_lrp import attn_lrp as attn_lrp
    from regard.inspection.analysis.head_table import compare as compare
    from regard.inspection.analysis.head_table import head_table as head_table
    from regard.inspection.analysis.relevance import AttentionStep as AttentionStep
    from regard.inspection.analysis.relevance import Relevance as Relevance
    from regard.inspection.analysis.relevance import relevance as relevance
    from regard.inspection.analysis.rollout import rollout as rollout
    from regard.inspection.analysis.similarity import Difference as Difference
    from regard.inspection.analysis.similarity import agreement as agreement
    from regard.inspection.analysis.similarity import difference as difference
    from regard.inspection.analysis.tables import HeadTable as HeadTable
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__,
        {
            "regard.inspection.analysis.attn_lrp": ("AttentionRelevance", "attn_lrp"),
            "regard.inspection.analysis.head_table": ("compare", "head_table"),
            "regard.inspection.analysis.relevance": ("AttentionStep", "Relevance", "relevance"),
            "regard.inspection.analysis.rollout": ("rollout",),
            "regard.inspection.analysis.similarity": ("Difference", "agreement", "difference"),
            "regard.inspection.analysis.tables": ("HeadTable",),
        },
    )
