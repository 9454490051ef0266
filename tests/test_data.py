"""Sampling order, mixtures, held-out split, batches, documents, and preparing ahead."""

import json
import threading
import timeit

import numpy as np
import pytest
import torch

from common.data import IGNORE, Loader, Prefetch, batch_map, isolate, permute
from common.tokens import write_tokens
from tests.test_tokens import META, corpus


@pytest.mark.parametrize("n", [1, 2, 3, 7, 100, 1000, 1023])
def test_permutation_is_a_bijection(n):
    for epoch in range(3):
        assert sorted(permute(i, n, 5, epoch) for i in range(n)) == list(range(n))


def test_permutation_mixes_and_depends_on_seed_and_epoch():
    orders = [[permute(i, 1000, *key) for i in range(1000)] for key in [(0, 0), (0, 1), (1, 0)]]
    for order in orders:
        assert sum(a == i for i, a in enumerate(order)) < 10  # 1 is expected of a random one
        assert abs(np.corrcoef(order, range(1000))[0, 1]) < 0.12  # 3.8 sigma
        ahead = np.diff(order)
        assert len(set(ahead.tolist())) > 500  # no constant stride
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert sum(x == y for x, y in zip(orders[a], orders[b])) < 10
    first = np.bincount([permute(0, 7, seed, 0) for seed in range(3500)], minlength=7)
    assert first.min() > 400 and first.max() < 600, "every element is first equally often"


def test_order_is_fixed_for_ever():
    # A change of the permutation would make resumed runs repeat some data and miss other.
    assert [permute(i, 10, 3, 1) for i in range(10)] == [2, 0, 8, 1, 4, 5, 7, 3, 6, 9]


def test_an_epoch_takes_each_training_sample_once(tmp_path):
    loader = Loader([corpus(tmp_path / "a")], 10, 1000, seed=1)
    assert (loader.n_train, loader.n_held) == ([99], [1])
    first, second = loader.take(99), loader.take(99)
    assert sorted(first) == sorted(second) == [(0, i) for i in range(99)]
    assert first != second


def test_resume_continues_an_uninterrupted_order_at_any_batch_size(tmp_path):
    specs = [corpus(tmp_path / "a") + ":0.7", corpus(tmp_path / "b", 301) + ":0.3"]
    whole = Loader(specs, 10, 1000, seed=1).take(600)  # several epochs of both
    for cut in (0, 1, 37, 99, 230):
        loader = Loader(specs, 10, 1000, seed=1)
        head = loader.take(cut)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = Loader(specs, 10, 1000, seed=1)
        loader.load_state_dict(state)
        tail = [s for size in (8, 1, 32, 5) * 4 for s in loader.take(size)]
        assert head + tail == whole[: cut + len(tail)]


def test_resume_at_an_epoch_boundary(tmp_path):
    spec = corpus(tmp_path / "a")
    whole = Loader([spec], 10, 1000, seed=1).take(150)
    loader = Loader([spec], 10, 1000, seed=1)
    loader.load_state_dict({"consumed": {spec: 99}})
    assert loader.take(51) == whole[99:]


def test_batch_map_is_micro_batch_major():
    assert batch_map(12, 2, 3) == [
        [slice(0, 2), slice(2, 4), slice(4, 6)],
        [slice(6, 8), slice(8, 10), slice(10, 12)],
    ]
    for dp in (1, 2, 3, 6):  # whatever the layout, micro-batches joined over ranks are the batch
        seen = [i for ranks in batch_map(24, 2, dp) for part in ranks for i in range(24)[part]]
        assert seen == list(range(24))


def test_batch_map_names_batches_that_work():
    with pytest.raises(ValueError, match=r"global-batch 10 .*micro-batch 2 x dp 4 = 8; 8 or 16 "):
        batch_map(10, 2, 4)
    with pytest.raises(ValueError, match=r"= 8; 8 would work"):
        batch_map(3, 2, 4)


def test_data_does_not_depend_on_dp(tmp_path):
    spec = corpus(tmp_path / "a")
    whole, _ = (one := Loader([spec], 10, 1000, seed=1)).read(one.take(24))
    for dp in (2, 4):
        loaders = [Loader([spec], 10, 1000, seed=1) for _ in range(dp)]
        batches = [loader.take(24) for loader in loaders]
        parts = [
            loaders[r].read(batches[r][part])[0]
            for ranks in batch_map(24, 3, dp)
            for r, part in enumerate(ranks)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    "weights",
    [
        (0.7, 0.3),
        (1, 1, 1),
        (5, 1, 1, 1, 1, 1, 1),
        (97, 2, 1),
        (1, 2, 3, 5, 8, 13),
        (0.5, 0.26, 0.24),
    ],
)
def test_mixture_shares_stay_within_one_sample(tmp_path, weights):
    specs = [corpus(tmp_path / f"s{k}", 101) + f":{w}" for k, w in enumerate(weights)]
    loader = Loader(specs, 10, 1000, seed=1)
    shares = np.array(weights) / sum(weights)
    for taken in range(1, 700):
        loader.take(1)
        assert np.abs(loader.consumed - shares * taken).max() < 1 + 1e-9


