import re

import pytest
from slow_cases import slow_but

from megalaunch.config.compose import Composer, compose
from megalaunch.config.errors import ConfigError
from megalaunch.config.keys import schema_defaults, schema_keys
from megalaunch.schema import build_run_spec, spec_to_dict
from megalaunch.schema.paths import entry_at


def problems(*overrides, compose=compose):
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return {problem.path: problem for problem in caught.value.problems}


def test_a_recipe_beats_options_which_beat_defaults():
    composition = compose(["recipe=llama3_8b"])
    spec = composition.spec
    assert (spec.model.num_layers, spec.parallel.cp, spec.platform.chip) == (32, 2, "h100")
    assert spec.parallel.data_sharding == "optim_grads_params"
    assert spec.optimizer.lr == 3e-4
    assert spec.optimizer.beta2 == 0.95
    assert composition.choices["recipe"] == "llama3_8b"
    assert composition.choices["parallel"] == "cp2zero3"
    assert composition.overrides == ("recipe=llama3_8b",)


def test_the_order_of_overrides_does_not_matter():
    one = compose(["recipe=llama3_8b", "parallel=tp4pp4", "train.steps=7"])
    other = compose(["train.steps=7", "parallel=tp4pp4", "recipe=llama3_8b"])
    assert one.spec == other.spec
    assert (one.spec.parallel.tp, one.spec.parallel.pp, one.spec.parallel.cp) == (4, 4, 1)


def test_a_typed_option_replaces_the_recipes_option_whole():
    assert compose(["recipe=llama3_8b", "parallel=tp2"]).spec.parallel.data_sharding == "optim"


def test_typed_values_beat_typed_options_in_any_order_and_the_last_value_wins():
    for overrides in (["parallel.tp=2", "parallel=tp4pp4"], ["parallel=tp4pp4", "parallel.tp=8", "parallel.tp=2"]):
        spec = compose(["recipe=llama3_8b", *overrides]).spec
        assert (spec.parallel.tp, spec.parallel.pp) == (2, 4)


def test_composing_again_starts_from_nothing():
    first = compose(["recipe=quickstart"]).spec
    compose(["recipe=llama3_8b", "parallel=tp4pp4", "optimizer.lr=1"])
    assert compose(["recipe=quickstart"]).spec == first


def test_where_values_come_from():
    origins = compose(["recipe=llama3_8b", "parallel=tp4pp4", "train.steps=7"]).origins
    assert (origins["train.steps"].kind, origins["train.steps"].where) == ("command line", "command line")
    assert (origins["parallel.tp"].kind, origins["parallel.tp"].where) == ("group", "parallel=tp4pp4")
    assert origins["optimizer.lr"].kind == "recipe"
    assert origins["optimizer.lr"].where.endswith("llama3_8b.yaml:15:3")
    assert origins["model.num_layers"].where.endswith("conf/model/llama3_8b.yaml:4:1")
    assert origins["model.num_layers"].where.startswith("model=llama3_8b, ")
    assert (origins["parallel.cp"].kind, origins["train.seed"].kind) == ("default", "default")
    assert origins["parallel.dp"].open
    assert not origins["parallel.tp"].open
    assert set(origins) == set(schema_keys())


def test_an_open_value_is_open_wherever_it_was_given():
    origins = compose(["recipe=quickstart", "parallel.dp=2"]).origins
    assert origins["batch.micro_batch_size"].open  # null in the recipe
    assert not origins["parallel.dp"].open


def test_all_problems_come_at_once_with_their_places():
    found = problems("recipe=tiny", "train.lrr=3", "train.steps=abc", "optimiser.lr=1", "model=tinny", "batch.x=1")
    assert found["train.lrr"].message == "unknown key; did you mean 'optimizer.lr'?"
    assert found["optimiser.lr"].message == "unknown key; did you mean 'optimizer.lr'?"
    assert found["train.steps"].message == "must be an integer, got 'abc' (str)"
    assert found["model"].message.startswith("there is no model=tinny; did you mean 'tiny'?")
    assert "batch.x" in found
    assert len(found) == 5
    assert {problem.where for problem in found.values()} == {"command line"}


