"""`megalaunch import-megatron --platform`: a recipe whose platform does not exist would not compose."""

from typer.testing import CliRunner

from megalaunch.cli.app import app


def test_an_unknown_platform_is_refused_before_anything_is_written(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("--num-layers 4 --hidden-size 64")
    words = ["import-megatron", str(script), "--platform", "h1000", "--output", str(tmp_path / "out.yaml")]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, "there is no platform=h1000; did you mean 'h100'?" in result.output) == (2, True)
    assert not (tmp_path / "out.yaml").exists()
