"""train_gpt_oss.py against transformers, and both against the formula written out; its files."""

import dataclasses
import functools
import json
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers import modeling_rope_utils as hf_rope
from transformers.models.gpt_oss import modeling_gpt_oss as hf_file

import train_gpt_oss as script
from common import checkpoint, hf, mxfp4
from common.dualpipev import drive, run
from common.mesh import build as build_mesh
from kernels.experts import ClampedSwiGLU, _activate
from tests import pool, small
from tests.oracle import no_fp32, on_disk, relative
from tests.small import steps

ODD = script.Model(  # head_dim ≠ hidden / heads, 2·width ≠ hidden; YaRN bends two pairs of twelve
    vocab_size=71, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=24, intermediate_size=20, num_experts=8, num_experts_per_tok=2,
    swiglu_limit=0.7, layer_types=script.ALTERNATE + script.ALTERNATE[:1], sliding_window=4,
    rope_theta=150.0, max_position_embeddings=64,
    rope_scaling=script.RopeScaling("yarn", 4.0, 2.0, 1.0, False, 16),
)  # fmt: skip
SQUARE = dataclasses.replace(ODD, hidden_size=32, intermediate_size=32)  # no shape betrays a swap
CASES = {
    "windows first": {},
    "windows second": dict(layer_types=tuple(reversed(script.ALTERNATE)) * 2, num_hidden_layers=4),
    "limit 5, top 3": dict(swiglu_limit=5.0, num_experts_per_tok=3),
    "tied, another alpha": dict(tie_word_embeddings=True, swiglu_alpha=1.0),
    "rounded range": dict(rope_scaling=dataclasses.replace(ODD.rope_scaling, truncate=True)),
    "square": dict(hidden_size=32, intermediate_size=32),
}
CPU = torch.device("cpu")
ONE = torch.ones((), dtype=torch.float64)
SHAPE = (2, 40)  # sequences, tokens: ten windows, and far beyond YaRN's original context
run_config = partial(small.run_config, script, seq_len=SHAPE[1])
ours = partial(small.ours, script)
data = partial(small.data, shape=SHAPE)


def published(chunk, take=lambda p: p.data):
    """(name on disk, tensor as there) of every parameter, or of what `take` makes of it."""
    for name, p in chunk.named_parameters():
        for hf_name, view in script.hf_views(name, take(p)):
            yield hf_name, on_disk(view)


def config_json(model):
    """As it is in a file."""
    return json.loads(json.dumps(script.hf_config(model, "fp32")))


def oracle(model, dtype, chunk) -> GptOssForCausalLM:
    """The same model in transformers, with our weights, from the config that we write."""
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    config = GptOssConfig.from_dict(config_json(model), **plain)
    torch.set_default_dtype(dtype)
    try:
        theirs = GptOssForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    parameters = dict(theirs.named_parameters())
    for name, tensor in published(chunk):
        parameters.pop(name).data.copy_(tensor)
    assert not parameters, parameters.keys()
    return theirs


# ------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype,bound", [("fp32", 1e-4), ("fp64", 1e-9)])
def test_logits_and_every_gradient_match_transformers(case, dtype, bound):
    """Cases 11, 14, 15, 17, 18, 20."""
    model = dataclasses.replace(ODD, **CASES[case])
    (chunk,) = ours(model, run_config(dtype=dtype))
    batch = data()
    with no_fp32(hf_file, hf_rope) if dtype == "fp64" else torch.enable_grad():
        theirs = oracle(model, script.DTYPES[dtype], chunk)
        logits = theirs(batch.tokens).logits
        F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").backward()
    mine = drive(chunk(None, script.Batch(batch.tokens), None))
    assert (mine - logits).abs().max() < bound * logits.abs().max()
    drive(chunk(None, batch, None)).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    for name, grad in published(chunk, lambda p: p.grad):
        assert grads[name].abs().max() > 0 and relative(grad, grads[name]) < bound, name


