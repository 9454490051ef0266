"""common/hf.py: reading, loading through views, writing; transformers is the oracle."""

import errno
import hashlib
import json
import os
import pickle

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common import hf

E, F, D, V = 6, 5, 8, 11  # experts, width, hidden, vocabulary: 2F is not D
STACK = "model.layers.{}.mlp.experts."


def published(layers=2, dtype=torch.float32):
    """A little per-expert model as it stands on disk."""
    tensors = {"model.embed_tokens.weight": torch.randn(V, D), "model.norm.weight": torch.randn(D)}
    for layer in range(layers):
        for e in range(E):
            for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
                name = STACK.format(layer) + f"{e}.{part}_proj.weight"
                tensors[name] = torch.randn(shape)
    return {name: t.to(dtype) for name, t in tensors.items()}


def as_fused(tensors, layers=2):
    """The same model with its experts stacked into single tensors."""
    fused = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in range(layers):
        part = {
            p: torch.stack(
                [tensors[STACK.format(layer) + f"{e}.{p}_proj.weight"] for e in range(E)]
            )
            for p in ("gate", "up", "down")
        }
        fused[STACK.format(layer) + "gate_up_proj"] = torch.cat([part["gate"], part["up"]], 1)
        fused[STACK.format(layer) + "down_proj"] = part["down"]
    return fused


def local_model(first=0, local=E, layers=2, dtype=torch.float32, fill=float("nan")):
    """This rank's parameters in one flat buffer, with their views under both spellings."""
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(layers):
        shapes[STACK.format(layer) + "gate_up"] = (local, 2 * F, D)
        shapes[STACK.format(layer) + "down"] = (local, D, F)
    flat = torch.full((sum(torch.Size(s).numel() for s in shapes.values()),), fill, dtype=dtype)
    sizes = [torch.Size(s).numel() for s in shapes.values()]
    params = {n: t.view(s) for (n, s), t in zip(shapes.items(), flat.split(sizes))}
    views, fused = {}, {}
    for name, t in params.items():
        if name.endswith("gate_up"):
            fused[name + "_proj"] = t, first
            for e in range(local):
                stem = name.removesuffix("gate_up") + f"{first + e}."
                views[stem + "gate_proj.weight"] = t[e, :F]
                views[stem + "up_proj.weight"] = t[e, F:]
        elif name.endswith("down"):
            fused[name + "_proj"] = t, first
            for e in range(local):
                stem = name.removesuffix("down") + f"{first + e}."
                views[stem + "down_proj.weight"] = t[e]
        else:
            views[name] = t
    return flat, views, fused


def load_from(path, tensors, first=0, local=E, **kwargs):
    """Write the tensors as one file and load them into a NaN-filled rank; its flat buffer."""
    save_file(tensors, path)
    flat, views, fused = local_model(first, local)
    hf.load_views(hf.Reader(path), views, fused, **kwargs)
    return flat


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_fused_and_per_expert_files_fill_the_same_memory(tmp_path):
    tensors = published()
    single = load_from(tmp_path / "a.safetensors", tensors)
    fused = load_from(tmp_path / "b.safetensors", as_fused(tensors), n_experts=E)
    assert not single.isnan().any()  # nothing of the NaN prefill is left
    assert torch.equal(single, fused)
    _, views, destinations = local_model()  # and not twice the same wrong memory
    hf.load_views(hf.Reader(tmp_path / "b.safetensors"), views, destinations)
    for name, t in tensors.items():
        assert torch.equal(views[name], t), name


@pytest.mark.parametrize("fuse", [False, True])
def test_a_rank_reads_its_experts_only(tmp_path, fuse):
    tensors = published()
    known = tensors.keys() | as_fused(tensors).keys()
    written = as_fused(tensors) if fuse else tensors
    flat = load_from(tmp_path / "m.safetensors", written, 2, 3, known=known, n_experts=E)
    assert not flat.isnan().any()
    whole, views, _ = local_model(2, 3)
    for name, view in views.items():
        view.copy_(tensors[name])
    assert torch.equal(flat, whole)


