"""The whole script in one process: steps, routing options, evaluation, checkpoints, bad flags."""

import dataclasses
import itertools
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import train_qwen3_moe as script
from common import checkpoint, hf, tokens
from common.config import to_json
from common.data import isolate
from common.dualpipev import Tape, backward, drive, forward, pair, run
from common.graph import Replay, replay_for
from common.mesh import build as build_mesh
from common.mesh import spread_layers
from common.optim import decays
from common.tokens import write_tokens
from tests import small
from tests.oracle import randomise, relative
from tests.small import steps
from tests.test_qwen3_moe import ODD, a_trainer, data, ours, run_config, table_of

CPU = torch.device("cpu")
ONE = torch.ones((), dtype=torch.float64)
SMALL = dataclasses.replace(script.TINY, num_hidden_layers=2, hidden_size=40, head_dim=12)


@pytest.fixture
def tiny(monkeypatch):
    small.shrink(monkeypatch, script, SMALL)


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


trainer = partial(small.trainer, script, model=SMALL)


def main(*flags):
    script.main([str(flag) for flag in flags])


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------


def test_run_logs_evaluates_saves_and_transformers_loads_it(tiny, tmp_path, capsys):
    every = ("--eval-every", 6, "--save-every", 6)
    main("--out", tmp_path, "--steps", 12, *every, "--sample-tokens", 5)
    records = steps(tmp_path)
    assert [r["step"] for r in records] == list(range(1, 13))
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    for key in "step loss balance expert_load grad_norm lr skipped".split():
        assert key in records[0], key
    timed = [r for r in metrics(tmp_path) if "step_s" in r][0]
    assert timed["tokens_per_s"] == pytest.approx(4 * 32 / timed["step_s"]) and timed["mfu"] is None
    for load in records[0]["expert_load"]:
        assert len(load) == 8 and sum(load) == 4 * 32 * 2
    printed = capsys.readouterr().out
    assert "eval loss " in printed and "sample after 'def '" in printed
    assert sum("eval_loss" in r for r in metrics(tmp_path)) == 2

    (saved,) = [p for p in tmp_path.iterdir() if p.name == "step-00000012"]
    theirs, missing = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(missing.values()), missing
    model = script.model_of(run_config(init_from=saved))
    assert model == SMALL
    cfg = run_config(dtype="fp32", seq_len=32)
    (chunk,) = script.build(model, cfg, build_mesh(cfg, CPU))
    names = script.hf_views, script.hf_fused, script.whole
    script.load_weights([chunk], saved, build_mesh(cfg, CPU), *names)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        mine = drive(chunk(None, script.Batch(tokens), None))
        assert (theirs(tokens).logits - mine).abs().max() < 1e-4


@pytest.mark.parametrize("flags", [
    "", "--optimizer muon --bias-update-rate 0.01 --schedule cosine",
    "--force-balance random --moments bf16", "--data DOCUMENTS --isolate-documents",
])  # fmt: skip
def test_resumed_run_is_bit_equal(tiny, tmp_path, flags):
    """Case 24: loss, rate, data, moments; in mid-warm-up, and where an epoch ends (12 samples)."""
    documents(tmp_path / "documents", samples=12 + 1)
    flags = flags.replace("DOCUMENTS", str(tmp_path / "documents")).split()
    flags += ["--warmup", 5, "--save-every", 3]  # step 3 ends the epoch of 12 samples
    main("--out", tmp_path / "whole", *flags)
    main("--out", tmp_path / "parts", *flags)
    for late in (tmp_path / "parts").glob("step-*6"):
        late.rename(late.parent / "gone")  # as if killed after step 5
    main("--out", tmp_path / "parts", *flags)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole")
    a, b = (checkpoint.latest(tmp_path / d) for d in ("whole", "parts"))
    for file in a.rglob("*.safetensors"):
        assert file.read_bytes() == (b / file.relative_to(a)).read_bytes(), file.name


