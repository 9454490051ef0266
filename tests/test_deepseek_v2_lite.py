"""train_deepseek_v2_lite.py against transformers, and both against the formula written out."""

import dataclasses
import json
import math
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM
from transformers import modeling_rope_utils as rope_file
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf_file

import train_deepseek_v2_lite as script
from common import checkpoint, dualpipev, hf
from common.data import isolate
from common.dualpipev import Exchange, Route, Tape, backward, drive, forward, pair, run
from common.mesh import Pipe
from common.mesh import build as build_mesh
from tests import pool, small
from tests.oracle import no_fp32, relative
from tests.test_compile import aot_eager  # noqa: F401, a fixture

CPU = torch.device("cpu")
ONE = torch.ones((), dtype=torch.float64)
SHAPE = (2, 24)  # sequences, tokens: three times the context that YaRN starts from
YARN = script.Yarn(4.0, 8, mscale=0.707, mscale_all_dim=0.707)
ODD = script.Model(  # all widths differ, 2·width ≠ hidden: no transpose can hide
    vocab_size=71, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, kv_lora_rank=20,
    qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, intermediate_size=88,
    moe_intermediate_size=18, num_experts=8, n_shared_experts=2, num_experts_per_tok=3,
    rope_theta=100.0, rope_scaling=YARN, rms_norm_eps=1e-5, max_position_embeddings=64,
)  # fmt: skip
GROUPS = dict(topk_method="group_limited_greedy", n_group=4, topk_group=2)
CASES = {
    "as V2-Lite": {},
    "as V2": dict(q_lora_rank=28, routed_scaling_factor=2.5, **GROUPS),
    "renormalised": dict(norm_topk_prob=True, routed_scaling_factor=2.5),
    "renormalised, groups": dict(norm_topk_prob=True, routed_scaling_factor=2.5, **GROUPS),
    "no YaRN, all sparse": dict(rope_scaling=None, first_k_dense_replace=0),
    "two mscales": dict(rope_scaling=dataclasses.replace(YARN, mscale=0.5, mscale_all_dim=1.0)),
}
run_config = partial(small.run_config, script, seq_len=SHAPE[1])
ours = partial(small.ours, script)
data = partial(small.data, shape=SHAPE)


def logits_of(chunk, tokens):
    return drive(chunk(None, script.Batch(tokens), None)).detach()


# ------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------


def published_gate(gate, hidden):
    """transformers' router with the renormalisation of DeepSeek's MoEGate, which it leaves out."""
    logits, weights, ids = plain_gate(gate, hidden)
    if gate.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids


plain_gate = hf_file.DeepseekV2TopkRouter.forward


def oracle(model: script.Model, dtype: torch.dtype, chunk) -> DeepseekV2ForCausalLM:
    """The same model in transformers, with our weights."""
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    config = DeepseekV2Config(**json.loads(json.dumps(script.hf_config(model, "fp32"))), **plain)
    torch.set_default_dtype(dtype)
    try:
        theirs = DeepseekV2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    missing = dict(theirs.named_parameters())
    for name, p in chunk.named_parameters():
        missing.pop(fused(name)).data.copy_(p.data)
    assert not missing, missing.keys()
    for layer in theirs.model.layers[model.first_k_dense_replace :]:
        layer.mlp.gate.renormalise = model.norm_topk_prob
    return theirs


def fused(name: str) -> str:
    return name + "_proj" if ".experts." in name else name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype,bound", [("fp32", 1e-4), ("fp64", 1e-9)])
def test_logits_and_every_gradient_match_transformers(case, dtype, bound, monkeypatch):
    monkeypatch.setattr(hf_file.DeepseekV2TopkRouter, "forward", published_gate)
    model, torch_dtype = dataclasses.replace(ODD, **CASES[case]), script.DTYPES[dtype]
    (chunk,) = ours(model, run_config(dtype=dtype))
    batch = data()
    with no_fp32(hf_file, rope_file) if dtype == "fp64" else torch.enable_grad():
        theirs = oracle(model, torch_dtype, chunk)
        want = theirs(batch.tokens).logits
        F.cross_entropy(want.flatten(0, 1), batch.targets.flatten(), reduction="sum").backward()
    assert (logits_of(chunk, batch.tokens) - want).abs().max() < bound * want.abs().max()
    drive(chunk(None, batch, None)).backward()
    grads = dict(theirs.named_parameters())
    for name, p in chunk.named_parameters():
        assert p.grad is not None, name
        assert relative(p.grad, grads[fused(name)].grad) < bound, name