def formula_logits(chunk, model, tokens):
    """One sequence, token by token and expert by expert, straight from the definitions."""
    W = {name: p.detach() for name, p in chunk.named_parameters()}
    norm = lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.rms_norm_eps) * w
    C, heads, yarn = model.head_dim, model.num_attention_heads, model.rope_scaling
    per = heads // model.num_key_value_heads

    def pair_of(turns):  # the (fractional) pair that turns so often in the original context
        context = yarn.original_max_position_embeddings
        return C / 2 * math.log(context / (2 * math.pi * turns)) / math.log(model.rope_theta)

    fast, slow = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)

    def turn(x, t):
        pair = torch.complex(x[: C // 2], x[C // 2 :])
        for j in range(C // 2):
            old = min(max((slow - j) / (slow - fast), 0), 1)  # share of the original frequency
            frequency = model.rope_theta ** (-2 * j / C) * (old + (1 - old) / yarn.factor)
            pair[j] *= complex(math.cos(t * frequency), math.sin(t * frequency))
        pair *= 1 + 0.1 * math.log(yarn.factor)
        return torch.cat([pair.real, pair.imag])

    x = W["model.embed_tokens.weight"][tokens]
    for i in range(model.num_hidden_layers):
        pre = f"model.layers.{i}."
        n = norm(x, W[pre + "input_layernorm.weight"])
        linear = lambda p, x, a=pre + "self_attn.": x @ W[f"{a}{p}.weight"].T + W[f"{a}{p}.bias"]
        q, k, v = (linear(p, n) for p in ("q_proj", "k_proj", "v_proj"))
        out = torch.zeros_like(q)
        for h in range(heads):
            at, kv = slice(h * C, h * C + C), slice(h // per * C, h // per * C + C)
            qs = [turn(q[t, at], t) for t in range(len(x))]
            ks = [turn(k[t, kv], t) for t in range(len(x))]
            for t in range(len(x)):
                sliding = model.layer_types[i] == "sliding_attention"
                first = max(0, t + 1 - model.sliding_window) if sliding else 0
                score = [qs[t] @ ks[s] / math.sqrt(C) for s in range(first, t + 1)]
                score = torch.stack([*score, W[pre + "self_attn.sinks"][h]])
                out[t, at] = score.softmax(0)[:-1] @ v[first : t + 1, kv]
        x = x + linear("o_proj", out)
        n = norm(x, W[pre + "post_attention_layernorm.weight"])
        for t in range(len(x)):
            logits = W[pre + "mlp.gate.weight"] @ n[t] + W[pre + "mlp.gate.bias"]
            top = logits.sort(descending=True).indices[: model.num_experts_per_tok]
            for e, p in zip(top.tolist(), logits[top].softmax(0)):
                E = {k: W[f"{pre}mlp.experts.{k}"][e] for k in ("gate_up", "down")}
                b = {k: W[f"{pre}mlp.experts.{k}_bias"][e] for k in E}
                gate, up = (E["gate_up"] @ n[t] + b["gate_up"]).chunk(2)
                gate = gate.clamp(max=model.swiglu_limit)
                up = up.clamp(-model.swiglu_limit, model.swiglu_limit)
                act = (up + 1) * gate / (1 + (-model.swiglu_alpha * gate).exp())
                x[t] = x[t] + p * (E["down"] @ act + b["down"])
    return norm(x, W["model.norm.weight"]) @ W["lm_head.weight"].T


def test_the_oracle_itself_matches_the_formula():
    (chunk,) = ours(ODD, run_config())
    tokens = data().tokens[:1, :20]
    with no_fp32(hf_file, hf_rope), torch.no_grad():
        theirs = oracle(ODD, torch.float64, chunk)(tokens).logits[0]
        assert relative(theirs, formula_logits(chunk, ODD, tokens[0])) < 1e-11


def test_yarn_of_the_published_models(tmp_path):
    """Case 16: the range is not rounded; both spellings of the config give the same table."""
    model = script.MODELS["20b"]
    assert script.yarn_range(model) == pytest.approx((8.0928, 17.3980), abs=5e-5)
    positions = torch.tensor([0, 1, 4095, 131071])
    table = script.rope_table(model, positions, torch.float64)
    assert table.cos[0, 0].tolist() == pytest.approx([1.34657] * 32, abs=5e-6)
    with no_fp32(hf_rope):
        config = GptOssConfig.from_dict(config_json(model))
        frequencies, magnitude = hf_rope.ROPE_INIT_FUNCTIONS["yarn"](config)
    angles = positions[:, None] * frequencies
    torch.testing.assert_close(table.cos[:, 0], angles.cos() * magnitude, rtol=0, atol=1e-9)
    torch.testing.assert_close(table.sin[:, 0], angles.sin() * magnitude, rtol=0, atol=1e-9)

    old, new = script.hf_config(model, "bf16"), script.hf_config(model, "bf16")
    new["rope_parameters"] = {**new.pop("rope_scaling"), "rope_theta": new.pop("rope_theta")}
    for config in (old, new):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert script.model_of(run_config(model_config=tmp_path)) == model


def seen_by(rank, world, model, flags, changes):
    """By change (position, token): which positions' logits differ, on this rank's share."""
    cfg = run_config(**flags)
    (chunk,) = ours(model, cfg)
    here = slice(None) if chunk.here is None else chunk.here
    tokens, differ = data(shape=(1, 40)).tokens, []
    with torch.no_grad():
        before = drive(chunk(None, script.Batch(tokens[:, here]), None))
        for position in changes:
            other = tokens.clone()
            other[0, position] = (other[0, position] + 1) % 71
            after = drive(chunk(None, script.Batch(other[:, here]), None))
            rows = ((after - before).abs() > 1e-9).any(-1)[0]  # less is rounding
            differ.append(torch.arange(40)[here][rows].tolist())
    return differ


@pytest.mark.parametrize("cp", [1, 2])
def test_a_window_counts_the_token_itself(cp):
    """Case 17: token i reaches i .. i+3 through a window of 4, and all that follow without one."""
    for types, reach in ((script.ALTERNATE, 4), (tuple(reversed(script.ALTERNATE)), 40)):
        model = dataclasses.replace(ODD, num_hidden_layers=1, layer_types=types)
        job = seen_by, model, dict(cp=cp), (0, 9, 18, 38)
        ranks = [job[0](0, 1, *job[1:])] if cp == 1 else pool.run(cp, *job)
        for i, parts in zip((0, 9, 18, 38), zip(*ranks)):
            assert sorted(sum(parts, [])) == list(range(i, min(i + reach, 40))), (types, i)


def test_sinks_take_probability_and_none_at_minus_infinity():
    """Case 18: log(n) on n equal scores halves the output; −inf is plain attention."""
    model = dataclasses.replace(ODD, num_hidden_layers=1, layer_types=script.ALTERNATE[1:])
    (chunk,) = ours(model, run_config())
    attention = chunk.model.layers["0"].self_attn
    attention.q_proj.weight.data.zero_(), attention.q_proj.bias.data.zero_()
    attention.o_proj.bias.data.zero_()
    x = torch.randn(1, 40, 64, dtype=torch.float64)
    places, outs = script.Places(chunk.rope.cos, chunk.rope.sin), []
    for sink in (-math.inf, math.log(40)):
        attention.sinks.data.fill_(sink)
        outs.append(attention(x, places)[0, -1])
    mean = attention.v_proj(x)[0].mean(0).view(2, 1, 24).expand(2, 2, 24).flatten()
    torch.testing.assert_close(outs[0], mean @ attention.o_proj.weight.T)
    torch.testing.assert_close(outs[1], outs[0] / 2)


def test_clamped_swiglu_values_at_the_limit_of_the_config():
    """Case 15, through the layer: its own alpha and limit, not the kernel's defaults."""
    layer = ours(dataclasses.replace(ODD, swiglu_limit=5.0), run_config())[0].model.layers["0"]
    assert layer.activation == ClampedSwiGLU(1.702, 5.0)
    h = torch.tensor([[10.0, -10.0, 10.0, -10.0]], dtype=torch.float64)  # gates, then ups
    high, low = _activate(h, layer.activation)[0].tolist()
    assert high == pytest.approx(6 * 5 / (1 + math.exp(-1.702 * 5)))
    assert low == pytest.approx(-4 * -10 / (1 + math.exp(17.02)))


def test_balance_loss_is_transformers_over_k():
    cfg = run_config(balance="micro-batch", balance_coef=1.0)
    (chunk,) = ours(dataclasses.replace(ODD, num_hidden_layers=1), cfg)
    tokens = data().tokens
    with no_fp32(hf_file, hf_rope):
        theirs = oracle(chunk.arch, torch.float64, chunk)
        router_logits = theirs(tokens, output_router_logits=True).router_logits
        wanted = hf_file.load_balancing_loss_func(router_logits, 8, 2) / 2
    hidden = theirs.model.layers[0].post_attention_layernorm
    kept = []
    hidden.register_forward_hook(lambda module, args, out: kept.append(out.detach()))
    with no_fp32(hf_file, hf_rope), torch.no_grad():
        theirs(tokens)
    gate = chunk.model.layers["0"].mlp.gate
    aux = gate(kept[0].flatten(0, 1), 2, chunk.state[0], None)[2]
    assert relative(aux.detach(), wanted.detach()) < 1e-12


def test_router_and_rope_stay_in_fp32_in_a_bf16_model():
    """Case 19."""
    (chunk,) = ours(ODD, run_config(dtype="bf16"))
    gate = chunk.model.layers["0"].mlp.gate
    tokens = torch.randn(48, 64, dtype=torch.bfloat16)
    weights, ids, _, stats = gate(tokens, 2, chunk.state[0], None)
    assert weights.dtype == stats.dtype == chunk.rope.cos.dtype == torch.float32
    logits = tokens.double() @ gate.weight.double().T + gate.bias.double()
    exact = logits.gather(1, ids).softmax(-1)
    assert (weights.double() - exact).abs().max() < 1e-5  # bf16 logits would be off by 1e-2
    assert torch.equal(ids, logits.topk(2).indices)
    norm = chunk.model.norm  # rounded once, after the weight
    theirs = hf_file.GptOssRMSNorm(64, ODD.rms_norm_eps)
    theirs.weight.data = norm.weight.data
    assert torch.equal(norm(tokens), theirs(tokens))


def test_routing_bias_moves_choices_not_weights():
    (chunk,) = ours(ODD, run_config())
    gate = chunk.model.layers["0"].mlp.gate
    tokens = torch.randn(20, 64, dtype=torch.float64)
    chunk.state[0, 1] = torch.tensor([0.0] * 6 + [99.0] * 2)
    weights, ids, _, _ = gate(tokens, 1, chunk.state[0], None)
    assert set(ids.flatten().tolist()) == {6, 7}
    logits = tokens @ gate.weight.T + gate.bias
    torch.testing.assert_close(weights, logits.gather(1, ids).softmax(-1))


# ------------------------------------------------------------------------------------------------
# Tape, compiled segments, optimizer, initial weights
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "experts", "layer"])
def test_tape_with_cuts_equals_plain_autograd(recompute):
    cfg = run_config(recompute=recompute, balance="sequence", z_loss_coef=0.1)
    results = []
    for cut in (None, False, True):
        (chunk,) = ours(ODD, cfg)
        batches = [data(1), data(2)]
        if cut is None:
            losses = [drive(chunk(None, batch, None)) for batch in batches]
            sum(losses).backward()
        else:
            losses = run([chunk], batches, ONE, cut_all=cut)
        losses = [loss.detach() for loss in losses]
        results.append((losses, {n: p.grad for n, p in chunk.named_parameters()}))
    for losses, grads in results[1:]:
        torch.testing.assert_close(losses, results[0][0], rtol=1e-12, atol=0)
        for name, grad in results[0][1].items():
            assert (grads[name] - grad).abs().max() <= 1e-12 * grad.abs().max(), name


def test_layers_share_one_graph_with_a_window_and_one_without(monkeypatch):
    """No graph break, and no graph a layer: an int that differs by layer would make five."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = dataclasses.replace(ODD, num_hidden_layers=5, layer_types=script.ALTERNATE * 3)
    results = []
    for compiled in (False, True):
        cfg = run_config(dtype="fp32", compile=compiled, balance="sequence")
        chunks = ours(model, cfg)
        losses = run(chunks, [data(1), data(2)], torch.ones(()))
        results.append((losses, {n: p.grad for n, p in script.named_parameters(chunks)}))
    torch._dynamo.reset()
    (want, want_grads), (got, got_grads) = results
    assert counters["stats"]["unique_graphs"] == 3  # attend_and_route twice, aggregate
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for name, grad in want_grads.items():
        assert (got_grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_leaves_biases_and_sinks(optimizer):
    """Case 33: no gradient and a step: matrices shrink by 1 − lr·wd, all else stays."""
    cfg = run_config(optimizer=optimizer, weight_decay=0.5)
    chunks = ours(ODD, cfg)
    before = {n: p.detach().clone() for n, p in script.named_parameters(chunks)}
    script.build_optimizer(chunks, cfg, build_mesh(cfg, CPU)).step(0.1)
    for name, p in script.named_parameters(chunks):
        matrix = name.endswith(("weight", ".gate_up", ".down")) and "norm" not in name
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if matrix else 1.0))
    moved = {b.rule: {n for n, _ in b.named_params} for c in chunks for b in c.buckets}
    assert not any(n.endswith(("bias", "sinks")) for n in moved.get("muon", ()))
    assert optimizer == "adamw" or any(n.endswith(".gate_up") for n in moved["muon"])


def test_initial_weights():
    """Biases and sinks are 0, norms 1, matrices random: the same in every cut, no two experts."""
    cfg = run_config(dtype="bf16")
    mesh = build_mesh(cfg, CPU)
    whole = dict(script.named_parameters(script.build(ODD, cfg, mesh, 1)))
    for name, p in whole.items():
        if name.endswith(("bias", "sinks")):
            assert not p.any(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            assert p.detach().float().std() == pytest.approx(0.02, rel=0.1), name
        if p.ndim == 3:
            assert len({e.float().numpy().tobytes() for e in p.detach()}) == 8, name
    parts = dict(script.named_parameters(script.build(ODD, cfg, mesh, 3)))
    assert parts.keys() == whole.keys() and all(torch.equal(parts[n], whole[n]) for n in whole)


def test_presets_are_the_published_models():
    """Model card: 20.91 B weights, 3.61 B active; 116.83 B and 5.13 B (head in, embedding not)."""
    for name, total, active in (("20b", 20.91e9, 3.61e9), ("120b", 116.83e9, 5.13e9)):
        model = script.MODELS[name]
        count = sum(p.numel() for p in script.whole(model).parameters())
        assert abs(count / total - 1) < 1e-3, (name, count)
        assert abs(script.active_parameters(model) / active - 1) < 2e-3, name
        assert len(model.layer_types) == model.num_hidden_layers
        assert [model.window(i) for i in (0, 1, 2)] == [128, None, 128]
        script.check_model(model, run_config(mxfp4=True))


def test_the_published_config_is_the_preset(tmp_path):
    """openai/gpt-oss-20b's config.json: its keys and values, quantised files included."""
    published = dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0,
        eos_token_id=200002, experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880,
        initial_context_length=4096, initializer_range=0.02, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
        model_type="gpt_oss", num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=8, num_local_experts=32, output_router_logits=False,
        pad_token_id=199999, quantization_config=mxfp4.QUANTIZATION_CONFIG, rms_norm_eps=1e-05,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, rope_type="yarn",
                          original_max_position_embeddings=4096, truncate=False),
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
        tie_word_embeddings=False, use_cache=True, vocab_size=201088,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert script.model_of(run_config(model_config=tmp_path)) == script.MODELS["20b"]
    ours = json.loads(json.dumps(script.hf_config(script.MODELS["20b"], "bf16", packed=True)))
    same = ours.keys() & published.keys()
    assert {k: ours[k] for k in same} == {k: published[k] for k in same}
    assert ours.keys() - same == {"torch_dtype", "swiglu_alpha"}


def test_flops_by_hand():
    active = 3 * (64 * 4 * 24 * 2 + 64 * 2 * 24 * 2 + 3 * 64 * 20 * 2 + 64 * 8) + 64 * 71
    assert script.active_parameters(ODD) == active
    sees = lambda window: sum(min(t + 0.5, window) for t in range(100)) / 100  # half of itself
    keys = 2 * sees(4) + sees(100)  # two layers with a window, one without
    products = 3 * 2 * 2 * 4 * 24 * keys  # QK' and PV; forward and twice that backward
    assert script.flops_per_token(ODD, 100) == pytest.approx(6 * active + products, rel=2e-4)
    assert script.flops_per_token(ODD, 4) == 6 * active + 3 * 2 * 2 * 4 * 24 * 3 * 2


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

NAMES = script.hf_views, script.hf_fused, script.whole


def write(path, chunk, packed=False, dtype="fp32"):
    """A model directory as a checkpoint has it."""
    named = script.named_parameters([chunk])
    views = script.packed_views if packed else script.hf_views
    views = dict(view for name, p in named for view in views(name, p.detach()))
    hf.save_views(path, views, script.hf_config(chunk.arch, dtype, packed), script.DTYPES[dtype])


def read(path, dtype="fp32"):
    """A chunk full of NaN, filled from a directory; every element was."""
    cfg = run_config(dtype=dtype)
    model = script.model_of(run_config(init_from=path))
    (chunk,) = script.build(model, cfg, build_mesh(cfg, CPU), 1)
    for p in chunk.parameters():
        p.data.fill_(torch.nan)
    script.load_weights([chunk], path, build_mesh(cfg, CPU), *NAMES)
    assert not any(p.isnan().any() for p in chunk.parameters())
    return chunk


def logits_of(chunk, tokens):
    with torch.no_grad():
        return drive(chunk(None, script.Batch(tokens), None))


def from_pretrained(path, **how):
    how |= dict(attn_implementation="eager", experts_implementation="eager")
    theirs, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **how)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return theirs


