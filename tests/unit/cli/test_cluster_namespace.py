"""`kubelend create clusternamespace` prints what `kubectl apply` takes."""

import yaml

from kubelend.cli import main


def test_documents_are_printed_for_kubectl(capsys):
    assert main.run(["create", "clusternamespace", "--cluster-id", "Rome"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    assert found[0]["metadata"]["name"] == "cluster-rome"
    assert found[0]["metadata"]["labels"] == {"broker.fluidos.eu/cluster-id": "Rome"}
    assert [one["kind"] for one in found[1:]] == [
        "ClusterSession",
        "ServiceAccount",
        "Role",
        "RoleBinding",
    ]


def test_mistakes_are_told(capsys):
    assert main.run(["create", "clusternamespace", "--cluster-id", "a b"]) == 2
    assert "cannot have a cluster namespace" in capsys.readouterr().err
    assert main.run(["create", "clusternamespace", "--cluster-id", "a", "--namespace", "No"]) == 2
    assert "'No' is not a valid namespace" in capsys.readouterr().err
