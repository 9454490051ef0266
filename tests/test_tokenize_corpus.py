"""The tokenising command: kinds of input, order, interruptions, and what it refuses."""

import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common import tokenize_corpus
from common.data import Loader
from common.documents import Place, find_files, read_batches, read_texts
from common.tokens import decoder, encoder, open_source

ROOT = Path(__file__).resolve().parent.parent
EOS = "<|endoftext|>"
END = 257  # its id in `bpe`: after 256 bytes and <|user|>
TEXTS = ["Grüße, 世界 🙂\r\n\tx", "", "one two", "a\u2028b\x00c", "  spaces  ", f"a {EOS} <|user|>"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE tokenizer.json of 400 words, in a directory with its companions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(prose(2000, 1), trainer)
    folder = tmp_path_factory.mktemp("bpe")
    content = json.loads(tokenizer.to_str())
    vocab = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    vocab[256:256] = ["<|user|>", EOS]
    content["model"]["vocab"] = {word: i for i, word in enumerate(vocab)}
    content["added_tokens"] = [
        dict(id=i, content=vocab[i], single_word=False, lstrip=False, rstrip=False,
             normalized=False, special=True)
        for i in (256, END)
    ]  # fmt: skip
    content["truncation"] = dict(direction="Right", max_length=4, strategy="LongestFirst", stride=0)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    return folder / "tokenizer.json"


@pytest.fixture
def in_process(monkeypatch):
    """Threads instead of worker processes, which take half a second to start."""
    threads = lambda workers, **_: ThreadPoolExecutor(workers)
    monkeypatch.setattr(tokenize_corpus, "ProcessPoolExecutor", threads)


def prose(count, seed):
    """`count` documents of about 600 bytes."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("aeioustrnlé", k=rng.randint(1, 9))) for _ in range(3000)]
    return [" ".join(rng.choices(words, k=100)) for _ in range(count)]


def lines(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def run(tokenizer, inputs, out, *flags):
    inputs = [str(path) for path in inputs]
    argv = ["--tokenizer", tokenizer, "--input", *inputs, "--out", out, "--workers", "1", *flags]
    tokenize_corpus.main(list(map(str, argv)))


def fails(tmp_path, pattern, *args):
    """The command ends with one line that matches, and leaves nothing where `out` would be."""
    out = tmp_path / "made" / "out"
    with pytest.raises(SystemExit) as caught:
        run(*args[:2], out, *args[2:])
    message = str(caught.value.code)
    assert re.search(pattern, message) and "\n" not in message, message
    assert not out.parent.exists() or not list(out.parent.iterdir())


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def ids_of(folder):
    source = open_source(str(folder))
    return source.read(0, source.starts[-1])[0].tolist()


def documents(folder):
    """The decoded text of each document."""
    decode, eos = decoder([str(folder)]), open_source(str(folder)).meta["eos_id"]
    found, ids = [[]], ids_of(folder)
    assert ids[-1] == eos
    for i in ids[:-1]:
        found.append([]) if i == eos else found[-1].append(i)
    return [decode(part) for part in found]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_round_trip_of_every_kind_of_file(tmp_path, bpe, in_process, kind, capsys):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_bytes(TEXTS[0].encode())
    (folder / "sub" / "c.jsonl").write_bytes(b"\n" + lines(TEXTS) + b"  \n" + lines(TEXTS[:1])[:-1])
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[4:])))
    (folder / "d.jsonl.zst").write_bytes(zstandard.compress(lines(TEXTS[2:4])))
    (folder / "other.csv").write_bytes(b"\xff")
    (tmp_path / "first.txt").write_bytes(b"first")
    run("bytes" if kind == "bytes" else bpe, [tmp_path / "first.txt", folder], tmp_path / "out")
    full = [text for text in TEXTS if text]
    want = ["first", *TEXTS[4:], TEXTS[0], *TEXTS[2:4], *full, TEXTS[0]]
    if kind == "bytes":
        assert documents(tmp_path / "out") == want
        assert ids_of(tmp_path / "out") == [i for text in want for i in [*text.encode(), 256]]
    else:  # the library leaves special tokens out when it decodes, but here they are plain text
        assert documents(tmp_path / "out") == want
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["documents"], meta["dtype"]) == (len(want), "uint16")
    assert meta["vocab_size"] == (257 if kind == "bytes" else 402)
    assert meta["eos_id"] == (256 if kind == "bytes" else END)
    names = ["first.txt", "a.jsonl.gz", "b.txt", "d.jsonl.zst", "c.jsonl"]
    assert [Path(source["file"]).name for source in meta["sources"]] == names
    assert [source["documents"] for source in meta["sources"]] == [1, 2, 1, 2, 6]
    raw = (folder / "a.jsonl.gz").read_bytes()
    assert meta["sources"][1]["sha256"] == hashlib.sha256(raw).hexdigest()
    assert meta["sources"][1]["bytes"] == len(raw)
    names = {"meta.json", "00000.bin"}
    if kind == "bpe":
        names |= {"tokenizer.json", "tokenizer_config.json"}
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == bpe.read_bytes()
    assert content(tmp_path / "out").keys() == names
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first.txt", "in", "out"]
    printed = capsys.readouterr()
    assert f"{meta['tokens']:,} tokens (uint16), {len(want)} documents, 1 shard\n" in printed.out
    assert re.search(r"100% .* MB \| [\d,]+ tok/s\n$", printed.err)


def test_special_tokens_in_the_text_are_text_unless_asked_for(tmp_path, bpe, in_process):
    (tmp_path / "a.txt").write_text(f"a{EOS}<|user|>")
    run(bpe, [tmp_path / "a.txt"], tmp_path / "plain")
    run(bpe, [tmp_path / "a.txt"], tmp_path / "special", "--parse-special")
    assert [i for i in ids_of(tmp_path / "plain") if 256 <= i <= END] == [END]
    assert ids_of(tmp_path / "special") == [
        encoder([str(tmp_path / "plain")])("a")[0],
        END,
        256,
        END,
    ]


def test_wide_vocabulary_is_written_as_uint32(tmp_path, in_process):
    vocab = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "wide.json"))
    (tmp_path / "a.txt").write_text("w7 w65543 w69999 other")
    run(tmp_path / "wide.json", [tmp_path / "a.txt"], tmp_path / "out")
    meta = open_source(str(tmp_path / "out")).meta
    assert (meta["dtype"], meta["vocab_size"]) == ("uint32", 70_001)
    assert (meta["tokenizer"], meta["eos_id"]) == ("tokenizer.json", 70_000)
    assert ids_of(tmp_path / "out") == [7, 65543, 69999, 0, 70_000]


@pytest.mark.parametrize("workers", [1, 2])
def test_result_does_not_depend_on_the_workers(tmp_path, bpe, in_process, monkeypatch, workers):
    (tmp_path / "a.jsonl").write_bytes(lines(prose(500, 2)))
    (tmp_path / "b.txt").write_text("\n".join(prose(200, 3)))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines(prose(500, 4))))
    inputs = [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl.zst")]
    run(bpe, inputs, tmp_path / "threads", "--shard-tokens", "60000")
    monkeypatch.undo()  # real processes
    run(bpe, inputs, tmp_path / "out", "--shard-tokens", "60000", "--workers", workers)
    assert content(tmp_path / "out") == content(tmp_path / "threads")
    meta = open_source(str(tmp_path / "out")).meta
    assert len(meta["shards"]) >= 3 and min([*meta["shards"].values()][:-1]) >= 60_000
    assert documents(tmp_path / "out")[500] == "\n".join(prose(200, 3))
    loader = Loader([str(tmp_path / "out")], 128, 402, 0)
    assert (loader.read(loader.take(50))[0] == END).any()


def test_batches_go_on_from_any_of_their_ends(tmp_path):
    data = lines(prose(1500, 5))
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:-1]))
    (tmp_path / "c.txt").write_bytes(data)
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.compress(data))
    files = find_files([tmp_path])
    whole = list(read_batches(files, Place()))
    assert len(whole) >= 10
    joined = [b"".join(line for b in whole if b.path == f for line in b.lines) for f in files]
    assert joined == [data, data[:-1], data, data]
    for k, batch in enumerate(whole):
        rest = list(read_batches(files, batch.end))
        assert [(b.lines, b.start, b.end) for b in rest] == [
            (b.lines, b.start, b.end) for b in whole[k + 1 :]
        ]


def test_compressed_files_of_many_parts(tmp_path):
    parts = [lines([text]) for text in prose(50, 6)]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    frames = [zstandard.compress(part) for part in parts]
    streamed = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    frames.append(streamed.compress(parts[0]) + streamed.flush())
    (tmp_path / "b.jsonl.zst").write_bytes(skippable + skippable.join(frames) + skippable)
    found = [list(read_texts(b, "text")) for b in read_batches(find_files([tmp_path]), Place())]
    assert found == [prose(50, 6), prose(50, 6) + prose(50, 6)[:1]]


GOOD = lines(["good"])
GZ = gzip.compress(lines(prose(2000, 7)))
ZST = zstandard.ZstdCompressor(write_checksum=True).compress(lines(prose(2000, 7)))
DAMAGED = {
    "empty.txt": (b"", "empty.txt: the file is empty"),
    "blank.jsonl": (b"\n \n", "blank.jsonl: there is no document in it"),
    "void.jsonl": (lines(["", ""]), "void.jsonl: there is no document in it"),
    "void.jsonl.gz": (gzip.compress(b""), "void.jsonl.gz: there is no document in it"),
    "utf.txt": (b"abc\xff", r"utf.txt: byte 3 is no UTF-8 \(invalid start"),
    "utf.jsonl": (GOOD + b'{"text": "\xc3("}', rf"utf.jsonl: byte {len(GOOD) + 10} is no UTF-8"),
    "cut.jsonl": (
        GOOD * 2 + b'{"text": "x',
        r"cut.jsonl: line 3: broken JSON \(Unterm.* column 10",
    ),
    "deep.jsonl": (b"[" * 100_000, "deep.jsonl: line 1: broken JSON"),
    "list.jsonl": (GOOD + b"[1]\n", "list.jsonl: line 2: not an object with 'text' but an array"),
    "field.jsonl": (
        GOOD + b"\n" + lines(["x"], "body"),
        r"line 3: no field 'text'; .*'id', 'body'",
    ),
    "null.jsonl": (b'{"text": null}', "line 1: 'text' is null, not text"),
    "int.jsonl": (b'{"text": 3}', "line 1: 'text' is a number, not text"),
    "half.jsonl": (b'{"text": "\\ud800"}', "line 1: 'text' holds half a surrogate pair"),
    "cut.jsonl.gz": (GZ[:-500], "cut.jsonl.gz: damaged, cut off"),
    "end.jsonl.gz": (GZ[:-8], "end.jsonl.gz: damaged, cut off"),
    "bits.jsonl.gz": (GZ[:5000] + b"\0" * 9 + GZ[5009:], "bits.jsonl.gz: damaged, cut off"),
    "no.jsonl.gz": (GOOD, "no.jsonl.gz: damaged, cut off"),
    "more.jsonl.gz": (GZ + b"more", "more.jsonl.gz: damaged, cut off"),
    "cut.jsonl.zst": (ZST[:-500], "cut.jsonl.zst: damaged, cut off .*inside a frame"),
    "bits.jsonl.zst": (ZST[:5000] + b"\0" * 9 + ZST[5009:], "bits.jsonl.zst: damaged, cut off"),
    "no.jsonl.zst": (GOOD, "no.jsonl.zst: damaged, cut off"),
    "a.csv": (b"1,2", r"a.csv: unknown kind of file; .txt, .jsonl, .jsonl.gz"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_input_is_named(tmp_path, in_process, name):
    data, pattern = DAMAGED[name]
    (tmp_path / "0.txt").write_text("good")
    (tmp_path / name).write_bytes(data)
    (tmp_path / "z.txt").write_text("good")
    inputs = [tmp_path / "0.txt", tmp_path / name, tmp_path / "z.txt"]
    fails(tmp_path, pattern, "bytes", inputs)


def test_input_and_tokenizer_that_do_not_exist(tmp_path, in_process):
    text = tmp_path / "a.txt"
    text.write_text("x")
    (tmp_path / "dir").mkdir()
    fails(tmp_path, "--input .*b.txt: no such file", "bytes", [text, tmp_path / "b.txt"])
    fails(tmp_path, r"--input .*dir: no .txt, .jsonl, .* below it", "bytes", [tmp_path / "dir"])
    fails(tmp_path, "--input: name at least one", "bytes", [])
    fails(tmp_path, "a.txt: given twice", "bytes", [text, tmp_path])
    fails(tmp_path, "--tokenizer .*t.json: no such file", tmp_path / "t.json", [text])
    fails(tmp_path, "a.txt: not a readable tokenizer.json", text, [text])
    fails(tmp_path, "--workers 0: must be 1 or more", "bytes", [text], "--workers", "0")
    fails(tmp_path, "--shard-tokens 0: must be", "bytes", [text], "--shard-tokens", "0")
    fails(tmp_path, "--eos x: bytes always", "bytes", [text], "--eos", "x")


def test_eos_is_guessed_only_if_there_is_one_candidate(tmp_path, in_process):
    (tmp_path / "a.txt").write_text("a")
    for name, extra in (("no", []), ("two", ["</s>", "<|im_end|>"])):
        vocab = {word: i for i, word in enumerate(["a", "END", *extra])}
        Tokenizer(models.WordLevel(vocab)).save(str(tmp_path / f"{name}.json"))
    args = [tmp_path / "a.txt"]
    fails(
        tmp_path,
        r"--eos: .*no.json has none of <\|endoftext\|> .*; name",
        tmp_path / "no.json",
        args,
    )
    fails(tmp_path, r"two.json has <\|im_end\|> and </s>; name", tmp_path / "two.json", args)
    fails(tmp_path, "--eos X: .*no such token", tmp_path / "two.json", args, "--eos", "X")
    run(tmp_path / "two.json", args, tmp_path / "out", "--eos", "END")
    assert ids_of(tmp_path / "out") == [0, 1]


def test_a_text_that_the_tokenizer_refuses(tmp_path, in_process):
    Tokenizer(models.WordLevel({"</s>": 0}, unk_token="?")).save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_bytes(lines(["a", "b"]))
    pattern = "a.jsonl: lines 1 to 2: the tokenizer fails"
    fails(tmp_path, pattern, tmp_path / "t.json", [tmp_path / "a.jsonl"])


def test_nothing_is_overwritten(tmp_path, in_process):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "out").mkdir()
    with pytest.raises(SystemExit, match="--out .*out: exists already"):
        run("bytes", [tmp_path / "a.txt"], tmp_path / "out")
    with pytest.raises(SystemExit, match=r"--out .*txt/x: cannot be made \(Not a directory"):
        run("bytes", [tmp_path / "a.txt"], tmp_path / "a.txt" / "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "out"]


def start(tokenizer, inputs, out):
    """The command in a process group of its own, every batch a shard."""
    flags = ["--workers", "2", "--shard-tokens", "1", "--out", out]
    command = [sys.executable, "-m", "common.tokenize_corpus", "--tokenizer", tokenizer]
    return subprocess.Popen(
        [*map(str, [*command, "--input", *inputs, *flags])], cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_shards(out, count):
    state, deadline = out.with_name(f"{out.name}.partial") / "state.json", time.monotonic() + 60
    while time.monotonic() < deadline:
        if state.exists() and len(json.loads(state.read_text())["shards"]) >= count:
            return
        time.sleep(0.002)
    raise AssertionError("no shard was finished")


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_interrupted_and_started_again(tmp_path, bpe, in_process, how):
    inputs = [tmp_path / name for name in ("a.jsonl", "b.jsonl.zst", "c.jsonl.gz")]
    data = lines(prose(2000, 8))
    for path, pack in zip(inputs, (bytes, zstandard.compress, gzip.compress), strict=True):
        path.write_bytes(pack(data))
    run(bpe, inputs, tmp_path / "whole", "--shard-tokens", "1")
    total = len(open_source(str(tmp_path / "whole")).files)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    for shards in (2, total // 2 + 1):  # within a plain file, then within a compressed one
        process = start(bpe, inputs, out)
        wait_for_shards(out, shards)
        if how == "kill":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        _, errors = process.communicate(timeout=20)  # ends when the workers have ended too
        assert process.returncode == (-signal.SIGKILL if how == "kill" else 1), errors
        if how == "interrupt":
            assert "the same command goes on" in errors and "Traceback" not in errors
        assert not out.exists()
        done = json.loads((partial / "state.json").read_text())["shards"]
        assert shards <= len(done) < total
        kept = {k: (partial / "tokens" / f"{k:05d}.bin").stat() for k in range(len(done))}
        (partial / "tokens" / f"{len(done):05d}.bin").write_bytes(b"torn")
    for flags, key in ((["--shard-tokens", "2"], "shard_tokens"), (["--field", "id"], "field")):
        with pytest.raises(SystemExit, match=rf"out.partial was .* differs in {key}\); .* delete"):
            run(bpe, inputs, out, "--shard-tokens", "1", *flags)
    run(bpe, inputs, out, "--shard-tokens", "1")
    assert content(out) == content(tmp_path / "whole")
    for k, before in kept.items():
        after = (out / f"{k:05d}.bin").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "anew"
    assert not partial.exists()


def test_finished_shards_outlive_an_error(tmp_path, bpe, in_process):
    good = tmp_path / "a.jsonl"
    good.write_bytes(lines(prose(900, 9)))
    (tmp_path / "b.txt").write_bytes(b"\xff")
    args, out = [good, tmp_path / "b.txt"], tmp_path / "out"
    with pytest.raises(SystemExit, match="b.txt: byte 0 is no UTF-8"):
        run(bpe, args, out, "--shard-tokens", "1")
    assert not out.exists() and (tmp_path / "out.partial" / "tokens" / "00000.bin").exists()
    (tmp_path / "b.txt").write_bytes(b"b")
    with pytest.raises(SystemExit, match="out.partial was .* differs in sources"):
        run(bpe, args, out, "--shard-tokens", "1")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    np.arange(3).tofile(tmp_path / "out.partial" / "tokens" / "00000.bin")
    with pytest.raises(SystemExit, match="00000.bin is not as it was left; delete"):
        run(bpe, args, out, "--shard-tokens", "1")


def test_two_commands_do_not_write_one_directory(tmp_path, in_process):
    (tmp_path / "a.txt").write_text("x")
    first = tokenize_corpus.Partial(tmp_path / "out")
    with pytest.raises(SystemExit, match="--out .*out: another process is making it"):
        run("bytes", [tmp_path / "a.txt"], tmp_path / "out")
    first.abandon()
    run("bytes", [tmp_path / "a.txt"], tmp_path / "out")