@pytest.mark.parametrize("model", [ODD, SQUARE], ids=["odd", "square"])
def test_transformers_and_we_read_each_other(model, tmp_path):
    """Cases 14 and 22: save_pretrained → ours → from_pretrained, equal logits on the way."""
    (chunk,) = ours(model, run_config(dtype="fp32"))
    oracle(model, torch.float32, chunk).save_pretrained(tmp_path / "theirs")
    mine = read(tmp_path / "theirs")
    assert mine.arch == model
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), chunk.parameters()))
    write(tmp_path / "ours", mine)
    tokens = data().tokens
    with torch.no_grad():
        theirs = from_pretrained(tmp_path / "ours")(tokens).logits
    assert (theirs - logits_of(mine, tokens)).abs().max() < 1e-4 * theirs.abs().max()
    assert hf.Reader(tmp_path / "ours").names == hf.Reader(tmp_path / "theirs").names


def test_bf16_and_mxfp4_files_of_equal_values_give_equal_logits(tmp_path):
    """Case 14, with square matrices; and transformers reads the MXFP4 file to the same values."""
    (chunk,) = ours(SQUARE, run_config(dtype="bf16"))
    write(tmp_path / "mxfp4", chunk, packed=True, dtype="bf16")
    mine = read(tmp_path / "mxfp4", "bf16")
    write(tmp_path / "bf16", mine, dtype="bf16")
    tokens = data().tokens
    logits = logits_of(mine, tokens)
    assert torch.equal(logits, logits_of(read(tmp_path / "bf16", "bf16"), tokens))
    assert not torch.equal(logits, logits_of(chunk, tokens))
    how = dict(quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    theirs = dict(from_pretrained(tmp_path / "mxfp4", **how).named_parameters())
    for name, tensor in published(mine):
        assert torch.equal(theirs[name], tensor), name
    wide = read(tmp_path / "mxfp4", "fp64")
    assert (
        relative(logits_of(wide, tokens), logits_of(read(tmp_path / "bf16", "fp64"), tokens)) == 0
    )


def import_export(rank, world, source, out, packed):
    """Load at ep = 2 and save again, as a run does."""
    cfg = run_config(dtype="bf16", ep=world, init_from=source, out=out)
    mesh = build_mesh(cfg, CPU)
    model = script.model_of(cfg)
    chunks = script.build(model, cfg, mesh)
    script.load_weights(chunks, source, mesh, *NAMES)
    optimizer = script.build_optimizer(chunks, cfg, mesh)
    loader = script.Loader(("stdlib",), 8, 257, 0)
    t = script.Trainer(model, cfg, mesh, chunks, optimizer, loader)
    views = script.packed_views if packed else script.hf_views
    script.save(t, 1, views, script.hf_config(model, "bf16", packed))
    assert t.saver.wait(), t.saver.error


@pytest.mark.parametrize("packed", [False, True])
def test_import_then_export_is_the_source_byte_for_byte(packed, tmp_path):
    """Case 22 at ep = 2: names, shapes, dtypes, values; the index is exact."""
    (chunk,) = ours(SQUARE, run_config(dtype="bf16"))
    if packed:  # what MXFP4 can say
        write(tmp_path / "first", chunk, packed, "bf16")
        chunk = read(tmp_path / "first", "bf16")
    write(tmp_path / "source", chunk, packed, "bf16")
    pool.run(2, import_export, tmp_path / "source", tmp_path / "out", packed)
    saved = checkpoint.latest(tmp_path / "out")
    held = []
    for path in (tmp_path / "source", saved):
        files = {f.name: load_file(f) for f in path.glob("*.safetensors")}
        held.append({name: t for file in files.values() for name, t in file.items()})
        index = hf.read_json(path / hf.INDEX)
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in held[-1].values())
        assert index["weight_map"] == {n: file for file, ts in files.items() for n in ts}
    assert held[0].keys() == held[1].keys()
    for name, tensor in held[0].items():
        assert tensor.dtype == held[1][name].dtype and torch.equal(tensor, held[1][name]), name
    assert hf.read_json(saved / "config.json") == hf.read_json(tmp_path / "source" / "config.json")


