"""Looking inside models: `regard.watch`, and what can be asked of all its maps together."""

from regard.inspection.heads import compare as compare
from regard.inspection.heads import head_table as head_table
from regard.inspection.layers import rollout as rollout
from regard.inspection.likeness import Difference as Difference
from regard.inspection.likeness import agreement as agreement
from regard.inspection.likeness import difference as difference
from regard.inspection.tables import HeadTable as HeadTable

__all__ = ["Difference", "HeadTable", "agreement", "compare", "difference", "head_table", "rollout"]
