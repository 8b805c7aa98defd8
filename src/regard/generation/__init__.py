"""The generation of text, token by token: greedy and beam search, sampling, constraints and filters of logits."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.generation.beam import beam_search as beam_search
    from regard.generation.config import Beam as Beam
    from regard.generation.filters import Constraint as Constraint
    from regard.generation.filters import Filter as Filter
    from regard.generation.filters import ForcedPrefix as ForcedPrefix
    from regard.generation.filters import MinP as MinP
    from regard.generation.filters import Progress as Progress
    from regard.generation.filters import RepetitionPenalty as RepetitionPenalty
    from regard.generation.filters import Temperature as Temperature
    from regard.generation.filters import TopK as TopK
    from regard.generation.filters import TopP as TopP
    from regard.generation.filters import Vocabulary as Vocabulary
    from regard.generation.filters import constrain as constrain
    from regard.generation.greedy_search import greedy as greedy
    from regard.generation.protocol import Decodable as Decodable
    from regard.generation.protocol import Hypothesis as Hypothesis
    from regard.generation.sampling import Sampled as Sampled
    from regard.generation.sampling import sample as sample
    from regard.generation.sampling import sample_steps as sample_steps
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__,
        {
            "regard.generation.beam": ("beam_search",),
            "regard.generation.config": ("Beam",),
            "regard.generation.filters": (
                "Constraint",
                "Filter",
                "ForcedPrefix",
                "MinP",
                "Progress",
                "RepetitionPenalty",
                "Temperature",
                "TopK",
                "TopP",
                "Vocabulary",
                "constrain",
            ),
            "regard.generation.greedy_search": ("greedy",),
            "regard.generation.protocol": ("Decodable", "Hypothesis"),
            "regard.generation.sampling": ("Sampled", "sample", "sample_steps"),
        },
    )
