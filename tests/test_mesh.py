"""Ranks to coordinates, groups, layers and experts; 64 ranks in one process; the pipe's order.

Groups of many ranks are made with torch's fake process group, which communicates nothing.
"""

import collections
import dataclasses
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import bench.schedule
import train_qwen3_moe as script
from common.config import Run
from common.dualpipev import run as run_schedule
from common.dualpipev import schedule
from common.mesh import Mesh, Pipe, Room, build, crossing_of, expert_grid, grid

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
MODEL = dataclasses.replace(
    script.TINY, hidden_size=32, head_dim=12, num_hidden_layers=9, num_experts=16,
    moe_intermediate_size=20,
)  # fmt: skip
SIZES = dict(seq_len=16, global_batch=64, dtype="fp32", compile=False, out=Path("unused"))
LARGE = dict(pp=4, cp=2, ep=8)  # 64 ranks: 4 stages of dp 8 x cp 2, two copies of every expert


def on_rank(rank, world, function, **axes):
    """function(run, mesh) as rank `rank` of `world` would call it."""
    run = script.Config(**SIZES, **axes)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        return function(run, build(run, CPU))
    finally:
        dist.destroy_process_group()


def groups_of(run, mesh):
    """Coordinates (pp, dp, cp, ep), and the ranks of every group of this rank, by its name."""
    groups = {name: getattr(mesh, name) for name in "stage replicas experts counts ring".split()}
    for way in ("down", "up"):
        groups |= {(way, i): group for i, group in getattr(mesh, way).items()}
    ranks = {name: g and dist.get_process_group_ranks(g) for name, g in groups.items()}
    return (mesh.pp_rank, mesh.dp_rank, mesh.cp_rank, mesh.ep_rank), mesh.pipeline, ranks


# ------------------------------------------------------------------------------------------------
# Grids and groups
# ------------------------------------------------------------------------------------------------


def test_grids_by_hand():
    """Context ranks are neighbours, then data, then stages; experts fold over both of the first."""
    assert grid(8, 2, 2).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert expert_grid(8, 2, 4).tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert grid(8, 1, 1).tolist() == [[[r] for r in range(8)]]
    assert expert_grid(8, 1, 2).tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert grid(12, 3, 4).tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert expert_grid(12, 3, 2)[1].tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize("world,axes,rank,where,pipeline,want", [
    (8, dict(pp=2, cp=2, ep=4), 6, (1, 1, 0, 2), (2, 6), dict(
        stage=[4, 5, 6, 7], replicas=None, experts=[4, 5, 6, 7], ring=[6, 7], down={0: [2, 6]})),
    (8, dict(ep=2), 5, (0, 5, 0, 1), (5,), dict(
        stage=[*range(8)], replicas=[1, 3, 5, 7], experts=[4, 5], ring=None, down={})),
    (8, dict(pp=8), 3, (3, 0, 0, 0), (*range(8),), dict(
        stage=None, replicas=None, experts=None, ring=None,
        down={i: [i, i + 1] if i in (2, 3) else None for i in range(7)})),
    (16, dict(pp=2, cp=4, ep=2), 13, (1, 1, 1, 1), (5, 13), dict(
        stage=[*range(8, 16)], replicas=[9, 11, 13, 15], experts=[12, 13], ring=[12, 13, 14, 15],
        down={0: [5, 13]})),
    (64, LARGE, 37, (2, 2, 1, 5), (5, 21, 37, 53), dict(
        stage=[*range(32, 48)], replicas=[37, 45], experts=[*range(32, 40)], ring=[36, 37],
        down={0: None, 1: [21, 37], 2: [37, 53]})),
    (64, LARGE, 0, (0, 0, 0, 0), (0, 16, 32, 48), dict(
        stage=[*range(16)], replicas=[0, 8], experts=[*range(8)], ring=[0, 1],
        down={0: [0, 16], 1: None, 2: None})),
    (64, LARGE, 63, (3, 7, 1, 7), (15, 31, 47, 63), dict(
        stage=[*range(48, 64)], replicas=[55, 63], experts=[*range(56, 64)], ring=[62, 63],
        down={0: None, 1: None, 2: [47, 63]})),
])  # fmt: skip
def test_groups_by_hand(world, axes, rank, where, pipeline, want):
    got_where, got_pipeline, groups = on_rank(rank, world, groups_of, **axes)
    assert (got_where, got_pipeline) == (where, pipeline)
    assert groups["counts"] == groups["experts"]
    down = want.pop("down")
    for way in ("down", "up"):
        assert {key[1]: ranks for key, ranks in groups.items() if key[0] == way} == down
    assert {name: groups[name] for name in want} == want


