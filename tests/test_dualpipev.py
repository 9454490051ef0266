"""Tape, cuts, deferral and pairing against plain autograd; the schedule in unit costs."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import train_qwen3_moe as script
from bench.schedule import simulate
from common.dualpipev import Exchange, Route, Tape, backward, drive, forward, pair, run, schedule
from common.mesh import Pipe, place
from tests.test_qwen3_moe import ODD, data, ours, run_config

hand_over = Pipe(0, [0], {}, {}, None)  # one rank with both chunks


def plain_gradients(chunk, batches, scale):
    """The reference: generators driven to their end, autograd through the exchanges."""
    losses = [drive(chunk(None, batch, None)) for batch in batches]
    (sum(losses) * scale).backward()
    grads = {name: p.grad.clone() for name, p in chunk.named_parameters()}
    chunk.zero_grad()
    return [loss.item() for loss in losses], grads


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("n_chunks,cut", [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("flags", [{}, dict(recompute="layer"), dict(recompute="experts")])
def test_taped_equals_plain(count, n_chunks, cut, flags):
    flags = dict(balance="sequence", z_loss_coef=0.01, **flags)
    (whole_model,) = ours(ODD, run_config(**flags))
    chunks = ours(ODD, run_config(**flags), n_chunks)
    for a, b in zip(script.named_parameters(chunks), script.named_parameters([whole_model])):
        b[1].data.copy_(a[1].data)
    batches = [data(seed=i, shape=(2, 9)) for i in range(count)]
    want_losses, want = plain_gradients(whole_model, batches, 0.25)
    pipe = hand_over if n_chunks > 1 else None
    scale = torch.tensor(0.25, dtype=torch.float64)
    losses = run(chunks, batches, scale, pipe=pipe, cut_all=cut)
    assert [loss.item() for loss in losses] == pytest.approx(want_losses, rel=1e-12)
    for name, p in script.named_parameters(chunks):
        assert (p.grad - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name
    stats = torch.cat([chunk.statistics for chunk in chunks])
    torch.testing.assert_close(stats, whole_model.statistics, rtol=1e-12, atol=0)  # once, not twice


@pytest.mark.parametrize("together", [2, 3, 9])
def test_weight_gradients_of_several_micro_batches_together(together):
    (chunk,) = ours(ODD, run_config())
    batches = [data(seed=i, shape=(2, 9)) for i in range(5)]
    _, want = plain_gradients(chunk, batches, 0.25)
    run([chunk], batches, torch.tensor(0.25, dtype=torch.float64), wgrad_batch=together)
    for name, p in chunk.named_parameters():
        assert (p.grad - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name


def test_a_cut_really_cuts_and_deferral_really_defers():
    """The tape of a chunk has two cuts a layer, and expert gradients come with the flush only."""
    (chunk,) = ours(ODD, run_config())
    tape = Tape(cut_all=True)
    pair(forward(chunk(None, data(), tape.defer), tape), None)
    assert len(tape.cuts) == 2 * 3
    pair(backward(tape, torch.ones((), dtype=torch.float64), hold=True), None)
    gate_up = chunk.model.layers["1"].mlp.experts.gate_up
    assert gate_up.grad is None and len(tape.deferred) == 3
    assert chunk.model.layers["1"].mlp.gate.weight.grad is not None
    tape.flush()
    assert gate_up.grad.abs().max() > 0 and not tape.deferred


def test_tied_embeddings_over_two_chunks():
    import dataclasses

    model = dataclasses.replace(ODD, tie_word_embeddings=True)
    (one,) = ours(model, run_config())
    two = ours(model, run_config(), 2)
    for (n, a), (m, b) in zip(script.named_parameters(two), script.named_parameters([one])):
        assert n == m
        b.data.copy_(a.data)
    _, want = plain_gradients(one, [data()], 1.0)
    run(two, [data()], torch.ones((), dtype=torch.float64), pipe=hand_over)
    for name, p in script.named_parameters(two):
        assert (p.grad - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name


def test_evaluation_runs_the_schedule_without_a_tape():
    chunks = ours(ODD, run_config(), 2)
    batches = [data(seed=i) for i in range(3)]
    with torch.no_grad():
        losses = run(chunks, batches, pipe=hand_over)
    want = run(chunks, batches, torch.ones((), dtype=torch.float64), pipe=hand_over)
    assert losses == want and not any(loss.requires_grad for loss in losses)


def toy(x, w, log, name):
    """Steps with an integer and an unused kept tensor, a branch shared across the cut."""
    h = x * w
    unused = h.exp()
    ids = torch.arange(len(x))
    log.append(f"{name} launch")
    got, ids, h, _ = yield Exchange(Route(), (h.tanh(), ids), keep=(h, unused))
    log.append(f"{name} resume")
    return (got * h)[ids].sum() + (x * h).sum()


def test_pairing_interleaves_and_integers_unused_and_shared_tensors_survive_cuts():
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    drive(toy(x, w, [], "")).backward()
    want = w.grad.clone(), x.grad.clone()
    w.grad = x.grad = None
    log, first, second = [], Tape(True), Tape(True)
    pair(forward(toy(x, w, log, "a"), first), None)
    log.clear()
    leaf = x.detach().clone().requires_grad_()
    one = torch.ones((), dtype=torch.float64)
    second.inputs = [leaf]
    pair(backward(first, one), forward(toy(leaf, w.detach(), log, "b"), second))
    assert log == ["b launch", "b resume"]
    torch.testing.assert_close(w.grad, want[0], rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, want[1], rtol=1e-14, atol=0)
    _, (grad,) = pair(None, backward(second, one))
    torch.testing.assert_close(grad, want[1], rtol=1e-14, atol=0)


def test_pair_alternates():
    log = []

    def steps(name, count):
        for i in range(count):
            log.append(f"{name}{i}")
            yield
        return name

    assert pair(steps("f", 3), steps("b", 2)) == ("f", "b")
    assert log == ["f0", "b0", "f1", "b1", "f2"]


def taped(log, w):
    """A chunk of one exchange that notes what runs when; called as a layer's steps are."""

    def chunk(x, batch, defer):
        h = (batch if x is None else x) * w
        h.register_hook(lambda grad: log.append("backward behind the exchange"))
        log.append("launch")
        (y,) = yield Exchange(Route(), (h,))
        log.append("resume")
        y = y * w
        y.register_hook(lambda grad: log.append("backward before the exchange"))
        return y.sum() if x is not None else y

    return chunk