def documents(path, samples, seq_len=32):
    """A token directory of that many samples, of documents of 1 to 20 bytes."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (samples * seq_len + 1,), generator=g)
    tokens[torch.randint(0, 20, tokens.shape, generator=g) == 0] = 256
    meta = dict(vocab_size=257, tokenizer="bytes", eos_id=256, documents=int((tokens == 256).sum()))
    write_tokens(path, tokens.numpy(), meta)


def test_every_flag_of_the_step_reaches_it(tiny, tmp_path):
    """Three steps against torch.optim.AdamW, clip_grad_norm_ and lr_at, with no flag at its
    default; the order of samples, the schedule and what is kept follow their flags too."""
    flags = dict(
        seq_len=16, dtype="fp64", lr=1e-2, warmup=2, steps=4, schedule="linear", min_lr_ratio=0.3,
        beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2, clip=0.5, seed=7, keep_last=1,
        balance="none", save_every=1, sample_tokens=0,
    )  # fmt: skip
    text = [x for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    main("--out", tmp_path, *text)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000004"]

    run_, model = run_config(**{**flags, "global_batch": 4, "micro_batch": 4}), SMALL
    (chunk,) = script.build(model, run_, build_mesh(run_, CPU))
    groups = [
        dict(params=[p for n, p in chunk.named_parameters() if decays(n, p.shape) == yes],
             weight_decay=0.2 if yes else 0.0)
        for yes in (True, False)
    ]  # fmt: skip
    plain = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-6)
    loader = script.Loader(("stdlib",), 16, 257, seed=7)
    for step, record in zip(range(1, 5), steps(tmp_path), strict=True):
        plain.zero_grad()
        loss = drive(chunk(None, script.Batch(*loader.read(loader.take(4))), None)) / 64
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(chunk.parameters(), 0.5)
        for group in plain.param_groups:
            group["lr"] = [None, 5e-3, 1e-2, 6.5e-3, 3e-3][step]
        plain.step()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-12)
        assert record["lr"] == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
    saved = hf.Reader(tmp_path / "step-00000004")
    for name, p in chunk.named_parameters():
        for hf_name, view in script.hf_views(name, p.detach()):
            torch.testing.assert_close(saved.read(hf_name), view, rtol=1e-11, atol=1e-13)


def test_a_finished_run_is_not_trained_again_and_another_model_is_refused(tiny, tmp_path, capsys):
    main("--out", tmp_path, "--steps", 2, "--save-every", 2)
    main("--out", tmp_path, "--steps", 2, "--save-every", 2)
    assert len(steps(tmp_path)) == 2
    with pytest.raises(SystemExit, match="num_hidden_layers is 2 there and 1 here"):
        main("--out", tmp_path, "--layers", 1)


def test_another_scripts_run_is_refused_as_such(tiny, tmp_path):
    main("--out", tmp_path, "--steps", 1)
    config = tmp_path / "step-00000001" / "config.json"
    config.write_text(config.read_text().replace("qwen3_moe", "gpt_oss"))
    said = "step-00000001 is of a run of gpt_oss, this script trains qwen3_moe: use another --out"
    with pytest.raises(SystemExit, match=said):
        main("--out", tmp_path)


def test_resume_says_why_it_is_an_older_one_and_then_what_was_dropped(tiny, tmp_path, capsys):
    main("--out", tmp_path, "--save-every", 3)
    damaged = tmp_path / "step-00000006" / "trainer" / "buffers.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    main("--out", tmp_path, "--save-every", 3)
    said = capsys.readouterr().out.splitlines()
    begins = (
        "train_qwen3_moe tiny", f"passed over {damaged.parent.parent}: {damaged} cannot be read",
        f"resumed {tmp_path}/step-00000003", f"{tmp_path}/metrics.jsonl: dropped 3 records after",
        "step 4/6",
    )  # fmt: skip
    assert all(line.startswith(begin) for line, begin in zip(said, begins)), said
    assert [r["step"] for r in steps(tmp_path)] == list(range(1, 7))
    assert len((tmp_path / "metrics.dropped.jsonl").read_text().splitlines()) == 3


def test_resume_on_changed_data_says_so(tiny, tmp_path, capsys):
    """By length, by another meta.json; once; also of a source that was out of use for a while."""
    folder, flags = tmp_path / "d", ("--out", tmp_path / "o", "--save-every", 1, "--steps")

    def said(step, data=folder):
        capsys.readouterr()
        tokens._mapped.cache_clear()  # another run is another process
        main(*flags, step, "--data", data)
        return [line for line in capsys.readouterr().out.splitlines() if "anew" in line]

    documents(folder, samples=20)
    assert said(1) == [] and said(2) == []
    shutil.rmtree(folder)
    documents(folder, samples=30)
    (line,) = said(3)
    assert line.startswith(f"data {folder}: 961 tokens, 641 when this run read it before; samples")
    assert said(4) == [] and said(5, "stdlib") == []
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"documents": 1}))
    (line,) = said(6)
    assert "961 tokens, 961 of another sha256 when" in line
    state = tmp_path / "o" / "step-00000006" / "trainer" / "state.json"
    old = json.loads(state.read_text())
    assert old.pop("sources").keys() == {str(folder), "stdlib"}
    state.write_text(json.dumps(old))  # as it was before
    (folder / "meta.json").write_text(json.dumps(meta))
    assert said(7) == []


def test_eval_only_and_init_from(tiny, tmp_path, capsys):
    main("--out", tmp_path / "a", "--save-every", 6, "--eval-every", 6)
    said = capsys.readouterr().out.split("eval loss ")[1].split()[0]
    main("--out", tmp_path / "a", "--eval-only")
    assert capsys.readouterr().out.split("eval loss ")[1].split()[0] == said
    main("--out", tmp_path / "a", "--eval-only", "--optimizer", "muon", "--seed", 7)
    assert capsys.readouterr().out.split("eval loss ")[1].split()[0] == said
    main("--out", tmp_path / "a", "--eval-only", "--seq-len", 16)
    assert capsys.readouterr().out.split("eval loss ")[1].split()[0] != said
    main("--out", tmp_path / "b", "--eval-only", "--init-from", tmp_path / "a" / "step-00000006")
    assert capsys.readouterr().out.split("eval loss ")[1].split()[0] == said


BAD = {
    "--layers 2 --ep 3": "--ep 3: must divide dp \\* cp",
    "--micro-batch 3": "--global-batch 4.*use 3 or 6",
    "--seq-len 5000": "max_position_embeddings 4096",
    "--data nowhere": "nowhere",
    "--pp 2": "does not divide the 1 ranks; .* start 2 with torchrun --nproc",
    "--init-from nowhere": "nowhere",
    "--model-config nowhere.json": "nowhere.json",
    "--out /dev/null/x": "--out /dev/null/x: no directory to write in",
    "--data": "error: --data: name at least one",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags_are_one_line_before_any_model(tiny, tmp_path, flags, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "build", None)  # nothing may be built
    with pytest.raises(SystemExit, match=BAD[flags]) as error:
        main("--out", tmp_path / "o", *flags.split())
    assert "\n" not in str(error.value) and not (tmp_path / "o").exists()


def test_a_run_directory_is_no_model(tiny, tmp_path):
    main("--out", tmp_path / "a", "--steps", 2, "--save-every", 2)
    with pytest.raises(SystemExit, match="a run's directory, not a model's: use .*step-00000002"):
        main("--out", tmp_path / "b", "--init-from", tmp_path / "a")


def test_model_and_layout_that_do_not_fit_are_refused():
    """Case 27: experts 8 with ep 3, heads, depth: key, value and what would work."""
    for change, flags, said in (
        ({}, dict(ep=3), "ep 3 does not divide num_experts 8; use one of \\[1, 2, 4, 8\\]"),
        (dict(num_key_value_heads=3), {}, "num_key_value_heads 3 must divide num_attention_heads"),
        (dict(head_dim=23), {}, "head_dim 23 must be even"),
        (dict(num_experts_per_tok=9), {}, "num_experts_per_tok 9 must lie between 1 and"),
        ({}, dict(pp=2), "--pp 2 needs at least 4 layers, the model has 3"),
    ):
        with pytest.raises(ValueError, match=said):
            script.check_model(dataclasses.replace(ODD, **change), run_config(**flags))


def test_unsupported_configs_are_refused(tmp_path):
    base = script.hf_config(ODD, "fp32")
    for key, value, said in (
        ("model_type", "llama", f"{tmp_path}: model_type is 'llama'"),
        ("hidden_act", "gelu", "hidden_act gelu"),
        ("attention_bias", True, "attention_bias True"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling .*yarn"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({**base, key: value}))
        with pytest.raises(ValueError, match=said):
            script.model_of(run_config(model_config=tmp_path))


# ------------------------------------------------------------------------------------------------
# Losses, routing, metrics
# ------------------------------------------------------------------------------------------------


def router_gradients(flags, count, coefficient=1.0):
    """Router gradients of the auxiliary terms alone: the same micro-batch `count` times."""
    cfg = run_config(balance_coef=coefficient, global_batch=2 * count, **flags)
    (chunk,) = ours(ODD, cfg)
    run([chunk], [data()] * count, 0 * ONE)
    return [layer.mlp.gate.weight.grad for layer in chunk.model.layers.values()]


@pytest.mark.parametrize("flags", [
    dict(balance="micro-batch"), dict(balance="global-batch"), dict(balance="sequence"),
    dict(balance="none", z_loss_coef=1.0),
])  # fmt: skip
def test_auxiliary_terms_do_not_depend_on_the_number_of_micro_batches(flags):
    """Case 5. A uniform f gives no gradient, so global-batch is given another."""
    want = router_gradients(flags, 1)
    for count in (2, 4):
        for a, b in zip(router_gradients(flags, count), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
    if flags["balance"] in ("micro-batch", "sequence") or "z_loss_coef" in flags:
        assert all(g.abs().max() > 1e-6 for g in want)


@pytest.mark.parametrize("balance", ["sequence", "global-batch"])
def test_balance_does_not_depend_on_the_cut_into_micro_batches(balance):
    """Two sequences at once or one by one; `global-batch` uses the previous step's shares."""
    batch = data()
    halves = [script.Batch(batch.tokens[i : i + 1], batch.targets[i : i + 1]) for i in (0, 1)]
    results = []
    for batches in ([batch], halves):
        (chunk,) = ours(ODD, run_config(balance=balance, balance_coef=1.0))
        chunk.state[:, 0] = torch.arange(8.0).softmax(0)
        run([chunk], batches, 0 * ONE)
        results.append(chunk.model.layers["1"].mlp.gate.weight.grad)
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-15)
    assert results[0].abs().max() > 1e-6


