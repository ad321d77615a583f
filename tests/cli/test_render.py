from made_specs import resolved

from megalaunch.plan.findings import Finding
from megalaunch.plan.report import findings_text, run_table
from megalaunch.plan.topology import Topology


def test_the_table_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec, _ = resolved("recipe=quickstart", "batch.micro_batch_size=2", "batch.sequence_length=256", "train.steps=650")
    assert run_table(spec, Topology.from_spec(spec), train_tokens=2_662_400).splitlines() == [
        "  model      quickstart: 5,048,576 parameters, 4 layers, hidden 256, 4 heads in 2 groups, vocabulary 4,096",
        "  layout     1 x 2 cpu: dp 2, data sharding optim",
        "  precision  fp32, gradients reduced in fp32",
        "  batch      8 = micro 2 x dp 2 x 2 microbatches; sequence 256; 2,048 tokens per step",
        "  length     650 steps, 1,331,200 tokens (0.50 epochs of 2,662,400)",
        "  data       python-stdlib",
        "  run        runs/quickstart",
    ]


def test_both_grids_of_a_mixture_of_experts():
    text = run_table(*_resolved_run("recipe=deepseek_tiny", "data.mock=true", "parallel=ep2tp2dp2pp2"))
    assert "1 x 8 cpu: dp 2 x pp 2 x tp 2; experts edp 2 x ep 2, data sharding optim" in text


def test_replicas_of_hybrid_sharding():
    text = run_table(*_resolved_run("recipe=tiny", "data.mock=true", "parallel=hsdp2zero3", "parallel.dp=4"))
    assert "1 x 4 cpu: dp 4, data sharding optim_grads_params in each of 2 replicas\n" in text
    assert "replicas" not in run_table(
        *_resolved_run("recipe=tiny", "data.mock=true", "parallel=zero0", "parallel.dp=4")
    )


def test_the_table_before_the_vocabulary_is_known():
    spec, _ = resolved("recipe=tiny", "data.train_prefix=x")
    text = run_table(spec, Topology.from_spec(spec))
    assert "tiny: 2 layers" in text
    assert "vocabulary open until the tokenizer is given" in text
    assert "data       x" in text
    assert "data       mock tokens" in run_table(*_resolved_run("recipe=tiny"))
    assert "data       a, b" in run_table(*_resolved_run("recipe=tiny", "data.blend=[a,b]"))


def _resolved_run(*words):
    spec, _ = resolved(*words)
    return spec, Topology.from_spec(spec)


def test_findings_as_text():
    found = [
        Finding("parallel.x", "error", "parallel.tp", "too much", {}, ("parallel.tp=1", "a=1 b=2"), "command line"),
        Finding("y", "warning", "z", "hm"),
        Finding("derived", "note", "parallel.dp", "2 (because)"),
    ]
    assert findings_text(found, {"dp": 2000}) == (
        "error: parallel.tp  [parallel.x]\n  too much\n  from: command line\n"
        "  fix:  parallel.tp=1   or   a=1 b=2\n  why:  megalaunch explain parallel.x\n\n"
        "warning: z  [y]\n  hm\n  why:  megalaunch explain y\n\n"
        "notes\n  parallel.dp = 2 (because)\n\nderived\n  dp  2,000\n\n1 error, 1 warning"
    )
    assert findings_text([]) == "valid"
    stages = findings_text([], {"layers_per_stage": [15, *[16] * 6, 1500]})
    assert "layers_per_stage  15, 6 x 16, 1,500" in stages
