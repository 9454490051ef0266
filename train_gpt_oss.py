"""Train GPT-OSS (20B, 120B, any of its Hugging Face configs) from this one file.

    python train_gpt_oss.py                                    # tiny, on Python's own source
    torchrun --nproc-per-node 8 train_gpt_oss.py 20b --ep 8 --init-from DIR --data data/dclm
    python train_gpt_oss.py --eval-only --out out/train_gpt_oss-tiny

The tiny run falls from a loss of 5.6 to about 2.1 (nats a byte) in its 240 steps. From the
batch to the gradients one reads this file and common/dualpipev.py; the products of attention,
experts and loss are in kernels/.

Sections: config and presets, model (leaf to root), Hugging Face names, FLOPs, optimizer and
checkpoints, train step, evaluation and sampling, main.

A copy of train_qwen3_moe.py; what differs says so (`# differs:`). Every layer routes. Attention has
biases and a learned sink a head, no norms of queries and keys, a window on every second layer, and
YaRN's rope. The router has a bias and takes its softmax over the chosen; experts have biases and a
clamped SwiGLU. Files hold all experts of a layer in one tensor, in BF16 or MXFP4.

Shapes:
    B sequences of a micro-batch   T tokens of a sequence     N = B·T tokens    V vocabulary
    D hidden size                  H, G query, key/value heads                  C head dim
    E experts                      K experts a token          F expert width    S = N·K routed slots
    P ranks that share experts     R rows that come to one rank, N·P at most
"""

import dataclasses
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import checkpoint as recompute

from common import checkpoint, hf, lifecycle, mxfp4
from common.checkpoint import Saver
from common.config import Run, check, fail, lr_at, parse, to_json
from common.data import IGNORE, Batch, Loader, Prefetch, read_batches, to_device
from common.dualpipev import Counts, Defer, Exchange, Route, Steps
from common.dualpipev import run as run_schedule
from common.graph import replay_for
from common.lifecycle import announce, load_weights, named_parameters, resume, save, show_sample
from common.log import Log, Profiler, Stop, figures
from common.mesh import Mesh, Pipe, Room, from_rank_0, seeded, spread_layers, start, world_size
from common.optim import Optimizer, build_buckets
from common.rundir import lock
from common.tokens import DataError
from kernels.attention import attention
from kernels.cross_entropy import linear_cross_entropy
from kernels.dispatch import Plan, collect, crossing, dispatch_plan, lay_out, spread, up
from kernels.embedding import embedding
from kernels.experts import ClampedSwiGLU, expert_mlp
from kernels.ring import zigzag
from kernels.router import router_logits

# ------------------------------------------------------------------------------------------------
# Config and presets
# ------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).stem
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Config(Run):
    # differs: one flag more
    """The run's flags, and this script's."""

    mxfp4: bool = False
    """Checkpoints with the experts' matrices rounded to MXFP4, as published (resume is exact)."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, under the names of Hugging Face's config."""

    rope_type: str = "yarn"
    factor: float = 32.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = False  # whether the range of pairs is rounded to whole ones
    original_max_position_embeddings: int = 4096


ALTERNATE = ("sliding_attention", "full_attention")


@dataclass(frozen=True)
class Model:
    # differs: another architecture
    """The architecture, under the names of Hugging Face's GptOssConfig. Defaults: 20B."""

    vocab_size: int = 201088  # differs: 20B's size
    hidden_size: int = 2880  # differs: 20B's size
    num_hidden_layers: int = 24  # differs: 20B's size
    num_attention_heads: int = 64  # differs: 20B's size
    num_key_value_heads: int = 8  # differs: 20B's size
    head_dim: int = 64  # differs: 20B's size
    # differs: of an expert; no layer is dense
    intermediate_size: int = 2880
    num_experts: int = 32  # num_local_experts in files  # differs: 20B's size
    num_experts_per_tok: int = 4  # differs: 20B's size
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0  # gate above, up on both sides
    layer_types: tuple[str, ...] = ALTERNATE * 12
    sliding_window: int = 128  # keys that a token sees in a layer of that type, itself included
    rope_theta: float = 150000.0  # differs: 20B's size
    # differs: always YaRN
    rope_scaling: RopeScaling = RopeScaling()
    rms_norm_eps: float = 1e-5  # differs: 20B's size
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 131072  # differs: 20B's size

    def window(self, layer: int) -> int | None:
        """Keys that a token sees in `layer`, None for all; `layer_types` repeats."""
        kind = self.layer_types[layer % len(self.layer_types)]
        return self.sliding_window if kind == "sliding_attention" else None


# differs: another architecture
TINY = Model(
    vocab_size=257, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=40, intermediate_size=96, num_experts=8, num_experts_per_tok=2,
    layer_types=ALTERNATE * 2, sliding_window=32, rope_theta=1e4,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=1024),
    max_position_embeddings=4096,
)  # fmt: skip
# differs: other models
MODELS = {
    "tiny": TINY,
    "20b": Model(),
    "120b": Model(num_hidden_layers=36, num_experts=128, layer_types=ALTERNATE * 18),
}
# differs: other models
FLAGS: dict[str, dict[str, Any]] = {
    "tiny": dict(
        seq_len=128, micro_batch=8, global_batch=16, steps=240, lr=3e-3, warmup=5,
        schedule="cosine", dtype="fp32", compile=False, eval_every=80, eval_batches=4,
        save_every=80, sample_tokens=200,
    ),
    "20b": {},
    "120b": {},
}  # fmt: skip


