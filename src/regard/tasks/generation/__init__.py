"""The generation of text, token by token: greedy and beam search, sampling, constraints and filters of logits."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.tasks.generation.beam import beam_search as beam_search
    from regard.tasks.generation.beam import greedy as greedy
    from regard.tasks.generation.config import Beam as Beam
    from regard.tasks.generation.filters import Constraint as Constraint
    from regard.tasks.generation.filters import Filter as Filter
    from regard.tasks.generation.filters import ForcedPrefix as ForcedPrefix
    from regard.tasks.generation.filters import Progress as Progress
    from regard.tasks.generation.filters import Temperature as Temperature
    from regard.tasks.generation.filters import TopK as TopK
    from regard.tasks.generation.filters import TopP as TopP
    from regard.tasks.generation.filters import Vocabulary as Vocabulary
    from regard.tasks.generation.filters import constrain as constrain
    from regard.tasks.generation.protocol import Decodable as Decodable
    from regard.tasks.generation.protocol import Hypothesis as Hypothesis
    from regard.tasks.generation.protocol import SearchOf as SearchOf
    from regard.tasks.generation.protocol import TextStep as TextStep
    from regard.tasks.generation.sampling import sample as sample
    from regard.tasks.generation.sampling import sample_steps as sample_steps
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
