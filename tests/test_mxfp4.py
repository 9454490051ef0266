"""common/mxfp4.py and common/tensorfile.py: GPT-OSS's files in both formats, from any ranks.

transformers is the oracle, and the definition of the format where that is more direct.
"""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import checkpoint, hf, mxfp4, rundir, tensorfile
from tests import pool

MATRICES = ("gate_up_proj", "down_proj")
E, LAYERS, V = 4, 2, 13
SIZES = [(32, 32), (64, 96)]  # hidden, width: in the first, no shape betrays a transposed matrix


def random_packed(*shape, seed=0, low=0, high=255):
    """Blocks (..., 16) and scales (...) of any bits, scales from low to high - 1."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(low, high, shape, generator=g, dtype=torch.uint8)


# ---------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantize_is_what_transformers_does_bit_for_bit(dtype):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = random_packed(3, 5, 64)
    scales.view(-1)[:255] = torch.arange(255)  # every exponent
    blocks.view(-1, 16)[:255] = torch.arange(255)[:, None]  # in it, every pair of numbers somewhere
    blocks[2, 4] = 0
    ours = mxfp4.dequantize(blocks, scales, dtype).transpose(1, 2)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert ours.dtype == dtype and torch.equal(
        ours.contiguous().view(bits), theirs.contiguous().view(bits)
    )


def test_dequantize_by_definition():
    """Low half first; the lowest and the highest scale; float64 has range for all of them."""
    blocks = torch.zeros(3, 16, dtype=torch.uint8)
    blocks[:, 0], blocks[:, 15] = 0x71, 0x9F  # ½, 6 and, at the end, -6, -½
    scales = torch.tensor([0, 127, 254], dtype=torch.uint8)
    numbers = mxfp4.dequantize(blocks, scales, torch.float64).view(3, 32)
    for row, power in zip(numbers.tolist(), (2.0**-127, 1.0, 2.0**127)):
        assert row == [0.5 * power, 6 * power, *[0.0] * 28, -6 * power, -0.5 * power]
    nan = torch.tensor([255], dtype=torch.uint8)
    assert mxfp4.dequantize(blocks[:1], nan, torch.bfloat16).isnan().all()


def nearest(x):
    """The index of the magnitude nearest to each x ≥ 0, of two the even one: by definition."""
    distance = (x[..., None] - torch.tensor(mxfp4.MAGNITUDES, dtype=x.dtype)).abs()
    odd = torch.arange(8) % 2
    return (distance == distance.amin(-1, keepdim=True)).mul(2 - odd).argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_quantize_by_definition(dtype):
    values = torch.randn(400, 64, dtype=torch.float64) * 2.0 ** torch.randint(-100, 100, (400, 1))
    values[0, :32] = torch.arange(32) / 4  # 0 to 7.75: all ties, and what saturates
    values[1, :32] = -torch.arange(32) / 4 * 2.0**-50
    values = values.to(dtype)
    blocks, scales = mxfp4.quantize(values)
    assert blocks.shape == (400, 2, 16) and scales.shape == (400, 2)
    assert blocks.dtype == scales.dtype == torch.uint8
    wide = values.double().view(400, 2, 32)
    powers = 2.0 ** (wide.abs().amax(-1).log2().floor() - 2)
    assert torch.equal(scales.double(), powers.log2() + 127)
    magnitudes = torch.tensor(mxfp4.MAGNITUDES, dtype=torch.float64)
    expected = magnitudes[nearest(wide.abs() / powers[..., None])] * powers[..., None]
    expected = expected * wide.sign()
    assert torch.equal(mxfp4.dequantize(blocks, scales, torch.float64), expected.view(400, 64))
    assert expected[0, 0, :12].tolist() == [0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 2, 2, 3]
    assert expected[0, 0, 20:].unique().tolist() == [4, 6] and expected[0, 0, 20] == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_dequantised_comes_back(dtype):
    high = 255 if dtype == torch.float64 else 253  # 6 · 2^126 is beyond fp32 and bf16
    blocks, scales = random_packed(255, 4, high=high)
    scales[:high, 0] = torch.arange(high)
    blocks[:3] = 0
    blocks[3, :, 1:] = 0x88  # nothing but a number, and zeros with a sign
    blocks[5:9] &= 0x99  # only ±½ and 0: the largest power of two is not in use
    values = mxfp4.dequantize(blocks, scales, dtype)
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(values), dtype), values)


def test_quantize_at_the_ends():
    tiny = torch.full((1, 32), 2.0**-149)
    assert not mxfp4.dequantize(*mxfp4.quantize(tiny), torch.float64).any()  # scale 2^-127
    largest = torch.finfo(torch.float32).max
    back = mxfp4.dequantize(*mxfp4.quantize(torch.full((1, 32), -largest)), torch.float64)
    assert (back == -6 * 2.0**125).all()
    huge = torch.full((1, 32), 1e300, dtype=torch.float64)
    assert (mxfp4.dequantize(*mxfp4.quantize(huge), torch.float64) == 6 * 2.0**127).all()
    blocks, scales = mxfp4.quantize(torch.zeros(2, 32))
    assert not blocks.any() and not scales.any()
    for odd in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(1, 64)
        values[0, 3] = odd
        back = mxfp4.dequantize(*mxfp4.quantize(values), torch.float32)
        assert back[0, :32].isnan().all() and (back[0, 32:] == 1).all()


# ---------------------------------------------------------------- a model of ours


def parameters(D, F, local=E, fill=None, dtype=torch.bfloat16):
    """A rank's parameters as a training script has them; `fill` or random."""
    g = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(LAYERS):
        stem = f"model.layers.{i}.mlp.experts."
        shapes[stem + "gate_up"], shapes[stem + "down"] = (local, 2 * F, D), (local, D, F)
        shapes[stem + "gate_up_bias"], shapes[stem + "down_bias"] = (local, 2 * F), (local, D)
    made = {n: torch.randn(s, generator=g).to(dtype) for n, s in shapes.items()}
    return made if fill is None else {n: t.fill_(fill) for n, t in made.items()}


