"""`python launch.py verify`: does an exported drafter compute, and belong to, what it says?

The forward here is written for reading, from the published description alone: one anchor at a time, plain loops,
nothing of consumer/. It takes every setting from config.json as a server does. What it is compared with:

    probe.json   logits of the training-side forward, stored at export (ours only)
    the target   its identity, and logits on its real hidden states, taken from its hidden_states tuple instead of hooks

Shapes: S context tokens, B block slots, K taps, H hidden, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from configs.drafter_shape import SLIDING
from consumer.export.folder import Exported, read_export
from consumer.export.identity import identify, read_json
from consumer.export.probe import ProbeInput, probe_input
from consumer.frozen_head import load_frozen_head
from evaluation.drafter_session import DrafterSession
from evaluation.subject import describe
from producer.target import TargetDescription
from producer.target_source import find_target

TOLERANCE = 1e-3
"""Largest difference of logits, as a share of their root mean square; float32 on both sides."""
NUM_TOKENS = 96


class Finding(NamedTuple):
    """One thing that was checked."""

    good: bool
    text: str

    @property
    def line(self) -> str:
        """How it is shown."""
        return f"{'ok   ' if self.good else 'WRONG'} {self.text}"


class Served(NamedTuple):
    """What a server reads from config.json; both formats."""

    config: dict[str, Any]
    block_size: int
    mask_token_id: int
    causal: list[bool]
    windows: list[int | None]


def read_as_server(config: dict[str, Any]) -> Served:
    """Read config.json by the rules of z-lab/dflash 0.1.0, vLLM, or speculators 0.9.0."""
    if "speculators_model_type" in config:
        layers = config["transformer_layer_config"]
        sliding = [kind == "sliding_attention" for kind in layers["layer_types"]]
        causal = [here and not config.get("sliding_window_non_causal", False) for here in sliding]
        block, mask = config["block_size"], config["mask_token_id"]
    else:
        layers, dflash = config, config["dflash_config"]
        kinds = layers.get("layer_types") or ["full_attention"] * layers["num_hidden_layers"]
        sliding = [kind == "sliding_attention" for kind in kinds]
        said = config.get("is_causal", dflash.get("causal"))
        causal = sliding if said is None else [bool(said)] * len(sliding)
        block, mask = dflash.get("block_size", config.get("block_size")), dflash["mask_token_id"]
    windows = [layers["sliding_window"] if here else None for here in sliding]
    return Served(layers, int(block), int(mask), causal, windows)


def independent_hidden(
    served: Served, weights: dict[str, Tensor], embedding: Tensor, anchor_token: int, features: Tensor
) -> Tensor:
    """States [B-1, H] of the drafted slots for a block right after `features` [S, K*H], from the formulas."""
    config, eps = served.config, served.config["rms_norm_eps"]
    size, start = config["head_dim"], len(features)
    theta = (config.get("rope_parameters") or {}).get("rope_theta") or config["rope_theta"]
    inverse = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], eps)

    def turn(x: Tensor, first: int) -> Tensor:  # [n, heads, D]: pairs (i, i + D/2) turn by position * inverse[i]
        angle = torch.outer(torch.arange(first, first + len(x)).float(), inverse)[:, None]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def project(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"])

    def heads(x: Tensor, name: str) -> Tensor:
        return project(x, name).reshape(len(x), -1, size)

    context = norm(project(features, "fc"), "hidden_norm")
    x = embedding[torch.tensor([anchor_token] + [served.mask_token_id] * (served.block_size - 1))]
    for number, (causal, window) in enumerate(zip(served.causal, served.windows, strict=True)):
        at = f"layers.{number}."
        y = norm(x, f"{at}input_layernorm")
        both = torch.cat([context, y])
        q = turn(norm(heads(y, f"{at}self_attn.q_proj"), f"{at}self_attn.q_norm"), start)
        k = turn(norm(heads(both, f"{at}self_attn.k_proj"), f"{at}self_attn.k_norm"), 0)
        v = heads(both, f"{at}self_attn.v_proj")
        x = x + project(_attend(q, k, v, start, causal, window), f"{at}self_attn.o_proj")
        y = norm(x, f"{at}post_attention_layernorm")
        x = x + project(
            functional.silu(project(y, f"{at}mlp.gate_proj")) * project(y, f"{at}mlp.up_proj"), f"{at}mlp.down_proj"
        )
    return norm(x, "norm")[1:]


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, causal: bool, window: int | None) -> Tensor:
    """Softmax attention, one query and head at a time: [B, heads * D]."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for slot in range(len(q)):
        first = 0 if window is None else max(0, start + slot - window + 1)
        last = start + slot + 1 if causal else start + len(q)
        for head in range(q.shape[1]):
            keys, values = k[first:last, head // group], v[first:last, head // group]
            weight = torch.softmax(keys @ q[slot, head] * q.shape[-1] ** -0.5, dim=0)
            out[slot, head] = weight @ values
    return out.flatten(1)


@torch.no_grad()
def verify(folder: Path, target: str) -> list[Finding]:
    """Check the drafter in `folder` against a target. Raises ExportError, HeadError, TargetError, TargetNotFound."""
    exported = read_export(folder)
    place = find_target(target, None, print).path
    description, _ = describe(place, target, exported.facts, torch.device("cpu"), "float32")
    findings = _identity(exported, place, target, description)
    if any(not finding.good for finding in findings if "vocab_size" in finding.text or "hidden" in finding.text):
        return findings  # no logits can be compared
    whole = load_frozen_head(place, description.tie_word_embeddings, torch.float32, torch.device("cpu"))
    vocabulary = exported.facts.draft_vocab
    head = whole if vocabulary is None else whole.reduced(list(vocabulary))
    served = read_as_server(read_json(folder / "config.json"))
    weights = {name: tensor.float() for name, tensor in exported.tensors.items()}
    findings += [*_taps(exported), *_said_twice(exported), *_full_layers(exported)]
    findings += _as_trained(exported, served)
    findings.append(_against_probe(exported, served, weights, whole.embedding, head.head))
    return [*findings, _against_target(exported, served, weights, place, head)]


def _identity(exported: Exported, place: Path, target: str, description: TargetDescription) -> list[Finding]:
    facts = exported.facts
    found = identify(place, target, None, description.as_dict())
    if facts.identity is None:
        note = Finding(True, "the folder does not say which target it was trained with; only shapes can be compared")
        mine = replace(
            found, vocab_size=facts.shape.vocab_size, hidden=facts.shape.hidden, rope_theta=facts.shape.rope_theta
        )
    else:
        note, mine = Finding(True, f"says it was trained with {facts.identity.name}"), facts.identity
    differing = mine.differences(found)
    layers_said = facts.identity is not None or exported.format == "zlab"
    for key, said, has in (
        ("vocab_size", facts.shape.vocab_size, found.vocab_size),
        ("hidden_size", facts.shape.hidden, found.hidden),
        ("num_target_layers", facts.num_target_layers if layers_said else found.num_layers, found.num_layers),
    ):
        if said != has:
            differing.append(f"{key}: the drafter's config.json says {said}, the target has {has}")
    if facts.shape.rope_theta != found.rope_theta:
        differing.append(
            f"rope_theta: the drafter rotates with {facts.shape.rope_theta:g}, the target with {found.rope_theta:g}"
        )
    same = [Finding(True, "target: architecture, sizes, config, tokenizer and chat template are the same")]
    return [note, *([Finding(False, line) for line in differing] or same)]


def _taps(exported: Exported) -> list[Finding]:
    facts = exported.facts
    special = {facts.bos_token_id, facts.pad_token_id, *facts.eos_token_ids}
    mask, ids = facts.shape.mask_token_id, list(facts.target_layer_ids)
    ascending = ids == sorted(ids)
    order = "" if ascending else "; vLLM and SGLang join their states in the order of the layers: export it anew"
    return [
        Finding(ascending, f"taps: outputs of layers {ids} of {facts.num_target_layers}{order}"),
        Finding(mask not in special, f"mask token {mask} is none of bos, eos, pad ({sorted(filter(None, special))})"),
    ]


def _said_twice(exported: Exported) -> list[Finding]:
    """What config.json says in two places, of which each server reads one, and the type of the stored tensors."""
    config = read_json(exported.path / "config.json")
    layers = config.get("transformer_layer_config") or config
    theta = [layers.get("rope_theta"), (layers.get("rope_parameters") or {}).get("rope_theta")]
    block = [config.get("block_size"), (config.get("dflash_config") or {}).get("block_size")]
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or []
    block += [1 + proposal["speculative_tokens"] for proposal in proposals if proposal.get("speculative_tokens")]
    stored = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in exported.tensors.values()})
    dtype = [config.get("dtype"), config.get("torch_dtype"), layers.get("dtype"), layers.get("torch_dtype"), *stored]
    wrong = []
    for key, said in (("rope_theta", theta), ("block size", block), ("dtype, the tensors' last", dtype)):
        values = [value for value in said if value is not None]
        if len(set(values)) > 1:
            wrong.append(Finding(False, f"{key}: config.json and tensors must say one thing, got {values}"))
    return wrong or [Finding(True, "rope_theta, block size and dtype are the same wherever they stand")]


