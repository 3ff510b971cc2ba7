"""``ggufspec verify``: the certificate of the pair that ships, and of rules that are broken on purpose."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ggufspec import DecoderOptions, Sampling
from ggufspec.bench.prompts import PROMPTS
from ggufspec.decoding import answer as answer_module
from ggufspec.decoding import decoder as decoder_module
from ggufspec.decoding.penalties import Penalties
from ggufspec.errors import ModelError
from ggufspec.reports import verify as report
from ggufspec.schema.verify import AnswerDifference, CertificateCheck, RankCounts
from ggufspec.verify import certificate
from ggufspec.verify import run as verify
from tests.support.processes import Cli, plain, rest

SHORT = ("--quick", "-q")


# ---- the command


def test_the_pair_that_ships(cli: Cli, target: Path, draft: Path, tmp_path: Path) -> None:
    kept = tmp_path / "certificate.json"
    done = cli("verify", "demo", *SHORT, "--json", "--export-json", kept)
    assert (done.code, done.stderr) == (0, "")
    document = done.document()
    assert document == json.loads(kept.read_text())
    assert next(iter(document)) == "schema"
    assert document["schema"] == "ggufspec/verify@1"
    assert (document["passed"], document["interrupted"]) == (True, False)
    assert document["verdict"].startswith("PASSED: ")
    for role, path in (("target", target), ("draft", draft)):
        (file,) = document["models"][role]["files"]
        assert file == {
            "name": path.name,
            "size_bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        assert document["models"][role]["gpu_layers"] == 0
    assert {"cpu", "gpus", "python", "ggufspec", "llama_cpp_python"} <= set(document["machine"])
    wanted = {"prompts": 2, "max_tokens": 16, "seeds": 1, "threads": 1, "temperature": 0.8, "seed": 0}
    assert {key: document["settings"][key] for key in wanted} == wanted

    checks = {(one["section"], one["drafter"], one["rule"]): one for one in document["checks"]}
    identical = {(section, who, rule) for section in ("strict", "default") for who in DRAFTERS for rule in EXACT}
    drawn = {("distribution", who, "residual") for who in DRAFTERS} | {("distribution", "target-only", "coupled")}
    assert set(checks) == identical | drawn
    for key in identical:
        policies = checks[key]["policies"]
        assert policies in (["adaptive 15", "fixed 4"], ["fixed 4"])  # whether a draft pays is the machine's to say
        assert checks[key]["answers"] == 2 * len(policies)
        assert 16 * len(policies) <= checks[key]["tokens"] <= 32 * len(policies)
        assert key[0] == "default" or checks[key]["differences"] == []
    for key in drawn:
        assert checks[key]["p_value"] >= checks[key]["threshold"] == 1e-4 / 4
        names = [place["name"] for place in checks[key]["places"]]
        assert names[:4] == ["likeliest", "second", "others", "favoured"]
        assert all(0 <= place["observed"] <= place["tokens"] for place in checks[key]["places"])
    assert sum(one["accepted"] for one in checks.values()) > 50  # drafts were used


DRAFTERS, EXACT = ("draft", "lookup", "both"), ("greedy", "coupled")


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.full)])
def test_in_a_terminal(cli: Cli, columns: int) -> None:
    child = cli.terminal("verify", "demo", *SHORT, "--drafter", "both", columns=columns)
    lines = plain(rest(child)).splitlines()
    assert child.exitstatus == 0
    assert max(map(len, lines)) <= columns
    text = "\n".join(lines)
    assert text.count("PASS ") == 6
    assert "FAIL" not in text
    assert "2 prompts × 16 tokens, greedy and temperature 0.8, 1 seed, 1 thread" in text
    assert re.search(r"target demo-target-F16.gguf .*\n +SHA-256 [0-9a-f]{64}\n", text.replace("\n\n", "\n"))
    for title in report.TITLES.values():
        assert title in text
    assert " p = " in text
    assert "PASSED: 6 checks" in text


def test_without_a_draft_the_lookup_is_verified(cli: Cli, target: Path) -> None:
    done = cli("verify", "-m", target, *SHORT, "--no-hash", "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert document["models"]["draft"] is None
    assert document["models"]["target"]["files"][0]["sha256"] is None
    assert {one["drafter"] for one in document["checks"]} == {"lookup", "target-only"}


def test_a_head_is_verified_by_its_name(cli: Cli, target: Path) -> None:
    """``draft`` is the draft file, whatever it is; its own probabilities are held against the target's, too."""
    done = cli("verify", "demo-eagle3", *SHORT, "--drafter", "draft", "--drafter", "both", "--json")
    assert done.code == 0, done.stderr
    document = done.document()
    assert {one["drafter"] for one in document["checks"]} == {"eagle3", "eagle3+lookup", "target-only"}
    assert {one["status"] for one in document["checks"]} == {"passed"}
    (file,) = document["models"]["draft"]["files"]
    head = target.parent / "demo-eagle3-Q8_0.gguf"
    assert (file["name"], file["sha256"]) == (head.name, hashlib.sha256(head.read_bytes()).hexdigest())
    drawn = [one for one in document["checks"] if one["section"] == "distribution"]
    assert all("favoured" in [place["name"] for place in one["places"]] for one in drawn)
    assert sum(one["accepted"] for one in document["checks"]) > 20


