"""Every setting of a run: one typed, limited, documented field each. Unknown keys and wrong types are errors.

This file only describes; configs/load.py reads YAML and --set into it and words the refusals. What can be judged
only with the target at hand (layer ids, head sizes) is judged in producer/target.py and written to plan.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints, model_validator


def _number(value: Any) -> Any:
    """Accept 1e-4 as YAML 1.1 reads it (a string) and refuse booleans, which Python would take for 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, got a boolean")
    if isinstance(value, str):
        return float(value)
    return value


def _anchor_number(value: Any) -> Any:
    """Refuse in one line what is neither a number of anchors nor auto."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("expected a whole number from 1 on, or auto")
    return value


DEFAULT_ANCHORS = 512

Int = Annotated[int, Strict()]
Bool = Annotated[bool, Strict()]
Float = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, Strict()]
RunName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]  # neither .. nor an option


class Section(BaseModel):
    """A part of the configuration: closed (unknown keys are errors) and frozen after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class RunConfig(Section):
    """The run as a whole."""

    name: RunName = "run"
    """Name of the run: its folder under `folder`, its rings in /dev/shm and its sockets carry it."""
    folder: Text = "runs"
    """Where run folders are kept."""
    seed: Int = Field(0, ge=0, lt=2**31)
    """Seed of the schedule, of the initial weights and of the anchors."""


class TargetConfig(Section):
    """The frozen language model whose hidden states are learnt from."""

    model: Text = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """A local folder or a hub id, as transformers takes it."""
    revision: Text | None = None
    """Branch, tag or commit on the hub; unused for a local folder."""
    random_weights: Bool = False
    """Make the weights at random on the device: `model` is then a folder with config.json and a tokenizer, no weights.
    For measuring speed; nothing that is learnt from such a target means anything."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the target computes in; the ring stores features in it bit for bit. auto: float32 on a CPU,
    else the checkpoint's."""
    target_layer_ids: tuple[Int, ...] | None = None
    """Taps: 0-based decoder layers whose OUTPUT is taken, in this order. None: the default rule for `num_taps`."""
    num_taps: Int = Field(5, ge=1, le=64)
    """Number of taps where `target_layer_ids` is not given."""
    mask_token_id: Int | None = Field(None, ge=0)
    """Row of the embedding used as the mask token. None: the tokenizer's mask, else a reserved row that the
    data never uses."""
    final_hidden: Bool = False
    """Also store the target's final hidden state (input of its head), which soft and target_argmax labels need."""
    devices: tuple[Text, ...] = ("auto",)
    """One producer process per entry: "cpu", "cuda:0", ... "auto": the first free GPU, else the CPU. "cuda:0+1": one
    target spread over several GPUs, where it does not fit one."""
    threads: Int | None = Field(None, ge=1)
    """CPU threads of each producer. None: the cores shared out between all processes of the run."""
    compile: Bool = True
    """Compile each decoder layer (regional torch.compile); GPU only."""
    attention: Text = "auto"
    """Attention implementation of transformers, for reading in rows. auto: SDPA where the model has it."""
    layout: Literal["auto", "packed", "rows"] = "auto"
    """How documents are read. packed: whole packs, attention cut by document, no padding; rows: right-padded rows of
    near-equal length, exact for every target. auto: packed where the target allows it and the start-up check passes."""
    state_band: Float | None = Field(16.0, gt=1)
    """Largest factor between the RMS of a document's states (geometric mean over its rows) and the usual one of that
    tap; beyond it the run stops. None: no limit."""
    min_agreement: Float = Field(0.5, ge=0, le=1)
    """With final_hidden, a warning if fewer supervised tokens than this share equal the target's own greedy choice:
    then the answers were not produced by this target."""


