"""Megatron-LM: its pretrain_gpt.py as it is, from a checkout; its step lines are read.

bf16 with fp32 gradients and AdamW of its distributed optimizer, on one GPU; Transformer Engine's
layers and grouped products, mock data, routing from random logits
(`--moe-router-force-load-balancing`), no balance loss, rope without YaRN. `--megatron-args` of
bench.throughput appends flags, which win over these. Fusing the gradients' accumulation into the
products needs apex, so it is off unless apex is there. Steps are its own "elapsed time per
iteration"; the peak of memory is the whole run's, warm-up too.

Written against main of 2026-11 (core 0.20); known to run with Transformer Engine 2.17.1 and its FA4
backend. It needs Python 3.12. Tried on a CPU: the flags of the three models with its own parser,
reading its lines with a stand-in script; on a GPU not yet.
"""

import importlib.util
import io
import os
import re
import runpy
import sys

import torch

from bench.peers.job import Clock, Job, one_rank, read, report, rope_theta, source_version

ELAPSED = re.compile(r"iteration +(\d+)/ *\d+ \|.*elapsed time per iteration \(ms\): ([\d.]+)")


def attention_flags(model: dict) -> dict[str, object]:
    """Heads and positions: MLA, or grouped queries with what GPT-OSS adds."""
    if model["model_type"] == "deepseek_v2":
        return {
            "multi-latent-attention": True, "kv-lora-rank": model["kv_lora_rank"],
            "qk-head-dim": model["qk_nope_head_dim"], "v-head-dim": model["v_head_dim"],
            "qk-pos-emb-head-dim": model["qk_rope_head_dim"], "rope-type": "rope",
            "qk-layernorm": True, "disable-bias-linear": True, "swiglu": True,
        }  # fmt: skip
    flags = {
        "group-query-attention": True, "num-query-groups": model["num_key_value_heads"],
        "kv-channels": model["head_dim"],
    }  # fmt: skip
    if model["model_type"] == "qwen3_moe":
        return flags | {"qk-layernorm": True, "disable-bias-linear": True, "swiglu": True}
    window = ",".join(str(int(t == "sliding_attention")) for t in model["layer_types"])
    return flags | {
        "softmax-type": "learnable", "window-size": f"{model['sliding_window'] - 1},0",
        "window-attn-skip-freq": f"[{window}]", "quick-geglu": True, "glu-linear-offset": 1.0,
        "activation-func-clamp-value": model.get("swiglu_limit", 7.0),
    }  # fmt: skip


def expert_flags(job: Job) -> dict[str, object]:
    """Experts and routing; shared experts and dense first layers where the model has them."""
    model = job.model
    experts = next(
        model[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if k in model
    )
    width = model.get("moe_intermediate_size", model["intermediate_size"])
    flags = {
        "num-experts": experts, "moe-router-topk": model["num_experts_per_tok"],
        "moe-ffn-hidden-size": width, "moe-grouped-gemm": True, "moe-permute-fusion": True,
        "moe-token-dispatcher-type": "alltoall", "moe-router-load-balancing-type": "none",
        "moe-router-force-load-balancing": True, "moe-router-dtype": "fp32",
    }  # fmt: skip
    if model.get("n_shared_experts"):
        flags["moe-shared-expert-intermediate-size"] = model["n_shared_experts"] * width
        flags["moe-router-pre-softmax"] = True  # its top-k weights are not normalised
    if model.get("first_k_dense_replace"):
        dense = model["first_k_dense_replace"]
        flags["moe-layer-freq"] = f"[0]*{dense}+[1]*{job.layers - dense}"
    return flags


def flags(job: Job) -> list[str]:
    """Its command line, after the script's name."""
    model = job.model
    values = {
        "num-layers": job.layers, "hidden-size": model["hidden_size"],
        "ffn-hidden-size": model["intermediate_size"],
        "num-attention-heads": model["num_attention_heads"], "seq-length": job.seq_len,
        "max-position-embeddings": job.seq_len, "position-embedding-type": "rope",
        "rotary-base": int(rope_theta(model)),
        "normalization": "RMSNorm", "norm-epsilon": model["rms_norm_eps"],
        "untie-embeddings-and-output-weights": not model.get("tie_word_embeddings"),
        "attention-dropout": 0, "hidden-dropout": 0, "transformer-impl": "transformer_engine",
        "attention-backend": "auto", "cross-entropy-loss-fusion": True,
        "cross-entropy-fusion-impl": "te", "bf16": job.dtype == "bf16",
        "use-distributed-optimizer": True, "micro-batch-size": job.micro_batch,
        "global-batch-size": job.global_batch, "train-iters": job.warmup + job.steps,
        "lr": 1e-4, "lr-decay-style": "constant", "clip-grad": 1.0, "weight-decay": 0.1,
        "adam-beta2": 0.95, "mock-data": True, "tokenizer-type": "NullTokenizer",
        "vocab-size": model["vocab_size"], "make-vocab-size-divisible-by": 1,
        "log-interval": 1, "eval-iters": 0, "manual-gc": True,
        "no-gradient-accumulation-fusion": importlib.util.find_spec("apex") is None,
    }  # fmt: skip
    values |= attention_flags(model) | expert_flags(job)
    words = []
    for name, value in values.items():
        if value is not False:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words + list(job.extra)


def step_times(lines: list[str], job: Job) -> list[float]:
    """Seconds of the timed steps, from its step lines. Raises ValueError if one is missing."""
    found = {int(m[1]): float(m[2]) / 1e3 for line in lines if (m := ELAPSED.search(line))}
    wanted = range(job.warmup + 1, job.warmup + job.steps + 1)
    missing = [step for step in wanted if step not in found]
    if missing:
        raise ValueError(f"Megatron-LM: no step line for steps {missing}")
    return [found[step] for step in wanted]


class Tee(io.TextIOBase):
    """Writes on, and keeps what was written."""

    def __init__(self, stream):
        self.stream, self.text = stream, []

    def write(self, text: str) -> int:
        self.text.append(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()


def main() -> None:
    job = read()
    one_rank()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    sys.path.insert(0, job.checkout)
    os.chdir(job.checkout)
    sys.argv = ["pretrain_gpt.py", *flags(job)]
    print(" ".join(sys.argv), flush=True)
    sys.stdout = tee = Tee(sys.stdout)
    try:
        runpy.run_path("pretrain_gpt.py", run_name="__main__")
    finally:
        sys.stdout = tee.stream
    clock = Clock(job)
    clock.step_s = step_times("".join(tee.text).splitlines(), job)
    if torch.cuda.is_available():
        clock.peak_gib = torch.cuda.max_memory_allocated() / 2**30
    from megatron.core.package_info import __version__ as version

    version = source_version(job.checkout, version)
    report(clock, version=version, routing="random", note=" ".join(job.extra))


if __name__ == "__main__":
    main()
