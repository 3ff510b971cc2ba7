"""Which files make a pair: profiles, the hub's cache, and whether a draft may serve a target."""
