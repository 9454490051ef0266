"""Token files, sampling order, mixtures, held-out split and the errors a user can meet."""

import ast
import json
import re
import timeit

import numpy as np
import pytest
import torch

from common import data
from common.data import Loader, batch_map, decoder, encoder, permute, write_tokens

META = {"vocab_size": 1000, "tokenizer": None, "eos_id": 0}


def corpus(path, tokens=1001, **meta):
    """A source whose tokens count 0, 1, 2, ... modulo its vocabulary; returns its spec."""
    meta = META | meta
    write_tokens(path, np.arange(tokens) % meta["vocab_size"], meta)
    return str(path)


def edit_meta(path, **changes):
    file = path / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refuses(pattern, *specs, seq_len=10, vocab_size=1000):
    """Loader(specs) raises a one-line ValueError that matches."""
    with pytest.raises(ValueError, match=pattern) as caught:
        Loader(specs, seq_len, vocab_size, 0)
    assert "\n" not in str(caught.value)


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


def test_a_sample_may_span_shards(tmp_path):
    ids = np.arange(101)
    cuts = [13, 13, 14, 15, 60]  # an empty shard, and shards of one token
    write_tokens(tmp_path / "a", iter(np.split(ids, cuts)), META)
    assert len(list((tmp_path / "a").glob("*.bin"))) == 6
    tokens, targets = Loader([str(tmp_path / "a")], 10, 1000, 0).read([(0, i) for i in range(10)])
    assert torch.equal(tokens.flatten(), torch.arange(100))
    assert torch.equal(targets.flatten(), torch.arange(1, 101))


def test_mask_excludes_targets_only(tmp_path):
    keep = np.ones(41, np.uint8)
    keep[[5, 20, 21, 40]] = 0
    parts = [slice(0, 18), slice(18, 41)]
    write_tokens(
        tmp_path / "a", [np.arange(41)[p] for p in parts], META, masks=[keep[p] for p in parts]
    )
    loader = Loader([str(tmp_path / "a")], 10, 1000, 0)
    tokens, targets = loader.read([(0, i) for i in range(4)])
    assert torch.equal(tokens.flatten(), torch.arange(40)), "inputs are unmasked"
    want = torch.arange(1, 41)
    want[[4, 19, 20, 39]] = -100
    assert torch.equal(targets.flatten(), want)
    (tmp_path / "a" / "00000.mask").unlink()  # a shard without a mask is all targets
    _, targets = Loader([str(tmp_path / "a")], 10, 1000, 0).read([(0, 0)])
    assert targets[0, 4] == 5


def test_mask_of_another_length_is_refused(tmp_path):
    spec = corpus(tmp_path / "a")
    (tmp_path / "a" / "00000.mask").write_bytes(b"\1" * 1000)
    refuses(r"00000.mask must have one byte .* 1001 tokens .* got 1000", spec)


def test_wide_ids_survive_the_file(tmp_path):
    ids = np.array([65536 + 7, 7, 2**31, 65535, 0])
    write_tokens(tmp_path / "a", ids, META | {"vocab_size": 2**32 - 1})
    assert json.loads((tmp_path / "a" / "meta.json").read_text())["dtype"] == "uint32"
    tokens, targets = Loader([str(tmp_path / "a")], 4, 2**32, 0).read([(0, 0)])
    assert tokens[0].tolist() == ids[:4].tolist() and targets[0].tolist() == ids[1:].tolist()


def test_files_are_little_endian(tmp_path):
    corpus(tmp_path / "a", 259)
    assert (tmp_path / "a" / "00000.bin").read_bytes()[-4:] == b"\x01\x01\x02\x01"  # 257, 258


def test_narrow_dtype_with_a_wide_vocabulary_is_refused(tmp_path):
    pattern = "dtype must be uint32 for vocab_size 65537, got 'uint16'"
    with pytest.raises(ValueError, match=pattern):
        corpus(tmp_path / "a", vocab_size=65537, dtype="uint16")
    spec = corpus(tmp_path / "b")
    edit_meta(tmp_path / "b", vocab_size=65537)
    refuses(pattern, spec, vocab_size=70000)
    corpus(tmp_path / "c", vocab_size=65536, dtype="uint16")


def test_id_outside_the_vocabulary_is_named_with_file_and_offset(tmp_path):
    spec = corpus(tmp_path / "a", 100)
    np.full(41, 1234, "<u2").tofile(tmp_path / "a" / "00001.bin")
    edit_meta(tmp_path / "a", tokens=141)
    loader = Loader([spec], 10, 1000, 0)
    loader.read([(0, 8)])
    for sample, offset in ((9, 0), (10, 0), (11, 10)):
        with pytest.raises(ValueError, match=rf"1234 at offset {offset} .*a/00001.bin .*1000"):
            loader.read([(0, 0), (0, sample)])


def test_directories_that_are_no_source(tmp_path):
    refuses("data nowhere/x: no such directory", "nowhere/x:0.5")
    (tmp_path / "a").mkdir()
    refuses(r"a: meta.json cannot be read \(.*No such file", str(tmp_path / "a"))
    (tmp_path / "a" / "meta.json").write_text("{")
    refuses(r"a: meta.json cannot be read \(Expecting", str(tmp_path / "a"))
    (tmp_path / "a" / "meta.json").write_text("[]")
    refuses("a: meta.json lacks dtype, vocab_size", str(tmp_path / "a"))
    corpus(tmp_path / "b")
    (tmp_path / "b" / "00000.bin").unlink()
    refuses(r"b: there is no \*.bin", str(tmp_path / "b"))


