"""Packed reading of Gated DeltaNet layers: the convolution and the recurrence start anew with every document.

In a hybrid target tokens also meet in its linear layers, and there in two functions only: `CONVOLUTION`, a short causal
convolution, and `DELTA_RULE`, the recurrence. A layer is known by calling these two of its modelling module by name
(Qwen3.5, Qwen3-Next and others share them); for the time of a packed forward ours stand in their places. What else a
layer may do, the start-up check finds out. On a GPU the convolution is a kernel (recurrent_kernels.py) and the
recurrence flash-linear-attention's, where it is installed; elsewhere plain torch and the module's own, document by
document. Source: Gated Delta Networks (2412.06464).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.device import to_device
from producer.packed import BOUNDS, LINEAR, CannotPack

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
REPEAT = "repeat_interleave"  # by which a layer gives each value head a copy of its head of queries and keys
IS_SILU = {None: False, "silu": True, "swish": True}  # activations of the convolution
KERNEL_TAPS = range(2, 9)  # sizes of a convolution that the kernel takes
NORM_EPS = 1e-6  # of flash-linear-attention and of transformers
TUNED_LENGTH = 600  # tokens of a document when kernels are timed; conversations are of that order
CHUNK = 64  # tokens that flash-linear-attention's kernels take at once; given to it, so that our indices fit

Rule = Callable[..., Any]


class Recurrent(NamedTuple):
    """A modelling module whose functions have to be replaced, and what is known of its layers."""

    module: str
    repeats: int
    """Times that each head of queries and keys comes, one after the other, where there are as many as value heads."""


def modules_of(layers: Iterable[nn.Module], kinds: Iterable[str]) -> tuple[Recurrent, ...]:
    """The modelling modules whose functions have to be replaced to read `layers` packed; none: ().

    `kinds`: the layers' kinds, in order. Raises CannotPack for a linear layer that does not work by the two functions.
    """
    repeats: dict[str, set[int]] = {}
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=False)):
        recurrent = getattr(layer, "linear_attn", None)
        if recurrent is None and kind != LINEAR:
            continue
        code = getattr(inspect.unwrap(type(recurrent).forward), "__code__", None) if recurrent is not None else None
        if code is None or not {CONVOLUTION, DELTA_RULE} <= set(code.co_names):
            raise CannotPack(f"layer {number} is recurrent in a way of its own: {type(recurrent or layer).__name__}")
        repeats.setdefault(type(recurrent).__module__, set()).add(_repeats(recurrent, code.co_names))
    return tuple(Recurrent(name, min(found) if len(found) == 1 else 1) for name, found in sorted(repeats.items()))


def _repeats(recurrent: Any, names: Iterable[str]) -> int:
    """How often this layer, whose forward uses `names`, repeats heads of queries and keys; 1 where it is not known."""
    keys, values = getattr(recurrent, "num_k_heads", None), getattr(recurrent, "num_v_heads", None)
    if REPEAT not in names or not isinstance(keys, int) or not isinstance(values, int):
        return 1
    return values // keys if keys > 0 and values % keys == 0 else 1


@contextmanager
def by_document(modules: Iterable[Recurrent]) -> Iterator[None]:
    """Let the layers of these modelling modules take each document of BOUNDS for itself, for one forward."""
    saved = []
    try:
        for recurrent in modules:
            rule = _delta_rule_of(recurrent)  # before the module's own is replaced: it is looked up there
            words = vars(sys.modules[recurrent.module])
            saved.append((words, words[CONVOLUTION], words[DELTA_RULE]))
            words[CONVOLUTION], words[DELTA_RULE] = convolution, rule
        yield
    finally:
        for words, own_convolution, own_rule in saved:
            words[CONVOLUTION], words[DELTA_RULE] = own_convolution, own_rule


@torch.inference_mode()
def tune(layers: Iterable[nn.Module], tokens: int, hidden: int) -> bool:
    """Run the first linear layer on a row [1, tokens, hidden] of random states; returns whether there is one.

    flash-linear-attention keeps the first timing of a kernel by the sizes of its heads, whatever the length: without
    this, the start-up check's two short documents would choose for whole packs. Raises CannotPack as `modules_of`.
    """
    for layer in layers:
        recurrent: Any = getattr(layer, "linear_attn", None)
        if recurrent is not None:
            modules = modules_of([layer], [LINEAR])
            weight: Tensor = recurrent.conv1d.weight
            lengths = [TUNED_LENGTH] * (tokens // TUNED_LENGTH)
            BOUNDS.set([*lengths, tokens - sum(lengths)] if tokens > sum(lengths) else lengths, weight.device)
            with by_document(modules):
                recurrent(hidden_states=torch.randn(1, tokens, hidden).to(weight))
            return True
    return False


def convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_words: Any
) -> Tensor:
    """Convolve causally inside each document, one kernel per channel: x [1, C, T], weight [C, k], bias [C] -> as x.

    out[t] = sum over j < k of weight[k-1-j] x[t-j], where token t-j is of t's document. Sums in float32; waits for
    nothing. Raises CannotPack for an activation that it does not know.
    """
    if activation not in IS_SILU:
        raise CannotPack(f"a convolution with activation {activation}")
    x, silu = hidden_states.transpose(1, 2), IS_SILU[activation]
    takes = weight.shape[1] in KERNEL_TAPS and x.shape[0] == 1 and x.stride(2) == 1
    return (packed_convolution if takes else plain_convolution)(x, weight, bias, silu).transpose(1, 2)


@torch.library.custom_op("dflash_ring::packed_convolution", mutates_args=())
def packed_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """`plain_convolution` as an operator of its own: one kernel on a GPU. x [1, T, C], its channels side by side."""
    if not x.is_cuda:
        return plain_convolution(x, weight, bias, silu)
    from producer import recurrent_kernels  # Triton is there on a GPU machine only

    return recurrent_kernels.convolve(x, weight, bias, BOUNDS.positions.to(x.device), silu)


@packed_convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty(x.shape)


def plain_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """`convolution` of x [1, T, C] as shifted additions, then SiLU where asked for -> [1, T, C], contiguous."""
    taps = weight.shape[1]
    tokens_before = BOUNDS.positions.to(x.device)[:, None]
    out = x.float() * weight[:, -1].float()
    for back in range(1, taps):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        out = out + earlier.masked_fill(tokens_before < back, 0).float() * weight[:, taps - 1 - back].float()
    out = out if bias is None else out + bias.float()
    return (F.silu(out) if silu else out).to(x.dtype).contiguous()


@torch.library.custom_op("dflash_ring::packed_delta_rule", mutates_args=())
def packed_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalise: bool, module: str) -> Tensor:
    """Run the gated delta rule over each document of BOUNDS from an empty state.

    Shapes: q, k [1, T, heads, d], v [1, T, value heads, e], g (log decay) and beta [1, T, value heads] -> as v. A head
    of q and k serves value heads / heads of v, one after the other. `normalise`: make the rows of q and k unit vectors.
    `module`: the modelling module whose own function serves where flash-linear-attention does not. An operator of its
    own, so that torch.compile need not know BOUNDS.
    """
    return _delta_rule(q, k, v, g, beta, normalise, module)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalise: bool, module: str) -> Tensor:
    fast = flash_linear_attention() if q.is_cuda else None
    if fast is not None:
        starts = BOUNDS.starts.to(q.device)
        indices = _chunk_indices(starts)
        with_bounds = {"cu_seqlens": starts, "chunk_indices": indices, "chunk_size": CHUNK}
        out: Tensor = fast(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=normalise, **with_bounds)[0]
        return out.contiguous()
    rule, groups = _own_rule(module), v.shape[2] // q.shape[2]
    if groups > 1:  # the rule of transformers 5.17 wants them repeated
        q, k = q.repeat_interleave(groups, dim=2), k.repeat_interleave(groups, dim=2)
    documents = zip(*(tensor.split(BOUNDS.lengths, dim=1) for tensor in (q, k, v, g, beta)), strict=True)
    parts = [
        rule(one_q, one_k, one_v, g=one_g, beta=one_beta, use_qk_l2norm_in_kernel=normalise)[0]
        for one_q, one_k, one_v, one_g, one_beta in documents
    ]
    return torch.cat(parts, dim=1).contiguous()


@packed_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, normalise: bool, module: str) -> Tensor:  # noqa: ARG001
    return v.new_empty(v.shape)


def flash_linear_attention() -> Rule | None:
    """flash-linear-attention's chunked gated delta rule; None where the package is not installed or does not load."""
    return _library()[0]


