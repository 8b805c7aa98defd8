"""Many documents: tables in, tables out, on one process or on an engine for many (`regard measure`)."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.corpus.measure import Measure as Measure
    from regard.corpus.text_functions import ScoreText as ScoreText
    from regard.corpus.text_functions import Translate as Translate
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__,
        {
            "regard.corpus.measure": ("Measure",),
            "regard.corpus.text_functions": ("ScoreText", "Translate"),
        },
    )
