"""Contents of each conversation's caches, and reuse of the cached prefix of a prompt.

A cache of full attention alone can rewind to any length of a text. Memory that forgets (recurrent states, a sliding
window) can only return to states that were saved shortly before the ends of prompts.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ggufspec.decoding.batch import Batch, Decoded
from ggufspec.decoding.drafters.head import HeadDrafter
from ggufspec.decoding.drafters.model import ModelDrafter
from ggufspec.decoding.pair import LoadedPair
from ggufspec.decoding.text import common
from ggufspec.llamacpp.head import Head
from ggufspec.llamacpp.model import Context

_BEFORE_END = 16  # tokens between a saved state and a prompt's end; a chat template rarely appends more
_MOST_STATES = 2  # maximum saved states per conversation, each as large as a recurrent state or a window's cells


@dataclass(slots=True)
class CachedConversation:
    """Contents of the caches for one conversation."""

    drafter: ModelDrafter | HeadDrafter | None = None  # the conversation's drafter, if it needs a file
    texts: dict[str, list[int]] = field(default_factory=dict)  # by model, a text that begins with the cached tokens
    prompt: int = 0  # number of tokens in the last prompt, including cached ones
    states: list[tuple[int, Any]] = field(default_factory=list)  # (length, state) of memory that forgets, oldest first


class PromptCache:
    """Conversations of a pair, one of which is current; each has its own drafter if the drafter needs a file."""

    def __init__(self, pair: LoadedPair, drafters: Sequence[ModelDrafter | HeadDrafter | None]) -> None:
        self._pair = pair
        self.conversations = [CachedConversation(drafter) for drafter in drafters]
        self.now = self.conversations[0]

    def use(self, sequence: int, copy: int | None) -> None:
        """Switch to a conversation, and copy the caches of conversation ``copy`` to it, unless that is None or the
        target's memory forgets.
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
            return  # a head has to decode the text again
        if pair.draft and not pair.draft.forgets and "draft" in source.texts:
            pair.draft.copy(copy)
            now.drafter.follow(source.drafter)
            now.texts["draft"] = list(source.texts["draft"])

    def forget(self) -> None:
        """Treat all caches as empty, because they are in an unknown state."""
        for conversation in self.conversations:
            conversation.texts.clear()

    def found(self, prompt: Sequence[int], alone: str) -> tuple[int, int]:
        """Return how many tokens of a prompt can stay in the caches of the answering model and of the drafter; the last
        token is always decoded.
        """
        now, pair = self.now, self._pair
        in_draft = 0
        if now.drafter and (reader := pair.draft or pair.head):
            in_draft = self._kept("draft", prompt, reader, now.drafter.has_read)
        if alone == "draft":
            # ``whole`` is False if the draft has forgotten the beginning of its text
            whole = now.drafter is not None and pair.draft is not None and now.drafter.has_read == pair.draft.length
            return in_draft if whole else 0, in_draft
        cached = self._kept("target", prompt, pair.target, pair.target.length)
        if pair.options.strict:
            # Batch sizes affect rounding, so only whole batches that a fresh prefill would also decode stay cached.
            cached = max(0, min(cached, now.prompt - 1)) // pair.target.batch * pair.target.batch
        elif not cached and pair.target.forgets:
            cached = self._restored(prompt)
        return cached, in_draft

    def begin(self, text: list[int], cached: int, alone: str, *, drafting: bool) -> None:
        """Begin an answer to a prompt, of which ``cached`` tokens stay in the answering model's cache.

        The answer appends to ``text``, and empties it if it fails. With ``drafting``, the drafter with a file drafts.
        """
        now = self.now
        if alone != "draft":
            now.prompt = len(text)
            now.states = [one for one in now.states if one[0] <= cached]
        elif isinstance(now.drafter, ModelDrafter):
            now.drafter.let_go()
        now.texts[alone or "target"] = text
        if drafting:  # :meth:`drafts` follows once the drafter has turned to the prompt
            now.texts.pop("draft", None)

    def drafts(self, text: list[int]) -> None:
        """Note that the drafter with a file now follows ``text``, which its cache may begin with."""
        self.now.texts["draft"] = text

    def resume(self, text: list[int]) -> int:
        """Restore the target's cache to ``text`` without its last token, after another answer used it.

        Returns how many tokens were decoded again: those after the common prefix of both texts.
        """
        target, texts, end = self._pair.target, self.now.texts, len(text) - 1
        same = min(common(texts.pop("target", ())[: target.length], text), end)
        target.rewind(same)
        if same < end:
            target.decode(text[same:end], outputs=0)
        texts["target"] = text
        return end - same

    def save_before_end(self, prompt: Sequence[int], cached: int) -> Generator[Batch, Decoded, int]:
        """Decode all but the end of the prompt and save the state there, so that a follow-up prompt can resume from it.

        Returns the number of tokens in the target's cache.
        """
        context, states = self._pair.target, self.now.states
        last = len(prompt) - _BEFORE_END
        if not context.forgets or last <= cached:
            return cached
        context.rewind(cached)
        for first in range(cached, last, context.batch):
            yield Batch(prompt[first : min(first + context.batch, last)], 0, is_prompt=True)
        states.append(context.save())
        del states[:-_MOST_STATES]
        return last

    def _kept(self, name: str, prompt: Sequence[int], context: Context | Head, has_read: int) -> int:
        """Return how many tokens of the prompt a cache that has read ``has_read`` tokens of its text can retain; a
        cache that cannot rewind is retained whole or emptied.
        """
        same = common(self.now.texts.get(name, ())[:has_read], prompt[:-1])
        return same if same == has_read or (context.rewind_kind == "exact" and same >= context.floor) else 0

    def _restored(self, prompt: Sequence[int]) -> int:
        """Restore the newest saved state that fits this prompt; return its length in tokens, or 0 if no state fits."""
        same = common(self.now.texts.get("target", ()), prompt[:-1])
        saved = [one for one in self.now.states if one[0] <= same]
        if not saved:
            return 0
        self._pair.target.restore(saved[-1])
        return saved[-1][0]
