"""Hugging Face model directories: read them lazily, fill a model's views from them, write them.

A model here stacks its experts, a published one often does not, so both directions speak of
*views*: `{Hugging Face name: tensor}` where the tensor is a view into a parameter. Saving reads
the views and loading copies into them; which view is which part is the training script's business.

    reader = Reader("Qwen3-30B-A3B")
    load_views(reader, views, fused, ignore=("*.inv_freq",), n_experts=128)
    save_views("out/model", views, config, torch.bfloat16)

A tensor that has all experts on disk is viewed as `Rows`: those that this rank holds. Only
safetensors files are read and written (common/tensorfile.py); nothing is ever unpickled.
"""

import json
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common import tensorfile
from common.mxfp4 import Unpacked
from common.tensorfile import Piece, Rows, file_dtype, natural, write_tensors, writing

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json "
    "chat_template.jinja vocab.json merges.txt vocab.txt tokenizer.model"
).split()
PICKLED = (
    "pickled weights, which are not read: convert them with transformers' from_pretrained and then "
    "save_pretrained, which writes safetensors"
)
AGAIN = "if it was copied or downloaded, do that again"
SHARD_GIB = 4.0  # of a file, or one tensor
LOADABLE = ("F64", "F32", "BF16", "F16")  # others (fp8, packed int) mean nothing without scales


# ---------------------------------------------------------------- reading


class Reader:
    """The tensors of a model directory or of one .safetensors file, read when asked for.

    A directory may hold `model.safetensors`, or `model.safetensors.index.json` and its shards, or
    any *.safetensors files with distinct names in them (looked for in this order).

    Raises ValueError that names the path: nothing there, only pickled (`*.bin`) weights, a shard
    that is missing, cut short, outside the directory or without a tensor that the index places in
    it, a name in two files.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._files = {}  # file -> open handle
        self._where = {}  # tensor name -> its handle
        for file, promised in _weight_files(self.path):
            handle = self._open(file)
            held = set(handle.keys())
            lacking = sorted(promised - held)
            if lacking:
                raise ValueError(f"{file} lacks {_few(lacking)}, which {INDEX} places there")
            for name in held:  # also what an index forgot: load_views then calls it surplus
                if name in self._where:
                    raise ValueError(f"{file} holds {name}, which another file there holds too")
                self._where[name] = handle

    def _open(self, file):
        try:  # this also compares the file's length with what its header says
            return self._files.setdefault(file, safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{file} cannot be read ({e}): damaged or cut short; {AGAIN}") from e

    @property
    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the file's header."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The tensor's element type as safetensors spells it: "BF16", "F32", "U8", ..."""
        return self._where[name].get_slice(name).get_dtype()

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """The tensor on the CPU in the file's dtype, or only `rows` of its first dimension."""
        if rows is None:
            return self._where[name].get_tensor(name)
        return self._where[name].get_slice(name)[rows]


def _weight_files(path: Path) -> list[tuple[Path, set[str]]]:
    """The files to open, each with the names an index promises in it (empty: whatever it holds)."""
    if path.is_file() and path.suffix != ".safetensors":
        raise ValueError(f"{path} is no .safetensors file; *.bin, *.pt and *.pth are {PICKLED}")
    if path.is_file():
        return [(path, set())]
    if not path.is_dir():
        raise ValueError(f"{path}: no such model directory or .safetensors file")
    if (path / "model.safetensors").is_file():
        return [(path / "model.safetensors", set())]
    if (path / INDEX).is_file():
        return _indexed_files(path)
    files = sorted(path.glob("*.safetensors"))
    if not files and list(path.glob("*.bin")):
        raise ValueError(f"{path} holds only {PICKLED}")
    if not files:
        raise ValueError(f"{path} holds no *.safetensors file")
    return [(file, set()) for file in files]


