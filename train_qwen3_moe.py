"""Train Qwen3-MoE (30B-A3B, 235B-A22B, any of its Hugging Face configs) from this one file.

    python train_qwen3_moe.py                                  # tiny, on Python's own source
    torchrun --nproc-per-node 1 train_qwen3_moe.py 30b-a3b --layers 8 --data data/dclm
    python train_qwen3_moe.py --eval-only --out out/train_qwen3_moe-tiny

The tiny run falls from a loss of 5.6 to about 2.0 (nats a byte) in its 240 steps. From the batch
to the gradients one reads this file and common/dualpipev.py; the products of attention, experts
and loss are in kernels/.

Sections: config and presets, model (leaf to root), names on disk, data, FLOPs, optimizer,
checkpoints, train step, evaluation and sampling, main.

Shapes:
    B sequences of a micro-batch   T tokens of a sequence     N = B·T tokens    V vocabulary
    D hidden size                  H, G query, key/value heads                  C head dim
    E experts                      K experts a token          F expert width    S = N·K routed slots
"""

import dataclasses
import hashlib
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from common import checkpoint, hf
from common.config import Run, check, lr_at, parse, to_json
from common.data import Loader, batch_map, decoder, encoder
from common.dualpipev import Deferred, Exchange, Route, Steps
from common.dualpipev import run as run_schedule
from common.log import Log, Profiler, Stop, peak_flops, rates
from common.mesh import Mesh, start, world_size
from common.optim import Optimizer, build_buckets
from kernels.attention import attention
from kernels.cross_entropy import linear_cross_entropy
from kernels.dispatch import Plan, dispatch_plan
from kernels.experts import expert_mlp, up

# ------------------------------------------------------------------------------------------------
# Config and presets
# ------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).stem
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
IGNORE = -100  # target of a position that has none


@dataclass(frozen=True)
class Config(Run):
    """The run's flags; this script adds none."""


