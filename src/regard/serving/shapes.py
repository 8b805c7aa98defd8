"""The questions and answers of the server: msgspec checks questions by these classes, and OpenAPI is made of them."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

Count = Annotated[int, Meta(ge=0, le=1_000_000)]
Texts = str | Annotated[list[str], Meta(max_length=1_000)]


class Question(Struct, kw_only=True, forbid_unknown_fields=True):
    """A question: an unknown field is an error of its sender."""


# -- LibreTranslate -----------------------------------------------------------------------------------------


class TranslateQuestion(Question):
    q: Texts
    source: str
    target: str
    format: Literal["text", "html"] = "text"
    alternatives: Annotated[int, Meta(ge=0, le=10)] = 0
    api_key: str | None = None
    secret: str | None = None
    """Passed over: LibreTranslate's own page sends it."""


class Translated(Struct, kw_only=True, omit_defaults=True):
    """Its answer: lists where `q` was a list."""

    translatedText: str | list[str]
    alternatives: list[str | list[str]] | None = None
    unknown: list[str | list[str]] | None = None
    """Ours: the stretches of the text that the vocabulary lacks, where there are any."""


class Language(Struct, kw_only=True):
    """A language that can be translated from, with those that it can be translated to."""

    code: str
    name: str
    targets: list[str]


class Health(Struct, kw_only=True):
    status: str


class Problem(Struct, kw_only=True):
    """An error: LibreTranslate's `error` is a text."""

    error: str


# -- OpenAI -------------------------------------------------------------------------------------------------


class StreamOptions(Question):
    include_usage: bool = False


class Complete(Question):
    """A question of OpenAI's completions. Of fields that would change the answer, and do not here, only the value is
    taken that changes nothing."""

    model: str
    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=64)] = ""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    seed: int | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=0)] | None = None
    # Of the sender's own accounts, and passed over:
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None


class CompletionChoice(Struct, kw_only=True):
    text: str
    index: int = 0
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None
    unknown: list[str] | UnsetType = UNSET
    """Ours: the stretches of the prompt that the vocabulary lacks, where there are any."""


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Struct, kw_only=True):
    """OpenAI's answer, and each event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | None = None
    seed: int
    """Ours: of the first text; that of each further one is one more. It is drawn where the question has none."""


class ModelCard(Struct, kw_only=True):
    """A model of the server; the fields after `owned_by` are ours."""

    id: str
    created: int
    task: str
    maps: list[str]
    """The names of its attention maps."""
    heads: int
    languages: list[str] | None = None
    examples: list[str] = []
    """Texts to try it with: from the held-out data of its run, where it has some."""
    object: Literal["model"] = "model"
    owned_by: str = "regard"


class ModelCards(Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class OpenAIError(Struct, kw_only=True):
    message: str
    type: str
    code: str | None = None
    param: str | None = None


class OpenAIProblem(Struct, kw_only=True):
    error: OpenAIError


# -- ours ---------------------------------------------------------------------------------------------------


class HeadEdit(Question):
    """A head whose output is multiplied by a factor; 0 cuts it."""

    map: str
    head: Annotated[int, Meta(ge=0, le=10_000)]
    factor: Annotated[float, Meta(ge=-10, le=10)] = 0.0


class LookedAt(Question):
    """A model that reads a text, and writes given tokens: its attention is asked for."""

    text: str
    model: str | None = None
    tokens: Annotated[list[Count], Meta(max_length=10_000)] | None = None
    """The answer's, as `/regard/v1/answer` gives them; without them and a target, the model answers by itself."""
    target: str | None = None
    edits: Annotated[list[HeadEdit], Meta(max_length=256)] = field(default_factory=list)


class AnswerQuestion(Question):
    """A text to be translated or continued, piece by piece."""

    text: str
    model: str | None = None
    prefix: str = ""
    """The beginning of the translation."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    """0 takes the most probable token each time."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    """Of the random numbers; the answer tells the one that is drawn without it."""
    edits: Annotated[list[HeadEdit], Meta(max_length=256)] = field(default_factory=list)


class AttentionQuestion(LookedAt):
    """A question about the attention."""

    maps: Annotated[list[str], Meta(max_length=1_000)] | None = None
    """The names of maps; the one that is shown first without them."""
    heads: Annotated[list[Count], Meta(max_length=1_000)] | None = None
    top_keys: Annotated[int, Meta(ge=0, le=64)] = 0
    received: bool = False
    picture: Annotated[list[Annotated[int, Meta(ge=1, le=128)]], Meta(min_length=2, max_length=2)] | None = None
    """Rows and columns at most."""
    rows: Annotated[list[Count], Meta(max_length=64)] = field(default_factory=list)
    """Queries whose weights are wanted."""
    alignment: bool = False
    """The strongest source token of each written token, by the model's own alignment."""


class MapNumbers(Struct, kw_only=True, omit_defaults=True):
    map: str
    head: int
    queries: int
    keys: int
    received: list[float] | None = None
    top_keys: list[list[int]] | None = None
    top_weights: list[list[float]] | None = None
    picture: list[list[float]] | None = None
    """The mean weight of each block."""
    rows: list[list[float]] | None = None


class AttentionNumbers(Struct, kw_only=True, omit_defaults=True):
    model: str
    heads: list[MapNumbers]
    labels: dict[str, tuple[list[str], list[str]]]
    """Of each map the labels of queries and keys."""
    alignment: list[tuple[int, int]] | None = None


class ViewQuestion(Question):
    """Texts whose attention is looked at: the answer is the page's data without weights."""

    subjects: Annotated[list[LookedAt], Meta(min_length=1, max_length=4)]


class WeightsQuestion(ViewQuestion):
    """A question about the weights of a view, in the words of the page."""

    question: dict[str, Any]