def test_counts_have_a_communicator_of_their_own():
    """Else they queue behind the rows of the exchange before them."""
    assert on_rank(0, 64, lambda run, mesh: mesh.counts is not mesh.experts, **LARGE)


def test_every_rank_makes_the_same_groups_in_the_same_order(monkeypatch):
    """Else the ranks would wait for each other in new_group."""
    made, plain = [], dist.new_group

    def noting(ranks, **kwargs):
        made[-1].append(ranks)
        return plain(ranks, **kwargs)

    monkeypatch.setattr(dist, "new_group", noting)
    for rank in (0, 1, 37, 63):
        made.append([])
        on_rank(rank, 64, groups_of, **LARGE)
    assert made[0] and all(other == made[0] for other in made)


# ------------------------------------------------------------------------------------------------
# The model on 64 ranks
# ------------------------------------------------------------------------------------------------


def model_of(run, mesh):
    """Layers, first expert, expert stacks' length, bucket ranges and slices of this rank."""
    chunks = script.build(MODEL, run, mesh)
    optimizer = script.build_optimizer(chunks, run, mesh)
    trainer = script.Trainer(MODEL, run, mesh, chunks, optimizer, loader=None)
    stacks = {len(p) for name, p in script.named_parameters(chunks) if ".experts." in name}
    return dict(
        layers=[int(i) for chunk in chunks for i in chunk.model.layers],
        ends=[(chunk.first, chunk.last) for chunk in chunks],
        first_expert=mesh.first_expert(MODEL.num_experts), stacks=stacks,
        owners=[(b.owner, len(b.bounds) - 1, b.bounds, b.group) for b in optimizer.buckets],
        slices=[(name, kind, start, len(x)) for name, kind, start, x in optimizer.slices()],
        groups=(mesh.stage, mesh.replicas), pipe=trainer.pipe, mesh=mesh,
    )  # fmt: skip


def test_layers_experts_and_buckets_by_hand():
    """9 layers over 8 chunks: one each, the second chunk two. Rank 37 is stage 2, expert rank 5."""
    got = on_rank(37, 64, model_of, **LARGE)
    assert got["layers"] == [3, 6] and got["ends"] == [(False, False)] * 2
    assert got["first_expert"] == 10 and got["stacks"] == {2}
    dense, routed = got["owners"][0::2], got["owners"][1::2]
    assert [(owner, owners) for owner, owners, *_ in dense] == [(5, 16)] * 2  # of its stage
    assert [(owner, owners) for owner, owners, *_ in routed] == [(0, 2)] * 2  # of the two copies
    for owners, group in zip((dense, routed), got["groups"]):
        for *_, bounds, its_group in owners:
            lengths = {hi - lo for lo, hi in zip(bounds, bounds[1:])}
            assert its_group is group and len(lengths) == 1 and bounds[0] == 0
    pipe, mesh = got["pipe"], got["mesh"]
    assert (pipe.rank, pipe.pp, pipe.like.shape) == (2, 4, (1, 8, 32))  # half of 16 tokens
    assert pipe.to == {True: (53, mesh.down[2]), False: (21, mesh.up[1])}
    assert pipe.source == {True: (21, mesh.down[1]), False: (53, mesh.up[2])}
    for rank, layers, ends in (
        (15, [0, 8], [(True, False), (False, True)]),  # stage 0: embedding and head
        (16, [1, 2, 7], [(False, False)] * 2), (48, [4, 5], [(False, False)] * 2),
    ):  # fmt: skip
        there = on_rank(rank, 64, model_of, **LARGE)
        assert (there["layers"], there["ends"]) == (layers, ends)


