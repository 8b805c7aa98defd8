"""Looking inside models: `regard.watch`, and analyses of all its maps together."""

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

__all__ = [
    "AttentionRelevance",
    "AttentionStep",
    "Difference",
    "HeadTable",
    "Relevance",
    "agreement",
    "attn_lrp",
    "compare",
    "difference",
    "head_table",
    "relevance",
    "rollout",
]
