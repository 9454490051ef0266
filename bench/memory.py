"""Activation memory: the bytes a token that one routed layer keeps for its backward.

    python -m bench.memory                                     # all scripts at their real widths
    python -m bench.memory train_qwen3_moe --preset 235b-a22b
    python -m bench.memory --cuda                              # measured, compiled, on a GPU

Counted on a CPU: what autograd saves in one layer, each storage once, weights left out, and the
plan that the experts hold; by the growth from 32 tokens to 64, in bf16. Attention and router save
what they save on a GPU, experts save the same everywhere. The compiled part is partitioned by the
min-cut that Inductor uses, which no kernel is made of: what Inductor does after it, alignment and
the allocator's rounding are not counted, nor are weight gradients that wait (--wgrad-batch) or
recomputation. --cuda: growth of torch.cuda.memory_allocated over a forward, from 2 layers to 4, by
layer and token; the layer's output, the next one's x, is in both.

The minimum by hand, numbers a token (2 bytes each unless said): once each operand that a product
or kernel of the backward reads again and each input of a norm, nothing that elementwise arithmetic
makes again from these.
    x, h, normed x, rows  4·D            residual before and after attention, and their norms
    q, k, v, out          H·Dk + G·(Dk + Dv) + H·Dv        q and k before or after rope and norms
    latent                2·R + Dr       DeepSeek: as projected, and normed, operand of k and v
    lse, router           H + E          4 bytes; router: logits
    choices               K              ids 8 bytes, weights 4
    plan                  K              28 bytes: order, rows, positions 8, experts 4
    pre-activation        K·2F           of the experts; the activation is made again
    shared                2·F_shared     DeepSeek: the same of the shared experts
"""

import argparse
import importlib
import sys
from unittest import mock

import torch
from torch import Tensor, nn

import kernels.attention
from common.data import Batch
from common.dualpipev import drive
from common.mesh import Mesh

PRESETS = {
    "train_qwen3_moe": "30b-a3b", "train_deepseek_v2_lite": "v2-lite", "train_gpt_oss": "20b",
}  # fmt: skip


def by_hand(model) -> dict[str, int]:
    """The minimum above, in bytes a token by term."""
    D, H, K = model.hidden_size, model.num_attention_heads, model.num_experts_per_tok
    width = getattr(model, "moe_intermediate_size", model.intermediate_size)
    latent = hasattr(model, "kv_lora_rank")
    if latent:
        G, Dk, Dv = H, model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
    else:
        G, Dk, Dv = model.num_key_value_heads, model.head_dim, model.head_dim
    terms = {"x, h, normed x, rows": 8 * D, "q, k, v, out": 2 * (H * Dk + G * (Dk + Dv) + H * Dv)}
    if latent:
        terms["latent"] = 2 * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
        terms["shared"] = 2 * 2 * model.n_shared_experts * width
    terms |= {"lse, router": 4 * (H + model.num_experts), "choices": 12 * K, "plan": 28 * K}
    return terms | {"pre-activation": 2 * K * 2 * width}


# ------------------------------------------------------------------------------------------------
# Counted on a CPU
# ------------------------------------------------------------------------------------------------


def _library(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes, dtypes and layout of `kernels.attention._library_forward`; no values."""
    B, H, T, _ = q.shape
    out = q.new_zeros(B, T, H, v.shape[-1]).transpose(1, 2)
    lse = q.new_zeros(B, H, T, dtype=torch.float32)
    return out, lse, q.new_zeros(1, dtype=torch.int64), q.new_zeros(1, dtype=torch.int64)


_opaque = torch.library.custom_op("pithtrain::counted_attention", _library, mutates_args=())
_opaque.register_fake(_library)


class _Scores(torch.autograd.Function):
    """kernels/router.py's, which a CPU lacks the product for."""

    @staticmethod
    def forward(ctx, x_ND, weight_ED):
        ctx.save_for_backward(x_ND, weight_ED)
        return x_ND.float() @ weight_ED.float().T

    @staticmethod
    def backward(ctx, grad_NE):
        x_ND, weight_ED = ctx.saved_tensors
        return (grad_NE.bfloat16() @ weight_ED), grad_NE.bfloat16().T @ x_ND


def layer_of(script, model, run, index: int) -> nn.Module:
    """A layer of zeros in bf16; all experts share one expert's memory."""
    with torch.device("meta"):
        layer = script.Layer(model, run, Mesh(0, 1, 1, 1, 1, 1, torch.device("cpu")), index)
    for module in layer.modules():
        for name, p in module._parameters.items():
            one = p.shape[1:] if isinstance(module, script.Experts) else p.shape
            zeros = torch.zeros(one, dtype=torch.bfloat16)
            module._parameters[name] = nn.Parameter(zeros.expand(p.shape))
    return layer


def partitioned():
    """A torch.compile backend that partitions as Inductor does, and runs the graphs as they are."""
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
    )


