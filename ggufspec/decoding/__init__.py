"""Decoding with a target and drafters, walked once in the order of execution.

:class:`~ggufspec.decoding.decoder.SpeculativeDecoder` is the entry: it loads a pair (``pair``) and gives one answer at
a time (``answer``), each begun with what the caches have of its prompt (``prompt_cache``). The steps of an answer:

1. **Prefill** (``loop.prefill``). The target reads the prompt, and the first token is chosen by the last row of the
   prompt's batch: steps 4 to 7 without a draft. Drafters that decode read it later, as much of it as that is worth.
2. **Draft** (``loop.draft``), unless the policy backs off. For each position the policy chooses a drafter by the
   confidences that are known and the cost of those that are not (``policy.choose``); the drafter proposes a candidate
   (``drafters``), which joins the chain if that pays (``policy.extend``); the rule draws its token
   (``rules``, ``Rule.draft_token``). The policy may cut the chain at the end (``policy.verify_count``).
3. **Verify**. The target decodes its last token and the chain in one batch, padded to a width that is fast
   (``policy.latency``) and, in strict mode, of one class (``widths``). The loop yields the batch and is sent its rows
   (``loop.drive``).
4. **Accept** (``Rule.verify``). The rule accepts a prefix of the chain and chooses the token that follows it, from
   penalised rows (``penalties``), by grammar (``grammar``) and sampling (``sampling``, ``noise``).
5. **Rewind**. The drafters and the target's cache keep what was accepted.
6. **Learn** (``policy.observe_round``). Latency models, acceptance estimators and the back-off see how the round went.
7. **Emit** (``answer``). The round is yielded; ``text`` turns its tokens into text, and ``trace`` reads the rule's
   record if asked.
8. **Catch up** (``loop.catch_up``), after the round's tokens, so that the first one does not wait. Drafters that fell
   behind read if that is worth its time. What they would have drafted is compared with what the target said, or
   would have said, at these positions: a shadow evaluation.

Target-only is the same loop without step 2. ``options`` has what can be set; :mod:`ggufspec.decoding.hook` drafts for
llama-cpp-python's ``Llama`` with the same drafters and policy.
"""
