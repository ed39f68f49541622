"""Settings of a service: flags, else environment variables, else a TOML file. Knows no service's fields.

A service declares one frozen `Settings` subclass with `env_prefix`; `load_settings` reads it once at start
and refuses unknown flags, unknown variables under its prefix, unknown keys in the file, and values out of
range.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from specsplit.core.errors import SettingsError


class Settings(BaseSettings):
    """Base of every service's settings; field docstrings are the help texts."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        env_ignore_empty=True,
    )

    config: Path | None = None
    """TOML file with these settings; flags and environment variables go before it."""


SettingsT = TypeVar("SettingsT", bound=Settings)


def load_settings(cls: type[SettingsT], argv: Sequence[str], *, prog: str) -> SettingsT:
    """Reads `cls` from `argv`, the environment and the file that `--config` names.

    Exits with status 2 (after argparse's usage line) on an unknown flag; raises SettingsError naming the
    field for anything else that is wrong.
    """
    prefix = cls.model_config.get("env_prefix", "")
    assert prefix, f"{cls.__name__} has no env_prefix"
    known = {f"{prefix}{name}".upper() for name in cls.model_fields}
    for variable in os.environ:
        if variable.startswith(prefix.upper()) and variable not in known:
            raise SettingsError(f"unknown environment variable {variable}", field=variable)
    config = _config_path(argv, f"{prefix}config".upper())

    class WithSources(cls):  # type: ignore[valid-type,misc]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            cli: CliSettingsSource[BaseSettings] = CliSettingsSource(
                settings_cls, cli_parse_args=list(argv), cli_prog_name=prog
            )
            sources: tuple[PydanticBaseSettingsSource, ...] = (cli, env_settings)
            if config is not None:
                if not config.is_file():
                    raise SettingsError(f"no such file: {config}", field="config")
                try:
                    sources += (TomlConfigSettingsSource(settings_cls, config),)
                except ValueError as error:  # not TOML, or not UTF-8
                    raise SettingsError(f"{config}: {error}", field="config") from error
            return sources

    WithSources.__doc__ = cls.__doc__
    try:
        loaded = WithSources()
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{field}: {message}", field=field) from error
    return cls.model_construct(**{name: getattr(loaded, name) for name in cls.model_fields})


def _config_path(argv: Sequence[str], variable: str) -> Path | None:
    value = os.environ.get(variable)
    for index, argument in enumerate(argv):  # the last one wins, as for every flag
        if argument == "--config" and index + 1 < len(argv):
            value = argv[index + 1]
        elif argument.startswith("--config="):
            value = argument.removeprefix("--config=")
    return Path(value) if value else None


def exit_on_settings_error(error: SettingsError, *, prog: str) -> None:
    """Prints the error as a command-line tool does and exits with status 2."""
    print(f"{prog}: error: {error.message}", file=sys.stderr)
    raise SystemExit(2)
