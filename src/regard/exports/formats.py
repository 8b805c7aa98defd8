"""The formats of other runtimes, and which of these can search for regard."""

from typing import Literal

from regard.training.distributed.choices import Precision

ExportFormat = Literal["huggingface", "ctranslate2", "onnx"]
Engine = Literal["regard", "ctranslate2"]
"""Who searches for translations."""
SearchPrecision = Precision | Literal["int8"]
"""The precision of matrix products in a search."""
