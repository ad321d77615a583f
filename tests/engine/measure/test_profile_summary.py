"""The summary of profiled steps, by hand."""

from __future__ import annotations

from megalaunch.engine.measure.profile_summary import HOST, RecordedOperator, summarize

KERNELS = [
    RecordedOperator("nvjet_tst_128x256", 6000, 4, ((0, 3000), (3000, 6000))),
    RecordedOperator("flash_fwd_kernel", 2000, 2, ((6000, 8000),)),
    RecordedOperator("ncclDevKernel_AllGather", 2000, 2, ((5000, 7000),)),
]


def test_times_are_by_step_and_shares_of_what_was_recorded():
    lines = summarize(KERNELS, [0.008, 0.012], "steps 3 to 4 of rank 0 on cuda").splitlines()
    assert lines == [
        "steps 3 to 4 of rank 0 on cuda: 10.0 ms a step with the profiler",
        "",
        "the device computed or communicated for 40% of the time",
        "",
        " share    ms/step  calls/step  kind",
        " 60.0%       3.00           2  matmul",
        " 20.0%       1.00           1  attention",
        " 20.0%       1.00           1  communication",
        "",
        " share    ms/step  calls/step  operator",
        " 60.0%       3.00           2  nvjet_tst_128x256",
        " 20.0%       1.00           1  flash_fwd_kernel",
        " 20.0%       1.00           1  ncclDevKernel_AllGather",
    ]


def test_it_fits_on_one_screen():
    many = [RecordedOperator(f"{'x' * 90}{number}", number, 1) for number in range(100)]
    lines = summarize(many, [0.1], "title").splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 110
    assert lines[-1].endswith("...")


def test_kinds_are_found_by_name():
    kinds = {
        "aten::mm": "matmul",
        "aten::_grouped_mm": "matmul",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
        "c10d::allreduce_": "communication",
        "aten::_fused_adamw_": "optimizer",
        "aten::copy_": "copies",
        "aten::silu": "other",
        HOST: "host",
    }
    assert {name: RecordedOperator(name, 1, 1).kind for name in kinds} == kinds
