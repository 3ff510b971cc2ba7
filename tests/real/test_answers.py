"""Several answers of one decoder: other settings, a kept cache, one model alone, threads, closing in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ggufspec import DecoderOptions, Emitted, Sampling, SpeculativeDecoder
from ggufspec.decoding.policy import latency_cache
from ggufspec.decoding.rules import make_rule
from ggufspec.errors import ModelError, UsageError

OPTIONS = DecoderOptions(ctx_size=512, threads=1, draft_policy="fixed", draft_max=4)
PROMPT = "import os\n\n\ndef main("
N = 24


@pytest.fixture
def decoder(pair: tuple[Path, Path]) -> Iterator[SpeculativeDecoder]:
    with SpeculativeDecoder(*map(str, pair), options=OPTIONS) as one:
        yield one


def ids(emitted: Iterator[Emitted]) -> list[int]:
    return [one.token for one in emitted]


def answer(decoder: SpeculativeDecoder, prompt: str | list[int] = PROMPT, **options: object) -> list[int]:
    return ids(decoder.generate(prompt, max_tokens=N, **options))  # type: ignore[arg-type]


# Who wrote each token.


def test_every_token_tells_who_wrote_it(decoder: SpeculativeDecoder) -> None:
    emitted = list(decoder.generate(PROMPT, max_tokens=48))
    expected = []
    for one in decoder.rounds:
        own = "bonus" if one.accepted == len(one.drafted) > 0 else "target"
        expected += [*one.drafters[: one.accepted], own][: len(one.emitted)]
    assert [one.source for one in emitted] == expected
    assert {one.source for one in emitted} >= {"draft", "bonus", "target"}
    assert [one.drafted for one in emitted] == [source in ("draft", "lookup") for source in expected]
    assert decoder.statistics is not None
    assert sum(one.drafted for one in emitted) == decoder.statistics.accepted > 0


def test_a_target_alone_writes_everything(decoder: SpeculativeDecoder) -> None:
    assert {one.source for one in decoder.generate(PROMPT, max_tokens=8, alone="target")} == {"target"}


@pytest.mark.parametrize("drafter", ["draft", "lookup"])
def test_only_drafted_tokens_of_the_answer_count(pair: tuple[Path, Path], drafter: str) -> None:
    """A stop text may end an answer within a draft."""
    options = replace(OPTIONS, drafters=(drafter,), draft_max=8)
    with SpeculativeDecoder(*map(str, pair), options=options) as decoder:
        texts = [one.text for one in decoder.generate(PROMPT, max_tokens=48)]
        whole, within = decoder.statistics, 0
        for place in range(2, len(texts)):
            written = list(decoder.generate(PROMPT, max_tokens=48, stop=("".join(texts[place - 2 : place + 1]),)))
            found, last = decoder.statistics, decoder.rounds[-1]
            assert found is not None
            assert found.stop_reason in ("stop", whole.stop_reason)
            assert sum(one.drafted for one in written) == found.accepted <= found.tokens == len(written)
            assert sum(found.accepted_by_position) == found.accepted <= found.drafted == sum(found.drafted_by_position)
            within += found.stop_reason == "stop" and len(last.emitted) == last.accepted > 0
        assert within


# How it ended.


def test_one_that_ends_with_its_last_token_was_not_cut(decoder: SpeculativeDecoder) -> None:
    end = next(token for token in range(decoder.target.vocab_size) if decoder.target.is_end(token))
    for most in (1, 2):
        assert ids(decoder.generate(PROMPT, max_tokens=most, bias={end: 1000.0})) == [end]
        assert decoder.statistics is not None
        assert decoder.statistics.stop_reason == "end"


# One model alone.


def test_the_draft_alone_answers_as_if_it_were_the_only_model(
    decoder: SpeculativeDecoder, pair: tuple[Path, Path]
) -> None:
    target = answer(decoder)
    with SpeculativeDecoder(pair[1], None, OPTIONS) as small:
        expected = answer(small)
    assert answer(decoder, alone="draft") == expected
    assert answer(decoder, alone="draft", cache_prompt=True) == expected
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == 1
    assert answer(decoder) == target  # the draft drafts again
    assert answer(decoder, cache_prompt=True) == target
    assert decoder.statistics.accepted > 0


def test_without_a_draft_model_none_can_answer_alone(pair: tuple[Path, Path]) -> None:
    with (
        SpeculativeDecoder(pair[0], None, OPTIONS) as decoder,
        pytest.raises(UsageError, match="draft-only needs a draft model"),
    ):
        answer(decoder, alone="draft")


def test_a_model_that_nobody_knows(decoder: SpeculativeDecoder) -> None:
    with pytest.raises(UsageError, match="there is no model 'both'"):
        answer(decoder, alone="both")


# The cache from answer to answer.


class Counted:
    """Counts the tokens that a decoder's models decode."""

    def __init__(self, decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target = self.draft = 0
        for name in ("target", "draft"):
            context = getattr(decoder._pair, name)
            monkeypatch.setattr(context, "decode", self._counting(name, context.decode))

    def _counting(self, name: str, decode):  # type: ignore[no-untyped-def]
        def counted(tokens, outputs, batch_size=0):  # type: ignore[no-untyped-def]
            setattr(self, name, getattr(self, name) + len(tokens))
            return decode(tokens, outputs, batch_size)

        return counted


@pytest.mark.parametrize("alone", ["", "target"])
def test_a_second_turn_decodes_only_what_is_new(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch, alone: str
) -> None:
    prompt = decoder.target.tokenize(PROMPT * 10)
    first = answer(decoder, prompt, alone=alone, cache_prompt=True)
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == len(prompt)
    longer = [*prompt, *first, *decoder.target.tokenize("\n\n\nclass A:")]
    counted = Counted(decoder, monkeypatch)
    second = answer(decoder, longer, alone=alone, cache_prompt=True)
    new = len(longer) - len(prompt) - len(first)
    assert decoder.statistics.prompt_read <= new + 1  # and the last token of the answer, which nobody had decoded
    rejected = decoder.statistics.drafted - decoder.statistics.accepted
    assert counted.target <= new + 1 + len(second) + rejected
    assert counted.draft <= (new + 5 + len(second) + rejected if not alone else 0)
    monkeypatch.undo()
    assert answer(decoder, longer, alone="target") == second  # as if the whole prompt had been read


def test_the_first_token_is_waited_for_from_the_request_on(decoder: SpeculativeDecoder) -> None:
    prompt = decoder.target.tokenize(PROMPT * 10)
    asked = time.perf_counter()
    stream = decoder.generate(prompt, max_tokens=N)
    next(stream)
    waited = time.perf_counter() - asked
    for _ in stream:
        pass
    statistics = decoder.statistics
    assert statistics is not None
    assert statistics.prompt_read == len(prompt)
    assert statistics.time_to_first_token_s is not None
    assert statistics.prompt_s <= statistics.time_to_first_token_s <= waited
    answer(decoder, prompt, cache_prompt=True)
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read <= 2
    assert ids(decoder.generate(prompt, max_tokens=0)) == []
    assert decoder.statistics.time_to_first_token_s is None


def test_what_is_not_a_continuation_is_read_from_where_it_differs(decoder: SpeculativeDecoder) -> None:
    prompt = decoder.target.tokenize(PROMPT * 10)
    answer(decoder, prompt, cache_prompt=True)
    other = [*prompt[:40], *decoder.target.tokenize("\nclass Other:")]
    found = answer(decoder, other, cache_prompt=True)
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == len(other) - 40
    assert found == answer(decoder, other)
    assert decoder.statistics.prompt_read == len(other)


def test_an_answer_that_was_left_off_can_be_continued(decoder: SpeculativeDecoder) -> None:
    prompt = decoder.target.tokenize(PROMPT)
    whole = answer(decoder, prompt)
    stream = decoder.generate(prompt, max_tokens=N)
    some = [next(stream).token for _ in range(7)]
    stream.close()
    rest = ids(decoder.generate([*prompt, *some], max_tokens=N - 7, cache_prompt=True))
    assert [*some, *rest] == whole
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == 1


def test_the_draft_catches_up_after_answers_without_it(decoder: SpeculativeDecoder) -> None:
    prompt = decoder.target.tokenize(PROMPT)
    whole = ids(decoder.generate(prompt, max_tokens=3 * N))
    one = answer(decoder, prompt, cache_prompt=True)
    two = answer(decoder, [*prompt, *one], alone="target", cache_prompt=True)
    three = answer(decoder, [*prompt, *one, *two], cache_prompt=True)
    assert [*one, *two, *three] == whole
    assert decoder.statistics is not None
    assert decoder.statistics.accepted > 0


def test_a_draft_that_forgot_the_beginning_of_a_text_answers_alone(decoder: SpeculativeDecoder) -> None:
    """One that was off for long reads the last tokens only: its cache then begins in the midst of the text."""
    prompt = decoder.target.tokenize(PROMPT * 10)
    short = prompt[:40]
    expected = answer(decoder, short, alone="draft")
    answer(decoder, prompt)
    drafter = decoder._cache.now.drafter
    assert drafter is not None
    drafter.model.rewind(0)
    drafter.catch_up(decoder._cache.now.texts["draft"], make_rule("exact", Sampling()), 48)
    assert len(short) < drafter.model.length < drafter.has_read
    assert answer(decoder, short, alone="draft", cache_prompt=True) == expected
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == len(short)


def test_what_is_first_timed_at_the_end_of_the_context(pair: tuple[Path, Path]) -> None:
    with SpeculativeDecoder(*pair, replace(OPTIONS, ctx_size=64)) as decoder:
        prompt = decoder.target.tokenize(PROMPT * 20)[:60]
        full = ids(decoder.generate(prompt, max_tokens=64))
        assert decoder.statistics is not None
        assert decoder.statistics.stop_reason == "context"
        decoder.configure(draft_policy="adaptive")
        assert len(ids(decoder.generate(prompt, max_tokens=64, cache_prompt=True))) == len(full)
        assert decoder.statistics.prompt_read == len(prompt)  # the caches had to be emptied


def test_after_a_failure_nothing_is_taken_from_the_cache(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(decoder)
    decode, calls = decoder._pair.target.decode, []

    def failing(tokens, outputs, batch_size=0):  # type: ignore[no-untyped-def]
        calls.append(tokens)
        rows = decode(tokens, outputs, batch_size)
        if len(calls) == 3:
            raise ModelError("broken", "")
        return rows

    monkeypatch.setattr(decoder._pair.target, "decode", failing)
    with pytest.raises(ModelError, match="broken"):
        answer(decoder)
    monkeypatch.undo()
    assert answer(decoder, cache_prompt=True) == expected
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == decoder.statistics.prompt_tokens


# Settings that change between answers.


def test_every_setting_gives_the_text_of_the_target(decoder: SpeculativeDecoder) -> None:
    alone = answer(decoder, alone="target")
    seen = []
    for changes in (
        {"drafters": ("lookup",)},
        {"drafters": ("draft", "lookup"), "draft_max": 1},
        {"draft_policy": "adaptive", "draft_max": 15},
        {"drafters": ("draft",)},
        {"draft_policy": "fixed", "draft_max": 7},
        {"drafters": ()},
    ):
        decoder.configure(**changes)  # type: ignore[arg-type]
        assert answer(decoder) == alone
        assert decoder.statistics is not None
        seen.append((decoder.drafters, len(decoder.statistics.drafted_by_position)))
    assert seen == [
        (("lookup",), 4),
        (("draft", "lookup"), 1),
        (("draft", "lookup"), 15),
        (("draft",), 15),
        (("draft",), 7),
        ((), 0),
    ]


def test_another_rule(decoder: SpeculativeDecoder) -> None:
    exact = answer(decoder)
    decoder.configure(accept="top-k:1000")
    loose = answer(decoder)
    assert decoder.statistics is not None
    assert loose != exact
    assert decoder.statistics.accepted == decoder.statistics.drafted  # everything is good enough
    decoder.configure(accept="exact")
    assert answer(decoder) == exact


def test_a_corpus_for_the_lookup(decoder: SpeculativeDecoder, tmp_path: Path) -> None:
    plain = answer(decoder, alone="target")
    corpus = tmp_path / "corpus.txt"
    text = PROMPT + "".join(decoder.target.piece(token).decode() for token in plain)
    corpus.write_text(text)
    decoder.configure(drafters=("lookup",), lookup_corpus=corpus)
    assert answer(decoder) == plain
    assert decoder.statistics is not None
    assert decoder.statistics.lookup_accepted > N // 2
    with pytest.raises(UsageError, match="cannot be read"):
        decoder.configure(lookup_corpus=tmp_path / "none.txt")
    assert decoder.options.lookup_corpus == corpus
    assert answer(decoder) == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ctx_size": 4096}, "ctx_size cannot change while a pair is loaded"),
        ({"strict": True}, "strict cannot change"),
        ({"accept": "best"}, "no acceptance rule 'best'"),
        ({"draft_max": 16}, "is too long: the pair was loaded for up to 15"),
        ({"draft_max": 0}, "--draft-max 0 is out of range"),
        ({"drafters": ("nobody",)}, "no drafter 'nobody'"),
    ],
)
def test_what_cannot_change(decoder: SpeculativeDecoder, changes: dict[str, object], message: str) -> None:
    before = decoder.options
    with pytest.raises(UsageError, match=message):
        decoder.configure(**changes)  # type: ignore[arg-type]
    assert decoder.options == before
    assert answer(decoder) == answer(decoder, alone="target")


