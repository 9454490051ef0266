"""Every parallel layout against one process: losses, gradients, weights, checkpoint, bits."""

import dataclasses
import functools
import importlib
import math
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

import train_qwen3_moe as script
from common import checkpoint, graph, hf
from common.mesh import Room, seeded
from common.mesh import build as build_mesh
from tests import pool
from tests.oracle import on_disk

SCRIPTS = {  # what makes each one's tiny model smaller, of odd sizes, with weights that matter
    "train_qwen3_moe": dict(
        hidden_size=32, head_dim=12, num_hidden_layers=4, moe_intermediate_size=20,
        initializer_range=0.2,
    ),
    "train_gpt_oss": dict(
        hidden_size=32, head_dim=12, num_hidden_layers=4, intermediate_size=20, sliding_window=5,
        swiglu_limit=0.5, initializer_range=0.2,
    ),
    "train_deepseek_v2_lite": dict(  # pp 2 is uneven: 5 layers, the first dense
        hidden_size=32, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        num_hidden_layers=5, moe_intermediate_size=20, n_shared_experts=2, initializer_range=0.2,
        q_lora_rank=16, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=1.5,
    ),
}  # fmt: skip
MODEL = dataclasses.replace(script.TINY, **SCRIPTS["train_qwen3_moe"])
LAYOUTS = {
    "pp2": (2, dict(pp=2)),
    "dp2": (2, dict()),
    "ep2": (2, dict(ep=2)),
    "ep4": (4, dict(ep=4)),
    "pp2 ep2": (4, dict(pp=2, ep=2)),
    "pp2 dp2": (4, dict(pp=2)),
    "pp2, fewest": (2, dict(pp=2, global_batch=4)),
    "pp2, odd": (2, dict(pp=2, global_batch=5)),
    "dp2 ep2, two copies": (4, dict(ep=2)),
    "pp4, uneven": (4, dict(pp=4, layers=9)),
    "cp2": (2, dict(cp=2)),
    "cp4": (4, dict(cp=4)),
    "cp2 ep2, folded": (2, dict(cp=2, ep=2)),
    "pp2 cp2": (4, dict(pp=2, cp=2)),
    "cp2 dp2 ep4": (4, dict(cp=2, ep=4)),
    "cp2 dp2 ep2, forced": (4, dict(cp=2, ep=2, force_balance="random")),
}
FEW = "pp2", "dp2", "ep2", "cp2", "pp2 ep2", "cp2 ep2, folded"  # for the other scripts


def config(script="train_qwen3_moe", **flags):
    defaults = dict(
        dtype="fp64", compile=False, seq_len=16, micro_batch=1, global_batch=8, steps=3, lr=1e-2,
        eval_batches=1,
        eps=1e-5, balance="sequence", balance_coef=0.1, z_loss_coef=1e-3,
    )  # fmt: skip
    run = importlib.import_module(script).Config(**{**defaults, **flags})
    return dataclasses.replace(run, out=run.out or Path("unused"))


def script_of(run):
    return sys.modules[type(run).__module__]


def trainer(run, mesh, sizes=SCRIPTS):
    """What main builds, of a small model."""
    script = script_of(run)
    small = sizes[script.SCRIPT]
    layers = run.layers or small["num_hidden_layers"]
    model = dataclasses.replace(script.TINY, **{**small, "num_hidden_layers": layers})
    chunks = script.build(model, run, mesh)
    disturb(chunks, mesh.first_expert(model.num_experts))
    loader = script.Loader(run.data, run.seq_len, model.vocab_size, run.seed)
    return script.Trainer(
        model, run, mesh, chunks, script.build_optimizer(chunks, run, mesh), loader,
    )  # fmt: skip


def disturb(chunks, first_expert):
    """Make random what starts at 0, by name and expert: a 0 hides its share of other gradients."""
    for name, p in script.named_parameters(chunks):
        if not p.any():
            experts = ".experts." in name
            for i, part in enumerate(p.data if experts else [p.data], experts * first_expert):
                part.normal_(0, 0.3, generator=seeded(part.device, name, i))


