"""Evidence that a module mixes positions, from the functions that it calls.

It is told from a layer of one position at a time by products of activations with each other (linear attention, state
spaces), convolutions, running sums, distances of all pairs, shifts and Fourier transforms.
"""

from typing import Any

from torch import Tensor, nn

from regard.tensors.torch_private import tree_leaves
from regard.watching.origins.streams import base_of, is_learned
from regard.watching.readers.contractions import Contraction
from regard.watching.readers.functions import Args, Func, Kwargs, name_of
from regard.watching.readers.traced_calls import after_traces
from regard.watching.running.thread_state import RunningModule, ThreadState

PRODUCTS = "products of activations with each other"
CONVOLUTION, SUM = "a convolution", "a running sum"
MIXING = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), CONVOLUTION),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), SUM),
    **dict.fromkeys(("fft_fft", "fft_fft2", "fft_fftn", "fft_rfft", "fft_rfft2", "fft_rfftn"), "a Fourier transform"),
    "cdist": "distances of all pairs",
    "pad": "a shift",
}
"""The functions that mix positions, by name, each with its description."""


@after_traces
def observe_mixing(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    name, given, frame = name_of(func), (*args, *kwargs.values()), thread.innermost()
    x, how = given[0], MIXING[name]
    if name == "pad":
        thread.streams.follow(result, *args)
    elif how == CONVOLUTION:
        follow_convolution(thread, result, *(args or kwargs.values()))
    if frame is None or frame.mixes or not isinstance(x, Tensor) or x.dim() < 3 or not x.is_floating_point():
        return
    if how == CONVOLUTION:
        note_convolution(thread, frame.module, x, tuple(given[1].shape[2:]), kwargs.get("stride", args[3:4]))
    elif not (name == "pad" and min(given[1]) >= 0) and not (how == SUM and bool(((x == 0) | (x == 1)).all())):
        frame.mixes = how  # (Sums over a mask count positions.)


def follow_convolution(thread: ThreadState, result: Any, x: Any, *_: object) -> None:
    if isinstance(x, Tensor) and x.is_floating_point():
        if x.dim() > 3:
            thread.streams.begin(x, "patches")
        thread.streams.projected(result, channels_last=False, of=x)


def note_convolution(thread: ThreadState, module: nn.Module, x: Any, kernel: tuple[int, ...], stride: Any) -> None:
    """Note a convolution of several positions that keeps their number; one with a stride makes others (of patches)."""
    strides = tree_leaves(stride)
    if isinstance(x, Tensor) and max(kernel) > 1 and max(strides, default=1) == 1:
        thread.mixed(module, CONVOLUTION, x.shape[2:].numel())


def note_product(thread: ThreadState, frame: RunningModule, contraction: Contraction | None) -> None:
    """Note a product of activations of one batch; traced weights among them are attention, or judged as such. They mix
    positions where both have an axis of their own, and are summed over another: outer products and one matrix for each
    position do not."""
    if contraction is None or len(contraction.operands) != 2 or any(thread.traces.of(t) for t in contraction.operands):
        return
    (one, other), (left, right) = contraction.operands, contraction.labels
    sizes = dict(zip((*left, *right), (*one.shape, *other.shape), strict=True))
    shared, kept = set(left) & set(right), set(contraction.output)
    is_of_one_batch = bool(shared & kept) or max(one.dim(), other.dim()) < 3
    if not is_of_one_batch or all(sizes[label] < 2 for label in shared - kept):
        return
    buffers = {id(buffer) for buffer in frame.module.buffers()}
    if any(is_learned(t) or id(base_of(t)) in buffers or not t.is_floating_point() for t in (one, other)):
        return
    frame.compares = True
    if all(any(sizes[label] > 1 for label in set(own) - shared) for own in (left, right)):
        # One product alone gives scores, as an indexer's or a classifier's; a second one mixes by them.
        frame.mixes, frame.has_pairs = PRODUCTS if frame.has_pairs else "", True