def _full_layers(exported: Exported) -> list[Finding]:
    """Of speculators' format with full layers alone: do both of its readers see the same causality?

    speculators asks `sliding_window_non_causal` for sliding layers only; vLLM takes its opposite for all layers.
    """
    config = read_json(exported.path / "config.json")
    if exported.format != "speculators" or SLIDING in exported.facts.shape.layer_types:
        return []
    said = config.get("sliding_window_non_causal", False)
    wrong = "" if said else "; vLLM would serve these layers causal: set it to true"
    return [Finding(bool(said), f"sliding_window_non_causal: expected true for full layers alone, got {said}{wrong}")]


def _as_trained(exported: Exported, served: Served) -> list[Finding]:
    """Compare the settings that no logits show with what was written at export, where that is known."""
    file = exported.path / "probe.json"
    trained = read_json(file).get("settings") if file.is_file() else None
    if trained is None:
        return []
    now = {
        "taps": list(exported.facts.target_layer_ids),
        "windows": served.windows,
        "in-block causality": served.causal,
    }
    wrong = [
        Finding(False, f"{key}: {trained[key]} at export, {now[key]} now") for key in now if trained[key] != now[key]
    ]
    return wrong or [Finding(True, "taps, windows and in-block causality of each layer: as at export")]


def _against_probe(
    exported: Exported, served: Served, weights: dict[str, Tensor], embedding: Tensor, head: Tensor
) -> Finding:
    file = exported.path / "probe.json"
    if not file.is_file():
        return Finding(True, "no probe.json (another project's export): the training side's own logits are not known")
    stored = read_json(file)
    given = ProbeInput(
        stored["anchors"], stored["tokens"], probe_input(exported.facts.shape).features, stored["head_rows"]
    )
    if len(given.features) < given.anchors[-1]:
        return Finding(False, "probe: reaches past what this config's window allows; sliding_window was changed")
    rows = head[torch.tensor(given.head_rows)]
    logits = [
        independent_hidden(served, weights, embedding, token, given.features[:anchor]) @ rows.T
        for anchor, token in zip(given.anchors, given.tokens, strict=True)
    ]
    expected = torch.tensor(stored["logits"])
    found = torch.stack(logits)
    if found.shape != expected.shape:
        return Finding(
            False, f"probe: {list(expected.shape)} logits at export, {list(found.shape)} now: block size changed"
        )
    return _compared(found, expected, "probe: rotation, window, causality, mask token and norms as at export")