@functools.cache
def _library() -> tuple[Rule | None, str]:
    """The rule, or why there is none."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, RuntimeError) as error:
        return None, (str(error) or repr(error)).splitlines()[0]
    rule: Rule = chunk_gated_delta_rule
    return rule, ""


def warning(layers: Iterable[nn.Module], device: torch.device) -> str | None:
    """One line where `layers` are a hybrid's, on a GPU, and flash-linear-attention does not serve them; else None."""
    if device.type != "cuda" or all(getattr(layer, "linear_attn", None) is None for layer in layers):
        return None
    rule, why = _library()
    if rule is not None:
        return None
    return (
        f"a hybrid target without flash-linear-attention ({why}): its recurrent layers are read document by document "
        'in plain torch, which is slow; pip install -e ".[hybrid]"'
    )


class _Chunks:
    """The chunk indices of the last row; all layers of a forward ask for the same."""

    starts: Tensor | None = None
    indices: Tensor | None = None


def chunk_pairs(lengths: list[int]) -> Tensor:
    """(document, chunk in the document) of each chunk of CHUNK tokens, in order: [chunks, 2] int32, on the host."""
    pairs = [(number, chunk) for number, length in enumerate(lengths) for chunk in range(-(-length // CHUNK))]
    return torch.tensor(pairs, dtype=torch.int32)


def _chunk_indices(starts: Tensor) -> Tensor:
    """chunk_pairs of BOUNDS on `starts`' device; left to the library, the host would wait for the device to get it."""
    if _Chunks.starts is not starts or _Chunks.indices is None:
        _Chunks.starts = starts
        _Chunks.indices = to_device(chunk_pairs(BOUNDS.lengths), starts.device)
    return _Chunks.indices


@functools.cache
def _own_rule(module: str) -> Rule:
    rule: Rule = inspect.unwrap(vars(sys.modules[module])[DELTA_RULE])
    return rule


def unit(x: Tensor) -> Tensor:
    """Make the rows of x [..., d] unit vectors as flash-linear-attention does: in float32, then in x's dtype again."""
    rows = x.float()
    return (rows * (1.0 / torch.sqrt((rows * rows).sum(-1, keepdim=True) + NORM_EPS))).to(x.dtype)


@functools.cache
def _delta_rule_of(recurrent: Recurrent) -> Rule:
    """Stand-in for a modelling module's delta rule; always the same object, which compiled layers are bound to.

    What comes before flash-linear-attention's kernels is done here, where it is compiled into what makes q, k and v:
    heads that are copies of others are left out, rows are made unit vectors, and each tensor is laid out as it is read.
    """
    module, repeats = recurrent
    _own_rule(module)
    has_library = flash_linear_attention() is not None

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **_words: Any,
    ) -> tuple[Tensor, None]:
        if initial_state is not None or output_final_state:
            raise CannotPack("a recurrent layer that keeps its state")
        if repeats > 1 and query.shape[2] == key.shape[2] == value.shape[2]:
            query, key = query[:, :, ::repeats], key[:, :, ::repeats]
        normalise = use_qk_l2norm_in_kernel
        if normalise and has_library and query.is_cuda:
            query, key, normalise = unit(query), unit(key), False
        q, k, v, decay, strength = (tensor.contiguous() for tensor in (query, key, value, g, beta))
        return packed_delta_rule(q, k, v, decay, strength, normalise, module), None

    return rule