def train(rank, world, flags, out=None):
    """Three steps; the records, and this rank's slices after the first and the last."""
    run = config(out=out, **flags)
    script, t = script_of(run), trainer(run, build_mesh(run, torch.device("cpu")))
    records, slices = [], []
    for step in (1, 2, 3):
        records.append(script.train_step(t, step))
        slices.append(copied(t))
    if out is not None:
        script.save(t, 3, script.hf_views, script.hf_config(t.model, t.run.dtype))
        t.saver.wait()
    return records, slices[0], slices[-1], script.evaluate(t)


def whole(parts):
    """Slices of all ranks as whole flattened parameters; every element exactly once."""
    out = {}
    pieces = {}
    for name, kind, start, x in (piece for part in parts for piece in part):
        pieces.setdefault((name, kind), []).append((start, x))
    for key, found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        end = 0
        for start, x in found:
            assert start == end, (key, start, end)
            end += len(x)
        out[key] = torch.cat([x for _, x in found])
    return out


@functools.cache
def one_process(items):
    return train(0, 1, dict(items))


def copied(t):
    """This rank's slices of the optimizer's state, as they are now."""
    return [(n, kind, at, x.clone()) for n, kind, at, x in t.optimizer.slices()]


def alike(records, want, rel, keys=("loss", "grad_norm", "balance")):
    """Of every step."""
    for a, b in zip(records, want, strict=True):
        for key in keys:
            assert a[key] == pytest.approx(b[key], rel=rel), key


def close(got, want, bound):
    assert got.keys() == want.keys()
    for key, x in want.items():
        assert got[key].shape == x.shape, key
        assert (got[key] - x).abs().max() <= bound * x.abs().max(), key


BOUNDS = {"fp64": 1e-12, "fp32": 1e-5}
CHECKED = [("train_qwen3_moe", layout, dtype) for layout in LAYOUTS for dtype in BOUNDS]
CHECKED += [(name, layout, "fp64") for name in SCRIPTS for layout in FEW if "qwen3" not in name]
CHECKED += [(name, FEW[-1], "fp32") for name in SCRIPTS if "qwen3" not in name]


@pytest.mark.parametrize("name,layout,dtype", CHECKED)
def test_layout_equals_one_process(name, layout, dtype, tmp_path):
    bound = BOUNDS[dtype]
    world, axes = LAYOUTS[layout]
    common = dict(script=name, dtype=dtype)
    common |= {k: v for k, v in axes.items() if k not in ("pp", "cp", "ep")}
    # Without clipping the first exp_avg is the gradient times 1 - beta1.
    common["clip"] = 0.0 if dtype == "fp64" else 1.0
    records, first, last, evaluated = one_process(tuple(common.items()))
    ranks = pool.run(world, train, {**axes, **common}, tmp_path)
    for theirs, _, _, loss in ranks:
        alike(theirs, records, 10 * bound)
        for a, b in zip(theirs, records, strict=True):
            assert a["expert_load"] == b["expert_load"] and a["tokens"] == b["tokens"]
        assert loss == pytest.approx(evaluated, rel=10 * bound)
    close(whole([r[1] for r in ranks]), whole([first]), bound)  # gradients
    close(whole([r[2] for r in ranks]), whole([last]), 5 * bound)  # weights and moments

    saved = checkpoint.latest(tmp_path)
    reader = hf.Reader(saved)
    masters, script = whole([last]), importlib.import_module(name)
    for (weight, kind), x in masters.items():
        if kind == "master":
            shape = shapes(name, axes.get("layers"))[weight]
            for hf_name, view in script.hf_views(weight, x.view(shape)):
                view = on_disk(view)
                error = (reader.read(hf_name).to(x.dtype) - view).abs().max()
                assert error <= 5 * bound * view.abs().max(), hf_name


