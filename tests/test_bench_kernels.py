"""bench.kernels and bench.memory as far as a CPU shows them: arguments, floors, rows, counts."""

import csv
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_qwen3_moe as qwen3
from bench import attention, experts, kernels, memory, parts, sweep
from bench.measure import COLUMNS, WIDTHS, Meter, Rates, Timed, Width, Work
from bench.results import check_columns

ROOT = Path(__file__).parents[1]
SMALL = Width(8, 32, 16, 2, 64, (4, 2), (8, 8))
RATES = Rates(1e12, 1e12)  # a FLOP or a byte each picosecond


@pytest.fixture
def meter(tmp_path):
    """Runs every call once and says 100 µs the first time, 300 the second, and so on."""
    said = []

    def timer(call):
        call()
        said.append(call)
        return Timed(100.0 if len(said) % 2 else 300.0)

    where = dict(date="d", commit="c", gpu="g", torch="2", triton="3")
    return Meter(RATES, tmp_path / "new" / "rows.csv", where, "cpu", timer)


# ------------------------------------------------------------------------------------------------
# Floors
# ------------------------------------------------------------------------------------------------


def test_floor_and_speed():
    rates = Rates(200e12, 4e12)
    assert Work(2e9, 1e6).floor_us(rates) == pytest.approx(10)
    assert Work(2e9, 80e6).floor_us(rates) == pytest.approx(20)
    assert Work().floor_us(rates) is None and Work().speed(1, rates) == ""
    assert Work(2e9, 1e6).speed(20, rates) == "100 TFLOP/s"
    assert Work(2e9, 80e6).speed(40, rates) == "2.00 TB/s"


def test_expert_work_by_hand():
    """E 2, D 3, F 5, K 2 and 7 tokens: 90 weights, 14 slots; h of 10 numbers a slot."""
    todo = experts.work(Width(2, 3, 5, 2, 0, (1, 1), (1, 1)), 7, 3)
    flops, rows = 2 * 14 * (2 * 3 * 5 + 3 * 5), 2 * 7 * 3
    assert todo["forward"] == (flops, 2 * 90 + 2 * rows + 2 * 140)
    assert todo["backward"] == (flops, 2 * 90 + 2 * rows + 2 * (140 + 140 + 70))
    assert todo["wgrad"] == (flops, 8 * 90 / 3 + 2 * rows + 2 * (140 + 70))
    assert todo["all"] == tuple(map(sum, zip(*(todo[k] for k in ("forward", "backward", "wgrad")))))


def test_steps_do_the_layers_products():
    case = experts.make(SMALL, 24, device="cpu")
    todo, whole = experts.step_work(case), experts.work(SMALL, 24)
    forward = todo["up"].flops + todo["down"].flops
    assert forward == whole["forward"].flops == 2 * 48 * 3 * 32 * 16
    assert todo["wgrad_up"].flops + todo["wgrad_down"].flops == whole["wgrad"].flops
    assert todo["down_backward"].flops + todo["up_backward"].flops == whole["backward"].flops


@pytest.mark.parametrize("T, window", [(5, None), (5, 1), (6, 4), (3, 9)])
def test_visible_pairs(T, window):
    q, k = torch.arange(T)[:, None], torch.arange(T)
    seen = (k <= q) & (q - k < (window or T))
    assert attention.pairs(T, window) == int(seen.sum())


def test_attention_and_router_work():
    """The usual 4 and 10 · T² / 2 · H · C, a little more for the diagonal."""
    forward, backward = attention.work(WIDTHS["qwen3"], 4096, None)
    usual = 4 * 4096**2 / 2 * 32 * 128
    assert forward.flops == pytest.approx(usual, rel=1e-3)
    assert backward.flops == pytest.approx(2.5 * usual, rel=1e-3)
    assert forward.nbytes == 2 * 4096 * 128 * (32 + 4 + 4 + 32) + 4 * 4096 * 32
    assert [w.flops for w in parts.router_work(2, 3, 5)] == [60, 120]
    assert [w.flops for w in parts.loss_work(2, 3, 5)] == [60, 180]


# ------------------------------------------------------------------------------------------------
# Rows
# ------------------------------------------------------------------------------------------------


def test_rows_of_a_file(meter, capsys):
    meter.compare("a", "2x3", lambda: 0, lambda: 0, Work(50e6), "n", per=2)
    meter.compare("b", "s", lambda: 0)
    with open(meter.results, newline="") as file:
        header, first, second = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert first == [*"dcg23", "a", "2x3", "50.00", "50.00", "1", "150.00", "n"]
    assert second == [*"dcg23", "b", "s", "100.00", "", "", "", ""]
    check_columns(meter.results, COLUMNS)
    line = capsys.readouterr().out.splitlines()[0]
    assert "1 TFLOP/s" in line and "floor     50.0 x 1.00" in line and "150.0 x 3.00" in line


def test_a_second_pass_is_what_both_take_over_the_first(meter):
    calls = (lambda: 0, lambda: 0)
    meter.passes("k", "s", calls, calls, (Work(1e6), Work(2e6)))
    rows = [(r["kernel"], r["us"], r["floor_us"], r["torch_us"]) for r in meter.rows]
    assert rows == [("k forward", 100, 1, 100), ("k backward", 200, 2, 200)]


