"""What a person may set about a store, from ``store_options`` and the environment, checked once.

Options win over the environment. Names are those of the ``AWS_*`` variables, with or without
``AWS_`` and in any case: ``endpoint_url`` and ``AWS_ENDPOINT_URL`` are the same option.
No value of a credential ever appears in a message or a ``repr``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ftckpt.errors import SettingsError

Options = Mapping[str, object]
Keys = tuple[str, str, str | None]
"""Access key id, secret access key, session token."""

_ALIASES = {
    "endpoint": "endpoint_url",
    "endpoint_url_s3": "endpoint_url",
    "default_region": "region",
    "region_name": "region",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
}
_S3_NAMES = frozenset(
    {
        "endpoint_url",
        "access_key_id",
        "secret_access_key",
        "session_token",
        "region",
        "allow_http",
        "path_style",
        "virtual_hosted_style_request",
        "credential_provider",
    }
)
_S3_EXTRA = frozenset(
    {
        "checksum_algorithm",
        "disable_bulk_delete",
        "disable_tagging",
        "imdsv1_fallback",
        "metadata_endpoint",
        "request_payer",
        "role_arn",
        "role_session_name",
        "s3_express",
        "server_side_encryption",
        "skip_signature",
        "sse_bucket_key_enabled",
        "sse_kms_key_id",
        "sts_endpoint",
        "unsigned_payload",
    }
)
_ENVIRONMENT = (  # later ones win
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ALLOW_HTTP",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
_CREDENTIALS = ("access_key_id", "secret_access_key", "session_token")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """``timeout_s`` is for one whole request with its body; ``connect_timeout_s`` for reaching the server;
    ``stream_retry_s`` for trying a part of a stream again, which nobody else can.
    """

    timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    stream_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where and as whom. ``credentials`` None: what the machine itself provides (role, container).
    ``renewable``: asking again later may give others.
    """

    endpoint_url: str | None
    region: str
    path_style: bool
    allow_http: bool
    credentials: Keys | None = field(repr=False)
    renewable: bool = False
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(value for value in self.credentials or () if value)


def s3_settings(options: Options, environ: Mapping[str, str]) -> S3Settings:
    """Read anew at every call: a credential provider is asked, variables and files are looked at.

    Credentials come from ``credential_provider``, from options, from variables, or from the file
    that AWS_SHARED_CREDENTIALS_FILE names (section AWS_PROFILE), the first that has any.

    Raises ``SettingsError`` for a name or a value that means nothing.
    """
    given = _normalised(options)
    if unknown := sorted(given.keys() - _S3_NAMES - _S3_EXTRA):
        raise SettingsError(
            f"store option {unknown[0]!r} is not known for s3\n  known: {', '.join(sorted(_S3_NAMES | _S3_EXTRA))}",
            option=unknown[0],
        )
    found: dict[str, object] = {}
    for name in _ENVIRONMENT:
        if environ.get(name):
            found |= _normalised({name: environ[name]})
    named = sorted(given.keys() & set(_CREDENTIALS))
    provider = given.get("credential_provider")
    if named or provider is not None:  # a key of one place with a token of another is nobody's
        found = {name: value for name, value in found.items() if name not in _CREDENTIALS}
    if provider is not None:
        if named:
            raise SettingsError(
                f"store options credential_provider and {named[0]} contradict each other; give one of them",
                option="credential_provider",
            )
        found |= _provided(provider)
    elif not named and not found.keys() & set(_CREDENTIALS):
        found |= _from_file(environ)
    found |= given

    endpoint_url = _text(found, "endpoint_url")
    if endpoint_url is not None:
        _check_endpoint(endpoint_url)
    path_style = _flag(found, "path_style")
    if path_style is None:
        virtual = _flag(found, "virtual_hosted_style_request")
        path_style = endpoint_url is not None if virtual is None else not virtual
    allow_http = _flag(found, "allow_http")
    return S3Settings(
        endpoint_url=endpoint_url,
        region=_text(found, "region") or "us-east-1",
        path_style=path_style,
        allow_http=(endpoint_url or "").startswith("http://") if allow_http is None else allow_http,
        credentials=_credentials(found),
        renewable=not named,
        extra={name: value for name, value in found.items() if name in _S3_EXTRA},
    )


def strike_out(text: str, secrets: Sequence[str]) -> str:
    """The text without any of the secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _normalised(options: Options) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in options.items():
        short = name.lower().removeprefix("aws_")
        plain[_ALIASES.get(short, short)] = value
    return plain


def _provided(provider: object) -> dict[str, object]:
    """What a person's own function says now. Its errors may quote a secret and are not repeated."""
    if not callable(provider) or inspect.iscoroutinefunction(provider):
        raise SettingsError(
            "store option credential_provider must be a plain function without arguments that returns a dict "
            "with access_key_id, secret_access_key and, if there is one, token",
            option="credential_provider",
        )
    try:
        answer = provider()
    except Exception as error:
        raise SettingsError(
            f"the credential_provider of the store failed with {type(error).__name__}",
            option="credential_provider",
        ) from None
    named = _normalised(answer) if isinstance(answer, Mapping) else {}
    if not {"access_key_id", "secret_access_key"} <= named.keys():
        raise SettingsError(
            "the credential_provider of the store must return a dict with access_key_id, secret_access_key and, "
            f"if there is one, token; it returned {type(answer).__name__}",
            option="credential_provider",
        )
    return {name: named.get(name) for name in _CREDENTIALS}


def _from_file(environ: Mapping[str, str]) -> dict[str, object]:
    """The keys in the file that AWS_SHARED_CREDENTIALS_FILE names; nothing when it names none."""
    path = environ.get("AWS_SHARED_CREDENTIALS_FILE")
    if not path:
        return {}
    section = environ.get("AWS_PROFILE") or "default"
    parser = ConfigParser(interpolation=None)
    try:
        with Path(path).open(encoding="utf-8") as lines:
            parser.read_file(lines)
        named = _normalised(dict(parser[section]))
    except (OSError, ConfigParserError, UnicodeDecodeError, KeyError) as error:
        raise SettingsError(
            f"no credentials in section {section!r} of AWS_SHARED_CREDENTIALS_FILE={path}: {type(error).__name__}",
            option="AWS_SHARED_CREDENTIALS_FILE",
        ) from None
    return {name: named[name] for name in _CREDENTIALS if name in named}


def _credentials(found: Mapping[str, object]) -> Keys | None:
    key, secret = _text(found, "access_key_id"), _text(found, "secret_access_key")
    if key is None and secret is None:
        return None
    if key is None or secret is None:
        missing = "access_key_id" if key is None else "secret_access_key"
        raise SettingsError(f"half of a credential: {missing} is not set", option=missing)
    return key, secret, _text(found, "session_token")


def _text(found: Mapping[str, object], name: str) -> str | None:
    value = found.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise SettingsError(f"store option {name} must be text, not {type(value).__name__}", option=name)
    return value


def _flag(found: Mapping[str, object], name: str) -> bool | None:
    value = found.get(name)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise SettingsError(f"store option {name} must be true or false, not {value!r}", option=name)


def _check_endpoint(url: str) -> None:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise SettingsError("the endpoint URL holds a user name or password; give credentials as options")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"the endpoint URL must begin with http:// or https://, not {url!r}", value=url)
