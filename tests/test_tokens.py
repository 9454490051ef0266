"""The token directories: what is read, written, refused, and their tokenizers."""

import ast
import json
import os
import re
import timeit

import numpy as np
import pytest
import torch

from common.data import Loader
from common.tokens import (
    DataError,
    decoder,
    encoder,
    load_tokenizer,
    open_source,
    parse_spec,
    shard_name,
    stdlib_tokens,
    write_tokens,
)

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
    edit_meta(tmp_path / "a", tokens=141, shards={"00000.bin": 100, "00001.bin": 41})
    loader = Loader([spec], 10, 1000, 0)
    loader.read([(0, 8)])
    for sample, offset in ((9, 0), (10, 0), (11, 10)):
        with pytest.raises(ValueError, match=rf"1234 at offset {offset} .*a/00001.bin .*1000"):
            loader.read([(0, 0), (0, sample)])
    wide = Loader([spec], 10, 2000, 0)  # the model's vocabulary is no excuse
    with pytest.raises(ValueError, match="not below the vocabulary 1000"):
        wide.read([(0, 10)])


def test_directories_that_are_no_source(tmp_path):
    refuses("data nowhere/x: no such directory", "nowhere/x:0.5")
    (tmp_path / "a").mkdir()
    said = "a: no token directory, there is no meta.json in it; python -m common.tokenize_corpus"
    refuses(said, str(tmp_path / "a"))
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
        ("shards", [1001]),
        ("shards", {"00000.bin": None}),
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


def test_a_shard_that_was_cut_off_is_named(tmp_path):
    write_tokens(tmp_path / "a", np.split(np.arange(90), 3), META)
    os.truncate(tmp_path / "a" / "00001.bin", 40)
    refuses("00001.bin holds 20 tokens, meta.json says 30: .*cut off", str(tmp_path / "a"))
    (tmp_path / "a" / "00001.bin").unlink()
    refuses("00001.bin is missing", str(tmp_path / "a"))
    np.arange(30, dtype="<u2").tofile(tmp_path / "a" / "00001.bin")
    assert open_source(str(tmp_path / "a")).starts == [0, 30, 60, 90]
    (tmp_path / "a" / "more.bin").write_bytes(b"")
    refuses("more.bin is a stray file", str(tmp_path / "a"))


@pytest.mark.parametrize("suffix", ["bin", "mask"])
def test_a_shard_that_is_cut_off_while_it_is_read_is_named(tmp_path, suffix):
    """Its map would end the process with SIGBUS."""
    masks = [np.ones(30, np.uint8)] * 3
    write_tokens(tmp_path / "a", np.split(np.arange(90), 3), META, masks=masks)
    loader, samples = Loader([str(tmp_path / "a")], 10, 1000, 0), [(0, i) for i in range(8)]
    loader.read(samples)
    (tmp_path / "a" / f"00001.{suffix}").write_bytes(b"")
    loader.read(samples[:2])
    with pytest.raises(DataError, match=f"00001.{suffix} was cut off while this run reads it"):
        loader.read(samples)


def test_shards_in_meta_are_optional(tmp_path):
    spec = corpus(tmp_path / "a")
    meta = json.loads((tmp_path / "a" / "meta.json").read_text())
    assert meta.pop("shards") == {"00000.bin": 1001}
    (tmp_path / "a" / "meta.json").write_text(json.dumps(meta))
    assert open_source(spec).starts == [0, 1001]
    os.truncate(tmp_path / "a" / "00000.bin", 2000)
    refuses("meta.json says 1001 tokens, the .* hold 1000", spec)


def test_an_empty_source_is_refused_one_document_is_not(tmp_path):
    with pytest.raises(ValueError, match="it is empty"):
        write_tokens(tmp_path / "a", np.arange(0), META)
    assert list(tmp_path.iterdir()) == []
    spec = corpus(tmp_path / "b")
    (tmp_path / "b" / "00000.bin").write_bytes(b"")
    edit_meta(tmp_path / "b", tokens=0, shards={"00000.bin": 0})
    refuses("b: it is empty", spec)
    one = write_tokens(tmp_path / "c", np.array([1] * 10 + [0]), META)
    assert one["documents"] == 1
    loader = Loader([str(tmp_path / "c")], 10, 1000, 0)
    assert loader.read(loader.take(1))[1][0, -1] == 0


