"""`regard.watch`: every attention call of a PyTorch model becomes an `AttentionMap`."""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from torch import Tensor, nn

from regard.errors import ArgumentError, NotKeptError, NotSeenError, ShapeError, require
from regard.lazy import Displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.indexing import is_integer
from regard.maps.sources.summary import Summarize
from regard.watching.generations import OfRuns, joined_map, separate
from regard.watching.hooks.open_threads import OpenThreads
from regard.watching.kept.retention import RetentionPolicy, Where
from regard.watching.module_names import Names, chooser, modules_of, not_seen
from regard.watching.observed import Observed, Record
from regard.watching.report import Report, count, given_up, missed_by, over_blocks, report

if TYPE_CHECKING:
    from regard.watching.checks.finding import Checked

Key = tuple[str, int]


def watch(
    model: nn.Module,
    names: Names = None,
    *,
    keep: Where | Summarize = "factors",
    verify: bool = False,
    copy: bool = False,
    grad: bool = False,
    values: bool = False,
    gradients: bool = False,
) -> "Seen":
    """Watch a model: inside the `with` block, each of its attention calls is recorded as an exact, lazy map.

    The model is not changed, and its results stay the same bit for bit. Its attention runs in the same kernel
    as without a watch; a map holds the queries and keys the model made anyway, and one number for each
    row. Modules have to be called as usual, as `module(x)`: if the `forward` of one of torch's own layers is
    called by name, the layer does not take its fused path while it is watched, and its last bits differ.

    Args:
        model: any module on `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and the layers made of it,
            `regard.attention`, or a softmax multiplied with values.
        names: the modules to watch, by path: a name (the module and all inside it; `*` is a wildcard), a list of names,
            or a function from a path to bool. None watches all.
        keep: "factors" keeps queries and keys on their device; "cpu" moves them to the CPU; "summary" keeps only
            statistics, computed as the model runs, so that memory stays small with any number of layers. A
            `regard.Summarize(...)` chooses the statistics and their size.
        verify: rebuild each whole output from its map as the model runs, and keep the error for `report()`. One row of
            each call is always rebuilt: a map whose row is not the model's refuses to be read.
        copy: copy queries and keys. Needed only if the model overwrites them later; reading the map then raises an
            error.
        grad: let the maps carry gradients to the model's own queries and keys, so a statistic can be a loss, alone or
            beside the task's. Calls without gradients are then refused, and reported. By default maps are detached.
        values: keep the values of each call too, for `map.value_norms()` and the gradients of weights.
        gradients: keep the gradient of each call's output in a backward pass, for `map.gradient()` (dL/dP),
            `map.attribution()` and `map.relevance()`. It needs the values.

    In all cases the model's outputs and the gradients of its parameters keep their bits. A compiled model, or a
    compiled part of one, runs uncompiled while the watch is open, with the bits of the uncompiled model, and compiled
    afterwards.

    Raises:
        ArgumentError: no module has one of the names, `keep` is unknown, or statistics only
            (`keep="summary"`) are combined with gradients or values.

    >>> import torch
    >>> class Block(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> model = nn.Sequential(Block(), Block())
    >>> with watch(model) as seen:
    ...     output = model(torch.eye(3)[None, None])
    >>> list(seen)
    [('0', 0), ('1', 0)]
    >>> seen["0"][0, 0, 1]
    tensor([0.3595, 0.6405, 0.0000])
    >>> with watch(model, values=True, gradients=True) as seen:
    ...     output = model(torch.eye(3, requires_grad=True)[None, None])
    >>> output[0, 0, 2, 2].backward()
    >>> seen["1"].gradient()[0, 0, 2]
    tensor([0.0000, 0.0000, 0.4711])
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"watch() takes a torch.nn.Module, got {type(model).__name__}")
    summary = Summarize() if keep == "summary" else keep if isinstance(keep, Summarize) else None
    if summary is None and keep not in get_args(Where):
        raise ArgumentError(f"keep must be one of {', '.join(get_args(Where))} or a Summarize(...); got {keep!r}")
    for name, one in {"verify": verify, "copy": copy, "grad": grad, "values": values, "gradients": gradients}.items():
        require(one, bool, name, "True or False")
    modules = modules_of(model)
    where: Where = "summary" if summary else "cpu" if keep == "cpu" else "factors"
    if summary and (grad or values or gradients):
        raise ArgumentError(
            "keep='summary' lets queries, keys and values go as the model runs: grad, values and gradients need "
            "keep='factors' or keep='cpu'"
        )
    policy = RetentionPolicy(where, copy=copy, graph=grad, values=values, gradients=gradients)
    return Seen(Record(model, modules, chooser(names, modules), policy, verify=verify, summary=summary))


class Seen(Displayed):
    """The maps a watch has seen: a mapping from (module path, number of its call) to maps, in call order.

    `seen["encoder.0"]` is the map of a module called once, `seen[name, 2]` that of a third call, and
    `seen.calls_of(name)` the list of all. `print(seen.report())` lists the seen calls, and the missed with reasons.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._open_in = OpenThreads()

    def __reduce__(self) -> NoReturn:
        """Raise ArgumentError: a watch is neither pickled nor copied."""
        raise ArgumentError(
            "what a watch has seen is bound to its model and can be neither copied nor pickled: copy or save its maps, "
            "as in copy.deepcopy(dict(seen.items())) or seen[name, 0].save(path)"
        )

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by path; the model itself is ""."""
        return self.record.modules

    @property
    def calls(self) -> list[Observed]:
        return self.record.calls

    def __enter__(self) -> "Seen":
        self._open_in.enter(self.record)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open_in.leave(self.record)

    @contextmanager
    def attach(self) -> Iterator["Seen"]:
        """Watch another thread too: that thread must run the model inside `with seen.attach():`.

        Raises:
            ArgumentError: the watch itself is not entered, or it watches this thread already.
        """
        with self._open_in.attach(self.record, "regard.watch"):
            yield self

    @property
    def maps(self) -> list[AttentionMap]:
        return [call.map for call in self.calls if call.map is not None]

    def __getitem__(self, key: Key | str) -> AttentionMap:
        """The map of a (module path, call number); or for a path alone, the map of its only call.

        Raises:
            NotSeenError: the call was not seen, or could not be read; the message says why.
            ArgumentError: the key is neither a path nor a path with a number, or that module was called several times.
        """
        name, index = _name_and_number(key)
        if index is not None:
            return self._maps_of(name, index)[0]
        maps = self._maps_of(name)
        if len(maps) > 1:
            raise ArgumentError(
                f"{name!r} has maps of {len(maps)} calls: seen.calls_of({name!r}) is their list, and "
                f"seen[{name!r}, {self.record.count[name] - 1}] the last"
            )
        return maps[0]

    def calls_of(self, name: str) -> list[AttentionMap]:
        """The maps of all calls of one module, in their order; those of a generation are joined by `joined`.

        Raises:
            NotSeenError: nothing of that name was seen, or a call could not be read; the message says why.

        >>> import torch
        >>> layer = nn.MultiheadAttention(4, 2, batch_first=True)
        >>> with torch.no_grad(), watch(layer) as seen:
        ...     outputs = [layer(x, x, x) for x in torch.randn(3, 1, 5, 4)]
        >>> [one.shape for one in seen.calls_of("")]
        [torch.Size([1, 2, 5, 5]), torch.Size([1, 2, 5, 5]), torch.Size([1, 2, 5, 5])]
        """
        require(name, str, "name", "the path of a module")
        return self._maps_of(name)

    def _maps_of(self, name: str, index: int | None = None) -> list[AttentionMap]:
        calls = [call for call in self.calls if call.name == name]
        if index is not None:
            calls = [call for call in calls if call.index == (index if index >= 0 else self.record.count[name] + index)]
        if not calls:
            raise NotSeenError(self._why_not(name, index))
        maps = [call.map for call in calls if call.map is not None]
        if len(maps) < len(calls):
            raise NotSeenError(
                f"{name!r} was seen but could not be read: {next(c for c in calls if c.map is None).notes[0]}"
            )
        return maps

    def softmax(self, key: Key | str) -> AttentionMap:
        """The softmax of written-out attention, before a mask, a gate, a mix of heads or dropout.

        `seen[key]` has the weights before the product with the values. Without a change between, it is the same map.

        Raises:
            NotSeenError, ArgumentError: as `seen[key]`.
            NotKeptError: only statistics were recorded, and of the weights alone.
        """
        found = self[key]
        if self.record.policy.where == "summary":
            raise NotKeptError(f"the softmax of {key!r} was not kept: watch with keep='factors'")
        softmax = next(call.softmax for call in self.calls if call.map is found)
        return found if softmax is None else softmax

    def over_tokens(self, name: str, index: int = -1) -> AttentionMap:
        r"""The map of a call with tokens for keys, where some keys are blocks of tokens (DeepSeek-V4): [A | B] becomes
        $A + B \bar C$, with $\bar C$ the mean over channels of the compressor's map. Other maps come as they are.

        Args:
            name: the path of a module.
            index: the number of its call; the last by default.

        Raises:
            NotSeenError: the call was not seen, or could not be read.
            NotKeptError: the shares of tokens in these blocks are not known, as in single steps with a cache.
        """
        found = self[name, index]
        call = next(call for call in self.calls if call.name == name and call.map is found)
        if call.over_tokens is None:
            raise NotKeptError(f"{name!r}: {over_blocks(self.record)[name]}")
        return call.over_tokens

    def zero_grad(self) -> None:
        """Forget the gradients of earlier backward passes, so that the next pass is the first one again. After two
        passes without this between them, `map.gradient()` would be ambiguous."""
        if self.record.policy.gradients is not None:
            self.record.policy.gradients.clear()

    def _why_not(self, name: str, index: int | None) -> str:
        if calls := self.record.count[name]:
            return f"{name!r} was called {calls} times, numbered from 0; there is no call {index}"
        named = (*self.record.unreadable, *self.record.others)
        reasons = [reason for path, reason in named if path == name]
        return f"{name!r}: {reasons[0]}" if reasons else not_seen(name, [call.name for call in self.calls])

    def joined(self, name: str) -> AttentionMap:
        """Join the maps of one module's calls, row under row, if all of them are the steps of one generation.

        Each key has its position in the whole generation, also under a sliding window, where a single call counts from
        the first cached key. See `generations` for the rule.

        Raises:
            NotSeenError: nothing of that name was seen, or a call of it could not be read.
            ShapeError: the calls are not those of one generation; the message lists the sequences and the reasons.
            NotKeptError: only statistics of the steps were recorded, none of them joinable.
        """
        self.calls_of(name)
        if len(sequences := self.record.sequences.of[name]) > 1:
            raise ShapeError(separate(name, sequences))
        return self.generations(name)[0]

    def alignment(self, layer: int = -1) -> AttentionMap:
        """The attention of a decoder to its source, by one of its layers: of a translator, the alignment.

        Args:
            layer: the layer among those that attend to another sequence, in the order of their calls; -1 is the last.

        Returns:
            The map (batch..., H, T, S) of all steps of one generation, or of one pass with a given target.

        Raises:
            NotSeenError: no call that was read attends to another sequence.
            ArgumentError: there is no such layer.
            ShapeError, NotKeptError: as `joined`.

        >>> import torch
        >>> from regard.models import Transformer, TransformerConfig
        >>> model = Transformer(TransformerConfig(dim=8, num_heads=2), source_vocab_size=9, target_vocab_size=9).eval()
        >>> with torch.no_grad(), watch(model) as seen:
        ...     logits = model(torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([[4, 5]]))
        >>> seen.alignment().shape
        torch.Size([1, 2, 2, 3])
        """
        # A recurrent decoder begins with the encoder's state: its steps are known by the same keys at each of them.
        steps = {name for name, found in self.record.sequences.of.items() if any(one.grows is False for one in found)}
        read = [call for call in self.calls if call.map is not None]
        names = list(dict.fromkeys(call.name for call in read if call.kind == "cross-attention" or call.name in steps))
        if not names:
            raise NotSeenError("no call that was read attends from one sequence to another: print(seen.report())")
        if not -len(names) <= layer < len(names):
            raise ArgumentError(f"layer must be one of {len(names)} layers ({', '.join(names)}); got {layer}")
        return self.joined(names[layer])

    def generations(self, name: str) -> list[AttentionMap]:
        """Join the maps of one module's calls, each sequence of calls to a map of its own, the earliest first.

        A call continues another if its keys are those of the other, or the last of them (a sliding window), followed by
        one new key for each query; or if it has other queries for the same keys (cross-attention). Any other call
        begins a map of its own: another input, a run without a cache, a cache that changes keys. Rows of the batch in a
        new order (beam search) are followed back from the last step. Rows cut from a cache (assisted decoding) are left
        out.

        Raises:
            NotSeenError: nothing of that name was seen, or a call of it could not be read.
            ShapeError: the parent rows of a step are ambiguous.
            NotKeptError: only statistics of the steps were recorded, none of them joinable.
        """
        by_call = dict(enumerate(self.calls_of(name)))
        if lost := [reason for path, reason in self.record.unreadable if path == name]:
            raise NotSeenError(f"{name!r} was called besides, and rows would be missing here: {lost[0]}")
        sequences = self.record.sequences.of
        others = OfRuns(sequence for found in sequences.values() for sequence in found)
        return [joined_map(name, sequence, by_call, others) for sequence in sequences[name]]

    def __iter__(self) -> Iterator[Key]:
        return iter([(call.name, call.index) for call in self.calls if call.map is not None])

    def __len__(self) -> int:
        return len(self.maps)

    def __contains__(self, key: object) -> bool:
        return any(key in (call.name, (call.name, call.index)) for call in self.calls if call.map is not None)

    def keys(self) -> list[Key]:
        """(module path, call number) of every map, in the order of the calls."""
        return list(self)

    def items(self) -> list[tuple[Key, AttentionMap]]:
        return list(zip(self.keys(), self.maps, strict=True))

    def report(self) -> Report:
        """Report the seen calls, the memory they hold, and the missed calls with reasons; print it."""
        return report(self.record)

    def audit(
        self,
        *,
        causal: bool | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        skip: Names = (),
    ) -> "Checked":
        """Look for faults of the masks at the kernels: lost, transposed, inverted, off by one, not handed on.

        The arguments of the model tell which keys a row may see: masks of padding and runs of the padding token,
        positions that begin anew and ends of packed documents, kinds of tokens, the keys of a cache; its config tells
        windows and directions. They are compared with the mask that reached each kernel.

        Args:
            causal: the expected causality of self-attention: True, or False for a model that sees both sides. None
                decides by the config of a Hugging Face model, by torch's classes and by the cache.
            padding: the real tokens among the keys, bool (B, S), True = real, as in `regard.padding`, where no argument
                of the model tells them.
            documents: the document of each token, integers (B, S), where no argument tells it.
            skip: the modules that the audit need not cover, as `names` of `regard.watch`.

        Returns:
            A sequence of findings, errors first: one for each reason and module, with its share, an example, the cause
                and the remedy; false without an error and a warning. An "info" is a surprising fact, no fault. `print`
                it for the questions that were asked, and those that could not be. Memory is linear.

        Raises:
            ShapeError: `padding` is no bool tensor (B, S), or `documents` no integer tensor (B, S).
            NotSeenError: nothing was found, and modules besides those in `skip` mix positions and were not read.

        >>> import torch
        >>> class Block(nn.Module):
        ...     def forward(self, x):
        ...         upside_down = torch.ones(3, 3, dtype=torch.bool).triu(1)
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=upside_down)
        >>> with watch(Block()) as seen:
        ...     output = seen.modules[""](torch.eye(3)[None, None])
        >>> [(finding.reason, finding.severity) for finding in seen.audit()]
        [('inverted mask', 'error')]
        """
        # Imported on first use: `import regard` stays light.
        from regard.watching.checks.audit import audit
        from regard.watching.checks.audited_call import UserTold

        found = audit(self.record, UserTold(causal, padding, documents))
        if not found.errors:
            given_up(self, skip, "an audit")
        return found

    def __repr__(self) -> str:
        names = len({call.name for call in self.calls if call.map is not None})
        missed = missed_by(self.record)
        tail = f"; {len(missed)} not: print(seen.report())" if missed else ""
        return f"Seen({type(self.modules['']).__name__}: {count(len(self), 'map')} of {count(names, 'module')}{tail})"


def _name_and_number(key: Any) -> tuple[str, int | None]:
    match key:
        case str():
            return key, None
        case (str() as name, number) if is_integer(number):
            return name, operator.index(number)
    raise ArgumentError(
        f"seen[...] takes the path of a module, or (path, number of its call); got {key!r}. seen.maps has all in order"
    )