def test_global_batch_shares_come_from_the_previous_step():
    """Uniform first; then what the last step counted, unless it was skipped."""
    cfg = run_config(balance="global-batch", balance_coef=1.0)
    (chunk,) = ours(ODD, cfg)
    assert torch.equal(chunk.state[:, 0], torch.full((3, 8), 1 / 8, dtype=torch.float64))
    run([chunk], [data()], ONE)
    slots = chunk.statistics[:, 0].clone()
    table_of([chunk], cfg, skipped=True)
    assert torch.equal(chunk.state[:, 0], torch.full((3, 8), 1 / 8, dtype=torch.float64))
    assert not chunk.statistics.any()
    run([chunk], [data()], ONE)
    table_of([chunk], cfg)
    torch.testing.assert_close(chunk.state[:, 0], slots / (2 * 24 * 2), rtol=1e-12, atol=0)


def test_mean_over_tokens_not_over_micro_batches():
    """Case 6: micro-batches of 1 and 9 valid tokens equal one of 10; one without any is nothing."""
    batch = data(shape=(1, 10))
    batch.targets[0, 0] = script.IGNORE  # 9 valid, and 1 in the other
    other = data(seed=2, shape=(1, 10))
    other.targets[0, 1:] = script.IGNORE
    none = data(seed=3, shape=(1, 10))
    none.targets[:] = script.IGNORE
    merged = script.Batch(
        torch.cat([batch.tokens, other.tokens]), torch.cat([batch.targets, other.targets])
    )
    (chunk,) = ours(ODD, run_config())
    logits = drive(chunk(None, script.Batch(merged.tokens), None))
    mean = F.cross_entropy(logits.flatten(0, 1), merged.targets.flatten())
    mean.backward()
    results = [(mean.detach(), [p.grad for p in chunk.parameters()])]
    for batches in ([merged], [batch, other], [none, batch, other]):
        (chunk,) = ours(ODD, run_config())
        loss = script.gradients(a_trainer(run_config(), [chunk]), batches, 10)
        results.append((loss, [p.main_grad for p in chunk.parameters()]))
    for loss, grads in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-12, atol=0)
        for a, b in zip(grads, results[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)
    (chunk,) = ours(ODD, run_config())
    loss = script.gradients(a_trainer(run_config(), [chunk]), [none], 0)
    assert loss == 0 and all(not p.main_grad.any() for p in chunk.parameters())


def test_balance_metric():
    """Case 35: 1.0 when perfect, by layer; opposite collapses in two layers stay visible."""
    (chunk,) = ours(ODD, run_config(force_balance="stride"))
    chunk.model.layers["0"].mlp.gate.weight.data.zero_()  # uniform probabilities
    run([chunk], [data()], ONE)
    table = table_of([chunk], run_config())
    assert table[0, 0] == pytest.approx(1.0, abs=1e-12) and (table[:, 1:] == 2 * 24 * 2 / 8).all()
    chunk.statistics[:] = 0
    for layer, experts in ((0, [0, 1]), (1, [6, 7]), (2, range(8))):
        chunk.statistics[layer, :, list(experts)] = 48 / len(experts)
    table = table_of([chunk], run_config())
    assert table[:, 0].tolist() == pytest.approx([4.0, 4.0, 1.0])


def test_loss_has_no_auxiliary_part():
    """Case 35: the logged loss is the language model's, whatever the coefficients."""
    losses = []
    heavy = dict(balance="sequence", balance_coef=10.0, z_loss_coef=1.0)
    for flags in (dict(balance="none"), heavy):
        (chunk,) = ours(ODD, run_config(**flags))
        losses.append(script.gradients(a_trainer(run_config(), [chunk]), [data()], 48))
    assert losses[0] == losses[1]


def test_forced_and_replayed_routing():
    (chunk,) = ours(ODD, run_config(force_balance="stride"))
    routes = {}
    batch = dataclasses.replace(data(), routes=routes)
    drive(chunk(None, batch, None))
    for ids in routes.values():  # token t's j-th expert is (t + j·E/K) mod E
        assert ids.tolist() == [[t % 8, (t + 4) % 8] for t in range(48)]
    (chunk,) = ours(ODD, run_config(force_balance="random"))
    first, again, other = {}, {}, {}
    for index, kept in ((0, first), (0, again), (1, other)):
        numbers = 48 * index + torch.arange(48).view(2, 24)
        drive(chunk(None, dataclasses.replace(data(), routes=kept, numbers=numbers), None))
    assert all(torch.equal(first[i], again[i]) for i in range(3))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])
    assert all(len(set(row)) == 2 for row in first[0].tolist())

    (chunk,) = ours(ODD, run_config())
    routes = {}
    recorded = drive(chunk(None, dataclasses.replace(data(), routes=routes), None))
    replayed = drive(chunk(None, dataclasses.replace(data(), routes=dict(routes)), None))
    assert replayed == recorded and set(routes) == {0, 1, 2}
    swapped = {i: (ids + 1) % 8 for i, ids in routes.items()}
    assert drive(chunk(None, dataclasses.replace(data(), routes=swapped), None)) != recorded


