"""Policies that decide how far to draft.

``base`` defines the interface between the loop and a policy, and the policy ``fixed``; ``adaptive`` is the policy of
that name. It uses ``latency`` (seconds per batch by batch size), ``estimator`` (probability that a drafted token is
accepted) and ``backoff`` (pauses when deciding costs more than it gains), with the values in ``constants``. ``timing``
measures a latency model when a pair is loaded, ``latency_cache`` saves it, and ``pair_latency`` holds a pair's models.
"""