REFUSED = [
    ("++train.foo=3", "train.foo", "unknown key"),
    ("+junk.a=1", "junk.a", "unknown key"),
    ("+++train.steps=3", "train.steps", "begins with \\+\\+\\+; Hydra knows"),
    ("~train.stepz", "train.stepz", "did you mean 'train.steps'"),
    ("+parallel@model=tp3x", "parallel@model", "has no option 'tp3x'"),
    ("paralel=tp2", "paralel", "unknown key; did you mean 'parallel'"),
    ("prallel.tp=2", "prallel.tp", "did you mean 'parallel.tp'"),
    ("lr=1", "lr", "did you mean 'optimizer.lr'"),
    ("checkpoint.save_every=1", "checkpoint.save_every", "did you mean 'checkpoint.interval'"),
    ("data.multiple_validation_sets=1", "data.multiple_validation_sets", "named in data.validation_sets"),
    ("train=5", "train", "is a section; set one of its keys, e.g. train.steps"),
    ("recipe/x=5", "recipe/x", "GROUP=OPTION or SECTION.KEY=VALUE"),
    ("model@foo=tiny", "model@foo", r"add it: \+model@foo=tiny"),
    ("tiny", "tiny", r"is not of the form KEY=VALUE; did you mean recipe=tiny\?"),
    ("llama3_70b", "llama3_70b", r"did you mean recipe=llama3_70b\?"),
    ("gpt3_13b", "gpt3_13b", r"did you mean model=gpt3_13b\?"),  # there is no such recipe
    ("quikstart", "quikstart", r"did you mean recipe=quickstart\?"),
    ("mine.yaml", "mine.yaml", r"did you mean recipe=mine.yaml\?"),
    ("tp2pp2", "tp2pp2", r"did you mean parallel=tp2pp2\?"),
    ("help", "help", "write --help"),
    (
        "tensor_model_parallel_size=4",
        "tensor_model_parallel_size",
        "did you mean 'parallel.tp'.*write parallel.tp=4",
    ),
    ("parallel.tensor-model-parallel-size=4", "parallel.tensor-model-parallel-size", "write parallel.tp=4"),
    ("fp8_format=hybrid", "fp8_format", "write precision.compute_dtype=fp8 precision.fp8.format=hybrid"),
    ("use_flash_attn=true", "use_flash_attn", "remove it: Megatron itself ignores it"),
    ("train.frobnicate=3", "train.frobnicate", "`megalaunch explain train` lists"),
    ("parallel=tp4,pp2", "parallel", "write one layout together: parallel=tp4pp2"),
    ("parallel=TP4-PP2", "parallel", r"did you mean parallel=tp4pp2\?"),
    ("data=/path/to/text", "data", "for text of your own set data.corpus=/path/to/text"),
    ("data=texts/*.txt", "data", r"set data.corpus=texts/\*.txt"),
    ("data=https://a.example/b.txt", "data", "data is not downloaded: download it first"),
    ("data=roneneldan/TinyStories", "data", "set data.corpus=hf://datasets/roneneldan/TinyStories"),
    (
        "model=meta-llama/Llama-3.1-8B-Instruct",
        "model",
        "model=llama31_8b has its architecture, .*load_pretrained=hf://",
    ),
    ("model=Qwen/Qwen2.5-7B", "model", "model=qwen25_7b has its architecture, "),
    ("model=nobody/Unheard-Of-3B", "model", "checkpoint.load_pretrained=hf://"),
    ("tokenizer=openai-community/gpt2", "tokenizer", "tokenizer.path=openai-community/gpt2"),
    ("train.steps", "train.steps", "is not of the form KEY=VALUE; write train.steps=VALUE"),
    ("train.steps=1,2", "train.steps", r"has several values \(1,2\); give one, e.g. train.steps=1"),
    ("optimizer.lr=choice(1e-3,1e-4)", "optimizer.lr", "e.g. optimizer.lr=1e-3"),
    ("train.steps=range(1,4)", "train.steps", "has several values"),
    ("parallel=tp2,tp4", "parallel", "names several options; give one, e.g. parallel=tp2"),
    ("parallel=", "parallel", "needs the name of an option"),
    ("train.steps=[1", "train.steps", "cannot read the value"),
    ("launcher.slurm.extra=[--nodes=4]", "launcher.slurm.extra", r"quote the items: \['--nodes=4'\]"),
    ("train.steps={a:1}", "train.steps", "must be an integer"),
    ("train.steps=2.5", "train.steps", r"must be an integer, got 2.5 \(float\)"),
    ("train.steps=true", "train.steps", r"must be an integer, got True \(bool\)"),
    ("train.steps=null", "train.steps", "must be an integer, got None"),
    ("train.steps=0", "train.steps", "must be at least 1, got 0"),
    ("train.steps=???", "train.steps", "has no value"),
    ("optimizer.lr=nan", "optimizer.lr", "must be a number"),
    ("optimizer.lr=1" + "0" * 400, "optimizer.lr", "must be a number"),
    ("schedule.shape=cosin", "schedule.shape", "needs constant | .*did you mean 'cosine'"),
    ("parallel.sequence_parallel=1", "parallel.sequence_parallel", "must be true or false"),
    ("run.name=${oc.env:SECRET_TOKEN}", "run.name", "must not read the environment variable SECRET_TOKEN"),
    ("run.name=${train.stepz}", "run.name", "cannot be interpolated: .*train.stepz"),
    ("train.steps=${oc.decode:1}", "train.steps", "supported are .*oc.env"),
    ("run.name=${oc.env:${run.directory}}", "run.name", "must name the environment variable of oc.env itself"),
    ("run.name=${${run.directory}:HOME}", "run.name", "unsupported interpolation"),
    ("train.steps=${run.resume}", "train.steps", "cannot be interpolated: .*'auto'"),
    ("model.rope={thetta: 1}", "model.rope", "unknown key 'model.rope.thetta'; did you mean 'model.rope.theta'"),
    ("run.directory=${oc.env:MEGALAUNCH_NOT_SET}", "run.directory", "which is not set"),
    ("=3", "=3", "unknown key"),
]


