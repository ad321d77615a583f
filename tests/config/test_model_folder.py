"""`model=FOLDER`: a Hugging Face folder as the model option."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from published_configs import published_configs
from slow_cases import slow_but
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.cli.completion import Line, completions
from megalaunch.config.compose import Composer, compose
from megalaunch.config.errors import ConfigError
from megalaunch.importers.huggingface.json_positions import key_positions
from megalaunch.importers.huggingface.model_section import read_model_section
from megalaunch.importers.huggingface.registry import from_hf_config
from megalaunch.schema import build_run_spec
from megalaunch.schema.model import ModelSpec
from megalaunch.schema.spec_file import read_spec, write_spec

PUBLISHED = published_configs()
SMOL = PUBLISHED["HuggingFaceTB/SmolLM2-135M"]


def write(folder: Path, config: object, indent: int | None = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config, indent=indent))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def problems(*overrides: str) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return [(problem.path, problem.message, problem.where) for problem in caught.value.problems]


@pytest.mark.parametrize("quarter", slow_but(range(4), every=[0]))
def test_every_published_config_is_the_model_section_that_the_reader_gives(here, quarter):
    composer = Composer()
    for number, (name, config) in enumerate([*PUBLISHED.items()][quarter::4]):
        write(here / f"hf{number}", config)
        composition = composer.compose(["recipe=quickstart", f"model=./hf{number}", "model.name=same"])
        assert composition.spec.model == from_hf_config(config, "same"), name


def test_every_value_that_a_file_says_has_its_line(here):
    """What has the file alone as its place is the family's own, the same whatever the file says."""
    own = {"name", "norm", "position_embedding", "norm_plus_one", "scale_embeddings", "norm_placement", "qk_norm"}
    own |= {"qkv_bias", "attention_output_bias", "mlp_bias", "parallel_residual", "embedding_dropout"}
    own |= {"attention_sinks"}
    untold: set[str] = set()
    for name, config in PUBLISHED.items():
        section = read_model_section(write(here / "hf", config), "hf")
        text = (here / "hf" / "config.json").read_text().splitlines()
        for path, position in section.positions.items():
            default = section.values[path] == asdict(ModelSpec(**SHAPE)).get(path, section.values[path])
            if position == "hf/config.json":
                untold |= set() if default or "." in path else {path}
                continue
            line, column = map(int, re.fullmatch(r"hf/config\.json:(\d+):(\d+)", position).groups())
            assert text[line - 1][column - 1] == '"', (name, path, position)
            said = (
                json.loads("{" + text[line - 1].strip().rstrip(",[{") + "}") if text[line - 1][-1] not in "[{" else {}
            )
            for value in said.values():
                same = isinstance(value, int | float) and isinstance(section.values[path], int | float)
                assert not same or value == section.values[path] or path in MEANS_MORE, (name, path, position)
    # Where a file leaves a key out the value is transformers' default, or follows from others.
    follows = {"num_query_groups", "head_dim", "ffn_hidden_size", "hidden_dropout", "attention_dropout", "init_std"}
    follows |= {"num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"}
    follows |= {"norm_epsilon", "activation", "tie_word_embeddings", "sliding_window", "sliding_window_pattern"}
    follows |= {
        "query_pre_attn_scalar",
        "no_rope_layer_interval",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "family",
    }
    assert untold <= own | follows


SHAPE = dict.fromkeys(("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"), 1)
# Other keys have a say.
MEANS_MORE = {"sliding_window", "no_rope_layer_interval", "sliding_window_pattern"}
MEANS_MORE |= {"moe.shared_ffn_hidden_size", "moe.balance_loss", "moe.balance_loss_coeff"}


def test_places_are_those_of_the_keys(here):
    write(here / "hf", {**SMOL, "rope_scaling": {"type": "linear", "factor": 4.0}})
    composition = compose(["recipe=quickstart", "model=hf"])
    lines = (here / "hf" / "config.json").read_text().splitlines()

    def line_of(key: str) -> int:
        return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f'"{key}"'))

    for path, key, column in (
        ("model.hidden_size", "hidden_size", 3),
        ("model.num_layers", "num_hidden_layers", 3),
        ("model.rope.theta", "rope_theta", 3),
        ("model.rope.factor", "factor", 5),
        ("model.family", "model_type", 3),
    ):
        assert composition.origins[path].where == f"model=hf, hf/config.json:{line_of(key)}:{column}"
    assert composition.origins["model.moe.num_experts"].where == "model=hf, hf/config.json"