def test_random_routing_is_uniform():
    """Every expert, and every pair of experts, as often as chance has it (5 sigma)."""
    N, E, K = 40_000, 16, 3
    numbers = torch.arange(N) + (5 << 33)
    chosen = F.one_hot(script.random_ids(numbers, E, K), E).sum(1).double()
    share, both = K / E, K * (K - 1) / (E * (E - 1))
    assert (chosen.mean(0) - share).abs().max() < 5 * (share * (1 - share) / N) ** 0.5
    pairs = (chosen.T @ chosen / N)[~torch.eye(E, dtype=torch.bool)]
    assert (pairs - both).abs().max() < 5 * (both * (1 - both) / N) ** 0.5
    in_a_row = (chosen[1:].T @ chosen[:-1] / (N - 1) - share**2).abs().max()
    assert in_a_row < 5 * (share**2 * (1 - share**2) / N) ** 0.5
    other = F.one_hot(script.random_ids(numbers + (1 << 33), E, K), E).sum(1)  # a layer on
    assert abs((chosen * other).sum(1).mean() - K * K / E) < 0.03


def test_routing_bias_moves_choices_not_weights():
    """Auxiliary-loss-free: overloaded experts fall, and the weights stay the probabilities."""
    cfg = run_config(bias_update_rate=0.125)
    (chunk,) = ours(ODD, cfg)
    chunk.statistics[0, 0] = torch.tensor([9.0, 1, 5, 5, 5, 5, 5, 5])
    chunk.statistics[1:, 0] = 5
    table_of([chunk], cfg)
    assert chunk.state[0, 1].tolist() == [-0.125, 0.125, 0, 0, 0, 0, 0, 0]
    gate = chunk.model.layers["0"].mlp.gate
    tokens = torch.randn(20, 64, dtype=torch.float64)
    chunk.state[0, 1] = torch.tensor([0.0, 0, 0, 0, 0, 0, 9, 9])
    weights, ids, _, _ = gate(tokens, 1, chunk.state[0], None)
    assert set(ids.flatten().tolist()) == {6, 7}
    probs = (tokens @ gate.weight.T).softmax(-1).gather(1, ids)
    torch.testing.assert_close(weights, probs / probs.sum(-1, keepdim=True))


