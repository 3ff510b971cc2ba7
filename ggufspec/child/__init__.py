"""Runs a job in a child process, so that an abort of llama.cpp ends the job and not the program.

The child is ``python -P -m ggufspec.child MODULE``; without ``-P`` a ``json.py`` in the current folder would run. There
are two kinds of job:

- A call. The module has a ``Spec``, a ``Result`` and ``run(spec, emit, stopping) -> Result``.
- A session, whose child answers many requests. The module has a ``Spec``, a ``Ready``, a ``Request``, a ``Reply`` and a
  context manager ``opened(spec, emit, stopping)``. Its value has ``ready`` and ``answer(request, emit, stopping)``,
  which returns a ``Reply``; if it raises a GgufspecError, the session stays open.

``emit`` sends an event; ``stopping`` is set when the request should return what it has.

Both use one protocol, lines of JSON. stdin carries the spec, which is request 0, and in a session requests 1, 2, …,
each after the reply to the previous one. stdout carries ``["event", {…}]`` and one outcome per request: ``["result", N,
…]`` or ``["error", N, message, hint, exit code]``. After ``["within", S, what, hint]`` the parent kills the child in S
seconds, unless ``["within", null]`` follows. ``{"stop": N}`` on stdin asks request N to stop. The end of stdin (Ctrl-C
in the parent, or the parent's death) asks the child to end; it does so within ``job.GRACE_S``, whatever llama.cpp is
doing.
"""

from ggufspec.child.job import Emit, Event, limited_memory, note_on_card, within
from ggufspec.child.session import Interrupted, Session, call

__all__ = ["Emit", "Event", "Interrupted", "Session", "call", "limited_memory", "note_on_card", "within"]