def turn(x, t, model):
    """Pair j times e^(i t f_j) and YaRN's factor of cos and sin, in DeepSeek's own words."""
    C, yarn, turned = model.qk_rope_head_dim, model.rope_scaling, []
    mscale = lambda m: 0.1 * m * math.log(yarn.factor) + 1
    dim = lambda turns: C * math.log(
        yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    ) / (2 * math.log(model.rope_theta))  # fmt: skip
    for j in range(C // 2):
        f, size = model.rope_theta ** (-2 * j / C), 1.0
        if yarn is not None:
            low, high = max(math.floor(dim(yarn.beta_fast)), 0), math.ceil(dim(yarn.beta_slow))
            slow = min(max((j - low) / (min(high, C - 1) - low), 0), 1)
            f = f * (1 - slow) + f / yarn.factor * slow
            size = mscale(yarn.mscale) / mscale(yarn.mscale_all_dim)
        a, b, cos, sin = x[2 * j], x[2 * j + 1], math.cos(t * f), math.sin(t * f)
        turned += [size * (a * cos - b * sin), size * (a * sin + b * cos)]
    return torch.stack(turned)


def formula_logits(chunk, model, tokens):
    """One sequence, token by token and expert by expert, straight from the definitions."""
    W = {name: p.detach() for name, p in chunk.named_parameters()}
    norm = lambda x, w, eps: x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w
    linear = lambda x, name: x @ W[name + ".weight"].T
    mlp = lambda x, p: linear(
        F.silu(linear(x, p + "gate_proj")) * linear(x, p + "up_proj"), p + "down_proj"
    )
    n_, r_, yarn = model.qk_nope_head_dim, model.qk_rope_head_dim, model.rope_scaling
    scale = (n_ + r_) ** -0.5
    if yarn is not None and yarn.mscale_all_dim:
        scale *= (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2
    x, T = W["model.embed_tokens.weight"][tokens], len(tokens)
    for i in range(model.num_hidden_layers):
        pre = f"model.layers.{i}."
        A = {n.removeprefix(pre + "self_attn."): w for n, w in W.items() if n.startswith(pre)}
        n = norm(x, W[pre + "input_layernorm.weight"], model.rms_norm_eps)
        if model.q_lora_rank is None:
            q = n @ A["q_proj.weight"].T
        else:
            q = norm(n @ A["q_a_proj.weight"].T, A["q_a_layernorm.weight"], 1e-6)
            q = q @ A["q_b_proj.weight"].T
        q = q.view(T, -1, n_ + r_)
        latent, k_rope = (n @ A["kv_a_proj_with_mqa.weight"].T).split([model.kv_lora_rank, r_], -1)
        kv = norm(latent, A["kv_a_layernorm.weight"], 1e-6) @ A["kv_b_proj.weight"].T
        kv = kv.view(T, -1, n_ + model.v_head_dim)
        k_rope = torch.stack([turn(k_rope[t], t, model) for t in range(T)])
        out = torch.zeros(T, q.shape[1], model.v_head_dim, dtype=x.dtype)
        for h in range(q.shape[1]):
            for t in range(T):
                q_rope = turn(q[t, h, n_:], t, model)
                score = kv[: t + 1, h, :n_] @ q[t, h, :n_] + k_rope[: t + 1] @ q_rope
                out[t, h] = (scale * score).softmax(0) @ kv[: t + 1, h, n_:]
        x = x + out.flatten(1) @ A["o_proj.weight"].T
        n = norm(x, W[pre + "post_attention_layernorm.weight"], model.rms_norm_eps)
        if i < model.first_k_dense_replace or i % model.moe_layer_freq:
            x = x + mlp(n, pre + "mlp.")
            continue
        routed = torch.zeros_like(x)
        for t in range(T):
            probs = (W[pre + "mlp.gate.weight"] @ n[t]).softmax(0)
            allowed = range(len(probs))
            if model.topk_method == "group_limited_greedy":
                size = len(probs) // model.n_group
                of = lambda g, size=size: range(g * size, g * size + size)
                best = lambda g, of=of, probs=probs: -max(probs[e] for e in of(g))
                groups = sorted(range(model.n_group), key=best)[: model.topk_group]
                allowed = [e for g in groups for e in of(g)]
            top = sorted(allowed, key=lambda e, probs=probs: -probs[e])
            top = top[: model.num_experts_per_tok]
            total = sum(probs[e] for e in top)
            for e in top:
                gate, up = (W[pre + "mlp.experts.gate_up"][e] @ n[t]).chunk(2)
                y = W[pre + "mlp.experts.down"][e] @ (F.silu(gate) * up)
                factor = 1 / total if model.norm_topk_prob else model.routed_scaling_factor
                routed[t] += probs[e] * factor * y
        x = x + routed + mlp(n, pre + "mlp.shared_experts.")
    return norm(x, W["model.norm.weight"], model.rms_norm_eps) @ W["lm_head.weight"].T


@pytest.mark.parametrize("case", CASES)
def test_the_oracle_itself_matches_the_formula(case, monkeypatch):
    """Of DeepSeek's modeling_deepseek.py: also YaRN's factor on the softmax and the router."""
    monkeypatch.setattr(hf_file.DeepseekV2TopkRouter, "forward", published_gate)
    model = dataclasses.replace(ODD, **CASES[case])
    (chunk,) = ours(model, run_config())
    tokens = data().tokens[:1, :14]
    want = formula_logits(chunk, model, tokens[0])
    with no_fp32(hf_file, rope_file), torch.no_grad():
        assert relative(oracle(model, torch.float64, chunk)(tokens).logits[0], want) < 1e-11
    assert relative(logits_of(chunk, tokens)[0], want) < 1e-11


def test_every_second_layer_sparse_matches_the_formula():
    """moe_layer_freq, which transformers does not read."""
    model = dataclasses.replace(ODD, moe_layer_freq=2, num_hidden_layers=4)
    assert [model.is_sparse(i) for i in range(4)] == [False, False, True, False]
    (chunk,) = ours(model, run_config())
    tokens = data().tokens[:1, :10]
    want = formula_logits(chunk, model, tokens[0])
    assert relative(logits_of(chunk, tokens)[0], want) < 1e-11


def test_yarn_of_the_published_models():
    """Case 12: softmax scale and table of V2-Lite, at position 8; the second mscale counts."""
    mesh = build_mesh(run_config(), CPU)
    scale = lambda yarn: (
        script.Attention(
            dataclasses.replace(script.MODELS["v2-lite"], hidden_size=8, rope_scaling=yarn), mesh
        ).scale
    )
    assert scale(script.LONG) == pytest.approx(192**-0.5 * 1.58963, rel=1e-5)
    assert scale(None) == 192**-0.5
    other = dataclasses.replace(script.LONG, mscale=0.5, mscale_all_dim=1.0)
    assert scale(other) == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2, rel=1e-12)
    at = torch.tensor([0, 8, 100_000])
    table = script.rope_table(script.MODELS["v2-lite"], at, torch.float64)
    for i in (0, 9, 10, 16, 22, 23, 31):  # kept up to pair 10, from 23 on slowed down 40 times
        slow = min(max((i - 10) / (23 - 10), 0), 1)
        f = 1e4 ** (-i / 32) * (1 - slow + slow / 40)
        assert table.cos[:, 0, i].tolist() == pytest.approx([math.cos(t * f) for t in at.tolist()])
        assert table.sin[:, 0, i].tolist() == pytest.approx([math.sin(t * f) for t in at.tolist()])
    ratio = (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)
    model = dataclasses.replace(script.MODELS["v2-lite"], rope_scaling=other)
    assert script.rope_table(model, at, torch.float64).cos[0, 0, 0] == pytest.approx(
        ratio, rel=1e-12
    )


def test_factor_doubles_the_routed_output_and_leaves_the_shared(monkeypatch):
    """Case 10: exactly."""
    seen, plain = {}, script.Layer.aggregate
    for factor in (1.0, 2.0):
        model = dataclasses.replace(ODD, num_hidden_layers=2, routed_scaling_factor=factor)
        (chunk,) = ours(model, run_config())

        def noted(self, h, back, shared, factor=factor):
            seen[factor] = h, back, shared
            return plain(self, h, back, shared)

        monkeypatch.setattr(script.Layer, "aggregate", noted)
        logits_of(chunk, data().tokens)
    for name, one, two in zip(("h", "routed", "shared"), seen[1.0], seen[2.0], strict=True):
        assert torch.equal(two, 2 * one if name == "routed" else one), name
        assert one.abs().max() > 0.1


def test_one_expert_a_token_is_scaled_and_not_renormalised():
    """The published gate renormalises only where there is more than one to share."""
    one = dataclasses.replace(
        ODD, num_experts_per_tok=1, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    (chunk,) = ours(one, run_config())
    (gate, *_) = [layer.mlp.gate for layer in chunk.model.layers.values() if layer.sparse]
    tokens = torch.randn(20, one.hidden_size, dtype=torch.float64)
    weights, ids, _, _ = gate(tokens, 1, chunk.state[0], None)
    probs = (tokens @ gate.weight.T).softmax(-1)
    torch.testing.assert_close(weights, 2.5 * probs.gather(1, ids))
    assert torch.equal(ids[:, 0], probs.argmax(1))


def test_the_routing_bias_moves_choices_and_not_weights():
    model = dataclasses.replace(ODD, norm_topk_prob=False)
    (chunk,) = ours(model, run_config())
    (gate, *_) = [layer.mlp.gate for layer in chunk.model.layers.values() if layer.sparse]
    tokens = torch.randn(20, model.hidden_size, dtype=torch.float64)
    last = range(model.num_experts - model.num_experts_per_tok, model.num_experts)
    chunk.state[0, 1] = torch.tensor([9.0 * (e in last) for e in range(model.num_experts)])
    weights, ids, _, _ = gate(tokens, 1, chunk.state[0], None)
    assert set(ids.flatten().tolist()) == set(last)
    probs = (tokens @ gate.weight.T).softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, probs * model.routed_scaling_factor)


def test_sequence_balance_is_deepseeks():
    """seq_aux of MoEGate: slots (T·K/E = 1) times mean probability, by sequence, their mean."""
    run_ = run_config(balance="sequence", balance_coef=1.0)
    (chunk,) = ours(ODD, run_)
    gate = chunk.model.layers["1"].mlp.gate
    tokens = torch.randn(48, 64, dtype=torch.float64)
    _, ids, aux, _ = gate(tokens, 2, chunk.state[1], None)
    probs = (tokens @ gate.weight.T).softmax(-1).view(2, 24, 8)
    slots = torch.zeros(2, 8, dtype=torch.float64)
    slots.scatter_add_(1, ids.view(2, -1), torch.ones(2, 24 * 3, dtype=torch.float64))
    want = (slots / (24 * 3 / 8) * probs.mean(1)).sum(1).mean()
    assert relative(aux.detach(), want.detach()) < 1e-12
    assert script.Config().balance == "sequence" and script.Config().balance_coef == 1e-3


def test_router_and_rope_stay_in_fp32_in_a_bf16_model():
    """Case 19."""
    (chunk,) = ours(dataclasses.replace(ODD, **GROUPS), run_config(dtype="bf16"))
    gate = chunk.model.layers["1"].mlp.gate
    tokens = torch.randn(48, 64, dtype=torch.bfloat16)
    weights, ids, _, stats = gate(tokens, 2, chunk.state[1], None)
    assert weights.dtype == stats.dtype == chunk.rope.cos.dtype == torch.float32
    exact = (tokens.double() @ gate.weight.double().T).softmax(-1).gather(-1, ids)
    assert (weights.double() - exact).abs().max() < 1e-5  # bf16 logits would be off by 1e-2
    assert ((ids // 2).sort(-1).values.diff() != 0).sum(-1).max() <= 1  # two groups of four


def test_rotations_are_in_fp32_in_a_bf16_model():
    """Rounded once, at the end."""
    places = script.rope_table(ODD, torch.arange(24), torch.bfloat16)
    x = torch.randn(1, 24, 3, ODD.qk_rope_head_dim).bfloat16()
    got = script.rotate(x, places).double()
    exact = script.rotate(x.double(), script.rope_table(ODD, torch.arange(24), torch.float64))
    assert relative(got, exact) < 1.1 * relative(exact.bfloat16(), exact)


@pytest.mark.parametrize("recompute,calls", [("none", 1), ("experts", 2), ("layer", 2)])
def test_shared_experts_are_recomputed_with_the_routed(recompute, calls, monkeypatch):
    called, plain = [], script.Layer.shared
    monkeypatch.setattr(
        script.Layer, "shared", lambda self, x: called.append(self.index) or plain(self, x)
    )
    (chunk,) = ours(ODD, run_config(recompute=recompute))
    run([chunk], [data()], ONE)
    sparse = [i for i in range(ODD.num_hidden_layers) if ODD.is_sparse(i)]
    assert sorted(called) == sorted(sparse * calls)


def test_documents_do_not_see_each_other():
    """Case 29: positions restart for queries and for the keys that all heads share."""
    (chunk,) = ours(ODD, run_config(isolate_documents=True, seq_len=12))
    tokens = torch.randint(0, 60, (2, 12))
    tokens[:, 4] = 70
    _, positions, cu_seqlens = isolate(tokens, tokens.roll(-1, 1), [70, 70])
    batch = script.Batch(tokens, None, positions, cu_seqlens)
    together = drive(chunk(None, batch, None)).detach()
    alone = logits_of(chunk, tokens[:, 5:])
    torch.testing.assert_close(together[:, 5:], alone, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------
# Cuts, and the branch beside an exchange
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_chunks", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "experts", "layer"])
def test_taped_equals_plain(n_chunks, recompute):
    flags = dict(balance="sequence", balance_coef=1.0, z_loss_coef=0.01, recompute=recompute)
    (plain,) = ours(ODD, run_config(**flags))
    chunks = ours(ODD, run_config(**flags), n_chunks)
    for (_, mine), (_, p) in zip(script.named_parameters(chunks), plain.named_parameters()):
        p.data.copy_(mine.data)
    batches = [data(seed=i, shape=(2, 9)) for i in range(3)]
    losses = [drive(plain(None, batch, None)) for batch in batches]
    sum(losses).backward()
    pipe = Pipe(0, [0], {}, {}, None) if n_chunks > 1 else None
    taped = run(chunks, batches, ONE, pipe=pipe, cut_all=True)
    assert [x.item() for x in taped] == pytest.approx([x.item() for x in losses], rel=1e-12)
    want = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in script.named_parameters(chunks):
        assert (p.grad - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name


def test_shared_experts_run_while_rows_travel_in_both_directions(monkeypatch):
    """After the dispatch's launch and before its wait; so too its reverse in the backward."""
    log, mlp = [], script.Layer.shared
    launch, wait = dualpipev.launch, Exchange.wait
    (chunk,) = ours(dataclasses.replace(ODD, num_hidden_layers=2), run_config())
    weight = chunk.model.layers["1"].mlp.shared_experts.gate_proj.weight
    weight.register_hook(lambda grad: log.append("shared"))

    def noted(name, function):
        return lambda *args: (log.append(name), function(*args))[1]

    monkeypatch.setattr(dualpipev, "launch", noted("launch", launch))
    monkeypatch.setattr(Exchange, "wait", noted("wait", wait))
    monkeypatch.setattr(script.Layer, "shared", noted("shared", mlp))
    tape = Tape(cut_all=True)
    pair(forward(chunk(None, data(), tape.defer), tape), None)
    assert log == ["launch", "shared", "wait", "launch", "wait"]  # dispatch, combine
    log.clear()
    pair(backward(tape, ONE), None)
    assert log == ["launch", "wait", "launch", "shared", "wait"]  # combine's, dispatch's


def test_a_branch_without_gradient_or_use():
    """Nobody needs the branch's result, or it carries no gradient: the cut survives it."""
    for used in (True, False):
        w = torch.randn(5, dtype=torch.float64, requires_grad=True)

        def steps(x, w=w, used=used):
            h = x * w
            got, a = yield Exchange(Route(), (h,), keep=(h,), beside=torch.exp)
            got, b = yield Exchange(Route(), (got,), keep=(x.detach(),), beside=torch.exp)
            return (got * (a if used else b)).sum()

        x = torch.randn(5, dtype=torch.float64)
        (want,) = torch.autograd.grad(drive(steps(x)), w)
        tape = Tape(cut_all=True)
        pair(forward(steps(x), tape), None)
        pair(backward(tape, ONE), None)
        torch.testing.assert_close(w.grad, want, rtol=1e-14, atol=0)


def test_layers_share_four_graphs_and_equal_eager(aot_eager):  # noqa: F811
    """fullgraph=True raises at a break; an int that differs by layer would recompile each one."""
    model = dataclasses.replace(ODD, num_hidden_layers=5, first_k_dense_replace=2, **GROUPS)
    flags = dict(dtype="fp32", balance="sequence", z_loss_coef=0.01)
    results = []
    for compiled in (False, True):
        chunks = ours(model, run_config(compile=compiled, **flags))
        losses = run(chunks, [data(1), data(2)], torch.ones(()))
        results.append((losses, {n: p.grad for n, p in script.named_parameters(chunks)}))
    (want, want_grads), (got, got_grads) = results
    # attend_and_route, shared, aggregate, dense
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


# ------------------------------------------------------------------------------------------------
# Configs
# ------------------------------------------------------------------------------------------------

PUBLISHED = {  # what the two published config.json say, but for tokens and training
    "v2-lite": dict(
        attention_bias=False, first_k_dense_replace=1, hidden_act="silu", hidden_size=2048,
        initializer_range=0.02, intermediate_size=10944, kv_lora_rank=512,
        max_position_embeddings=163840, model_type="deepseek_v2", moe_intermediate_size=1408,
        moe_layer_freq=1, n_group=1, n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False,
        num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax",
        tie_word_embeddings=False, topk_group=1, topk_method="greedy", v_head_dim=128,
        vocab_size=102400, rope_scaling=dict(
            beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
            original_max_position_embeddings=4096, type="yarn",
        ),
    ),
}  # fmt: skip
PUBLISHED["v2"] = PUBLISHED["v2-lite"] | dict(
    hidden_size=5120, intermediate_size=12288, moe_intermediate_size=1536, n_group=8,
    n_routed_experts=160, num_attention_heads=128, num_hidden_layers=60, num_key_value_heads=128,
    q_lora_rank=1536, routed_scaling_factor=16.0, topk_group=3, topk_method="group_limited_greedy",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_models(name, tmp_path):
    """In both spellings of the rope; sizes from the names: 15.7 B with 2.4 B, 236 B with 21 B."""
    config = dict(PUBLISHED[name])
    read = lambda: script.model_of(run_config(model_config=tmp_path))
    hf.write_json(tmp_path / "config.json", config)
    assert read() == script.MODELS[name]
    rope = config.pop("rope_scaling") | dict(rope_theta=config.pop("rope_theta"))
    rope["rope_type"] = rope.pop("type")
    hf.write_json(tmp_path / "config.json", config | dict(rope_parameters=rope))
    assert read() == script.MODELS[name]
    total, active = {"v2-lite": (15.7e9, 2.4e9), "v2": (236e9, 21e9)}[name]
    model = script.MODELS[name]
    count = sum(p.numel() for p in script.whole(model).parameters())
    assert abs(count / total - 1) < 0.005
    assert abs(script.active_parameters(model) / active - 1) < 0.05


def test_configs_of_transformers_and_of_checkpoints_read_back(tmp_path):
    for case in CASES.values():
        model = dataclasses.replace(ODD, **case)
        config = script.hf_config(model, "bf16")
        hf.write_json(tmp_path / "config.json", config)
        assert script.model_of(run_config(model_config=tmp_path)) == model
        DeepseekV2Config(**config).save_pretrained(tmp_path)
        assert script.model_of(run_config(model_config=tmp_path)) == model
    assert script.model_of(run_config(model_config=tmp_path, layers=2)).num_hidden_layers == 2


def test_unsupported_configs_are_refused(tmp_path):
    base = script.hf_config(ODD, "fp32")
    for change, said in (
        (dict(model_type="deepseek_v3"), "deepseek_v3"), (dict(hidden_act="gelu"), "gelu"),
        (dict(attention_bias=True), "attention_bias True"), (dict(mlp_bias=True), "mlp_bias True"),
        (dict(scoring_func="sigmoid"), "scoring_func sigmoid is not supported, only softmax"),
        (dict(num_key_value_heads=2), "num_key_value_heads 2 is not supported, only 4"),
        (dict(n_routed_experts=None), "num_experts None"), (dict(q_lora_rank="8"), "rank '8'"),
        (dict(n_shared_experts=0), "n_shared_experts 0"),
        (dict(norm_topk_prob=None), "norm_topk_prob and rope_theta must be given"),
        (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "linear is not supported"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "and original_max_position"),
        (dict(rope_scaling=base["rope_scaling"] | dict(truncate=False)), "knows no truncate"),
        (dict(rope_scaling=base["rope_scaling"] | dict(factor="40")), "factor must be a number"),
        (dict(rope_scaling=base["rope_scaling"] | dict(beta_fast=0)), "beta_fast must be above 0"),
        (dict(rope_scaling=dict(factor=40.0)), "rope_scaling has no type"),
        (dict(first_k_dense_replace="1"), "first_k_dense_replace and rope_theta must be given"),
        (dict(routed_scaling_factor=None), "routed_scaling_factor must be a number above 0"),
    ):  # fmt: skip
        hf.write_json(tmp_path / "config.json", base | change)
        with pytest.raises(ValueError, match=said) as error:
            script.model_of(run_config(model_config=tmp_path))
        assert "\n" not in str(error.value)


def test_model_and_layout_that_do_not_fit_are_refused():
    for change, flags, said in (
        ({}, dict(ep=3), "ep 3 does not divide num_experts 8; use one of \\[1, 2, 4, 8\\]"),
        (dict(qk_rope_head_dim=7), {}, "qk_rope_head_dim 7 must be even"),
        (dict(num_experts_per_tok=9), {}, "num_experts_per_tok 9 must lie between 1 and the 8"),
        ({**GROUPS, "num_experts_per_tok": 5}, {}, "num_experts_per_tok 5 .* the 4 experts"),
        (GROUPS | dict(n_group=3), {}, "n_group 3 must divide num_experts 8"),
        (GROUPS | dict(topk_group=5), {}, "topk_group 5 must lie between 1 and n_group 4"),
        (dict(topk_method="noaux_tc"), {}, "topk_method noaux_tc is not one of greedy, group"),
        ({}, dict(pp=2), "--pp 2 needs at least 4 layers, the model has 3"),
        ({}, dict(seq_len=65), "--seq-len 65 is longer than max_position_embeddings 64"),
    ):
        with pytest.raises(ValueError, match=said):
            script.check_model(dataclasses.replace(ODD, **change), run_config(**flags))


def test_flops_by_hand():
    """Case 34: 6 FLOPs an active weight, and attention over half the square, 20 and 10 wide."""
    attention = 64 * 4 * 20 + 64 * (20 + 8) + 20 * 4 * (12 + 10) + 4 * 10 * 64
    sparse, dense = 3 * 64 * 18 * (3 + 2) + 64 * 8, 3 * 64 * 88
    active = 3 * attention + 2 * sparse + dense + 64 * 71
    assert script.active_parameters(ODD) == active
    scores = 3 * 4 * (20 + 10) * 2 * (100 / 2) * 3  # QK' and PV, forward and twice that backward
    assert script.flops_per_token(ODD, 100) == 6 * active + scores
    with_rank = 64 * 28 + 28 * 4 * 20 - 64 * 4 * 20
    low_rank = dataclasses.replace(ODD, q_lora_rank=28)
    assert script.active_parameters(low_rank) == active + 3 * with_rank
    names = {n for n, p in ours(ODD, run_config())[0].named_parameters() if p.ndim > 1}
    assert len(names) == 3 * 4 + 3 + 2 * (3 + 3) + 2  # nothing multiplies a token but these


# ------------------------------------------------------------------------------------------------
# Runs and files
# ------------------------------------------------------------------------------------------------

SMALL = dataclasses.replace(script.TINY, num_hidden_layers=2, hidden_size=40, n_shared_experts=2)


@pytest.fixture
def tiny(monkeypatch):
    small.shrink(monkeypatch, script, SMALL)


records = partial(small.steps, but=("step_s", "tokens_per_s", "mfu"))


def main(*flags):
    script.main([str(flag) for flag in flags])


def loaded(directory, dtype="fp32"):
    """Our model, filled with NaN and then from a directory."""
    cfg = run_config(dtype=dtype, init_from=directory, seq_len=32)
    (chunk,) = ours(script.model_of(cfg), cfg)
    for p in chunk.parameters():
        p.data.fill_(float("nan"))
    names = script.hf_views, script.hf_fused, script.whole
    script.load_weights([chunk], directory, build_mesh(cfg, CPU), *names)
    assert not any(p.isnan().any() for p in chunk.parameters())
    return chunk


def test_run_resumes_bit_equal_and_transformers_loads_its_checkpoint(tiny, tmp_path):
    """Case 24, in mid-warm-up; loss falls, the files are transformers' own."""
    flags = ("--warmup", 8, "--steps", 12, "--save-every", 6)
    main("--out", tmp_path / "whole", *flags)
    main("--out", tmp_path / "parts", *flags)
    (tmp_path / "parts" / "step-00000012").rename(tmp_path / "gone")
    main("--out", tmp_path / "parts", *flags)
    whole = records(tmp_path / "whole")
    assert records(tmp_path / "parts") == whole and whole[-1]["loss"] < whole[0]["loss"] - 0.3
    a, b = (checkpoint.latest(tmp_path / d) for d in ("whole", "parts"))
    for file in a.rglob("*.safetensors"):
        assert file.read_bytes() == (b / file.relative_to(a)).read_bytes(), file.name

    theirs, missing = AutoModelForCausalLM.from_pretrained(a, output_loading_info=True)
    assert type(theirs) is DeepseekV2ForCausalLM and not any(missing.values()), missing
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        mine = logits_of(loaded(a), tokens)
        assert (theirs(tokens).logits - mine).abs().max() < 1e-4


@pytest.mark.parametrize("original", [True, False])
def test_a_model_of_transformers_is_the_start_of_a_run(tiny, tmp_path, original):
    """Experts one by one, and fused; --init-from gives its loss; a lost expert is named."""
    (chunk,) = ours(SMALL, run_config(dtype="fp32", seq_len=32))
    theirs = oracle(SMALL, torch.float32, chunk)
    theirs.save_pretrained(tmp_path / "m", save_original_format=original)
    names = hf.Reader(tmp_path / "m").names
    assert ("model.layers.1.mlp.experts.5.up_proj.weight" in names) == original
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        want = theirs(tokens).logits
        assert (logits_of(loaded(tmp_path / "m"), tokens) - want).abs().max() < 1e-4 * want.max()
    main("--out", tmp_path / "o", "--init-from", tmp_path / "m", "--steps", 1, "--lr", 1e-9)
    loader = script.Loader(("stdlib",), 32, 257, 0)
    tokens, targets = loader.read(loader.take(4))
    with torch.no_grad():
        mean = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())
    assert records(tmp_path / "o")[0]["loss"] == pytest.approx(mean.item(), rel=1e-4)

    lost = "model.layers.1.mlp.shared_experts.up_proj.weight"
    kept = {n: hf.Reader(tmp_path / "m").read(n) for n in names - {lost}}
    (tmp_path / "less").mkdir()
    shutil.copy(tmp_path / "m" / "config.json", tmp_path / "less")
    hf.write_tensors(tmp_path / "less" / "model.safetensors", kept)
    with pytest.raises(ValueError, match=f"missing: {lost}"):
        loaded(tmp_path / "less")


def import_export(rank, world, source, out):
    """Load a directory at ep = 2 and save it again."""
    cfg = run_config(dtype="bf16", init_from=source, ep=world, out=out, seq_len=32)
    mesh = build_mesh(cfg, CPU)
    model = script.model_of(cfg)
    chunks = script.build(model, cfg, mesh)
    script.load_weights(chunks, source, mesh, script.hf_views, script.hf_fused, script.whole)
    loader = script.Loader(("stdlib",), cfg.seq_len, model.vocab_size, cfg.seed)
    optimizer = script.build_optimizer(chunks, cfg, mesh)
    t = script.Trainer(model, cfg, mesh, chunks, optimizer, loader)
    script.save(t, 1, script.hf_views, script.hf_config(model, cfg.dtype))
    t.saver.wait()


def test_imported_tensors_are_exported_unchanged(tmp_path):
    """Cases 13 and 22, at ep = 2: names, shapes, types and bytes."""
    model = dataclasses.replace(SMALL, q_lora_rank=24)
    (chunk,) = ours(model, run_config(dtype="bf16"))
    oracle(model, torch.bfloat16, chunk).save_pretrained(tmp_path / "m")
    pool.run(2, import_export, tmp_path / "m", tmp_path / "o")
    a, b = hf.Reader(tmp_path / "m"), hf.Reader(tmp_path / "o" / "step-00000001")
    assert a.names == b.names
    for name in a.names:
        x, y = a.read(name), b.read(name)
        if name.endswith("gate.weight"):  # transformers keeps the router in fp32
            x = x.to(torch.bfloat16)
        assert x.dtype == y.dtype and torch.equal(x, y), name
    index = json.loads((b.path / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(b.read(n).nbytes for n in b.names)


@pytest.mark.gpu
def test_gpu_gradients_are_within_twice_the_eager_bf16_error():
    model = dataclasses.replace(
        ODD, hidden_size=128, kv_lora_rank=64, q_lora_rank=48, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, moe_intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    small.gradients_are_within_twice_the_eager_error(script, model)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, dict(recompute="layer")])
def test_gpu_trains_and_nothing_waits_between_first_forward_and_last_backward(flags):
    sizes = dict(hidden_size=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
    model = dataclasses.replace(script.TINY, moe_intermediate_size=128, **sizes)
    cfg = run_config(
        dtype="bf16", compile=True, seq_len=256, micro_batch=2, global_batch=8, lr=3e-3, **flags
    )
    t = small.trainer(script, cfg, model, torch.device("cuda", 0))
    small.nothing_waits_between_first_forward_and_last_backward(script, t)