def test_one_rule_alone(cli: Cli) -> None:
    document = cli("verify", *SHORT, "--no-hash", "--accept", "residual", "--drafter", "draft", "--json").document()
    assert [(one["section"], one["drafter"]) for one in document["checks"]] == [("distribution", "draft")]
    document = cli("verify", *SHORT, "--no-hash", "--accept", "exact", "--drafter", "draft", "--json").document()
    assert [one["rule"] for one in document["checks"]] == ["greedy", "coupled", "greedy", "coupled", "coupled"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--accept", "top-k:3"), 2, "--accept top-k:3 is lossy: there is nothing to certify"),
        (("--accept", "typical:0.1"), 2, "--accept typical:0.1 is lossy: there is nothing to certify"),
        (("--accept", "nonsense"), 2, "nonsense"),
        (("--temp", "0"), 2, "--temp 0.0 is greedy"),
        (("--prompts", "9"), 2, "--prompt-count 9: there are 8 bundled prompts"),
        (("--drafter", "nobody"), 2, "nobody"),
        (("--export-json", "/nowhere/x.json"), 1, "/nowhere/x.json cannot be written"),
        (("-md", "/nowhere.gguf"), 1, "/nowhere.gguf does not exist"),
    ],
)
def test_what_is_refused_before_anything_runs(cli: Cli, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = cli("verify", *SHORT, *arguments, "--json")
    assert done.code == code
    error = done.document()
    assert error["schema"] == "ggufspec/error@1"
    assert message in error["error"]
    assert error["hint"]


def test_a_drafter_that_needs_a_draft_is_refused_without_one(cli: Cli, target: Path) -> None:
    done = cli("verify", "-m", target, "--drafter", "both", *SHORT)
    assert done.code == 2
    assert "the pair has no draft" in done.stderr


def test_ctrl_c_shows_what_was_checked(cli: Cli, tmp_path: Path) -> None:
    kept = tmp_path / "part.json"
    many = ("--quick", "--prompt-count", "1", "-n", "2", "--seeds", "40", "--no-hash")
    child = cli.terminal("verify", "demo", *many, "--export-json", str(kept))
    child.expect("strict: lookup")  # the checks of the draft are complete
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "No certificate: interrupted after 2 checks" in left
    assert "error: interrupted" not in left
    assert "interrupted; the results so far are shown" in left
    assert "Traceback" not in left
    document = json.loads(kept.read_text())
    assert (document["interrupted"], document["passed"]) == (True, False)
    assert [one["rule"] for one in document["checks"]] == ["greedy", "coupled"]


def test_ctrl_c_before_anything_was_checked(cli: Cli) -> None:
    child = cli.terminal("verify", "demo", "--seeds", "20")
    child.expect("strict: target-only")
    child.sendintr()
    left = plain(rest(child))
    assert child.exitstatus == 130
    assert "interrupted before anything was checked" in left
    assert "PASS" not in left


# ---- the job


SMALL = ("draft",)


def spec(target: Path, draft: Path | None, **changes: Any) -> certificate.CertificateJob:
    base = certificate.CertificateJob(
        target,
        draft,
        DecoderOptions(ctx_size=512, threads=1),
        SMALL,
        ("exact", "residual"),
        tuple(prompt.text for prompt in PROMPTS[1:3]),
        16,
        Sampling(temperature=0.8),
        1,
        certificate.TWO_POLICIES,
    )
    return replace(base, **changes)


def job(asked: certificate.CertificateJob) -> tuple[dict[tuple[str, str], CertificateCheck], list[dict[str, Any]]]:
    """Checks by section and rule, and the events, of a job in this process."""
    events: list[dict[str, Any]] = []
    result = verify.run(asked, events.append, threading.Event())
    assert result.finished
    return {(one.section, one.rule): one for one in result.checks}, events


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify, "cache_folder", lambda: tmp_path)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """broken(change): every rule that a decoder makes is changed first."""
    real = answer_module.make_rule

    def use(change: Callable[[Any], None]) -> None:
        def make(*arguments: Any, **more: Any) -> Any:
            rule = real(*arguments, **more)
            change(rule)
            return rule

        monkeypatch.setattr(answer_module, "make_rule", make)

    return use