def test_sources_are_cast_to_the_parameters(tmp_path):
    tensors = published()
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float64):
        _, views, fused = local_model(dtype=dtype)
        hf.load_views(hf.Reader(tmp_path), views, fused)
        assert all(torch.equal(views[name], t.to(dtype)) for name, t in tensors.items())


def test_loads_into_parameters_that_require_grad(tmp_path):
    save_file({"w": torch.ones(3, 2)}, tmp_path / "model.safetensors")
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    hf.load_views(hf.Reader(tmp_path), {"w": weight[:]})
    assert torch.equal(weight.detach(), torch.ones(3, 2)) and weight.grad_fn is None


def test_what_does_not_fit_is_named_and_nothing_is_copied(tmp_path):
    tensors = published()
    lost = STACK.format(1) + "4.up_proj.weight"
    del tensors[lost]
    tensors["model.layers.2.extra"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(D + 1)
    tensors["model.embed_tokens.weight"] = torch.zeros(V, D, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    flat, views, fused = local_model()
    with pytest.raises(ValueError) as e:
        hf.load_views(hf.Reader(tmp_path), views, fused)
    said = str(e.value)
    assert f"1 missing: {lost}" in said and "1 surplus: model.layers.2.extra" in said
    assert f"model.norm.weight ({D + 1},), the model has ({D},)" in said
    assert "model.embed_tokens.weight U8" in said and "\n" not in said
    assert flat.isnan().all()


def test_many_missing_are_counted(tmp_path):
    tensors = {n: t for n, t in published().items() if "layers.1" not in n}
    with pytest.raises(ValueError, match=rf"{3 * E} missing: .*0\.down.* and {3 * E - 4} more"):
        load_from(tmp_path / "m.safetensors", tensors)


def test_half_a_fused_layer_and_a_wrong_number_of_experts(tmp_path):
    fused = as_fused(published())
    down = fused.pop(STACK.format(1) + "down_proj")
    with pytest.raises(ValueError, match=rf"{E} missing: \S*layers.1\S*0\.down_proj"):
        load_from(tmp_path / "m.safetensors", fused)
    fused[STACK.format(1) + "down_proj"] = torch.cat([down, down])
    with pytest.raises(ValueError, match=rf"layers.1\S*down_proj \({2 * E}, "):
        load_from(tmp_path / "m.safetensors", fused, n_experts=E)


def test_surplus_may_be_ignored_or_known(tmp_path):
    tensors = published() | {"lm_head.weight": torch.zeros(V, D), "a.inv_freq": torch.zeros(2)}
    load_from(tmp_path / "m.safetensors", tensors, ignore=("lm_head.weight", "*.inv_freq"))
    load_from(tmp_path / "m.safetensors", tensors, known=set(tensors))
    with pytest.raises(ValueError, match="1 surplus: a.inv_freq"):
        load_from(tmp_path / "m.safetensors", tensors, ignore=("lm_head.weight",))
    both = published() | as_fused(published())  # each expert twice is one too many
    with pytest.raises(ValueError, match="4 surplus"):
        load_from(tmp_path / "m.safetensors", both)


def test_reader_errors(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such"):
        hf.Reader(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no .*safetensors"):
        hf.Reader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="pickled.*save_pretrained"):
        hf.Reader(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "m1.safetensors")
    index = {"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}
    (tmp_path / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="m2.safetensors, not there"):
        hf.Reader(tmp_path)
    save_file({"c": torch.zeros(2)}, tmp_path / "m2.safetensors")
    with pytest.raises(ValueError, match="m2.safetensors lacks b"):
        hf.Reader(tmp_path)
    whole = (tmp_path / "m1.safetensors").read_bytes()
    (tmp_path / "m1.safetensors").write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="m1.safetensors cannot be read"):
        hf.Reader(tmp_path)
    (tmp_path / hf.INDEX).write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        hf.Reader(tmp_path)


def test_pickled_weights_given_as_a_file(tmp_path, monkeypatch):
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2)}, file)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(pickle, "load", None)
    for path in (file, tmp_path):
        with pytest.raises(ValueError, match=f"{path}.*pickled.*save_pretrained"):
            hf.Reader(path)