@functools.cache
def shapes(name, layers):
    run = config(name, layers=layers)
    chunks = trainer(run, build_mesh(run, torch.device("cpu"))).chunks
    return {name: p.shape for name, p in script.named_parameters(chunks)}


# ------------------------------------------------------------------------------------------------
# Recorded
# ------------------------------------------------------------------------------------------------


class Again:
    """In the place of a CUDA graph: what is recorded is computed, and again by later replays.

    It leaves no more trace on the host than a graph does.
    """

    def __init__(self, trainer):
        self.trainer, self.fresh = trainer, True

    def replay(self):
        replay, self.fresh, fresh = self.trainer.replay, False, self.fresh
        if fresh:
            return
        how = {"finished": self.finished} if replay.pipe is not None else {}
        losses = replay.run(replay.batches, replay.loss_grad, how)
        for mine, new in zip(replay.losses, losses, strict=True):
            mine.copy_(new)
        for chunk in self.trainer.chunks:
            for bucket in chunk.buckets:
                bucket.wait()
                bucket.reduced = False

    def finished(self, chunk):
        for bucket in self.trainer.chunks[chunk].buckets:
            bucket.reduce()


def train_recorded(rank, world, flags, record):
    """Five steps, in the last of which one rank has too little room; records, graphs made, slices.

    Each has another number of valid targets, so another gradient of the loss, and in between is an
    evaluation.
    """
    run, made, records = config(**flags), [], []
    script, mesh = script_of(run), build_mesh(run, torch.device("cpu"))
    with mock.patch.object(graph, "can_record", lambda run, mesh: record):
        t = trainer(run, mesh)
    take = t.batches.take

    def other_valid(number):
        batches, valid = take(number)
        return batches, valid + len(records)

    t.batches.take = other_valid

    @contextmanager
    def recording(graph, capture_error_mode):
        yield
        # NCCL's streams must have come back to the one that is recorded.
        assert not any(bucket.pending for chunk in t.chunks for bucket in chunk.buckets)

    stand_in = dict(
        CUDAGraph=lambda: made.append(Again(t)) or made[-1],
        graph=recording, memory_reserved=lambda: 0,
        empty_cache=lambda: None, reset_peak_memory_stats=lambda: None,
    )  # fmt: skip
    with mock.patch.multiple(torch.cuda, **stand_in):
        for step in range(1, 6):
            if t.room is not None and step == 5 and rank == world - 1:
                t.room.need.fill_(10**6)
            records.append(script.train_step(t, step))
            if step == 4:
                records[-1]["evaluation"] = script.evaluate(t)
    if record:  # with a pipe the reductions stand in the graph, where they overlap
        assert len(t.replay.reduced) == (sum(len(c.buckets) for c in t.chunks) if t.pipe else 0)
    slices = [x.clone() for _, _, _, x in t.optimizer.slices()]
    return records, len(made), slices


@pytest.mark.parametrize(
    "layout", ["dp2", "cp2", "ep2", "pp2", "pp2 dp2", "pp2 ep2", "cp2 dp2 ep2, forced"]
)
def test_a_recorded_step_is_the_same(layout):
    """The schedule with its reductions, replayed from other batches each step: same bits."""
    world, axes = LAYOUTS[layout]
    flags = dict(axes, wgrad_batch=1 if "pp" in axes or "ep" in axes else 3)
    replayed, plain = (pool.run(world, train_recorded, flags, record) for record in (True, False))
    for (records, graphs, slices), (want, no_graphs, exact) in zip(replayed, plain, strict=True):
        assert (graphs, no_graphs) == (1, 0)
        for a, b in zip(records, want, strict=True):
            for key in ("loss", "grad_norm", "balance", "expert_load", "evaluation"):
                assert a.get(key) == b.get(key), key
        assert all(torch.equal(a, b) for a, b in zip(slices, exact, strict=True))


# ------------------------------------------------------------------------------------------------
# On GPUs
# ------------------------------------------------------------------------------------------------