def rope_scaling_of(config: dict[str, Any], source: Path) -> RopeScaling:
    """YaRN of a config that hf.read_config gave. Raises ValueError for any other rope."""
    given = {k: v for k, v in (config["rope_scaling"] or {}).items() if v is not None}
    keys = [f.name for f in dataclasses.fields(RopeScaling)]
    needed = {"factor", "original_max_position_embeddings"}
    if given.get("rope_type") != "yarn" or not needed <= given.keys() <= set(keys):
        said = f"only yarn, with its factor, and {', '.join(keys[2:])}"
        raise ValueError(f"{source}: rope_scaling {given} is not supported, {said}")
    numbers = [given[key] for key in keys if key in given and key not in ("rope_type", "truncate")]
    if not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        raise ValueError(f"{source}: rope_scaling {given} must have numbers above 0")
    return RopeScaling(**({"truncate": True} | given))  # transformers rounds unless told not to


def model_of(run: Config) -> Model:
    # differs: what must be given and what is refused; YaRN; layer types
    """The architecture that the flags name. Raises ValueError for what this script cannot do."""
    model = MODELS[run.preset]
    source = run.model_config or run.init_from
    if source is not None:
        config = hf.read_config(source)
        hf.expect_model_type(config, source, ("gpt_oss",))
        for key, value in dict(attention_bias=True, hidden_act="silu").items():
            if config.get(key, value) != value:
                raise ValueError(f"{source}: {key} {config[key]} is not supported, only {value}")
        config["rope_scaling"] = rope_scaling_of(config, source)
        types = {f.name: f.type for f in dataclasses.fields(Model)}
        sizes, numbers = ([k for k, kind in types.items() if kind is t] for t in (int, float))
        hf.check_sizes(config, source, sizes, numbers)
        depth = config["num_hidden_layers"]
        kinds = config.get("layer_types") or [ALTERNATE[i % 2] for i in range(depth)]
        if len(kinds) != depth or not set(kinds) <= set(ALTERNATE):
            raise ValueError(f"{source}: layer_types must say {' or '.join(ALTERNATE)} of each of "
                             f"the {depth} layers, not {kinds}")  # fmt: skip
        if not (config.get("rope_theta") or 0) > 1:
            raise ValueError(f"{source}: rope_theta {config.get('rope_theta')} must be above 1")
        config["layer_types"] = tuple(kinds)
        model = Model(**{key: value for key, value in config.items() if key in types})
    if run.layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=run.layers)
    return model


def check_model(model: Model, run: Config) -> None:
    # differs: names of sizes; YaRN, the activation's limit, MXFP4
    """Refuse, before anything is built, a model that cannot be or that the layout cannot hold."""
    E, K, heads = model.num_experts, model.num_experts_per_tok, model.num_attention_heads
    D, width, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    divisors = [n for n in range(1, E + 1) if E % n == 0]
    cuda, yarn = torch.cuda.is_available(), model.rope_scaling
    low, high = yarn_range(model)
    for wrong, said in (
        (E % run.ep, f"--ep {run.ep} does not divide num_experts {E}; use one of {divisors}"),
        (not 1 <= K <= E, f"num_experts_per_tok {K} must lie between 1 and num_experts {E}"),
        (heads % model.num_key_value_heads, f"num_key_value_heads {model.num_key_value_heads} "
         f"must divide num_attention_heads {heads}"),
        (model.head_dim % 2, f"head_dim {model.head_dim} must be even: rope turns pairs"),
        (yarn.factor < 1, f"rope_scaling factor {yarn.factor} must be at least 1 (1: plain rope)"),
        (low >= high, f"rope_scaling beta_fast {yarn.beta_fast}, beta_slow {yarn.beta_slow} and "
         f"original_max_position_embeddings {yarn.original_max_position_embeddings} leave no range "
         f"of pairs: {low:.2f} to {high:.2f}; published are 32, 1 and 4096"),
        (model.swiglu_limit <= 0, f"swiglu_limit {model.swiglu_limit} must be above 0"),
        (run.pp > 1 and layers < 2 * run.pp,
         f"--pp {run.pp} needs at least {2 * run.pp} layers, the model has {layers}"),
        (run.seq_len > model.max_position_embeddings, f"--seq-len {run.seq_len} is longer than "
         f"max_position_embeddings {model.max_position_embeddings}"),
        (cuda and (D % 8 or width % 8), f"hidden_size {D} and intermediate_size {width} must "
         f"be multiples of 8 on a GPU, for rows of 16 bytes"),
        (run.mxfp4 and (D % mxfp4.BLOCK or width % mxfp4.BLOCK), f"--mxfp4: hidden_size {D} and "
         f"intermediate_size {width} must be multiples of {mxfp4.BLOCK}"),
        (cuda and run.dtype == "fp64", "--dtype fp64 is for a CPU; use bf16 or fp32 on a GPU"),
    ):  # fmt: skip
        if wrong:
            raise ValueError(said)


# ------------------------------------------------------------------------------------------------
# Model, leaf to root
# ------------------------------------------------------------------------------------------------


def parameter(*shape: int) -> nn.Parameter:
    """Uninitialised, of torch's default dtype and device; `initialise` fills it by its name."""
    return nn.Parameter(torch.empty(*shape))