@pytest.mark.parametrize("lost", ["mlp.experts.down_proj_bias", "self_attn.sinks",
                                  "mlp.router.bias"])  # fmt: skip
def test_a_missing_tensor_is_named(lost, tmp_path):
    """Case 23: no parameter is left as it was."""
    (chunk,) = ours(ODD, run_config(dtype="fp32"))
    write(tmp_path, chunk)
    for path in tmp_path.glob("*.safetensors"):
        held = load_file(path)
        held.pop(f"model.layers.1.{lost}", None)
        save_file(held, path, metadata={"format": "pt"})
    (tmp_path / hf.INDEX).unlink()
    with pytest.raises(ValueError, match=f"1 missing: model.layers.1.{lost}"):
        read(tmp_path)


# ------------------------------------------------------------------------------------------------
# Runs, and what is refused
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    model = dataclasses.replace(
        script.TINY, num_hidden_layers=2, layer_types=script.ALTERNATE, hidden_size=32, head_dim=12,
        intermediate_size=32, sliding_window=8,
    )  # fmt: skip
    small.shrink(monkeypatch, script, model, save_every=3)
    return model


def main(*flags):
    script.main([str(flag) for flag in flags])


@pytest.mark.parametrize("flags", [
    "", "--mxfp4 --optimizer muon --bias-update-rate 0.01 --isolate-documents",
])  # fmt: skip
def test_resumed_run_is_bit_equal(tiny, tmp_path, flags):
    """Case 24, also where the files are rounded to MXFP4: masters are not."""
    flags = flags.split()
    main("--out", tmp_path / "whole", *flags)
    main("--out", tmp_path / "parts", *flags)
    for late in (tmp_path / "parts").glob("step-*6"):
        late.rename(late.parent / "gone")  # as if killed after step 5
    main("--out", tmp_path / "parts", *flags)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    assert steps(tmp_path / "whole")[-1]["loss"] < steps(tmp_path / "whole")[0]["loss"] - 0.1
    a, b = (checkpoint.latest(tmp_path / d) for d in ("whole", "parts"))
    for file in a.rglob("*.safetensors"):
        assert file.read_bytes() == (b / file.relative_to(a)).read_bytes(), file.name
    packed = any(n.endswith("_blocks") for n in hf.Reader(a).names)
    assert packed == ("--mxfp4" in flags) == ("quantization_config" in hf.read_config(a))