def views_of(params, first=0):
    """Hugging Face name -> view: gate and up interleaved, inputs before outputs."""
    views = {}
    for name, w in params.items():
        stem, experts, kind = name.partition(".experts.")
        new = stem + experts + kind.replace("gate_up", "gate_up_proj").replace("down", "down_proj")
        if kind == "gate_up":
            shape = w.shape[2], w.shape[1]
            views[new] = hf.Rows(w.unflatten(1, (2, -1)).permute(0, 3, 2, 1), first, shape)
        elif kind == "down":
            views[new] = hf.Rows(w.transpose(1, 2), first, (w.shape[2], w.shape[1]))
        elif kind == "gate_up_bias":
            views[new] = hf.Rows(w.unflatten(1, (2, -1)).transpose(1, 2), first, (w.shape[1],))
        elif kind == "down_bias":
            views[new] = hf.Rows(w, first, (w.shape[1],))
        else:
            views[name] = w
    return views


def experts_of(params, first, local):
    """What a rank with those experts has."""
    return {n: w[first : first + local] if ".experts." in n else w for n, w in params.items()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


def read_all(path):
    """Every tensor of a directory, from its files."""
    files = sorted(path.glob("*.safetensors"))
    held = [(name, t) for file in files for name, t in load_file(file).items()]
    assert len(held) == len(dict(held))
    index = hf.read_json(path / hf.INDEX)
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for _, t in held)
    return dict(held)


def write(path, params, packed=False, **kwargs):
    """Save on one rank, as BF16 or MXFP4."""
    views = views_of(params)
    hf.save_views(path, mxfp4.packed(views) if packed else views, {}, torch.bfloat16, **kwargs)