class Linear(nn.Module):
    # differs: may have a bias
    """x Wᵀ, plus a bias if there is one."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        # differs: may have a bias
        super().__init__()
        self.weight = parameter(outputs, inputs)
        self.bias = parameter(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # differs: may have a bias


class RMSNorm(nn.Module):
    # differs: rounded once
    """x / rms(x) · weight over the last axis, in fp32 and rounded after the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = parameter(size), eps

    def forward(self, x: Tensor) -> Tensor:
        x_up = up(x)
        scale = torch.rsqrt(x_up.pow(2).mean(-1, keepdim=True) + self.eps)
        return (up(self.weight) * (x_up * scale)).to(x.dtype)  # differs: rounded after the weight


class Places(NamedTuple):
    """Where tokens stand: cos and sin, (T, 1, C/2) or (B, T, 1, C/2), and where documents begin."""

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor | None = None


def yarn_range(model: Model) -> tuple[float, float]:
    """The (fractional) pairs that turn beta_fast and beta_slow times within the original context.

    YaRN (arXiv 2309.00071), section 3.2; published GPT-OSS does not round them.
    """
    yarn, C, base = model.rope_scaling, model.head_dim, math.log(model.rope_theta)
    turns = yarn.original_max_position_embeddings / (2 * math.pi)  # of pair 0, at a radian a token
    betas = yarn.beta_fast, yarn.beta_slow
    low, high = (C * math.log(turns / beta) / (2 * base) for beta in betas)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, C - 1)