@pytest.mark.parametrize("file", ["../m.safetensors", "/m.safetensors", "a/../../m.safetensors",
                                  "..", "", ".", "sub/m.safetensors", 3, None])  # fmt: skip
def test_an_index_that_points_outside(tmp_path, file):
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "m.safetensors")
    if file == "/m.safetensors":
        file = str(tmp_path / "m.safetensors")
    index = json.dumps({"weight_map": {"a": file}})
    (tmp_path / "model" / hf.INDEX).write_text(index)
    with pytest.raises(ValueError, match="index.json places a in .*, no file name beside it"):
        hf.Reader(tmp_path / "model")


@pytest.mark.parametrize("weight_map", [None, [], {}, "m.safetensors"])
def test_an_index_that_names_nothing(tmp_path, weight_map):
    save_file({"a": torch.zeros(2)}, tmp_path / "m.safetensors")
    (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="has no weight_map"):
        hf.Reader(tmp_path)


def test_a_downloaded_model_may_be_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "blobs" / "1234")
    (tmp_path / "snapshot" / "m.safetensors").symlink_to("../blobs/1234")
    index = json.dumps({"weight_map": {"a": "m.safetensors"}})
    (tmp_path / "snapshot" / hf.INDEX).write_text(index)
    assert hf.Reader(tmp_path / "snapshot").names == {"a"}


