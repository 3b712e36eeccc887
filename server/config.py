"""Defines all settings with limits and defaults. A command's flag wins over an environment variable
``QUIRE_<SECTION>__<FIELD>``, and the variable wins over the TOML file (from ``--config``, or else
the user's own file). configs/quire.toml documents all settings, even those that this file adds from
engine/config.py and kvcache/config.py. A size has a unit (``4GiB``) or counts bytes (``65536``)."""

import inspect
import re
import tomllib
from collections.abc import Callable
from dataclasses import Field as DataclassField
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.config import FIXED, CacheSettings, EngineConfig

MIB = 1024**2
ENV_PREFIX = "QUIRE_"
# Values of server.host that mean all addresses of the machine.
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104
Tables = dict[str, dict[str, Any]]
"""Settings as ``{section: {field: value}}``. The value of a flag that was not given is None."""
# Matches a size: a number, an optional prefix, and an optional "i" for powers of 1024.
SIZE = re.compile(r"([0-9]{0,20}\.?[0-9]{1,20})\s*(?:([kmgtp])(i?)b?|b)?", re.IGNORECASE)
POWERS = " kmgtp"


class StartError(Exception):
    """Raised if the server cannot start or go on. The text is one sentence for the user."""

    exit_code: ClassVar[int]


class SettingError(StartError):
    """Raised for settings that cannot work."""

    exit_code = 2


def parse_size(value: object) -> int:
    """Parse a size such as ``4.5GiB``, ``4 gib``, ``4G`` (10^9 bytes) or ``65536`` into bytes.
    Raises PydanticCustomError, a ValueError."""
    match = SIZE.fullmatch(str(value).strip())
    if match is None:
        raise PydanticCustomError(
            "size",
            "this is no size: write a number and a unit, such as 4.5GiB or 512MiB, or a number of "
            "bytes, such as 65536",
        )
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(Fraction(number) * base ** POWERS.index((prefix or " ").lower()))


def _parted(value: object) -> object:
    """Split a text at commas, which separate list items in environment variables and flags."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


Size = Annotated[int, BeforeValidator(parse_size)]
Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_parted)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parted)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_parted)]


class Section(BaseModel):
    """A table of the settings file. A field's alias is the setting's name in EngineConfig."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SectionT = TypeVar("SectionT", bound=Section)


class ServerSection(Section):
    """The settings of the server itself: addresses, name, startup and shutdown."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    ollama_port: int | None = Field(default=None, ge=0, le=65535)
    served_model_name: str | None = None
    sse_ping_s: float = Field(default=10.0, gt=0)
    drain_s: int = Field(default=20, ge=0)
    ready_timeout_s: float = Field(default=5.0, gt=0)
    page: bool = True
    keep_awake: bool = True


class AccessSection(Section):
    """The keys, hosts and origins that clients may use. Commas may separate list items."""

    api_keys: Secrets = ()
    scrape_key: SecretStr | None = None
    salt_secret_file: Path | None = None
    insecure_no_auth: bool = False
    allowed_hosts: Names = ()
    allowed_origins: Names = ()
    allow_browser_extensions: bool = False

    @property
    def first_key(self) -> str:
        """The key for requests of quire itself, or "" if no key is needed."""
        return self.api_keys[0].get_secret_value() if self.api_keys else ""


class PromptsSection(Section):
    """The settings for turning conversations into prompts."""

    interpret_special_tokens: bool = False


class LimitsSection(Section):
    """Limits of requests and connections."""

    max_body_bytes: Size = 8 * MIB
    max_queued_requests: int = Field(default=256, ge=0)
    max_choices: int = Field(default=8, ge=1)
    max_prompts: int = Field(default=64, ge=1)
    max_messages: int = Field(default=1024, ge=1)
    max_template_s: float = Field(default=5.0, gt=0)
    max_grammar_compile_s: float = Field(default=5.0, gt=0)
    max_cached_grammars: int = Field(default=64, ge=0)
    max_written_call_bytes: Size = 16 * MIB
    max_thought_bytes: Size = 16 * MIB
    max_stop_strings: int = Field(default=4, ge=1)
    max_stored_response_bytes: Size = 64 * MIB
    keep_alive_s: int = Field(default=5, ge=0)
    max_receive_s: float = Field(default=10.0, gt=0)
    max_connections: int = Field(default=512, ge=1)
    crowded_receive_s: float = Field(default=0.5, gt=0)
    max_reader_stall_s: float = Field(default=30.0, gt=0)
    max_request_s: float = Field(default=3600.0, gt=0)
    max_key_share_ratio: float = Field(default=0.5, gt=0, le=1)


UnseenRule = Literal["refuse", "placeholder"]


class ImagesSection(Section):
    """Each API's rule for images and files in conversations: refuse them, or put a note instead."""

    chat: UnseenRule = "refuse"
    responses: UnseenRule = "placeholder"
    messages: UnseenRule = "placeholder"
    ollama: UnseenRule = "refuse"


