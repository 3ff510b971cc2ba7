"""Report of a trace's rounds, with rows for both the terminal and the page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggufspec.reports.words import milliseconds, shortened
from ggufspec.schema.rounds import AddedToken, DraftedToken, JudgedToken, LikelyToken, OwnChoice, TracedRound
from ggufspec.schema.text import counted, visible
from ggufspec.schema.trace import WrittenToken
from ggufspec.settings.registry import LABELS

if TYPE_CHECKING:
    from rich.text import Text

WRITERS = {
    **{name: f"drafted by the {label} and accepted" for name, label in LABELS.items()},
    "bonus": "the target's own token after a fully accepted draft",
    "target": "the target's own token",
}
_RESULTS = {"accepted": "accepted", "rejected": "rejected", "unread": "not checked"}
_STYLES = {"accepted": "green", "rejected": "red", "unread": "dim", "added": "bold"}
_NUMBERS = 6  # terminal columns for each of q, p and their ratio
_RULE = 20  # terminal columns for the rule's comparison
_CHOICE = " the target's choice"  # omitted on narrow terminals
_WIDE = 112  # minimum terminal columns for showing _CHOICE
_RESULT = 15
_FEWEST_DIGITS = 3


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Table cells for one token in a round."""

    number: str  # position in the draft; ``+`` for the target's own token
    who: str  # drafter, or ``target``
    token: str
    q: str  # draft's probability; if sampling is greedy, before sampling settings are applied
    p: str  # target's probability; if sampling is greedy, before sampling settings are applied
    ratio: str
    rule: str  # comparison that the rule made, with enough digits not to contradict its result
    result: str
    kind: str
    draft: tuple[LikelyToken, ...] = ()  # the draft's most likely tokens
    target: tuple[LikelyToken, ...] = ()  # the target's most likely tokens, if it rejected the token or added its own


def heading(round_: TracedRound) -> str:
    if not round_.number:
        return "first token: from the prompt's batch" + ("" if round_.added else ", and the grammar permits nothing")
    parts = ["nothing drafted"]
    if count := len(round_.drafted):
        parts = [f"{count} drafted", f"{round_.accepted} accepted", f"draft {milliseconds(round_.draft_s)}"]
    parts.append(f"verify {milliseconds(round_.verify_s)}")
    if round_.width > count + 1:
        parts.append(f"batch of {round_.width}")
    if round_.added is None:
        parts.append("then the grammar permits nothing")
    return f"round {round_.number}: {', '.join(parts)}"


def readings(round_: TracedRound) -> list[str]:
    lines = []
    for one in round_.readings:
        label, took = LABELS[one.drafter], milliseconds(one.seconds)
        gain = f"it may save the time of {one.hoped:.1f} target-only tokens in this answer"
        read = f"{label} catches up on the last {counted(one.tokens, 'token')} in {took}: {gain}"
        lines.append(f"{label} is timed again in {took}, because {one.why}; {gain}" if one.why else read)
    return lines


def explained(round_: TracedRound) -> str:
    text = f"{round_.rule}: a drafted token is accepted if {round_.description}"
    if round_.rule == "residual":
        text += "; otherwise one is drawn from max(p − q, 0)"
    if not round_.lossless:
        text += " (lossy)"
    text += "; q and p are the draft's and the target's probability of it, "
    text += "before sampling" if _unsampled(round_) else "under the sampling settings; percentages are before sampling"
    if round_.penalised:
        text += " and after penalties"
    return text + ("; ✗ is not permitted by the grammar" if round_.grammar else "")


def _unsampled(round_: TracedRound) -> bool:
    """Return whether q and p are shown without sampling settings, because greedy sampling would make them 1 and 0."""
    return not round_.temperature and round_.rule != "residual"


def rows(round_: TracedRound) -> list[TraceRow]:
    """Return a round's drafted tokens in order, then the target's own token."""
    drafted = [_drafted(round_, number, one) for number, one in enumerate(round_.drafted, 1)]
    return drafted if round_.added is None else [*drafted, _added(round_, round_.added)]


