"""Speculative decoding with a target and drafters, described here in the order of execution.

:class:`~ggufspec.decoding.decoder.SpeculativeDecoder` is the entry point: it loads a pair (``pair``) and gives one
answer at a time (``answer``), reusing what the caches hold of its prompt (``prompt_cache``). The steps of an answer:

1. **Prefill** (``loop.prefill``). The target decodes the prompt; the last row of logits yields the first token, by
   steps 4 to 7 without a draft. Drafters with a model read the prompt later, as much of it as is worth the time.
2. **Draft** (``loop.draft``), unless the policy backs off. For each position the policy chooses a drafter by the
   confidences that are known and the cost of learning the others (``policy.choose``); the drafter proposes a candidate
   (``drafters``), which joins the chain if that pays (``policy.extend``); the rule draws its token (``rules``,
   ``Rule.draft_token``). The policy may shorten the chain at the end (``policy.verify_count``).
3. **Verify**. The target decodes its last token and the chain in one batch, padded to a batch size that is fast
   (``policy.latency``) and, in strict mode, of one class (``widths``). The loop yields the batch and is sent its rows
   (``loop.drive``).
4. **Accept** (``Rule.verify``). The rule accepts a prefix of the chain and chooses the token after it, from penalised
   rows (``penalties``), by grammar (``grammar``) and sampling (``sampling``, ``noise``).
5. **Rewind**. The drafters and the target's cache drop the rejected tokens.
6. **Learn** (``policy.observe_round``). Latency models, acceptance estimators and the back-off learn from the round.
7. **Emit** (``answer``). The round is yielded; ``text`` turns its tokens into text, and ``trace``, if requested, reads
   the rule's record.
8. **Catch up** (``loop.catch_up``), after the tokens are emitted, so that the first one does not wait. Drafters that
   fell behind read the new tokens if that is worth the time. What they would have drafted is compared with the text or
   the target's likeliest tokens at these positions: a shadow evaluation.

Target-only is the same loop without step 2. ``options`` holds the settings; :mod:`ggufspec.decoding.hook` drafts for
llama-cpp-python's ``Llama`` with the same drafters and policy.
"""