def _against_target(exported: Exported, served: Served, weights: dict[str, Tensor], place: Path, head: Any) -> Finding:
    """Compare on the target's own hidden states, taken two ways."""
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    ids = torch.tensor([[(97 * number + 11) % exported.facts.shape.vocab_size for number in range(NUM_TOKENS)]])
    states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    last = exported.facts.num_target_layers - 1
    if last in exported.facts.target_layer_ids:
        return Finding(
            True, "real hidden states: not compared, the last layer's raw output is in no hidden_states tuple"
        )
    features = torch.cat([states[number + 1][0] for number in exported.facts.target_layer_ids], dim=-1)
    session = DrafterSession(exported.drafter(), head)
    session.extend(features)
    anchor = int(ids[0, -1])
    found = independent_hidden(served, weights, session.head.embedding, anchor, features) @ head.head.T
    return _compared(found, session.propose(anchor), "real hidden states: independent forward and decoding loop agree")


def _compared(found: Tensor, expected: Tensor, claim: str) -> Finding:
    scale = float(expected.square().mean().sqrt())
    worst = float((found - expected).abs().max()) / max(scale, 1e-9)
    return Finding(
        worst <= TOLERANCE, f"{claim}: largest difference {worst:.1e} of the logits' size (allowed {TOLERANCE:g})"
    )
