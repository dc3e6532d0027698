"""Which proxy stands before an API server."""

import pytest

from kubelend.kube import config

PROXY = {"HTTPS_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    "url, environment, expected",
    [
        pytest.param("https://api:6443", {}, "", id="none"),
        pytest.param("https://api:6443", PROXY, "http://proxy:3128", id="one"),
        pytest.param("https://api:6443", {"https_proxy": "p:1"}, "http://p:1", id="lower case"),
        pytest.param("http://api", PROXY, "", id="for another scheme"),
        pytest.param("https://127.0.0.1:6443", PROXY, "", id="loopback"),
        pytest.param("https://localhost:6443", PROXY, "", id="localhost"),
        pytest.param("https://api:6443", PROXY | {"NO_PROXY": "*"}, "", id="none at all"),
        pytest.param(
            "https://10.96.0.1", PROXY | {"NO_PROXY": "x, 10.96.0.0/12"}, "", id="network"
        ),
        pytest.param(
            "https://10.1.0.1",
            PROXY | {"NO_PROXY": "10.96.0.0/12"},
            "http://proxy:3128",
            id="outside",
        ),
        pytest.param("https://a.example.org", PROXY | {"NO_PROXY": "example.org"}, "", id="below"),
        pytest.param("https://a.example.org", PROXY | {"NO_PROXY": ".example.org"}, "", id="dot"),
        pytest.param(
            "https://example.org",
            PROXY | {"NO_PROXY": ".example.org"},
            "http://proxy:3128",
            id="dot means below only",
        ),
        pytest.param(
            "https://badexample.org",
            PROXY | {"NO_PROXY": "example.org"},
            "http://proxy:3128",
            id="not below",
        ),
    ],
)
def test_proxy_of_the_environment(url, environment, expected):
    assert config.proxy_for(url, environment) == expected
