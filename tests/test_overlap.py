"""bench.overlap on traces made by hand, whose figures can be counted on one's fingers."""

import json

import pytest

from bench import overlap


def event(cat, name, ts, dur):
    return dict(ph="X", cat=cat, name=name, ts=ts, dur=dur)


SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
# Microseconds:   0    10   20   30   40   50   60   70   80   90   100
#   compute       [----------]    [---------]                   [----]     0-20, 30-50, 90-100
#    (a 2nd)           [-------]                                           10-25
#   SendRecv                [--------]    [--------]                       20-40, 45-65
#   AllReduce                                  [---------]                 60-80
# Compute 25 + 20 + 10 = 55. Alone: 25-30, 50-80 = 35. Idle: 80-90 = 10. SendRecv 40, of which
# 20-25, 30-40, 45-50 = 20 are hidden; AllReduce 20, none hidden.
EVENTS = [
    event("kernel", "gemm", 1000, 20),
    event("kernel", "triton_poi_fused_add_0", 1010, 15),
    event("kernel", SEND, 1020, 20),
    event("kernel", "gemm", 1030, 20),
    event("kernel", SEND, 1045, 20),
    event("kernel", REDUCE, 1060, 20),
    event("kernel", "gemm", 1090, 10),
    event("cuda_runtime", "cudaStreamSynchronize", 1005, 30),
    event("cuda_runtime", "cudaStreamSynchronize", 1055, 10),
    event("cuda_runtime", "cudaEventSynchronize", 1070, 5),
    event("cuda_runtime", "cudaLaunchKernel", 1002, 1),
    event("cuda_runtime", "cudaDeviceSynchronize", 1101, 50),  # the profiler's own
    event("cuda_runtime", "cudaDeviceSynchronize", 990, 5),  # before the first kernel
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1085, 2),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1083, 2),
    event("cpu_op", "nccl:all_reduce", 1000, 500),
    event("cpu_op", "cudaStreamSynchronize", 1005, 30),
    event("gpu_user_annotation", "nccl:all_reduce", 1000, 500),
    dict(ph="M", name="process_name", pid=1, args={}),
    dict(ph="i", name="Record Window End", ts=5000),
]


def write(path, events):
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_figures(tmp_path):
    o = overlap.analyse(overlap.read(write(tmp_path / "t.json", EVENTS)))
    assert (o.span_us, o.compute_us, o.alone_us, o.idle_us) == (100, 55, 35, 10)
    assert o.exchanges == {
        "SendRecv": overlap.Exchange(2, 40, 20),
        "AllReduce": overlap.Exchange(1, 20, 0),
    }
    assert o.waits == {
        "cudaStreamSynchronize": (2, 40),
        "cudaEventSynchronize": (1, 5),
        "Memcpy DtoH (Device -> Pageable)": (1, 2),
    }


def test_summary(tmp_path):
    path = write(tmp_path / "t.json", EVENTS)
    assert overlap.summary(path) == "hidden: AllReduce 0 %, SendRecv 50 %; host waits: 3"
    write(path, [event("kernel", "gemm", 0, 10)])
    assert overlap.summary(path) == "hidden: no exchanges; host waits: 0"
    assert overlap.summary(write(path, [])) == ""  # as on a CPU


def test_table(tmp_path, capsys):
    overlap.main([str(write(tmp_path / "t.json", EVENTS))])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "0.100 ms: compute 0.055, exchanges alone 0.035, idle 0.010"
    assert "| SendRecv | 2 | 0.040 | 50.0 % |" in out
    assert "| AllReduce | 1 | 0.020 | 0.0 % |" in out
    assert "| cudaStreamSynchronize | 2 | 0.040 |" in out


def test_two_of_a_kind_at_once():
    """Their time counts once, and so does what hides it, however many kernels do."""
    events = [event("kernel", SEND, 0, 10), event("kernel", SEND, 5, 10)]
    events += [event("kernel", name, 0, 12) for name in ("a", "b")]
    o = overlap.analyse(events)
    assert o.exchanges == {"SendRecv": overlap.Exchange(2, 15, 12)}
    assert (o.span_us, o.compute_us, o.alone_us, o.idle_us) == (15, 12, 3, 0)


def test_one_inside_another():
    events = [event("kernel", "a", 0, 10), event("kernel", "b", 2, 3)]
    assert overlap.analyse([*events, event("kernel", "NCCL_x", 6, 2)]) == overlap.Overlap(
        10, 10, 0, 0, {"NCCL_x": overlap.Exchange(1, 2, 2)}
    )


def test_no_exchange_or_nothing_else():
    o = overlap.analyse([event("kernel", "a", 3, 2)])
    assert (o.span_us, o.compute_us, o.exchanges) == (2, 2, {})
    o = overlap.analyse([event("kernel", SEND, 3, 2)])
    assert (o.compute_us, o.alone_us) == (0, 2) and o.exchanges["SendRecv"].hidden_us == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (SEND, "SendRecv"),
        (REDUCE, "AllReduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclArgs)", "ReduceScatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWork)", "AllGather"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkArgs)", "AllGather"),
        ("void NCCL_other<int>(char*)", "void NCCL_other<int>"),
    ],
)
def test_kinds(name, kind):
    assert overlap.kind(name) == kind


@pytest.mark.parametrize(
    "text", ["", "no", "[1]", "3", '{"a": 1}', '{"traceEvents": 1}', '{"traceEvents": [1]}', "\xff"]
)
def test_not_a_trace(text, tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as caught:
        overlap.main([str(path)])
    said = f"error: {path}: not a chrome trace, which is JSON with traceEvents"
    assert caught.value.code == said


def test_no_kernels_or_no_file(tmp_path):
    path = write(tmp_path / "t.json", EVENTS[7:])
    with pytest.raises(SystemExit) as caught:
        overlap.main([str(path)])
    assert caught.value.code == f"error: {path}: no GPU kernel in it; trace on a GPU"
    with pytest.raises(SystemExit, match=r"error: .*none.json: cannot be read \(No such file"):
        overlap.main([str(tmp_path / "none.json")])
