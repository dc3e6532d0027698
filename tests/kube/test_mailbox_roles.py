"""What the account of a mailbox may do in the broker's cluster, and all that it may not."""

import pytest

from kubelend.core.errors import UnexpectedAnswer

pytestmark = [pytest.mark.kube, pytest.mark.timeout(120)]


def test_account_sees_and_changes_its_own_mailbox_only(office, kube):
    rome, bonn = office.create("rome"), office.create("bonn")
    mine = office.kubeconfig(rome)
    kube.kubectl(
        "get", "reservations,clustersessions,cadv,pins", f"--namespace={rome}", kubeconfig=mine
    )
    for place in (f"--namespace={bonn}", "--namespace=default", "--all-namespaces"):
        for kind in ("reservations", "clustersessions", "cadv", "pins", "ledgerrecords", "secrets"):
            with pytest.raises(UnexpectedAnswer, match="forbidden"):
                kube.kubectl("get", kind, place, kubeconfig=mine)


@pytest.mark.parametrize(
    "refused",
    [
        ("label", "namespace", "{}", "broker.fluidos.eu/cluster-id=bonn", "--overwrite"),
        ("delete", "namespace", "{}"),
        ("create", "token", "kubelend-agent", "--namespace={}"),
        ("delete", "clustersession", "session", "--namespace={}"),
        ("get", "ledgerrecords", "--namespace={}"),
        ("get", "roles", "--namespace={}"),
        *(
            (
                "patch",
                kind,
                "any",
                "--namespace={}",
                "--subresource=status",
                "--type=merge",
                "-p={{}}",
            )
            for kind in ("reservation", "clusteradvertisement", "clustersession")
        ),
        ("delete", "providerinstruction", "any", "--namespace={}"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_account_cannot_write_what_is_the_brokers_or_the_operators(office, kube, refused):
    namespace = office.create("rome")
    words = [word.format(namespace) for word in refused]
    with pytest.raises(UnexpectedAnswer, match="forbidden"):
        kube.kubectl(*words, kubeconfig=office.kubeconfig(namespace))