GPU_SIZES = {  # for the library's attention and the Triton kernels
    "train_qwen3_moe": dict(
        hidden_size=256, head_dim=64, moe_intermediate_size=128, num_hidden_layers=4
    ),
    "train_gpt_oss": dict(
        hidden_size=256, head_dim=64, intermediate_size=128, sliding_window=32, num_hidden_layers=4
    ),
    "train_deepseek_v2_lite": dict(
        hidden_size=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        moe_intermediate_size=128, num_hidden_layers=4,
    ),
}  # fmt: skip


def current_gpu():
    return torch.device("cuda", torch.cuda.current_device())


def train_on_gpus(rank, world, flags):
    """Five steps; the records, whether a graph was recorded, and this rank's weights.

    Before the last, with the graph alive, an evaluation, noted as that step's.
    """
    run = config(**flags)
    script, t = script_of(run), trainer(run, build_mesh(run, current_gpu()), GPU_SIZES)
    records = [script.train_step(t, step) for step in range(1, 5)]
    evaluated = script.evaluate(t)
    records.append(script.train_step(t, 5) | dict(evaluated=evaluated))
    weights = [p.detach().cpu() for _, p in script.named_parameters(t.chunks)]
    recorded = t.replay is not None and t.replay.graph is not None
    if recorded and t.pipe is not None:
        assert len(t.replay.reduced) == sum(len(chunk.buckets) for chunk in t.chunks)
    return records, recorded, weights


ON_GPUS = [(name, layout) for name in SCRIPTS for layout in ("ep2", "pp2", "cp2")]
ON_GPUS += [
    ("train_qwen3_moe", layout) for layout in ("dp2", "pp2 ep2", "pp2 dp2", "cp2 ep2, folded")
]


@pytest.mark.gpu
@pytest.mark.parametrize("name, layout", ON_GPUS)
def test_gpus_recorded_and_not(name, layout):
    """With exchanges and reductions in a CUDA graph and without: same bits. In fp32 as on one."""
    world, axes = LAYOUTS[layout]
    common = dict(script=name, seq_len=128, lr=1e-3)
    flags = dict(common, dtype="bf16", deterministic=True, **axes)
    runs = [
        pool.run(world, train_on_gpus, dict(flags, cuda_graph=graph), backend="nccl")
        for graph in (True, False)
    ]
    for (records, recorded, weights), (want, not_recorded, exact) in zip(*runs, strict=True):
        assert recorded and not not_recorded
        for a, b in zip(records, want, strict=True):
            for key in ("loss", "grad_norm", "evaluated"):
                assert a.get(key) == b.get(key), key
        assert all(torch.equal(a, b) for a, b in zip(weights, exact, strict=True))
    one, several = (
        pool.run(n, train_on_gpus, dict(common, dtype="fp32", **own), backend="nccl")
        for n, own in ((1, {}), (world, axes))
    )
    alike(several[0][0], one[0][0], 1e-4, ("loss", "grad_norm"))


# ------------------------------------------------------------------------------------------------
# Faults that others met
# ------------------------------------------------------------------------------------------------


def train_other(rank, world, sizes, flags):
    """As `train`, a model of other sizes."""
    with mock.patch.dict(SCRIPTS["train_qwen3_moe"], sizes):
        return train(rank, world, flags)


@pytest.mark.parametrize("sizes, flags", [
    (dict(tie_word_embeddings=True), dict(pp=2)),  # and two replicas
    ({}, dict(global_batch=12)),  # case 2: four replicas, three micro-batches each
    (dict(num_experts_per_tok=4), dict(ep=4)),
])  # fmt: skip
def test_other_models_and_batches_on_four_ranks(sizes, flags):
    flags = dict(flags, clip=0.0)
    alone = {k: v for k, v in flags.items() if k not in ("pp", "ep")}
    records, first, last, evaluated = train_other(0, 1, sizes, alone)
    ranks = pool.run(4, train_other, sizes, flags)
    for theirs, _, _, loss in ranks:
        alike(theirs, records, 1e-11)
        assert loss == pytest.approx(evaluated, rel=1e-11)
    close(whole([r[1] for r in ranks]), whole([first]), 1e-12)
    close(whole([r[2] for r in ranks]), whole([last]), 5e-12)


