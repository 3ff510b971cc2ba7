"""Speculative decoding with a target and its drafters, described here in order of execution.

:class:`~ggufspec.decoding.decoder.SpeculativeDecoder` is the entry point: it loads a pair (``pair``) and generates
answers (``answer``; several at once: ``group``), reusing cached prefixes of prompts (``prompt_cache``). The steps:

1. **Prefill** (``loop.decode_prompt``). The target decodes the prompt, and the last row of logits yields the first
   token through steps 4 to 7, without a draft. Drafters with a model prefill later, as far as that pays off.
2. **Draft** (``loop.draft``), unless the policy backs off. For each position the policy chooses a drafter by the
   confidences known so far and the cost of obtaining more (``policy.choose``); the drafter proposes a candidate
   (``drafters``), which extends the chain if that pays off (``policy.extend``); the rule draws its token (``rules``,
   ``AcceptanceRule.draft_token``). Finally the policy may drop the chain's last tokens (``policy.verify_count``).
3. **Verify**. The target decodes the last emitted token and the chain in one batch, padded to a fast batch size
   (``policy.latency``); strict mode uses the batch sizes of one class only (``batch_sizes``). The loop yields the batch
   and receives its logits (``loop.drive``).
4. **Accept** (``AcceptanceRule.verify``). The rule accepts a prefix of the chain and chooses the token after it from
   the penalised rows (``penalties``), within the grammar (``grammar``), by sampling (``sampling``, ``noise``).
5. **Rewind**. The drafters and the target's cache drop the rejected tokens.
6. **Learn** (``policy.observe_round``). The round updates latency models, acceptance estimators and the back-off.
7. **Emit** (``answer``). The round is yielded; ``text`` turns its tokens into text, and ``trace``, if requested, reads
   the rule's record.
8. **Catch up** (``loop.catch_up``), after the tokens are emitted, so that it does not delay the first token. Drafters
   decode the tokens that they have not decoded yet, if that is worth the time. The tokens they would have drafted are
   compared with the text, or in the prompt with the target's likeliest tokens (shadow evaluation).

Target-only decoding is the same loop without step 2. ``options`` holds the settings; :mod:`ggufspec.decoding.hook`
drafts for llama-cpp-python's ``Llama`` with the same drafters and policy.
"""