@pytest.mark.parametrize("name", ["train_qwen3_moe", "train_gpt_oss", "train_deepseek_v2_lite"])
def test_the_rank_with_a_large_head_gets_fewer_layers(name):
    there = importlib.import_module(name)
    run, mesh = there.Config(dtype="fp32", compile=False), Mesh(0, 2, 2, 1, 1, 1, CPU)
    for vocabulary, count in ((8, 4), (2**13, 2)):
        model = dataclasses.replace(there.TINY, num_hidden_layers=8, vocab_size=vocabulary)
        chunks = there.build(model, run, mesh)
        assert sum(len(chunk.model.layers) for chunk in chunks) == count


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_all_ranks_together_hold_every_layer_and_expert_and_own_every_element_once(optimizer):
    held, owned = collections.Counter(), collections.defaultdict(list)
    for rank in range(64):
        got = on_rank(rank, 64, model_of, optimizer=optimizer, **LARGE)
        assert got["stacks"] == {2}
        for layer in got["layers"]:
            for expert in range(got["first_expert"], got["first_expert"] + 2):
                held[layer, expert] += 1
        for name, kind, start, length in got["slices"]:
            owned[name, kind].append((start, start + length))
    copies = 8 * 2 // 8  # dp · cp / ep
    assert held == {(layer, expert): copies for layer in range(9) for expert in range(16)}

    alone = script.Config(**SIZES)
    (whole,) = script.build(MODEL, alone, build(alone, CPU))
    sizes = {name: p.numel() for name, p in whole.named_parameters()}
    assert {name for name, kind in owned if kind == "master"} == set(sizes)
    for (name, kind), pieces in owned.items():
        end = 0
        for start, stop in sorted(pieces):
            assert start == end, (name, kind)
            end = stop
        assert end == sizes[name], (name, kind)


# ------------------------------------------------------------------------------------------------
# Room
# ------------------------------------------------------------------------------------------------


def test_room_stays_until_it_is_too_little_or_twice_too_much(monkeypatch):
    """1.25 times the need, in steps of 64, and no more than can come: 1,024 tokens of 2 choices."""
    monkeypatch.setattr(dist, "all_reduce", lambda x, op: None)
    mesh = Mesh(0, 2, 1, 1, 1, 2, torch.device("cpu"))
    room = Room(Run(seq_len=1024, micro_batch=1, ep=2, room=1.25), mesh, 2)
    for need, all_had_room, rows_and_slots in (
        ((200, 500), True, (256, 640)),  # the first, which waited
        ((256, 640), True, (256, 640)),
        ((150, 400), True, (256, 640)),
        ((257, 500), False, (None, None)),
        ((257, 500), True, (384, 640)),  # again, waiting
        ((300, 641), False, (None, None)),  # of slots alone
        ((257, 500), True, (384, 640)),
        ((900, 641), False, (None, None)),
        ((900, 641), True, (1024, 832)),
        ((900, 320), True, (1024, 832)),  # 448 would do, more than half
        ((900, 300), True, (1024, 384)),
    ):
        counts = torch.tensor([[need[0], 7], [3, 7]]), torch.tensor([[1, need[1] - 4], [1, 4]])
        had = room.rows, room.slots
        assert room.note(*counts) == (None if had == (None, None) else had)
        assert room.settle() == all_had_room and (room.rows, room.slots) == rows_and_slots, need
    never = Room(Run(seq_len=1024, micro_batch=1, ep=2, room=0), mesh, 2)
    assert never.note(*counts) is None and never.settle() and never.note(*counts) is None