class SourceConfig(Section):
    """One source of documents."""

    path: Text
    """A .jsonl, .parquet or .txt file or a folder of them, "package:NAME/FILE" inside an installed package, or
    "dataset:NAME", read by the package datasets: a hub id, a folder of data files, or a folder that it has saved."""
    kind: Literal["auto", "chat", "text"] = "auto"
    """chat: rows with messages, conversations or prompt/response; text: raw text or rows with `text`."""
    weight: Float = Field(1.0, gt=0, le=1000)
    """Mixture: 1 takes every document of this source once an epoch, 2 twice, 0.25 another quarter each epoch."""
    name: Text | None = None
    """Name in the data report. None: the path."""
    split: Text = "train"
    """Split of a "dataset:" source, as the package datasets takes it."""
    subset: Text | None = None
    """Subset (configuration) of a "dataset:" source."""
    revision: Text | None = None
    """Branch, tag or commit of a "dataset:" source on the hub."""


class RegenerateConfig(Section):
    """Rewriting the answers with the target itself, which is what a drafter should learn."""

    enabled: Bool = False
    """Train on the sources' prompts with answers written by the target (`prepare --regenerate` sets this)."""
    server: Text | None = None
    """Address of an OpenAI-compatible server of the target (vLLM, SGLang), such as http://localhost:8000/v1.
    None: transformers writes them, on target.devices' first device."""
    server_model: Text | None = None
    """The target's name on that server. None: target.model."""
    max_new_tokens: Int = Field(2048, ge=1)
    """Longest answer; one that is cut there keeps no supervised end of turn."""
    temperature: Float = Field(0.0, ge=0, le=2)
    """0: greedy."""
    batch_size: Int = Field(64, ge=1)
    """Conversations answered together: rows of a batch in transformers, requests under way at a server."""
    timeout_s: Float = Field(600.0, gt=0)
    """Longest wait for one answer of a server."""


class DataConfig(Section):
    """Documents: where they come from, how they become tokens and which of them are supervised."""

    sources: tuple[SourceConfig, ...] = Field((), max_length=1000)
    """Sources, read in this order."""
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template (for example enable_thinking); recorded in checkpoint and export."""
    end_of_turn: Bool = True
    """Supervise the end-of-turn token of an answer, also where the template's generation markers leave it out."""
    empty_reasoning: Bool = False
    """Supervise an empty reasoning block that the template puts before an answer without one."""
    max_document_tokens: Int | None = Field(None, ge=8)
    """Longest document, in tokens. None: the pack size. Never more than the target's context."""
    long_documents: Literal["truncate", "split", "skip"] = "truncate"
    """What becomes of a longer one: cut at the right, cut into several documents, or skipped and counted."""
    bad_rows: Literal["skip", "fail"] = "skip"
    """Rows that cannot be used: skipped and counted by reason with file:line, or the run stops at the first."""
    deduplicate: Bool = False
    """Train on one of several documents with the same tokens; the report counts them either way."""
    heldout_documents: Int = Field(0, ge=0)
    """Documents never trained on, chosen by digest; their prompts measure the held-out accepted length."""
    max_documents: Int | None = Field(None, ge=1)
    """Read at most this many documents; for short trials."""
    workers: Int | None = Field(None, ge=1)
    """Processes that tokenise. None: one per core; a small corpus is tokenised by one in any case."""
    cache_folder: Text | None = None
    """Where tokenised data is kept for later runs; may be deleted at any time between runs. None: run.folder/.data"""
    regenerate: RegenerateConfig = RegenerateConfig()
    """Answers rewritten by the target before training."""


class PackConfig(Section):
    """What one slot of the ring holds."""

    tokens: Int = Field(8192, ge=32)
    """T: tokens of a pack, padding included."""
    window_packs: Int = Field(16, ge=1, le=256)
    """Read in rows: packs under way at the same time, whose documents are sorted by length together, so that rows of
    one forward are near-equal. Their features stay on the target's GPU until they are complete."""
    row_buckets: Int = Field(8, ge=1, le=64)
    """Read in rows: row lengths between each power of two and the next; fewer means fewer shapes, more means less
    padding."""
    max_row_tokens: Int | None = Field(None, ge=32)
    """Tokens of one forward, padding included. None: the pack size."""