def test_a_mask_without_tokens_is_refused(tmp_path):
    spec = corpus(tmp_path / "a")
    (tmp_path / "a" / "00001.mask").write_bytes(b"\1")
    refuses("00001.mask has no 00001.bin", spec)


def test_five_gigabytes_are_read_at_their_end(tmp_path):
    spec, tokens = corpus(tmp_path / "a"), 2_500_000_001
    with open(tmp_path / "a" / "00000.bin", "r+b") as file:
        file.truncate(2 * tokens)  # a hole: no blocks on the disk
        file.seek(2 * (tokens - 10))
        file.write(np.arange(1, 11, dtype="<u2").tobytes())
    edit_meta(tmp_path / "a", tokens=tokens, shards={"00000.bin": tokens})

    def last():
        loader = Loader([spec], 1000, 1000, 0)
        assert loader.n_train[0] + loader.n_held[0] == 2_500_000
        inputs, targets = loader.read([(0, 2_499_999)])
        assert inputs[0, -10:].tolist() == [0, *range(1, 10)]
        assert targets[0, -10:].tolist() == list(range(1, 11))
        assert loader.read(loader.take(50))[0].shape == (50, 1000)

    assert timeit.timeit(last, number=1) < 2  # seconds; reading it all would take more


def test_sources_of_two_tokenizers_are_refused(tmp_path):
    specs = [corpus(tmp_path / name, tokenizer="t.json") for name in "abc"]
    plain, unknown = corpus(tmp_path / "d", tokenizer="bytes"), corpus(tmp_path / "e")
    Loader(specs, 10, 1000, 0)  # named, but not there
    for name, content in zip("abc", ("{}", "{}", "{ }"), strict=True):
        (tmp_path / name / "t.json").write_text(content)
    Loader([*specs[:2], unknown], 10, 1000, 0)
    refuses(r"c: its tokenizer \(t.json\) is not that of data .*a:", *specs)
    refuses(r"d: its tokenizer \(bytes\) is not that of data .*b:", specs[1], unknown, plain)
    refuses("b: its tokenizer .* is not that of data stdlib", "stdlib", specs[1])


def test_sources_that_do_not_fit_the_run(tmp_path):
    spec = corpus(tmp_path / "a", 100)
    said = "is 1000, the model's only 999; use .* vocab_size 1000 \\(--model-config"
    refuses(said, spec, vocab_size=999)
    refuses("100 tokens are fewer than one sequence .* 100 \\+ 1", spec, seq_len=100)
    assert Loader([spec], 99, 1000, 0).n_train == [1]
    refuses("given twice", spec, spec + ":2")
    refuses("given twice", spec, spec + "/")


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "half", ""])
def test_weight_must_be_positive(tmp_path, weight):
    spec = corpus(tmp_path / "a")
    refuses(rf"weight must be a positive number, got '{weight}'", f"{spec}:{weight}")


def test_weight_is_what_follows_the_last_colon():
    assert parse_spec("data/a") == ("data/a", 1)
    assert parse_spec("data/a/:0.25") == ("data/a", 0.25)
    assert parse_spec("x:y:3") == ("x:y", 3)


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
    stdlib_tokens.cache_clear()
    assert timeit.timeit(stdlib_tokens, number=1) < 5  # seconds; 0.1 on an idle machine
    ids, meta = stdlib_tokens()
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
    monkeypatch.setattr("common.tokens.sysconfig.get_paths", lambda: {"stdlib": str(root)})
    ids, meta = stdlib_tokens.__wrapped__()
    assert ids.tolist() == [*b"a/x.py", 256, *b"b.py", 256, *b"c/y.py", 256]
    assert meta["documents"] == 3


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


def test_a_tokenizer_file_neither_cuts_off_nor_pads(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0, "one": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "t.json"))
    assert load_tokenizer(tmp_path / "t.json").encode("one one one").ids == [1, 1, 1]
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t.json: not a readable tokenizer.json \("):
        load_tokenizer(tmp_path / "t.json")


def test_shard_names_sort_like_numbers():
    names = [shard_name(k) for k in (0, 9, 10, 99_999)]
    assert names == sorted(names)
    with pytest.raises(ValueError, match="more than 100,000 shards"):
        shard_name(100_000)
