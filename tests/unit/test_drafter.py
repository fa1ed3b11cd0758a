"""The drafter against an independent forward: one block at a time, one head at a time, in float64, with loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from configs.drafter_shape import FULL, SLIDING, DrafterShape, layer_types_of
from consumer.anchors import Anchors, lay_out_blocks, positions_in_document
from consumer.attention import dense_attention, document_attention, flex_attention_of
from consumer.drafter import Drafter
from consumer.linear import ContextGradient, ContextProjection, Projection

MASK, EPS, THETA = 3, 1e-6, 500.0


def shape_of(causal: bool = True, window: int = 9, **changes) -> DrafterShape:
    facts = {
        "hidden": 24, "intermediate": 40, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "num_taps": 3, "block_size": 4, "layer_types": (SLIDING, FULL), "sliding_window": window,
        "sliding_causal": causal, "rms_eps": EPS, "rope_theta": THETA, "mask_token_id": MASK, "vocab_size": 50,
    }  # fmt: skip
    return DrafterShape(**(facts | changes))


def norm(x, weight):
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + EPS) * weight


def turn(vector, position):
    half = len(vector) // 2
    out = vector.clone()
    for i in range(half):
        angle = position * THETA ** (-2 * i / len(vector))
        out[i] = vector[i] * math.cos(angle) - vector[i + half] * math.sin(angle)
        out[i + half] = vector[i + half] * math.cos(angle) + vector[i] * math.sin(angle)
    return out


def naive_block(weights, shape, features, embedding, ids, start, anchor, has_context):
    """States [B, H] of one block, from the definition."""
    first = int(start[anchor])
    context = [norm(weights["fc.weight"] @ features[t], weights["hidden_norm.weight"]) for t in range(first, anchor)]
    context = context if has_context else []
    x = [embedding[ids[anchor]]] + [embedding[MASK]] * (shape.block_size - 1)
    groups, size = shape.num_heads // shape.num_kv_heads, shape.head_dim
    for index, kind in enumerate(shape.layer_types):

        def of(name, index=index):
            return weights[f"layers.{index}.{name}.weight"]

        y = [norm(row, of("input_layernorm")) for row in x]
        mixed = []
        for k in range(shape.block_size):
            heads = []
            for head in range(shape.num_heads):
                mine = slice(head * size, head * size + size)
                kv = slice(head // groups * size, head // groups * size + size)
                own = anchor - first + k
                query = turn(norm(of("self_attn.q_proj")[mine] @ y[k], of("self_attn.q_norm")), own)
                scores, values = [], []
                sources = [(position, row, None) for position, row in enumerate(context)]
                sources += [(anchor - first + slot, y[slot], slot) for slot in range(shape.block_size)]
                for position, row, slot in sources:
                    if kind == SLIDING and slot is None and own - position >= shape.sliding_window:
                        continue
                    if kind == SLIDING and slot is not None and shape.sliding_causal and slot > k:
                        continue
                    key = turn(norm(of("self_attn.k_proj")[kv] @ row, of("self_attn.k_norm")), position)
                    scores.append(query @ key / math.sqrt(size))
                    values.append(of("self_attn.v_proj")[kv] @ row)
                share = torch.softmax(torch.stack(scores), 0)
                heads.append(sum(s * v for s, v in zip(share, values, strict=True)))
            mixed.append(of("self_attn.o_proj") @ torch.cat(heads))
        x = [row + update for row, update in zip(x, mixed, strict=True)]
        for k, row in enumerate(x):
            z = norm(row, of("post_attention_layernorm"))
            gate, up = of("mlp.gate_proj") @ z, of("mlp.up_proj") @ z
            x[k] = row + of("mlp.down_proj") @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([norm(row, weights["norm.weight"]) for row in x])


def setup(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(shape).double()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    start = torch.tensor([0] * 14 + [14] * 10 + [-1] * 4, dtype=torch.int32)
    ids = torch.randint(4, 50, (28,), generator=generator, dtype=torch.int32)
    features = torch.randn(28, shape.num_taps * shape.hidden, generator=generator, dtype=torch.float64)
    embedding = torch.randn(50, shape.hidden, generator=generator, dtype=torch.float64)
    anchors = Anchors(torch.tensor([0, 5, 12, 16, 22, 27]), torch.tensor([True] * 5 + [False]))
    return drafter, start, ids, features, embedding, anchors


def run(drafter, start, ids, features, embedding, anchors, make=dense_attention, shared=False, **more):
    shape = drafter.shape
    blocks = lay_out_blocks(anchors, ids, (start >= 0).to(torch.uint8), start, shape.block_size, MASK)
    tokens = torch.cat([blocks.input_ids[:, 0], torch.tensor([MASK])]) if shared else blocks.input_ids.flatten()
    return drafter(
        embedding[tokens], drafter.context(features), blocks.positions.flatten(), positions_in_document(start),
        make(anchors, start, shape), shared_mask_row=shared, **more,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["sliding", "mixed", "full"])
def test_forward_equals_the_naive_one_in_float64(layout, causal):
    shape = shape_of(causal, layer_types=layer_types_of(layout, 2))
    drafter, start, ids, features, embedding, anchors = setup(shape)
    found = run(drafter, start, ids, features, embedding, anchors).view(6, 4, -1)
    weights = {name: value.detach() for name, value in drafter.state_dict().items()}
    for j, anchor in enumerate(anchors.position.tolist()):
        kept = bool(anchors.keep[j])
        if kept:
            wanted = naive_block(weights, shape, features, embedding, ids, start, anchor, kept)
            torch.testing.assert_close(found[j], wanted, rtol=1e-6, atol=1e-6)  # angles are float32


@pytest.mark.parametrize("make", [document_attention, flex_attention_of])
@pytest.mark.parametrize("layout", ["sliding", "mixed", "full"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_attention_gives_the_dense_result(layout, make):
    given = setup(shape_of(layer_types=layer_types_of(layout, 2)))
    with torch.no_grad():
        torch.testing.assert_close(run(*given, make=make), run(*given), rtol=1e-10, atol=1e-10)


def test_document_attention_has_the_dense_gradients():
    given = setup(shape_of())
    drafter = given[0]
    grads = []
    for make in (dense_attention, document_attention):
        drafter.zero_grad()
        run(*given, make=make).sin().sum().backward()
        grads.append([parameter.grad.clone() for parameter in drafter.parameters()])
    for wanted, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_one_row_for_all_mask_slots_and_no_slot_0_give_the_same_states_and_gradients():
    given = setup(shape_of())
    drafter = given[0]
    grads = []
    for more in ({}, {"shared": True, "predicted_only": True}):
        drafter.zero_grad()
        states = run(*given, **more)
        states = states if more else states.view(6, 4, -1)[:, 1:].flatten(0, 1)
        states.sin().sum().backward()
        grads.append([states.detach(), *(parameter.grad.clone() for parameter in drafter.parameters())])
    for wanted, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_p02_another_document_and_later_tokens_change_nothing():
    drafter, start, ids, features, embedding, anchors = setup(shape_of())
    before = run(drafter, start, ids, features, embedding, anchors).view(6, 4, -1)
    changed = features.clone()
    changed[:14] += 1.0  # the first document
    changed[22:] -= 1.0  # the anchor at 22 itself, and what follows
    after = run(drafter, start, ids, changed, embedding, anchors).view(6, 4, -1)
    assert torch.equal(before[3:5], after[3:5])
    assert not torch.equal(before[1], after[1])


def test_names_and_count_are_those_of_the_format():
    names = set(Drafter(shape_of(num_layers=5, layer_types=(FULL,) * 5)).state_dict())
    assert len(names) == 58
    layer = {
        "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    wanted = {f"layers.{i}.{part}.weight" for i in range(5) for part in layer}
    assert names == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_num_parameters_counts_them():
    drafter = Drafter(shape_of())
    assert drafter.shape.num_parameters == sum(parameter.numel() for parameter in drafter.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "5 heads, 2 kv heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"layer_types": (FULL,)}, "1 entries for 2 layers"),
        ({"layer_types": (FULL, "linear")}, "unknown layer type 'linear'"),
        ({"mask_token_id": 50}, "mask_token_id 50 is no row"),
        ({"sliding_window": 3}, "at least the block size"),
        ({"rope_theta": 0.0}, "rope_theta must be positive"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of(**changes)


@pytest.mark.parametrize("in_float8", [False, True])
def test_the_contexts_gradient_is_the_sum_over_all_that_read_it(in_float8):
    generator = torch.Generator().manual_seed(0)
    linears = [nn.Linear(32, 32, bias=False) for _ in range(6)]
    g, plain = (torch.randn(16, 32, generator=generator).requires_grad_() for _ in range(2))
    plain.data.copy_(g.data)
    rows = torch.randn(16, 32, generator=generator)
    shared = ContextGradient()
    total = plain_total = torch.zeros(())
    for number in range(3):
        block = Projection(linears[2 * number], linears[2 * number + 1])
        block.in_float8 = in_float8
        total = total + ContextProjection(block)(rows, g, shared)[1].square().sum() * (number + 1)
        apart = ContextProjection(block)(rows, plain, ContextGradient())[1]
        plain_total = plain_total + apart.square().sum() * (number + 1)
    for loss in (total, plain_total):
        loss.backward()
    torch.testing.assert_close(g.grad, plain.grad, rtol=1e-5, atol=1e-5)
    assert shared.total is None
    assert shared.users == 0