class RingConfig(Section):
    """The shared-memory ring between producers and consumers."""

    num_slots: Int = Field(8, ge=2, le=256)
    """Slots of each producer's ring."""
    min_ready: Int = Field(1, ge=1)
    """A drafter takes only when at least this many packs are READY, until the data end;
    more of them mix better with pick: random."""
    pick: Literal["oldest", "random"] = "oldest"
    """Which READY pack is taken."""
    max_age: Int | None = Field(None, ge=1)
    """With pick: random, a pack older than this many publishes is taken first. None: four times num_slots."""
    page_lock: Bool = True
    """Page-lock the ring for the GPU (cudaHostRegister); ignored without one."""


class DrafterConfig(Section):
    """The DFlash drafter (design: see docs/drafter.md)."""

    num_layers: Int = Field(5, ge=1, le=64)
    """L: decoder layers of the drafter."""
    block_size: Int = Field(16, ge=2, le=64)
    """B: slots of a block; slot 0 is the anchor, so B-1 tokens are drafted per round."""
    layout: Literal["sliding", "mixed", "full"] = "sliding"
    """Attention layers: all sliding, all sliding but the last, or all full."""
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] | None = None
    """Explicit type of each layer; overrides `layout`."""
    sliding_window: Int = Field(2048, ge=2)
    """W: a sliding layer sees a context token iff query position - key position < W."""
    sliding_causal: Bool = True
    """Whether sliding layers are causal inside the block (True in z-lab's reading); full layers never are."""
    num_attention_heads: Int | None = Field(None, ge=1)
    """Query heads. None: the target's."""
    num_key_value_heads: Int | None = Field(None, ge=1)
    """Key and value heads. None: the target's."""
    head_dim: Int | None = Field(None, ge=2)
    """Size of a head. None: the target's."""
    intermediate_size: Int | None = Field(None, ge=1)
    """Width of the MLP. None: the target's."""
    init: Literal["random", "target_last_layers"] = "random"
    """Initial weights: random, or copies of the target's last layers with fc the identity on the last tap."""
    init_from: Text | None = None
    """Folder of an exported drafter (z-lab or speculators format) whose weights to start from; overrides `init`."""
    draft_vocab_size: Int | None = Field(None, ge=16)
    """Reduced output vocabulary: the most frequent supervised tokens. None: the target's whole vocabulary."""


class AnchorsConfig(Section):
    """Which positions of a pack start a block."""

    num: Annotated[int | Literal["auto"], BeforeValidator(_anchor_number)] = DEFAULT_ANCHORS
    """A: anchors drawn per pack and step, fewer than pack.tokens; left out, as many as a pack of under 513 tokens can
    hold. auto: one of `sizes`, more while the drafters wait for packs (consumer/anchor_size.py)."""
    sizes: tuple[Int, ...] = Field((512, 768, 1024, 1536), min_length=2, max_length=4)
    """With num: auto, what it chooses from, ascending; a run begins with the first. Each is a CUDA graph of its own."""
    review_steps: Int = Field(50, ge=1)
    """With num: auto, steps that a decision is measured over."""
    per_document_min: Int = Field(0, ge=0)
    """Floor per document (as far as it has candidates), so that short documents are not starved."""

    @property
    def choices(self) -> tuple[int, ...]:
        """Every number of anchors that a step may have, ascending; one where `num` is a number."""
        return self.sizes if self.num == "auto" else (self.num,)