def train_unlabelled(rank, world, flags):
    """Two steps in which every second sequence, all of one replica, has no target."""
    run = config(**flags)
    script, t = script_of(run), trainer(run, build_mesh(run, torch.device("cpu")))
    take = t.batches.take

    def half(number):
        batches, _ = take(number)
        for batch in batches:
            odd = batch.numbers[:, 0] // run.seq_len % 2 == 1
            batch.targets[odd] = script.IGNORE
        return batches, sum(int((b.targets != script.IGNORE).sum()) for b in batches)

    t.batches.take = half
    records = [script.train_step(t, step) for step in (1, 2)]
    return records, copied(t)


@pytest.mark.parametrize("layout", ["dp2", "ep2", "pp2 dp2"])
def test_a_rank_without_targets(layout):
    """Case 6."""
    world, axes = LAYOUTS[layout]
    records, slices = train_unlabelled(0, 1, {})
    ranks = pool.run(world, train_unlabelled, axes)
    for theirs, _ in ranks:
        alike(theirs, records, 1e-11, ("loss", "grad_norm"))
    close(whole([r[1] for r in ranks]), whole([slices]), 5e-12)


@pytest.mark.parametrize("sizes, flags", [
    ({}, dict(pp=2, ep=2)), (dict(num_experts_per_tok=4), dict(ep=4)),  # sums of three and more
])  # fmt: skip
def test_the_same_run_twice_gives_the_same_bits(sizes, flags):
    runs = [pool.run(4, train_other, sizes, dict(flags, dtype="fp32")) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert [r["loss"] for r in a[0]] == [r["loss"] for r in b[0]]
        for (name, kind, at, x), (_, _, also_at, y) in zip(a[2], b[2], strict=True):
            assert at == also_at and torch.equal(x, y), (name, kind)


def counted(rank, world, flags, room):
    """Three steps: how often the host read a tensor inside the passes of each; and as `train`."""
    run = config(**flags)
    script, t = script_of(run), trainer(run, build_mesh(run, torch.device("cpu")))
    read, reads, records = torch.Tensor.tolist, [], []

    def tolist(x):  # the reference of the experts reads too, which no GPU runs
        reads[-1] += "kernels" not in sys._getframe(1).f_code.co_filename
        return read(x)

    passes = script.gradients

    def gradients(*args):
        torch.Tensor.tolist = tolist
        try:
            return passes(*args)
        finally:
            torch.Tensor.tolist = read

    script.gradients = gradients
    try:
        for step in (1, 2, 3):
            if step == 2 and room:
                t.room.rows, t.room.slots = room
            reads.append(0)
            records.append(script.train_step(t, step))
    finally:
        script.gradients = passes
    return records, reads, [x.clone() for _, _, _, x in t.optimizer.slices()]


@pytest.mark.parametrize("name", SCRIPTS)
def test_exchanges_wait_for_no_numbers_after_the_first_step(name):
    """One read a step, after the last backward; a step for which room was short is done again."""
    flags = dict(script=name, ep=2, dtype="fp64")
    plain = pool.run(2, counted, flags, None)
    for _, reads, _ in plain:
        assert reads[0] > 1 and reads[1:] == [1, 1], reads
    for room in ((1, 10**4), (10**4, 3)):
        again = pool.run(2, counted, flags, room)
        for (records, reads, weights), (want, _, exact) in zip(again, plain, strict=True):
            assert reads[1] == reads[0] + 1 and reads[2] == 1, reads  # the first try, then waiting
            alike(records, want, 1e-12)
            for a, b in zip(records, want, strict=True):
                assert a["expert_load"] == b["expert_load"]
            for a, b in zip(weights, exact, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name,layout", [
    *(("train_qwen3_moe", layout) for layout in ("dp2", "cp2", "cp4", "pp2 cp2")),
    ("train_deepseek_v2_lite", "cp2 ep2, folded"), ("train_gpt_oss", "cp2 ep2, folded"),
])  # fmt: skip
def test_isolated_documents_in_context_parallel(name, layout, tmp_path):
    """Case 29, and the balance of routed slots, with documents that begin inside blocks; the one
    held-out sequence counts once, whatever fills up the other micro-batches."""
    from tests.test_training import documents  # here: it brings transformers into every worker

    documents(tmp_path / "d", samples=64, seq_len=16)
    world, axes = LAYOUTS[layout]
    flags = dict(script=name, data=(str(tmp_path / "d"),), isolate_documents=True, clip=0.0)
    records, first, _, evaluated = train(0, 1, flags)
    assert evaluated[1] < 2 * 16  # of one sequence
    plain = train(0, 1, {**flags, "isolate_documents": False})[0]
    assert records[0]["loss"] != plain[0]["loss"]
    ranks = pool.run(world, train, {**axes, **flags})
    for theirs, _, _, loss in ranks:
        assert loss == pytest.approx(evaluated, rel=1e-11)
        alike(theirs, records, 1e-11, ["loss"])
    close(whole([r[1] for r in ranks]), whole([first]), 1e-12)