def test_a_run_starts_from_files_of_both_formats_and_transformers_loads_what_it_saves(
    tiny, tmp_path, capsys
):
    main("--out", tmp_path / "a", "--mxfp4", "--steps", 3)
    start = tmp_path / "a" / "step-00000003"
    losses = []
    for name, flags in (("b", ()), ("c", ("--layers", 1))):
        main("--out", tmp_path / name, "--init-from", start, "--steps", 3, *flags)
        losses.append(steps(tmp_path / name)[0]["loss"])
    saved = tmp_path / "b" / "step-00000003"
    capsys.readouterr()
    main("--out", tmp_path / "b", "--eval-only")
    main("--out", tmp_path / "d", "--eval-only", "--init-from", saved)
    lines = [x for x in capsys.readouterr().out.splitlines() if "eval loss" in x]
    assert len(lines) == 2 and lines[0] == lines[1]
    assert losses[0] < steps(tmp_path / "a")[0]["loss"] and losses[0] != losses[1]
    assert script.model_of(run_config(init_from=tmp_path / "c" / "step-00000003")).window(0) == 8
    tokens = torch.arange(32)[None]
    theirs = from_pretrained(saved)
    with torch.no_grad():
        assert (theirs(tokens).logits - logits_of(read(saved), tokens)).abs().max() < 1e-4