class LossConfig(Section):
    """What the slots of a block learn, and with which weight."""

    labels: Literal["hard", "soft", "target_argmax"] = "hard"
    """hard: the data's token; soft: KL to the target's distribution; target_argmax: the target's own greedy token."""
    decay: Literal["exponential", "dpace", "none"] = "exponential"
    """Weight of slot k: exp(-(k-1)/gamma), D-PACE (arXiv 2605.18810), or 1."""
    gamma: Float | None = Field(None, gt=0)
    """Decay of the exponential weights. None: 7, 5, 4 for block sizes 16, 10, 8 (about 0.43 B + 0.4 between)."""
    dpace_alpha: Float = Field(0.5, ge=0, le=1)
    """Smoothing of D-PACE."""
    chunk_rows: Int = Field(4096, ge=1)
    """Block rows whose logits exist at one time."""


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the 2-D weights, AdamW for the rest; GPU only."""
    lr: Float = Field(6e-4, gt=0)
    """Peak learning rate of AdamW."""
    muon_lr: Float = Field(2e-2, gt=0)
    """Peak learning rate of Muon's weights."""
    betas: tuple[Float, Float] = (0.9, 0.95)
    """AdamW's moment decays."""
    eps: Float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: Float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_norm: Float | None = Field(1.0, gt=0)
    """Largest global gradient norm. None: no clipping."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    warmup_share: Float = Field(0.04, ge=0, lt=1)
    """Share of all steps spent warming up."""
    min_lr_share: Float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class TrainingConfig(Section):
    """The drafter process's loop."""

    epochs: Int = Field(1, ge=1)
    """Passes over the data."""
    max_steps: Int | None = Field(None, ge=1)
    """Stop after this many optimizer steps. None: the end of the data."""
    max_seconds: Float | None = Field(None, gt=0)
    """Stop after this many seconds of training. None: no limit."""
    steps_per_pack: Int = Field(1, ge=1)
    """Optimizer steps on each pack, each with fresh anchors."""
    micro_steps: Int = Field(1, ge=1, le=1024)
    """Gradient accumulation: draws of anchors per drafter process whose gradients make one optimizer step. With more
    than `steps_per_pack`, several packs make one step."""
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """Type of the matrix products; masters are float32. auto: float32 on a CPU, bfloat16 on a GPU. fp8: the
    drafter's large products in 8 bits; weight gradients, head and attention in bfloat16 (consumer/float8.py)."""
    devices: tuple[Text, ...] = ("auto",)
    """One consumer process per entry, as target.devices. Several train one drafter, data parallel."""
    collective_timeout_s: Float = Field(600.0, gt=0)
    """A drafter process that waits longer than this for another one gives up. A wait for packs is none: the processes
    meet every two seconds. A checkpoint must be written within it."""
    gradients: Literal["nccl", "copies"] = "nccl"
    """Who adds up the gradients of drafters on several GPUs: NCCL's kernels, or the GPUs' copy engines, which leave the
    multiprocessors to the products (one host; consumer/copy_engines.py). Where copies do not work, NCCL does it."""
    threads: Int | None = Field(None, ge=1)
    """CPU threads of each consumer. None: the cores shared out between all processes of the run."""
    cuda_graph: Bool = True
    """Capture the whole step in one CUDA graph; ignored on a CPU."""
    compile: Bool = True
    """torch.compile of the step's parts; GPU only."""
    log_every_steps: Int = Field(10, ge=1)
    """Steps between two lines of metrics."""
    max_skipped_steps: Int = Field(5, ge=1)
    """Stop after this many steps in a row with a non-finite loss or gradient."""


class CheckpointConfig(Section):
    """Saving."""

    every_steps: Int = Field(200, ge=1)
    """Steps between two checkpoints; one more is written at the end."""
    keep: Int = Field(3, ge=1)
    """Newest checkpoints that are kept."""
    handover: Bool = True
    """`restart drafter` leaves the state in /dev/shm for the next process, which writes it to disk while it trains;
    without room there, or with false, it goes through the disk. Checkpoints on their way there use the same memory."""


class EvaluationConfig(Section):
    """The held-out measurement that the launcher runs before and after training."""

    enabled: Bool = False
    """Measure held-out accepted length with the real decoding loop at the end (first and last weights). Needs full
    attention in every layer of the target; others are measured by `python launch.py eval`."""
    max_new_tokens: Int = Field(32, ge=1)
    """Tokens decoded for each held-out prompt."""
    batch_size: Int = Field(16, ge=1)
    """Prompts decoded together."""
    every_steps: Int | None = Field(None, ge=1)
    """Steps between two measurements of held-out accepted length while training (a multiple of
    training.log_every_steps), made by the drafter from features read once. Needs data.heldout_documents. None: none."""