def train_to_rank_0(rank, world, flags):
    """As `train`, with every token sent to experts 0 and 1."""
    run = config(bias_update_rate=1e-12, **flags)
    t = trainer(run, build_mesh(run, torch.device("cpu")))
    for chunk in t.chunks:
        chunk.state[:, 1, :2] = 9.0
    stacks, update = {}, t.optimizer.step

    def note_gradients(lr):  # an update leaves zeros
        named = script.named_parameters(t.chunks)
        stacks.update({n: p.main_grad.clone() for n, p in named if p.ndim == 3})
        return update(lr)

    t.optimizer.step = note_gradients
    records = [script.train_step(t, step) for step in (1, 2, 3)]
    return records, copied(t), stacks


def test_a_rank_whose_experts_nobody_chooses():
    """Case 3: three steps end, unused experts' gradients are zeros, the weights equal ep = 1's."""
    records, slices, _ = train_to_rank_0(0, 1, {})
    ranks = pool.run(2, train_to_rank_0, dict(ep=2))
    assert ranks[0][0][-1]["expert_load"][0][2:] == [0] * 6
    for _, _, stacks in ranks[1:]:
        assert stacks and not any(grad.any() for grad in stacks.values())
    close(whole([r[1] for r in ranks]), whole([slices]), 1e-11)
    for theirs, _, _ in ranks:
        alike(theirs, records, 1e-11, ["loss"])


def train_from(rank, world, flags, out, steps, saved_at=None, sizes=SCRIPTS):
    """Resume what is in `out`, or start; the losses of `steps`, this rank's slices at the start."""
    run = config(out=out, **flags)
    device = current_gpu() if sizes is GPU_SIZES else torch.device("cpu")
    script, t = script_of(run), trainer(run, build_mesh(run, device), sizes)
    found = checkpoint.latest(out)
    if found is not None:
        assert script.resume(found, t, script.hf_config(t.model, "fp32")) == steps[0] - 1
    slices = copied(t)
    losses = []
    for step in steps:
        losses.append(script.train_step(t, step)["loss"])
        if step == saved_at:
            script.save(t, step, script.hf_views, script.hf_config(t.model, t.run.dtype))
            t.saver.wait()
    return losses, slices, t.loader.state_dict()


RESUMED = [
    ("train_qwen3_moe", optimizer, *pair)
    for pair in (
        ("pp2 ep2", "one"), ("pp2 ep2", "ep4"), ("one", "pp2 ep2"), ("dp2", "pp2 dp2"),
        ("ep4", "cp2 ep2, folded"), ("dp2", "dp4"),
    )
    for optimizer in ("adamw", "muon")
] + [
    (name, *rest)
    for name in ("train_deepseek_v2_lite", "train_gpt_oss")
    for rest in (("adamw", "pp2 ep2", "cp2 ep2, folded"), ("muon", "dp2", "one"))
]  # fmt: skip