def test_key_positions():
    text = '{"a": 1, "b\\"c": "x, \\"y\\": {",\n "d": [{"no": 1}, [2, {"k": 3}]], "e": {"f": {},'
    text += '\n\t"g": null}, "\\u0068": 2}'
    assert json.loads(text)
    assert key_positions(text) == {
        **{"a": (1, 2), 'b"c': (1, 10), "d": (2, 2), "e": (2, 35), "e.f": (2, 41), "e.g": (3, 2), "h": (3, 14)}
    }
    assert key_positions("{}") == {}


def test_overrides_change_the_folders_values_in_either_order_and_a_recipe_stays(here):
    write(here / "hf", SMOL)
    first = compose(["model.num_layers=4", "recipe=quickstart", "model=./hf"]).spec
    second = compose(["model=./hf", "recipe=quickstart", "model.num_layers=4"]).spec
    assert first == second
    assert (first.model.num_layers, first.model.hidden_size, first.model.name) == (4, 576, "hf")
    assert first.train == compose(["recipe=quickstart"]).spec.train


PATHS = ["hf", "./hf", "hf/", "../{}/hf", "{}", "a,b/hf", "link", "hub/Some-Model", "~/hf"]


@pytest.mark.parametrize("path", slow_but(PATHS, *PATHS[::3]))
def test_paths_are_taken_as_typed(here, monkeypatch, path):
    monkeypatch.setenv("HOME", str(here))
    write(here / "hf", SMOL)
    write(here / "a,b" / "hf", SMOL)
    write(here / "hub" / "Some-Model", SMOL)
    (here / "link").symlink_to(here / "hf")
    typed = str(here / "hf") if path == "{}" else path.format(here.name)
    composition = compose(["recipe=quickstart", f"model={typed}"])
    assert composition.spec.model.hidden_size == 576
    assert composition.choices["model"] == typed


def test_the_folder_itself_is_a_dot(here, monkeypatch):
    monkeypatch.chdir(write(here / "hf", SMOL))
    composition = compose(["recipe=quickstart", "model=."])
    assert composition.spec.model.name == "hf"
    assert composition.origins["model.vocab_size"].where.startswith("model=., config.json:")


def test_the_name_of_an_option_is_that_option(here):
    write(here / "tiny", SMOL)
    assert compose(["recipe=quickstart", "model=tiny"]).spec.model.hidden_size != 576
    assert compose(["recipe=quickstart", "model=./tiny"]).spec.model.hidden_size == 576


def test_the_spec_that_is_written_needs_no_folder(here):
    write(here / "hf", PUBLISHED["microsoft/Phi-3-mini-128k-instruct as first published"])
    spec = compose(["recipe=quickstart", "model=hf"]).spec
    write_spec(spec, here / "spec.yaml")
    shutil.rmtree(here / "hf")
    assert read_spec(here / "spec.yaml") == spec
    assert spec.model.rope.long_factors
    assert "hf/" not in (here / "spec.yaml").read_text()


def test_notes_say_what_was_ignored_and_that_weights_are_another_override(here):
    write(here / "hf", SMOL)
    notes = [note.message for note in compose(["recipe=quickstart", "model=./hf"]).notes]
    assert notes[0].startswith("hf/config.json: is_llama_config (True) is ignored: ")
    assert "architecture only" in notes[-1]
    assert "add checkpoint.load_pretrained=./hf" in notes[-1]
    with_weights = compose(["recipe=quickstart", "model=./hf", "checkpoint.load_pretrained=./hf"]).notes
    assert [note.message for note in with_weights] == notes[:-1]
    assert compose(["recipe=quickstart", "model=tiny"]).notes == ()


