"""From an address to a store: what is understood, what is refused, and with which words."""

from __future__ import annotations

import math
import uuid
from pathlib import Path

import pytest

from ftckpt.address import from_anywhere, options_for, split
from ftckpt.errors import SettingsError, UnsafeStore
from ftckpt.store import open_store
from ftckpt.store.settings import s3_settings


def test_paths_and_file_addresses_are_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    open_store("run").create("a", b"1")
    open_store(tmp_path / "run").create("b", b"2")
    open_store(f"file://{tmp_path}/run").create("c", b"3")
    open_store(f"file://{tmp_path}/with%20blank").create("d", b"4")

    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["a", "b", "c"]
    assert (tmp_path / "with blank" / "d").read_bytes() == b"4"
    assert open_store("run").uri == f"file://{tmp_path}/run"


def test_a_memory_store_is_found_again_by_its_name():
    name = uuid.uuid4().hex

    open_store(f"memory://{name}").create("a", b"x")

    assert open_store(f"memory://{name}").read("a") == b"x"
    assert list(open_store(f"memory://{name}-2").scan("")) == []


@pytest.mark.parametrize("option", ["retry_deadline_s", "max_calls", "timeout_s", "connect_timeout_s"])
@pytest.mark.parametrize("value", [0, -1, "5", None, 10**6, True, math.nan, math.inf])
def test_a_number_that_means_nothing_is_refused_at_once(option, value):
    """Case J14: not deep inside a client, and by name."""
    if option == "retry_deadline_s":
        arguments = {"retry_deadline_s": value}
    else:
        arguments = {"options": {option: value}}

    with pytest.raises(SettingsError, match=option) as caught:
        open_store("memory://settings", **arguments)

    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("value", [1, 65])
def test_numbers_that_mean_something_are_taken(value):
    open_store(
        "memory://settings",
        retry_deadline_s=value,
        options={"max_calls": value, "timeout_s": value, "connect_timeout_s": value},
    )


@pytest.mark.parametrize(
    "uri, options, words",
    [
        ("", {}, "empty"),
        ("   ", {}, "empty"),
        ("s3://", {}, "no bucket"),
        ("s3:///run", {}, "no bucket"),
        ("s3://bucket/a//b", {}, "part of the address"),
        ("s3://bucket/../b", {}, "part of the address"),
        ("s3://bucket/run?region=x", {}, "store_options"),
        ("file://host/run", {}, "three slashes"),
        ("s4://bucket/run", {}, "no store for s4://"),
        ("run", {"region": "x"}, "'region' has no meaning for a folder"),
        ("memory://x", {"endpoint": "x"}, "no meaning for memory"),
        ("s3://bucket/run", {"endpont_url": "x"}, "'endpont_url' is not known"),
        ("s3://bucket/run", {"endpoint_url": "127.0.0.1:9000"}, "http://"),
        ("s3://bucket/run", {"endpoint_url": 5}, "must be text"),
        ("s3://bucket/run", {"path_style": "maybe"}, "true or false"),
        ("s3://bucket/run", {"access_key_id": "AK"}, "secret_access_key is not set"),
        ("fsspec+s3://bucket/run", {"role_arn": "x"}, "not for fsspec"),
    ],
)
def test_an_address_or_option_that_means_nothing_is_refused(uri, options, words):
    with pytest.raises(SettingsError, match=words):
        open_store(uri, options=options, environ={})


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "fsspec+s3", "sftp"])
def test_credentials_in_an_address_are_refused_without_repeating_them(scheme):
    with pytest.raises(SettingsError, match="user name or password") as caught:
        open_store(f"{scheme}://somebody:hunter2hunter2@host/run")

    assert "hunter2" not in repr(caught.value)


def test_credentials_in_an_endpoint_are_refused_without_repeating_them():
    with pytest.raises(SettingsError, match="user name or password") as caught:
        open_store("s3://b/run", options={"endpoint_url": "http://me:hunter2@host"}, environ={})

    assert "hunter2" not in repr(caught.value)


@pytest.mark.parametrize("uri", ["fsspec+memory://x", "fsspec+file:///tmp/x", "fsspec+local:///tmp/x"])
def test_a_scheme_whose_creates_are_not_exclusive_must_be_asked_for(uri):
    with pytest.raises(UnsafeStore, match="allow_unconditional"):
        open_store(uri)

    assert not open_store(uri, allow_unconditional=True).conditional_create