def test_a_setting_that_breaks_off_leaves_the_one_before_and_nothing_in_the_cache(
    decoder: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(decoder, cache_prompt=True)

    def failing(*_: object, **__: object) -> None:
        raise ModelError("broken", "")

    monkeypatch.setattr(latency_cache, "load_or_measure", failing)
    with pytest.raises(ModelError, match="broken"):
        decoder.configure(draft_policy="adaptive", draft_max=1)
    monkeypatch.undo()
    assert decoder.options == OPTIONS
    assert answer(decoder, cache_prompt=True) == expected
    assert decoder.statistics is not None
    assert decoder.statistics.prompt_read == decoder.statistics.prompt_tokens
    assert len(decoder.statistics.drafted_by_position) == OPTIONS.draft_max


def test_a_target_that_was_loaded_alone_has_no_room_for_drafts(pair: tuple[Path, Path]) -> None:
    with SpeculativeDecoder(pair[0], None, OPTIONS) as decoder:
        with pytest.raises(UsageError, match="loaded for up to 0"):
            decoder.configure(drafters=("lookup",))
        with pytest.raises(UsageError, match="needs a draft model"):
            decoder.configure(drafters=("draft",))
        decoder.configure(accept="residual")


# One answer at a time.


def test_while_an_answer_is_unfinished_nothing_else_is_done(decoder: SpeculativeDecoder) -> None:
    stream = decoder.generate(PROMPT, max_tokens=N)
    first = next(stream).token
    with pytest.raises(UsageError, match="unfinished"):
        answer(decoder)
    with pytest.raises(UsageError, match="unfinished"):
        decoder.configure(accept="residual")
    rest = ids(stream)
    assert [first, *rest] == answer(decoder)


def test_of_two_threads_one_is_refused_and_the_other_not_disturbed(decoder: SpeculativeDecoder) -> None:
    alone = ids(decoder.generate(PROMPT, max_tokens=200, sampling=Sampling(temperature=1.5, seed=3)))
    begun, answers, refused = threading.Event(), [], []

    def first() -> None:
        for one in decoder.generate(PROMPT, max_tokens=200, sampling=Sampling(temperature=1.5, seed=3)):
            answers.append(one.token)
            begun.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(30)
    while thread.is_alive():
        try:
            next(decoder.generate(PROMPT, max_tokens=1))
        except UsageError as error:
            refused.append(error)
    thread.join()
    assert refused
    assert answers == alone


def test_decoders_of_two_threads_do_not_know_of_each_other(pair: tuple[Path, Path]) -> None:
    found: dict[int, list[int]] = {}

    def one(seed: int) -> None:
        with SpeculativeDecoder(*pair, OPTIONS) as decoder:
            found[seed] = answer(decoder, sampling=Sampling(temperature=0.8, seed=seed))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = dict(found)
    for seed in (1, 2):
        one(seed)
    assert found == expected


def test_closing_ends_an_answer_that_is_unfinished(pair: tuple[Path, Path]) -> None:
    decoder = SpeculativeDecoder(*pair, OPTIONS)
    stream = decoder.generate(PROMPT, max_tokens=N)
    next(stream)
    decoder.close()
    assert ids(stream) == []  # not even what was accepted already: the vocabulary that would spell it is freed
    decoder.close()
    with pytest.raises(UsageError, match="the decoder is closed"):
        answer(decoder)
    with pytest.raises(UsageError, match="the decoder is closed"):
        decoder.configure(draft_policy="adaptive")


def test_closing_while_another_thread_reads_a_prompt_is_refused(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(*pair, OPTIONS)
    decode, reading, go_on = decoder._pair.target.decode, threading.Event(), threading.Event()

    def waiting(tokens, outputs, batch_size=0):  # type: ignore[no-untyped-def]
        reading.set()
        assert go_on.wait(30)
        return decode(tokens, outputs, batch_size)

    monkeypatch.setattr(decoder._pair.target, "decode", waiting)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(answer(decoder)))
    thread.start()
    try:
        assert reading.wait(30)
        with pytest.raises(UsageError, match="unfinished"):
            decoder.close()
    finally:
        go_on.set()
        thread.join()
    assert len(found) == N
    decoder.close()
