"""Kubeconfigs made of others are read by our own client as they are meant."""

import stat

import yaml

from kubelend.envtest import credentials
from kubelend.kube import config


def kubeconfig(path, name, server):
    """As Kind writes it: contexts of its own names."""
    content = {
        "clusters": [{"name": f"kind-{name}", "cluster": {"server": server}}],
        "users": [{"name": f"kind-{name}", "user": {"token": f"secret of {name}"}}],
        "contexts": [{"name": f"kind-{name}", "context": {}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_account_reaches_the_same_cluster_by_its_token(tmp_path):
    admin = kubeconfig(tmp_path / "admin", "a", "https://127.0.0.1:1")
    made = credentials.write_token_kubeconfig(admin, tmp_path / "made", "robot", "other")
    found = config.config_from_kubeconfig(made)
    assert found.server == "https://127.0.0.1:1"
    assert found.token.data == b"other"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_several_clusters_have_a_context_of_their_name_each(tmp_path):
    sources = {
        name: kubeconfig(tmp_path / name, name, f"https://127.0.0.1:{port}")
        for port, name in enumerate(("a", "b"), 1)
    }
    made = credentials.merge_kubeconfigs(sources, tmp_path / "made")
    for port, name in enumerate(sources, 1):
        found = config.config_from_kubeconfig(made, name)
        assert found.server == f"https://127.0.0.1:{port}"
        assert found.token.data == f"secret of {name}".encode()
    assert config.config_from_kubeconfig(made).server == "https://127.0.0.1:1"