class SupervisorConfig(Section):
    """Starting, watching and restarting the processes."""

    max_restarts: Int = Field(5, ge=0)
    """Restarts of one process before the run is given up."""
    backoff_s: Float = Field(1.0, ge=0)
    """Wait before the first restart; doubles each time, up to 30 s."""
    ready_timeout_s: Float = Field(600.0, gt=0)
    """Longest start of one process."""
    stop_timeout_s: Float = Field(10.0, gt=0)
    """Longest graceful stop before a process is killed."""
    save_timeout_s: Float = Field(600.0, gt=0)
    """So much longer for a drafter that is writing its last checkpoint."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    pack: PackConfig = PackConfig()
    ring: RingConfig = RingConfig()
    drafter: DrafterConfig = DrafterConfig()
    anchors: AnchorsConfig = AnchorsConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    supervisor: SupervisorConfig = SupervisorConfig()

    @model_validator(mode="before")
    @classmethod
    def _lower_default(cls, raw: Any) -> Any:
        """Give a small pack as many anchors as it can hold where their number is left out."""
        pack, anchors = (raw.get(name) or {} if isinstance(raw, dict) else None for name in ("pack", "anchors"))
        tokens = pack.get("tokens") if isinstance(pack, dict) else None
        if isinstance(tokens, int) and 1 < tokens <= DEFAULT_ANCHORS and isinstance(anchors, dict):
            return {**raw, "anchors": {"num": tokens - 1, **anchors}}
        return raw

    @model_validator(mode="after")
    def _possible(self) -> Config:
        """Refuse combinations that no target could make possible."""
        drafter = self.drafter
        if drafter.sliding_window < drafter.block_size:
            raise ValueError(
                f"drafter.sliding_window: expected at least drafter.block_size ({drafter.block_size}), "
                f"got {drafter.sliding_window}; raise the window or lower the block size"
            )
        if drafter.layer_types is not None and len(drafter.layer_types) != drafter.num_layers:
            raise ValueError(
                f"drafter.layer_types: expected {drafter.num_layers} entries (drafter.num_layers), "
                f"got {len(drafter.layer_types)}"
            )
        if self.loss.labels != "hard" and not self.target.final_hidden:
            raise ValueError(
                f"loss.labels: {self.loss.labels} needs target.final_hidden: true, got false; "
                "switch it on, or use hard labels"
            )
        if self.target.random_weights and (self.evaluation.enabled or self.drafter.init == "target_last_layers"):
            raise ValueError(
                "target.random_weights: there is nothing to evaluate and nothing to start from; set "
                "evaluation.enabled: false and drafter.init: random"
            )
        every, logged = self.evaluation.every_steps, self.training.log_every_steps
        if every is not None and every % logged:
            raise ValueError(
                f"evaluation.every_steps: expected a multiple of training.log_every_steps ({logged}), got {every}"
            )
        if every is not None and not self.data.heldout_documents:
            raise ValueError("evaluation.every_steps: needs data.heldout_documents, got 0; hold some documents out")
        if self.ring.min_ready > self.ring.num_slots:
            raise ValueError(
                f"ring.min_ready: expected at most ring.num_slots ({self.ring.num_slots}), got {self.ring.min_ready}"
            )
        sizes, most = list(self.anchors.sizes), self.pack.tokens - 1  # an anchor needs a token after it
        if self.anchors.num != "auto" and self.anchors.num > most:
            raise ValueError(
                f"anchors.num: expected at most {most} (pack.tokens {self.pack.tokens} hold no more anchors), "
                f"got {self.anchors.num}; lower it, or raise pack.tokens"
            )
        ascending = sorted(set(sizes)) == sizes
        if self.anchors.num == "auto" and not (ascending and sizes[0] > 0 and sizes[-1] <= most):
            raise ValueError(
                f"anchors.sizes: anchors.num: auto needs ascending numbers from 1 to {most} (pack.tokens "
                f"{self.pack.tokens} hold no more anchors), got {sizes}; set anchors.sizes, or anchors.num to a number"
            )
        if self.drafter.block_size > self.pack.tokens:
            raise ValueError(f"drafter.block_size: expected at most pack.tokens, got {self.drafter.block_size}")
        return self
