"""The formats of other runtimes."""

from typing import Literal

ExportFormat = Literal["huggingface", "ctranslate2", "onnx"]