def counted(script, model, index: int) -> float:
    """Bytes a token that layer `index` keeps for its backward."""
    run = script.Config(seq_len=64, global_batch=1, dtype="bf16", compile=False)
    layer = layer_of(script, model, run, index)
    for name in ("attend_and_route", "shared", "aggregate"):
        if hasattr(layer, name):
            compiled = torch.compile(getattr(layer, name), backend=partitioned(), dynamic=False)
            setattr(layer, name, compiled)
    few, many = (
        sum(t.untyped_storage().nbytes() for t in kept(script, model, layer, tokens))
        for tokens in (32, 64)
    )
    return (many - few) / 32


def kept(script, model, layer, tokens: int) -> list[Tensor]:
    """One tensor of each storage that is saved in a forward of `tokens` tokens."""
    torch._dynamo.reset()
    found: dict[int, Tensor] = {}

    def keep(t: Tensor) -> Tensor:
        found.setdefault(t.untyped_storage()._cdata, t)
        return t

    def plan(*args, make=script.dispatch_plan):
        return type(made := make(*args))(*(t if t is None else keep(t) for t in made))

    table = script.rope_table(model, torch.arange(tokens), torch.bfloat16)
    state, E = torch.zeros(2, model.num_experts), model.num_experts
    x = torch.zeros(1, tokens, model.hidden_size, dtype=torch.bfloat16).requires_grad_()
    attention, patch = kernels.attention, mock.patch.object
    with (
        patch(script, "router_logits", _Scores.apply),
        patch(script, "dispatch_plan", plan),
        patch(attention, "_can_fuse", lambda q, k, v: True),
        patch(attention, "_library_forward", lambda q, k, v, *rest: _opaque(q, k, v)),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
    ):
        out = drive(layer(x, table, state, torch.zeros(2, E), Batch(None), None))
    assert out.requires_grad
    not_activations = {t.untyped_storage()._cdata for t in (*layer.parameters(), *table[:2], state)}
    return [t for storage, t in found.items() if storage not in not_activations]


# ------------------------------------------------------------------------------------------------
# Measured on a GPU
# ------------------------------------------------------------------------------------------------


def measured(script, preset: str, tokens: int) -> float:
    """Bytes a token and layer that a compiled forward leaves allocated."""
    grown = []
    for layers in (2, 4):
        run = script.Config(preset=preset, layers=layers, seq_len=tokens, global_batch=1)
        mesh = Mesh(0, 1, 1, 1, 1, 1, torch.device("cuda"))
        (chunk,) = script.build(script.model_of(run), run, mesh, 1)
        ids = torch.randint(1000, (1, tokens), device="cuda")
        for _ in range(2):  # the first compiles
            before = torch.cuda.memory_allocated()
            loss = drive(chunk(None, Batch(ids, ids), None))
            torch.cuda.synchronize()
            after = torch.cuda.memory_allocated()
            del loss
        grown.append(after - before)
        del chunk
        torch.cuda.empty_cache()
    return (grown[1] - grown[0]) / 2 / tokens


def report(name: str, preset: str | None, cuda_tokens: int | None) -> None:
    """Print what one script's layer keeps. Raises ValueError for an unknown preset."""
    script, preset = importlib.import_module(name), preset or PRESETS[name]
    if preset not in script.MODELS:
        raise ValueError(f"--preset {preset}: {name} has {', '.join(script.MODELS)}")
    model = script.MODELS[preset]
    terms = by_hand(model)
    print(f"{name} {preset}, minimum: " + ", ".join(f"{term} {n:,}" for term, n in terms.items()))
    if cuda_tokens is None:
        index = getattr(model, "first_k_dense_replace", 0)  # a layer that routes
        said, n = "counted", counted(script, model, index)
    else:
        said, n = "measured", measured(script, preset, cuda_tokens)
    least = sum(terms.values())
    print(
        f"  {said}: {n:,.0f} bytes a token and layer, {n / least:.2f} times {least:,}", flush=True
    )


def main(argv: list[str] | None = None) -> None:
    """A user's mistake is one line and status 1."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("bench.memory", description=__doc__, formatter_class=shown)
    add = parser.add_argument
    add("scripts", nargs="*", choices=(*PRESETS, "all"), default="all", help="(%(default)s)")
    add("--preset", help="of the script, in place of its first large one")
    add("--tokens", type=int, default=4096, help="with --cuda (%(default)s)")
    add("--cuda", action="store_true", help="measure on a GPU")
    args = parser.parse_args(argv)
    try:
        if args.cuda and not torch.cuda.is_available():
            raise ValueError("--cuda: there is no CUDA device; without it a CPU counts")
        for name in PRESETS if "all" in args.scripts else args.scripts:
            report(name, args.preset, args.tokens if args.cuda else None)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