def test_a_mixture_of_many_files_keeps_its_shares_over_epochs(tmp_path):
    shards = {"a": 40, "b": 16, "c": 8}
    shares = {"a": 0.6, "b": 0.3, "c": 0.1}
    rng, specs = np.random.default_rng(0), []
    for first, name in enumerate(shards):  # the tokens of source k are those in [300k, 300k + 300)
        parts = [rng.integers(300, size=rng.integers(1, 90)) for _ in range(shards[name])]
        write_tokens(tmp_path / name, [300 * first + part for part in parts], META)
        specs.append(f"{tmp_path / name}:{shares[name]}")
    assert len(list(tmp_path.glob("*/*.bin"))) == 64
    loader = Loader(specs, 10, 1000, seed=3)
    taken = [[] for _ in specs]
    for step in range(1, 101):
        samples = loader.take(16)
        tokens, _ = loader.read(samples)
        for (s, i), row in zip(samples, tokens, strict=True):
            taken[s].append(i)
            assert (row // 300 == s).all()
        drawn = np.array([len(part) for part in taken])
        assert np.abs(drawn - 16 * step * np.array([*shares.values()])).max() < 1 + 1e-9
    for part, n in zip(taken, loader.n_train, strict=True):
        assert len(part) > 3 * n, "some epochs"
        for epoch in range(len(part) // n):
            assert sorted(part[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_new_weights_hold_for_new_samples_only(tmp_path):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b")
    loader = Loader([a + ":0.9", b + ":0.1"], 10, 1000, seed=1)
    loader.take(1000)
    changed = Loader([a + ":0.5", b + ":0.5"], 10, 1000, seed=1)
    changed.load_state_dict(loader.state_dict())
    for _ in range(10):
        changed.take(10)  # no run of b alone to catch up with 400 samples of history
        assert abs(changed.consumed[0] - 900 - (changed.consumed[1] - 100)) <= 1
    again = Loader([a + ":0.5", b + ":0.5"], 10, 1000, seed=1)
    again.load_state_dict(changed.state_dict())
    assert again.take(50) == changed.take(50)


def test_a_source_may_leave_and_return(tmp_path):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b")
    both = Loader([a, b], 10, 1000, seed=1)
    both.take(40)
    only_a = Loader([a], 10, 1000, seed=1)
    only_a.load_state_dict(both.state_dict())
    assert only_a.take(7) == [(0, permute(i, 99, 1, 0)) for i in range(20, 27)]
    assert only_a.state_dict()["consumed"] == {a: 27, b: 20}
    back = Loader([b, a], 10, 1000, seed=1)  # also in another order
    back.load_state_dict(only_a.state_dict())
    assert back.consumed == [20, 27]
    new = Loader([a, corpus(tmp_path / "c")], 10, 1000, seed=1)
    new.load_state_dict(both.state_dict())
    assert new.consumed == [20, 0]


def test_order_of_the_flags_does_not_move_the_position(tmp_path):
    a, b = corpus(tmp_path / "a"), corpus(tmp_path / "b")
    first = Loader([a + ":3", b], 10, 1000, seed=1)
    first.take(41)
    second = Loader([b, a + ":3"], 10, 1000, seed=1)
    second.load_state_dict(first.state_dict())
    assert second.consumed == first.consumed[::-1]
    assert [(1 - s, i) for s, i in second.take(40)] == first.take(40)


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"step": 3},
        {"consumed": 3},
        {"consumed": {"a": -1}},
        {"consumed": {"a": 1.5}},
        {"consumed": {"a": True}},
        {"consumed": {}, "extra": {}},
        {"consumed": {}, "since": {}},
        {"consumed": {}, "since": {"a": 1}, "shares": {}},
    ],
)
def test_state_of_unknown_shape_is_refused(tmp_path, state):
    loader = Loader([corpus(tmp_path / "a")], 10, 1000, seed=1)
    loader.take(3)
    with pytest.raises(ValueError, match="data state"):
        loader.load_state_dict(state)
    assert loader.consumed == [3]


def test_heldout_targets_are_disjoint_from_training_targets(tmp_path):
    spec = corpus(tmp_path / "a", 1001, vocab_size=2000)  # every token is different
    loader = Loader([spec], 10, 2000, seed=1, eval_fraction=0.13)
    assert (loader.n_train, loader.n_held) == ([87], [13])
    _, train = loader.read(loader.take(87))
    _, held = loader.read(loader.heldout(1000))
    train, held = set(train.flatten().tolist()), set(held.flatten().tolist())
    assert not train & held
    assert train | held == set(range(1, 1001)), "every token but the first is a target once"


@pytest.mark.parametrize(
    "tokens, fraction, split",
    [
        (11, 0.01, (1, 0)),
        (21, 0.01, (1, 1)),
        (21, 0.9, (1, 1)),
        (1001, 0.25, (75, 25)),
        (1001, 0, (100, 0)),
    ],
)
def test_heldout_is_at_least_one_and_leaves_one(tmp_path, tokens, fraction, split):
    loader = Loader([corpus(tmp_path / "a", tokens)], 10, 1000, 0, fraction)
    assert (loader.n_train[0], loader.n_held[0]) == split
    assert len(loader.heldout(1000)) == split[1]


def test_heldout_is_spread_by_weight_and_over_the_tail(tmp_path):
    specs = [corpus(tmp_path / "a", 10001) + ":3", corpus(tmp_path / "b", 10001)]
    loader = Loader(specs, 10, 1000, 0, eval_fraction=0.1)
    samples = loader.heldout(40)
    assert samples == loader.heldout(40) and len(set(samples)) == 40
    assert [sum(s == k for s, _ in samples) for k in (0, 1)] == [30, 10]
    assert [i for s, i in samples if s == 1] == list(range(900, 1000, 10))
    everything = loader.heldout(10**6)
    assert sorted(everything) == [(s, i) for s in (0, 1) for i in range(900, 1000)]
    assert loader.consumed == [0, 0]


def test_targets_are_the_next_tokens(tmp_path):
    loader = Loader([corpus(tmp_path / "a", 1001, vocab_size=2000)], 10, 2000, seed=1)
    tokens, targets = loader.read([(0, 0), (0, 7), (0, 99)])
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens.is_contiguous() and targets.is_contiguous()
    want = torch.stack([torch.arange(10 * i, 10 * i + 10) for i in (0, 7, 99)])
    assert torch.equal(tokens, want) and torch.equal(targets, want + 1)


def test_taking_is_fast():
    loader = Loader(("stdlib",), 128, 257, seed=0)
    assert min(timeit.repeat(lambda: loader.take(1000), number=1, repeat=5)) < 0.05  # seconds


def test_eos_of_each_sample(tmp_path):
    specs = [corpus(tmp_path / "a", eos_id=7), corpus(tmp_path / "b", eos_id=None)]
    assert Loader(specs, 10, 1000, 0).eos([(0, 3), (1, 0), (0, 1)]) == [7, None, 7]


def test_peek_moves_nothing(tmp_path):
    loader = Loader([corpus(tmp_path / "a"), corpus(tmp_path / "b") + ":2"], 10, 1000, seed=1)
    loader.take(5)
    state = loader.state_dict()
    ahead = loader.peek(300)
    assert loader.state_dict() == state
    assert loader.take(300) == ahead


def test_isolate_by_hand():
    tokens = torch.tensor([[5, 0, 6, 7, 0, 0], [0, 1, 2, 9, 3, 9], [0, 9, 1, 2, 3, 4]])
    targets = torch.tensor([[0, 6, 7, 0, 0, 8], [1, 2, 9, 3, 9, 4], [9, 1, 2, 3, 4, 5]])
    before = targets.clone()
    new, positions, cu_seqlens = isolate(tokens, targets, [0, 9, None])
    assert torch.equal(targets, before)
    assert new.tolist() == [
        [0, IGNORE, 7, 0, IGNORE, IGNORE],
        [1, 2, 9, IGNORE, 9, IGNORE],
        [9, 1, 2, 3, 4, 5],
    ]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    starts = [0, 2, 5, 6, 10, 12]
    assert cu_seqlens.tolist() == starts + [18] * (17 - len(starts))
    assert cu_seqlens.dtype == torch.int32 and positions.dtype == new.dtype == torch.int64


@pytest.mark.parametrize("documents, length", [(1, 17), (16, 17), (17, 65), (64, 65), (65, 257)])
def test_isolate_gives_few_shapes(documents, length):
    tokens = torch.ones(1, 300, dtype=torch.int64)
    tokens[0, : documents - 1] = 0
    *_, cu_seqlens = isolate(tokens, tokens, [0])
    assert cu_seqlens.tolist() == [*range(documents)] + [300] * (length - documents)


def test_isolate_agrees_with_cutting_the_text(tmp_path):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8, 401)
    write_tokens(tmp_path / "a", ids, META)
    loader = Loader([str(tmp_path / "a")], 20, 1000, 0)
    samples = loader.take(4)
    tokens, targets = loader.read(samples)
    new, positions, cu_seqlens = isolate(tokens, targets, loader.eos(samples))
    documents = []
    for row in tokens.tolist():
        cuts = [0] + [t + 1 for t, token in enumerate(row) if token == 0]
        documents += [row[a:b] for a, b in zip(cuts, cuts[1:] + [20]) if b > a]
    ends = cu_seqlens.tolist()
    flat = tokens.flatten().tolist()
    assert [flat[a:b] for a, b in zip(ends, ends[1:]) if b > a] == documents
    assert positions.flatten().tolist() == [t for d in documents for t in range(len(d))]
    assert torch.equal(new == IGNORE, tokens == 0)
    assert torch.equal(new[tokens != 0], targets[tokens != 0])