def test_progress_comes_to_its_total(target: Path, draft: Path) -> None:
    checks, events = job(spec(target, draft))
    progress = [event for event in events if event["event"] == "progress"]
    assert [event["done"] for event in progress] == sorted(event["done"] for event in progress)
    assert progress[-1]["done"] == progress[-1]["total"]
    assert len([event for event in events if event["event"] == "check"]) == len(checks) == 6
    assert {one.status for one in checks.values()} == {"passed"}


@pytest.mark.full
def test_what_was_drawn_under_penalties_is_held_against_penalised_rows(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones shift nothing far enough to be seen in so few tokens; these do."""
    some = spec(
        target,
        draft,
        sampling=Sampling(0.8, presence_penalty=4.0, repeat_last_n=-1),
        max_tokens=48,
        rules=("residual",),
        seeds=4,  # most answers end at once, penalised so: before anything is drafted
    )
    checks, _ = job(some)
    assert {one.status for one in checks.values()} == {"passed"}
    monkeypatch.setattr(verify, "Penalties", lambda _: Penalties(Sampling(repeat_last_n=0)))
    checks, _ = job(some)
    assert checks["distribution", "residual"].status == "failed"


def careless(rule: Any) -> None:
    """Keep every drafted token now and then."""
    verify_ = rule.verify

    def wrong(rows: Any, proposals: Any, position: int) -> Any:
        verdict = verify_(rows, proposals, position)
        return replace(verdict, accepted=len(proposals)) if position % 7 == 0 else verdict

    rule.verify = wrong


def test_a_rule_that_keeps_wrong_tokens_fails(target: Path, draft: Path, broken: Any) -> None:
    broken(careless)
    checks, _ = job(spec(target, draft, rules=("exact",)))
    for section in ("strict", "default"):
        greedy, coupled = checks[section, "greedy"], checks[section, "coupled"]
        assert "failed" in (greedy.status, coupled.status)
        wrong = [one for check in (greedy, coupled) for one in check.differences if not one.explained]
        assert wrong
        if section == "default":
            assert all(one.margin is None or one.margin > one.noise for one in wrong)
    assert checks["distribution", "coupled"].status == "passed"  # target-only drafts nothing
    assert not certificate.certificate_verdict(list(checks.values()))[0]


def accept_all(rule: Any) -> None:
    verify_ = rule.verify
    rule.verify = lambda rows, proposals, position: replace(verify_(rows, proposals, position), accepted=len(proposals))


def resample_from_the_target(rule: Any) -> None:
    verify_ = rule.verify

    def wrong(rows: Any, proposals: Any, position: int) -> Any:
        verdict = verify_(rows, proposals, position)
        again = verify_(rows[verdict.accepted : verdict.accepted + 1], (), position)
        return replace(verdict, token=again.token)

    rule.verify = wrong


@pytest.mark.parametrize(
    ("drafter", "bug", "seeds"),
    [
        ("draft", accept_all, 2),
        pytest.param("draft", resample_from_the_target, 4, marks=pytest.mark.full),  # 2: p = 1.5e-6
        pytest.param("eagle3", accept_all, 2, marks=pytest.mark.full),
        pytest.param("eagle3", resample_from_the_target, 6, marks=pytest.mark.full),  # a better drafter hides it longer
    ],
)
def test_a_residual_rule_with_a_known_bug_fails(
    target: Path, draft: Path, broken: Any, drafter: str, bug: Any, seeds: int
) -> None:
    """Of one drafter; two seeds are what the command asks for by default."""
    asked = spec(
        target,
        draft if drafter == "draft" else target.parent / "demo-eagle3-Q8_0.gguf",
        drafters=(drafter,),
        options=DecoderOptions(ctx_size=512, threads=1, drafters=(drafter,)),
        rules=("residual",),
        prompts=tuple(prompt.text for prompt in PROMPTS),
        max_tokens=48,
        seeds=seeds,
    )
    checks, _ = job(asked)
    assert checks["distribution", "residual"].status == "passed"
    broken(bug)
    checks, _ = job(asked)
    assert checks["distribution", "residual"].status == "failed"
    assert checks["distribution", "residual"].p_value < 1e-6


def test_a_device_that_cannot_keep_strict_mode(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoder_module.PairLatency

    def pace(model: Any, draft_model: Any, options: DecoderOptions, *more: Any) -> Any:
        if options.strict:
            raise ModelError("strict mode is impossible on this device: a reason", "a hint")
        return real(model, draft_model, options, *more)

    monkeypatch.setattr(decoder_module, "PairLatency", pace)
    checks, _ = job(spec(target, draft, rules=("exact",)))
    strict = checks["strict", "exact"]
    assert (strict.status, strict.drafter, strict.answers) == ("not possible", "all", 0)
    assert strict.reason == "strict mode is impossible on this device: a reason"
    passed, text = certificate.certificate_verdict(list(checks.values()))
    assert passed
    assert "the certificate rests on default mode" in text


def test_where_nothing_can_be_drafted_nothing_is_claimed(target: Path, draft: Path) -> None:
    """An answer of one token leaves no room for a draft."""
    result = verify.run(spec(target, draft, rules=("exact",), max_tokens=1), lambda event: None, threading.Event())
    claims = {(one.section, one.drafter): one.status for one in result.checks}
    assert claims == {
        ("strict", "draft"): "not possible",
        ("default", "draft"): "not possible",
        ("distribution", "target-only"): "passed",
    }
    assert "strict: draft, adaptive 15: not one token was drafted, so it is not counted" in result.notes


def test_another_failure_of_a_model_is_no_excuse(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        job(spec(target, tmp_path / "none.gguf"))


def test_a_stop_leaves_what_is_complete(target: Path, draft: Path) -> None:
    stopping = threading.Event()
    seen = []

    def emit(event: dict[str, Any]) -> None:
        seen.append(event["event"])
        if event["event"] == "check":
            stopping.set()

    result = verify.run(spec(target, draft), emit, stopping)
    assert not result.finished
    assert [check.section for check in result.checks] == ["strict", "strict"]


# ---- for people


def test_what_is_said_of_a_failure() -> None:
    wrong = tuple(AnswerDifference(i, 7, "fixed 4", 11, 402, None if i else 511) for i in range(5))
    lines = report.details(CertificateCheck("strict", "both", "coupled", "failed", differences=wrong))
    assert lines[0] == "both, coupled: prompt 1, fixed 4, seed 7: token 12 is 511, not 402"
    assert lines[1] == "both, coupled: prompt 2, fixed 4, seed 7: token 12 is the end, not 402"
    assert lines[3:] == ["both, coupled: and 2 more"]
    far = AnswerDifference(0, None, "fixed 1", 0, 1, 2, 0.5, 0.01)
    assert report.details(CertificateCheck("default", "draft", "greedy", "failed", differences=(far,))) == [
        "draft, greedy: prompt 1, fixed 1: token 1 is 2, not 1; margin 0.5, noise 0.01"
    ]
    assert report.remark(CertificateCheck("default", "draft", "greedy", "failed", differences=(far,))) == "1 wrong"


def test_what_is_said_of_a_distribution() -> None:
    place = RankCounts("favoured", 1442, 900, 650.25, 1e-9)
    check = CertificateCheck(
        "distribution", "draft", "residual", "failed", places=(place,), p_value=4e-9, threshold=2.5e-5
    )
    assert report.remark(check) == "p = 4e-09"
    assert report.details(check) == [
        "draft, residual: p = 4e-09 is below 2.5e-05",
        "  favoured: 900 of 1,442 tokens, 650.2 expected",
    ]
    assert report.details(replace(check, status="passed")) == []


def test_what_is_said_of_what_was_not_possible() -> None:
    impossible = CertificateCheck("strict", "all", "exact", "not possible", reason="this device cannot")
    assert (report.remark(impossible), report.details(impossible)) == ("not possible", ["this device cannot"])
    idle = CertificateCheck("strict", "lookup", "greedy", "not possible", reason="not one token was drafted")
    assert (report.remark(idle), report.details(idle)) == ("not one token was drafted", [])