def test_non_finite_step_is_skipped_and_counted():
    """Case 8: weights, moments and routers stay as they were, and the next step goes on."""
    t = trainer(run_config(dtype="fp32", seq_len=32, global_batch=4, bias_update_rate=0.1))
    script.train_step(t, 1)
    before = [x.clone() for _, _, _, x in t.optimizer.slices()]
    state = t.chunks[0].state.clone()
    poisoned = t.chunks[0].model.norm.weight
    handle = poisoned.register_hook(lambda g: g * float("nan"))
    record = script.train_step(t, 2)
    handle.remove()
    assert record["skipped"] == 1 and not record["grad_norm"] < float("inf")
    assert all(torch.equal(a, b[3]) for a, b in zip(before, t.optimizer.slices(), strict=True))
    assert torch.equal(state, t.chunks[0].state) and not t.chunks[0].statistics.any()
    record = script.train_step(t, 3)
    assert record["skipped"] == 1 and record["grad_norm"] > 0
    assert not torch.equal(before[0], next(iter(t.optimizer.slices()))[3])


def test_step_counts_every_token_whatever_the_accumulation():
    """Case 34: four times the sequences are four times the tokens of a step."""
    counts = []
    for global_batch in (2, 8):
        t = trainer(run_config(dtype="fp32", seq_len=32, global_batch=global_batch))
        record = script.train_step(t, 1)
        counts.append(record["tokens"])
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(record["tokens"])
    assert counts == [2 * 32, 8 * 32]


def test_flops_by_hand():
    """Case 34: 6 FLOPs an active weight, and attention over half the square."""
    attention = 64 * 4 * 24 * 2 + 64 * 2 * 24 * 2  # q and o, k and v
    sparse, dense = 3 * 64 * 20 * 2 + 64 * 8, 3 * 64 * 88
    model = dataclasses.replace(ODD, mlp_only_layers=(1,))
    active = 3 * attention + 2 * sparse + dense + 64 * 71
    assert script.active_parameters(model) == active
    scores = 3 * 4 * 24 * 2 * 2 * (100 / 2) * 3  # QK' and PV, forward and twice that backward
    assert script.flops_per_token(model, 100) == 6 * active + scores