def pair(tmp_path):
    """Two equal loaders of two sources."""
    specs = [corpus(tmp_path / "a"), corpus(tmp_path / "b", 301) + ":2"]
    return [Loader(specs, 10, 1000, seed=1) for _ in range(2)]


def test_prefetching_changes_neither_order_nor_state(tmp_path):
    ahead, plain = pair(tmp_path)
    prefetch = Prefetch(ahead, ahead.read)
    start = plain.state_dict()
    for step, count in enumerate([8] * 20 + [5, 5, 8, 1, 1]):
        if step in (7, 8, 15):  # the position is moved under it
            ahead.load_state_dict(start), plain.load_state_dict(start)
        if step == 11:  # somebody else takes
            assert ahead.take(3) == plain.take(3)
        for got, want in zip(prefetch.take(count), plain.read(plain.take(count)), strict=True):
            assert torch.equal(got, want)
        assert ahead.state_dict() == plain.state_dict()
    prefetch.close()
    assert ahead.state_dict() == plain.state_dict()
    assert prefetch.take(4)[0].tolist() == plain.read(plain.take(4))[0].tolist()
    prefetch.close()


def test_prefetching_overlaps(tmp_path):
    loader, plain = pair(tmp_path)
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def prepare(samples):
        calls.append((threading.current_thread().name, samples))
        if len(calls) == 2:
            begun.set()
            assert go_on.wait(10), "the step that it should overlap never came"
        return samples

    prefetch = Prefetch(loader, prepare)
    assert prefetch.take(8) == plain.take(8)
    assert begun.wait(10), "the next samples are being prepared although nobody has asked for them"
    assert loader.state_dict() == plain.state_dict()
    go_on.set()
    second = plain.take(8)
    assert prefetch.take(8) == second
    prefetch.close()
    assert calls[0][0] != "prefetch" and calls[1] == ("prefetch", second)
    assert [samples for _, samples in calls].count(second) == 1, "and only once"


