"""Runs a job in a child process, so that an abort of llama.cpp ends the job and not the program.

The child is ``python -P -m ggufspec.child MODULE``; without ``-P`` a ``json.py`` in the current folder would run.
There are two kinds of job:

- A call. The module has a ``Spec``, a ``Result`` and ``run(spec, emit, stopping) -> Result``.
- A session, whose child answers many requests. The module has a ``Spec``, a ``Ready``, a ``Request``, a ``Reply`` and
  ``opened(spec, emit, stopping)``, a context manager. Its value has ``ready`` and ``answer(request, emit, stopping)``,
  which gives a ``Reply``; what it raises as GgufspecError leaves the session open.

``emit`` sends an event, ``stopping`` is set when the request is to stop with what it has.

Both use one protocol, lines of JSON. On stdin come the spec, which is request 0, and in a session requests 1, 2, …,
each after the reply to the one before. On stdout come ``["event", {…}]`` and, for every request, one outcome:
``["result", N, …]`` or ``["error", N, message, hint, exit code]``. After ``["within", S, what, hint]`` the parent
kills the child in S seconds, unless ``["within", null]`` follows. ``{"stop": N}`` on stdin asks request N to stop.
The end of stdin asks the child to end: Ctrl-C in the parent, or the parent's death. It ends within
``job.GRACE_S`` then, whatever llama.cpp is doing.
"""

from ggufspec.child.job import Emit, Event, limited_memory, note_on_card, within
from ggufspec.child.session import Interrupted, Session, call

__all__ = ["Emit", "Event", "Interrupted", "Session", "call", "limited_memory", "note_on_card", "within"]
