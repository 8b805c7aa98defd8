"""Train a translator on pairs of sentences; the result is a `Translator` and its run folder."""

from collections.abc import Sequence
from functools import partial
from typing import IO, Any, Unpack

from torch import nn

from regard.models.config import RNNConfig, TransformerConfig
from regard.tasks.names import TRANSLATION
from regard.tasks.pictures.validation_examples import attend_to_pairs, look_at_pairs
from regard.tasks.runs.chosen_optimizer import chosen_optimizer
from regard.tasks.runs.model_size import made_for_training
from regard.tasks.runs.run import RunOptions, TrainingJob, train_run, warm_up
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.protocols import Loss
from regard.tasks.training.reporting.events import Callback
from regard.tasks.translation.alignments import taught_head
from regard.tasks.translation.config import TranslationConfig as TranslationConfig
from regard.tasks.translation.corpus import new_cuts, open_corpus, prepare_corpus
from regard.tasks.translation.forcing import GuidedAlignment, TeacherForcing
from regard.tasks.translation.made_model import Model, make_model
from regard.tasks.translation.results import Translation as Translation
from regard.tasks.translation.token_batches import TokenBatches
from regard.tasks.translation.translator import Translator as Translator
from regard.tasks.translation.validation import Validation


def train_translation(
    config: TranslationConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: IO[str] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Translator:
    """Train a translator and leave all of it in `config.out`.

    Under `torchrun` every rank calls this; rank 0 alone writes to the folder.

    Args:
        config: the settings of the model, the data and the training.
        resume: go on with the run in `config.out` from its last checkpoint (from the start if it has none).
        overwrite: replace the run in `config.out`.
        progress: where progress is shown, live if it is a terminal; None shows nothing.
        callbacks: called with every event of the training loop, on rank 0.

    Returns:
        The best model of the run by validation loss.

    Raises:
        DataError: the text cannot be read, or there is too little of it.
        RunFolderError: the folder holds something else, or cannot be resumed with these settings.
        ArgumentError: some settings do not go together.
        NonFiniteError: the loss became NaN or infinite.
        TrainingInterrupted: Ctrl-C or SIGTERM came; the state was saved first.
        OSError: the disk is full or the folder read-only.
    """
    device = run_translation(config, resume=resume, overwrite=overwrite, progress=progress, callbacks=callbacks)
    return Translator.load(config.out, device=device)


def run_translation(config: TranslationConfig, **options: Unpack[RunOptions]) -> str:
    """Train as `train_translation` does, but return the name of the device used, not the model."""
    return train_run(TRANSLATION, config, prepare_corpus, translation_job, _model, **options)


def _model(sizes: TransformerConfig | RNNConfig) -> nn.Module:
    return make_model(sizes, source_vocab_size=8, target_vocab_size=8)


def translation_job(config: TranslationConfig, folder: RunFolder, fabric: Any) -> TrainingJob:
    """Make the model, batches, loss and validation of a translator, from a folder that `prepare_corpus` filled."""
    corpus = open_corpus(config, folder)
    source_size, target_size = len(corpus.source_tokenizer), len(corpus.target_tokenizer)
    make = partial(make_model, source_vocab_size=source_size, target_vocab_size=target_size)
    model = made_for_training(make, config.sizes, config)
    warm_up(model, config, folder)
    shares: dict[str, Any] = {"rank": fabric.global_rank, "world_size": fabric.world_size}
    cuts = new_cuts(config, corpus)
    batches = TokenBatches(corpus.train, corpus.links, **_limits(config), **shares, cuts=cuts)
    return TrainingJob(
        model,
        batches,
        _loss(config, model),
        chosen_optimizer(config, model, model.output),
        Validation(
            model,
            TeacherForcing(),
            TokenBatches(corpus.valid, **_limits(config)),
            Translator(model, corpus.source_tokenizer, corpus.target_tokenizer),
            corpus.valid_texts,
            config,
            fabric,
            corpus.aligned,
        ),
        config.best_by,
        look_at_pairs(model, corpus, config.pictures),
        attend_to_pairs(model, corpus),
    )


def _loss(config: TranslationConfig, model: Model) -> Loss:
    translation = TeacherForcing(config.label_smoothing)
    if config.alignment_data is None:
        return translation
    return GuidedAlignment(translation, taught_head(config), model.alignment_names, config.alignment_weight)


def _limits(config: TranslationConfig) -> dict[str, Any]:
    return {"max_length": config.max_length, "max_tokens": config.batch_tokens, "seed": config.seed}