def test_prefetching_prepares_one_at_a_time(tmp_path):
    loader, _ = pair(tmp_path)
    busy = threading.Lock()

    def prepare(samples):
        assert busy.acquire(blocking=False), "two at once"
        threading.Event().wait(0.01)
        busy.release()
        return samples

    prefetch = Prefetch(loader, prepare)
    for count in (2, 3, 2, 2, 3, 4):
        prefetch.take(count)
    prefetch.close()


def test_an_error_of_prefetching_surfaces_where_its_samples_are_taken(tmp_path):
    loader, plain = pair(tmp_path)
    order = plain.peek(12)

    def prepare(samples):
        if order[8] in samples:
            raise ValueError("bad token")
        return samples

    prefetch = Prefetch(loader, prepare)
    assert [prefetch.take(4), prefetch.take(4)] == [order[:4], order[4:8]]
    prefetch.close(), prefetch.close()  # also of an error that nobody needed
    before = loader.state_dict()
    with pytest.raises(ValueError, match="bad token"):  # prepared here
        prefetch.take(4)
    loader.load_state_dict(before)
    loader.load_state_dict({"consumed": {name: 0 for name in before["consumed"]}})
    prefetch.take(4), prefetch.take(4)
    with pytest.raises(ValueError, match="bad token"):  # prepared ahead
        prefetch.take(4)
    assert loader.take(4) == plain.peek(16)[12:], "advanced as if it had been taken plainly"
    prefetch.close()
