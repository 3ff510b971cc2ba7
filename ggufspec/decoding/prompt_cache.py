"""What the caches hold of each conversation, and how much of a prompt need not be decoded again.

A cache of attention alone goes back to any length of a text. One that forgets (recurrent, or a sliding window) goes
back to the states that were saved shortly before the ends of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.pair import LoadedPair
from ggufspec.decoding.text import common
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context

_BEFORE_END = 16  # tokens: a chat template's end of a prompt is rarely longer
_MOST_STATES = 2  # saved for each conversation, as large as a recurrent state or the cells of a window


@dataclass(slots=True)
class Conversation:
    """What the caches hold of one conversation."""

    drafter: ModelDrafter | HeadDrafter | None = None  # the one with a file
    texts: dict[str, list[int]] = field(default_factory=dict)  # that begin with what is in the caches, by model
    prompt: int = 0  # tokens that were last read as a prompt, cached ones included
    states: list[tuple[int, Any]] = field(default_factory=list)  # of a memory that forgets, oldest first


class PromptCache:
    """The conversations of a pair, of which one is in use; each has a drafter of its own, the one with a file."""

    def __init__(self, pair: LoadedPair, drafters: Sequence[ModelDrafter | HeadDrafter | None]) -> None:
        self._pair = pair
        self.conversations = [Conversation(drafter) for drafter in drafters]
        self.now = self.conversations[0]

    def use(self, sequence: int, copy: int | None) -> None:
        """Go on with this conversation; with ``copy`` it begins with what the caches hold of that one, in place of its
        own, unless the target's memory forgets.
        """
        pair = self._pair
        self.now = now = self.conversations[sequence]
        pair.use(sequence)
        if copy is None or copy == sequence or pair.target.forgets:
            return
        source = self.conversations[copy]
        pair.target.copy(copy)
        now.texts.clear()
        now.prompt = source.prompt
        if "target" in source.texts:
            now.texts["target"] = list(source.texts["target"])
        if not isinstance(now.drafter, ModelDrafter) or not isinstance(source.drafter, ModelDrafter):
            return  # a head reads anew
        if pair.draft and not pair.draft.forgets and "draft" in source.texts:
            pair.draft.copy(copy)
            now.drafter.follow(source.drafter)
            now.texts["draft"] = list(source.texts["draft"])

    def forget(self) -> None:
        """The caches are in an unknown state."""
        for conversation in self.conversations:
            conversation.texts.clear()

    def found(self, prompt: Sequence[int], alone: str) -> tuple[int, int]:
        """Tokens of a prompt that are in the cache of the model that answers, and in the drafter's, and can stay; its
        last token is always decoded.
        """
        now, pair = self.now, self._pair
        in_draft = 0
        if now.drafter and (reader := pair.draft or pair.head):
            in_draft = self._kept("draft", prompt, reader, now.drafter.has_read)
        if alone == "draft":
            # else it has forgotten the beginning
            whole = now.drafter is not None and pair.draft is not None and now.drafter.has_read == pair.draft.length
            return in_draft if whole else 0, in_draft
        cached = self._kept("target", prompt, pair.target, pair.target.length)
        if pair.options.strict:
            # A token is rounded by its batch: the whole batches stay that a fresh reading would have decoded, too.
            cached = max(0, min(cached, now.prompt - 1)) // pair.target.batch * pair.target.batch
        elif not cached and pair.target.forgets:
            cached = self._restored(prompt)
        return cached, in_draft

    def begin(self, text: list[int], cached: int, alone: str, *, drafting: bool) -> None:
        """An answer begins with a prompt of which ``cached`` tokens stay in the answering model's cache.

        The answer appends to ``text``, and empties it if it fails. ``drafting``: the drafter with a file drafts.
        """
        now = self.now
        if alone != "draft":
            now.prompt = len(text)
            now.states = [one for one in now.states if one[0] <= cached]
        elif isinstance(now.drafter, ModelDrafter):
            now.drafter.let_go()
        now.texts[alone or "target"] = text
        if drafting:
            now.texts["draft"] = text

    def resume(self, text: list[int]) -> int:
        """Let the target's cache hold ``text`` without its last token again, after another answer used it.

        Returns how many tokens were decoded for that: those after the beginning that both texts have in common.
        """
        target, texts, end = self._pair.target, self.now.texts, len(text) - 1
        same = min(common(texts.pop("target", ())[: target.length], text), end)
        target.rewind(same)
        if same < end:
            target.decode(text[same:end], outputs=0)
        texts["target"] = text
        return end - same

    def save_before_end(self, prompt: Sequence[int], cached: int, goes_on: Callable[[], bool]) -> int | None:
        """Read a prompt up to where a later one, which differs at its end, may go back to, and save the state there.

        Returns the tokens that are in the target's cache then; None if between two batches it does not go on.
        """
        context, states = self._pair.target, self.now.states
        last = len(prompt) - _BEFORE_END
        if not context.forgets or last <= cached:
            return cached
        context.rewind(cached)
        for first in range(cached, last, context.batch):
            if first > cached and not goes_on():
                return None
            context.decode(prompt[first : min(first + context.batch, last)], outputs=0)
        states.append(context.save())
        del states[:-_MOST_STATES]
        return last

    def _kept(self, name: str, prompt: Sequence[int], context: Context | Head, has_read: int) -> int:
        """How much of the prompt is in a cache that has read so many tokens of its text, and can stay there; a cache
        that cannot rewind is kept whole or emptied.
        """
        same = common(self.now.texts.get(name, ())[:has_read], prompt[:-1])
        return same if same == has_read or (context.rewind_kind == "exact" and same >= context.floor) else 0

    def _restored(self, prompt: Sequence[int]) -> int:
        """Go back to the newest saved state that this prompt begins with; the tokens that are in the cache then."""
        same = common(self.now.texts.get("target", ()), prompt[:-1])
        saved = [one for one in self.now.states if one[0] <= same]
        if not saved:
            return 0
        self._pair.target.restore(saved[-1])
        return saved[-1][0]