def test_what_fails_leaves_the_rest(meter, capsys):
    def broken():
        raise RuntimeError("no such shape")

    meter.compare("a", "s", broken)
    meter.compare("b", "s", lambda: 0, broken)
    meter.passes("c", "s", (lambda: 0, broken), (broken, broken), (Work(), Work()))
    assert [r["kernel"] for r in meter.rows] == ["b", "c forward"]
    assert meter.failed == ["a s", "c s"] and meter.rows[0]["torch_us"] is None
    assert "a s: FAILED RuntimeError: 'no such shape'" in capsys.readouterr().out
    with pytest.raises(RuntimeError):  # a broken device: the process is of no use any more
        meter.time(lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: illegal")), "d")


def test_variants_put_constants_back(meter):
    kept, seen = parts.loss_kernels.ROWS, []
    call = lambda: seen.append(parts.loss_kernels.ROWS)
    meter.variants("a", "s", parts.loss_kernels, ("ROWS",), [(7,), (9,)], call)
    assert seen == [7, 9] and parts.loss_kernels.ROWS == kept
    assert [r["note"] for r in meter.rows] == ["ROWS 7", "ROWS 9"]
    meter.until = 0
    meter.variants("a", "s", parts.loss_kernels, ("ROWS",), [(7,)], call)
    assert len(seen) == 2


def test_other_columns_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("date,commit\n")
    with pytest.raises(ValueError, match="its columns are others"):
        check_columns(tmp_path / "a.csv", COLUMNS)
    check_columns(tmp_path / "none" / "b.csv", COLUMNS)


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def references(monkeypatch):
    """What needs a GPU in its place: the references, and few weights."""
    monkeypatch.setattr(experts, "_TritonExpertMLP", experts._ExpertMLP)
    monkeypatch.setattr(experts, "steps", lambda *args: None)  # in the interpreter, below
    monkeypatch.setattr(parts, "fused_choices", parts.dispatch.spread_choices_ref)
    monkeypatch.setattr(parts, "ELEMENTS", 1000)
    sdpa = attention.torch_alternative  # flex_attention has no backward on a CPU
    alternative = lambda T, window, scale, device: sdpa(T, None, scale, device)
    monkeypatch.setattr(attention, "torch_alternative", alternative)


KERNELS = dict(
    experts=22, loss=2, embedding=3, adamw=3, plan=2, router=2, attention=2,
)  # fmt: skip


@pytest.mark.parametrize("part", KERNELS)
def test_every_part_gives_its_rows(meter, references, part):
    kernels.PARTS[part](meter, "small", SMALL, [24], False)
    assert not meter.failed and len(meter.rows) == KERNELS[part]
    assert all(r["us"] > 0 and r["floor_us"] > 0 and r["torch_us"] > 0 for r in meter.rows)


def test_other_blocks_and_other_widths(meter, references):
    for part in ("loss", "embedding", "adamw"):
        kernels.PARTS[part](meter, "small", SMALL, [24], True)
    tried = len(parts.LOSS_BLOCKS) + len(parts.LOSS_CHUNKS) + 3 * len(parts.EMBEDDING_BLOCKS)
    tried += len(parts.NORM_BLOCKS) + 2 * len(parts.ADAMW_BLOCKS)
    assert len(meter.rows) == 8 + tried and not meter.failed
    sinks = SMALL._replace(gpt_oss=True)
    attention.rows(meter, "small", sinks, [24], False)
    assert [r["kernel"] for r in meter.rows[-2:]] == [
        "attention, window 128, forward", "attention, window 128, backward"]  # fmt: skip
    experts.rows(meter, "small", sinks, [24], False)
    assert not meter.failed


def test_routing():
    gen = torch.Generator().manual_seed(0)
    ids = experts.choices(SMALL, 16, "balanced", gen)
    assert ids[3].tolist() == [3, 7] and (ids.flatten().bincount() == 4).all()
    counts = experts.choices(SMALL, 64, "random", gen).flatten().bincount(minlength=8)
    assert counts[4] == 0 and (counts > 0).sum() == 7


def test_weight_gradients_of_several_are_the_sum(references):
    """What `together` adds is what each micro-batch adds alone; with router and plan too."""
    ours, _ = experts.paths()
    cases = [experts.make(SMALL, 24, device="cpu")]
    cases.append(experts.make(SMALL, 24, "random", "cpu", cases[0].parameters, 1))
    grad = cases[0].gate_up.main_grad
    for one in (experts.through, experts.routed):
        sums = []
        for part in (cases, cases[:1], cases[1:]):
            grad.zero_()
            experts.together(part, ours, one)
            sums.append(grad.clone())
        assert sums[1].abs().max() > 0
        torch.testing.assert_close(sums[0], sums[1] + sums[2])  # fp32 sums


@pytest.mark.triton
def test_steps_in_the_interpreter(meter):
    """Each kernel alone, called as it is now; the layer's path is the fused one."""
    meter.device = "cuda" if torch.cuda.is_available() else "cpu"
    case = experts.make(SMALL._replace(E=4), 24, device=meter.device)
    assert "same bits" in experts.check(case)
    experts.steps(meter, case, "small")
    assert not meter.failed and len(meter.rows) == 9
    names = set(experts.step_work(case)) - {"sum_slots"}
    assert names == set(experts.kernels(experts.operands(case))) == set(sweep.candidates())


# ------------------------------------------------------------------------------------------------
# Command
# ------------------------------------------------------------------------------------------------


def test_jobs():
    jobs = lambda text: kernels.jobs_of(kernels.parse(text.split()))
    every = list(WIDTHS)
    assert jobs("") == jobs("all") and len(jobs("")) == 9
    two = ["qwen3", "gpt-oss"]
    each = [("experts", [width]) for width in two]
    assert jobs("router experts --width qwen3 gpt-oss") == [*each, ("router", two)]
    assert jobs("adamw") == [("adamw", ["qwen3"])] and jobs("plan") == [("plan", every)]


def test_a_process_gets_one_job():
    args = kernels.parse("all --configs --tokens 64 128 --results r.csv --limit-s 77".split())
    for job in kernels.jobs_of(args):
        own = kernels.parse(kernels.command_of(job, args, RATES, "abc"))
        assert kernels.jobs_of(own) == [job] and Rates(*own.rates) == RATES
        for name in ("configs", "tokens", "results", "limit_s"):
            assert getattr(own, name) == getattr(args, name)
        assert own.commit == "abc"


@pytest.mark.parametrize("text, said", [
    ("--tokens 0", "--tokens 0: must be above 0"), ("--limit-s 1", "--limit-s 1: must be"),
    ("--results README.md", "its columns are others"), ("", "needs a CUDA device"),
])  # fmt: skip
def test_mistakes_are_one_line(text, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=said) as stop:
        kernels.main(text.split())
    assert str(stop.value).count("\n") == 0


def test_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit):
        kernels.parse(["nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_a_width_that_fails_does_not_stop_the_next(meter, monkeypatch, capsys):
    def part(meter, name, width, tokens, configs):
        if name == "qwen3":
            raise RuntimeError("too large")
        meter.add("k", name, 1.0)

    monkeypatch.setitem(kernels.PARTS, "router", part)
    kernels.run(("router", ["qwen3", "deepseek"]), kernels.parse([]), meter)
    assert meter.failed == ["router qwen3"] and [r["shape"] for r in meter.rows] == ["deepseek"]
    assert "router qwen3: FAILED RuntimeError: too large" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# Activation memory
# ------------------------------------------------------------------------------------------------


def test_minimum_by_hand():
    terms = memory.by_hand(qwen3.Model())
    assert terms == {
        "x, h, normed x, rows": 4 * 4096, "q, k, v, out": 2 * 128 * (32 + 4 + 4 + 32),
        "lse, router": 4 * (32 + 128), "choices": 96, "plan": 8 * (8 + 8 + 8 + 4),
        "pre-activation": 8 * 2 * 1536,
    }  # fmt: skip
    deepseek = memory.by_hand(importlib.import_module("train_deepseek_v2_lite").Model())
    assert deepseek["latent"] == 2 * (512 + 512 + 64) and deepseek["shared"] == 2 * 2 * 2816
    assert deepseek["q, k, v, out"] == 2 * 16 * (192 + 192 + 128 + 128)
    gpt = memory.by_hand(importlib.import_module("train_gpt_oss").Model())
    assert gpt["pre-activation"] == 4 * 2 * 2 * 2880 and "shared" not in gpt


def test_counted_is_the_minimum_and_little_more():
    """Beyond it at most q and k before rope and norms, each norm's scale, and the routing weights
    again in the slots' order; what grows with width, experts and choices is the minimum's."""
    tiny, hand = qwen3.TINY, lambda model: sum(memory.by_hand(model).values())
    heads = tiny.num_attention_heads + tiny.num_key_value_heads
    base = memory.counted(qwen3, tiny, 0)
    beyond = 2 * tiny.head_dim * heads + 4 * (heads + 2) + 4 * 2
    assert 0 <= base - hand(tiny) <= beyond
    change = dict(moe_intermediate_size=128, num_experts=16, num_experts_per_tok=4)
    more = dataclasses.replace(tiny, **change)
    grown = memory.counted(qwen3, more, 0) - base
    assert 0 <= grown - (hand(more) - hand(tiny)) <= 4 * 2


def test_memory_command(capsys):
    memory.main(["train_gpt_oss", "--preset", "tiny"])
    assert "times" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--preset no: train_gpt_oss has tiny"):
        memory.main(["train_gpt_oss", "--preset", "no"])


@pytest.mark.gpu
def test_first_backward_of_a_process():
    """Autograd's thread has no CUDA context until it launches something; descriptors want one."""
    code = """if 1:
        import torch
        from bench import experts
        case = experts.make(experts.Width(8, 64, 64, 2, 64, (1, 1), (8, 8)), 64)
        experts.together([case], experts.paths()[0])
        torch.cuda.synchronize()
        assert case.gate_up.main_grad.abs().max() > 0"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
