"""Train DeepSeek-V2 (V2-Lite, V2, any of their Hugging Face configs) from this one file.

    python train_deepseek_v2_lite.py                           # tiny, on Python's own source
    torchrun --nproc-per-node 1 train_deepseek_v2_lite.py v2-lite --layers 8 --data data/dclm
    python train_deepseek_v2_lite.py --eval-only --out out/train_deepseek_v2_lite-tiny

The tiny run falls from a loss of 5.7 to about 1.8 (nats a byte) in its 240 steps. From the batch
to the gradients one reads this file and common/dualpipev.py; the products of attention, experts
and loss are in kernels/. Gradients are added to each parameter's main_grad, which
common/optim.py reduces, uses up and zeroes.

Sections: config and presets, model (leaf to root), Hugging Face names, FLOPs, optimizer and
checkpoints, train step, evaluation and sampling, main.

What differs from train_qwen3_moe.py: multi-head latent attention, YaRN, neighbours as rope pairs,
shared experts, groups of experts, dense first layers, a balance loss sequence by sequence.

Shapes:
    B sequences of a micro-batch   T tokens of a sequence     N = B·T tokens    V vocabulary
    D hidden size                  H heads                    C width of a head's rotated part
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
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import checkpoint as recompute

from common import checkpoint, hf, lifecycle
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
from kernels.cross_entropy import linear_cross_entropy
from kernels.dispatch import Plan, collect, crossing, dispatch_plan, lay_out, spread, up
from kernels.embedding import embedding
from kernels.experts import expert_mlp
from kernels.latent import latent_attention
from kernels.ring import zigzag
from kernels.router import router_logits

# ------------------------------------------------------------------------------------------------
# Config and presets
# ------------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).stem
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Config(Run):
    """The run's flags, with the published model's balance loss."""  # differs: balance loss

    balance: Literal["micro-batch", "global-batch", "sequence", "none"] = "sequence"
    """What the load-balancing loss is computed over."""


@dataclass(frozen=True)
class Yarn:
    """Context extension under the names of `rope_scaling` (YaRN, arXiv 2309.00071).

    Rotations that turn less than `beta_slow` times within the original context are slowed down by
    `factor`, those that turn more than `beta_fast` times stay, those between are mixed.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def stretch(self, mscale: float) -> float:
        """By how much scores grow with the context: 0.1·mscale·ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


TOPK_METHODS = ("greedy", "group_limited_greedy")
LONG = Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)


@dataclass(frozen=True)
class Model:
    # differs: another architecture
    """The architecture, under the names of Hugging Face's DeepseekV2Config. Defaults: V2-Lite."""

    vocab_size: int = 102400  # differs: V2-Lite's size
    hidden_size: int = 2048
    num_hidden_layers: int = 27  # differs: V2-Lite's size
    num_attention_heads: int = 16  # differs: V2-Lite's size
    q_lora_rank: int | None = None  # None: queries are projected at once
    kv_lora_rank: int = 512  # numbers a token from which all heads' keys and values are made
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 10944  # of dense layers  # differs: V2-Lite's size
    moe_intermediate_size: int = 1408  # differs: V2-Lite's size
    num_experts: int = 64  # n_routed_experts in its files  # differs: V2-Lite's size
    n_shared_experts: int = 2  # one MLP of so many expert widths
    num_experts_per_tok: int = 6  # differs: V2-Lite's size
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    topk_method: str = "greedy"  # or group_limited_greedy
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False  # differs: V2-Lite's choice
    routed_scaling_factor: float = 1.0
    rope_theta: float = 1e4  # differs: V2-Lite's size
    rope_scaling: Yarn | None = LONG
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 163840  # differs: V2-Lite's size

    def is_sparse(self, layer: int) -> bool:  # differs: the first layers are dense
        """Whether `layer` routes to experts; the others have one dense MLP."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


TINY = Model(  # differs: another architecture
    vocab_size=257, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, kv_lora_rank=48,
    qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=256,
    moe_intermediate_size=96, num_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    rope_scaling=Yarn(4.0, 1024, mscale=0.707, mscale_all_dim=0.707), max_position_embeddings=4096,
    initializer_range=0.05,  # with less, what comes through so narrow a latent hardly counts
)  # fmt: skip
MODELS = {  # differs: other models
    "tiny": TINY,
    "v2-lite": Model(),
    "v2": Model(
        hidden_size=5120, num_hidden_layers=60, num_attention_heads=128, q_lora_rank=1536,
        intermediate_size=12288, moe_intermediate_size=1536, num_experts=160,
        topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0,
    ),
}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {  # differs: other models
    "tiny": dict(
        seq_len=128, micro_batch=8, global_batch=16, steps=240, lr=3e-3, warmup=5,
        schedule="cosine", dtype="fp32", compile=False, eval_every=80, eval_batches=4,
        save_every=80, sample_tokens=200,
    ),
    "v2-lite": {},
    "v2": {},
}  # fmt: skip


def model_of(run: Config) -> Model:
    """The architecture that the flags name. Raises ValueError for what this script cannot do."""
    model = MODELS[run.preset]  # differs: another config.json
    source = run.model_config or run.init_from
    if source is not None:
        config = hf.read_config(source)
        hf.expect_model_type(config, source, ("deepseek_v2",))
        fixed = dict(
            attention_bias=False, mlp_bias=False, hidden_act="silu", scoring_func="softmax",
            num_key_value_heads=config.get("num_attention_heads"),
        )  # fmt: skip
        for key, value in fixed.items():
            if config.get(key) not in (None, value):
                raise ValueError(f"{source}: {key} {config[key]} is not supported, only {value}")
        config.setdefault("num_experts", config.get("n_routed_experts"))
        for key in ("moe_layer_freq", "n_group", "topk_group"):
            config[key] = config.get(key) or 1
        types = {f.name: f.type for f in dataclasses.fields(Model)}
        counts = {key for key, kind in types.items() if kind is int} - {"first_k_dense_replace"}
        counts |= {"q_lora_rank"} if config.get("q_lora_rank") is not None else set()
        hf.check_sizes(config, source, sorted(counts), [k for k, t in types.items() if t is float])
        for key, kind in (("norm_topk_prob", bool), ("first_k_dense_replace", int)):
            if not isinstance(config.get(key), kind) or not config.get("rope_theta"):
                raise ValueError(f"{source}: {key} and rope_theta must be given")
        config["rope_scaling"] = yarn_of(config["rope_scaling"], source)
        model = Model(**{key: value for key, value in config.items() if key in types})
    if run.layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=run.layers)
    return model


def yarn_of(rope_scaling: dict[str, Any] | None, source: Path) -> Yarn | None:
    """What a config.json says of it. Raises ValueError for anything but YaRN as DeepSeek has it."""
    if rope_scaling is None:
        return None
    given = {key: value for key, value in rope_scaling.items() if value is not None}
    kind, names = given.pop("rope_type"), [f.name for f in dataclasses.fields(Yarn)]
    if kind != "yarn" or not {"factor", "original_max_position_embeddings"} <= given.keys():
        raise ValueError(f"{source}: rope_scaling {kind} is not supported, only yarn, with factor "
                         f"and original_max_position_embeddings")  # fmt: skip
    if surplus := sorted(given.keys() - set(names)):
        raise ValueError(f"{source}: rope_scaling knows no {', '.join(surplus)}, only {names}")
    hf.check_sizes(given, source, ["original_max_position_embeddings"], given.keys())
    return Yarn(**given)


def check_model(model: Model, run: Config) -> None:
    """Refuse, before anything is built, a model that cannot be or that the layout cannot hold."""
    E, K, G, best = model.num_experts, model.num_experts_per_tok, model.n_group, model.topk_group
    D, width, layers = model.hidden_size, model.moe_intermediate_size, model.num_hidden_layers
    divisors = [n for n in range(1, E + 1) if E % n == 0]
    choices = E if model.topk_method == "greedy" else E // G * best
    cuda = torch.cuda.is_available()  # differs: groups of experts, other heads
    for wrong, said in (
        (E % run.ep, f"--ep {run.ep} does not divide num_experts {E}; use one of {divisors}"),
        (model.topk_method not in TOPK_METHODS, f"topk_method {model.topk_method} is not one of "
         f"{', '.join(TOPK_METHODS)}"),
        (choices < E and E % G, f"n_group {G} must divide num_experts {E}; use one of {divisors}"),
        (best > G, f"topk_group {best} must lie between 1 and n_group {G}"),
        (not 1 <= K <= choices, f"num_experts_per_tok {K} must lie between 1 and the {choices} "
         f"experts that a token may choose from"),
        (model.qk_rope_head_dim % 2, f"qk_rope_head_dim {model.qk_rope_head_dim} must be even"),
        (run.pp > 1 and layers < 2 * run.pp,
         f"--pp {run.pp} needs at least {2 * run.pp} layers, the model has {layers}"),
        (run.seq_len > model.max_position_embeddings, f"--seq-len {run.seq_len} is longer than "
         f"max_position_embeddings {model.max_position_embeddings}"),
        (cuda and (D % 8 or width % 8), f"hidden_size {D} and moe_intermediate_size {width} must "
         f"be multiples of 8 on a GPU, for rows of 16 bytes"),
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


class Places(NamedTuple):
    """Where tokens stand: cos and sin, (T, 1, C/2) or (B, T, 1, C/2), and where documents begin."""

    cos: Tensor
    sin: Tensor
    cu_seqlens: Tensor | None = None


def rope_table(model: Model, positions: Tensor, dtype: torch.dtype) -> Places:
    """cos and sin (T, 1, C/2) of position · frequency, never below fp32.

    Frequencies are theta^(-2i/C) (RoFormer, eq. 15), slowed down by YaRN between the pairs `low`
    and `high` (arXiv 2309.00071, sec. 3.2; DeepseekV2YarnRotaryEmbedding in the published
    modeling_deepseek.py, which also scales cos and sin).
    """
    wide = torch.promote_types(dtype, torch.float32)  # differs: YaRN
    C, yarn, size = model.qk_rope_head_dim, model.rope_scaling, 1.0
    at = torch.arange(C // 2, dtype=wide, device=positions.device)
    frequencies = model.rope_theta ** (-2 * at / C)
    if yarn is not None:
        context, log_theta = yarn.original_max_position_embeddings, math.log(model.rope_theta)
        low, high = (
            C * math.log(context / (turns * 2 * math.pi)) / (2 * log_theta)
            for turns in (yarn.beta_fast, yarn.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), C - 1)
        slow = ((at - low) / ((high - low) or 1e-3)).clamp(0, 1)
        frequencies = frequencies * (1 - slow) + frequencies / yarn.factor * slow
        size = yarn.stretch(yarn.mscale) / yarn.stretch(yarn.mscale_all_dim)
    angles = torch.outer(positions.to(wide), frequencies)
    return Places(size * angles.cos()[:, None], size * angles.sin()[:, None])


def rotate(x_BTHC: Tensor, places: Places) -> Tensor:  # differs: pairs are neighbours
    """Turn the pairs (x_2i, x_{2i+1}) by the position's angles, in fp32."""
    a, b = up(x_BTHC).unflatten(-1, (-1, 2)).unbind(-1)
    turned = [a * places.cos - b * places.sin, b * places.cos + a * places.sin]
    return torch.stack(turned, -1).flatten(-2).to(x_BTHC.dtype)


