"""The settings of a run as flags: a rule tells tyro which of them stand under which heading."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, cast

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from regard.tasks.config import TrainingConfig
from regard.tasks.training.fit_config import FitConfig


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading in the help of `regard train`, and the settings under it."""

    name: str
    text: str
    settings: tuple[str, ...] = ()


DATA = Heading(
    "data",
    "What the model learns from, and how text is cut into tokens.",
    (
        *("data", "valid", "valid_share", "data_format", "documents", "bad_lines"),
        *("alignment_data", "alignment_valid"),
        *("tokenizer", "tokenizers_of", "vocab_size", "shared_vocabulary", "max_length", "block_length"),
    ),
)
MODEL = Heading("model", "What learns.", ("model", "transformer", "rnn", "warm_start"))
OUTPUT = Heading(
    "output",
    "Where the run goes, and what it tells and keeps on the way.",
    (
        *("out", "validate_every", "save_every", "log_every", "best_by", "validation_beam", "bleu_tokenize"),
        *("keep", "pictures"),
    ),
)
OPTIMISATION = Heading("optimisation", "How the model learns, for how long, and on what.")
"""All other settings."""
FIRST = frozenset(
    {
        *("data", "valid", "documents", "tokenizer", "vocab_size", "shared_vocabulary", "max_length", "block_length"),
        *("model", "warm_start", "out", "validate_every", "save_every", "best_by"),
        *("steps", "epochs", "patience", "batch_tokens", "learning_rate", "seed", "device", "precision"),
    }
)
"""The settings of a first run: with `--size` and the like they are the flags in `--help`."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """The settings of a run where no flag is given."""

    settings: TrainingConfig
    required: frozenset[str] = frozenset()
    """The names of the settings without a default; their values in `settings` are placeholders."""


def settings_as_flags(
    defaults: Callable[[type[TrainingConfig]], Defaults], *, shown: Container[str] | None = None
) -> ConstructorRegistry:
    """Make the rule by which tyro turns the settings of a run into flags.

    Args:
        defaults: returns the defaults of a class of settings; called once tyro knows of which class it needs flags.
        shown: the names of the settings that are flags; None for all. The parts of a model then are none.
    """
    registry = ConstructorRegistry()

    @registry.struct_rule
    def under_headings(info: StructTypeInfo) -> StructConstructorSpec | None:
        is_settings = isinstance(info.type, type) and issubclass(info.type, TrainingConfig)
        # If the default is settings too, tyro must find the fields itself: `_settings_of` asks it to.
        if not is_settings or isinstance(info.default, TrainingConfig):
            return None
        given = defaults(info.type)
        left = {}
        for one in _settings_of(given.settings):
            is_shown = shown is None or (one.name in shown and not is_dataclass(one.type))
            left[one.name] = _flag(one, is_required=one.name in given.required, is_shown=is_shown)
        groups = []
        for heading in (DATA, MODEL, OUTPUT):
            groups.append(_group(heading, [left.pop(name) for name in heading.settings if name in left]))
        groups.append(_group(OPTIMISATION, left.values()))
        return StructConstructorSpec(lambda **found: _put_together(info.type, found), tuple(groups))

    return registry


_Flag = tuple[str, Any, Any]
"""The name, type and default of a field, as `make_dataclass` takes them."""


def _settings_of(settings: Any) -> Iterator[StructFieldSpec]:
    """The fields of settings with their values and their help, those of the training loop among them."""
    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(type(settings), settings, in_union_context=False))
    assert isinstance(spec, StructConstructorSpec)
    for one in spec.fields:
        if one.type is FitConfig:
            yield from _settings_of(one.default)
        else:
            yield one


def _flag(one: StructFieldSpec, *, is_required: bool, is_shown: bool) -> _Flag:
    """Make a setting a field of a group, whose name is no part of the flag."""
    text = one.helptext() if callable(one.helptext) else one.helptext
    kind: Any = Annotated[one.type, tyro.conf.arg(prefix_name=False, help=text)]
    kind = kind if is_shown else cast(Any, tyro.conf.Suppress)[kind]
    return one.name, kind, field() if is_required else field(default=one.default)


def _group(heading: Heading, members: Iterable[_Flag]) -> StructFieldSpec:
    kind = make_dataclass(heading.name, members, frozen=True, kw_only=True)
    return StructFieldSpec(heading.name, kind, tyro.MISSING_NONPROP, heading.text)


def _put_together(cls: type[TrainingConfig], groups: Mapping[str, object]) -> TrainingConfig:
    values = {name: value for group in groups.values() for name, value in vars(group).items()}
    fit = FitConfig(**{one.name: values.pop(one.name) for one in fields(FitConfig)})
    return cls(fit=fit, **values)