@pytest.mark.parametrize("script,optimizer,saved,resumed", RESUMED)
def test_any_layout_resumes_any_other(script, saved, resumed, optimizer, tmp_path):
    """Cases 21 and 24: masters, moments and sample order bit-identical, losses go on."""
    places = {**LAYOUTS, "one": (1, {}), "dp4": (4, {})}
    results = {}
    for name, steps, saved_at in ((saved, (1, 2, 3, 4), 2), (resumed, (3, 4), None)):
        world, axes = places[name]
        flags = dict(script=script, dtype="fp32", optimizer=optimizer, **axes)
        job = train_from, flags, tmp_path, steps, saved_at
        results[name] = [job[0](0, 1, *job[1:])] if world == 1 else pool.run(world, *job)
        assert len(list(tmp_path.glob("step-*"))) == 1
    start = whole([r[1] for r in results[resumed]])
    found = checkpoint.latest(tmp_path)
    for (name, kind), x in start.items():
        kept = torch.empty_like(x)
        checkpoint.load_slices(found, [(name, kind, 0, kept)])
        assert torch.equal(kept, x), (name, kind)
    assert results[resumed][0][0] == pytest.approx(results[saved][0][0][2:], rel=1e-5)
    assert results[resumed][0][2] == results[saved][0][2]
    index = hf.Reader(found).names
    if script != "train_qwen3_moe":
        return
    assert sum(".experts." in n for n in index) == 4 * 8 * 3  # every expert of every layer


def rooms(rank, world, out, *others):
    """What is reserved after a step, and in trainers with other flags that resume it."""
    flags = dict(ep=2, seq_len=128, room=1.25)
    runs = [config(out=out, **{**flags, **other}) for other in ({}, *others)]
    first, *resumed = (trainer(run, build_mesh(run, torch.device("cpu"))) for run in runs)
    script.train_step(first, 1)
    script.save(first, 1, script.hf_views, script.hf_config(first.model, first.run.dtype))
    first.saver.wait()
    torch.distributed.barrier()  # rank 0 completes it
    for t in resumed:
        script.resume(checkpoint.latest(out), t, script.hf_config(t.model, "fp32"))
    return [(t.room.rows, t.room.slots) for t in (first, *resumed)]


def test_reserved_room_is_resumed_where_it_would_be_the_same(tmp_path):
    """Bit for bit on the same layout; other flags are taken as given now, --room too."""
    others = dict(lr=1e-3), dict(room=2.0), dict(room=0.0), dict(micro_batch=2)
    for kept, same, *anew in pool.run(2, rooms, tmp_path, *others):
        rows, slots = kept
        assert same == kept and rows < slots and anew == [(None, None)] * 3