@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_files(tmp_path, sharded):
    """Cut in the data, in the header, before it; longer; a git-lfs pointer; absurd header."""
    file = tmp_path / ("m1.safetensors" if sharded else "model.safetensors")
    save_file({"a": torch.arange(100.0)}, file)
    whole = file.read_bytes()
    if sharded:
        save_file({"b": torch.zeros(2)}, tmp_path / "m2.safetensors")
        index = {"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}
        (tmp_path / hf.INDEX).write_text(json.dumps(index))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 400\n"
    absurd = (1 << 60).to_bytes(8, "little") + b"{}"
    for damaged in (whole[:-1], whole[:40], whole[:5], b"", whole + b"\0", pointer, absurd):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{file.name} cannot be read .*: damaged or cut"):
            hf.Reader(tmp_path)
    file.write_bytes(whole)
    assert torch.equal(hf.Reader(tmp_path).read("a"), torch.arange(100.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_way_that_a_model_is_published(tmp_path, dtype, fuse, shards):
    tensors = published()
    source = {n: t.to(dtype) for n, t in (as_fused(tensors) if fuse else tensors).items()}
    names, weight_map = sorted(source), {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-0000{i + 1}-of-00003.safetensors"
        save_file({n: source[n] for n in names[i::shards]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    if shards > 1:
        (tmp_path / hf.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    before = {path: (digest(path), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    flat, views, fused = local_model()
    hf.load_views(hf.Reader(tmp_path), views, fused, n_experts=E)
    assert not flat.isnan().any()
    for name, t in tensors.items():
        assert torch.equal(views[name], t.to(dtype).float()), name
    assert before == {path: (digest(path), path.stat().st_mtime_ns) for path in before}
    assert len(list(tmp_path.iterdir())) == len(before)


def test_tokenizer_files(tmp_path):
    for name in ("tokenizer.json", "special_tokens_map.json", "meta.json", "00.bin", "vocab.json"):
        (tmp_path / name).touch()
    (tmp_path / "tokenizer_config.json").mkdir()
    files = [path.name for path in hf.tokenizer_files(tmp_path)]
    assert files == ["tokenizer.json", "special_tokens_map.json", "vocab.json"]
    assert hf.tokenizer_files(tmp_path / "nowhere") == []


def test_reader_takes_loose_files_but_no_name_twice(tmp_path):
    save_file(
        {"a": torch.arange(6.0).view(3, 2), "s": torch.tensor(2.0)}, tmp_path / "x.safetensors"
    )
    save_file({"b": torch.zeros(2)}, tmp_path / "y.safetensors")
    reader = hf.Reader(tmp_path)
    assert reader.names == {"a", "b", "s"} and reader.shape("a") == (3, 2)
    assert reader.dtype("a") == "F32" and reader.shape("s") == () and reader.read("s") == 2
    assert reader.read("a", slice(1, 3)).tolist() == [[2, 3], [4, 5]]
    save_file({"a": torch.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="y.safetensors holds a, which another"):
        hf.Reader(tmp_path)


def test_round_trip_names_shapes_bytes_and_index(tmp_path):
    tensors = published(dtype=torch.bfloat16)
    _, views, fused = local_model(dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    hf.load_views(hf.Reader(tmp_path), views, fused)
    for out in ("one", "two"):
        hf.save_views(tmp_path / out, views, {"a": 1}, torch.bfloat16, shard_gib=1000 / 2**30)
    index = json.loads((tmp_path / "one" / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    files = sorted(p.name for p in (tmp_path / "one").glob("*.safetensors"))
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    held = {}
    for file in files:
        shard = load_file(tmp_path / "one" / file)
        assert sum(t.nbytes for t in shard.values()) <= 1000
        assert all(index["weight_map"][name] == file for name in shard)
        with safe_open(tmp_path / "one" / file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
        held |= shard
        assert digest(tmp_path / "one" / file) == digest(tmp_path / "two" / file)
    assert held.keys() == tensors.keys() == index["weight_map"].keys()
    for name, t in tensors.items():
        assert held[name].dtype == t.dtype and torch.equal(held[name], t), name
    assert hf.read_json(tmp_path / "one" / "config.json") == {"a": 1}


def test_written_file_equals_what_safetensors_reads(tmp_path):
    tensors = {
        "b10": torch.randn(3, 4).t(),  # strided
        "b9": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "count": torch.arange(5),
        "flag": torch.tensor([True, False, True]),
    }
    hf.write_tensors(tmp_path / "t.safetensors", tensors)
    read = load_file(tmp_path / "t.safetensors")
    assert read.keys() == tensors.keys()
    for name, t in tensors.items():
        assert read[name].dtype == t.dtype and torch.equal(read[name], t), name
    hf.write_tensors(tmp_path / "t.safetensors", tensors, torch.bfloat16)
    read = load_file(tmp_path / "t.safetensors")
    assert read["b10"].dtype == torch.bfloat16 and read["count"].dtype == torch.int64


def test_a_failed_write_names_the_file_and_leaves_none(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for path in (tmp_path / "t.safetensors", tmp_path / "t.json"):
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            if path.suffix == ".json":
                hf.write_json(path, {})
            else:
                hf.write_tensors(path, {"a": torch.zeros(3)})
    assert not list(tmp_path.iterdir())


def test_shards_are_dealt_to_holders():
    dense = {"embed": 50, "layers.2.w": 10, "layers.10.w": 10}
    holders = [dense | {"e.0": 40}, dense | {"e.1": 40}]
    shards = hf.plan_shards(holders, 60)
    assert sorted(n for _, names in shards for n in names) == sorted({**holders[0], **holders[1]})
    assert all(name in holders[rank] for rank, names in shards for name in names)
    loads = [
        sum(holders[rank][n] for w, names in shards for n in names if w == rank)
        for rank in range(2)
    ]
    assert max(loads) - min(loads) <= 50
    assert hf.plan_shards([{"a": 100, "b": 0, "c": 5}], 10) == [(0, ["a"]), (0, ["b", "c"])]
    assert hf.plan_shards([dense], 999) == [(0, ["embed", "layers.2.w", "layers.10.w"])]


# ---------------------------------------------------------------- transformers


@pytest.fixture(scope="module")
def qwen():
    """A tiny random Qwen3-MoE: 2·width ≠ hidden, head_dim ≠ hidden / heads."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, moe_intermediate_size=F, num_experts=E,
        num_experts_per_tok=2, intermediate_size=7, decoder_sparse_step=1,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).eval()


def qwen_views(qwen, fill=None):
    """The transformers model's own memory under both spellings, or a filled copy of it."""
    views, fused = {}, {}
    for name, t in qwen.state_dict().items():
        t = t if fill is None else torch.full_like(t, fill)
        if ".experts.gate_up_proj" in name:
            fused[name] = t, 0
            for e in range(E):
                stem = name.removesuffix("gate_up_proj")
                views[stem + f"{e}.gate_proj.weight"] = t[e, :F]
                views[stem + f"{e}.up_proj.weight"] = t[e, F:]
        elif ".experts.down_proj" in name:
            fused[name] = t, 0
            for e in range(E):
                views[name.removesuffix("down_proj") + f"{e}.down_proj.weight"] = t[e]
        else:
            views[name] = t
    return views, fused


@pytest.mark.parametrize("original", [True, False])
def test_reads_what_transformers_wrote(tmp_path, qwen, original):
    qwen.save_pretrained(tmp_path, save_original_format=original)
    assert any("experts.0." in name for name in hf.Reader(tmp_path).names) == original
    views, fused = qwen_views(qwen, fill=float("nan"))
    hf.load_views(hf.Reader(tmp_path), views, fused, n_experts=E)
    for name, view in qwen_views(qwen)[0].items():
        assert torch.equal(views[name], view), name
    config = hf.read_config(tmp_path)
    hf.expect_model_type(config, "c.json", ("qwen3_moe",))
    assert config["num_experts"] == E and config["rope_theta"] == 10000.0


def test_transformers_reads_what_was_written(tmp_path, qwen):
    from transformers import AutoModelForCausalLM

    views, _ = qwen_views(qwen)
    config = json.loads(qwen.config.to_json_string(use_diff=False))
    hf.save_views(tmp_path, views, config, torch.float32, shard_gib=2000 / 2**30)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager",
        output_loading_info=True, dtype=torch.float32,
    )  # fmt: skip
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids = torch.randint(0, V, (2, 7))
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, qwen(ids).logits)


# ---------------------------------------------------------------- config.json


def test_config_spellings(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 32.0}
    old = {"type": "yarn", "factor": 32.0}
    one = {"num_local_experts": 8, "rope_theta": 1e4, "rope_scaling": old}
    two = {"num_experts": 8, "rope_parameters": {**yarn, "rope_theta": 1e4}}
    assert hf.read_config(one) == hf.read_config(two)
    assert hf.read_config(two) == {"num_experts": 8, "rope_theta": 1e4, "rope_scaling": yarn}
    assert "num_local_experts" in one and "rope_theta" in two["rope_parameters"]  # unchanged
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "x": None}
    assert hf.read_config(plain) == {"rope_theta": 5.0, "rope_scaling": None, "x": None}
    assert hf.read_config({"rope_scaling": None, "rope_theta": 5.0})["rope_scaling"] is None
    with pytest.raises(ValueError, match="num_experts 8 and elsewhere 4"):
        hf.read_config({"num_experts": 8, "num_local_experts": 4})
    (tmp_path / "config.json").write_text(json.dumps(two))
    assert hf.read_config(tmp_path) == hf.read_config(tmp_path / "config.json")
    with pytest.raises(ValueError, match="x.json cannot be read"):
        hf.read_config(tmp_path / "x.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="config.json must hold a JSON object, not list"):
        hf.read_config(tmp_path)
    for config, said in (
        ({"model_type": "llama"}, "model_type is 'llama', this script takes qwen3_moe or qwen2"),
        ({"dtype": "uint16"}, "no model's config.json, it has no model_type"),
    ):
        with pytest.raises(ValueError, match=f"some/where: {said}"):
            hf.expect_model_type(config, "some/where", ("qwen3_moe", "qwen2_moe"))
