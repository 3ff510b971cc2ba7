"""Threads beside other programs: the arithmetic, the following, and a real decoder beside real busy programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ggufspec.decoding.decoder import SpeculativeDecoder
from ggufspec.decoding.options import DecoderOptions
from ggufspec.decoding.threads import Threads, is_due, threads_left
from ggufspec.hardware import host
from ggufspec.hardware.host import CpuUse


class Machine:
    """A clock and counters: ``others`` CPUs are used by other programs as time goes by."""

    def __init__(self) -> None:
        self.now = self.all_s = self.own_s = 0.0
        self.others = 0.0
        self.reads = 0

    def pass_time(self, seconds: float, *, own: float = 2.0) -> None:
        self.now += seconds
        self.own_s += own * seconds
        self.all_s += (own + self.others) * seconds

    def usage(self) -> CpuUse:
        self.reads += 1
        return CpuUse(self.now, self.all_s, self.own_s)

    def threads(self, fixed: int = 0, *, cores: int = 2, cpus: int = 2) -> Threads:
        return Threads(fixed, cores=cores, cpus=cpus, usage=self.usage, clock=lambda: self.now, sleep=self.pass_time)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.mark.parametrize(
    ("cores", "cpus", "others", "left"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.45, 2),
        (2, 2, 0.67, 1),
        (2, 2, 1.0, 1),
        (2, 2, 2.0, 1),
        (8, 8, 1.0, 7),
        (8, 8, 12.0, 1),
        (8, 16, 4.0, 8),  # two logical CPUs a core: the others have the second ones
        (8, 16, 12.0, 4),
        (1, 1, 1.0, 1),
        (2, 64, 40.0, 2),  # a container's share of a large machine
    ],
)
def test_threads_get_the_cpus_that_are_left(cores: int, cpus: int, others: float, left: int) -> None:
    assert threads_left(cores, cpus, others) == left


def test_an_idle_machine_gives_all_its_cores(machine: Machine) -> None:
    threads = machine.threads()
    assert threads.start() == 2
    for _ in range(100):
        machine.pass_time(0.1)
        assert not threads.look()
    assert (threads.count, threads.lowered, threads.changed, threads.note) == (2, False, False, "")


def test_a_busy_program_at_the_start_takes_its_cpu(machine: Machine) -> None:
    machine.others = 1.0
    threads = machine.threads()
    assert threads.start() == 1
    assert threads.lowered
    assert not threads.changed  # what is measured from now on belongs to one thread
    assert "fewer than 2 threads" in threads.note


def test_threads_follow_what_comes_and_goes(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    machine.others = 1.0
    machine.pass_time(0.6, own=1.0)
    assert threads.look()
    assert threads.count == 1
    machine.pass_time(0.6, own=1.0)
    assert not threads.look()
    machine.others = 0.0
    machine.pass_time(0.6, own=1.0)
    assert threads.look()
    assert (threads.count, threads.changed) == (2, True)


def test_counters_are_read_twice_a_second(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    before = machine.reads
    for _ in range(1000):
        machine.pass_time(0.01)
        threads.look()
    assert machine.reads - before <= 20


def test_what_was_used_while_nobody_asked_says_nothing(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    machine.others = 2.0
    machine.pass_time(60.0, own=0.0)  # a chat whose user thinks, beside a compiler that has ended since
    machine.others = 0.0
    threads.resume()
    assert not threads.look()
    machine.pass_time(0.6)
    assert not threads.look()
    assert threads.count == 2


def test_what_ended_with_the_question_costs_the_answer_no_thread(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    machine.others = 2.0  # the tests that an agent runs before it asks again
    machine.pass_time(5.0)
    assert threads.look()
    assert threads.count == 1
    machine.others = 0.0
    asked_s = machine.now
    assert threads.begin()
    assert threads.count == 2
    assert machine.now - asked_s < 0.2
    machine.others = 2.0
    machine.pass_time(5.0)
    assert threads.look()
    assert not threads.begin()  # still busy
    assert threads.count == 1


def test_no_answer_waits_for_a_look_on_an_idle_machine(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    asked_s = machine.now
    assert not threads.begin()
    assert machine.now == asked_s


def test_a_model_whose_rounds_take_long_follows_all_the_same(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    machine.others = 1.0
    machine.pass_time(7.0, own=1.0)  # one round
    assert threads.look()
    assert threads.count == 1
    machine.others = 0.0
    machine.pass_time(7.0, own=1.0)
    assert threads.look()
    assert threads.count == 2


def test_an_answer_that_follows_at_once_goes_on_counting(machine: Machine) -> None:
    threads = machine.threads()
    threads.start()
    machine.others = 1.0
    machine.pass_time(0.6, own=1.0)
    threads.resume()
    assert threads.look()
    assert threads.count == 1


def test_a_number_of_threads_that_was_given_stays(machine: Machine) -> None:
    machine.others = 2.0
    threads = machine.threads(fixed=2)
    assert threads.start() == 2
    assert threads.quiet  # nothing was seen yet
    machine.pass_time(5.0)
    assert not threads.look()
    assert threads.count == 2
    assert not threads.quiet
    machine.others = 0.0
    machine.pass_time(0.6)
    assert not threads.look()
    assert threads.quiet


def test_the_systems_own_counters_see_a_busy_program() -> None:
    with busy_programs(1):
        assert host.others_cpus(1.0) > 0.3


@pytest.mark.skipif(host.physical_cores() < 2, reason="one core leaves nothing to choose")
def test_a_decoder_beside_busy_programs_leaves_them_their_cpus(target: Path) -> None:
    with busy_programs(host.usable_cpus()), SpeculativeDecoder(target, None, DecoderOptions(ctx_size=512)) as decoder:
        text = "".join(emitted.text for emitted in decoder.generate("import os", max_tokens=16))
        assert text
        assert decoder.options.threads < host.physical_cores()
        assert any("other programs" in note for note in decoder.notes)


@pytest.mark.parametrize(
    "options",
    [
        DecoderOptions(ctx_size=512, threads=1),
        pytest.param(DecoderOptions(ctx_size=512, strict=True), marks=pytest.mark.full),
    ],
)
def test_given_threads_and_strict_mode_keep_theirs(target: Path, options: DecoderOptions) -> None:
    with busy_programs(1), SpeculativeDecoder(target, None, options) as decoder:
        assert decoder.options.threads == (options.threads or host.physical_cores())


class busy_programs:  # noqa: N801 - reads like a function
    """Programs that do nothing but compute, while the block runs."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self.programs = [
            subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
            for _ in range(self.count)
        ]
        for program in self.programs:
            assert program.stdout is not None
            program.stdout.readline()  # it runs now

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.kill()
            program.communicate()


def test_the_note_is_due_once_a_day(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine.others = 1.0
    threads = machine.threads()
    threads.start()
    assert is_due(threads.note)
    assert not is_due(threads.note)
    assert not is_due("batches were timed while other programs used 1.0 CPUs: drafting begins with a rough guess")
    assert is_due("another note")
    assert is_due("another note")
