"""transformers: its model class, trained by a plain loop with gradient accumulation.

What is measured: bf16 weights and activations; gradients accumulate in bf16 over the micro-batches
(ours are fp32: this is in its favour); fp32 master weights and moments, updated by the fused AdamW
and copied back; the global gradient norm clipped at 1. The loss is the sum over the step's tokens
divided by their number, from whole fp32 logits. Experts run as its grouped products
(`experts_implementation="grouped_mm"`), attention through sdpa; GPT-OSS has no sdpa, so
flex_attention on a GPU and eager on a CPU. Every decoder layer and the loss are compiled. Routing:
the experts' ids are replaced by K distinct uniform ones; the weights stay those of the router's own
choice, so that the router has its gradient. The balance loss is left out. With fp32 the weights are
their own masters.

Run on an H200 with 5.17 and the Qwen3 widths, on a CPU with 5.24 and all three, fp32 eager and bf16
compiled (no graph breaks, one graph a kind of layer); GPT-OSS's flex_attention not yet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers.job import Clock, Job, device, read, report


def attention_of(job: Job, where: torch.device) -> str:
    """The fastest of its attention implementations that needs no other package."""
    if job.model["model_type"] != "gpt_oss":
        return "sdpa"
    return "flex_attention" if where.type == "cuda" else "eager"


def force_random(module: nn.Module, args, output: tuple) -> tuple[Tensor, Tensor, Tensor]:
    """Forward hook of a router, (logits (N, E), weights (N, K), ids (N, K)): ids are replaced."""
    logits, weights, ids = output
    return logits, weights, torch.rand_like(logits, dtype=torch.float32).topk(ids.shape[1])[1]


def build(job: Job, where: torch.device) -> nn.Module:
    """The causal language model of job.model, initialised by transformers, routers hooked."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in job.model.items() if k not in ("architectures", "torch_dtype")}
    config = AutoConfig.for_model(**values, use_cache=False)
    dtype = torch.bfloat16 if job.dtype == "bf16" else torch.float32
    with where:  # weights are made where they stay
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_of(job, where),
            experts_implementation="grouped_mm",
        )  # fmt: skip
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    if not routers:
        raise ValueError(f"transformers: no router found in {type(model).__name__}")
    for router in routers:
        router.register_forward_hook(force_random)
    if job.compile:
        for layer in model.model.layers:
            layer.compile()
    return model.to(where).train()


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum of the token losses in fp32; targets are the next tokens already."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


class Master:
    """fp32 masters of a model's parameters with the fused AdamW on them."""

    def __init__(self, model: nn.Module, lr: float = 1e-4):
        self.params = list(model.parameters())
        own = self.params[0].dtype == torch.float32
        self.masters = self.params if own else [p.detach().float() for p in self.params]
        self.adamw = torch.optim.AdamW(
            self.masters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update, copy back; gradients are gone afterwards."""
        torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        if self.masters is not self.params:
            for p, master in zip(self.params, self.masters):
                master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        self.adamw.step()
        self.adamw.zero_grad()
        if self.masters is not self.params:
            torch._foreach_copy_(self.params, self.masters)


def main() -> None:
    import transformers

    job, where = read(), device()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = build(job, where)
    optimizer = Master(model)
    loss_of = torch.compile(summed_loss) if job.compile else summed_loss
    rows = job.global_batch, job.seq_len + 1
    tokens = torch.randint(job.model["vocab_size"], rows, device=where)

    def step(number: int) -> None:
        for ids in tokens.split(job.micro_batch):
            logits = model(input_ids=ids[:, :-1]).logits
            (loss_of(logits, ids[:, 1:]) / job.tokens).backward()
        optimizer.step()

    clock = Clock(job)
    clock.run(step)
    note = f"{attention_of(job, where)}, grouped_mm, gradients in {job.dtype}"
    report(clock, version=transformers.__version__, routing="random", note=note)


if __name__ == "__main__":
    main()
