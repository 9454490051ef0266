"""torchtitan: its Trainer through its own main(), from a checkout of v0.2.2.

That is the newest release that imports with torch 2.11; it needs torchdata, datasets, tokenizers,
tyro, tomli, tensorboard, einops and pillow. Flavors have no flag for the number of layers, so one
named "bench" is derived from its own of the same widths and put beside them; the rest is said by
flags: bf16 compute over fp32 parameters, fused AdamW, torch.compile, no activation
checkpointing, round-robin routing (`debug.moe_force_load_balance`), its test tokenizer and text,
of which only the vocabulary's first 2,048 words occur. Steps are timed around Trainer.train_step.

Tried on a CPU: the flags with its own parser, the rest against a stand-in of its API; on a GPU not
yet. GPT-OSS's flex attention and DeepSeek's ("16B" has flex, block-causal) are its own choice.
"""

import dataclasses
import importlib
import os
import sys
from pathlib import Path

from bench.peers.job import Clock, Job, one_rank, read, report, source_version

# model_type → its model, its flavor of the same widths, the dict of flavors in the model's package.
FLAVORS = {
    "qwen3_moe": ("qwen3", "30B-A3B", "qwen3_args"),
    "deepseek_v2": ("deepseek_v3", "16B", "deepseekv3_args"),
    "gpt_oss": ("gpt_oss", "20b", "gptoss_configs"),
}
# Its name → Hugging Face's, for the check that the flavor has the job's widths.
WIDTHS = {
    "dim": ("hidden_size",),
    "vocab_size": ("vocab_size",),
    "n_heads": ("num_attention_heads",),
    "moe_inter_dim": ("moe_intermediate_size", "intermediate_size"),
}
EXPERTS = {
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok",),
}


def flavor(job: Job, base):
    """A torchtitan model-args object of the job's depth. Raises ValueError if widths differ."""
    for names, args in ((WIDTHS, base), (EXPERTS, base.moe_args)):
        for name, keys in names.items():
            wanted = next(job.model[key] for key in keys if key in job.model)
            if getattr(args, name) != wanted:
                raise ValueError(f"torchtitan: {name} is {getattr(args, name)}, not {wanted}")
    # GPT-OSS takes nothing of the sort from its flags.
    moe = dataclasses.replace(base.moe_args, _debug_force_load_balance=True)
    return dataclasses.replace(base, n_layers=job.layers, moe_args=moe)


def flags(job: Job) -> list[str]:
    """Its command line, after the program's name."""
    model = FLAVORS[job.model["model_type"]][0]
    out = Path(job.out).absolute() / "torchtitan"
    values = {
        "job.dump_folder": out, "model.name": model, "model.flavor": "bench",
        "model.hf_assets_path": "./tests/assets/tokenizer", "training.dataset": "c4_test",
        "training.local_batch_size": job.micro_batch, "training.seq_len": job.seq_len,
        "training.global_batch_size": job.global_batch,
        "training.steps": job.warmup + job.steps, "optimizer.lr": 1e-4,
        "lr_scheduler.warmup_steps": 1, "metrics.log_freq": 10**6,
        "activation_checkpoint.mode": "none", "comm.train_timeout_seconds": 600,
    }  # fmt: skip
    switches = ["--debug.moe_force_load_balance"] + ["--compile.enable"] * job.compile
    values = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    return values + switches + list(job.extra)


def main() -> None:
    job = read()
    if job.model["model_type"] not in FLAVORS:
        raise ValueError(f"torchtitan has no flavor for {job.model['model_type']}")
    one_rank()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as its run_train.sh
    sys.path.insert(0, job.checkout)
    os.chdir(job.checkout)  # its assets are found from there
    import torchtitan.train

    name, base, table = FLAVORS[job.model["model_type"]]
    flavors = getattr(importlib.import_module(f"torchtitan.models.{name}"), table)
    flavors["bench"] = flavor(job, flavors[base])
    clock = Clock(job)

    class Timed(torchtitan.train.Trainer):
        def train_step(self, *args):
            return clock.step(super().train_step, *args)

    sys.argv[1:] = flags(job)
    torchtitan.train.main(Timed)
    version_file = Path(job.checkout, "assets", "version.txt")
    version = version_file.read_text().strip() if version_file.exists() else ""
    version = source_version(job.checkout, version)
    report(clock, version=version, routing="balanced", note=" ".join(job.extra))


if __name__ == "__main__":
    main()