def rope_table(model: Model, positions: Tensor, dtype: torch.dtype) -> Places:
    # differs: YaRN
    """cos and sin (T, 1, C/2) of the rotations, times YaRN's factor, never below fp32.

    Pair i turns by theta^(-2i/C) a token; from `yarn_range`'s low end to its high end this falls
    to a `factor`-th (YaRN, arXiv 2309.00071, sections 3.2 and 3.4).
    """
    wide = torch.promote_types(dtype, torch.float32)
    pairs = torch.arange(model.head_dim // 2, dtype=wide, device=positions.device)
    low, high = yarn_range(model)
    interpolated = ((pairs - low) / (high - low)).clamp(0, 1)
    slower = 1 - interpolated + interpolated / model.rope_scaling.factor
    frequencies = model.rope_theta ** (-2 * pairs / model.head_dim) * slower
    angles = torch.outer(positions.to(wide), frequencies)
    magnitude = 0.1 * math.log(model.rope_scaling.factor) + 1
    return Places(*(x[:, None] * magnitude for x in (angles.cos(), angles.sin())))


def rotate(x_BTHC: Tensor, places: Places) -> Tensor:
    """Turn the pairs (x_i, x_{i+C/2}) by the position's angles, in fp32."""
    a, b = up(x_BTHC).chunk(2, dim=-1)
    turned = [a * places.cos - b * places.sin, b * places.cos + a * places.sin]
    return torch.cat(turned, -1).to(x_BTHC.dtype)


class Attention(nn.Module):
    # differs: window, sinks, biases, no norms
    """Grouped-query attention with biases, a learned sink a query head and maybe a window."""

    def __init__(self, model: Model, mesh: Mesh, window: int | None):
        # differs: window, sinks, biases, no norms
        super().__init__()
        D, C = model.hidden_size, model.head_dim
        self.head_dim, self.ring, self.window = C, mesh.ring, window
        self.q_proj = Linear(D, model.num_attention_heads * C, bias=True)
        self.k_proj = Linear(D, model.num_key_value_heads * C, bias=True)
        self.v_proj = Linear(D, model.num_key_value_heads * C, bias=True)
        self.o_proj = Linear(model.num_attention_heads * C, D, bias=True)
        self.sinks = parameter(model.num_attention_heads)

    def forward(self, x_BTD: Tensor, places: Places) -> Tensor:
        # differs: window and sinks, no norms
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = rotate(self.q_proj(x_BTD).view(heads), places)
        k_BTGC = rotate(self.k_proj(x_BTD).view(heads), places)
        v_BTGC = self.v_proj(x_BTD).view(heads)
        qkv = (x.transpose(1, 2) for x in (q_BTHC, k_BTGC, v_BTGC))  # views, as is the output
        out_BHTC, _ = attention(
            *qkv, scale=self.head_dim**-0.5, window=self.window, sink=self.sinks,
            cu_seqlens=places.cu_seqlens, ring=self.ring,
        )  # fmt: skip
        return self.o_proj(out_BHTC.transpose(1, 2).flatten(2))


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


def mix(x: Tensor) -> Tensor:
    """Integers below 2^32 to pseudo-random ones (lowbias32, github.com/skeeto/hash-prospector)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def random_ids(number_N: Tensor, E: int, K: int) -> Tensor:
    """K distinct experts (N, K) of E for each token, uniform, drawn by the token's number (int64).

    Not from a generator: its state is the host's, and a CUDA graph could not advance it.
    """
    x_NE = number_N[:, None] * E + torch.arange(E, device=number_N.device)
    x_NE = mix(mix(x_NE & 0xFFFFFFFF) ^ mix(x_NE >> 32))
    return (x_NE >> 9).float().topk(K, dim=-1).indices  # 23 bits: exact


class Router(nn.Module):
    # differs: a softmax over the chosen; a bias
    """The top K logits, then the softmax over these; all in fp32."""

    def __init__(self, model: Model, run: Config, mesh: Mesh):
        # differs: a bias
        super().__init__()
        self.weight = parameter(model.num_experts, model.hidden_size)
        self.bias = parameter(model.num_experts)
        self.K = model.num_experts_per_tok
        self.run, self.ring = run, mesh.ring

    def forward(self, tokens_ND, sequences: int, state_2E, ids_NK):
        """Choose: (weights (N, K), ids (N, K), auxiliary loss, statistics (2, E)).

        state_2E: each expert's share of the previous step's slots, and its bias. ids_NK replaces
        the choice, or is numbers (N,) that random ones are drawn from. Statistics: slots received,
        and the sum of probabilities.
        """
        # differs: a bias; chosen by logits, weights renormalised
        logits_NE = router_logits(tokens_ND, self.weight) + up(self.bias)
        probs_NE = logits_NE.softmax(-1)
        previous_E, bias_E = state_2E.unbind()
        if ids_NK is None:
            ids_NK = (logits_NE + bias_E).topk(self.K, dim=-1).indices
        elif ids_NK.ndim == 1:
            ids_NK = random_ids(ids_NK, probs_NE.shape[1], self.K)
        weights_NK = logits_NE.gather(-1, ids_NK).softmax(-1)

        N, E = probs_NE.shape
        chosen_BE = F.one_hot(ids_NK, E).view(sequences, -1, E).sum(1).to(probs_NE.dtype)
        probs_BE = probs_NE.view(sequences, -1, E).sum(1)
        counts_BE = chosen_BE
        if self.ring is not None and self.run.balance == "sequence":
            counts_BE = all_reduce(chosen_BE, "sum", self.ring)  # the sequence's other parts
        share = {
            "none": torch.zeros_like(previous_E),
            "global-batch": previous_E,  # of the whole previous step: the same in every layout
            "micro-batch": chosen_BE.sum(0) / (N * self.K),
            "sequence": counts_BE / counts_BE.sum(-1, keepdim=True),
        }[self.run.balance]
        step_tokens = self.run.global_batch * self.run.seq_len  # terms are means over a step
        aux = self.run.balance_coef * E / step_tokens * (share.detach() * probs_BE).sum()
        if self.run.z_loss_coef:
            z = logits_NE.logsumexp(-1).pow(2).sum()
            aux = aux + self.run.z_loss_coef / step_tokens * z
        statistics = torch.stack([chosen_BE.sum(0), probs_BE.sum(0)]).detach()
        return weights_NK, ids_NK, aux, statistics


class Experts(nn.Module):
    # differs: biases
    """This rank's experts, stacked: gate_up (E/ep, 2F, D), gate rows first; down (E/ep, D, F).

    Their biases: gate_up_bias (E/ep, 2F), down_bias (E/ep, D).
    """

    def __init__(self, model: Model, ep: int):
        # differs: biases; the width's name
        super().__init__()
        E, D, width = model.num_experts // ep, model.hidden_size, model.intermediate_size
        self.gate_up, self.down = parameter(E, 2 * width, D), parameter(E, D, width)
        self.gate_up_bias, self.down_bias = parameter(E, 2 * width), parameter(E, D)


class MoE(nn.Module):  # only its parameters' names; Layer.forward computes with them
    def __init__(self, model: Model, run: Config, mesh: Mesh):
        super().__init__()
        self.gate, self.experts = Router(model, run, mesh), Experts(model, mesh.ep)


class Layer(nn.Module):
    # differs: every layer routes
    """One transformer layer, cut into what lies between two communications.

    attend_and_route → (tokens to their experts) → experts → (and back) → aggregate. The experts
    are not compiled, the rest is: one variant with a window and one without.
    """

    def __init__(self, model: Model, run: Config, mesh: Mesh, index: int):
        # differs: every layer routes; window by layer, clamped SwiGLU
        super().__init__()
        self.index, self.run, self.mesh = index, run, mesh
        self.activation = ClampedSwiGLU(model.swiglu_alpha, model.swiglu_limit)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model, mesh, model.window(index))
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.mlp = MoE(model, run, mesh)
        if run.compile:
            for name in ("attend_and_route", "aggregate"):
                method = getattr(self, name)
                setattr(self, name, torch.compile(method, fullgraph=True, dynamic=False))

    def forward(self, x_BTD, places, state_2E, statistics_2E, batch: Batch, defer) -> Steps:
        """(B, T, D) → (B, T, D), as steps. Adds to `statistics_2E` when training."""
        again = self.run.recompute if torch.is_grad_enabled() else "none"
        # differs: every layer routes
        ids_NK = self.forced_ids(x_BTD, batch)
        h, tokens, weights_NK, ids_NK, statistics = segment(
            again == "layer", self.attend_and_route, x_BTD, places, state_2E, ids_NK
        )
        if torch.is_grad_enabled():
            statistics_2E += statistics
        if batch.routes is not None:
            batch.routes[self.index] = ids_NK
        mesh, E = self.mesh, len(self.mlp.gate.weight)
        if mesh.experts is None:  # every expert is here
            route, slots, cross = Route(), None, None
            sent = tokens, ids_NK, weights_NK
        else:
            cross = crossing(ids_NK, E, mesh.ep)
            counts = yield Counts(mesh.counts, cross.counts_P2, batch.room)
            route, slots = counts.route(mesh.experts), counts.received_slots
            cross = lay_out(cross, route.send_counts)
            sent = spread(tokens, ids_NK, weights_NK, cross, E // mesh.ep)
        rows, ids, weights, h = yield Exchange(route, sent, keep=(h,))
        plan = dispatch_plan(ids, E // mesh.ep, slots)
        back = segment(again != "none", self.mlp_experts, rows, weights, plan, defer)
        back, h = yield Exchange(route.reverse(), (back,), keep=(h,))
        return self.aggregate(h, back if cross is None else collect(back, cross))

    def attend(self, x_BTD: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Residual stream after attention, and its norm: what the MLP or the experts read."""
        h = x_BTD + self.self_attn(self.input_layernorm(x_BTD), places)
        return h, self.post_attention_layernorm(h)

    def attend_and_route(self, x_BTD, places: Places, state_2E: Tensor, ids_NK: Tensor | None):
        """Attention and router: (h, tokens (N, D), weights and ids (N, K), statistics (2, E))."""
        h, normed = self.attend(x_BTD, places)
        tokens_ND = normed.flatten(0, 1)
        gate = self.mlp.gate
        weights_NK, ids_NK, aux, stats = gate(tokens_ND, len(x_BTD), state_2E, ids_NK)
        tokens_ND = AttachLoss.apply(tokens_ND, aux)
        return h, tokens_ND, weights_NK, ids_NK, stats

    def mlp_experts(self, rows_RD, weights_RK, plan: Plan, defer: Defer | None) -> Tensor:
        experts = self.mlp.experts  # differs: clamped SwiGLU, biases
        return expert_mlp(
            rows_RD, weights_RK, experts.gate_up, experts.down, plan, activation=self.activation,
            biases=(experts.gate_up_bias, experts.down_bias), defer=defer,
        )  # fmt: skip

    def aggregate(self, h_BTD: Tensor, back_ND: Tensor) -> Tensor:
        return h_BTD + back_ND.view_as(h_BTD)

    def forced_ids(self, x_BTD: Tensor, batch: Batch) -> Tensor | None:
        """What replaces the router's choices: those to replay, or balanced ones for a benchmark.

        stride: (N, K), token t's j-th expert is (t + j·E/K) mod E; random: numbers (N,), other ones
        for each layer and seed, from which `random_ids` draws K distinct experts uniformly.
        """
        if batch.routes is not None and self.index in batch.routes:
            return batch.routes[self.index]
        if self.run.force_balance is None:
            return None
        E, K, numbers = len(self.mlp.gate.weight), self.mlp.gate.K, batch.numbers
        if numbers is None:
            numbers = torch.arange(x_BTD.shape[0] * x_BTD.shape[1], device=x_BTD.device)
        if self.run.force_balance == "stride":
            return (numbers.view(-1, 1) + torch.arange(K, device=x_BTD.device) * E // K) % E
        return numbers.flatten() + (((self.run.seed << 10) + self.index) % 2**20 << 33)


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

    def __init__(
        self, model: Model, run: Config, mesh: Mesh, layers: range, tied: nn.Parameter | None = None
    ):
        super().__init__()
        self.arch = model
        self.first, self.last = layers.start == 0, layers.stop == model.num_hidden_layers
        self.model = nn.Module()
        if self.first:
            self.model.embed_tokens = nn.Module()
            self.model.embed_tokens.weight = parameter(model.vocab_size, model.hidden_size)
            tied = self.model.embed_tokens.weight
        self.tied = (tied,)  # in a tuple: the parameter is registered once, under its first name
        self.model.layers = nn.ModuleDict({str(i): Layer(model, run, mesh, i) for i in layers})
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
        self.here = zigzag(run.seq_len, mesh.cp, mesh.cp_rank) if mesh.cp > 1 else None

    def forward(self, x_BTD: Tensor | None, batch: Batch, defer: Defer | None) -> Steps:
        """Steps to the hidden states, to the summed loss (last chunk), or without targets logits.

        The first chunk takes x = None and reads batch.tokens.
        """
        if self.first:
            x_BTD = embedding(batch.tokens, self.model.embed_tokens.weight)
        at = slice(x_BTD.shape[1]) if self.here is None else self.here
        at = at if batch.positions is None else batch.positions
        places = Places(self.rope.cos[at], self.rope.sin[at], batch.cu_seqlens)
        for layer, state, stats in zip(
            self.model.layers.values(), self.state, self.statistics, strict=True
        ):
            x_BTD = yield from layer(x_BTD, places, state, stats, batch, defer)
        if not self.last:
            return x_BTD
        hidden_BTD = self.model.norm(x_BTD)
        head = self.tied[0] if self.arch.tie_word_embeddings else self.lm_head.weight
        if batch.targets is None:
            return F.linear(hidden_BTD, head)
        x_ND, y_N = hidden_BTD.flatten(0, 1), batch.targets.flatten()
        return linear_cross_entropy(x_ND, head, y_N, ignore_index=IGNORE, grad=batch.loss_grad)


@torch.no_grad()
def initialise(name: str, weight: Tensor, std: float, seed: int, first_expert: int = 0) -> None:
    # differs: biases and sinks
    """Fill `weight`: norms with 1, biases (also the experts', stacked) and sinks with 0, matrices
    with N(0, std²), each expert's apart.

    A function of seed, name and expert index, never of the rank: every layout starts from the
    same bits (on one kind of device).
    """
    if weight.ndim == 1 or name.endswith("bias"):
        weight.fill_(0 if name.endswith(("bias", "sinks")) else 1)
        return
    stack = ".experts." in name
    for i, part in enumerate(weight.unbind() if stack else [weight]):
        generator = seeded(weight.device, seed, name, first_expert + i if stack else 0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        noise = torch.empty(part.shape, dtype=wide, device=weight.device)
        part.copy_(noise.normal_(0, std, generator=generator))


def build(model: Model, run: Config, mesh: Mesh, n_chunks: int | None = None) -> list[Chunk]:
    """This rank's chunks of the model, on its device, initialised.

    `n_chunks`: of the whole model; 2·pp if there is anything to overlap, else 1.
    """
    if n_chunks is None:
        n_chunks = 2 * mesh.pp if mesh.pp * mesh.ep > 1 and model.num_hidden_layers > 1 else 1
    head = model.hidden_size * model.vocab_size / active_parameters(model)
    spans = spread_layers(model.num_hidden_layers, n_chunks, head)
    if mesh.pp > 1:
        spans = [spans[mesh.pp_rank], spans[-1 - mesh.pp_rank]]
    chunks: list[Chunk] = []
    previous = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[run.dtype])
    try:
        with torch.device(mesh.device):
            for span in spans:
                chunks.append(Chunk(model, run, mesh, span, chunks[0].tied[0] if chunks else None))
    finally:
        torch.set_default_dtype(previous)
    first = mesh.first_expert(model.num_experts)
    for name, weight in named_parameters(chunks):
        initialise(name, weight, model.initializer_range, run.seed, first)
    return chunks


# ------------------------------------------------------------------------------------------------
# Hugging Face names
# ------------------------------------------------------------------------------------------------


def hf_views(name: str, weight: Tensor, first_expert: int = 0) -> list[tuple[str, Any]]:
    # differs: all experts in a tensor, inputs before outputs, gate and up alternating
    """A parameter as the published files have it: (name, view); views are read and written."""
    stem, experts, kind = name.partition(".experts.")
    if not experts:
        return [(name.replace(".mlp.gate.", ".mlp.router."), weight)]
    what, bias, _ = kind.partition("_bias")
    rows = weight if what == "down" else weight.unflatten(1, (2, -1))  # (E, 2, F) or (E, 2, F, D)
    rows = rows.permute(0, *range(rows.ndim - 1, 0, -1))  # (E, D, F, 2)
    shape = tuple(reversed(weight.shape[1:]))  # of an expert: (D, 2F)
    return [(f"{stem}.experts.{what}_proj{bias}", hf.Rows(rows, first_expert, shape))]


def hf_fused(name: str, weight: Tensor, first_expert: int = 0) -> list[tuple[str, Any]]:
    # differs: MXFP4 is the only other spelling, and common/hf.py reads it
    """Other names on disk: none."""
    return []


def packed_views(name: str, weight: Tensor, first_expert: int = 0) -> list[tuple[str, Any]]:
    """As `hf_views`, but the experts' matrices in MXFP4: new tensors, to be written only."""
    return list(mxfp4.packed(dict(hf_views(name, weight, first_expert))).items())


def whole(model: Model) -> Chunk:
    """The whole model without memory, for its names and shapes."""
    mesh = Mesh(0, 1, 1, 1, 1, 1, torch.device("meta"))
    with torch.device("meta"):
        return Chunk(model, Config(seq_len=2), mesh, range(model.num_hidden_layers))


def hf_config(model: Model, dtype: str, packed: bool = False) -> dict[str, Any]:
    # differs: another architecture; `packed`: the files are in MXFP4
    """config.json of a checkpoint."""
    fixed = dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", hidden_act="silu",
        attention_bias=True, attention_dropout=0.0,
        initial_context_length=model.rope_scaling.original_max_position_embeddings,
        torch_dtype=str(DTYPES[dtype]).removeprefix("torch."),
    )  # fmt: skip
    if packed:
        fixed["quantization_config"] = mxfp4.QUANTIZATION_CONFIG
    sizes, depth = dataclasses.asdict(model), model.num_hidden_layers
    sizes["layer_types"] = (model.layer_types * depth)[:depth]
    return fixed | {"num_local_experts": sizes.pop("num_experts")} | sizes


# ------------------------------------------------------------------------------------------------
# FLOPs
# ------------------------------------------------------------------------------------------------


def active_parameters(model: Model) -> int:
    # differs: every layer routes
    """Weights that multiply a token: all but the embedding and the experts it did not choose."""
    D, C = model.hidden_size, model.head_dim
    H, G = model.num_attention_heads, model.num_key_value_heads
    attention_weights = D * C * (2 * H + 2 * G)
    routed = 3 * D * model.intermediate_size * model.num_experts_per_tok
    layers = model.num_hidden_layers * (attention_weights + routed + D * model.num_experts)
    return layers + D * model.vocab_size


def flops_per_token(model: Model, seq_len: int) -> float:
    # differs: windows
    """Forward and backward: 6 a weight, and attention's two products over the keys in sight."""
    heads, keys = model.num_attention_heads * model.head_dim, 0.0
    for layer in range(model.num_hidden_layers):
        window = min(model.window(layer) or seq_len, seq_len)
        keys += window - window * window / (2 * seq_len)  # on average: the first tokens see fewer
    return 6 * active_parameters(model) + 12 * heads * keys


# ------------------------------------------------------------------------------------------------
# Optimizer and checkpoints
# ------------------------------------------------------------------------------------------------


def build_optimizer(chunks: list[Chunk], run: Config, mesh: Mesh) -> Optimizer:
    """Buckets by chunk and by who replicates the parameters (`chunk.buckets`), and their rules."""
    for chunk in chunks:
        chunk.buckets = []
        for experts, group in ((False, mesh.stage), (True, mesh.replicas)):
            named = [(n, p) for n, p in chunk.named_parameters() if (".experts." in n) == experts]
            first = mesh.first_expert(chunk.arch.num_experts)
            if named:
                chunk.buckets += build_buckets(
                    named, optimizer=run.optimizer, group=group, first_expert=first,
                    device=mesh.device,
                )  # fmt: skip
    buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
    flags = ("beta1", "beta2", "eps", "weight_decay", "clip", "moments")
    return Optimizer(buckets, **{name: getattr(run, name) for name in flags})


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
    lock: Any = None  # held on --out as long as this lives
    tokens: int = 0
    micro_batches: int = 0

    def __post_init__(self):
        run, mesh = self.run, self.mesh
        self.batches = Prefetch(self.loader, partial(read_batches, self.loader, run, mesh))
        ranks = dict(rank=mesh.rank, world=mesh.world, timeout_s=run.timeout / 2)
        self.saver = Saver(run.out, keep_last=run.keep_last, **ranks)
        self.pipe = None  # of hidden states, where there is more than one chunk
        if len(self.chunks) > 1:
            shape = run.micro_batch, run.seq_len // mesh.cp, self.model.hidden_size
            like = torch.empty(shape, dtype=DTYPES[run.dtype], device=mesh.device)
            self.pipe = Pipe(mesh.pp_rank, mesh.pipeline, mesh.down, mesh.up, like)
        self.room = Room(run, mesh, self.model.num_experts_per_tok) if mesh.ep > 1 else None
        self.replay = replay_for(run, mesh, self.chunks, self.pipe)


def gradients(
    trainer: Trainer, batches: list[Batch], valid: int, around=lambda name: nullcontext()
) -> Tensor:
    """Accumulate the gradients of one step's loss; returns this rank's share of that loss (scalar).

    The loss is the sum over the step's tokens divided by the valid ones of all micro-batches of
    all ranks, so that every reduction of gradients is a sum. A chunk's gradients are on their way
    to their owners as soon as they are complete. The host waits for the device only with --ep:
    behind the last backward, for whether there was room, and without room in every exchange.
    """
    t, mesh = trainer, trainer.mesh
    count = torch.full((), valid, dtype=t.chunks[0].state.dtype, device=mesh.device)
    if mesh.stage is not None:
        dist.all_reduce(count, group=mesh.stage)
    loss_grad = count.clamp(min=1).reciprocal()  # the head makes its gradients in the forward
    batches = [dataclasses.replace(b, loss_grad=loss_grad, room=t.room) for b in batches]

    def finished(chunk: int) -> None:
        for bucket in t.chunks[chunk].buckets:
            bucket.reduce()

    how = dict(pipe=t.pipe, wgrad_batch=t.run.wgrad_batch)
    execute = t.replay or partial(run_schedule, t.chunks, **how)
    losses = execute(batches, loss_grad, finished=finished, around=around)
    if t.room is not None and not t.room.settle():  # once more, and now waiting for the sizes
        t.optimizer.zero_grad()  # behind the reductions under way
        torch._foreach_zero_([chunk.statistics for chunk in t.chunks])
        return gradients(t, batches, valid, around)
    return torch.stack(losses).sum() * loss_grad if losses else 0 * loss_grad  # another rank's


@torch.no_grad()
def update_routers(trainer: Trainer, skipped: bool) -> list[Tensor]:
    # differs: every layer routes
    """Use up the step's statistics: by layer here (1 + E), its balance and its load.

    balance = E·Σ f·P over the whole step, 1.0 when perfect; load counts slots. Unless the step was
    skipped, f is what the next step's balance loss uses, and biases move towards equal load.
    """
    rows, mesh = [], trainer.mesh
    for chunk in trainer.chunks:
        if mesh.stage is not None:
            dist.all_reduce(chunk.statistics, group=mesh.stage)
        slots, probs = chunk.statistics.unbind(1)  # (L, E) each
        share = slots / slots.sum(-1, keepdim=True).clamp(min=1)
        mean = probs / probs.sum(-1, keepdim=True).clamp(min=1e-30)
        balance = share.shape[1] * (share * mean).sum(-1, keepdim=True)
        rows += torch.cat([balance, slots], dim=1).unbind()
        if not skipped:
            chunk.state[:, 0] = share
            error = share.mean(-1, keepdim=True) - share
            chunk.state[:, 1] += trainer.run.bias_update_rate * error.sign()
        chunk.statistics.zero_()
    return rows


def gather_report(trainer: Trainer, values: list[Tensor], rows: list[Tensor]) -> tuple[list, list]:
    # differs: every layer routes
    """Sums of scalars over all ranks, and every layer's row, in one transfer."""
    t, mesh = trainer, trainer.mesh
    table = values[0].new_zeros(t.model.num_hidden_layers, 1 + t.model.num_experts)
    if mesh.dp_rank == mesh.cp_rank == 0:  # one of the replicas that all have the same rows
        here = [int(i) for chunk in t.chunks for i in chunk.model.layers]
        for layer, row in zip(here, rows, strict=True):
            table[layer] = row
    packed = torch.cat([torch.stack(values), table.flatten()])
    if mesh.world > 1:
        dist.all_reduce(packed)
    flat, width = packed.tolist(), table.shape[1]
    return flat[: len(values)], [flat[i : i + width] for i in range(len(values), len(flat), width)]


def train_step(
    trainer: Trainer, step: int, around=lambda name: nullcontext(), stop=lambda: False
) -> dict[str, Any]:
    """One optimizer step over the next global batch; returns what the log shows of it.

    `stop()`: this rank was asked to stop; all of them read record["stop"]. The host waits for the
    device after the last backward: with --ep for whether there was room, for the gradient norm,
    and for the loss with the routers' statistics.
    """
    t, run = trainer, trainer.run
    begin = time.perf_counter()
    with around("data"):
        batches, valid = t.batches.take(run.global_batch)
        batches = to_device(batches, t.mesh, t.micro_batches)
    loss = gradients(t, batches, valid, around)
    lr = lr_at(run, step)
    with around("optimizer"):
        grad_norm, skipped = t.optimizer.step(lr)
    scalars = [loss, torch.full_like(loss, float(stop()))]
    (loss, stops), table = gather_report(t, scalars, update_routers(t, skipped))
    tokens = run.global_batch * run.seq_len
    t.tokens, t.micro_batches = t.tokens + tokens, t.micro_batches + len(batches)
    record = dict(
        step=step, steps=run.steps, loss=loss, balance=[row[0] for row in table],
        expert_load=[[int(n) for n in row[1:]] for row in table], grad_norm=grad_norm, lr=lr,
        tokens=t.tokens, skipped=t.optimizer.skipped, stop=stops > 0,
    )  # fmt: skip
    flops = flops_per_token(t.model, run.seq_len)
    step_s, held = time.perf_counter() - begin, t.replay.nbytes if t.replay else 0
    return record | figures(t.mesh.device, run.dtype, tokens, step_s, flops, t.mesh.world, held)


# ------------------------------------------------------------------------------------------------
# Evaluation and sampling
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(trainer: Trainer) -> tuple[float, int]:
    """Mean loss over the held-out sequences of `eval_batches` global batches: (loss, tokens)."""
    t, run, mesh = trainer, trainer.run, trainer.mesh
    samples = t.loader.heldout(run.eval_batches * run.global_batch)
    each = run.micro_batch * mesh.dp
    micro_batches = max(-(-len(samples) // each), 2 * mesh.pp if mesh.pp > 1 else 1)
    filled = samples + samples[:1] * (micro_batches * each - len(samples))
    batches, valid = read_batches(t.loader, run, mesh, filled, real=len(samples))
    losses = run_schedule(t.chunks, to_device(batches, mesh), pipe=t.pipe)
    counted = [float(sum(losses)), valid if mesh.pp_rank == 0 else 0]
    total = torch.tensor(counted, dtype=torch.float64, device=mesh.device)
    if mesh.world > 1:
        dist.all_reduce(total)
    loss, tokens = total.tolist()
    return loss / max(tokens, 1), int(tokens)


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
    if (run.eval_every or run.eval_only) and not loader.heldout(1):
        raise ValueError(f"--data {' '.join(run.data)}: too little to hold a sequence out for "
                         f"evaluation; use more, or --eval-every 0")  # fmt: skip
    found = from_rank_0(checkpoint.latest(run.out))
    if run.eval_only and found is None and run.init_from is None:
        raise ValueError(f"--eval-only: no checkpoint in --out {run.out}, and no --init-from")
    held = None if run.eval_only else lock(run.out)
    chunks = build(model, run, mesh)
    if run.init_from is not None and found is None:
        load_weights(chunks, run.init_from, mesh, hf_views, hf_fused, whole)
    optimizer = build_optimizer(chunks, run, mesh)
    trainer = Trainer(model, run, mesh, chunks, optimizer, loader, held)
    step = 0 if found is None else resume(found, trainer, hf_config(model, run.dtype))
    log = Log(
        None if run.eval_only else run.out, to_json(run), rank=mesh.rank, resume_step=step,
        wandb_project=None if run.eval_only else run.wandb,
    )  # fmt: skip
    what = f"{SCRIPT} {run.preset}: {active_parameters(model):,} active weights"
    announce(trainer, log, what, found, step)
    return trainer, log, step


def train(trainer: Trainer, log: Log, done: int) -> bool:
    """Steps done + 1 to run.steps, with evaluations and checkpoints.

    On SIGTERM, SIGHUP or Ctrl-C the step is finished and saved. Returns whether all were done.
    """
    t, run = trainer, trainer.run
    profiler, stop = Profiler(run.profile, run.out, t.mesh.rank), Stop()
    stopped = False
    for step in range(done + 1, run.steps + 1):
        profiler.step_begin(step)
        shown = train_step(t, step, profiler.range, lambda: bool(stop.requested))
        stopped = shown.pop("stop")
        log.step(shown)
        profiler.step_end(step)
        last = step == run.steps
        if run.eval_every and not stopped and (step % run.eval_every == 0 or last):
            log.eval(step, *evaluate(t))
        if stopped or (run.save_every and (step % run.save_every == 0 or last)):
            views = packed_views if run.mxfp4 else hf_views  # differs: --mxfp4
            save(t, step, views, hf_config(t.model, run.dtype, run.mxfp4))
        for line in t.saver.poll():
            log.say(line)
        if stopped:
            log.say(f"stopped by {stop.requested or 'another rank'} after step {step}")
            break
    profiler.close()
    t.saver.wait()
    for line in t.saver.poll():
        log.say(line)
    stop.close()
    return not stopped


def main(argv: list[str] | None = None) -> None:
    """Parse the flags, train (or evaluate), sample. A user's mistake is one line and status 1."""
    run = parse(Config, FLAGS, argv)
    if run.out is None:
        run = dataclasses.replace(run, out=Path("out") / f"{SCRIPT}-{run.preset}")
    try:
        trainer, log, done = set_up(run)
    except (ValueError, OSError) as error:
        fail(error)
    try:
        if run.eval_only:
            log.eval(done, *evaluate(trainer))
        elif train(trainer, log, done) and run.sample_tokens:
            show_sample(trainer, log)
    except DataError as error:
        fail(error)
    lifecycle.close(trainer, log)


if __name__ == "__main__":
    lifecycle.launch(main)