@pytest.mark.parametrize("uri", ["run", "memory://x", "s3://b/r", "fsspec+s3://b/r", "gs://b/r", "az://c/r"])
def test_the_others_are_exclusive_and_keep_their_address(uri):
    options = {"account_name": "account", "skip_signature": True} if uri.startswith("az") else {}
    options = {"skip_signature": True} if uri.startswith("gs") else options

    store = open_store(uri, options=options, environ={})

    assert store.conditional_create
    assert store.uri.endswith(uri.rpartition("//")[2])


def test_options_win_over_the_environment_under_either_name():
    environ = {
        "AWS_ENDPOINT_URL": "http://environment:1",
        "AWS_REGION": "eu-west-1",
        "AWS_DEFAULT_REGION": "eu-west-2",
        "AWS_ACCESS_KEY_ID": "environment-key",
        "AWS_SECRET_ACCESS_KEY": "environment-secret",
        "AWS_SESSION_TOKEN": "environment-token",
    }

    alone = s3_settings({}, environ)
    short = s3_settings({"endpoint_url": "https://o:2", "region": "us-west-2"}, environ)
    long = s3_settings({"AWS_ACCESS_KEY_ID": "option-key", "AWS_SECRET_ACCESS_KEY": "option-secret"}, environ)

    assert (alone.endpoint_url, alone.region) == ("http://environment:1", "eu-west-1")
    assert alone.credentials == ("environment-key", "environment-secret", "environment-token")
    assert (short.endpoint_url, short.region, short.allow_http) == ("https://o:2", "us-west-2", False)
    assert long.credentials == ("option-key", "option-secret", None)


def test_an_endpoint_means_path_style_unless_said_otherwise():
    """Case J13: servers that are not Amazon's rarely have a host name per bucket."""
    endpoint = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}

    assert s3_settings({}, endpoint).path_style
    assert s3_settings({}, endpoint).allow_http
    assert not s3_settings({}, {}).path_style
    assert not s3_settings({"path_style": False}, endpoint).path_style
    assert not s3_settings({"virtual_hosted_style_request": True}, endpoint).path_style
    assert not s3_settings({}, endpoint | {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"}).path_style


@pytest.mark.parametrize(
    ("address", "scheme", "rest", "takes_options"),
    [
        ("runs/a", "", "runs/a", False),
        ("/data/a:b", "", "/data/a:b", False),
        ("file:///data", "file", "/data", False),
        ("memory://x", "memory", "x", False),
        ("S3://bucket/x", "s3", "bucket/x", True),
        ("fsspec+s3://bucket/x", "fsspec+s3", "bucket/x", True),
        ("4s://x", "", "4s://x", False),
    ],
)
def test_an_address_is_a_path_or_a_scheme_and_what_its_store_calls_a_place(
    address, scheme, rest, takes_options
):
    assert split(address) == (scheme, rest)
    assert from_anywhere(address) == (address if scheme else str(Path.cwd() / address))
    assert options_for(address, {"region": "x"}) == ({"region": "x"} if takes_options else {})


@pytest.mark.parametrize("scheme", ["s3", "fsspec+s3"])
def test_the_same_settings_work_as_options_and_as_environment(weed, scheme, monkeypatch):
    """Case J13: every way in leads to the same bucket and the same keys."""
    prefix = f"settings-{uuid.uuid4().hex}"
    uri = f"{scheme}://{weed.bucket}/{prefix}"
    by_options = open_store(
        uri,
        options={
            "endpoint_url": weed.endpoint,
            "access_key_id": weed.access_key,
            "secret_access_key": weed.secret_key,
        },
        environ={},
    )
    by_names = open_store(uri, options={"AWS_ENDPOINT_URL": weed.endpoint, **credentials(weed)}, environ={})
    for name, value in weed.env.items():
        monkeypatch.setenv(name, value)
    by_environment = open_store(uri)

    by_options.create("a/b", b"x")

    assert by_names.read("a/b") == by_environment.read("a/b") == b"x"
    assert [info.key for info in by_environment.scan("")] == ["a/b"]


def credentials(weed):
    return {"AWS_ACCESS_KEY_ID": weed.access_key, "AWS_SECRET_ACCESS_KEY": weed.secret_key}
