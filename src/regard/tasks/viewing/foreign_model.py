"""Any model that transformers loads, watched while it reads a text, ids of tokens, an image or a sound."""

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.errors import ArgumentError, DataError, NotSeenError, RegardError, RunFolderError
from regard.files.model_folder import OnProgress, no_progress
from regard.huggingface.folder import load_folder, quiet, transformers_library
from regard.maps.attention_map import AttentionMap
from regard.tasks.generation.downloaded import MapSide, sides_of
from regard.tasks.text.codec import label_of_each
from regard.tasks.text.tokenizers import is_byte_level
from regard.tasks.training.distributed import find_device
from regard.tasks.translation.results import probable_others
from regard.tasks.viewing.places import ForeignAttention, InputLabels, image_places, of_tokens, sound_places
from regard.tasks.viewing.proved_places import ClaimedAxes, MapPlace, PlaceProof
from regard.tasks.viewing.view_input import ViewInput, read_audio, read_image
from regard.views.examples import of_sequence
from regard.watching.analysis.tables import named
from regard.watching.report import maps_of_layers
from regard.watching.watch import Seen, watch

ALTERNATIVES = 3
"""How many words are told beside the one that is written."""
MOST_WRITTEN = 64
"""The most tokens that a model writes where no target is given."""


class ForeignModel:
    def __init__(self, folder: Path, *, device: str, sequence: int = 0, tell: OnProgress = no_progress) -> None:
        self._folder, self._sequence = folder, sequence
        self._library = transformers_library()
        loaded = load_folder(folder, tell)
        self.model, self.absent = loaded.model.to(find_device(device)), loaded.absent
        self._kind, self._tokens = type(self.model).__name__, ForeignTokens(folder, self._library)
        self._takes = inspect.signature(self.model.forward).parameters
        self._is_pair = bool(getattr(self.model.config, "is_encoder_decoder", False))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the special ones of the folder's template."""
        if self._tokens.is_empty and self._rows > self._tokens.size:
            raise RunFolderError(
                f"{self._folder}: expected the tokenizer of a model with {self._rows:,} tokens, got one of "
                f"{self._tokens.size:,} special ones: add its tokenizer.json, or give ids by --tokens or --ids"
            )
        return self._tokens.encode(text)

    @property
    def _rows(self) -> int:
        return getattr(self._table(), "num_embeddings", 0)

    @property
    def doubt(self) -> str | None:
        """A sentence if the tokenizer has fewer than half of the model's tokens."""
        if not 0 < 2 * self._tokens.size < self._rows:
            return None
        return f"the tokenizer has {self._tokens.size:,} tokens, and the model {self._rows:,}: is it another model's?"

    tokens = encode

    @property
    def unknown_id(self) -> int | None:
        return self._tokens.unknown_id

    @torch.no_grad()
    def attend(self, asked: ViewInput) -> ForeignAttention:
        inputs, places = self._inputs(asked)
        written: list[int] = []
        if self._is_pair:
            inputs, written, read = self._with_target(inputs, asked.target)
            places.written, places.read = (
                of_tokens(self._tokens.label_of_each(ids), "decoder_input_ids") for ids in (written, read)
            )
        elif asked.target is not None:
            raise ArgumentError(f"--target is for an encoder-decoder; {self._kind} is none")
        seed = torch.get_rng_state()
        with watch(self.model) as seen:
            output = self._run(inputs)
        self._refuse_random(seen)
        if not (layers := maps_of_layers(seen)):
            raise NotSeenError(f"no attention of {self._kind} was seen: {seen!r}")
        whole = dict(named(layers))
        maps = self._of_sequence(whole)
        sides = sides_of(self.model, seen) if self._is_pair else {}
        claims = {name: self._axes(sides.get(name), whole[name].shape, places) for name in maps}
        proof = PlaceProof(self._run, inputs, self._marks(), self._vocabulary(), seed)
        square = [name for name, one in maps.items() if one.shape[-2] == one.shape[-1]]
        shown = next((name for name in reversed(maps) if sides.get(name) == "cross"), [*maps, *square][-1])
        choices = {}
        if written and (logits := getattr(output, "logits", None)) is not None and logits.dim() == 3:
            others = probable_others(logits[0].float().softmax(-1), self._tokens, written, ALTERNATIVES)
            choices = {name: others for name in maps if places.written in claims[name][0]}
        places_of = self._entrances(whole, maps, sides)
        return ForeignAttention(maps, lambda: proof.labels(claims, places_of), shown, choices, places.image)

    # -- inputs ------------------------------------------------------------------------------------------

    def _inputs(self, asked: ViewInput) -> tuple[dict[str, Any], InputLabels]:
        places = InputLabels()
        if asked.audio is not None:
            return self._sound(asked.audio, places), places
        if asked.image is not None:
            return self._image(asked, places), places
        if "input_ids" not in self._takes:
            raise ArgumentError(f"{self._kind} reads {self.model.main_input_name}, no text: give --image or --audio")
        ids = list(asked.tokens) if asked.tokens is not None else self.encode(asked.text or "")
        if not ids:
            raise DataError("there is nothing to look at in an empty sentence")
        self._check(ids)
        places.text = of_tokens(self._tokens.label_of_each(ids), "input_ids")
        rows = torch.tensor([ids])
        mask = {"attention_mask": torch.ones_like(rows)} if "attention_mask" in self._takes else {}
        return {"input_ids": rows} | mask, places

    def _table(self) -> Any:
        try:
            return self.model.get_input_embeddings()
        except (NotImplementedError, AttributeError):  # a model of several parts
            return None

    def _check(self, ids: Sequence[int]) -> None:
        size = getattr(self._table(), "num_embeddings", None)
        if size is not None and not 0 <= min(ids) <= max(ids) < size:
            raise DataError(f"the model has tokens from 0 to {size - 1}; got tokens from {min(ids)} to {max(ids)}")

    def _sound(self, path: Path, places: InputLabels) -> dict[str, Any]:
        extractor = self._processor("AutoFeatureExtractor", "--audio")
        rate = int(extractor.sampling_rate)
        samples = read_audio(path, rate)
        inputs = self._processed(extractor, raw_speech=samples, sampling_rate=rate)
        sound_places(places, inputs, rate, extractor, self.model.config, samples=len(samples))
        return inputs

    def _image(self, asked: ViewInput, places: InputLabels) -> dict[str, Any]:
        assert asked.image is not None
        image = read_image(asked.image)
        if asked.text is None and asked.tokens is None:
            processor = self._processor("AutoImageProcessor", "--image")
            inputs = self._processed(processor, images=image)
        else:
            processor = self._processor("AutoProcessor", "--image")
            mark, text = getattr(processor, "image_token", None), asked.text or ""
            if isinstance(mark, str) and mark not in text:
                text = f"{mark}\n{text}"
            inputs = self._processed(processor, images=image, text=text)
        if "input_ids" in inputs:
            ids = inputs["input_ids"][0].tolist()
            places.text = of_tokens(self._tokens.label_of_each(ids), "input_ids")
        image_processor = getattr(processor, "image_processor", processor)
        image_places(places, inputs, self.model.config, image_processor, image.size[::-1], tile=self._sequence)
        return inputs

    def _processed(self, processor: Any, **given: Any) -> dict[str, Any]:
        try:
            with quiet(self._library):
                return dict(processor(**given, return_tensors="pt"))
        except Exception as error:  # of any kind: its settings are a stranger's
            kind = type(processor).__name__
            raise DataError(f"{kind} of {self._folder} gives up on the input: {said_by(error)}") from error

    def _processor(self, kind: str, flag: str) -> Any:
        try:
            with quiet(self._library):
                return getattr(self._library, kind).from_pretrained(
                    self._folder, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:
            why = f"transformers loads none from {self._folder}: {said_by(error)}"
            raise ArgumentError(f"{flag} needs a processor, and {why}") from error

    # -- targets -----------------------------------------------------------------------------------------

    def _with_target(self, inputs: dict[str, Any], target: str | None) -> tuple[dict[str, Any], list[int], list[int]]:
        if target is None:
            read, written = self._own_target(inputs)
        else:
            written = self._tokens.target(target)
            if not written:
                raise DataError("there is nothing to look at in an empty target")
            self._check(written)
            read = self._shifted(written)
        return {**inputs, "decoder_input_ids": torch.tensor([read])}, written, read

    def _shifted(self, written: list[int]) -> list[int]:
        """The tokens that a decoder reads for those that it is to write: its begin mark before all but the last."""
        if (own := getattr(self.model, "prepare_decoder_input_ids_from_labels", None)) is not None:
            read: list[int] = own(labels=torch.tensor([written], device=self.model.device))[0].tolist()
            return read
        marks = (getattr(self.model.config, f"{name}_token_id", None) for name in ("decoder_start", "bos", "pad"))
        return [next((mark for mark in marks if isinstance(mark, int)), 0), *written[:-1]]

    def _own_target(self, inputs: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        if not self.model.can_generate():
            raise ArgumentError(f"{self._kind} writes nothing by itself: give --target")
        limit = getattr(self.model.config, "max_target_positions", None) or self._positions() or 2 * MOST_WRITTEN
        most = min(MOST_WRITTEN, limit // 2)
        try:
            with quiet(self._library):
                if (self._folder / "generation_config.json").is_file():
                    kind = self._library.GenerationConfig
                    self.model.generation_config = kind.from_pretrained(self._folder, local_files_only=True)
                found = self.model.generate(**self._moved(inputs), max_new_tokens=most, num_beams=1, do_sample=False)
        except Exception as error:
            raise DataError(f"{self._kind} wrote nothing by itself, so give --target ({said_by(error)})") from error
        row = found[0].tolist()
        if len(row) < 2:
            raise DataError(f"{self._kind} wrote nothing by itself: give --target")
        return row[:-1], row[1:]

    # -- running -----------------------------------------------------------------------------------------

    def _moved(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        device = self.model.device
        return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()}

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        spared: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}  # neither is looked at
        given = {name: one for name, one in inputs.items() if name in self._takes or "kwargs" in self._takes}
        given |= {name: one for name, one in spared.items() if name in self._takes}
        try:
            with quiet(self._library), IndexCheck() if self.model.device.type != "cpu" else nullcontext():
                return self.model(**self._moved(given))
        except RegardError:
            raise
        except Exception as error:  # of any kind: the model is a stranger's
            why = f"{type(error).__name__}: {said_by(error)}"
            raise DataError(f"{self._kind} does not read this{self._limit(inputs)}: {why}") from error

    def _positions(self) -> int | None:
        config = self.model.config.get_text_config()
        found = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return found if isinstance(found, int) else None

    def _limit(self, inputs: Mapping[str, Any]) -> str:
        most, ids = self._positions(), inputs.get("input_ids")
        if ids is None or most is None or ids.shape[-1] <= most - 2:
            return ""
        return f" (it has {most} positions, and the text {ids.shape[-1]} tokens)"

    def _refuse_random(self, seen: Seen) -> None:
        if not self.absent:
            return
        stacks = {name.split(".0.")[0] for name in (call.name for call in seen.calls)}
        table = self._table()
        random = {id(one) for name, one in self.model.named_parameters() if name in self.absent}
        inside = [name for name in self.absent if any(name.startswith(f"{stack}.") for stack in stacks)]
        if inside or (table is not None and any(id(one) in random for one in table.parameters())):
            raise RunFolderError(
                f"{self._folder} has no weights for {len(self.absent)} parameters of {self._kind}, "
                f"such as {(inside or self.absent)[0]}: its maps would be of random weights"
            )

    def _of_sequence(self, whole: Mapping[str, AttentionMap]) -> dict[str, AttentionMap]:
        counts = {name: prod(one.leading[:-1]) for name, one in whole.items()}
        if not 0 <= self._sequence < max(counts.values()):
            raise ArgumentError(f"--sequence must be from 0 to {max(counts.values()) - 1}, got {self._sequence}")
        places = {name: 0 if count == 1 else self._sequence for name, count in counts.items()}
        return {name: of_sequence(one, places[name]) for name, one in whole.items() if places[name] < counts[name]}

    # -- labels ------------------------------------------------------------------------------------------

    def _axes(self, side: MapSide | None, shape: Sequence[int], places: InputLabels) -> ClaimedAxes:
        *lead, _, queries, keys = shape
        of_input = [
            places.of(count, sequences=prod(lead), sequence=0 if prod(lead) == 1 else self._sequence)
            for count in (queries, keys)
        ]
        if side in (None, "encoder"):
            return of_input[0], of_input[1]
        assert places.written is not None and places.read is not None  # noqa: PT018 (it is no test)
        return [places.written], of_input[1] if side == "cross" else [places.read]

    def _entrances(
        self, whole: Mapping[str, AttentionMap], maps: Container[str], sides: Mapping[str, MapSide]
    ) -> dict[str, MapPlace]:
        modules, calls, found = dict(self.model.named_modules()), Counter[str](), dict[str, MapPlace]()
        for name, one in whole.items():
            path = name.split(" [")[0]
            *lead, _, queries, keys = one.shape
            sequence = 0 if prod(lead) == 1 else self._sequence
            if name in maps:
                found[name] = MapPlace(modules[path], calls[path], prod(lead), sequence, queries, keys,
                                       sides.get(name) == "cross")  # fmt: skip
            calls[path] += 1
        return found

    def _marks(self) -> frozenset[int]:
        configs = (self.model.config, self.model.config.get_text_config())
        named = (value for one in configs for key, value in one.to_dict().items() if "token_i" in key)
        flat = (one for value in named for one in (value if isinstance(value, list) else [value]))
        return frozenset(self._tokens.special) | {one for one in flat if isinstance(one, int)}

    def _vocabulary(self) -> int:
        size = getattr(self._table(), "num_embeddings", None) or self.model.config.get_text_config().to_dict().get(
            "vocab_size"
        )
        return size if isinstance(size, int) else 1


def said_by(error: Exception) -> str:
    return f"{' '.join(str(error).split()).split('. ')[0]:.200}"


class IndexCheck(TorchFunctionMode):
    """Raise IndexError for an index outside a table of embeddings, as torch does on the CPU.

    On CUDA torch raises nothing there: a device-side assertion makes every later call of the process fail.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.embedding, torch.nn.functional.embedding):
            indices, weight = args[:2] if function is not torch.embedding else args[1::-1]
            if indices.numel():
                least, most = (int(one) for one in indices.aminmax())
                if least < 0 or most >= len(weight):
                    raise IndexError(f"index {most if least >= 0 else least} of a table of {len(weight)} embeddings")
        return function(*args, **(kwargs or {}))


class ForeignTokens:
    def __init__(self, folder: Path, library: Any) -> None:
        self._folder = folder
        self._own = _tokenizer(folder, library)
        self.special = set() if self._own is None else set(self._own.all_special_ids)
        fast = getattr(self._own, "backend_tokenizer", None)
        self._byte_level = fast is not None and is_byte_level(fast)

    @property
    def size(self) -> int:
        return 0 if self._own is None else len(self._own)

    @property
    def is_empty(self) -> bool:
        """Whether it has special tokens alone, as transformers makes one up for a vocabulary that it cannot read."""
        return self._own is not None and len(self.special) >= self.size

    @property
    def unknown_id(self) -> int | None:
        """The token for text outside the vocabulary; None where a text may have it for another reason."""
        own = self._own
        if own is None or self._byte_level:
            return None
        others = (own.bos_token_id, own.eos_token_id, own.pad_token_id, own.cls_token_id, own.sep_token_id)
        return None if own.unk_token_id in others else own.unk_token_id

    def encode(self, text: str, **options: Any) -> list[int]:
        if self._own is None:
            raise ArgumentError(f"{self._folder} has no tokenizer: give ids of tokens by --tokens 5 17 or --ids FILE")
        try:
            found: list[int] = self._own(**(options or {"text": text}), verbose=False)["input_ids"]
        except Exception as error:  # of any kind: a tokenizer of a stranger
            raise DataError(f"the tokenizer of {self._folder} gives up on the text: {said_by(error)}") from error
        return found

    def target(self, text: str) -> list[int]:
        if self._own is not None:
            return self.encode("", text_target=text)
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ArgumentError(
                f"{self._folder} has no tokenizer: --target takes ids of tokens, such as '5 17', got {text!r:.60}"
            ) from None

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        if self._own is None:
            return [str(token) for token in ids]
        pieces = [piece or f"#{token}" for piece, token in zip(self._own.convert_ids_to_tokens(ids), ids, strict=True)]
        return label_of_each(pieces, [token in self.special for token in ids], byte_level=self._byte_level)


def _tokenizer(folder: Path, library: Any) -> Any:
    """The folder's own tokenizer; None if it has no file of one. transformers then makes an empty one up."""
    try:
        with quiet(library):
            found = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists():
            raise DataError(f"{folder}: transformers cannot load its tokenizer: {error!s:.300}") from error
        return None
    names = {"tokenizer.json", "tokenizer_config.json", *type(found).vocab_files_names.values()}
    return found if any((folder / name).is_file() for name in names) else None