def settings_of(room: type) -> list[DataclassField[Any]]:
    """Return the fields of a dataclass that are neither inherited nor FIXED (not for users)."""
    own = inspect.get_annotations(room)
    return [
        field
        for field in fields(room)
        if field.name in own and FIXED not in getattr(field.type, "__metadata__", ())
    ]


def with_settings_of(room: type, **renamed: str) -> Callable[[type[SectionT]], type[SectionT]]:
    """Return a decorator that adds a dataclass's settings, with defaults and limits, to a Section.
    A setting ``*_bytes`` takes sizes with units. ``renamed`` gives fields other names for users."""

    def with_fields(section: type[SectionT]) -> type[SectionT]:
        settings: dict[str, Any] = {}
        for field in settings_of(room):
            size = Size if field.default is not None else Size | None
            settings[renamed.get(field.name, field.name)] = (
                size if field.name.endswith("_bytes") else field.type,
                Field(default=field.default, serialization_alias=field.name),
            )
        return create_model(section.__name__, __base__=section, __doc__=section.__doc__, **settings)

    return with_fields


@with_settings_of(EngineConfig)
class EngineSection(Section):
    """The settings of the engine, and the model's task (text or vectors)."""

    task: Literal["auto", "generate", "embed"] = "auto"
    draft_model: str = ""
    watchdog_s: float = Field(default=30.0, gt=0)


@with_settings_of(
    CacheSettings,
    kv_budget_bytes="kv_budget",
    headroom_bytes="headroom",
    page_bytes="page_size",
    heap_bytes="heap_size",
    free_slack_bytes="free_slack",
    kv_dtype="dtype",
    disk_bytes="disk",
    disk_hourly_bytes="disk_per_hour",
)
class CacheSection(Section):
    """The settings of the memory for K and V (cached keys and values)."""

    heed_pressure: bool = True

    @field_validator("disk_folder", check_fields=False)
    @classmethod
    def _named(cls, folder: str | None) -> str | None:
        return folder or None  # compose files write "" for a variable that is not set


class ModelsSection(Section):
    """Folders of models, and rules for several models behind one address."""

    folders: Folders = ()
    memory_budget: Size | None = None
    keep_alive_s: float = Field(default=3600.0, ge=-1)
    evict_after_idle_s: float = Field(default=60.0, ge=0)
    load_timeout_s: float = Field(default=600.0, gt=0)
    pinned: Names = ()
    aliases: dict[str, str] = {"claude-*": "loaded", "gpt-*": "loaded"}


class MetricsSection(Section):
    """The settings of GET /metrics."""

    vllm_names: bool = False


class LogSection(Section):
    """The settings of the log, which never contains prompts or answers."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: bool = True
    file: Path | None = None
    max_file_bytes: Size = Field(default=10 * MIB, ge=65536)
    max_files: int = Field(default=5, ge=2)


class Config(Section):
    """All settings. Each field is a table of the settings file."""

    server: ServerSection = ServerSection()
    access: AccessSection = AccessSection()
    prompts: PromptsSection = PromptsSection()
    limits: LimitsSection = LimitsSection()
    images: ImagesSection = ImagesSection()
    engine: EngineSection = EngineSection()
    cache: CacheSection = CacheSection()
    models: ModelsSection = ModelsSection()
    metrics: MetricsSection = MetricsSection()
    log: LogSection = LogSection()


def engine_config(settings: Config) -> EngineConfig:
    """Return the settings of the engine and of the cache, under EngineConfig's names."""
    given = settings.engine.model_dump(by_alias=True) | settings.cache.model_dump(by_alias=True)
    names = {field.name for field in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in given.items() if name in names})


def read_file(file: Path) -> Tables:
    """Read a TOML file of settings. Raises OSError or ValueError for an unusable file, and
    pydantic.ValidationError, which is a ValueError, for a bad field."""
    values = tomllib.loads(file.read_text(encoding="utf-8"))
    Config.model_validate(values)
    return values


def load(from_file: Tables, flags: Tables) -> Config:
    """Merge flags, environment variables and a file's settings. Raises pydantic.ValidationError
    with the bad field's name, or SettingsError if an environment variable cannot be parsed."""
    given = {
        section: {name: value for name, value in fields.items() if value is not None}
        for section, fields in flags.items()
    }

    class Sources(BaseSettings, Config):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX, env_nested_delimiter="__", frozen=True, extra="forbid"
        )

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: Any, **sources: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                InitSettingsSource(settings_cls, given),
                sources["env_settings"],
                InitSettingsSource(settings_cls, from_file),
            )

    return Config.model_validate(Sources().model_dump())
