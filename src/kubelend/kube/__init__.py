"""A thin Kubernetes client on aiohttp and msgspec, small enough for the agent (docs/adr/0018).

    settings = kubelend.kube.config.load_config()
    async with client.Client.open(settings) as kubernetes:
        pods = await kubernetes.list(PODS)

`config` has the API server's address and the credentials, `resources` the kinds, `client` the verbs, and
`informer` lists and watches a kind and caches its objects.
"""
