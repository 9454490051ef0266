"""mlc-ai/pith-train: its own pretraining task, from a checkout, in bf16 with AdamW.

Set up and stepped by its `pithtrain.tasks.pretrain_lm` as its benchmarks do (`benchmark = True`:
every expert gets the same load, round-robin), one process, on tokens drawn at random. DualPipeV
cuts a model in two chunks on one rank too. Its AdamW is torch's default one over FSDP2's fp32
parameters, its balance loss is off.

It needs torch, Triton, transformers, zstandard and flash-attn-4 (4.0.0b20, with quack-kernels 0.5.3
and nvidia-cutlass-dsl-libs-cu13 4.6.0.dev0; without nvidia-cutlass-dsl-libs-base). It also imports
deep_gemm (for FP8), fla (for Qwen3.5) and wandb; this path calls none of them, so where one is
absent an empty module stands in for it, which the result's note names.

Its own step line stops its clock before the device is done (0.92 s of 1.32 on an H200), and its GB
are GiB. Written against commit 889a408 (0.1.3); run on an H200 with the Qwen3 widths, the other
two on a CPU up to its demand for CUDA.
"""

import gc
import importlib.util
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np

from bench.peers.job import Clock, Job, one_rank, read, report, rope_theta, source_version

# Imported by it and not called here: package → the names that its `from ... import` asks for.
UNUSED = {
    "deep_gemm": {},
    "fla": {
        "fla.ops.gated_delta_rule.chunk": (
            "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd",
        ),
        "fla.ops.common.chunk_o": (),
    },
    "wandb": {"wandb.sdk.wandb_run": ("Run",)},
}  # fmt: skip


def stand_in() -> list[str]:
    """Empty modules in place of absent packages that are imported only; returns their names."""
    absent = [name for name in UNUSED if importlib.util.find_spec(name) is None]
    for package in absent:
        for path, names in ({package: ()} | UNUSED[package]).items():
            parts = path.split(".")
            for depth in range(1, len(parts) + 1):
                name = ".".join(parts[:depth])
                module = sys.modules.setdefault(name, types.ModuleType(name))
                module.__spec__ = ModuleSpec(name, None)  # else find_spec() fails on it
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], module)
            for name in names:
                setattr(sys.modules[path], name, type(name, (), {}))
    return absent


def model_config(job: Job) -> dict:
    """job.model as its models read it: type and base are keys of rope_scaling."""
    config = dict(job.model)
    if config["model_type"] in ("deepseek_v2", "gpt_oss"):
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        config["rope_scaling"] = scaling | {"rope_theta": rope_theta(config)}
    return config


def write_inputs(job: Job, folder: Path) -> tuple[Path, Path]:
    """The model's config and random tokens in its packed format: (config.json, data directory)."""
    data = folder / "tokens"
    data.mkdir(parents=True, exist_ok=True)
    samples = (job.warmup + job.steps) * job.global_batch
    generator = np.random.default_rng(0)
    tokens = generator.integers(
        0, job.model["vocab_size"], samples * job.seq_len + 1, dtype=np.int32
    )
    with open(data / "random.bin", "wb") as file:  # np.save(path) would append .npy
        np.save(file, tokens)
    config = folder / "model.json"
    config.write_text(json.dumps(model_config(job)))
    return config, data


def configure(job: Job, cfg, training_module) -> None:
    """Fill its PretrainLMCfg."""
    t = cfg.training
    t.model, t.dataset = write_inputs(job, Path(job.out).absolute() / "pith-train")
    t.optimizer = training_module.make_adamw_optimizer
    t.scheduler = training_module.make_constant_scheduler
    t.lr, t.max_steps = 1e-4, job.warmup + job.steps
    t.micro_batch_size, t.global_batch_size = job.micro_batch, job.global_batch
    t.sequence_length, t.benchmark = job.seq_len, True


def main() -> None:
    job = read()
    sys.path.insert(0, job.checkout)
    one_rank()
    absent = stand_in()
    from pithtrain.modules import training as training_module
    from pithtrain.modules.distributed import setup_distributed
    from pithtrain.modules.logging import setup_logging
    from pithtrain.tasks import pretrain_lm

    cfg = pretrain_lm.PretrainLMCfg()
    configure(job, cfg, training_module)
    setup_logging(cfg)  # from here on as its launch()
    setup_distributed(cfg)
    training_module.setup_training(cfg)
    gc.disable()
    clock = Clock(job)
    clock.run(lambda step: pretrain_lm.train_step(cfg))
    project = Path(job.checkout, "pyproject.toml").read_text()
    version = project.split('version = "')[1].split('"')[0]
    note = f"empty in place of {', '.join(absent)}" if absent else ""
    report(clock, version=source_version(job.checkout, version), routing="balanced", note=note)


if __name__ == "__main__":
    main()