def _indexed_files(path):
    weight_map, shards = read_json(path / INDEX).get("weight_map"), {}
    for name, file in weight_map.items() if isinstance(weight_map, dict) else ():
        # By name, not by what it resolves to: a downloaded model's files may be symbolic links.
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file:
            raise ValueError(f"{path / INDEX} places {name} in {file!r}, no file name beside it")
        shards.setdefault(file, set()).add(name)
    absent = sorted(file for file in shards if not (path / file).is_file())
    if absent or not shards:
        said = f"names {_few(absent)}, not there" if absent else "has no weight_map"
        raise ValueError(f"{path / INDEX} {said}: it is not complete; {AGAIN}")
    return [(path / file, shards[file]) for file in sorted(shards)]


def load_views(
    reader: Reader,
    views: dict[str, Tensor | Rows],
    fused: dict[str, tuple[Tensor, int]] | None = None,
    *,
    ignore: tuple[str, ...] = (),
    known: set[str] | None = None,
    n_experts: int | None = None,
) -> None:
    """Copy a model's tensors from files into this rank's parameters, or copy nothing and say why.

    views: Hugging Face name -> destination of that shape, any float dtype (the file's is cast), or
        `Rows` of what is in the file. X may also stand there in MXFP4, X_blocks and X_scales.
    fused: name of a stack of all experts, (E, ...) in the file -> (destination (E_local, ...), its
        first expert). Read only where a view that lies inside the destination has no tensor of its
        own in the files, so that both spellings on disk fill the same memory.
    ignore: shell patterns of names that may be surplus ("lm_head.weight" when tied; "*.inv_freq").
    known: every name of the whole model, in each spelling it may have, for a rank that holds a
        part of it; without it, whatever this rank does not use is surplus.
    n_experts: the rows that a fused tensor, or one of `Rows`, must have; without it, at least those
        used. Such tensors are read expert by expert.

    Raises ValueError naming (the first few of, and how many) missing and surplus tensors and those
    of another shape or of an element type that is no plain float; MXFP4 of which a part is missing.
    """
    fused = fused or {}
    reader = Unpacked(reader, views.keys() | fused.keys() | (known or set()))
    missing = views.keys() - reader.names
    stacks = {  # only the fused tensors that stand in for something missing
        name: Rows(dest, first, tuple(dest.shape[1:]))
        for name, (dest, first) in fused.items()
        if name in reader.names and any(_inside(views[m], dest) for m in missing)
    }
    dests = [rows.tensor for rows in stacks.values()]
    missing = {m for m in missing if not any(_inside(views[m], dest) for dest in dests)}
    allowed = views.keys() | stacks.keys() | (known or set())
    surplus = [
        name
        for name in reader.names - allowed
        if not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    present = {name: view for name, view in views.items() if name in reader.names}
    stacks |= {name: view for name, view in present.items() if isinstance(view, Rows)}
    present = {name: view for name, view in present.items() if name not in stacks}
    wrong = _mismatches(reader, present, stacks, n_experts)
    if missing or surplus or wrong:
        parts = [("missing", missing), ("surplus", surplus), ("not as the model's", wrong)]
        said = "; ".join(f"{len(p)} {what}: {_few(p)}" for what, p in parts if p)
        raise ValueError(f"{reader.path} does not fit the model: {said}")
    for name, rows in stacks.items():
        for i, row in enumerate(rows.tensor.detach(), rows.first):
            row.copy_(reader.read(name, slice(i, i + 1)).reshape(row.shape))
    for name, view in present.items():
        view.detach().copy_(reader.read(name))


def _inside(view, dest):
    """Whether `view` lies in the memory of `dest`: dense views, maybe all of one flat buffer."""
    view = view.tensor if isinstance(view, Rows) else view
    if view.untyped_storage().data_ptr() != dest.untyped_storage().data_ptr():
        return False
    return 0 <= view.storage_offset() - dest.storage_offset() < dest.numel()


def _mismatches(reader, present, stacks, n_experts):
    wrong = []
    for name, view in present.items():
        if reader.shape(name) != tuple(view.shape):
            wrong.append(f"{name} {reader.shape(name)}, the model has {tuple(view.shape)}")
    for name, (tensor, first, shape) in stacks.items():
        held, *rest = reader.shape(name) or (0,)
        used = first + len(tensor)
        if rest != list(shape) or (held < used if n_experts is None else held != n_experts):
            wanted = (n_experts or used, *shape)
            wrong.append(f"{name} {reader.shape(name)}, the model has {wanted}")
    for name in present.keys() | stacks.keys():
        if reader.dtype(name) not in LOADABLE:
            wrong.append(f"{name} {reader.dtype(name)}, loadable are {', '.join(LOADABLE)}")
    return wrong


def _few(names, n=4):
    names = sorted(names, key=natural)
    return ", ".join(names[:n]) + (f" and {len(names) - n} more" if len(names) > n else "")


# ---------------------------------------------------------------- writing


def save_views(
    path: str | Path,
    views: dict[str, Tensor | Rows],
    config: dict,
    dtype: torch.dtype,
    shard_gib: float = SHARD_GIB,
    *,
    holders: list[dict[str, int | Piece]] | None = None,
    rank: int = 0,
) -> None:
    """Write a directory that transformers' from_pretrained loads: config, index, shards.

    views: this rank's Hugging Face name -> tensor or `Rows`, any strides and device. Floats are
        written as `dtype`, others as they are; one tensor at a time is brought to the CPU.
    holders: for a model spread over ranks, what `inventory(views, dtype)` gave on each of them, in
        rank order; rank 0 has called `create_shared` before any rank comes here. Every tensor is
        written by one of its holders into a file of its own rank, and `Rows` by theirs into files
        of all ranks; rank 0 writes the index, and nothing is sent. The layout depends on `holders`
        alone.

    Raises OSError. The directory is made where it is not there; its files are fsynced.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if holders is None:
        holders = [inventory(views, dtype)]
        create_shared(path, holders, shard_gib)
    own, shared = _files(holders, shard_gib)
    for file, (writer, names) in own.items():
        if writer == rank:
            write_tensors(path / file, {name: views[name] for name in names}, dtype)
    for file, tensors in shared.items():
        tensorfile.write_rows(path / file, tensors, views, dtype, rank)
    if rank == 0:
        sizes = {name: n for held in holders for name, n in held.items() if isinstance(n, int)}
        sizes |= {t.name: t.nbytes for tensors in shared.values() for t in tensors}
        weight_map = {name: file for file, (_, names) in own.items() for name in names}
        weight_map |= {t.name: file for file, tensors in shared.items() for t in tensors}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(path / INDEX, index)
        write_json(path / "config.json", config)


def create_shared(
    path: str | Path, holders: list[dict[str, int | Piece]], shard_gib: float = SHARD_GIB
) -> None:
    """Make the files that several ranks write `Rows` into; rank 0, once. Raises OSError."""
    for file, tensors in _files(holders, shard_gib)[1].items():
        tensorfile.create(Path(path) / file, tensors)


def _files(holders, shard_gib):
    """The files of one writer, name -> (rank, tensor names), and those that ranks share."""
    limit = int(shard_gib * 2**30)
    own, shared = plan_shards(holders, limit), tensorfile.plan_shared(holders, limit)
    n = len(own) + len(shared)
    files = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    return dict(zip(files, own)), dict(zip(files[len(own) :], shared))


def inventory(views: dict[str, Tensor | Rows], dtype: torch.dtype) -> dict[str, int | Piece]:
    """What the plan of the files needs of each view, when floats are written as `dtype`.

    The bytes that a tensor takes; a `Piece` for `Rows`.
    """
    return {
        name: tensorfile.piece(view, dtype)
        if isinstance(view, Rows)
        else view.numel() * file_dtype(view, dtype).itemsize
        for name, view in views.items()
    }


def plan_shards(holders: list[dict[str, int | Piece]], limit: int) -> list[tuple[int, list[str]]]:
    """Deal tensors to files of at most `limit` bytes (or one tensor): (writing rank, names) each.

    Each tensor goes to the holder with the fewest bytes so far, in natural order of names, so that
    replicas share the writing; a rank's files are numbered consecutively. Pieces are passed over.
    """
    held_by = {}
    for rank, held in enumerate(holders):
        for name in (name for name, size in held.items() if isinstance(size, int)):
            held_by.setdefault(name, []).append(rank)
    load, mine = [0] * len(holders), [[] for _ in holders]
    for name in sorted(held_by, key=natural):
        rank = min(held_by[name], key=load.__getitem__)
        load[rank] += holders[rank][name]
        mine[rank].append(name)
    shards = []
    for rank, names in enumerate(mine):
        room = -1
        for name in names:
            size = holders[rank][name]
            if room < size:
                shards.append((rank, []))
                room = limit
            shards[-1][1].append(name)
            room -= size
    return shards


def written_by(rank: int, holders: list[dict[str, int | Piece]]) -> list[str]:
    """The names that a rank writes, all or its rows, whatever the size of the files."""
    own, shared = plan_shards(holders, 1), tensorfile.plan_shared(holders, 1)
    names = [name for writer, names in own if writer == rank for name in names]
    return names + [t.name for file in shared for t in file if rank in t.writers.values()]


def write_json(path: str | Path, value: dict) -> None:
    """Write indented JSON and fsync it. Raises OSError."""
    with writing(path) as f:
        f.write((json.dumps(value, indent=2) + "\n").encode())


# ---------------------------------------------------------------- config.json, tokenizer


def read_json(path: str | Path) -> dict:
    """A JSON object from a file. Raises ValueError where it is not there or not one."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_config(source: str | Path | dict) -> dict:
    """A model's config with one spelling for what has several; other keys are kept.

    source: a model directory, a config.json or its content (not changed).
    `num_local_experts` becomes `num_experts`. `rope_parameters` becomes `rope_theta` and
    `rope_scaling`, which is None for plain RoPE and else has its kind under `rope_type`.

    Raises ValueError: no such file, not JSON, two spellings that disagree, a run's --out, a
    rope_scaling of no type.
    """
    if isinstance(source, dict):
        config = dict(source)
    else:
        path = Path(source)
        if steps := sorted(path.glob("step-*")):
            raise ValueError(f"{path} is a run's directory, not a model's: use {steps[-1]}")
        config = read_json(path / "config.json" if path.is_dir() else path)
    _unify(config, "num_experts", config.pop("num_local_experts", None))
    _unify(config, "rope_scaling", config.pop("rope_parameters", None))
    rope = dict(config.get("rope_scaling") or {})
    _unify(config, "rope_theta", rope.pop("rope_theta", None))
    _unify(rope, "rope_type", rope.pop("type", None))
    if rope and "rope_type" not in rope:
        raise ValueError(f"{source}: rope_scaling has no type: {rope}; say 'yarn' or 'default'")
    config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    return config


def _unify(config, key, other):
    if other is None:
        return
    if config.get(key) not in (None, other):
        raise ValueError(f"config has {key} {config[key]} and elsewhere {other}: keep one")
    config[key] = other


def check_sizes(
    config: dict, source: str | Path, counts: Iterable[str], numbers: Iterable[str] = ()
) -> None:
    """Raises ValueError naming the keys of `counts` that are missing or no integers from 1, and
    those of `numbers` that are given but no finite numbers above 0 (mscale…: from 0)."""
    if bad := [key for key in counts if type(config.get(key)) is not int or config[key] < 1]:
        said = ", ".join(f"{key} {config.get(key)!r}" for key in bad)
        raise ValueError(f"{source}: must be integers from 1: {said}")
    for key in numbers:
        value = config.get(key, 1.0)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{source}: {key} must be a number above 0, not {value!r}")
        if not value and not key.startswith("mscale"):
            raise ValueError(f"{source}: {key} must be above 0")


def expect_model_type(config: dict, source: str | Path, types: tuple[str, ...]) -> None:
    """Raise ValueError, naming `source`, unless the config's `model_type` is one of `types`."""
    kind, wanted = config.get("model_type"), " or ".join(types)
    if kind is None:
        raise ValueError(f"{source}: no model's config.json, it has no model_type ({wanted})")
    if kind not in types:
        raise ValueError(f"{source}: model_type is {kind!r}, this script takes {wanted}")


def tokenizer_files(folder: str | Path) -> list[Path]:
    """Which of the usual files of a tokenizer are in a directory (none where it is not there)."""
    paths = [Path(folder) / name for name in TOKENIZER_FILES]
    return [path for path in paths if path.is_file()]
