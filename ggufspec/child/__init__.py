"""Jobs in child processes, so that an abort in llama.cpp ends the job and not the program.

The child is ``python -P -m ggufspec.child MODULE``; without ``-P``, Python would import a ``json.py`` from the current
folder. There are two kinds of job; their functions' annotations give the types of the messages:

- A call. The module has ``run(spec, emit, stopping)``, which returns the result.
- A session, whose child answers many requests. The module has a context manager ``opened(spec, emit, stopping)``. Its
  value has ``ready`` and ``answer(request, emit, stopping)``, which returns the reply; if ``answer`` raises a
  GgufspecError, the session stays open. A value that answers several requests at once has, instead of ``answer``,
  ``begin(number, request, emit, stopping)`` and ``step()``, which is called while requests are unanswered and returns
  (number, reply or GgufspecError) for each request that has ended.

``emit`` sends an event; ``stopping`` is set when the request should return its result so far.

Both kinds use one protocol of JSON lines. stdin carries the spec as request 0 and, in a session, requests 1, 2 and so
on. stdout carries ``["event", N, {…}]`` for request N, and one outcome per request: ``["result", N, …]`` or ``["error",
N, message, hint, exit code]``. After ``["within", S, what, hint]`` the parent kills the child after S seconds, unless
``["within", null]`` follows. ``{"stop": N}`` on stdin asks request N to stop. The end of stdin (Ctrl-C in the parent,
or its death) asks the child to end; it does so within ``job.GRACE_S``, whatever llama.cpp is doing.
"""

from ggufspec.child.job import Emit, Event, limited_memory, note_on_card, within
from ggufspec.child.session import Interrupted, Session, call

__all__ = ["Emit", "Event", "Interrupted", "Session", "call", "limited_memory", "note_on_card", "within"]
