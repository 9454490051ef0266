"""train_qwen3_moe.py against transformers, and both against the formula written out."""

import dataclasses
import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf_file

import train_qwen3_moe as script
from common.dualpipev import drive
from common.mesh import build as build_mesh
from tests import small
from tests.oracle import no_fp32, relative

ODD = script.Model(  # head_dim ≠ hidden / heads, 2·width ≠ hidden: no transpose can hide
    vocab_size=71, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=24, intermediate_size=88, moe_intermediate_size=20,
    num_experts=8, num_experts_per_tok=2, rope_theta=1e4, max_position_embeddings=64,
)  # fmt: skip
CASES = {
    "renormalised": {},
    "not renormalised": dict(norm_topk_prob=False, num_experts_per_tok=3),
    "tied": dict(tie_word_embeddings=True),
    "dense by list": dict(mlp_only_layers=(0, 2)),
    "every second": dict(decoder_sparse_step=2),
    "one expert": dict(num_experts=1, num_experts_per_tok=1),
}
CPU = torch.device("cpu")
SHAPE = (2, 24)  # sequences, tokens
run_config = partial(small.run_config, script, seq_len=SHAPE[1])
ours = partial(small.ours, script)
a_trainer = partial(small.a_trainer, script)
data = partial(small.data, shape=SHAPE)


def table_of(chunks, run, skipped=False):
    """(sparse layers, 1 + E): balance and load, used up."""
    mesh = build_mesh(run, CPU)
    t = script.Trainer(chunks[0].arch, run, mesh, chunks, None, None)
    return torch.stack(script.update_routers(t, skipped))


def oracle(model: script.Model, dtype: torch.dtype, chunk) -> Qwen3MoeForCausalLM:
    """The same model in transformers, with our weights."""
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    config = Qwen3MoeConfig(**json.loads(json.dumps(dataclasses.asdict(model))), **plain)
    torch.set_default_dtype(dtype)
    try:
        hf = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    theirs = dict(hf.named_parameters())
    for name, p in chunk.named_parameters():
        theirs.pop(fused(name)).data.copy_(p.data)
    assert not theirs, theirs.keys()
    return hf


def fused(name: str) -> str:
    return name + "_proj" if ".experts." in name else name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype,bound", [("fp32", 1e-4), ("fp64", 1e-9)])
def test_logits_and_every_gradient_match_transformers(case, dtype, bound):
    model, torch_dtype = dataclasses.replace(ODD, **CASES[case]), script.DTYPES[dtype]
    (chunk,) = ours(model, run_config(dtype=dtype))
    batch = data()
    modules = [hf_file] if dtype == "fp64" else []
    with no_fp32(*modules) if modules else torch.enable_grad():
        hf = oracle(model, torch_dtype, chunk)
        theirs = hf(batch.tokens).logits
        F.cross_entropy(theirs.flatten(0, 1), batch.targets.flatten(), reduction="sum").backward()
    logits = drive(chunk(None, script.Batch(batch.tokens), None))
    assert (logits - theirs).abs().max() < bound * theirs.abs().max()
    drive(chunk(None, batch, None)).backward()
    grads = dict(hf.named_parameters())
    for name, p in chunk.named_parameters():
        assert p.grad is not None, name
        assert relative(p.grad, grads[fused(name)].grad) < bound, name


