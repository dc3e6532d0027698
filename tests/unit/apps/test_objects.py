"""Where the broker's objects are: what the flags say, put together."""

import pytest

from kubelend.apps import broker_kubernetes
from kubelend.apps.settings import BrokerSettings


@pytest.mark.parametrize(
    "settings, store",
    [
        ({}, "kubernetes:"),
        ({"kubeconfig": "/etc/hub.yaml"}, "kubernetes:/etc/hub.yaml"),
        ({"kubeconfig": "a b"}, "kubernetes:a b"),
        (
            {"kubeconfig": "/hub", "store": "kubernetes:?namespace=n"},
            "kubernetes:/hub?namespace=n",
        ),
        ({"kubeconfig": "/hub", "store": "kubernetes:///other"}, "kubernetes:///other"),
    ],
)
def test_kubeconfig_goes_into_a_store_that_names_none(settings, store):
    assert (
        broker_kubernetes.resolved_store_url(
            BrokerSettings(broker_interface="kubernetes", **settings)
        )
        == store
    )


def test_store_in_a_file_stays_one():
    assert broker_kubernetes.resolved_store_url(BrokerSettings(kubeconfig="/hub")) == "kubelend.db"