# ------------------------------------------------------------------------------------------------
# Pipe
# ------------------------------------------------------------------------------------------------

COUNTS = [(pp, m) for pp in (2, 4, 8) for m in (2 * pp, 2 * pp + 1, 2 * pp + 3, 4 * pp)]


def pipe_of(pp, rank, like=None):
    """The Pipe of a rank, its groups named by their way and lower rank."""
    ways = [{i: (way, i) for i in range(pp - 1)} for way in ("down", "up")]
    return Pipe(rank, range(pp), *ways, like)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("pp,micro_batches", COUNTS)
def test_what_one_rank_sends_is_what_its_neighbour_needs(pp, micro_batches, train):
    """Receives are posted in the order of the sends, each before the action that needs it."""
    does = [
        [crossing_of(pp, r, a, train) for a in schedule(pp, r, micro_batches)] for r in range(pp)
    ]
    for rank in range(pp - 1):
        for sender, receiver, down in ((rank, rank + 1, True), (rank + 1, rank, False)):
            pipe = pipe_of(pp, receiver)
            pipe.start(micro_batches, train)
            needed = {key for _, needs in does[receiver] for key in needs}
            sent = [key for makes, _ in does[sender] for key in makes if key in needed]
            assert list(pipe.coming[down]) == sent and len(set(sent)) == len(sent)
            assert len(sent) == micro_batches * (2 if train else 1)


class Wire:
    """In the place of a communicator: messages match receives in order, both sides wait."""

    def __init__(self):
        self.changed, self.ways = threading.Condition(), collections.defaultdict(lambda: ([], []))
        self.mine = threading.local()  # of a rank: what it has launched

    def settle(self):
        """What a rank's host does that waits for its whole device."""
        while getattr(self.mine, "waits", []):
            self.mine.waits.pop()()

    def launch(self, op, tensor, peer, group):
        """Pipe._launch. A send is complete when the matching receive has been posted."""
        sends, receives = self.ways[group]
        here, there = (sends, receives) if op is dist.isend else (receives, sends)
        with self.changed:
            number = len(here)
            here.append(tensor.clone() if op is dist.isend else tensor)
            self.changed.notify_all()

        def wait():
            with self.changed:
                if not self.changed.wait_for(lambda: len(there) > number, timeout=20):
                    raise TimeoutError(f"{op.__name__} {number} of {group} was never matched")
                if op is dist.irecv:
                    tensor.copy_(sends[number])

        self.mine.waits = [*getattr(self.mine, "waits", []), wait]
        return type("Work", (), dict(wait=staticmethod(wait)))


def test_few_sends_are_under_way_and_the_oldest_is_waited_for_first(monkeypatch):
    """What is sent is held until then. `finish` waits for the rest."""
    waited = []

    def launch(op, tensor, peer, group):
        return type("Work", (), dict(wait=staticmethod(lambda: waited.append(int(tensor)))))

    monkeypatch.setattr(Pipe, "_launch", staticmethod(launch))
    pipe = pipe_of(2, 0)
    pipe.start(8, True)
    for m in range(8):
        pipe.send("f", 0, m, torch.tensor(m))
        assert waited == list(range(m - Pipe.AHEAD + 1)) and Pipe.AHEAD < 8
    pipe.finish()
    assert waited == list(range(8)) and not pipe.sending


def mark(chunk_of_all, m, kind):
    return torch.tensor([chunk_of_all, m, "fb".index(kind)], dtype=torch.float64)