@pytest.fixture(scope="module")
def composer():
    """A composer that has merged the files of recipe=tiny: it finds what a new one does (test_sweep_overrides.py)."""
    composer = Composer()
    composer.compose(["recipe=tiny"])
    return composer


@pytest.mark.parametrize(
    ("override", "path", "message"),
    slow_but(REFUSED, *REFUSED[::3]),
)
def test_which_overrides_are_refused_and_how(composer, override, path, message):
    found = problems("recipe=tiny", override, compose=composer.compose)
    assert list(found) == [path]
    assert re.search(message, found[path].message), found[path].message
    assert found[path].where == "command line" or "no value" in message


def test_a_hubs_name_in_place_of_a_recipe():
    assert "a model hub name is not a recipe" in problems("recipe=meta-llama/Llama-3.1-8B")["recipe"].message


def test_own_files_named_as_options_of_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "tokens.idx").write_bytes(b"")
    assert "data.corpus=texts" in problems("recipe=tiny", "data=texts")["data"].message
    assert "data.train_prefix=tokens" in problems("recipe=tiny", "data=tokens")["data"].message
    assert "available: mock" in problems("recipe=tiny", "data=text")["data"].message


def test_a_model_that_is_neither_an_option_nor_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = problems("recipe=tiny", "model=my_llama")["model"].message
    assert "did you mean 'llama3_8b'? (nor a folder of that name with a config.json; " in message
    assert re.search(r"`megalaunch explain model` lists all \d+ options", message)


WHOLE = [("1e3", 1000), ("2E2", 200), ("30.0", 30)]


@pytest.mark.parametrize(("text", "value"), slow_but(WHOLE, WHOLE[0]))
def test_whole_numbers_in_scientific_notation(text, value):
    steps = compose(["recipe=tiny", f"train.steps={text}"]).spec.train.steps
    assert (steps, type(steps)) == (value, int)
    assert "must be an integer" in problems("recipe=tiny", "train.steps=1.5e0")["train.steps"].message
    assert "must be an integer" in problems("recipe=tiny", "train.steps=1e300")["train.steps"].message


def test_two_recipes_or_options_are_refused():
    assert "recipe=tiny and recipe=quickstart" in problems("recipe=tiny", "recipe=quickstart")["recipe"].message
    assert (
        "parallel=tp2 and parallel=tp4" in problems("recipe=tiny", "parallel=tp2", "parallel=tp4")["parallel"].message
    )


def test_no_recipe_is_one_problem():
    assert list(problems()) == ["recipe"]
    assert "recipe=quickstart" in problems()["recipe"].message
    assert list(problems("recipe=quickstrat")) == ["recipe"]
    assert "did you mean 'quickstart'" in problems("recipe=quickstrat")["recipe"].message


def test_a_run_without_a_recipe_needs_a_model_and_its_numbers():
    overrides = ["model=tiny", "batch.sequence_length=8", "batch.global_batch_size=2", "train.steps=1"]
    assert compose(overrides).spec.model.hidden_size == 32


TYPED = [
    ("data.corpus=/a b/c,d/[x]*{y}.txt", "/a b/c,d/[x]*{y}.txt"),
    ("data.corpus='quoted, too'", "quoted, too"),
    ("data.corpus=it's", "it's"),
    ("data.corpus=$HOME (1)\n~", "$HOME (1)\n~"),
    ("data.corpus=1e3", "1e3"),
    ("data.corpus=null", None),
    ("data.corpus=a=b", "a=b"),
    ("data.corpus=", ""),
]


@pytest.mark.parametrize(
    ("override", "value"),
    slow_but(TYPED, *TYPED[::3]),
)
def test_text_is_taken_as_typed(override, value):
    assert compose(["recipe=tiny", override]).spec.data.corpus == value


def test_environment_variables_on_the_allow_list(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    spec = compose(["recipe=tiny", "run.directory=${oc.env:SCRATCH}/runs/${oc.env:MEGALAUNCH_X,one}"]).spec
    assert spec.run.directory == "/scratch/me/runs/one"


def test_the_builder_gives_back_what_composition_made():
    spec = compose(["recipe=llama3_8b"]).spec
    assert build_run_spec(spec_to_dict(spec)) == spec


def test_every_key_has_a_meaning():
    assert all(key.field.metadata["meaning"] for key in schema_keys().values())
    defaults = schema_defaults()
    assert all(entry_at(defaults, path) is not None or key.takes_null for path, key in schema_keys().items())