class Attention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, sec. 2.1).

    A head's keys and values are made from a latent that all heads share; positions enter through
    a part of queries and keys of its own, in keys one for all heads.
    """  # differs: another attention

    def __init__(self, model: Model, mesh: Mesh):
        super().__init__()  # differs: queries and keys in two parts, from latents
        D, H, yarn = model.hidden_size, model.num_attention_heads, model.rope_scaling
        self.parts = model.qk_nope_head_dim, model.qk_rope_head_dim
        self.latent_parts = model.kv_lora_rank, model.qk_rope_head_dim
        width, self.ring = sum(self.parts), mesh.ring
        norm = partial(RMSNorm, eps=1e-6)  # of latents: as published, whatever rms_norm_eps says
        # As DeepSeek's modeling_deepseek.py; some releases of transformers leave YaRN's factor out.
        self.scale = width**-0.5 * (yarn.stretch(yarn.mscale_all_dim) ** 2 if yarn else 1.0)
        if model.q_lora_rank is None:
            self.q_proj = Linear(D, H * width)
        else:
            self.q_a_proj = Linear(D, model.q_lora_rank)
            self.q_a_layernorm = norm(model.q_lora_rank)
            self.q_b_proj = Linear(model.q_lora_rank, H * width)
        self.kv_a_proj_with_mqa = Linear(D, sum(self.latent_parts))
        self.kv_a_layernorm = norm(model.kv_lora_rank)
        self.kv_b_proj = Linear(model.kv_lora_rank, H * (self.parts[0] + model.v_head_dim))
        self.o_proj = Linear(H * model.v_head_dim, D)

    def forward(self, x_BTD: Tensor, places: Places) -> Tensor:
        latent_BTR, k_rope = self.kv_a_proj_with_mqa(x_BTD).split(self.latent_parts, -1)
        k_rope_BT1C = rotate(k_rope.unsqueeze(2), places)
        out_BHTV, _ = latent_attention(
            self.queries(x_BTD, places).transpose(1, 2), self.kv_a_layernorm(latent_BTR),
            k_rope_BT1C.transpose(1, 2), self.kv_b_proj.weight,
            scale=self.scale, cu_seqlens=places.cu_seqlens, ring=self.ring,
        )  # fmt: skip
        return self.o_proj(out_BHTV.transpose(1, 2).flatten(2))  # differs: from latents

    def queries(self, x_BTD: Tensor, places: Places) -> Tensor:
        """(B, T, H, nope + rope), the second part rotated."""
        if hasattr(self, "q_proj"):
            q = self.q_proj(x_BTD)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        q_nope, q_rope = q.unflatten(-1, (-1, sum(self.parts))).split(self.parts, -1)
        return torch.cat([q_nope, rotate(q_rope, places)], -1)


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
    """Softmax over all experts, then the top K, of the best groups if so limited; all in fp32.

    The chosen are renormalised if norm_topk_prob, and otherwise multiplied by the factor, as in
    MoEGate of the published modeling_deepseek.py (transformers' copies multiply only).
    """  # differs: groups, and a factor

    def __init__(self, model: Model, run: Config, mesh: Mesh):
        super().__init__()  # differs: groups, and a factor
        self.weight = parameter(model.num_experts, model.hidden_size)
        self.K, self.factor = model.num_experts_per_tok, model.routed_scaling_factor
        self.renormalise = model.norm_topk_prob and self.K > 1
        self.groups, self.best = model.n_group, model.topk_group
        if model.topk_method == "greedy":
            self.groups = self.best = 1
        self.run, self.ring = run, mesh.ring

    def forward(self, tokens_ND, sequences: int, state_2E, ids_NK):
        """Choose: (weights (N, K), ids (N, K), auxiliary loss, statistics (2, E)).

        state_2E: each expert's share of the previous step's slots, and its bias. ids_NK replaces
        the choice, or is numbers (N,) that random ones are drawn from. Statistics: slots received,
        and the sum of probabilities.
        """
        logits_NE = router_logits(tokens_ND, self.weight)
        probs_NE = logits_NE.softmax(-1)
        previous_E, bias_E = state_2E.unbind()
        if ids_NK is None:
            ids_NK = self.choose(probs_NE + bias_E)  # differs: groups, and a factor
        elif ids_NK.ndim == 1:
            ids_NK = random_ids(ids_NK, probs_NE.shape[1], self.K)
        if self.renormalise:  # the chosen probabilities over their sum, which may be tiny
            weights_NK = logits_NE.gather(-1, ids_NK).softmax(-1)
        else:
            weights_NK = probs_NE.gather(-1, ids_NK) * self.factor

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

    def choose(self, score_NE: Tensor) -> Tensor:
        """The K best (N, K) of the best groups; a group is as good as its best expert."""
        if self.best < self.groups:  # sec. 2.2.2 of the paper
            score_NGe = score_NE.unflatten(-1, (self.groups, -1))
            best_NG = score_NGe.amax(-1).topk(self.best, dim=-1).indices
            out_NG = torch.ones_like(score_NGe[..., 0]).scatter(-1, best_NG, 0).bool()
            score_NE = score_NGe.masked_fill(out_NG.unsqueeze(-1), -float("inf")).flatten(1)
        return score_NE.topk(self.K, dim=-1).indices


class Experts(nn.Module):
    """This rank's experts, stacked: gate_up (E/ep, 2F, D), gate rows first; down (E/ep, D, F)."""

    def __init__(self, model: Model, ep: int):
        super().__init__()
        E, D, width = model.num_experts // ep, model.hidden_size, model.moe_intermediate_size
        self.gate_up, self.down = parameter(E, 2 * width, D), parameter(E, D, width)


class MoE(nn.Module):  # only its parameters' names; Layer.forward computes with them
    def __init__(self, model: Model, run: Config, mesh: Mesh):
        super().__init__()  # differs: shared experts
        self.gate, self.experts = Router(model, run, mesh), Experts(model, mesh.ep)
        width = model.n_shared_experts * model.moe_intermediate_size
        self.shared_experts = MLP(model.hidden_size, width)


class Layer(nn.Module):
    """One transformer layer, cut into what lies between two communications.

    attend_and_route → (tokens to their experts) → experts → (and back) → aggregate, and shared
    beside the first exchange. The routed experts are not compiled, the rest is; a dense layer has
    no exchange.
    """  # differs: shared experts

    def __init__(self, model: Model, run: Config, mesh: Mesh, index: int):
        super().__init__()
        self.index, self.run, self.mesh = index, run, mesh
        self.sparse = model.is_sparse(index)
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model, mesh)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        dense = partial(MLP, model.hidden_size, model.intermediate_size)
        self.mlp = MoE(model, run, mesh) if self.sparse else dense()
        if run.compile:  # differs: shared experts
            for name in ("attend_and_route", "shared", "aggregate", "dense"):
                method = getattr(self, name)
                setattr(self, name, torch.compile(method, fullgraph=True, dynamic=False))

    def forward(self, x_BTD, places, state_2E, statistics_2E, batch: Batch, defer) -> Steps:
        """(B, T, D) → (B, T, D), as steps. Adds to `statistics_2E` when training."""
        again = self.run.recompute if torch.is_grad_enabled() else "none"
        if not self.sparse:
            return segment(again == "layer", self.dense, x_BTD, places)
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
        # The shared experts read `tokens` and are added at the end. So they hide the dispatch,
        # computed after its launch and before the turn is given away; and as a segment of their
        # own its reverse: `shared` has its gradient before that starts, theirs is needed after it.
        shared = partial(segment, again != "none", self.shared)
        dispatch = Exchange(route, sent, keep=(h, tokens), beside=shared)  # differs: shared experts
        rows, ids, weights, h, shared = yield dispatch
        plan = dispatch_plan(ids, E // mesh.ep, slots)
        back = segment(again != "none", self.mlp_experts, rows, weights, plan, defer)
        back, h, shared = yield Exchange(route.reverse(), (back,), keep=(h, shared))
        return self.aggregate(h, back if cross is None else collect(back, cross), shared)

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
        experts = self.mlp.experts
        return expert_mlp(rows_RD, weights_RK, experts.gate_up, experts.down, plan, defer=defer)

    def shared(self, tokens_ND: Tensor) -> Tensor:
        return self.mlp.shared_experts(tokens_ND)

    def aggregate(self, h_BTD: Tensor, back_ND: Tensor, shared_ND: Tensor) -> Tensor:
        return h_BTD + (back_ND + shared_ND).view_as(h_BTD)  # differs: shared experts

    def dense(self, x_BTD: Tensor, places: Places) -> Tensor:
        h, normed = self.attend(x_BTD, places)
        return h + self.mlp(normed)

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
    """Fill `weight`: norms with 1, matrices with N(0, std²), each expert's apart.

    A function of seed, name and expert index, never of the rank: every layout starts from the
    same bits (on one kind of device).
    """
    if weight.ndim == 1:
        weight.fill_(1)
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


def whole(model: Model) -> Chunk:
    """The whole model without memory, for its names and shapes."""
    mesh = Mesh(0, 1, 1, 1, 1, 1, torch.device("meta"))
    with torch.device("meta"):
        return Chunk(model, Config(seq_len=2), mesh, range(model.num_hidden_layers))


def hf_config(model: Model, dtype: str) -> dict[str, Any]:
    """config.json of a checkpoint."""
    fixed = dict(  # differs: other fields
        architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", hidden_act="silu",
        attention_bias=False, attention_dropout=0.0, scoring_func="softmax",
        num_key_value_heads=model.num_attention_heads,
        torch_dtype=str(DTYPES[dtype]).removeprefix("torch."),
    )  # fmt: skip
    config = fixed | dataclasses.asdict(model)
    config["n_routed_experts"] = config.pop("num_experts")
    if model.rope_scaling is not None:
        config["rope_scaling"]["type"] = "yarn"
    return config


# ------------------------------------------------------------------------------------------------
# FLOPs
# ------------------------------------------------------------------------------------------------


def active_parameters(model: Model) -> int:
    """Weights that multiply a token: all but the embedding and the experts it did not choose."""
    D, H, rank = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    queries = H * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    attention_weights = D * queries if rank is None else (D + queries) * rank
    attention_weights += D * (model.kv_lora_rank + model.qk_rope_head_dim + H * model.v_head_dim)
    # differs: latent attention, shared experts
    attention_weights += model.kv_lora_rank * H * (model.qk_nope_head_dim + model.v_head_dim)
    dense = 3 * D * model.intermediate_size
    experts = model.num_experts_per_tok + model.n_shared_experts
    sparse = sum(model.is_sparse(i) for i in range(model.num_hidden_layers))
    layers = model.num_hidden_layers * attention_weights
    layers += sparse * (3 * D * model.moe_intermediate_size * experts + D * model.num_experts)
    layers += (model.num_hidden_layers - sparse) * dense
    return layers + D * model.vocab_size


def flops_per_token(model: Model, seq_len: int) -> float:
    """Forward and backward: 6 a weight, and attention's two products over the causal half."""
    widths = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    products = 3 * model.num_hidden_layers * model.num_attention_heads * widths * seq_len
    return 6 * active_parameters(model) + products  # differs: values are narrower


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
    """Use up the step's statistics: by sparse layer here (1 + E), its balance and its load.

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
        layers = chunk.model.layers.values()
        table = torch.cat([balance, slots], dim=1)
        rows += [row for row, layer in zip(table, layers, strict=True) if layer.sparse]
        if not skipped:
            chunk.state[:, 0] = share
            error = share.mean(-1, keepdim=True) - share
            chunk.state[:, 1] += trainer.run.bias_update_rate * error.sign()
        chunk.statistics.zero_()
    return rows


def gather_report(trainer: Trainer, values: list[Tensor], rows: list[Tensor]) -> tuple[list, list]:
    """Sums of scalars over all ranks, and every sparse layer's row, in one transfer."""
    t, mesh = trainer, trainer.mesh
    sparse = [i for i in range(t.model.num_hidden_layers) if t.model.is_sparse(i)]
    table = values[0].new_zeros(len(sparse), 1 + t.model.num_experts)
    if mesh.dp_rank == mesh.cp_rank == 0:  # one of the replicas that all have the same rows
        here = [int(i) for c in t.chunks for i, layer in c.model.layers.items() if layer.sparse]
        for layer, row in zip(here, rows, strict=True):
            table[sparse.index(layer)] = row
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
            save(t, step, hf_views, hf_config(t.model, run.dtype))
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