def test_unsupported_configs_are_one_line(tmp_path):
    base = script.hf_config(ODD, "fp32")
    yarn = base["rope_scaling"]
    for change, said in (
        (dict(model_type="qwen3_moe"), "model_type is 'qwen3_moe'"),
        (dict(attention_bias=False), "attention_bias False is not supported, only True"),
        (dict(hidden_act="gelu"), "hidden_act gelu"),
        (dict(rope_scaling=None), "rope_scaling {} is not supported, only yarn"),
        (dict(rope_scaling={**yarn, "rope_type": "llama3"}), "llama3.*not supported, only yarn"),
        (dict(rope_scaling={**yarn, "mscale": 0.7}), "mscale.*not supported, only yarn, with"),
        (dict(rope_scaling={**yarn, "factor": None}), "not supported, only yarn, with its factor"),
        (dict(rope_scaling={**yarn, "beta_fast": 0}), "must have numbers above 0"),
        (dict(rope_theta=None), "rope_theta must be a number above 0, not None"),
        (dict(rope_theta=1.0), "rope_theta 1.0 must be above 1"),
        (dict(swiglu_limit="7"), "swiglu_limit must be a number above 0, not '7'"),
        (dict(layer_types=["full_attention"] * 2), "layer_types must say sliding_attention or"),
        (dict(layer_types=["chunked_attention"] * 3), "layer_types must say sliding_attention or"),
        (dict(sliding_window=None), "integers from 1: sliding_window None"),
        (dict(num_local_experts=0), "integers from 1: num_experts 0"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**base, **change}))
        with pytest.raises(ValueError, match=said) as error:
            script.model_of(run_config(model_config=tmp_path))
        assert "\n" not in str(error.value)
    for left_out in ("layer_types", "swiglu_alpha", "initial_context_length"):
        (tmp_path / "config.json").write_text(
            json.dumps({k: v for k, v in base.items() if k != left_out})
        )
        assert script.model_of(run_config(model_config=tmp_path)) == ODD
    told = {k: v for k, v in yarn.items() if k != "truncate"}  # transformers then rounds
    (tmp_path / "config.json").write_text(json.dumps({**base, "rope_scaling": told}))
    assert script.model_of(run_config(model_config=tmp_path)).rope_scaling.truncate