def train_from_on_gpus(*job):
    return train_from(*job, GPU_SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", ["ep", "pp", "cp"])
def test_one_gpu_goes_on_from_two(axis, tmp_path):
    """Saved through NCCL with a graph alive; masters are the same bits, losses as bf16 rounds."""
    flags, step = dict(dtype="bf16", seq_len=128, lr=1e-3), 4
    job = train_from_on_gpus, {**flags, axis: 2}, tmp_path, range(1, 7), step
    (losses, *_), *_ = pool.run(2, *job, backend="nccl")
    job = train_from_on_gpus, flags, tmp_path, range(step + 1, 7), None
    ((again, slices, _),) = pool.run(1, *job, backend="nccl")
    for name, kind, at, x in slices:
        kept = torch.empty_like(x, device="cpu")
        checkpoint.load_slices(checkpoint.latest(tmp_path), [(name, kind, at, kept)])
        assert torch.equal(kept, x.cpu()), (name, kind)
    assert again == pytest.approx(losses[step:], rel=1e-2)


# ------------------------------------------------------------------------------------------------
# Bytes on the wire
# ------------------------------------------------------------------------------------------------


def wire(rank, world, force, tokens=64, reserved=False):
    """Bytes this rank sends in one forward and backward of one layer, by kind and direction.

    reserved: of a second step, with the room that the first has set.
    """
    E, K = 16, 4
    model = dataclasses.replace(
        MODEL, num_hidden_layers=1, num_experts=E, num_experts_per_tok=K, hidden_size=48
    )
    run = config(ep=world, force_balance=force, seq_len=tokens, global_batch=world, dtype="bf16")
    mesh = build_mesh(run, torch.device("cpu"))
    chunks = script.build(model, run, mesh)
    numbers = rank * tokens + torch.arange(tokens)[None]
    room = Room(run, mesh, K) if reserved else None
    batch = script.Batch(*torch.randint(0, 257, (2, 1, tokens)), numbers=numbers, room=room)
    routes = batch.routes = {}
    sent, plain = [], torch.distributed.all_to_all_single

    def counting(out, x, *counts, **kwargs):
        rows = counts[1] if counts else [len(x) // world] * world
        sent.append((str(x.dtype), x.shape[1:], sum(rows), x.numel() * x.element_size()))
        return plain(out, x, *counts, **kwargs)

    torch.distributed.all_to_all_single = counting
    try:
        one = torch.ones((), dtype=torch.float32)
        script.run_schedule(chunks, [batch], one)
        if reserved:
            assert room.settle()
            sent.clear()
            script.run_schedule(chunks, [batch], one)
            assert room.settle()
    finally:
        torch.distributed.all_to_all_single = plain
    return sent, routes[0]


@pytest.mark.parametrize("force", ["stride", "random"])
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_bytes_on_the_wire(ep, force):
    """Rows once to a rank, both ways, forward and backward; ids and weights K numbers a row."""
    D, K, E, tokens = 48, 4, 16, 64
    ranks = pool.run(ep, wire, force)
    total = 0
    for sent, ids in ranks:
        rows = sum(len({e // (E // ep) for e in row}) for row in ids.tolist())
        total += rows
        back = sent[4][2]  # what came here goes back: rows of other ranks' tokens
        assert [(kind, n * width) for kind, (*_, width), n, _ in sent] == [
            ("torch.int64", ep * 2),  # counts: rows and slots for each rank
            ("torch.bfloat16", rows * D), ("torch.int32", rows * K), ("torch.float32", rows * K),
            ("torch.bfloat16", back * D),  # local sums on their way back
            ("torch.bfloat16", rows * D),  # backward: their gradients
            ("torch.bfloat16", back * D), ("torch.float32", back * K),
        ]  # fmt: skip
        size = {"torch.int64": 8, "torch.bfloat16": 2, "torch.int32": 4, "torch.float32": 4}
        assert all(b == n * shape[-1] * size[kind] for kind, shape, n, b in sent)
    if force == "stride":  # expert (t + 4j) mod 16: min(ep, K) ranks a token
        assert total == ep * tokens * min(ep, K)
    else:  # ep · (1 - C(E - E/ep, K) / C(E, K)) ranks a token, on average
        away = math.comb(E - E // ep, K) / math.comb(E, K)
        assert total / (ep * tokens) == pytest.approx(ep * (1 - away), rel=0.1)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_bytes_on_the_wire_with_reserved_room(ep):
    """From the second step on every rank sends --room times the most rows that one sent another."""
    D, K, E, tokens = 48, 4, 16, 256
    ranks = pool.run(ep, wire, "random", tokens, True)
    to = [sum(any(e // (E // ep) == d for e in row) for row in ids.tolist())
          for _, ids in ranks for d in range(ep)]  # fmt: skip
    rows = ep * min(math.ceil(1.25 * max(to) / 64) * 64, tokens)
    for sent, _ in ranks:
        assert [b for *_, b in sent] == [
            8 * ep * 2, 2 * rows * D, 4 * rows * K, 4 * rows * K,
            2 * rows * D, 2 * rows * D, 2 * rows * D, 4 * rows * K,
        ]  # fmt: skip
