"""`regard export`: write a run's translator for another runtime."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from regard.cli.loading import loading
from regard.cli.shared import Command, Run, require_task
from regard.errors import ArgumentError
from regard.tasks.config import TRANSLATION
from regard.tasks.generation.config import ExportFormat


@dataclass(frozen=True, slots=True)
class ExportCommand(Command):
    """Write a run's translator for another runtime: Hugging Face transformers or CTranslate2."""

    run: Run
    _: KW_ONLY
    to: ExportFormat
    """the runtime."""
    out: Path
    """a folder to make."""

    def check(self) -> None:
        require_task(self.run, TRANSLATION)
        if self.out.exists() and not self.out.is_dir():
            raise ArgumentError(f"--out: {self.out} is a file; name a folder")

    def work(self) -> None:
        with loading():
            from regard.tasks.exports.write import export_run

        for path in export_run(self.run, to=self.to, out=self.out):
            print(path)