def _drafted(round_: TracedRound, number: int, one: DraftedToken) -> TraceRow:
    judged, greedy = one.judged, _unsampled(round_)
    q: float | None = one.q
    if one.draft is None:
        q = one.q if round_.rule == "residual" else None
    elif greedy:
        q = one.draft.probability
    p = None if judged is None else judged.target.probability if greedy else judged.p
    ratio = None if p is None or not q else p / q
    is_own = judged is None or judged.own is None or judged.own.token == one.token
    return TraceRow(
        number=str(number),
        who=one.drafter,
        token=quoted(one.text),
        q=probability(q),
        p=probability(p),
        ratio=probability(ratio),
        rule=compared(one.token, judged, greedy=greedy) if judged else "",
        result=_RESULTS[one.result] if is_own or one.result == "rejected" else "accepted, lossy",
        kind=one.result,
        draft=one.draft.likeliest if one.draft else (),
        target=judged.target.likeliest if judged and one.result == "rejected" else (),
    )


def _added(round_: TracedRound, added: AddedToken) -> TraceRow:
    greedy = _unsampled(round_)
    if added.drawn is not None:
        rule = "from max(p − q, 0)" if added.distribution == "residual" else "drawn from p"
    else:
        rule = _own_choice(added.sum.total if added.sum else 0.0, greedy=greedy, masked=added.masked)
    result = "" if not round_.drafted else "bonus" if added.source == "bonus" else "correction"
    rejected = added.source == "target" and bool(round_.drafted)  # the rejected row already lists the likeliest tokens
    return TraceRow(
        number="+",
        who="target",
        token=quoted(added.text),
        q="–",
        p=probability(added.target.probability if greedy else added.p),
        ratio="–",
        rule=rule,
        result=result if added.emitted else "dropped",
        kind="added",
        target=() if rejected else added.target.likeliest,
    )


def compared(token: int, judged: JudgedToken, *, greedy: bool) -> str:
    """Format the rule's comparison with enough digits to distinguish its two sides."""
    if judged.uniform is not None:
        bound = min(1.0, judged.ratio)
        return _distinct(judged.uniform, "<" if judged.uniform < bound else "≥", bound)
    own = judged.own
    if own is None:
        return "nothing permitted"
    if own.token == token:
        return _own_choice(own.sum.total, greedy=greedy, masked=judged.masked)
    if judged.rank is not None:
        rank, most = judged.rank.rank, judged.rank.most
        return f"rank {rank} {'≤' if rank <= most else '>'} {most}"
    if judged.typical is not None:
        weighed = judged.typical
        sign = ">" if weighed.probability > weighed.bar else "≤"
        return _distinct(weighed.probability, sign, weighed.bar)
    return _below(judged, own, greedy=greedy)


def _own_choice(total: float, *, greedy: bool, masked: bool) -> str:
    if masked:
        return "own, by the grammar"
    return "own choice" if greedy else f"{total:.2f}, own choice"


def _below(judged: JudgedToken, own: OwnChoice, *, greedy: bool) -> str:
    if judged.sum is None:
        return "cut by sampling"
    less, more = judged.sum.total, own.sum.total
    if less == more:
        return "equal: lower id"
    if greedy:
        gap = more - less
        return f"{gap:.2g} logits below{_CHOICE}" if gap < 1 else f"{gap:.2f} logits below{_CHOICE}"
    return _distinct(less, "<", more, 2)


def _distinct(a: float, sign: str, b: float, digits: int = _FEWEST_DIGITS) -> str:
    """Format a comparison of two numbers with enough digits for them to differ, unless they are equal."""
    while f"{a:.{digits}f}" == f"{b:.{digits}f}" and a != b:
        digits += 1
    return f"{a:.{digits}f} {sign} {b:.{digits}f}"


def probability(value: float | None) -> str:
    """Format a probability, or a ratio of two probabilities, in six characters."""
    if value is None:
        return "–"
    if value in (0, 1):
        return f"{value:.0f}"
    if 0.0005 <= value < 99.9995:
        return f"{value:.3f}"
    return f"{value:.0e}" if value < 1 else f"{value:.0f}" if value < 1e6 else f"{value:.0e}"


def percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}" if value >= 0.0005 else "<0.1%"


def quoted(text: str) -> str:
    """Return a token's text in quotes, with unprintable characters escaped as in Python."""
    quote = "'" if '"' in text and "'" not in text else '"'
    return quote + "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text) + quote


def terminal(round_: TracedRound, width: int, likeliest: int) -> Iterator[Text]:
    """Yield a round's lines for a terminal of ``width`` columns, with up to ``likeliest`` likely tokens per row."""
    from rich.text import Text

    ruled = _RULE if width < _WIDE else _RULE + len(_CHOICE)
    wide = max(8, min(24, width - ruled - _RESULT - 3 * _NUMBERS - 16))
    yield Text(heading(round_), style="bold")
    yield from (Text(line, style="dim") for sentence in readings(round_) for line in textwrap.wrap(sentence, width))
    if round_.drafted:
        yield Text(_line(("", "", "token", "q", "p", "p/q", "rule"), wide, ruled).rstrip(), style="dim")
    for row in rows(round_):
        rule = row.rule if ruled > _RULE else row.rule.removesuffix(_CHOICE)
        line = Text(_line((row.number, row.who, row.token, row.q, row.p, row.ratio, rule), wide, ruled))
        line.append(row.result, _STYLES[row.kind])
        if row.kind == "unread":
            line.stylize("dim")
        line.rstrip()
        yield line
        when = "" if _unsampled(round_) else " before sampling"
        for name, found in (("draft's", row.draft), ("target's", row.target)):
            for text in _listed(name + when, found[:likeliest], width):
                yield Text(text, style="dim")


def _line(cells: Sequence[str], wide: int, ruled: int) -> str:
    from rich.text import Text

    number, who, token, *numbers, rule = cells
    fitted = Text(token)
    fitted.truncate(wide, overflow="ellipsis", pad=True)
    return f"{number:>2} {who:<6} {fitted} {' '.join(f'{one:>{_NUMBERS}}' for one in numbers)}  {rule:<{ruled}} "


def _listed(name: str, found: Sequence[LikelyToken], width: int) -> list[str]:
    hard = "\xa0"  # a no-break space
    items = [
        f"{'' if one.permitted else '✗'}{shortened(quoted(one.text), 20)} {percent(one.probability)}".replace(" ", hard)
        for one in found
    ]
    lines = textwrap.wrap(
        f"{' ' * 10}{name}: {', '.join(items)}", width, subsequent_indent=" " * 12, break_on_hyphens=False
    )
    return [line.replace(hard, " ") for line in lines] if found else []


def answer(tokens: Sequence[WrittenToken], tints: Mapping[str, str]) -> Iterator[Text]:
    """Yield the answer's text, with each token styled by its source, and a legend."""
    from rich.text import Text

    text = Text()
    for token in tokens:
        text.append(visible(token.text), tints.get(token.source, ""))
    yield text
    legend = Text("written by: ", style="dim")
    for index, (name, count) in enumerate(written(tokens).items()):
        legend.append(", " * bool(index))
        legend.append(f"{name} {count}", tints.get(name, ""))
    yield legend


def written(tokens: Sequence[WrittenToken]) -> dict[str, int]:
    """Return the number of tokens by source, without sources that have none."""
    counts = {name: sum(token.source == name and token.token >= 0 for token in tokens) for name in WRITERS}
    return {name: count for name, count in counts.items() if count}


def trace_summary(tokens: Sequence[WrittenToken], rounds: int) -> str:
    names = {name: f"the {label}" for name, label in LABELS.items()}
    names |= {"bonus": "the target as a bonus", "target": "the target"}
    shares = [f"{count} by {names[who]}" for who, count in written(tokens).items()]
    return f"{counted(sum(written(tokens).values()), 'token')} in {counted(rounds, 'round')}: {', '.join(shares)}"