def rounded(params):
    """The parameters with numbers that MXFP4 has, by the definition of the rows in memory."""
    out = dict(params)
    for name, w in params.items():
        if name.endswith((".gate_up", ".down")):
            out[name] = mxfp4.dequantize(*mxfp4.quantize(w), w.dtype)
    return out


# ---------------------------------------------------------------- layouts on disk


@pytest.mark.parametrize("D, F", SIZES)
def test_names_shapes_and_elements(tmp_path, D, F):
    params = parameters(D, F)
    write(tmp_path / "bf16", params)
    write(tmp_path / "mxfp4", params, packed=True)
    held, small = read_all(tmp_path / "bf16"), read_all(tmp_path / "mxfp4")
    stem = "model.layers.1.mlp.experts."
    gate_up, down = params[stem + "gate_up"], params[stem + "down"]
    assert torch.equal(held[stem + "gate_up_proj"][:, :, 0::2], gate_up[:, :F].mT)
    assert torch.equal(held[stem + "gate_up_proj"][:, :, 1::2], gate_up[:, F:].mT)
    assert torch.equal(
        held[stem + "gate_up_proj_bias"][:, 1::2], params[stem + "gate_up_bias"][:, F:]
    )
    assert torch.equal(held[stem + "down_proj"], down.mT)
    assert torch.equal(held[stem + "down_proj_bias"], params[stem + "down_bias"])
    shapes = {n.removeprefix(stem): tuple(t.shape) for n, t in small.items() if stem in n}
    assert shapes == {
        "gate_up_proj_blocks": (E, 2 * F, D // 32, 16), "gate_up_proj_scales": (E, 2 * F, D // 32),
        "down_proj_blocks": (E, D, F // 32, 16), "down_proj_scales": (E, D, F // 32),
        "gate_up_proj_bias": (E, 2 * F), "down_proj_bias": (E, D),
    }  # fmt: skip
    assert small[stem + "gate_up_proj_bias"].dtype == torch.bfloat16
    blocks, scales = mxfp4.quantize(gate_up[:, F:])  # an up row is an odd row
    assert torch.equal(small[stem + "gate_up_proj_blocks"][:, 1::2], blocks)
    assert torch.equal(small[stem + "gate_up_proj_scales"][:, 1::2], scales)
    assert torch.equal(small[stem + "down_proj_blocks"], mxfp4.quantize(down)[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_reads_its_experts_and_one_at_a_time(tmp_path, monkeypatch, packed, dtype):
    params = parameters(64, 96)
    write(tmp_path, params, packed)
    read, seen = hf.Reader.read, []

    def watch(self, name, rows=None):
        seen.extend([(rows.start, rows.stop)] if ".experts." in name else [])
        return read(self, name, rows)

    monkeypatch.setattr(hf.Reader, "read", watch)
    mine = parameters(64, 96, local=2, fill=torch.nan, dtype=dtype)
    known = set(views_of(params))
    others = [n for n in mine if "layers.0" in n or "norm" in n]  # another rank's; names are known
    for name in others:
        del mine[name]
    hf.load_views(hf.Reader(tmp_path), views_of(mine, 1), known=known, n_experts=E)
    wanted = experts_of(rounded(params) if packed else params, 1, 2)
    assert_same(mine, {n: w.to(dtype) for n, w in wanted.items() if n not in others})
    assert set(seen) == {(1, 2), (2, 3)}


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_write_one_directory(tmp_path, packed):
    """2 stages x (2 expert ranks, replicated): the files of one rank, in parts by all ranks."""
    params = parameters(64, 96)
    write(tmp_path / "one", params, packed)
    ranks = []
    for stage in (0, 1):
        held = {n: w for n, w in params.items() if f"layers.{1 - stage}." not in n}
        for first in (0, 3, 0, 3):  # unequal parts
            own = views_of(experts_of(held, first, 3 if first == 0 else 1), first)
            ranks.append(mxfp4.packed(own) if packed else own)
    path, gib = tmp_path / "all", 50_000 / 2**30
    holders = [hf.inventory(own, torch.bfloat16) for own in ranks]
    path.mkdir()
    hf.create_shared(path, holders, gib)
    for rank in (5, 2, 7, 0, 1, 6, 4, 3):
        names = hf.written_by(rank, holders)
        assert any(".experts." in name for name in names)
        own = {name: ranks[rank][name] for name in names}  # it needs no other
        hf.save_views(path, own, {}, torch.bfloat16, gib, holders=holders, rank=rank)
    assert len(list(path.glob("*.safetensors"))) > 3
    assert_same(read_all(path), read_all(tmp_path / "one"))
    assert rundir.flaw(path).startswith(str(path / "trainer"))  # nothing wrong with the model


def test_files_keep_to_their_limit():
    def holder(first):
        rows = {f"{n}.w": hf.Rows(torch.zeros(2, 10), first, (10,)) for n in (2, 10, 1)}
        big = {"3.big": hf.Rows(torch.zeros(2, 5, 30), first, (150,))}
        return hf.inventory(rows | big | {"plain": torch.zeros(3)}, torch.float32)

    holders = [holder(0), holder(2), holder(0), holder(2)]
    files = tensorfile.plan_shared(holders, 400)
    assert [[t.name for t in file] for file in files] == [["1.w", "2.w"], ["3.big"], ["10.w"]]
    assert [t.shape for file in files for t in file] == [(4, 10), (4, 10), (4, 150), (4, 10)]
    assert files[0][0].nbytes == 160 and files[1][0].writers == {0: 0, 2: 1}
    assert files[0][1].writers == {0: 2, 2: 3} and files[2][0].writers == {0: 2, 2: 3}
    assert [t for t in hf.plan_shards(holders, 400)] == [(0, ["plain"])]
    with pytest.raises(AssertionError, match="2.w: rows from 0|1.w: rows from 0"):
        tensorfile.plan_shared([holder(2)], 400)


def test_a_full_disk_while_writing_rows(tmp_path, monkeypatch):
    views = {"w": hf.Rows(torch.ones(2, 3), 2, (3,))}
    other = {"w": hf.Rows(torch.zeros(2, 3), 0, (3,))}
    holders = [hf.inventory(v, torch.float32) for v in (other, views)]
    hf.create_shared(tmp_path, holders)
    (file,) = tmp_path.iterdir()
    length = file.stat().st_size

    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{file}'"):
        hf.save_views(tmp_path, views, {}, torch.float32, holders=holders, rank=1)
    assert file.stat().st_size == length  # others may be writing in it
    monkeypatch.undo()
    file.unlink()
    with pytest.raises(FileNotFoundError, match=file.name):
        hf.save_views(tmp_path, views, {}, torch.float32, holders=holders, rank=1)


def save_on_rank(rank, world, out, packed):
    """One checkpoint: each rank has half of the experts; memory changes right after `save`."""
    params = {n: w.clone() for n, w in experts_of(parameters(32, 32), 2 * rank, 2).items()}
    saver = checkpoint.Saver(out, keep_last=None, rank=rank, world=world)
    views = views_of(params, 2 * rank)
    saver.save(
        1, views=mxfp4.packed(views) if packed else views, hf_config={}, dtype=torch.bfloat16,
        slices=[], buffers={}, state={},
    )  # fmt: skip
    for w in params.values():
        w.zero_()
    assert saver.wait(), saver.error
    return saver.poll()


@pytest.mark.parametrize("packed", [False, True])
def test_two_ranks_save_a_checkpoint_in_the_background(tmp_path, packed):
    said = pool.run(2, save_on_rank, tmp_path / "out", packed)
    assert said[0][0].startswith("saved step 1") and said[1] == []
    write(tmp_path / "one", parameters(32, 32), packed)
    assert_same(read_all(checkpoint.latest(tmp_path / "out")), read_all(tmp_path / "one"))


def test_a_shared_file_that_cannot_be_made(tmp_path, monkeypatch):
    def full(path, tensors):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensorfile, "create", full)
    with pytest.raises(checkpoint.CheckpointError, match="step 1 .*No space left on device"):
        checkpoint.save(
            tmp_path, 1, views=views_of(parameters(32, 32)), hf_config={}, dtype=torch.bfloat16,
            slices=[], buffers={}, state={},
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- what does not fit

DOWN = "model.layers.1.mlp.experts.down_proj"


def without_scales(held):
    del held[DOWN + "_scales"]
    return f"{DOWN}_scales is missing"


def without_blocks(held):
    del held[DOWN + "_blocks"]
    return f"{DOWN}_blocks is missing"


def both(held):
    held[DOWN] = torch.zeros(E, 96, 64, dtype=torch.bfloat16)
    return f"{DOWN} and {DOWN}_blocks are both there: keep BF16 or MXFP4"


def short_scales(held):
    held[DOWN + "_scales"] = held[DOWN + "_scales"][:, :-1].contiguous()
    return rf"{DOWN}_blocks \({E}, 64, 3, 16\) and {DOWN}_scales \({E}, 63, 3\), not"


def flat_blocks(held):
    held[DOWN + "_blocks"] = held[DOWN + "_blocks"].flatten(2)
    return rf"{DOWN}_blocks \({E}, 64, 48\) and"


def float_scales(held):
    held[DOWN + "_scales"] = held[DOWN + "_scales"].float()
    return f"{DOWN}_scales is F32, MXFP4 has U8"


def transposed(held):
    blocks, scales = mxfp4.quantize(torch.zeros(E, 96, 64))
    held[DOWN + "_blocks"], held[DOWN + "_scales"] = blocks, scales
    return rf"1 not as the model's: {DOWN} \({E}, 64, 96\), the model has \({E}, 96, 64\)"


def more_experts(held):
    for part in mxfp4.PARTS:
        held[DOWN + part] = torch.cat([held[DOWN + part]] * 2)
    return rf"1 not as the model's: {DOWN} \({2 * E}, 96, 64\), the model has \({E}, "


def neither(held):
    for part in mxfp4.PARTS:
        del held[DOWN + part]
    return f"1 missing: {DOWN}"


def unknown(held):
    held["a_blocks"], held["a_scales"] = torch.zeros(1), torch.zeros(2)
    return "2 surplus: a_blocks, a_scales"


SPOILED = [without_scales, without_blocks, both, short_scales, flat_blocks, float_scales]
SPOILED += [transposed, more_experts, neither, unknown]


@pytest.mark.parametrize("spoil", SPOILED)
def test_files_that_do_not_fit(tmp_path, spoil):
    write(tmp_path / "good", parameters(64, 96), packed=True)
    held = read_all(tmp_path / "good")
    said = spoil(held)
    save_file(held, tmp_path / "model.safetensors")
    mine = parameters(64, 96, fill=torch.nan)
    with pytest.raises(ValueError, match=said) as e:
        hf.load_views(hf.Reader(tmp_path / "model.safetensors"), views_of(mine), n_experts=E)
    assert "\n" not in str(e.value) and str(tmp_path) in str(e.value)
    assert all(w.isnan().all() for w in mine.values())  # nothing was copied


def test_a_bf16_file_with_other_rows(tmp_path):
    write(tmp_path, parameters(64, 96))
    with pytest.raises(
        ValueError, match=rf"gate_up_proj \({E}, 64, 192\), the model has \({E}, 32"
    ):
        hf.load_views(hf.Reader(tmp_path), views_of(parameters(32, 96)), n_experts=E)
    with pytest.raises(ValueError, match=rf"gate_up_proj \({E}, 64, 192\), the model has \(5, 64"):
        hf.load_views(hf.Reader(tmp_path), views_of(parameters(64, 96), 1))


def test_sizes_that_mxfp4_cannot_have():
    with pytest.raises(ValueError, match=r"down_proj \(40, 32\): MXFP4 needs a multiple of 32"):
        mxfp4.packed(views_of(parameters(32, 40)))


# ---------------------------------------------------------------- transformers


def gpt_oss(D, F):
    """A tiny random GPT-OSS of transformers; every parameter is random, also biases and sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(1)
    config = GptOssConfig(
        vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS,
        num_local_experts=E, num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(torch.bfloat16).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def ours(model, fill=None):
    """Parameters as a script has them for all that the model has, filled, or taken from it."""
    params = {}
    for name, w in model.state_dict().items():
        stem, experts, kind = name.partition(".experts.")
        if experts and kind.startswith("gate_up"):  # columns back to gate rows, then up rows
            rows = w if kind.endswith("bias") else w.mT
            w = torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)
        elif experts and kind == "down_proj":
            w = w.mT
        params[stem + experts + kind.replace("_proj", "")] = w.clone() if experts else w
    return params if fill is None else {n: torch.full_like(w, fill) for n, w in params.items()}


def from_pretrained(path, **kwargs):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True, dtype=torch.bfloat16, **kwargs,
    )  # fmt: skip
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize("D, F", SIZES)
def test_transformers_and_we_read_each_other(tmp_path, D, F):
    """BF16 both ways and MXFP4 from us: the same elements, the same experts' outputs."""
    model = gpt_oss(D, F)
    model.save_pretrained(tmp_path / "theirs")
    mine = ours(model, fill=torch.nan)
    hf.load_views(hf.Reader(tmp_path / "theirs"), views_of(mine), n_experts=E)
    assert_same(mine, ours(model))

    config = json.loads(model.config.to_json_string(use_diff=False))
    hf.save_views(tmp_path / "bf16", views_of(mine), config, torch.bfloat16)
    again = from_pretrained(tmp_path / "bf16")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))

    config["quantization_config"] = mxfp4.QUANTIZATION_CONFIG
    hf.save_views(tmp_path / "mxfp4", mxfp4.packed(views_of(mine)), config, torch.bfloat16)
    small = from_pretrained(tmp_path / "mxfp4", **dequantizing())
    assert_same(ours(small), rounded(mine))
    back = ours(model, fill=torch.nan)
    hf.load_views(hf.Reader(tmp_path / "mxfp4"), views_of(back), n_experts=E)
    assert_same(back, ours(small))

    hf.save_views(tmp_path / "rounded", views_of(back), {**config, "quantization_config": None},
                  torch.bfloat16)  # fmt: skip
    ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = [m(ids).logits for m in (small, from_pretrained(tmp_path / "rounded"), model)]
    assert torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2])


def dequantizing():
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def test_an_expert_in_memory_computes_what_transformers_does(tmp_path):
    """Square matrices: from its files to the formula of an expert, in float64."""
    D = F = 32
    model = gpt_oss(D, F)
    model.save_pretrained(tmp_path)
    mine = ours(model, fill=torch.nan)
    hf.load_views(hf.Reader(tmp_path), views_of(mine), n_experts=E)
    experts, stem = model.model.layers[1].mlp.experts.double(), "model.layers.1.mlp.experts."
    w = {n.removeprefix(stem): t.double() for n, t in mine.items() if stem in n}
    x = torch.randn(5, D, dtype=torch.float64)
    with torch.no_grad():
        theirs = experts(x, torch.full((5, 1), 2), torch.ones(5, 1, dtype=torch.float64))
    gate, up = (x @ w["gate_up"][2].T + w["gate_up_bias"][2]).chunk(2, -1)
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    hidden = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    torch.testing.assert_close(hidden @ w["down"][2].T + w["down_bias"][2], theirs)