class Stage:
    """A rank's chunks: their output, and the gradient of their input, say whose they are.

    Before each forward and backward a rank calls `settle`.
    """

    def __init__(self, pp, rank, settle):
        self.pp, self.rank, self.settle, self.seen = pp, rank, settle, []

    def chunk(self, local):
        number = self.rank if local == 0 else 2 * self.pp - 1 - self.rank
        seen, last, settle = self.seen, number == 2 * self.pp - 1, self.settle

        class Marked(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, m):
                settle()
                ctx.m, ctx.shape = m, x.shape
                return x.sum() * 0 if last else mark(number, m, "f")

            @staticmethod
            def backward(ctx, grad):
                settle()
                seen.append(("b", number, ctx.m, grad.tolist() if grad.ndim else None))
                return mark(number, ctx.m, "b"), None

        def steps(x, m, defer):
            seen.append(("f", number, m, None if x is None else x.tolist()))
            start = torch.zeros(3, dtype=torch.float64, requires_grad=True) if x is None else x
            return Marked.apply(start, m)
            yield  # a generator, of no exchange

        return steps


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("pp,micro_batches", COUNTS)
def test_every_transfer_arrives_where_it_is_needed_and_nobody_waits_for_ever(
    pp, micro_batches, train, device_waits, monkeypatch
):
    """The real executor and Pipe on threads for ranks, each way of a pair one queue in order.

    Also where a rank waits before it computes until all it has launched is done, as when a kernel
    is loaded or tuned: on two GPUs receives posted ahead of that stopped the first step for ever.
    """
    wire, failed = Wire(), []
    monkeypatch.setattr(Pipe, "_launch", staticmethod(wire.launch))
    like, one = torch.empty(3, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    settle = wire.settle if device_waits else lambda: None
    stages = [Stage(pp, rank, settle) for rank in range(pp)]

    def work(rank):
        pipe = pipe_of(pp, rank, like)
        chunks, batches = [stages[rank].chunk(0), stages[rank].chunk(1)], range(micro_batches)
        try:
            with torch.set_grad_enabled(train):
                run_schedule(chunks, batches, one if train else None, pipe=pipe)
        except BaseException as error:
            failed.append((rank, error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads), failed
    seen = {(kind, number, m): got for s in stages for kind, number, m, got in s.seen}
    assert len(seen) == 2 * pp * micro_batches * (2 if train else 1)
    for (kind, number, m), got in seen.items():
        source = number - 1 if kind == "f" else number + 1
        first = source == -1 or source == 2 * pp
        assert got == (None if first else mark(source, m, kind).tolist()), (kind, number, m)
    for way, (sends, receives) in wire.ways.items():
        assert len(sends) == len(receives) == micro_batches * (2 if train else 1), way


# ------------------------------------------------------------------------------------------------
# bench.schedule
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", range(1, 9))
def test_simulation_ends_and_runs_everything(pp):
    for micro_batches in range(2 * pp, 2 * pp + 4):
        spans = bench.schedule.simulate(pp, micro_batches)
        for kind in "fb":
            done = [(s.rank, getattr(s.action, kind)) for s in spans if getattr(s.action, kind)]
            assert len(set(done)) == len(done) == 2 * pp * micro_batches


def test_marks_are_explained(capsys):
    bench.schedule.main(1, 2)
    legend, *lanes, idle = capsys.readouterr().out.splitlines()
    assert "digits: micro-batches" in legend and "idle" in idle
    marks = set(lanes[1].split("|")[1])
    assert marks and all(f"{mark} " in legend for mark in marks)


def test_bad_sizes_are_one_line():
    for sizes, said in (
        ((4, 3), "error: pp 4 needs at least 8 micro-batches, there are 3"),
        ((0, 10), "error: pp 0: must be at least 1"),
        ((1, 0), "error: micro-batches 0: must be at least 1"),
    ):
        with pytest.raises(SystemExit, match=said):
            bench.schedule.main(*sizes)
    command = [sys.executable, "-m", "bench.schedule", "--pp", "4", "--micro-batches", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: pp 4 needs at least 8")
