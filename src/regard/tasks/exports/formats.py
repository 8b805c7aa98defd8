"""The formats of other runtimes, and which of these can search for regard."""

from typing import Literal

ExportFormat = Literal["huggingface", "ctranslate2"]
Engine = Literal["regard", "ctranslate2"]
"""Who searches for translations and texts."""
SearchPrecision = Literal["float32", "int8"]
"""The precision of CTranslate2's matrix products, in its own words; regard's own search has float32."""
