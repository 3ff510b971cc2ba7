"""May this draft serve this target?"""

import pytest

from ggufspec.pairs.compat import Vocabulary, vocabulary_mismatch

TOKENS = [b"<unk>", b"<s>", b"</s>", b"x", b"y", b"a", b"b", b"\xff"]


def vocabulary(tokens=TOKENS, kind="BPE", adds_bos=True):
    return Vocabulary(kind, adds_bos, tokens)


def test_the_same_vocabulary_serves():
    assert vocabulary_mismatch(vocabulary(), vocabulary()) is None


@pytest.mark.parametrize("token", range(5))
def test_the_first_five_tokens_may_differ(token):
    """llama.cpp common/speculative.cpp compares from token 5 on."""
    tokens = [b"?" if index == token else text for index, text in enumerate(TOKENS)]
    assert vocabulary_mismatch(vocabulary(), vocabulary(tokens)) is None


@pytest.mark.parametrize(("token", "shown"), [(5, "'a'"), (6, "'b'"), (7, "'\ufffd'")])
def test_a_token_that_differs_is_named(token, shown):
    tokens = [b"?" if index == token else text for index, text in enumerate(TOKENS)]
    reason = vocabulary_mismatch(vocabulary(), vocabulary(tokens))
    assert reason == f"token {token} is {shown} to the target and '?' to the draft"


def test_the_first_of_several_is_named():
    assert "token 5 " in vocabulary_mismatch(vocabulary(), vocabulary([b"?"] * 8))


def test_another_kind_of_tokenizer():
    reason = vocabulary_mismatch(vocabulary(kind="BPE"), vocabulary(kind="SPM"))
    assert reason == "the target's tokenizer is BPE, the draft's is SPM"


@pytest.mark.parametrize(("target", "reason"), [(True, "the target puts"), (False, "the draft puts")])
def test_only_one_puts_a_bos_token(target, reason):
    found = vocabulary_mismatch(vocabulary(adds_bos=target), vocabulary(adds_bos=not target))
    assert found.startswith(reason)
    assert found.endswith("the draft does not" if target else "the target does not")


@pytest.mark.parametrize("sizes", [(1000, 1128), (1128, 1000)])
def test_padding_of_up_to_128_tokens_serves(sizes):
    target, draft = (vocabulary([b"%d" % token for token in range(size)]) for size in sizes)
    assert vocabulary_mismatch(target, draft) is None


@pytest.mark.parametrize("sizes", [(1000, 1129), (1129, 1000)])
def test_a_larger_difference_in_size_does_not(sizes):
    target, draft = (vocabulary([b"%d" % token for token in range(size)]) for size in sizes)
    assert vocabulary_mismatch(target, draft) == f"the target has {sizes[0]:,} tokens, the draft {sizes[1]:,}"
