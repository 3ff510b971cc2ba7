"""How far to draft: latency model, acceptance estimator, adaptive length and back-off."""