def test_switches_to_run_code_have_no_effect_and_are_noted(here):
    """A folder must not decide that its code is trusted: only the known family is read, and the note names both."""
    plain = compose(["recipe=quickstart", f"model={write(here / 'hf', SMOL)}"])
    switches = {
        "auto_map": {"AutoConfig": "configuration_smol.SmolConfig", "AutoModelForCausalLM": "modeling_smol.SmolLM"},
        "trust_remote_code": True,
        "_attn_implementation_internal": "org/kernels",
    }
    composition = compose(["recipe=quickstart", f"model={write(here / 'hf', {**SMOL, **switches})}"])
    assert composition.spec.model == plain.spec.model
    ignored = {note.message for note in composition.notes} - {note.message for note in plain.notes}
    assert {message.split("config.json: ")[1] for message in ignored} == {
        "auto_map names the folder's own code ('modeling_smol.SmolLM'), which is never run: the model is built as "
        "family llama, and computes what that family computes",
        "trust_remote_code (True) is ignored: code of a model folder is never run",
        "_attn_implementation_internal ('org/kernels') is ignored: code of a model folder is never run",
    }


GGUF = "is GGUF, quantised for llama.cpp.*take the Hugging Face folder"
REFUSED = {
    "unknown key": ({**SMOL, "use_mrope": True}, r"use_mrope \(True\) is unknown .*conf/model/NAME.yaml"),
    "unknown architecture": (
        {"model_type": "mamba"},
        "'mamba' is not supported; .*conf/model/NAME.yaml",
    ),
    "code of its own": (
        {"model_type": "mamba", "auto_map": {"AutoModelForCausalLM": "org/repo--modeling_mamba.MambaForCausalLM"}},
        "'mamba' is not supported; .*names its own code .'org/repo--modeling_mamba.MambaForCausalLM'.*never run; take",
    ),
    "no model_type": ({}, "model_type None is not supported"),
    "missing keys": ({"model_type": "llama"}, "config.json has no hidden_size; repair the file"),
    "other kind": ({**SMOL, "rope_scaling": 3}, "rope_scaling is 3.*repair the file"),
    "no counterpart": ({**SMOL, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
    "quantised": ({**SMOL, "quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq, 4 bits\)"),
    "broken": ('{"model_type": "llama",\n  "hidden_size" 3}', "is not valid JSON: .*copy or download it again"),
    "empty file": ("", "is not valid JSON"),
    "no object": ("[1]", "is not a JSON object"),
    "deep": ("[" * 100_000, "is not valid JSON"),
    "NaN": (json.dumps({**SMOL, "rms_norm_eps": float("nan")}), "model.norm_epsilon"),
}


@pytest.mark.parametrize("case", slow_but(REFUSED, *list(REFUSED)[::3]))
def test_what_cannot_be_read_is_refused_with_its_place_and_a_way_out(here, case):
    config, text = REFUSED[case]
    write(here / "hf", config)
    found = problems("recipe=quickstart", "model=hf")
    assert found[0][0] == "model"
    assert re.search(text, found[0][1]), found
    assert found[0][2].startswith("hf/config.json")


def test_places_of_problems(here):
    write(here / "hf", '{"model_type": "llama",\n  "hidden_size" 3}')
    assert problems("recipe=quickstart", "model=hf")[0][2] == "hf/config.json:2:17"
    write(here / "hf", {**SMOL, "use_mrope": True}, indent=1)
    lines = (here / "hf" / "config.json").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "use_mrope" in text)
    assert problems("recipe=quickstart", "model=hf")[0][2] == f"hf/config.json:{line}:2"


def test_all_problems_are_said_at_once(here):
    write(here / "hf", {**SMOL, "use_mrope": True, "odd": 1, "num_hidden_layers": 0})
    found = problems("recipe=quickstart", "model=hf", "trian.steps=3", "train.steps=0")
    said = " ".join(message for _, message, _ in found)
    assert all(part in said for part in ("use_mrope", "odd", "num_hidden_layers", "unknown key"))
    assert "train.steps" in [path for path, _, _ in found]


NO_FOLDERS = [
    (("hf/model.Q4_K_M.gguf",), "hf", GGUF),
    (("hf/model.Q4_K_M.gguf",), "hf/model.Q4_K_M.gguf", GGUF),
    (("hf/adapter_config.json",), "hf", "is a LoRA adapter of .*merge both with peft"),
    (("hf/config.json", "hf/quantize_config.json"), "hf", "quantised by GPTQ.*take the unquantised model"),
    (("hf/readme.md",), "hf", "the folder hf has no config.json; name the folder"),
    (("hf/snapshots/abc/config.json",), "./hf", r"did you mean model=hf/snapshots/abc\?"),
    (("hf/config.json",), "hf/config.json", "is a file; name the folder: model=hf$"),
    (("hf/weights.bin",), "hf/weights.bin", "is a file; name a Hugging Face folder"),
    ((), "./hf", "the folder does not exist; name a Hugging Face folder"),
    (
        (),
        "meta-llama/Llama-3.2-1B",
        "; model=llama32_1b has its architecture, "
        "or write model=hf://meta-llama/Llama-3.2-1B .* checkpoint.load_pretrained=hf://meta-llama/Llama-3.2-1B",
    ),
    ((), "nobody/Unheard-Of-3B", "write model=hf://nobody/Unheard-Of-3B .* checkpoint.load_pretrained=hf://"),
    ((), "x" * 5000, "there is no model="),
    ((), "x\0y", "there is no model="),
]


@pytest.mark.parametrize(
    ("files", "folder", "text"),
    slow_but(NO_FOLDERS, *NO_FOLDERS[::3]),
)  # fmt: skip
def test_what_is_no_model_folder_is_refused_by_name(here, files, folder, text):
    for file in files:
        (here / file).parent.mkdir(parents=True, exist_ok=True)
        (here / file).write_text("{}")
    (found,) = problems("recipe=quickstart", f"model={folder}")
    assert re.search(text, found[1]), found


def test_a_recipe_names_no_folder(here):
    write(here / "hf", SMOL)
    (here / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /recipe: quickstart\n  - override /model: ./hf\n  - _self_\n"
    )
    said = problems("recipe=./mine.yaml")
    assert any("names no path" in message or "./hf" in message for _, message, _ in said), said


def test_what_a_recipe_sets_over_the_folder_is_said(here):
    write(here / "hf", {**SMOL, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    found = {path: message for path, message, _ in problems("recipe=llama32_1b", "model=./hf")}
    assert "add model.rope.scaling=linear" in found["model.rope.scaling"]


def test_the_commands_show_it(here):
    write(here / "hf", SMOL)
    run = CliRunner()
    overrides = ["recipe=quickstart", "model=./hf"]
    shown = run.invoke(app, ["validate-config", *overrides, "--explain", "model.hidden_size"]).output
    assert "from: model=./hf, hf/config.json:" in shown
    valid = run.invoke(app, ["validate-config", *overrides])
    assert valid.exit_code == 0
    assert "add checkpoint.load_pretrained=./hf" in valid.output
    data = json.loads(run.invoke(app, ["validate-config", "--json", *overrides]).stdout)
    assert any("load_pretrained=./hf" in finding["message"] for finding in data["findings"])
    planned = run.invoke(app, ["plan", *overrides])
    assert planned.exit_code == 0, planned.output
    assert "note: model=./hf sets the architecture only" in planned.stderr
    write(here / "hf", {**SMOL, "use_mrope": True})
    for command in ("validate-config", "plan", "train"):
        refused = run.invoke(app, [command, *overrides])
        assert refused.exit_code == 2
        assert "use_mrope" in refused.output + refused.stderr


def test_completion_offers_folders(here):
    write(here / "hf_one", SMOL)
    write(here / "deep" / "er" / "hf", SMOL)
    (here / ".hidden").mkdir()

    def offered(typed: str) -> list[str]:
        return [offer.text for offer in completions(Line(("train",), typed)) or []]

    assert "model=hf_one" in offered("model=")
    assert "model=deep/" not in offered("model=d")
    assert offered("model=./") == ["model=./deep/", "model=./hf_one"]
    assert offered("model=./h") == ["model=./hf_one"]
    assert offered("model=deep/") == ["model=deep/er/", "model=deep/er/hf"]
    assert offered("model=nothere/") == []


def test_a_section_of_every_family_builds(here):
    """The leaves are those of the schema, so that no key of it is missing or new."""
    values = read_model_section(write(here / "hf", SMOL), "hf").values
    nested: dict[str, object] = {}
    for path, value in values.items():
        level = nested
        *sections, last = path.split(".")
        for section in sections:
            level = level.setdefault(section, {})
        level[last] = value
    spec = compose(["recipe=quickstart"]).spec
    assert build_run_spec({**asdict(spec), "model": nested}).model == from_hf_config(SMOL, "hf")