def test_models_and_layouts_that_do_not_fit_are_refused():
    yarn = ODD.rope_scaling
    for change, flags, said in (
        ({}, dict(ep=3), "ep 3 does not divide num_experts 8; use one of \\[1, 2, 4, 8\\]"),
        (dict(num_key_value_heads=3), {}, "num_key_value_heads 3 must divide num_attention_heads"),
        (dict(head_dim=23), {}, "head_dim 23 must be even"),
        (dict(num_experts_per_tok=9), {}, "num_experts_per_tok 9 must lie between 1 and"),
        ({}, dict(pp=2), "--pp 2 needs at least 4 layers, the model has 3"),
        ({}, dict(seq_len=65), "--seq-len 65 is longer than max_position_embeddings 64"),
        ({}, dict(mxfp4=True), "--mxfp4: hidden_size 64 and intermediate_size 20 must be multip"),
        (dict(swiglu_limit=0.0), {}, "swiglu_limit 0.0 must be above 0"),
        (dict(rope_scaling=dataclasses.replace(yarn, factor=0.5)), {}, "factor 0.5 must be at le"),
        (dict(rope_scaling=dataclasses.replace(yarn, beta_fast=1.0)), {}, "leave no range"),
    ):
        with pytest.raises(ValueError, match=said):
            script.check_model(dataclasses.replace(ODD, **change), run_config(**flags))
    assert mxfp4.BLOCK == 32
    deeper = script.model_of(run_config(preset="20b", layers=5))
    assert [deeper.window(i) for i in range(5)] == [128, None, 128, None, 128]
    assert script.hf_config(deeper, "bf16")["layer_types"] == deeper.layer_types[:5]


@pytest.mark.gpu
def test_gpu_gradients_are_within_twice_the_eager_bf16_error():
    """Compiled, library attention with sinks and windows, Triton experts with biases; rows of 16
    bytes but of no whole block."""
    model = dataclasses.replace(
        ODD, hidden_size=136, head_dim=64, intermediate_size=72, sliding_window=16,
        swiglu_limit=7.0, max_position_embeddings=128,
    )  # fmt: skip
    small.gradients_are_within_twice_the_eager_error(script, model)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, dict(recompute="layer"), dict(isolate_documents=True)])
def test_gpu_trains_compiled_and_as_a_cuda_graph(flags):
    """Of 256 tokens a sequence, windows of 32; nothing in a micro-batch may make the host wait."""
    sizes = dict(hidden_size=256, head_dim=64, intermediate_size=128)
    model = dataclasses.replace(script.TINY, **sizes)
    cfg = run_config(dtype="bf16", compile=True, seq_len=256, global_batch=8, lr=3e-3, **flags)
    t = small.trainer(script, cfg, model, torch.device("cuda", 0))
    small.trains_down(script, t)
    assert (t.replay is not None and t.replay.graph is not None) != cfg.isolate_documents
