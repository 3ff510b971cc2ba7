"""Model files of pairs: profiles, headers, the hub's cache, and the compatibility of a draft with a target."""
