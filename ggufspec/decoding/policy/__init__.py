"""Policies that decide how far to draft.

``base`` defines what the loop asks of a policy and reports to it, and the fixed policy; ``adaptive`` is the other one.
It consists of ``latency`` (seconds of a batch by its size), ``estimator`` (the probability that a drafted token is
accepted) and ``backoff`` (when deciding costs more than it brings), with the numbers of ``constants``. ``timing``
measures a latency model when a pair is loaded, ``latency_cache`` saves it, ``pair_latency`` has those of a pair.
"""
