"""File systems behind URLs: what opens, and what is refused in one line."""

import time

import pytest

from hsvit_jax import storage


def test_urls_are_recognised_and_made_whole():
    for url in ("gs://b/run", "s3://b", "memory://run", "gs:/b/run"):
        assert storage.is_url(url)
    for place in ("runs/a", "zoo:c2a2", "hub:owner/name", "c:/runs", "/gs://b", ""):
        assert not storage.is_url(place)
    assert storage.whole_url("gs:/b/run/") == "gs://b/run"


def test_a_file_system_is_opened_with_its_path():
    store, path = storage.filesystem("memory://run/a")
    store.pipe_file(path, b"1")
    assert store.cat_file("/run/a") == b"1"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gss://b/run", ["gss://", "Did you mean gs?"]),
        ("nowhere://b/run", ["nowhere://"]),
        ("s3://KEYKEY:PASSWD@b/run", ["credentials", "AWS_PROFILE"]),
    ],
)
def test_what_cannot_be_opened_is_refused_in_a_line(url, words):
    with pytest.raises(storage.StorageError) as error:
        storage.filesystem(url)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words)
    assert "PASSWD" not in line and "KEYKEY" not in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("b/run"), ["is not there", "create the bucket"]),
        (PermissionError("Forbidden: b/o\nno"), ["refuses", "Storage Object User"]),
        (OSError("Forbidden: b/o\nno"), ["refuses", "Storage Object User"]),
        (Exception("Anonymous caller does not have access, 401"), ["credentials", "gcloud"]),
        (OSError(f"reset; key {'A' * 40}"), ["does not answer", "reset"]),
    ],
)
def test_errors_name_the_bucket_and_the_fix(error, words):
    line = str(storage.explain("gs://bucket/run", error))
    assert "gs://bucket" in line and "\n" not in line and all(word in line for word in words)
    assert "A" * 40 not in line
    assert storage.is_final(error) == ("does not answer" not in line)


def test_a_call_that_hangs_is_given_up():
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        storage.within(0.2, time.sleep, 5)
    assert time.monotonic() - begun < 2
    assert storage.within(5, sum, [1, 2]) == 3