@dataclass(frozen=True)
class Model:
    """The architecture, under the names of Hugging Face's Qwen3MoeConfig. Defaults: 30B-A3B."""

    vocab_size: int = 151936
    hidden_size: int = 2048
    num_hidden_layers: int = 48
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    head_dim: int = 128  # explicit: not hidden_size / num_attention_heads
    intermediate_size: int = 6144  # of dense layers
    moe_intermediate_size: int = 768
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 40960

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` routes to experts; the others have one dense MLP."""
        every = (layer + 1) % self.decoder_sparse_step == 0
        return layer not in self.mlp_only_layers and self.num_experts > 0 and every


TINY = Model(
    vocab_size=257, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=40, intermediate_size=256, moe_intermediate_size=96,
    num_experts=8, num_experts_per_tok=2, rope_theta=1e4, max_position_embeddings=4096,
)  # fmt: skip
MODELS = {
    "tiny": TINY,
    "30b-a3b": Model(),
    "235b-a22b": Model(
        hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, intermediate_size=12288,
        moe_intermediate_size=1536,
    ),
}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {
    "tiny": dict(
        seq_len=128, micro_batch=8, global_batch=16, steps=240, lr=3e-3, warmup=5,
        schedule="cosine", dtype="fp32", compile=False, eval_every=80, eval_batches=4,
        save_every=80, sample_tokens=200,
    ),
    "30b-a3b": {},
    "235b-a22b": {},
}  # fmt: skip


def model_of(run: Config) -> Model:
    """The architecture that the flags name. Raises ValueError for what this script cannot do."""
    model = MODELS[run.preset]
    source = run.model_config or run.init_from
    if source is not None:
        config = hf.read_config(source)
        hf.expect_model_type(config, ("qwen3_moe",))
        refused = [("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")]
        for key, value in refused:
            if config.get(key, value) != value:
                raise ValueError(f"{source}: {key} {config[key]} is not supported, only {value}")
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ValueError(f"{source}: rope_type {kind} is not supported, only default")
        known = {f.name for f in dataclasses.fields(Model)}
        config["mlp_only_layers"] = tuple(config.get("mlp_only_layers") or ())
        model = Model(**{key: value for key, value in config.items() if key in known})
    if run.layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=run.layers)
    return model


def check_model(model: Model, run: Config) -> None:
    """Refuse, before anything is built, a model that cannot be or that the layout cannot hold."""
    E, K = model.num_experts, model.num_experts_per_tok
    if E and E % run.ep:
        good = [n for n in range(1, E + 1) if E % n == 0]
        raise ValueError(f"--ep {run.ep} does not divide num_experts {E}; use one of {good}")
    if E and not 1 <= K <= E:
        raise ValueError(f"num_experts_per_tok {K} must lie between 1 and num_experts {E}")
    if model.num_attention_heads % model.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads {model.num_key_value_heads} must divide "
            f"num_attention_heads {model.num_attention_heads}"
        )
    if model.head_dim % 2:
        raise ValueError(f"head_dim {model.head_dim} must be even: rope turns pairs")
    if run.pp > 1 and model.num_hidden_layers < 2 * run.pp:
        raise ValueError(
            f"--pp {run.pp} needs at least {2 * run.pp} layers, "
            f"the model has {model.num_hidden_layers}"
        )
    if run.seq_len > model.max_position_embeddings:
        raise ValueError(
            f"--seq-len {run.seq_len} is longer than max_position_embeddings "
            f"{model.max_position_embeddings}"
        )


# ------------------------------------------------------------------------------------------------
# Model, leaf to root
# ------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """One micro-batch: tokens (B, T) and targets (B, T, IGNORE where none), int64.

    Without targets the model returns logits. `index` counts micro-batches over the whole run
    (random forced routing draws from it). `routes`: layer → chosen experts (N, K): a layer found
    there uses them (router replay), another notes its own.
    """

    tokens: Tensor
    targets: Tensor | None = None
    index: int = 0
    routes: dict[int, Tensor] | None = None


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, of torch's default dtype and device; `initialise` fills it by its name."""
    return nn.Parameter(torch.empty(*shape))


class Linear(nn.Module):
    """x Wᵀ, no bias."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = parameter(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, normalised in fp32 and rounded before the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = parameter(size), eps

    def forward(self, x: Tensor) -> Tensor:
        x_up = up(x)
        scale = torch.rsqrt(x_up.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x_up * scale).to(x.dtype)


def rope_table(model: Model, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (T, C/2) of position · theta^(-2i/C), never below fp32 (RoFormer, eq. 15)."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, model.head_dim, 2, dtype=wide, device=positions_T.device)
    angles = torch.outer(positions_T.to(wide), model.rope_theta ** (-exponent / model.head_dim))
    return angles.cos(), angles.sin()


def rotate(x_BHTC: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x_i, x_{i+C/2}) by the position's angles, in fp32."""
    cos, sin = rope
    a, b = up(x_BHTC).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BHTC.dtype)


class Attention(nn.Module):
    """Grouped-query attention with an RMSNorm on each query and key head."""

    def __init__(self, model: Model):
        super().__init__()
        D, C = model.hidden_size, model.head_dim
        self.head_dim = C
        self.q_proj = Linear(D, model.num_attention_heads * C)
        self.k_proj = Linear(D, model.num_key_value_heads * C)
        self.v_proj = Linear(D, model.num_key_value_heads * C)
        self.o_proj = Linear(model.num_attention_heads * C, D)
        self.q_norm = RMSNorm(C, model.rms_norm_eps)
        self.k_norm = RMSNorm(C, model.rms_norm_eps)

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x_BTD).view(heads)).transpose(1, 2), rope)
        k = rotate(self.k_norm(self.k_proj(x_BTD).view(heads)).transpose(1, 2), rope)
        v = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        out_BHTC, _ = attention(q, k, v, scale=self.head_dim**-0.5)
        return self.o_proj(out_BHTC.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate x) ⊙ up x)."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AttachLoss(torch.autograd.Function):
    """Identity on x whose backward also gives `loss` (scalar) the gradient 1.

    So an auxiliary term trains the router without joining the language-model loss.
    """

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


class Router(nn.Module):
    """Softmax over all experts, then the top K, renormalised iff norm_topk_prob; all in fp32."""

    def __init__(self, model: Model, run: Config):
        super().__init__()
        self.weight = parameter(model.num_experts, model.hidden_size)
        self.K, self.renormalise = model.num_experts_per_tok, model.norm_topk_prob
        self.run = run

    def forward(self, tokens_ND, sequences: int, state_2E, ids_NK):
        """Choose: (weights (N, K), ids (N, K), auxiliary loss, statistics (2, E)).

        state_2E: each expert's share of the previous step's slots, and its bias; ids_NK given
        replaces the choice. Statistics: slots received, and the sum of probabilities.
        """
        logits_NE = F.linear(up(tokens_ND), up(self.weight))
        probs_NE = logits_NE.softmax(-1)
        previous_E, bias_E = state_2E.unbind()
        if ids_NK is None:
            score_NE = probs_NE + bias_E if self.run.bias_update_rate else probs_NE
            ids_NK = score_NE.topk(self.K, dim=-1).indices
        weights_NK = probs_NE.gather(-1, ids_NK)
        if self.renormalise:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)

        N, E = probs_NE.shape
        chosen_BE = F.one_hot(ids_NK, E).view(sequences, -1, E).sum(1).to(probs_NE.dtype)
        probs_BE = probs_NE.view(sequences, -1, E).sum(1)
        share = {
            "none": torch.zeros_like(previous_E),
            "global-batch": previous_E,  # of the whole previous step: the same in every layout
            "micro-batch": chosen_BE.sum(0) / (N * self.K),
            "sequence": chosen_BE / chosen_BE.sum(-1, keepdim=True),
        }[self.run.balance]
        step_tokens = self.run.global_batch * self.run.seq_len  # terms are means over a step
        aux = self.run.balance_coef * E / step_tokens * (share.detach() * probs_BE).sum()
        if self.run.z_loss_coef:
            z = logits_NE.logsumexp(-1).pow(2).sum()
            aux = aux + self.run.z_loss_coef / step_tokens * z
        statistics = torch.stack([chosen_BE.sum(0), probs_BE.sum(0)]).detach()
        return weights_NK, ids_NK, aux, statistics


class Experts(nn.Module):
    """The routed experts' weights, stacked: gate_up (E, 2F, D), gate rows first; down (E, D, F)."""

    def __init__(self, model: Model):
        super().__init__()
        E, D, width = model.num_experts, model.hidden_size, model.moe_intermediate_size
        self.gate_up, self.down = parameter(E, 2 * width, D), parameter(E, D, width)


class MoE(nn.Module):
    def __init__(self, model: Model, run: Config):
        super().__init__()
        self.gate, self.experts = Router(model, run), Experts(model)


class Layer(nn.Module):
    """One transformer layer, cut into what lies between two communications.

    attend_and_route → (tokens to their experts) → experts → (and back) → aggregate. Only
    attend_and_route and aggregate are compiled; a dense layer has no exchange and no experts.
    """

    def __init__(self, model: Model, run: Config, index: int):
        super().__init__()
        self.index, self.run, self.sparse = index, run, model.is_sparse(index)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        dense = partial(MLP, model.hidden_size, model.intermediate_size)
        self.mlp = MoE(model, run) if self.sparse else dense()
        if run.compile:
            for name in ("attend_and_route", "aggregate", "dense"):
                method = getattr(self, name)
                setattr(self, name, torch.compile(method, fullgraph=True, dynamic=False))

    def forward(self, x_BTD, rope, state_2E, statistics_2E, batch: Batch, deferred) -> Steps:
        """(B, T, D) → (B, T, D), as steps. Adds to `statistics_2E` when training."""
        again = self.run.recompute if torch.is_grad_enabled() else "none"
        if not self.sparse:
            return segment(again == "layer", self.dense, x_BTD, rope)
        ids_NK = self.forced_ids(x_BTD, batch)
        h, tokens, ids_NK, statistics, plan = segment(
            again == "layer", self.attend_and_route, x_BTD, rope, state_2E, ids_NK
        )
        if torch.is_grad_enabled():
            statistics_2E += statistics
        if batch.routes is not None:
            batch.routes[self.index] = ids_NK
        here = Route()  # ep = 1: the experts are on this rank
        rows, weights, h = yield Exchange(here, (tokens, plan.weights_S), keep=(h,))
        plan = plan._replace(weights_S=weights)
        back = segment(again != "none", self.mlp_experts, rows, plan, deferred)
        back, h = yield Exchange(here.reverse(), (back,), keep=(h,))
        return self.aggregate(h, back)

    def attend(self, x_BTD: Tensor, rope) -> tuple[Tensor, Tensor]:
        """Residual stream after attention, and its norm: what the MLP or the experts read."""
        h = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope)
        return h, self.post_attention_layernorm(h)

    def attend_and_route(self, x_BTD: Tensor, rope, state_2E: Tensor, ids_NK: Tensor | None):
        """Attention, router and dispatch plan: (h, tokens (N, D), ids (N, K), statistics, plan)."""
        h, normed = self.attend(x_BTD, rope)
        tokens_ND = normed.flatten(0, 1)
        gate = self.mlp.gate
        weights_NK, ids_NK, aux, stats = gate(tokens_ND, len(x_BTD), state_2E, ids_NK)
        tokens_ND = AttachLoss.apply(tokens_ND, aux)
        plan = dispatch_plan(ids_NK, weights_NK, len(gate.weight), self.run.ep)
        return h, tokens_ND, ids_NK, stats, plan

    def mlp_experts(self, rows_RD: Tensor, plan: Plan, deferred: Deferred | None) -> Tensor:
        weights = self.mlp.experts.gate_up, self.mlp.experts.down
        return expert_mlp(rows_RD, plan.weights_S, *weights, plan, defer=deferred)

    def aggregate(self, h_BTD: Tensor, back_ND: Tensor) -> Tensor:
        return h_BTD + back_ND.view_as(h_BTD)

    def dense(self, x_BTD: Tensor, rope) -> Tensor:
        h, normed = self.attend(x_BTD, rope)
        return h + self.mlp(normed)

    def forced_ids(self, x_BTD: Tensor, batch: Batch) -> Tensor | None:
        """Choices (N, K) that replace the router's: replayed, or balanced for a benchmark.

        stride: token t's j-th expert is (t + j·E/K) mod E; random: K distinct, uniform.
        """
        if batch.routes is not None and self.index in batch.routes:
            return batch.routes[self.index]
        if self.run.force_balance is None:
            return None
        gate, N, device = self.mlp.gate, x_BTD.shape[0] * x_BTD.shape[1], x_BTD.device
        E, K = len(gate.weight), gate.K
        if self.run.force_balance == "stride":
            first_N1 = torch.arange(N, device=device)[:, None]
            return (first_N1 + torch.arange(K, device=device) * E // K) % E
        generator = seeded(device, self.run.seed, "routes", self.index, batch.index)
        return torch.rand(N, E, device=device, generator=generator).topk(K, dim=-1).indices


def segment(again: bool, function, *args):
    """Call `function`, its intermediates dropped and computed again in the backward if `again`."""
    if again:
        return recompute(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)


class Chunk(nn.Module):
    """A run of layers, with the embedding if it is the first and the head if it is the last.

    Parameter names are Hugging Face's, whatever the layers here. `state` (layers, 2, E): by layer
    the experts' share of the previous step's slots, and their bias; `statistics` (layers, 2, E):
    what the step's routers counted so far (slots, and sums of probabilities).
    """

    def __init__(self, model: Model, run: Config, layers: range, tied: nn.Parameter | None = None):
        super().__init__()
        self.arch, self.run = model, run
        self.first, self.last = layers.start == 0, layers.stop == model.num_hidden_layers
        self.model = nn.Module()
        if self.first:
            self.model.embed_tokens = nn.Module()
            self.model.embed_tokens.weight = parameter(model.vocab_size, model.hidden_size)
            tied = self.model.embed_tokens.weight
        self.tied = (tied,)  # in a tuple: the parameter is registered once, under its first name
        self.model.layers = nn.ModuleDict({str(i): Layer(model, run, i) for i in layers})
        if self.last:
            self.model.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
            if not model.tie_word_embeddings:
                self.lm_head = Linear(model.hidden_size, model.vocab_size)
        accumulator = torch.promote_types(torch.get_default_dtype(), torch.float32)
        E = model.num_experts
        self.state = torch.zeros(len(layers), 2, max(E, 1), dtype=accumulator)
        self.state[:, 0] = 1 / max(E, 1)
        self.statistics = torch.zeros_like(self.state)
        self.rope = rope_table(model, torch.arange(run.seq_len), torch.get_default_dtype())

    def forward(self, x_BTD: Tensor | None, batch: Batch, deferred: Deferred | None) -> Steps:
        """Steps to the hidden states, to the summed loss (last chunk), or without targets logits.

        The first chunk takes x = None and reads batch.tokens.
        """
        if self.first:
            x_BTD = F.embedding(batch.tokens, self.model.embed_tokens.weight)
        rope = tuple(table[: x_BTD.shape[1]] for table in self.rope)
        for layer, state, stats in zip(
            self.model.layers.values(), self.state, self.statistics, strict=True
        ):
            x_BTD = yield from layer(x_BTD, rope, state, stats, batch, deferred)
        if not self.last:
            return x_BTD
        hidden_BTD = self.model.norm(x_BTD)
        head = self.tied[0] if self.arch.tie_word_embeddings else self.lm_head.weight
        if batch.targets is None:
            return F.linear(hidden_BTD, head)
        return linear_cross_entropy(
            hidden_BTD.flatten(0, 1), head, batch.targets.flatten(), ignore_index=IGNORE
        )


def seeded(device: torch.device, *key: Any) -> torch.Generator:
    """A generator that depends on `key` alone: the step uses no global random state."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialise(name: str, weight: Tensor, std: float, seed: int, first_expert: int = 0) -> None:
    """Fill `weight`: norms with 1, matrices with N(0, std²), each expert's apart.

    A function of seed, name and expert index, never of the rank: every layout starts from the
    same bits (on one kind of device).
    """
    if weight.ndim == 1:
        weight.fill_(1)
        return
    parts = weight.unbind() if ".experts." in name else [weight]
    for i, part in enumerate(parts):
        generator = seeded(weight.device, seed, name, first_expert + i)
        wide = torch.promote_types(weight.dtype, torch.float32)
        noise = torch.empty(part.shape, dtype=wide, device=weight.device)
        part.copy_(noise.normal_(0, std, generator=generator))


def build(model: Model, run: Config, device: torch.device, n_chunks: int = 1) -> list[Chunk]:
    """The model as `n_chunks` chunks on `device`, initialised; inner chunks get the remainder."""
    count, extra = divmod(model.num_hidden_layers, n_chunks)
    inner_first = sorted(range(n_chunks), key=lambda i: abs(2 * i + 1 - n_chunks))
    sizes = [count + (i in inner_first[:extra]) for i in range(n_chunks)]
    chunks: list[Chunk] = []
    previous = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[run.dtype])
    try:
        with torch.device(device):
            for i, size in enumerate(sizes):
                layers = range(sum(sizes[:i]), sum(sizes[:i]) + size)
                chunks.append(Chunk(model, run, layers, chunks[0].tied[0] if chunks else None))
    finally:
        torch.set_default_dtype(previous)
    for name, weight in named_parameters(chunks):
        initialise(name, weight, model.initializer_range, run.seed)
    return chunks


def named_parameters(chunks: list[Chunk]) -> list[tuple[str, nn.Parameter]]:
    """All parameters of this rank under their whole-model names, a tied one once."""
    return [item for chunk in chunks for item in chunk.named_parameters()]


# ------------------------------------------------------------------------------------------------
# Hugging Face names
# ------------------------------------------------------------------------------------------------


def hf_views(name: str, weight: Tensor, first_expert: int = 0) -> list[tuple[str, Tensor]]:
    """A parameter as the published files have it: (name, view); views are read and written."""
    stem, experts, kind = name.partition(".experts.")
    if not experts:
        return [(name, weight)]
    views = []
    for e, part in enumerate(weight, first_expert):
        matrices = {"down_proj": part}
        if kind == "gate_up":
            matrices = dict(zip(("gate_proj", "up_proj"), part.chunk(2), strict=True))
        views += [(f"{stem}.experts.{e}.{m}.weight", view) for m, view in matrices.items()]
    return views


def hf_fused(name: str, weight: Tensor, first_expert: int = 0) -> list[tuple[str, Any]]:
    """The other spelling on disk, all experts in a tensor: (name, (destination, first expert))."""
    stem, experts, kind = name.partition(".experts.")
    return [(f"{stem}.experts.{kind}_proj", (weight, first_expert))] if experts else []


def hf_config(model: Model, dtype: str) -> dict[str, Any]:
    """config.json of a checkpoint."""
    names = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
    fixed = dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_act="silu",
        attention_bias=False, use_sliding_window=False, attention_dropout=0.0,
        torch_dtype=names[dtype],
    )  # fmt: skip
    return fixed | dataclasses.asdict(model)


def load_weights(chunks: list[Chunk], directory: Path) -> None:
    """Fill the parameters from a Hugging Face directory. Raises ValueError naming what is amiss."""
    views, fused = {}, {}
    for name, weight in named_parameters(chunks):
        views.update(hf_views(name, weight.detach()))
        fused.update(hf_fused(name, weight.detach()))
    tied = chunks[0].arch.tie_word_embeddings
    ignore = ("*.inv_freq", *(["lm_head.weight"] if tied else []))
    E = chunks[0].arch.num_experts
    hf.load_views(hf.Reader(directory), views, fused, ignore=ignore, n_experts=E)


# ------------------------------------------------------------------------------------------------
# FLOPs
# ------------------------------------------------------------------------------------------------


def active_parameters(model: Model) -> int:
    """Weights that multiply a token: all but the embedding and the experts it did not choose."""
    D, C = model.hidden_size, model.head_dim
    H, G = model.num_attention_heads, model.num_key_value_heads
    attention_weights = D * C * (2 * H + 2 * G)
    dense = 3 * D * model.intermediate_size
    routed = 3 * D * model.moe_intermediate_size * model.num_experts_per_tok
    sparse = sum(model.is_sparse(i) for i in range(model.num_hidden_layers))
    layers = model.num_hidden_layers * attention_weights
    layers += sparse * (routed + D * model.num_experts)
    layers += (model.num_hidden_layers - sparse) * dense
    return layers + D * model.vocab_size


def flops_per_token(model: Model, seq_len: int) -> float:
    """Forward and backward: 6 a weight, and attention's two products over the causal half."""
    heads = model.num_attention_heads * model.head_dim
    return 6 * active_parameters(model) + 6 * model.num_hidden_layers * heads * seq_len


# ------------------------------------------------------------------------------------------------
# Optimizer and checkpoints
# ------------------------------------------------------------------------------------------------


def build_optimizer(chunks: list[Chunk], run: Config) -> Optimizer:
    """A bucket a chunk and kind of parameter, and the optimizer over them."""
    buckets = []
    for chunk in chunks:
        for experts in (False, True):
            named = [(n, p) for n, p in chunk.named_parameters() if (".experts." in n) == experts]
            if named:
                device = named[0][1].device
                buckets += build_buckets(named, optimizer=run.optimizer, device=device)
    return Optimizer(
        buckets, beta1=run.beta1, beta2=run.beta2, eps=run.eps, weight_decay=run.weight_decay,
        clip=run.clip, moments=run.moments,
    )  # fmt: skip


def router_buffers(chunks: list[Chunk]) -> dict[str, Tensor]:
    """What the routers remember between steps, by layer: no published format has a place for it."""
    return {
        f"model.layers.{i}.mlp.gate.state": chunk.state[j]
        for chunk in chunks
        for j, i in enumerate(chunk.model.layers)
    }


def save(out: Path, step: int, trainer: "Trainer") -> None:
    """Write <out>/step-<step>: a Hugging Face directory and trainer/."""
    t = trainer
    views = {n: v for name, p in named_parameters(t.chunks) for n, v in hf_views(name, p.detach())}
    state = dict(
        tokens=t.tokens, micro_batches=t.micro_batches, data=t.loader.state_dict(),
        updates=t.optimizer.t, skipped=t.optimizer.skipped, run=to_json(t.run),
        model=dataclasses.asdict(t.model),
    )  # fmt: skip
    checkpoint.save(
        out, step, views=views, hf_config=hf_config(t.model, t.run.dtype),
        dtype=DTYPES[t.run.dtype], slices=t.optimizer.slices(), buffers=router_buffers(t.chunks),
        state=state, keep_last=t.run.keep_last,
    )  # fmt: skip


def resume(path: Path, trainer: "Trainer") -> int:
    """Go on from a checkpoint of this model; returns its step. Raises ValueError if it differs."""
    t, state = trainer, checkpoint.load_state(path)
    mine = to_plain(dataclasses.asdict(t.model))
    for key, value in mine.items():
        if state["model"].get(key) != value:
            raise ValueError(
                f"{path}: {key} is {state['model'].get(key)} there and {value} here: "
                f"use another --out, or the flags of that run"
            )
    checkpoint.load_slices(path, t.optimizer.slices())
    t.optimizer.refresh_params()
    for name, saved in checkpoint.load_buffers(path).items():
        router_buffers(t.chunks)[name].copy_(saved)
    t.optimizer.t, t.optimizer.skipped = state["updates"], state["skipped"]
    t.tokens, t.micro_batches = state["tokens"], state["micro_batches"]
    t.loader.load_state_dict(state["data"])
    return state["step"]


def to_plain(value: Any) -> Any:
    """As JSON returns it: tuples are lists."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}


# ------------------------------------------------------------------------------------------------
# Train step
# ------------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """Everything a step works on; `tokens` and `micro_batches` count over the whole run."""

    model: Model
    run: Config
    mesh: Mesh
    chunks: list[Chunk]
    optimizer: Optimizer
    loader: Loader
    tokens: int = 0
    micro_batches: int = 0


def split_batches(trainer: Trainer, samples: list) -> tuple[list[Batch], int]:
    """Read this rank's part of a step's sequences: its micro-batches, and the valid targets of all.

    Counted on the CPU, so that the GPU is not waited for.
    """
    t = trainer
    batches, valid = [], 0
    for m, ranks in enumerate(batch_map(len(samples), t.run.micro_batch, t.mesh.dp)):
        tokens, targets = t.loader.read(samples[ranks[0]])
        valid += int((targets != IGNORE).sum())
        if t.mesh.device.type == "cuda":
            tokens, targets = tokens.pin_memory(), targets.pin_memory()
        to_device = partial(Tensor.to, device=t.mesh.device, non_blocking=True)
        batches.append(Batch(to_device(tokens), to_device(targets), t.micro_batches + m))
    return batches, valid


def gradients(
    chunks: list[Chunk], batches: list[Batch], valid: int, around=lambda name: nullcontext()
) -> Tensor:
    """Accumulate the gradients of one step's loss; returns that loss (scalar, on the device).

    The loss is the sum over the step's tokens divided by the valid ones of all micro-batches, so
    that every reduction of gradients is a sum. Nothing here waits for the device.
    """
    weight = next(iter(chunks[0].parameters()))
    wide = torch.promote_types(weight.dtype, torch.float32)
    loss_grad = torch.full((), 1 / max(valid, 1), dtype=wide, device=weight.device)
    losses = run_schedule(chunks, batches, loss_grad, around=around)
    return torch.stack(losses).sum() / max(valid, 1)


@torch.no_grad()
def update_routers(chunks: list[Chunk], run: Config, skipped: bool) -> Tensor:
    """Use up the step's statistics: (sparse layers, 1 + E), each layer's balance, then its load.

    balance = E·Σ f·P over the whole step, 1.0 when perfect; load counts slots. Unless the step was
    skipped, f is what the next step's balance loss uses, and biases move towards equal load.
    """
    rows = []
    for chunk in chunks:
        slots, probs = chunk.statistics.unbind(1)  # (L, E) each
        share = slots / slots.sum(-1, keepdim=True).clamp(min=1)
        mean = probs / probs.sum(-1, keepdim=True).clamp(min=1e-30)
        balance = share.shape[1] * (share * mean).sum(-1, keepdim=True)
        layers = chunk.model.layers.values()
        table = torch.cat([balance, slots], dim=1)
        rows += [row for row, layer in zip(table, layers, strict=True) if layer.sparse]
        if not skipped:
            chunk.state[:, 0] = share
            error = share.mean(-1, keepdim=True) - share
            chunk.state[:, 1] += run.bias_update_rate * error.sign()
        chunk.statistics.zero_()
    return torch.stack(rows) if rows else chunks[0].state.new_zeros(0, 1)


def train_step(trainer: Trainer, step: int, around=lambda name: nullcontext()) -> dict[str, Any]:
    """One optimizer step over the next global batch; returns what the log shows of it.

    The host waits for the device twice, both after the last backward: for the gradient norm, and
    for the loss with the routers' statistics.
    """
    t, run = trainer, trainer.run
    begin = time.perf_counter()
    with around("data"):
        batches, valid = split_batches(t, t.loader.take(run.global_batch))
    t.optimizer.zero_grad()
    loss = gradients(t.chunks, batches, valid, around)
    lr = lr_at(run, step)
    with around("optimizer"):
        grad_norm, skipped = t.optimizer.step(lr)
    routers = update_routers(t.chunks, run, skipped)
    loss, *rest = torch.cat([loss[None], routers.flatten()]).tolist()
    table = [rest[i : i + routers.shape[1]] for i in range(0, len(rest), routers.shape[1])]
    tokens = run.global_batch * run.seq_len
    t.tokens, t.micro_batches = t.tokens + tokens, t.micro_batches + len(batches)
    record = dict(
        step=step, steps=run.steps, loss=loss, balance=[row[0] for row in table],
        expert_load=[[int(n) for n in row[1:]] for row in table], grad_norm=grad_norm, lr=lr,
        tokens=t.tokens, skipped=t.optimizer.skipped,
    )  # fmt: skip
    peak = None
    if t.mesh.device.type == "cuda":
        record["mem_gib"] = torch.cuda.max_memory_allocated() / 2**30
        peak = peak_flops(torch.cuda.get_device_name(), run.dtype)
    record["step_s"] = time.perf_counter() - begin
    flops = flops_per_token(t.model, run.seq_len)
    per_s, mfu = rates(tokens, record["step_s"], flops, peak, t.mesh.world)
    return record | dict(tokens_per_s=per_s, mfu=mfu)


# ------------------------------------------------------------------------------------------------
# Evaluation and sampling
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer: Trainer) -> tuple[float, int]:
    """Mean loss over the held-out sequences of `eval_batches` global batches: (loss, tokens)."""
    t, run = trainer, trainer.run
    samples = t.loader.heldout(run.eval_batches * run.global_batch)
    if not samples:
        raise ValueError("--eval-every: the data has no held-out sequence; use more data, or 0")
    total, tokens = 0.0, 0
    for i in range(0, len(samples), run.micro_batch):
        ids, targets = t.loader.read(samples[i : i + run.micro_batch])
        batch = Batch(ids.to(t.mesh.device), targets.to(t.mesh.device))
        (loss,) = run_schedule(t.chunks, [batch])
        total, tokens = total + loss.item(), tokens + int((targets != IGNORE).sum())
    return total / max(tokens, 1), tokens


@torch.no_grad()
def sample(trainer: Trainer, prompt: list[int], count: int, temperature: float = 0.8) -> list[int]:
    """`count` tokens that continue `prompt`, drawn from the model; always the same for a seed."""
    t, ids = trainer, list(prompt)
    generator = seeded(torch.device("cpu"), t.run.seed, "sample")
    for _ in range(count):
        window = torch.tensor([ids[-t.run.seq_len :]], device=t.mesh.device)
        (logits,) = run_schedule(t.chunks, [Batch(window)])
        probs = (logits[0, -1].float().cpu() / temperature).softmax(-1)
        ids.append(int(torch.multinomial(probs, 1, generator=generator)))
    return ids[len(prompt) :]


def show_sample(trainer: Trainer, log: Log) -> None:
    """Print a continuation of a line of Python, if the data's tokenizer is at hand."""
    encode, decode = encoder(trainer.run.data), decoder(trainer.run.data)
    if encode is None or decode is None:
        log.say("no sample: the data names no tokenizer file")
        return
    prompt = "def "
    text = decode(sample(trainer, encode(prompt), trainer.run.sample_tokens))
    log.say(f"--- sample after {prompt!r} ---\n{prompt}{text}\n---")


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


def set_up(run: Config) -> tuple[Trainer, Log, int]:
    """Check, then build; returns the step to go on from too. Raises ValueError, OSError."""
    check(run, world_size())
    model = model_of(run)
    check_model(model, run)
    mesh = start(run)
    loader = Loader(run.data, run.seq_len, model.vocab_size, run.seed)
    run.out.mkdir(parents=True, exist_ok=True)  # before the model: it may not be writable
    found = checkpoint.latest(run.out)
    chunks = build(model, run, mesh.device)
    if run.init_from is not None and found is None:
        load_weights(chunks, run.init_from)
    trainer = Trainer(model, run, mesh, chunks, build_optimizer(chunks, run), loader)
    step = 0 if found is None else resume(found, trainer)
    log = Log(run.out, to_json(run), rank=mesh.rank, wandb_project=run.wandb, resume_step=step)
    weights = sum(p.numel() for _, p in named_parameters(chunks))
    log.say(
        f"{SCRIPT} {run.preset}: {weights:,} weights, {active_parameters(model):,} active, "
        f"on {mesh.device}; data {loader.fingerprint}"
    )
    if found is not None:
        log.say(f"resumed {found}")
    if run.bias_update_rate:
        log.say("the routing bias is kept in trainer/ only: Hugging Face's format has no place")
    return trainer, log, step


def train(trainer: Trainer, log: Log, done: int) -> None:
    """Steps done + 1 to run.steps, with evaluations and checkpoints; stops early on a signal."""
    t, run = trainer, trainer.run
    profiler, stop = Profiler(run.profile, run.out), Stop()
    for step in range(done + 1, run.steps + 1):
        profiler.step_begin(step)
        log.step(train_step(t, step, profiler.range))
        profiler.step_end(step)
        last = step == run.steps or stop.requested
        if run.eval_every and (step % run.eval_every == 0 or step == run.steps):
            log.eval(step, *evaluate(t))
        if run.save_every and (step % run.save_every == 0 or last):
            save(run.out, step, t)
            log.say(f"saved step {step} in {run.out}")
        if stop.requested:
            log.say(f"stopped by {stop.requested} after step {step}")
            break
    profiler.close()
    stop.close()


def main(argv: list[str] | None = None) -> None:
    """Parse the flags, train (or evaluate), sample. A user's mistake is one line and status 1."""
    run = parse(Config, FLAGS, argv)
    if run.out is None:
        run = dataclasses.replace(run, out=Path("out") / f"{SCRIPT}-{run.preset}")
    try:
        trainer, log, done = set_up(run)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if run.eval_only:
        log.eval(done, *evaluate(trainer))
    else:
        train(trainer, log, done)
        if run.sample_tokens:
            show_sample(trainer, log)
    log.close()


if __name__ == "__main__":
    main()