# ------------------------------------------------------------------------------------------------
# Initial weights
# ------------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_seed_and_name_only():
    """Case 31: every cut into chunks starts from the same bits, and no two experts are equal."""
    cfg = run_config(dtype="bf16")
    mesh = build_mesh(cfg, CPU)
    whole = dict(script.named_parameters(script.build(ODD, cfg, mesh, 1)))
    for n_chunks in (2, 3):
        parts = dict(script.named_parameters(script.build(ODD, cfg, mesh, n_chunks)))
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[n], whole[n]) for n in whole)
    seeded = dataclasses.replace(cfg, seed=1)
    other = dict(script.named_parameters(script.build(ODD, seeded, mesh)))
    for name, p in whole.items():
        if p.ndim > 1:
            assert not torch.equal(p, other[name]), name
            assert p.detach().float().std() == pytest.approx(0.02, rel=0.1), name
        if p.ndim == 3:
            assert len({e.float().numpy().tobytes() for e in p.detach()}) == 8, name
    stack = whole["model.layers.1.mlp.experts.gate_up"].detach()
    half = torch.empty_like(stack[4:])
    script.initialise("model.layers.1.mlp.experts.gate_up", half, 0.02, 0, first_expert=4)
    assert torch.equal(half, stack[4:])


def test_layers_are_spread_so_that_ranks_have_alike_much():
    sizes = lambda *args: [len(span) for span in spread_layers(*args)]
    assert spread_layers(9, 2) == [range(0, 5), range(5, 9)] and sizes(3, 1, 0.5) == [3]
    assert sizes(6, 4) == [2, 2, 1, 1]
    for layers, pp, head in itertools.product((8, 27, 48, 94), (2, 3, 4), (0, 0.1, 0.4)):
        chunks = sizes(layers, 2 * pp, head)
        assert sum(chunks) == layers and min(chunks) >= 1
        totals = [chunks[r] + chunks[-1 - r] for r in range(pp)]
        worth = head / (1 - head) * layers / 2
        if totals[0] > 2:  # no less can be taken from the rank with the head
            assert abs(totals[0] + worth - (layers + worth) / pp) <= 0.5
        assert max(totals[1:]) - min(totals[1:]) <= 1
        assert all(abs(chunks[r] - chunks[-1 - r]) <= 1 for r in range(pp))
    ends = spread_layers(8, 4, 0.9)
    assert [span.start for span in ends] + [8] == [0, *(span.stop for span in ends)]
    assert sizes(8, 4, 0.9) == [1, 3, 3, 1]  # a head of many layers' worth


def test_config_written_by_a_checkpoint_reads_back(tmp_path):
    for model in (ODD, SMALL, dataclasses.replace(ODD, mlp_only_layers=(1,), rope_theta=7.0)):
        hf.write_json(tmp_path / "config.json", script.hf_config(model, "bf16"))
        assert script.model_of(run_config(model_config=tmp_path)) == model
    assert json.dumps(to_json(run_config(out=tmp_path)))


def test_randomised_weights_train_down_in_every_option(tiny, tmp_path):
    """Each value of each choice runs a step and gives a finite loss."""
    for i, flags in enumerate((
        "--optimizer muon --moments bf16", "--recompute layer --balance sequence",
        "--recompute experts --balance micro-batch", "--dtype bf16 --force-balance random",
        "--balance none --z-loss-coef 1e-3", "--schedule constant --clip 0", "--dtype fp64",
        "--profile 1:2", "--micro-batch 1 --wgrad-batch 3",
    )):  # fmt: skip
        main("--out", tmp_path / str(i), "--steps", 2, *flags.split())
        losses = [r["loss"] for r in steps(tmp_path / str(i))]
        assert len(losses) == 2 and all(0 < loss < 8 for loss in losses), flags
    assert list((tmp_path / "7" / "profile").iterdir())