def test_run_overlaps_pairs_and_tells_that_a_chunk_is_finished():
    """While one direction's rows travel the other computes; chunk 1's gradients are complete, and
    on their way, before chunk 0's last are computed (phases 7 and 8)."""
    log, w = [], torch.ones(3, requires_grad=True)
    chunks = [taped(log, w), taped(log, w)]

    @contextmanager
    def around(name):
        log.append(name)
        yield

    done = dict(finished=lambda chunk: log.append(f"finished {chunk}"), around=around)
    batches = [torch.ones(3) for _ in range(4)]
    run(chunks, batches, torch.ones(()), pipe=hand_over, cut_all=True, **done)
    named = [i for i, name in enumerate(log) if name[1] == " "]  # f 0.1, b 1.0 and so on
    paired = [i for i in named if " + " in log[i]]
    assert len(paired) == 5
    for i in paired:
        assert log[i + 1 : i + 5] == [
            "launch", "backward before the exchange", "resume", "backward behind the exchange"
        ]  # fmt: skip
    tail = [name for name in log if name[1] == " " or "finished" in name][-5:]
    assert tail == ["b 1.3", "finished 1", "b 0.3", "w 0.3", "finished 0"]


@pytest.fixture
def group(tmp_path):
    """A real process group, of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_an_exchange_is_waited_for_only_after_the_others_turn(group, monkeypatch):
    log, plain = [], dist.all_to_all_single

    class Work:
        def __init__(self, work):
            self.work = work

        def wait(self):
            log.append("wait")
            self.work.wait()

    def launched(*args, **kwargs):
        log.append("launch")
        return Work(plain(*args, **kwargs))

    def other():
        log.append("other")
        yield

    def steps(x):
        (y,) = yield Exchange(Route(group, (4,), (4,)), (x * 2,))
        return y.sum()

    monkeypatch.setattr(dist, "all_to_all_single", launched)
    tape = Tape()
    pair(forward(steps(torch.ones(4, requires_grad=True)), tape), other())
    pair(backward(tape, torch.ones(())), other())
    assert log == ["launch", "other", "wait"] * 2


def test_what_a_rank_does_not_use_comes_back_as_zeros(group):
    """Its peers wait for it: every tensor that carries a gradient travels back."""
    a, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def steps():
        x, _ = yield Exchange(Route(group, (4,), (4,)), (a * 3, b * 3))
        return x.sum()

    tape = Tape()
    pair(forward(steps(), tape), None)
    pair(backward(tape, torch.ones((), dtype=torch.float64)), None)
    assert a.grad.tolist() == [3] * 4 and b.grad.tolist() == [0] * 4


def test_exchange_over_a_group(group):
    """A real all-to-all (of one rank) is a cut, and its gradient comes back along it."""
    route = Route(group, (4,), (4,))

    def steps(x, w):
        ids = torch.arange(4)
        y, ids, h = yield Exchange(route, (x * w, ids), keep=(x + w,))
        return (y * h)[ids].sum()

    x, w = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    tape = Tape()
    pair(forward(steps(x, w), tape), None)
    assert len(tape.cuts) == 1
    pair(backward(tape, torch.ones((), dtype=torch.float64)), None)
    torch.testing.assert_close(x.grad, (2 * x * w + w * w).detach(), rtol=1e-14, atol=0)
    torch.testing.assert_close(w.grad, (2 * x * w + x * x).detach(), rtol=1e-14, atol=0)


# ------------------------------------------------------------------------------------------------
# Schedule
# ------------------------------------------------------------------------------------------------

GRID = [(pp, m) for pp in (1, 2, 4, 8) for m in (2 * pp, 2 * pp + 1, 2 * pp + 5, 5 * pp)]


@pytest.mark.parametrize("pp,micro_batches", GRID + [(1, 1)])
def test_every_chunk_and_micro_batch_once_and_in_order(pp, micro_batches):
    for rank in range(pp):
        actions = list(schedule(pp, rank, micro_batches))
        for kind in "fb":
            for chunk in (0, 1):
                done = [getattr(a, kind) for a in actions if getattr(a, kind)]
                order = [m for c, m in done if c == chunk]
                assert order == list(range(micro_batches)), (kind, chunk)
        held = [a.b for a in actions if a.hold]
        assert held == [a.w for a in actions if a.w]  # first held, first computed
        assert [a.phase for a in actions] == sorted(a.phase for a in actions)


@pytest.mark.parametrize("pp,micro_batches", GRID)
def test_phases_have_dualpipes_counts(pp, micro_batches):
    for rank in range(pp):
        count = [0] * 9
        for action in schedule(pp, rank, micro_batches):
            count[action.phase] += 1
        below = pp - rank - 1
        steady = micro_batches - 2 * pp + rank + 1
        turn = int(rank == pp - 1 and steady > 0)  # its first pair is not overlapped
        assert count[1:] == [
            2 * below, 2 * (rank + 1), 3 * below, 2 * steady + turn, 2 * below,
            2 * (rank + 1), 2 * below, rank + 1,
        ]  # fmt: skip


@pytest.mark.parametrize("pp,micro_batches", GRID)
def test_dependencies_and_bubble(pp, micro_batches):
    """Idle time a rank is (pp − 1)(F&B + B − 3W), DualPipe's figure (arXiv 2412.19437, table 2)."""
    F, B, W, FB = 1, 2, 1, 3
    spans = simulate(pp, micro_batches, F=F, B=B, W=W, FB=FB)
    ends = {}
    for span in spans:
        for kind, what in (("f", span.action.f), ("b", span.action.b)):
            if what:
                ends[kind, place(pp, span.rank, what[0]), what[1]] = span.end
    for span in spans:
        if span.action.f:
            chunk, m = place(pp, span.rank, span.action.f[0]), span.action.f[1]
            assert chunk == 0 or ends["f", chunk - 1, m] <= span.start
        if span.action.b:
            chunk, m = place(pp, span.rank, span.action.b[0]), span.action.b[1]
            before = ("f", chunk, m) if chunk == 2 * pp - 1 else ("b", chunk + 1, m)
            assert ends[before] <= span.start
    makespan = max(span.end for span in spans)
    assert makespan - 2 * micro_batches * FB == (pp - 1) * (FB + B - 3 * W)


def test_too_few_micro_batches_are_refused_with_the_number():
    with pytest.raises(ValueError, match="pp 4 needs at least 8 micro-batches, there are 7"):
        list(schedule(4, 0, 7))