def formula_logits(chunk, model, tokens):
    """One sequence, token by token and expert by expert, straight from the definitions."""
    W = {name: p.detach() for name, p in chunk.named_parameters()}
    norm = lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.rms_norm_eps) * w
    C, heads = model.head_dim, model.num_attention_heads
    per = heads // model.num_key_value_heads

    def turn(x, t):  # complex multiplication of each pair by e^(i t theta^(-2j/C))
        pair = torch.complex(x[: C // 2], x[C // 2 :])
        freqs = [model.rope_theta ** (-2 * j / C) for j in range(C // 2)]
        freq = torch.tensor(freqs, dtype=x.dtype)
        pair = pair * torch.polar(torch.ones_like(freq), t * freq)
        return torch.cat([pair.real, pair.imag])

    x = W["model.embed_tokens.weight"][tokens]
    for i in range(model.num_hidden_layers):
        pre = f"model.layers.{i}."
        n = norm(x, W[pre + "input_layernorm.weight"])
        q, k, v = (n @ W[f"{pre}self_attn.{p}_proj.weight"].T for p in "qkv")
        out = torch.zeros_like(q)
        for h in range(heads):
            at, kv = slice(h * C, h * C + C), slice(h // per * C, h // per * C + C)
            q_norm, k_norm = (W[f"{pre}self_attn.{p}_norm.weight"] for p in "qk")
            qs = [turn(norm(q[t, at], q_norm), t) for t in range(len(x))]
            ks = [turn(norm(k[t, kv], k_norm), t) for t in range(len(x))]
            for t in range(len(x)):
                score = torch.stack([qs[t] @ ks[s] for s in range(t + 1)]) / math.sqrt(C)
                out[t, at] = score.softmax(0) @ v[: t + 1, kv]
        x = x + out @ W[pre + "self_attn.o_proj.weight"].T
        n = norm(x, W[pre + "post_attention_layernorm.weight"])
        for t in range(len(x)):
            probs = (W[pre + "mlp.gate.weight"] @ n[t]).softmax(0)
            top = probs.sort(descending=True).indices[: model.num_experts_per_tok]
            total = probs[top].sum() if model.norm_topk_prob else 1.0
            for e in top.tolist():
                gate, up = (W[pre + "mlp.experts.gate_up"][e] @ n[t]).chunk(2)
                y = W[pre + "mlp.experts.down"][e] @ (gate / (1 + (-gate).exp()) * up)
                x[t] = x[t] + probs[e] / total * y
    return norm(x, W["model.norm.weight"]) @ W["lm_head.weight"].T


@pytest.mark.parametrize("renormalise", [True, False])
def test_the_oracle_itself_matches_the_formula(renormalise):
    model = dataclasses.replace(ODD, norm_topk_prob=renormalise)
    (chunk,) = ours(model, run_config())
    tokens = data().tokens[:1, :12]
    with no_fp32(hf_file), torch.no_grad():
        theirs = oracle(model, torch.float64, chunk)(tokens).logits[0]
    assert relative(theirs, formula_logits(chunk, model, tokens[0])) < 1e-11


def test_balance_loss_is_transformers_over_k():
    """Their coefficient is K times ours: load_balancing_loss_func sums f over the K slots."""
    run = run_config(balance="micro-batch", balance_coef=1.0)
    (chunk,) = ours(dataclasses.replace(ODD, num_hidden_layers=1), run)
    batch = data()
    with no_fp32(hf_file):
        hf = oracle(chunk.arch, torch.float64, chunk)
        router_logits = hf(batch.tokens, output_router_logits=True).router_logits
        K = chunk.arch.num_experts_per_tok
        theirs = hf_file.load_balancing_loss_func(router_logits, ODD.num_experts, K) / K
    gate = chunk.model.layers["0"].mlp.gate
    tokens = torch.randn(48, 64, dtype=torch.float64)
    drive(chunk(None, batch, None))
    table = table_of([chunk], run)
    assert relative(table[0, 0], theirs) < 1e-12
    weights, ids, aux, stats = gate(tokens, 2, chunk.state[0], None)
    share, mean = stats[0] / stats[0].sum(), stats[1] / stats[1].sum()
    assert relative(aux.detach(), 8 * (share * mean).sum()) < 1e-12


def test_reading_the_published_config(tmp_path):
    """Every field of a config.json arrives, in transformers' spelling and in the others."""
    model = dataclasses.replace(ODD, mlp_only_layers=(1,), rope_theta=12345.0, norm_topk_prob=False)
    Qwen3MoeConfig(**json.loads(json.dumps(dataclasses.asdict(model)))).save_pretrained(tmp_path)
    assert script.model_of(run_config(model_config=tmp_path / "config.json")) == model
    assert script.model_of(run_config(model_config=tmp_path, layers=2)).num_hidden_layers == 2


def test_presets_are_the_published_models():
    """Sizes from the names: 30.5 B weights with 3.3 B active, 235 B with 22 B active."""
    for name, total, active in (("30b-a3b", 30.5e9, 3.3e9), ("235b-a22b", 235e9, 22e9)):
        model = script.MODELS[name]
        mesh = build_mesh(run_config(), CPU)
        with torch.device("meta"):
            chunk = script.Chunk(model, run_config(), mesh, range(model.num_hidden_layers))
        count = sum(p.numel() for p in chunk.parameters())
        embedding = model.vocab_size * model.hidden_size
        assert abs(count / total - 1) < 0.01, (name, count)
        assert abs((script.active_parameters(model) + embedding) / active - 1) < 0.05, name


def test_router_stays_in_fp32_in_a_bf16_model():
    """Case 19: softmax and rope frequencies are fp32, whatever the model's dtype."""
    (chunk,) = ours(ODD, run_config(dtype="bf16"))
    gate = chunk.model.layers["0"].mlp.gate
    tokens = torch.randn(48, 64, dtype=torch.bfloat16)
    weights, _, _, stats = gate(tokens, 2, chunk.state[0], None)
    assert weights.dtype == stats.dtype == torch.float32
    exact = (tokens.double() @ gate.weight.double().T).softmax(-1).topk(2).values
    exact = exact / exact.sum(-1, keepdim=True)
    assert (weights.double() - exact).abs().max() < 1e-5  # bf16 logits would be off by 1e-2
    cos = chunk.rope.cos
    assert cos.dtype == torch.float32
    want = torch.outer(torch.arange(24.0).double(), 1e4 ** (-torch.arange(0, 24, 2).double() / 24))
    assert (cos[:, 0].double() - want.cos()).abs().max() < 1e-5