def test_randomise_is_used_by_the_oracle_on_every_parameter():
    (chunk,) = ours(ODD, run_config())
    for name, p in chunk.named_parameters():
        assert p.std() > 0.05, name
    randomise(chunk, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", [{}, dict(recompute="layer", balance="sequence")])
def test_gpu_trains_and_nothing_waits_between_first_forward_and_last_backward(flags):
    sizes = dict(hidden_size=256, head_dim=64, moe_intermediate_size=128)
    model = dataclasses.replace(script.TINY, **sizes)
    cfg = run_config(
        dtype="bf16", compile=True, seq_len=256, micro_batch=2, global_batch=8, lr=3e-3, **flags
    )
    t = trainer(cfg, model=model, device=torch.device("cuda", 0))
    small.nothing_waits_between_first_forward_and_last_backward(script, t)


@pytest.mark.gpu
def test_gpu_gradients_are_within_twice_the_eager_bf16_error():
    model = dataclasses.replace(ODD, hidden_size=128, head_dim=64, moe_intermediate_size=64)
    small.gradients_are_within_twice_the_eager_error(script, model)


@pytest.mark.gpu
def test_gpu_deterministic_runs_are_bit_equal(tiny, tmp_path):
    try:
        for name in "ab":
            main("--out", tmp_path / name, "--dtype", "bf16", "--deterministic", "--compile")
    finally:
        torch.use_deterministic_algorithms(False)
    assert steps(tmp_path / "a") == steps(tmp_path / "b")


# ------------------------------------------------------------------------------------------------
# Documents, recomputation, z-loss
# ------------------------------------------------------------------------------------------------


def test_documents_do_not_see_each_other(tmp_path):
    """Case 29: another document 1, the same logits in document 2; boundary targets are ignored."""
    cfg = run_config(isolate_documents=True, seq_len=12, global_batch=2)
    (chunk,) = ours(ODD, cfg)
    tokens = torch.randint(0, 60, (2, 12))
    tokens[:, 4] = 70  # the end of document 1, and a part of it
    other = tokens.clone()
    other[:, :4] = (other[:, :4] + 1) % 60
    logits = []
    for ids in (tokens, other):
        targets, positions, cu_seqlens = isolate(ids, ids.roll(-1, 1), [70, 70])
        assert (targets[:, 4] == script.IGNORE).all() and (targets[:, 5:] >= 0).all()
        assert positions[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]
        batch = script.Batch(ids, None, positions, cu_seqlens)
        logits.append(drive(chunk(None, batch, None)).detach())
    torch.testing.assert_close(logits[0][:, 5:], logits[1][:, 5:], rtol=1e-12, atol=1e-12)
    assert not torch.equal(logits[0][:, 4], logits[1][:, 4])
    alone = drive(chunk(None, script.Batch(tokens[:, 5:]), None)).detach()
    torch.testing.assert_close(logits[0][:, 5:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute,again", [("none", 0), ("experts", 1), ("layer", 2)])
def test_recompute_runs_what_it_names_again(recompute, again, monkeypatch):
    calls = []
    for name in ("attend_and_route", "mlp_experts"):
        plain = getattr(script.Layer, name)

        def counted(self, *args, name=name, plain=plain):
            calls.append(name)
            return plain(self, *args)

        monkeypatch.setattr(script.Layer, name, counted)
    (chunk,) = ours(ODD, run_config(recompute=recompute))
    run([chunk], [data()], ONE)
    assert calls.count("mlp_experts") == 3 * (1 + (again > 0))
    assert calls.count("attend_and_route") == 3 * (1 + (again > 1))


def test_weight_gradients_are_not_put_aside_for_nothing():
    """Without an exchange to hide and a bubble to fill they only keep their operands alive."""
    (chunk,) = ours(ODD, run_config())
    tape, waiting = Tape(), []
    put_aside = tape.defer

    def defer(compute):
        put_aside(compute)
        waiting.append(len(tape.deferred))

    pair(forward(chunk(None, data(), defer), tape), None)
    pair(backward(tape, ONE), None)
    assert waiting == [0, 0, 0]


def test_z_loss_is_the_mean_square_of_the_log_sum():
    cfg = run_config(balance="none", z_loss_coef=0.3)
    (chunk,) = ours(ODD, cfg)
    gate = chunk.model.layers["0"].mlp.gate
    tokens = torch.randn(48, 64, dtype=torch.float64)
    aux = gate(tokens, 2, chunk.state[0], None)[2]
    want = 0.3 * (tokens @ gate.weight.T).exp().sum(-1).log().square().mean()
    assert relative(aux.detach(), want.detach()) < 1e-12


def test_eval_only_leaves_the_run_as_it_is(tiny, tmp_path):
    main("--out", tmp_path, "--steps", 4, "--save-every", 2)
    shutil.rmtree(tmp_path / "step-00000004")
    before = {p: p.read_bytes() for p in tmp_path.glob("*.json*")}
    main("--out", tmp_path, "--eval-only")
    assert {p: p.read_bytes() for p in tmp_path.glob("*.json*")} == before
    with pytest.raises(SystemExit, match="--eval-only: no checkpoint in --out .*nowhere"):
        main("--out", tmp_path / "nowhere", "--eval-only")


def test_fewer_layers_of_a_published_model(tiny, tmp_path):
    main("--out", tmp_path / "a", "--steps", 1, "--save-every", 1)
    source = tmp_path / "a" / "step-00000001"
    main("--out", tmp_path / "b", "--init-from", source, "--layers", 1, "--steps", 1)
    with pytest.raises(SystemExit, match="does not fit the model: .* missing"):
        main("--out", tmp_path / "c", "--init-from", source, "--layers", 3)


def test_configs_that_cannot_be_are_named(tmp_path):
    base = script.hf_config(ODD, "fp32")
    for change, said in (
        (dict(num_hidden_layers=0), "integers from 1: num_hidden_layers 0"),
        (dict(num_experts="8"), "num_experts '8'"), (dict(decoder_sparse_step=0), "_step 0"),
        (dict(norm_topk_prob=None), "norm_topk_prob and rope_theta must be given"),
        (dict(rope_theta=None), "rope_theta must be a number above 0, not None"),
        (dict(rms_norm_eps="1e-6"), "rms_norm_eps must be a number above 0, not '1e-6'"),
        (dict(rope_scaling=dict(factor=4.0)), "rope_scaling has no type"),
        (dict(moe_intermediate_size=None), "moe_intermediate_size None"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({**base, **change}))
        with pytest.raises(ValueError, match=said):
            script.model_of(run_config(model_config=tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**base, "head_dim": None}))
    assert script.model_of(run_config(model_config=tmp_path)).head_dim == 64 // 4


def test_bad_token_in_mid_run_is_one_line(tiny, tmp_path):
    documents(tmp_path / "d", samples=13)
    shard = tmp_path / "d" / "00000.bin"
    ids = bytearray(shard.read_bytes())
    ids[200:202] = b"\xff\xff"
    shard.write_bytes(ids)
    with pytest.raises(SystemExit, match="token 65535 at offset 100"):
        main("--out", tmp_path / "o", "--data", tmp_path / "d", "--steps", 4)


@pytest.mark.gpu
@pytest.mark.parametrize("together,micro_batches", [(1, 3), (2, 5)])
def test_replayed_micro_batches_are_the_same(together, micro_batches):
    """Three steps by a CUDA graph and without: same bits; what is left over is run as it is."""
    said = []
    for graph in (True, False):
        cfg = run_config(
            dtype="bf16", compile=True, deterministic=True, seq_len=128, wgrad_batch=together,
            global_batch=2 * micro_batches, micro_batch=2, force_balance="random", cuda_graph=graph,
        )  # fmt: skip
        sizes = dict(hidden_size=256, head_dim=64, moe_intermediate_size=128)
        model = dataclasses.replace(script.TINY, **sizes)
        t = trainer(cfg, model=model, device=torch.device("cuda", 0))
        shown = [script.train_step(t, step) for step in (1, 2, 3)]
        assert (t.replay is not None) == graph
        if graph:
            assert t.replay.graph is not None and t.replay.nbytes > 0
        weights = [p.detach().clone() for _, p in script.named_parameters(t.chunks)]
        said.append(([(r["loss"], r["grad_norm"], r["expert_load"]) for r in shown], weights))
    assert said[0][0] == said[1][0]
    assert all(torch.equal(a, b) for a, b in zip(said[0][1], said[1][1], strict=True))


def test_what_is_recorded_and_how_much_at_once(monkeypatch):
    here = build_mesh(run_config(), CPU)
    there = dataclasses.replace(here, device=torch.device("cuda"), dp=2)
    flags = dict(dtype="bf16", micro_batch=2, global_batch=24, wgrad_batch=3)

    def replay(mesh=there, pipe=None, **other):
        return replay_for(run_config(**flags | other), mesh, [], pipe)

    assert replay().count == 3
    assert replay(pipe="a pipe").count == 6  # all of the step
    two = dataclasses.replace(there, ep=2)
    assert replay(two, pipe="a pipe").pipe == "a pipe"
    wrong = dict(dtype="fp32"), dict(isolate_documents=True), dict(cuda_graph=False)
    assert not any(replay(**other) for other in wrong)
    assert replay(here) is None and replay(two, room=0.0) is None
    assert replay(room=0.0).count == 3
    asked = []
    monkeypatch.setattr("common.graph.run_schedule", lambda *args, **how: asked.append(how))
    replay().run([], ONE, {})
    assert asked[0]["wgrad_batch"] == 3


def test_a_recording_begins_anew_when_other_sizes_are_reserved(monkeypatch):
    """What waits for its sizes is never recorded; of new ones the first are run as they are."""
    done, finished = [], []
    monkeypatch.setattr(Replay, "run", lambda *args: done.append("run") or [])

    def replayed(self, *args):
        done.append("record" if self.graph is None else "replay")
        self.graph = "a graph"
        return []

    monkeypatch.setattr(Replay, "replay", replayed)
    room, replay = SimpleNamespace(rows=None, slots=None), Replay(["a chunk"], 2)
    for rows, micro_batches, want in (
        (None, 4, ["run", "run"]),
        (64, 5, ["run", "record", "run"]),
        (64, 2, ["replay"]),
        (128, 4, ["run", "record"]),
        (None, 4, ["run", "run"]),
        (128, 2, ["run"]),
    ):
        done.clear()
        room.rows = room.slots = rows
        replay(
            [SimpleNamespace(room=room)] * micro_batches,
            None,
            finished=finished.append,
            around=None,
        )
        assert done == want, rows
    assert finished == [0] * 6
