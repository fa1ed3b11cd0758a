"""README.md of an exported drafter: its target, how it was trained, how to serve it. Text only."""

from __future__ import annotations

from consumer.export.facts import DrafterFacts

MIXED_WARNING = (
    "vLLM takes one in-block causality for all layers from the speculators format, so it serves this mix of causal "
    "sliding and full layers wrongly: export it with --format zlab for serving"
)

LAST_LAYER_WARNING = (
    "SGLang takes states at the input of the layer after, so it cannot take the output of the target's last layer, "
    "which this drafter reads: vLLM can"
)


def readme(facts: DrafterFacts, name: str, folder: str) -> str:
    """Write the text. `folder` is how the serve commands name the drafter."""
    identity, shape = facts.identity, facts.shape
    target = identity.name if identity else "TARGET"
    drafted = facts.num_speculative_tokens
    lines = [
        f"# DFlash drafter for {target}",
        "",
        f"Format: {name}. Blocks of {shape.block_size} slots, so **num_speculative_tokens = {drafted}**. "
        f"{shape.num_layers} layers, {shape.num_parameters:,} parameters in {facts.dtype}. "
        "Not validated in float16.",
        "",
        "## Serve",
        "",
        "vLLM:",
        "",
        f"    vllm serve {target} --speculative-config \\",
        f"""      '{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {drafted}}}'""",
        "",
    ]
    if name == "zlab":
        lines += [
            "SGLang:",
            "",
            f"    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\",
            f"      --speculative-draft-model-path {folder} --speculative-num-draft-tokens {shape.block_size}",
            "",
            f"(SGLang counts the anchor too: {shape.block_size} draft tokens are {drafted} speculated ones. With "
            "--quantization it quantises the drafter too, unless told --speculative-draft-model-quantization unquant.)",
            "",
        ]
        if facts.taps_last_layer:
            lines += [f"**Warning:** {LAST_LAYER_WARNING}.", ""]
        if facts.dtype == "float32":
            lines += ["SGLang loads a float32 drafter in float16 unless told --dtype, the target's.", ""]
    elif facts.is_mixed and shape.sliding_causal:
        lines += [f"**Warning:** {MIXED_WARNING}.", ""]
    if facts.is_mixed:
        lines += [
            "Full and sliding layers are mixed: vLLM serves that with its V2 model runner alone, which "
            "VLLM_USE_V2_MODEL_RUNNER=1 asks for where it is not the default.",
            "",
        ]
    return "\n".join([*lines, *_target_lines(facts), *_training_lines(facts)])


def _target_lines(facts: DrafterFacts) -> list[str]:
    shape, identity = facts.shape, facts.identity
    facts_of = [
        ("target layers", f"outputs of layers {list(facts.target_layer_ids)} of {facts.num_target_layers}, 0-based"),
        ("mask token id", shape.mask_token_id),
        ("rotation", f"plain, whole head of {shape.head_dim}, theta {shape.rope_theta:g}"),
        ("layers", ", ".join(shape.layer_types)),
    ]
    if "sliding_attention" in shape.layer_types:
        inside = "causal" if shape.sliding_causal else "both ways"
        facts_of.append(("window", f"{shape.sliding_window} tokens, {inside} inside a block"))
    if facts.draft_vocab is not None:
        facts_of.append(("draft vocabulary", f"{len(facts.draft_vocab)} of {shape.vocab_size} tokens (d2t, t2d)"))
    if identity is not None:
        facts_of += [
            ("target revision", identity.revision or "not given"),
            ("SHA-256 of its config", identity.config_sha256),
            ("SHA-256 of its tokenizer", identity.tokenizer_sha256),
            ("SHA-256 of its chat template", identity.chat_template_sha256 or "it has none"),
        ]
    rows = [f"| {key} | {value} |" for key, value in facts_of]
    note = "`python launch.py verify FOLDER --target TARGET` of dflash-ring compares all of this with a target."
    return ["## What it belongs to", "", "| | |", "|---|---|", *rows, "", note, ""]


def _training_lines(facts: DrafterFacts) -> list[str]:
    rows = [f"| {key.replace('_', ' ')} | {value} |" for key, value in facts.training.items()]
    return ["## Training", "", "| | |", "|---|---|", *rows, ""] if rows else []
