"""How far to draft.

``base`` is what the loop asks of a policy and reports to it, with the fixed policy; ``adaptive`` is the other one. It
is made of ``latency`` (seconds of a batch by its width), ``estimator`` (the chance that a drafted token is accepted)
and ``backoff`` (when deciding costs more than it brings), with the numbers of ``constants``. ``timing`` measures a
latency model when a pair is loaded, ``latency_cache`` keeps it, ``pair_latency`` has those of a pair.
"""
