"""A thin Kubernetes client on aiohttp and msgspec, small enough for the agent (docs/adr/0018).

    access = kubelend.kube.access.find()
    async with client.Client.open(access) as kubernetes:
        pods = await kubernetes.list(PODS)

`access` says where an API server is and who calls it, `resources` what there is to ask for, `client` has
the calls, and `watching` keeps a view of a kind of object up to date.
"""
