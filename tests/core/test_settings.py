"""Where a setting comes from, and that whatever is wrong is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field, ValidationError
from pydantic_settings import SettingsConfigDict

from specsplit.core.errors import SettingsError
from specsplit.core.serving import ListenSettings
from specsplit.core.settings import exit_on_settings_error, load_settings


class ExampleSettings(ListenSettings):
    """An example."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_EXAMPLE_")

    max_rows: int = Field(default=8, ge=1)
    """Most rows."""
    is_shuffled: bool = False
    """Shuffle."""


def load(*argv: str) -> ExampleSettings:
    return load_settings(ExampleSettings, argv, prog="specsplit example")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "example.toml"
    path.write_text("max_rows = 3\nport = 1003\n")
    return path


def test_defaults() -> None:
    settings = load()
    assert (settings.host, settings.port, settings.max_rows) == ("127.0.0.1", 0, 8)
    assert type(settings) is ExampleSettings


def test_flags_go_before_variables_before_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--config", str(file)).max_rows == 3
    monkeypatch.setenv("SPECSPLIT_EXAMPLE_MAX_ROWS", "2")
    assert load("--config", str(file)).max_rows == 2
    settings = load("--config", str(file), "--max-rows", "1", "--is-shuffled")
    assert (settings.max_rows, settings.port, settings.is_shuffled) == (1, 1003, True)


def test_the_file_may_be_named_by_a_variable_and_the_last_flag_wins(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.toml"
    other.write_text("max_rows = 4\n")
    monkeypatch.setenv("SPECSPLIT_EXAMPLE_CONFIG", str(file))
    assert load().max_rows == 3
    assert load(f"--config={other}").max_rows == 4
    assert load("--config", str(file), "--config", str(other)).max_rows == 4


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["--max-rows", "0"], "max_rows"),
        (["--max-rows", "many"], "max_rows"),
        (["--port", "65536"], "port"),
        (["--port", "-1"], "port"),
        (["--drain-seconds", "nan"], "drain_seconds"),
        (["--config", "/nonexistent.toml"], "config"),
    ],
)
def test_wrong_flags_name_the_field(argv: list[str], field: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(*argv)
    assert caught.value.field == field
    assert field in caught.value.message or field == "config"


@pytest.mark.parametrize("argv", [["--max-row", "1"], ["--rows", "1"], ["stray"], ["--port"]])
def test_unknown_flags_exit_with_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    assert "specsplit example: error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("SPECSPLIT_EXAMPLE_MAX_ROW", "1", "SPECSPLIT_EXAMPLE_MAX_ROW"),
        ("SPECSPLIT_EXAMPLE_MAX_ROWS", "x", "max_rows"),
    ],
)
def test_wrong_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, field: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load()
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "field"),
    [(b"max_row = 1", "max_row"), (b"max_rows = 0", "max_rows"), (b"= 1", "config"), (b"\xff", "config")],
)
def test_wrong_files_are_refused(tmp_path: Path, text: bytes, field: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_bytes(text)
    with pytest.raises(SettingsError) as caught:
        load("--config", str(file))
    assert caught.value.field == field


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load().max_rows = 2


def test_the_error_is_printed_as_a_tool_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_on_settings_error(SettingsError("port: too large", field="port"), prog="specsplit example")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "specsplit example: error: port: too large\n"