@pytest.mark.parametrize(
    "key, value",
    [
        ("dtype", "int8"),
        ("dtype", ["uint16"]),
        ("vocab_size", 0),
        ("vocab_size", "big"),
        ("tokens", -1),
        ("documents", 1.5),
        ("eos_id", 1000),
        ("eos_id", "x"),
        ("tokenizer", 3),
    ],
)
def test_invalid_meta_names_key_and_value(tmp_path, key, value):
    spec = corpus(tmp_path / "a")
    edit_meta(tmp_path / "a", **{key: value})
    refuses(rf"meta {key} must be .*, got {re.escape(repr(value))}", spec)


def test_sizes_that_do_not_fit(tmp_path):
    spec = corpus(tmp_path / "a")
    edit_meta(tmp_path / "a", tokens=1000)
    refuses("meta.json says 1000 tokens, the .* hold 1001", spec)
    with open(tmp_path / "a" / "00000.bin", "ab") as file:
        file.write(b"x")
    refuses("00000.bin, 2003 bytes, is no multiple of a uint16", spec)


def test_sources_that_do_not_fit_the_run(tmp_path):
    spec = corpus(tmp_path / "a", 100)
    refuses("vocabulary is 1000, the model's only 999", spec, vocab_size=999)
    refuses("100 tokens are fewer than one sequence .* 100 \\+ 1", spec, seq_len=100)
    assert Loader([spec], 99, 1000, 0).n_train == [1]
    refuses("given twice", spec, spec + ":2")
    refuses("given twice", spec, spec + "/")


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "half", ""])
def test_weight_must_be_positive(tmp_path, weight):
    spec = corpus(tmp_path / "a")
    refuses(rf"weight must be a positive number, got '{weight}'", f"{spec}:{weight}")


def test_weight_is_what_follows_the_last_colon():
    assert data.parse_spec("data/a") == ("data/a", 1)
    assert data.parse_spec("data/a/:0.25") == ("data/a", 0.25)
    assert data.parse_spec("x:y:3") == ("x:y", 3)


def test_write_counts_tokens_and_documents(tmp_path):
    meta = write_tokens(tmp_path / "deep" / "a", [np.array([5, 0, 6]), np.array([0, 0])], META)
    assert meta == json.loads((tmp_path / "deep" / "a" / "meta.json").read_text())
    assert (meta["tokens"], meta["documents"], meta["dtype"]) == (5, 3, "uint16")


def test_a_failed_write_leaves_nothing(tmp_path):
    def broken():
        yield np.arange(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "a", broken(), META)
    for ids, pattern in ((np.array([1, 1000]), "token 1000 of shard 0"), (np.array([-1]), "-1")):
        with pytest.raises(ValueError, match=pattern):
            write_tokens(tmp_path / "a", ids, META)
    with pytest.raises(ValueError, match="one byte for each"):
        write_tokens(tmp_path / "a", np.arange(5), META, masks=[np.ones(4)])
    assert list(tmp_path.iterdir()) == []


def test_write_never_overwrites(tmp_path):
    corpus(tmp_path / "a")
    with pytest.raises(ValueError, match="exists already"):
        corpus(tmp_path / "a", 5)


def test_embedded_text_is_python_source():
    data.stdlib_tokens.cache_clear()
    assert timeit.timeit(data.stdlib_tokens, number=1) < 5  # seconds; 0.1 on an idle machine
    ids, meta = data.stdlib_tokens()
    assert len(ids) == meta["tokens"] > 5_000_000 and ids.max() == 256
    assert (ids == 256).sum() == meta["documents"] > 300
    decode = decoder(("stdlib",))
    for document in np.split(ids, np.flatnonzero(ids == 256)[:5] + 1)[:5]:
        assert ast.parse(decode(document.tolist())).body
    loader = Loader(("stdlib",), 128, 257, seed=0)
    assert loader.eos_ids == [256] and len(loader.fingerprint["stdlib"]["sha256"]) == 64
    tokens, targets = loader.read(loader.take(4))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    refuses("vocabulary is 257, the model's only 256", "stdlib", vocab_size=256)


def test_embedded_text_leaves_tests_and_packages_out(tmp_path, monkeypatch):
    root = tmp_path / "test" / "lib"  # only folders below the library count
    for name in ("b.py", "a/x.py", "c/y.py", "test/t.py", "a/tests/t.py", "site-packages/p.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
        (root / f"{name}.txt").write_bytes(b"no source")
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    ids, meta = data.stdlib_tokens.__wrapped__()
    assert ids.tolist() == [*b"a/x.py", 256, *b"b.py", 256, *b"c/y.py", 256]
    assert meta["documents"] == 3


def test_taking_is_fast():
    loader = Loader(("stdlib",), 128, 257, seed=0)
    assert min(timeit.repeat(lambda: loader.take(1000), number=1, repeat=5)) < 0.05  # seconds


def test_bytes_decode_and_encode(tmp_path):
    spec = corpus(tmp_path / "a", vocab_size=257, eos_id=256, tokenizer="bytes")
    decode, encode = decoder(["stdlib", spec + ":2"]), encoder([spec])
    assert decode(encode("naïve") + [256, 300]) == "naïve"
    assert decode([0xC3]) == "\ufffd"  # a cut character is no error
    other = corpus(tmp_path / "b")
    assert decoder([spec, other]) is None and encoder([other]) is None


def test_tokenizer_file_beside_meta(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    spec = corpus(tmp_path / "a", tokenizer="tokenizer.json")
    assert decoder([spec]) is None  # named, but not there
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("? $A", None, [("?", 0)])
    tokenizer.save(str(tmp_path / "a" / "tokenizer.json"))
    assert encoder([spec])("two one x") == [2, 1, 0]
    assert decoder([spec])([2, 1]) == "two one"
    assert decoder([spec])([2, 999]) == "two"  # an id that only the padded model has
    assert decoder([spec, corpus(tmp_path / "b", tokenizer="other.json")]) is None
